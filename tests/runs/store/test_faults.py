"""The short forms of the torture: every call of every case fails once, the power goes before each, and damage is
everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from torture import corruption, faults


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_old_or_new_is_whole_whatever_fails(case: faults.Case, tmp_path: Path) -> None:
    assert faults.try_case(case, tmp_path, cuts=1) > 5


def test_a_log_cut_anywhere_is_the_round_before_or_the_round(tmp_path: Path) -> None:
    assert faults.cut_logs(tmp_path, 25) == 25


def test_all_damage_is_named_or_changes_nothing_and_runs_go_on_exactly(tmp_path: Path) -> None:
    seen = corruption.run(160, tmp_path)
    assert sum(seen.values()) == 176
    for kind in corruption.KINDS:
        if kind not in ("bit flip", "grown"):
            assert seen[f"run.db, {kind}: named"] + seen[f"run.db, {kind}: read as another record"] == 10
            assert seen[f"run.rows, {kind}: named"] == 10
    assert seen["went on, exactly"] >= 4
