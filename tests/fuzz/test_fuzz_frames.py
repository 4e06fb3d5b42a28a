"""The short form of the frames' fuzzing; ``make fuzz`` runs the long one."""

from __future__ import annotations

import pytest

from fuzz import fuzz_frames
from fuzz.fuzz_frames import check, places, run
from hansa.rounds.messages import Report


def test_six_thousand_damaged_frames_are_read_or_refused_in_a_sentence() -> None:
    outcomes = run(6000, seed=1)
    assert outcomes["read"] > 100  # damage that leaves a proper message
    for reason in ("truncated", "malformed", "damaged", "version", "inflated"):
        assert outcomes[f"refused: {reason}"] > 5, reason
    for reason in ("clients", "model", "round"):
        assert outcomes[f"read, refused: {reason}"] > 1, reason
    assert outcomes["read, refused by the server"] > 20


def test_undamaged_frames_are_taken() -> None:
    for place in places():
        kinds = [kind for kind, _ in place.corpus]
        assert {"order", "orders", "report", "reports", "exam", "marks"} <= set(kinds)
        outcomes = {
            check(place, kind, data, watched=True) for kind, data in place.corpus if kind in ("order", "report")
        }
        assert outcomes == {"read"}
        assert "read" in {check(place, kind, data) for kind, data in place.corpus if kind == "orders"}
        assert "read" in {check(place, kind, data) for kind, data in place.corpus if kind == "exam"}


def test_the_harness_notices_what_may_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = places()[0]
    data = next(data for kind, data in place.corpus if kind == "report")

    def careless(frame: bytes, limit: int | None = None) -> Report:
        raise KeyError("head")

    monkeypatch.setitem(fuzz_frames.READERS, "report", careless)
    with pytest.raises(KeyError):
        check(place, "report", data)
    monkeypatch.undo()
    monkeypatch.setattr(fuzz_frames, "MEMORY", -40 * len(data))
    with pytest.raises(AssertionError, match="bytes taken"):
        check(place, "report", data, watched=True)
    monkeypatch.undo()
    monkeypatch.setattr(fuzz_frames, "SECONDS", 0.0)
    with pytest.raises(AssertionError, match="seconds of processor time"):
        check(place, "report", data)
