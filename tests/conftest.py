"""What all tests share: own run folders are recognized by a key of the test session, not by that of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _key_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("HANSA_KEY")
    os.environ["HANSA_KEY"] = str(tmp_path_factory.mktemp("key") / "trust.key")
    yield
    if before is None:
        del os.environ["HANSA_KEY"]
    else:
        os.environ["HANSA_KEY"] = before
