"""The short form of the torture: every call of every case fails once, and the power goes before each."""

from __future__ import annotations

from pathlib import Path

import pytest

from torture import faults


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_old_or_new_is_whole_whatever_fails(case: faults.Case, tmp_path: Path) -> None:
    assert faults.run(case, tmp_path, cuts=1) > 20
