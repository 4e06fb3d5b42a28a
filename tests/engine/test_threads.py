"""Worker threads: the serial results again, or a refusal where they could not be."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import hansa
from engine import problems
from engine.problems import CPU
from hansa import presets
from hansa.engine.pool import Pool
from hansa.engine.requests import WorkersUnsupported, execute
from hansa.engine.serial import Serial
from hansa.runs.driver import Run

WORDS = {"local_lr": 0.05, "epochs": 1, "batch_size": 7}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("model", [problems.perceptron, problems.convolution])
def test_threads_equal_serial_bit_for_bit(model, workers):
    runs = [
        Run(presets.scaffold(**WORDS), problems.task(model), keep_params=True, engine=engine).advance(2)
        for engine in (Serial, partial(Pool, workers=workers, kind="thread"))
    ]
    assert torch.equal(runs[0].trajectory, runs[1].trajectory)
    assert all(torch.equal(v, runs[1].state.vectors[n]) for n, v in runs[0].state.vectors.items())
    keys = ("train_loss", "test_loss", "test_accuracy")
    assert [[r[k] for k in keys] for r in runs[0].history] == [[r[k] for k in keys] for r in runs[1].history]
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
