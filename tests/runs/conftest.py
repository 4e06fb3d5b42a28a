"""Tests of runs do not wait for the disk, which would be most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torture.disks import Hasty, use_disk


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    with use_disk(Hasty()):
        yield
