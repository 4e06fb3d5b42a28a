"""Runs of a study side by side: the same bits, files and errors as one after the other, whoever dies."""

from __future__ import annotations

import csv
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

import hansa
from cli.conftest import SLOW
from command_line import run_well
from hansa.config import from_yaml
from hansa.runs.folder import RunFolder
from hansa.study import parallel
from hansa.study import parallel as scheduler
from hansa.study.parallel import Worker, can_fork, start_process
from hansa.study.session import plan_jobs
from same_runs import assert_same_run

MAIN, MARK, DEATHS = "HANSA_TEST_MAIN", "HANSA_TEST_MARK", "HANSA_TEST_DEATHS"


def net():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def fragile(output, target):
    """The cross-entropy, which kills the worker processes that use it until as many have died as there are to be."""
    for death in range(int(os.environ[DEATHS]) if os.environ[MAIN] != str(os.getpid()) else 0):
        with suppress(FileExistsError):  # two workers never take the same death
            open(os.path.join(os.environ[MARK], str(death)), "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, target)


def make_task(loss=nn.functional.cross_entropy):
    """Clients of unequal size that the seed of a run draws, with validation rows that it draws, too."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 5, generator=generator)
    targets = (inputs @ torch.randn(5, 3, generator=generator)).argmax(1)
    partition = hansa.data.dirichlet(0.5)
    data = hansa.data.from_arrays(inputs, targets, clients=6, partition=partition, test=(inputs[:60], targets[:60]))
    return hansa.Task(
        net, loss, hansa.data.with_validation(data, 0.2), execution="eager"
    )  # the loss is called every step


def method(lr=0.3):
    return hansa.presets.scaffold(local_lr=lr, steps=3, batch_size=8, participation=0.6)


METHODS = {"SCAFFOLD": method(), "FedCAMS": hansa.presets.fedcams(local_lr=0.1, steps=2, batch_size=7)}


@pytest.fixture(params=["fork"])
def start(request, monkeypatch):
    """How workers are started: the test runner may have threads."""
    if request.param == "fork" and sys.platform != "linux":
        pytest.skip("processes are forked on Linux only")
    monkeypatch.setattr(scheduler, "can_fork", lambda: request.param == "fork")
    return request.param


@pytest.mark.parametrize("start", ["fork", "spawn"], indirect=True)
def test_runs_of_workers_are_those_of_this_process_with_all_they_hold(start, monkeypatch):
    """Workers survive a signal that a terminal or a batch system sends to all processes, however early it comes."""
    begin, started = Worker.__init__, []

    def begin_and_signal(self, *arguments):
        begin(self, *arguments)
        started.append(type(self.process).__name__)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(self.process.pid, number)

    monkeypatch.setattr(Worker, "__init__", begin_and_signal)
    found = hansa.compare(METHODS, make_task(), rounds=4, seeds=[0, 3], parallel=2, keep_params=True)
    assert started == (["ForkProcess"] * 2 if start == "fork" else ["SpawnProcess"] * 2)
    for name, algorithm in METHODS.items():
        for run in found[name]:
            alone = hansa.run(algorithm, make_task(), rounds=4, seed=run.key.seed, workers=1, keep_params=True)
            assert_same_run(run, alone)
            assert torch.equal(run.trajectory, alone.trajectory)
            run.advance(2)
            assert torch.equal(run.params, alone.advance(2).params)


@pytest.mark.parametrize("deaths", [1, 2])
def test_workers_that_die_cost_time_only(start, tmp_path, monkeypatch, caplog, deaths):
    """The other worker, or this process if there is none, does their work."""
    (tmp_path / "dead").mkdir()
    for name, value in ((MAIN, os.getpid()), (MARK, tmp_path / "dead"), (DEATHS, deaths)):
        monkeypatch.setenv(name, str(value))
    task = make_task(fragile)
    with caplog.at_level(logging.WARNING, "hansa"):
        runs = hansa.run(method(), task, rounds=5, seeds=3, parallel=2, out=tmp_path / "x", checkpoint_every=2)
    assert sum("the worker process died (exit code -9)" in record.message for record in caplog.records) == deaths
    for run in runs:
        assert_same_run(run, hansa.run(method(), task, rounds=5, seed=run.key.seed, workers=1))
        assert RunFolder(tmp_path / "x" / f"seed-{run.key.seed}").summary["status"] == "finished"
    again = hansa.run(method(), task, rounds=5, seeds=3, parallel=2, out=tmp_path / "x")
    assert [torch.equal(one.params, other.params) for one, other in zip(runs, again, strict=True)] == [True] * 3


def test_a_run_that_fails_ends_a_study_as_if_one_ran_after_the_other(start, tmp_path):
    methods = {"fine": method(), "wild": method(1e30), "late": method(0.2)}
    errors = []
    for count in (2, 1):
        with pytest.raises(hansa.HansaError) as caught:
            hansa.compare(methods, make_task(), rounds=6, out=tmp_path / str(count), parallel=count, checkpoint_every=2)
        errors.append(str(caught.value))
        assert RunFolder(tmp_path / str(count) / "fine" / "seed-0").summary["status"] == "finished"
        assert RunFolder(tmp_path / str(count) / "wild" / "seed-0").summary["status"] == "failed"
    assert errors[0] == errors[1]
    assert not (tmp_path / "1" / "late" / "seed-0").exists()


CONFIG = """\
rounds: 4
data: {name: synthetic, clients: 6, options: {largest: 60}}
model: {factory: "my_model:Net"}
local: {lr: 0.05, steps: 2, batch_size: 10}
"""


def sweep(*arguments):
    run_well("sweep", "own.yaml", "local.lr=0.05,0.2", "rounds=4,5", "--seeds", "0,2", "-q", *arguments)


def test_a_sweep_side_by_side_writes_the_same_tables(start, tmp_path, monkeypatch):
    """Points that differ in rounds continue one run: their order stays that of the grid."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(CONFIG)
    (tmp_path / "my_model.py").write_text(SLOW)
    sweep("--parallel", 2, "-o", "both")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    sweep("--parallel", 1, "-o", "one")
    for name in ("results.csv", "runs.csv"):
        tables = [list(csv.DictReader((tmp_path / out / name).read_text().splitlines())) for out in ("both", "one")]
        untimed_rows = [[{k: v for k, v in row.items() if k != "wall_seconds"} for row in rows] for rows in tables]
        assert untimed_rows[0] == untimed_rows[1]
    files = [
        {path.relative_to(tmp_path / out): path for path in (tmp_path / out).rglob("*")} for out in ("both", "one")
    ]
    assert files[0].keys() == files[1].keys()
    same = [name for name in files[0] if name.name in ("partition.safetensors", "model.safetensors")]
    assert len(same) == 2 * 4
    assert all(files[0][name].read_bytes() == files[1][name].read_bytes() for name in same)


@pytest.mark.parametrize("seeds", [None, [0, 1]])
def test_every_planned_run_can_be_sent_to_a_process(tmp_path, seeds):
    from hansa.engine.shared_memory import Packer, SharedMemory, unpack_object
    from hansa.study.report.progress import ProgressDisplay

    config = from_yaml(CONFIG.replace('{factory: "my_model:Net"}', "logistic")).model_copy(update={"seeds": seeds})
    jobs = plan_jobs(config, tmp_path / "x")
    memory = SharedMemory()
    last = unpack_object(Packer(memory).pack(jobs), [memory], copy=False)[-1]
    assert last.work(ProgressDisplay(), lambda *_: False) is None
    folder = RunFolder(last.folder)
    assert folder.summary["status"] == "finished"
    assert folder.config.seed == (0 if seeds is None else 1)


def test_client_memory_in_a_temporary_folder_stays_in_this_process(start, monkeypatch, caplog):
    """Before, a worker executed such a run to its end, could not send it, and it was repeated here."""
    monkeypatch.setattr(scheduler.StudyScheduler, "_start_workers", lambda *_: pytest.fail("workers were started"))
    aware = hansa.presets.fedaware(local_lr=0.1, steps=2, batch_size=7, momentum_storage="disk")
    with caplog.at_level(logging.WARNING, "hansa"):
        runs = hansa.run(aware, make_task(), rounds=2, seeds=2, parallel=2)
    assert "temporary folders" in caplog.text
    assert torch.equal(runs[1].params, hansa.run(aware, make_task(), rounds=2, seed=1, workers=1).params)


@pytest.mark.parametrize("start", ["fork", "spawn"], indirect=True)
def test_what_cannot_be_sent_to_a_process_runs_here_and_says_so(start, caplog):
    """A fork has the task; only a new interpreter needs it pickled."""
    scheduler.warn_sequential.cache_clear()
    lock, called = threading.Lock(), []

    def locked(output, target):
        with lock:
            return nn.functional.cross_entropy(output, target)

    cases = {
        "pickle": (make_task(locked), {}),
        "callbacks": (make_task(), {"callbacks": [lambda run, record: called.append(record["round"])]}),
    }
    for reason, (task, options) in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hansa"):
            runs = hansa.run(method(), task, rounds=2, seeds=2, parallel=2, **options)
        said = any("one after the other" in each.message and reason in each.message for each in caplog.records)
        assert said is (start == "spawn" or reason == "callbacks")
        assert torch.equal(runs[1].params, hansa.run(method(), make_task(), rounds=2, seed=1, workers=1).params)
    assert called == [1, 2, 1, 2]


def test_new_interpreters_are_started_only_for_users_who_ask_for_parallel_runs(monkeypatch):
    monkeypatch.setattr(scheduler, "can_fork", lambda: False)
    monkeypatch.setattr(scheduler, "available_cores", lambda: 2)
    jobs = plan_jobs(from_yaml("seeds: 2"), None)
    assert (scheduler.choose_parallel(None, jobs), scheduler.choose_parallel(2, jobs)) == (1, 2)
    monkeypatch.setattr(scheduler, "can_fork", lambda: True)
    assert scheduler.choose_parallel(None, jobs) == 2


def test_finished_runs_release_the_data_that_their_seeds_drew(monkeypatch):
    """Validation rows are a copy for each seed: after a study only what the user's task holds is left."""
    drawn, whole = [], hansa.Run.__init__

    def remember(self, *arguments, **options):
        whole(self, *arguments, **options)
        drawn.append(weakref.ref(self.task.data.validation_inputs))

    monkeypatch.setattr(hansa.Run, "__init__", remember)
    task = make_task()
    runs = hansa.run(method(), task, rounds=1, seeds=[1, 2, 3], workers=1)
    gc.collect()
    assert [reference() is None for reference in drawn] == [True] * 3
    assert torch.equal(runs[1].task.data.validation_inputs, make_task().for_seed(2).data.validation_inputs)
    again = runs[1].advance(1)
    assert torch.equal(again.params, hansa.run(method(), make_task(), rounds=2, seed=2, workers=1).params)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def threads():
    """Two threads of OpenMP, which have worked."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    train()
    yield 2
    torch.set_num_threads(before)


def train():
    weight = torch.full((400, 400), 0.01, requires_grad=True)
    (torch.linspace(0, 1, 400 * 400).view(400, 400) @ weight).tanh().sum().backward()
    return weight.grad


def test_a_fork_uses_the_threads_of_openmp_that_its_parent_has_used(threads):
    expected, (receive, send) = train(), os.pipe()

    def work():
        torch.set_num_threads(threads)
        os.write(send, b"same" if torch.equal(train(), expected) else b"other")
        os._exit(7)

    process = start_process(work, (), "fork")
    os.close(send)
    try:
        process.join(timeout=120)
    finally:
        process.kill()
    assert process.exitcode == 7
    assert os.read(receive, 10) == b"same"
    os.close(receive)


def test_a_process_is_not_forked_beside_other_threads_or_accelerators(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: None})  # the threads of the test runner
    assert can_fork()
    monkeypatch.setenv("HANSA_FORK", "off")
    assert not can_fork()
    monkeypatch.delenv("HANSA_FORK")
    with monkeypatch.context() as other:
        other.setattr(parallel.torch.cuda, "is_initialized", lambda: True)
        assert not can_fork()
    monkeypatch.undo()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert not can_fork()
    ended.set()
    thread.join()
