"""``--parallel``: every command runs side by side; runs that are interrupted and killed are continued."""

from __future__ import annotations

import csv
import hashlib
import os
import signal
import sys
import time

import pytest

from cli.conftest import SLOW, wait_for
from hansa.runs.experiment import Experiment
from hansa.runs.folder import RunFolder
from hansa.study import parallel as scheduler

CONFIG = """\
rounds: 120
data: {name: synthetic, clients: 4, options: {largest: 60}}
model: {factory: "slow_model:Net"}
local: {lr: 0.05, steps: 1, batch_size: 10}
evaluate: {every: 40}
checkpoint: {every: 10}
"""


def test_an_interrupted_and_a_killed_study_are_continued(cli, process, folder, monkeypatch):
    (folder / "slow_model.py").write_text(SLOW)
    (folder / "slow.yaml").write_text(CONFIG)
    words = ["sweep", "slow.yaml", "local.lr=0.05,0.2", "-q"]

    def recorded():
        logs = sorted(folder.glob("out/*/metrics.jsonl"))
        return [len(log.read_text().splitlines()) for log in logs]

    monkeypatch.setenv("SLOW", "0.05")
    first = process(*words, "-o", "out", "--parallel", 2)
    wait_for(lambda: len(recorded()) == 2 and min(recorded()) >= 1, first)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the command and its workers
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130, errors
    runs = [RunFolder(path.parent) for path in sorted(folder.glob("out/*/metrics.jsonl"))]
    assert [run.summary["status"] for run in runs] == ["stopped", "stopped"]
    before = recorded()
    second = process(*words, "-o", "out", "--parallel", 2)
    wait_for(lambda: all(now > then for now, then in zip(recorded(), before, strict=True)), second)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    monkeypatch.delenv("SLOW")
    for _ in range(100):  # its worker ends with it, in a moment
        finished = cli(*words, "-o", "out")
        if finished.exit_code == 0:
            break
        assert "in use" in finished.stderr, finished.stderr
        time.sleep(0.1)
    cli.ok(*words, "-o", "whole", "--parallel", 1)
    tables = [list(csv.DictReader((folder / out / "runs.csv").read_text().splitlines())) for out in ("out", "whole")]
    assert [row | {"wall_seconds": ""} for row in tables[0]] == [row | {"wall_seconds": ""} for row in tables[1]]


@pytest.fixture
def meet(tmp_path_factory, monkeypatch):
    """From its call on, every run waits until two processes have begun one; returns who executed which folder."""
    if sys.platform != "linux":
        pytest.skip("processes are forked on Linux only")
    place, whole = tmp_path_factory.mktemp("meeting"), Experiment.execute

    def execute(self, *arguments, **options):
        with open(place / str(os.getpid()), "a") as executed:
            executed.write(f"{self.folder}\n")
        end = time.monotonic() + 60
        while len(list(place.iterdir())) < 2:
            assert time.monotonic() < end, "no other process has begun a run"
            time.sleep(0.01)
        return whole(self, *arguments, **options)

    def begin():
        monkeypatch.setattr(Experiment, "execute", execute)
        monkeypatch.setattr(scheduler, "can_fork", lambda: True)  # the test runner may have threads
        monkeypatch.setattr(scheduler, "available_cores", lambda: 2)
        return lambda: {int(path.name): path.read_text().splitlines() for path in place.iterdir()}

    return begin


def models(folder):
    """The digest of every final model below a folder, by run."""
    files = sorted(folder.rglob("model.safetensors"))
    return {str(path.parent.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


SEARCH = ["local.lr=0.05..0.5:log", "--search", "optuna", "--trials", "1", "--no-prune", "--seeds", "2"]
COMMANDS = {
    "demo": (["demo", "--tiny", "--report", "page.html"], 6),
    "run": (["run", "auto.yaml", "--seeds", "3"], 3),
    "compare": (["compare", "fedavg", "fedams", "--config", "auto.yaml", "--report", "page.html"], 2),
    "sweep": (["sweep", "auto.yaml", "local.lr=0.05,0.1"], 2),
    "search": (["sweep", "auto.yaml", *SEARCH], 2),
    "reproduce": (["reproduce", "cams-table-2", "--scale", "smoke"], 9),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run_side_by_side_by_default(cli, folder, meet, monkeypatch, name):
    if name == "search":
        pytest.importorskip("optuna")
    (folder / "auto.yaml").write_text((folder / "small.yaml").read_text().replace("workers: 1\n", ""))
    words, runs = COMMANDS[name]
    executed = meet()
    found = cli.ok(*words, "-q", "-o", "both")
    assert "one after the other" not in found.stderr
    assert len(executed().keys() - {os.getpid()}) == 2
    assert sum(map(len, executed().values())) == len(models(folder / "both")) == runs
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    cli.ok(*words, "-q", "-o", "one", "--parallel", 1)
    assert models(folder / "both") == models(folder / "one")


def test_resumed_seeds_run_side_by_side(cli, folder, meet):
    for out in ("both", "one"):
        cli.ok("run", "small.yaml", "--seeds", 2, "-q", "-o", out, "--parallel", 1)
    cli.ok("resume", "one", "--rounds", 5, "-q", "--parallel", 1)
    executed = meet()
    cli.ok("resume", "both", "--rounds", 5, "-q")
    assert [len(folders) for folders in executed().values()] == [1, 1]
    assert models(folder / "both") == models(folder / "one")


def test_a_command_says_why_its_runs_use_one_core(cli, folder, monkeypatch):
    """By default, too: nobody chose it. Once, however many runs or groups of runs there are."""
    scheduler.warn_sequential.cache_clear()
    monkeypatch.setattr(scheduler, "available_cores", lambda: 2)
    monkeypatch.setattr(scheduler, "workers_that_fit", lambda count: 0)
    monkeypatch.setattr(scheduler, "can_fork", lambda: True)
    found = cli.ok("sweep", "small.yaml", "local.lr=0.05,0.1", "rounds=2,3", "-q", "-o", "out")
    assert found.stderr.count("runs one after the other: there is not enough free memory") == 1
