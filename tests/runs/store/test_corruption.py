"""The short form of the torture: damage of every kind, everywhere."""

from __future__ import annotations

from pathlib import Path

from torture import corruption


def test_all_damage_is_noticed_and_named_and_no_row_is_reset(tmp_path: Path) -> None:
    noticed = corruption.run(tmp_path, count=240)
    assert sum(noticed.values()) == 240
    assert set(noticed) == {f"{place}: {kind}" for place in corruption.PLACES for kind in corruption.KINDS}
