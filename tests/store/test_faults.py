"""The short form of the torture: every call of every case fails once, and the power goes before each."""

from __future__ import annotations

from pathlib import Path

import pytest

from hansa.store import index
from torture import faults


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_old_or_new_is_whole_whatever_fails(case: faults.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LOG", 2)  # so that a short history folds its log
    assert faults.run(case, tmp_path, cuts=1) > 20
