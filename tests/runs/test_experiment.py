"""A run that died anywhere goes on to the result of one that did not. `torture.kill` has the long form."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest

import hansa
import warm
from hansa.config import from_preset
from hansa.runs.experiment import open_run
from hansa.runs.folder import ENVIRONMENT, LOCK, NAMES, RunFolder
from hansa.runs.store import io
from torture.disks import Counting, Dead, Dying, remembered_locks, use_disk
from torture.kill import fingerprint

ROUNDS = 4
COMMON = ("data.name=synthetic", "data.clients=6", f"rounds={ROUNDS}", "local.steps=2", "workers=1")
HALF = "sample={participation: 0.5}"
CASES = {
    "fedcams, two-way": ("fedcams", HALF, "compress.two_way=true", "checkpoint.every=1"),
    "scaffold, a checkpoint every other round": ("scaffold", HALF, "checkpoint.every=2", "checkpoint.keep=1"),
    "fedaware, clients lost": ("fedaware", HALF, "checkpoint.every=1", "faults={before: 0.3, nan: 0.2}"),
}


@pytest.fixture
def let_go():
    with remembered_locks() as release:
        yield release


def go_on(config, folder):
    experiment = open_run(None, folder) if RunFolder(folder).exists else open_run(config, folder)
    assert experiment.execute()["status"] == "finished"


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_dies_before_any_call_to_the_disk_goes_on_to_the_same_result(case, tmp_path, let_go):
    preset, *words = CASES[case]
    config = from_preset(preset, [*COMMON, *words])
    with use_disk(Counting()) as counted:
        go_on(config, tmp_path / "whole")
    expected, calls = fingerprint(tmp_path / "whole", ROUNDS), len(counted.calls)  # type: ignore[attr-defined]
    assert calls > 30
    draw = hansa.Key(0).child(case).numpy()
    died = 0
    for trial, at in enumerate(sorted(draw.choice(calls, size=12, replace=False).tolist())):
        folder = tmp_path / f"died at {at}"
        for death in (at, int(draw.integers(calls)))[: 1 + trial % 2]:  # some die again on the way
            with use_disk(Dying(death)):
                try:
                    go_on(config, folder)
                except Dead:
                    died += 1
            let_go()
        go_on(config, folder)
        assert fingerprint(folder, ROUNDS) == expected, f"died at call {at}, {counted.calls[at]}"  # type: ignore[attr-defined]
    assert died >= 12


@pytest.mark.parametrize(
    ("form", "count", "words"),
    [
        ("kill", 2, "equal to the unkilled run"),
        ("folders", 4, "started"),
        ("search", 2, "equal to the unbroken search"),
    ],
)
def test_the_short_form_of_the_torture_holds(form, count, words):
    command = [sys.executable, "-m", "torture", form, "--count", str(count)]
    found = warm.run(command, cwd=Path(__file__).parents[1], text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    assert words in found.stdout


def test_a_run_killed_as_it_began_is_begun_anew_and_nothing_else_is_cleared_away(tmp_path, let_go):
    config = from_preset("fedavg", [*COMMON, "rounds=1"])
    barely = tmp_path / "barely"
    with use_disk(Dying(12)), pytest.raises(Dead):  # the environment is written, the configuration is not
        open_run(config, barely)
    let_go()
    assert {path.name for path in barely.iterdir()} <= {LOCK, *NAMES, *(name + io.TEMPORARY_SUFFIX for name in NAMES)}
    assert (barely / ENVIRONMENT).exists()
    assert not RunFolder(barely).exists
    assert open_run(config, barely).execute()["rounds"] == 1
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.safetensors").write_bytes(b"years of work")
    with pytest.raises(hansa.HansaError, match="not empty, and not a run folder"):
        open_run(config, theirs, if_exists="replace")
    assert (theirs / "model.safetensors").read_bytes() == b"years of work"


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_finished_run_frees_its_data_without_a_search_for_garbage(native, tmp_path, monkeypatch):
    """A study runs one after the other in this process: the data of each must go with it, not some runs later."""
    monkeypatch.setenv("HANSA_NATIVE", native)
    config = from_preset("fedavg", ["rounds=2", "data.name=synthetic", "data.clients=4", "model.name=mlp", "workers=1"])
    gc.collect()
    gc.disable()
    try:
        experiment = open_run(config, tmp_path / "run")
        rows = weakref.ref(experiment.run.task.data.inputs)
        experiment.execute([])
        del experiment
        assert rows() is None
    finally:
        gc.enable()
