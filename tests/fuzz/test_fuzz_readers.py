"""The short form of the readers' fuzzing; ``make fuzz`` runs the long one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuzz.fuzz_readers import Target, check, run, targets
from hansa.core.errors import HansaError

FILES = ("cifar", "idx", "idx.gz", "leaf", "npz", "shakespeare", "partition")


def test_damaged_files_are_read_or_refused_in_a_sentence() -> None:
    outcomes = run(1800, seed=1, only=FILES)
    assert all(sum(counts.values()) >= 190 for counts in outcomes.values())
    assert all(counts["refused"] > 100 for counts in outcomes.values())
    assert sum(counts["read"] for counts in outcomes.values()) > 20  # damage that leaves a proper file


def test_damaged_configurations_and_changes_are_read_or_refused_in_a_sentence() -> None:
    outcomes = run(600, seed=1, only=("yaml", "change"))
    assert all(counts["refused"] > 200 and counts["read"] > 0 for counts in outcomes.values())


def test_damaged_command_lines_end_in_a_sentence() -> None:
    assert run(40, seed=1, only=("command",))["command"]["refused"] > 20


def test_damaged_and_forged_run_folders_end_in_a_sentence() -> None:
    counts = run(240, seed=1, only=("folder",))["folder"]
    assert counts["refused"] > 40
    assert counts["read"] > 40


@pytest.mark.parametrize("name", targets())
def test_undamaged_inputs_reach_the_reader(name: str, tmp_path: Path) -> None:
    target = targets()[name]
    outcomes = [check(target, tmp_path, data, watched=True) for data in target.corpus]
    assert "read" in outcomes


def _raises(error: Exception) -> Target:
    def read(home: Path, data: bytes) -> None:
        raise error

    return Target((b"",), read)


def test_the_harness_notices_what_may_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        check(_raises(KeyError("x")), tmp_path, b"")
    with pytest.raises(AssertionError, match="a message of 5000 characters"):
        check(_raises(HansaError("x" * 5000)), tmp_path, b"")
    with pytest.raises(UnicodeEncodeError):
        check(_raises(HansaError("\ud800")), tmp_path, b"")
    with pytest.raises(AssertionError, match="bytes"):
        check(Target((b"",), lambda home, data: bytearray(1 << 27)), tmp_path, b"", watched=True)
    monkeypatch.setattr("fuzz.fuzz_readers.SECONDS", 0.01)
    with pytest.raises(AssertionError, match="seconds"):
        check(Target((b"",), lambda home, data: _work(0.05)), tmp_path, b"")


def _work(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
