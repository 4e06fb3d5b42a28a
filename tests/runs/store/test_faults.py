"""The short form of the torture: every call of every case fails once, and the power goes before each."""

from __future__ import annotations

from pathlib import Path

import pytest

from torture import faults


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_old_or_new_is_whole_whatever_fails(case: faults.Case, tmp_path: Path) -> None:
    assert faults.try_case(case, tmp_path, cuts=1) > 5


def test_a_log_cut_anywhere_is_the_round_before_or_the_round(tmp_path: Path) -> None:
    assert faults.cut_logs(tmp_path, 25) == 25
