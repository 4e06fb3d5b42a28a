"""The pool gives the serial engine's results bit for bit, whatever happens to its workers."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import traceback
from functools import partial

import pytest
import torch

import hansa
from engine import problems
from engine.problems import CPU
from golden import cases
from golden import problems as golden
from hansa import presets
from hansa.engine import auto_engine, processes
from hansa.engine.pool import Pool
from hansa.engine.requests import WorkersUnsupported, execute
from hansa.engine.serial import Serial
from hansa.local import fixed
from hansa.runs.driver import Run
from same_runs import assert_same_run

CASES = (
    "aggregate: mean by samples / mlp", "random steps / norm", "fedavg / cnn", "fedadam / batch", "scaffold / batch",
    "feddyn / mlp", "fedcams / norm", "fedavg / dropping", "fedavg / remembering", "fedcams / double",
    "scaffold in float64 / mlp", "fedadam / words", "scaffold / quadratic", "cafga / mlp", "dsgd / batch",
    "overflow: fedavg / spoilt",
)  # fmt: skip
"""Golden cases: native, eager, with buffers, memory, packed uploads, dropout, in float64, and with losses."""


def finished(name: str, engine) -> Run:
    case = cases.CASES[name]
    task = golden.task(case.task)
    return Run(case.method(), task, seed=5, keep_params=True, engine=engine, **dict(case.options)).advance(3)


@functools.cache
def serial(case: str) -> Run:
    return finished(case, Serial)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_equals_serial_bit_for_bit(group, case, workers):
    expected = serial(case)
    assert not torch.equal(expected.trajectory[0], expected.trajectory[-1])
    assert_same_run(finished(case, partial(Pool, workers=workers, group=group)), expected)


def test_an_evaluation_in_three_pieces_is_the_serial_one(group):
    method, task = presets.fedavg(), problems.task(problems.convolution)
    assert len(task.test_chunks()) == 3
    vectors = task.start(hansa.Key(0), torch.float32)
    with Pool(method, task, torch.float32, CPU, workers=3, group=group) as pool:
        assert pool.evaluate(vectors) == Serial(method, task, torch.float32, CPU).evaluate(vectors)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_an_error_in_a_worker_names_client_round_and_step_and_shows_its_traceback(group, kind):
    algorithm, task = presets.fedavg(local_lr=0.1, steps=6), problems.with_accident(problems.raising, 2)
    orders = problems.first_orders(algorithm, task)
    with Pool(algorithm, task, torch.float64, CPU, workers=2, kind=kind, group=group) as pool:
        with pytest.raises(hansa.HansaError, match="round 0, client 2, step 2: ZeroDivisionError: the sext") as caught:
            list(pool.run(orders))
        shown = caught.value.__notes__[0] if kind == "process" else "".join(traceback.format_exception(caught.value))
        assert 'raise ZeroDivisionError("the sextant is broken")' in shown
        others = [order for order in orders if order.clients != (2,)]
        assert sorted(report.clients[0] for report in pool.run(others)) == [order.clients[0] for order in others]


def test_a_round_that_is_left_early_does_not_disturb_the_next(group):
    algorithm, task = presets.scaffold(local_lr=0.05, steps=30, batch_size=8), problems.task()
    orders = problems.first_orders(algorithm, task, torch.float32)
    fewer = problems.first_orders(algorithm.with_local(steps=fixed(2)), task, torch.float32)
    expected = {r.clients[0]: r for r in Serial(algorithm, task, torch.float32, CPU).run(fewer)}
    with Pool(algorithm, task, torch.float32, CPU, workers=2, group=group) as pool:
        for report in pool.run(orders):
            assert report.clients
            break
        found = {report.clients[0]: report for report in pool.run(fewer)}
    assert found.keys() == expected.keys()
    assert all(problems.reports_equal(found[client], expected[client]) for client in expected)


def test_workers_use_the_torch_settings_of_the_run(group):
    task = problems.with_accident(problems.settings, 0)
    algorithm = presets.fedavg(local_lr=1.0, steps=1)
    torch.set_float32_matmul_precision("high")
    try:
        pool = Pool(algorithm, task, torch.float64, CPU, workers=1, group=group)
    finally:
        torch.set_float32_matmul_precision("highest")
    with pool:
        assert [report.losses[0] for report in pool.run(problems.first_orders(algorithm, task))] == [101.0] * 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, r"Pool\(workers=0\): expected a whole number >= 1"),
        ({"kind": "fibre"}, r"Pool\(kind='fibre'\): expected 'process' or 'thread'"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(hansa.HansaError, match=message):
        Pool(presets.fedavg(), problems.bowls(), torch.float64, CPU, **wrong)


def test_a_worker_does_not_start_workers_of_its_own(monkeypatch):
    monkeypatch.setenv("HANSA_WORKER", "1")
    with pytest.raises(hansa.HansaError, match="if __name__"):
        Pool(presets.fedavg(), problems.bowls(), torch.float64, CPU)


def test_the_log_is_quiet_when_nothing_happens(group, caplog):
    with caplog.at_level(logging.DEBUG, "hansa"):
        finished("scaffold / quadratic", partial(Pool, workers=2, group=group))
    assert not caplog.records


def test_a_killed_worker_is_replaced_and_the_round_has_the_same_result(group, tmp_path, caplog):
    marker = tmp_path / "dies"
    marker.touch()
    task = problems.with_accident(problems.dying(marker), 3)
    algorithm = presets.scaffold(local_lr=0.1, steps=fixed([1, 9, 2, 5, 3, 7]))
    expected = Run(algorithm, task, dtype=torch.float64, keep_params=True).advance(4)
    before = {worker.popen.pid for worker in group.workers}
    found = Run(
        algorithm, task, dtype=torch.float64, keep_params=True, engine=partial(Pool, workers=2, group=group)
    ).advance(4)
    assert_same_run(found, expected)
    assert not marker.exists()
    assert len(before - {worker.popen.pid for worker in group.workers}) == 1
    assert len(group.workers) == 3
    assert "round 0, client 3: the worker died (killed by SIGKILL; out of memory?)" in caplog.text


def test_a_worker_killed_between_rounds_is_replaced(group):
    algorithm, task = presets.fedavg(local_lr=0.1, steps=3), problems.bowls()
    orders = problems.first_orders(algorithm, task)
    expected = {r.clients[0]: r for r in Serial(algorithm, task, torch.float64, CPU).run(orders)}
    with Pool(algorithm, task, torch.float64, CPU, workers=2, group=group) as pool:
        list(pool.run(orders))
        os.kill(group.workers[0].popen.pid, signal.SIGKILL)
        group.workers[0].popen.wait()
        found = {report.clients[0]: report for report in pool.run(orders)}
    assert all(problems.reports_equal(found[client], expected[client]) for client in range(problems.CLIENTS))


def test_there_are_never_more_workers_than_orders(monkeypatch):
    spawned = []
    monkeypatch.setattr(processes.ProcessGroup, "spawn", lambda self: spawned.append(1) or spawn(self))
    run = finished("cafga / mlp", auto_engine(9, 3, "process"))  # three clusters: three orders a round
    assert len(spawned) == 3
    assert_same_run(run, serial("cafga / mlp"))


spawn = processes.ProcessGroup.spawn


WORDS = {"local_lr": 0.05, "epochs": 1, "batch_size": 7}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("case", ["feddyn / mlp", "scaffold / batch"])
def test_threads_equal_serial_bit_for_bit(case, workers):
    assert_same_run(finished(case, partial(Pool, workers=workers, kind="thread")), serial(case))
    assert not [thread for thread in threading.enumerate() if thread.name == "hansa worker"]


def test_whoever_waits_for_native_workers_is_one_of_them(monkeypatch):
    seen = set()

    def noted(*given):
        seen.add(threading.current_thread().name)
        return execute(*given)

    monkeypatch.setattr("hansa.engine.threads.execute", noted)
    algorithm, task = presets.fedavg(**WORDS), problems.task()
    with Pool(algorithm, task, torch.float32, CPU, workers=2, kind="thread") as pool:
        assert [worker.thread is None for worker in pool._group.workers] == [True, False]
        for _ in range(20):  # each of the two is sure to come to something
            list(pool.run(problems.first_orders(algorithm, task, torch.float32)))
    assert seen == {"MainThread", "hansa worker"}


def test_a_model_that_draws_random_numbers_is_refused():
    with pytest.raises(WorkersUnsupported, match="draws random numbers"):
        Pool(presets.fedavg(), problems.task(problems.dropout, execution="eager"), torch.float32, CPU, kind="thread")


def test_a_model_that_draws_only_later_is_an_error_and_never_a_different_result():
    algorithm, task = presets.fedavg(local_lr=0.1, steps=4), problems.with_accident(problems.drawing, 3)
    with (
        Pool(algorithm, task, torch.float64, CPU, kind="thread") as pool,
        pytest.raises(hansa.HansaError, match="draws random numbers"),
    ):
        list(pool.run(problems.first_orders(algorithm, task)))


def test_torchs_generator_and_number_of_threads_are_left_as_they_were():
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    algorithm, task = presets.fedavg(**WORDS), problems.task()
    with Pool(algorithm, task, torch.float32, CPU, kind="thread") as pool:
        list(pool.run(problems.first_orders(algorithm, task, torch.float32)))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == 2
