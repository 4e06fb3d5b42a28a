"""The pool gives the serial engine's results bit for bit, whatever happens to its workers."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from functools import partial

import pytest
import torch

import hansa
from engine import laboratory as lab
from engine.laboratory import CPU
from hansa import presets
from hansa.engine import choose, processes
from hansa.engine.pool import Pool
from hansa.engine.serial import Serial
from hansa.local import fixed, random_steps
from hansa.runs.driver import Run

UNEVEN = {"local_lr": 0.05, "steps": random_steps(1, 9), "batch_size": 7, "participation": 0.7}
CASES = {
    "fedavg": lambda: (presets.fedavg(**UNEVEN, weights="samples"), lab.task(), torch.float32),
    "fedavg, eager steps": lambda: (presets.fedavg(**UNEVEN), lab.task(native=False), torch.float32),
    "convolutions": lambda: (presets.fedprox(**UNEVEN), lab.task(lab.plain_convolution), torch.float32),
    "BatchNorm buffers": lambda: (presets.fedams(**UNEVEN), lab.task(lab.convolution), torch.float32),
    "memory and a second channel": lambda: (presets.scaffold(**UNEVEN), lab.task(lab.convolution), torch.float32),
    "feddyn": lambda: (presets.feddyn(**UNEVEN), lab.task(), torch.float32),
    "fednova": lambda: (presets.fednova(**UNEVEN), lab.task(), torch.float32),
    "packed uploads and residuals": lambda: (presets.fedcams(**UNEVEN), lab.task(), torch.float32),
    "dropout": lambda: (presets.fedavg(**UNEVEN), lab.task(lab.dropout), torch.float32),
    "float64 data and model": lambda: (presets.scaffold(**UNEVEN), lab.task(lab.convolution), torch.float64),
    "quadratic in float64": lambda: (presets.fedadam(**UNEVEN), lab.bowls(), torch.float64),
    "clusters that gossip": lambda: (presets.cafga(clusters=2, reporters=2, steps=5), lab.task(), torch.float32),
    "every client its own model": lambda: (presets.dsgd(steps=3), lab.bowls(), torch.float64),
    "a client that diverges": lambda: (
        presets.fedavg(local_lr=0.1, steps=4),
        lab.with_accident(lab.diverging, 4),
        torch.float64,
    ),
}


def finished(case: str, engine, rounds: int = 3) -> Run:
    algorithm, task, dtype = CASES[case]()
    return Run(algorithm, task, dtype=dtype, seed=5, keep_params=True, engine=engine).advance(rounds)


@functools.cache
def serial(case: str) -> Run:
    return finished(case, Serial)


def assert_same_tree(left, right) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_same_tree(left[name], right[name])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def assert_same_run(found: Run, expected: Run) -> None:
    assert torch.equal(found.trajectory, expected.trajectory)
    assert_same_tree(found.state.tree(), expected.state.tree())
    for client in range(expected.task.population.count):
        assert_same_tree(found.store.read(client), expected.store.read(client))
    records = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.history] for run in (found, expected)]
    assert str(records[0]) == str(records[1])  # as text: a NaN equals itself
    assert found.lost == expected.lost


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_equals_serial_bit_for_bit(crew, case, workers):
    expected = serial(case)
    assert not torch.equal(expected.trajectory[0], expected.trajectory[-1])
    assert_same_run(finished(case, partial(Pool, workers=workers, crew=crew)), expected)


def test_the_diverging_client_is_lost_and_the_others_are_not(crew):
    run = finished("a client that diverges", partial(Pool, workers=2, crew=crew))
    assert {(lost.client, lost.reason) for _, lost in run.lost} == {(4, "non-finite")}
    assert run.history[-1]["participants"] == lab.CLIENTS - 1


def test_the_evaluation_is_the_same_for_any_number_of_workers_and_while_a_round_runs(crew):
    algorithm = presets.fedavg(local_lr=0.1, steps=20, batch_size=8)
    task = lab.divided(lab.convolution, torch.nn.functional.cross_entropy, lab.data())
    algorithm = algorithm.with_buffers()
    orders = lab.first_orders(algorithm, task, torch.float32)
    alone = Serial(algorithm, task, torch.float32, CPU)
    expected, reports = alone.evaluate(lab.vectors_of(orders[0])), {r.cohort: r for r in alone.run(orders)}
    assert expected.keys() == {"loss", "hits"}
    assert len(task.pieces()) == 5
    for workers in (1, 2, 3):
        with Pool(algorithm, task, torch.float32, CPU, workers=workers, crew=crew) as pool:
            assert pool.evaluate(lab.vectors_of(orders[0])) == expected
            later = pool.evaluate_later(lab.vectors_of(orders[0]))
            found = {report.cohort: report for report in pool.run(orders)}
            assert later.result() == expected
            assert later.result() == expected
            assert all(lab.reports_equal(found[cohort], reports[cohort]) for cohort in reports)


def test_a_task_without_test_data_has_nothing_to_evaluate(crew):
    data = lab.data()
    train_only = type(data)(data.inputs, data.targets, data.index, data.offsets, classes=3)
    task = hansa.Task(lab.perceptron, torch.nn.functional.cross_entropy, train_only)
    with Pool(presets.fedavg(), task, torch.float32, CPU, crew=crew) as pool:
        assert pool.evaluate(task.start(hansa.Key(0), torch.float32)) == {}


def test_an_error_in_a_worker_names_client_round_and_step_and_shows_its_traceback(crew):
    algorithm, task = presets.fedavg(local_lr=0.1, steps=6), lab.with_accident(lab.raising, 2)
    orders = lab.first_orders(algorithm, task)
    with Pool(algorithm, task, torch.float64, CPU, workers=2, crew=crew) as pool:
        with pytest.raises(hansa.HansaError, match="round 0, client 2, step 2: ZeroDivisionError: the sext") as caught:
            list(pool.run(orders))
        assert 'raise ZeroDivisionError("the sextant is broken")' in str(caught.value.__cause__)
        others = [order for order in orders if order.clients != (2,)]
        assert sorted(report.cohort for report in pool.run(others)) == [order.cohort for order in others]


def test_a_round_that_is_left_early_does_not_disturb_the_next(crew):
    algorithm, task = presets.scaffold(local_lr=0.05, steps=30, batch_size=8), lab.task()
    orders = lab.first_orders(algorithm, task, torch.float32)
    fewer = lab.first_orders(algorithm.with_local(steps=fixed(2)), task, torch.float32)
    expected = {r.cohort: r for r in Serial(algorithm, task, torch.float32, CPU).run(fewer)}
    with Pool(algorithm, task, torch.float32, CPU, workers=2, crew=crew) as pool:
        for report in pool.run(orders):
            assert report.uploads
            break
        found = {report.cohort: report for report in pool.run(fewer)}
    assert found.keys() == expected.keys()
    assert all(lab.reports_equal(found[cohort], expected[cohort]) for cohort in expected)


def test_workers_use_the_torch_settings_of_the_run(crew):
    task = lab.with_accident(lab.settings, 0)
    algorithm = presets.fedavg(local_lr=1.0, steps=1)
    torch.set_float32_matmul_precision("high")
    try:
        pool = Pool(algorithm, task, torch.float64, CPU, workers=1, crew=crew)
    finally:
        torch.set_float32_matmul_precision("highest")
    with pool:
        assert [report.uploads[0].loss for report in pool.run(lab.first_orders(algorithm, task))] == [101.0] * 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, r"Pool\(workers=0\): expected a whole number >= 1"),
        ({"kind": "fibre"}, r"Pool\(kind='fibre'\): expected 'process' or 'thread'"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(hansa.HansaError, match=message):
        Pool(presets.fedavg(), lab.bowls(), torch.float64, CPU, **wrong)


def test_a_worker_does_not_start_workers_of_its_own(monkeypatch):
    monkeypatch.setenv("HANSA_WORKER", "1")
    with pytest.raises(hansa.HansaError, match="if __name__"):
        Pool(presets.fedavg(), lab.bowls(), torch.float64, CPU)


def test_the_log_is_quiet_when_nothing_happens(crew, caplog):
    with caplog.at_level(logging.DEBUG, "hansa"):
        finished("quadratic in float64", partial(Pool, workers=2, crew=crew))
    assert not caplog.records


def test_a_killed_worker_is_replaced_and_the_round_has_the_same_result(crew, tmp_path, caplog):
    marker = tmp_path / "dies"
    marker.touch()
    task = lab.with_accident(lab.dying(marker), 3)
    algorithm = presets.scaffold(local_lr=0.1, steps=fixed([1, 9, 2, 5, 3, 7]))
    expected = Run(algorithm, task, dtype=torch.float64, keep_params=True).advance(4)
    before = {worker.popen.pid for worker in crew.members}
    found = Run(
        algorithm, task, dtype=torch.float64, keep_params=True, engine=partial(Pool, workers=2, crew=crew)
    ).advance(4)
    assert_same_run(found, expected)
    assert not marker.exists()
    assert len(before - {worker.popen.pid for worker in crew.members}) == 1
    assert len(crew.members) == 3
    assert "round 0, client 3: the worker died (killed by SIGKILL; was memory short?)" in caplog.text


def test_a_worker_killed_between_rounds_is_replaced(crew):
    algorithm, task = presets.fedavg(local_lr=0.1, steps=3), lab.bowls()
    orders = lab.first_orders(algorithm, task)
    expected = {r.cohort: r for r in Serial(algorithm, task, torch.float64, CPU).run(orders)}
    with Pool(algorithm, task, torch.float64, CPU, workers=2, crew=crew) as pool:
        list(pool.run(orders))
        os.kill(crew.members[0].popen.pid, signal.SIGKILL)
        crew.members[0].popen.wait()
        found = {report.cohort: report for report in pool.run(orders)}
    assert all(lab.reports_equal(found[cohort], expected[cohort]) for cohort in range(lab.CLIENTS))


def watched(pools, workers=2):
    def engine(*parts):
        pools.append(Pool(*parts, workers=workers))
        return pools[-1]

    return engine


@pytest.mark.parametrize("case", ["memory and a second channel", "clusters that gossip"])
def test_a_stopped_worker_is_replaced_and_its_orders_are_run_again_to_the_same_bits(case, monkeypatch, caplog):
    monkeypatch.setattr(processes, "TICK", 0.05)
    monkeypatch.setattr(processes, "LOOKS", 3)
    algorithm, task, dtype = CASES[case]()
    pools, stopped = [], []

    def stop(run, record):
        if record["round"] == 1:
            for member in pools[0].start()._crew.members[:1]:
                os.kill(member.popen.pid, signal.SIGSTOP)
                stopped.append(member.popen)

    found = Run(algorithm, task, dtype=dtype, seed=5, keep_params=True, engine=watched(pools)).advance(3, [stop])
    assert_same_run(found, serial(case))
    assert len(stopped) == 1
    assert stopped[0].returncode == -signal.SIGKILL
    assert "stopped by a signal" in caplog.text


def test_a_worker_that_goes_on_in_time_is_left_alone(monkeypatch):
    monkeypatch.setattr(processes, "TICK", 0.05)
    monkeypatch.setattr(processes, "LOOKS", 1000)
    with Pool(*CASES["fedavg"]()[:2], torch.float32, CPU, workers=1) as pool:
        (member,) = pool.start()._crew.members
        os.kill(member.popen.pid, signal.SIGSTOP)
        while not member.stands_still():
            time.sleep(0.01)
        assert pool._crew._watch() == []
        assert member.stopped == 1
        os.kill(member.popen.pid, signal.SIGCONT)
        while member.stands_still():
            time.sleep(0.01)
        assert pool._crew._watch() == []
        assert member.stopped == 0


def test_there_are_never_more_workers_than_orders(monkeypatch):
    hired = []
    monkeypatch.setattr(processes.Processes, "hire", lambda self: hired.append(1) or hire(self))
    algorithm, task, dtype = CASES["clusters that gossip"]()  # two clusters: two orders a round
    run = Run(algorithm, task, dtype=dtype, seed=5, keep_params=True, engine=choose(9, 3, "process")).advance(3)
    assert len(hired) == 2
    assert_same_run(run, serial("clusters that gossip"))


hire = processes.Processes.hire
