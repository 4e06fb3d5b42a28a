"""Orders done together are orders done one by one, to the bit."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pytest
import torch

import hansa
from gossip.test_native_cohort import task
from hansa import presets
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.engine import Serial
from hansa.engine.requests import BatchSizer
from hansa.runs.driver import Run

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

WORDS = {"local_lr": 0.1, "steps": 5, "batch_size": 6}
METHODS = {
    "fedavg": lambda: presets.fedavg(**WORDS, participation=1.0),
    "scaffold": lambda: presets.scaffold(**WORDS, participation=0.75),
    "momentum, prox": lambda: presets.fedprox(**WORDS, participation=1.0, mu=0.3).with_local(
        momentum=0.8, max_grad_norm=0.5
    ),
    "signs": lambda: presets.fedams(**WORDS, participation=1.0, compressor=hansa.compress.sign()),
}


def run(method, engine=Serial, **words):
    return Run(method, task(**words), keep_params=True, evaluate_every=0, engine=engine).advance(3)


def one_by_one(monkeypatch):
    monkeypatch.setattr(BatchSizer, "size", lambda *words: 1)


def test_an_error_names_the_client_that_it_came_of(monkeypatch):
    monkeypatch.setattr(BatchSizer, "size", lambda *words: 4)
    spoilt = task()
    spoilt.data.index[-1] = 10_000  # of the last client  # type: ignore[attr-defined]
    with pytest.raises(HansaError, match=r"client 7: .*row 10000 is out of range"):
        Run(METHODS["fedavg"](), spoilt, evaluate_every=0, engine=Serial).advance(1)


def test_what_is_not_native_or_takes_long_is_done_alone():
    order = Run(METHODS["fedavg"](), task())
    eager = task(execution="eager").trainer(torch.float32, torch.device("cpu"))
    fast = task().trainer(torch.float32, torch.device("cpu"))
    opened = hansa.rounds.open_round(order.algorithm, order.state, order.task.population, "x", order.key)
    for shell, seconds, expected in ((eager, 1e-6, 1), (fast, 1e-6, 2048), (fast, 0.01, 5), (fast, 1.0, 1)):
        bundle = BatchSizer(shell)
        assert bundle.size(opened.orders[0]) == 1  # as long as nothing is known
        bundle.record([opened.orders[0].part(slice(0, 4))], 4 * seconds)
        assert bundle.size(opened.orders[0]) == expected
