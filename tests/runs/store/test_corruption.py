"""The short form of the torture: damage of every kind, everywhere."""

from __future__ import annotations

from pathlib import Path

from torture import corruption


def test_all_damage_is_named_or_changes_nothing_and_runs_go_on_exactly(tmp_path: Path) -> None:
    seen = corruption.run(160, tmp_path)
    assert sum(seen.values()) == 176
    for kind in corruption.KINDS:
        if kind not in ("bit flip", "grown"):
            assert seen[f"run.db, {kind}: named"] + seen[f"run.db, {kind}: read as another record"] == 10
            assert seen[f"run.rows, {kind}: named"] == 10
    assert seen["went on, exactly"] >= 4
