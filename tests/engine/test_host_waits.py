"""What the host does not wait for on a device: the same results as with checks at every step.

The forms that run on devices are made to run on the CPU here. tests/rounds/on_simulated_device.py counts the waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hansa
from contracts import small
from engine import problems
from hansa.core import devices as places
from hansa.gossip import executors
from hansa.gossip.robust import Attack, clipped
from hansa.gossip.rows import DenseRows, Mixer
from hansa.runs.driver import Run

RING = hansa.gossip.ring()
MIXING = {name for name in small.NAMES if small.small(name).local.mixing is not None}
GOSSIP = {
    **{name: small.small(name, steps=3, batch_size=5) for name in sorted(MIXING)},
    "alone": hansa.presets.ha_fed(steps=3, batch_size=5, clusters=2, topology=hansa.gossip.isolated()),
}


def scores(run):
    numbers = [
        {name: value for name, value in record.items() if name not in ("seconds", "train_loss")}
        for record in run.history
    ]
    return repr(numbers), [repr(record["train_loss"]) for record in run.history]


def both(method, task, monkeypatch, rounds=2):
    """Return a run with checks at every step, and one with checks at the end of a round."""
    expected = Run(method, task).advance(rounds)
    made = []
    with monkeypatch.context() as patch:
        original = executors._EagerExecutor.run

        def recorded(self):
            outcome = original(self)
            if self.deferred:
                made.append(outcome)
            return outcome

        patch.setattr(executors, "defers_checks", lambda device: True)
        patch.setattr(executors._EagerExecutor, "run", recorded)
        found = Run(method, task).advance(rounds)
    assert made
    return expected, found, made


@pytest.mark.parametrize("name", GOSSIP)
def test_checks_at_the_end_of_a_round_give_the_same_bits(name, monkeypatch):
    task = problems.task(problems.convolution, execution="eager")
    expected, found, made = both(GOSSIP[name], task, monkeypatch)
    assert torch.equal(found.params, expected.params)
    assert scores(found) == scores(expected)
    assert all(outcome is not None for outcome in made)


class Logarithmic(nn.Module):
    """Not a number for inputs below -50, with parameters that are none after a step on these."""

    strict = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(36), nn.Linear(36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.strict and not bool(torch.isfinite(self.head.weight).all()):
            raise FloatingPointError("weights are not finite")
        return self.head(self.norm(torch.log(x.flatten(1) + 50)))


class Strict(Logarithmic):
    """Refuses a model that is not finite, as a user may."""

    strict = True


@pytest.mark.parametrize("model", [Logarithmic, Strict])
@pytest.mark.parametrize("name", ["ha_fed", "cafga", "dsgd", "choco_sgd", "dadam"])
def test_a_client_that_overflows_is_dropped_at_the_same_step(name, model, monkeypatch):
    data = problems.data()
    data.inputs[data.rows(2)[:3]] = -100.0  # 3 of its 30 rows, so that not every batch has one
    task = hansa.Task(model, nn.functional.cross_entropy, data, execution="eager")
    expected, found, made = both(GOSSIP[name], task, monkeypatch)
    assert [repr(each) for each in found.dropped_clients] == [repr(each) for each in expected.dropped_clients]
    assert {each.client for _, each in found.dropped_clients} == {2}
    assert torch.equal(found.params, expected.params)
    assert scores(found) == scores(expected)
    assert None in made


class Faulty(Strict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            raise RuntimeError("four rows")
        return super().forward(x)


def test_an_error_of_the_model_still_names_the_client_and_the_step(monkeypatch):
    monkeypatch.setattr(executors, "defers_checks", lambda device: True)
    task = hansa.Task(Faulty, nn.functional.cross_entropy, problems.data(), execution="eager")
    with pytest.raises(hansa.HansaError, match=r"round 0, client \d, step 0: RuntimeError: four rows"):
        Run(small.small("dsgd", batch_size=4), task).advance(1)


def test_the_device_forms_of_mixing_agree_with_those_of_the_host(monkeypatch):
    draw = torch.Generator().manual_seed(3)
    own, start, *sent = (torch.randn(50, generator=draw) for _ in range(6))
    sent += [torch.full((50,), torch.nan), own.clone()]
    weights, key = [0.1, 0.2, 0.1, 0.2, 0.1, 0.1], hansa.Key(1)
    mixed = clipped(5.0).combine(own, sent, weights)
    noise = Attack((0,), "noise", 2.0).message(own, start, key)
    rows, mixer = DenseRows(torch.stack(sent)), Mixer(RING, 6)
    mixer.drop(4)
    read = rows.read([0, 3])
    for module in ("gossip.robust", "gossip.rows"):
        monkeypatch.setattr(f"hansa.{module}.on_host", lambda tensor: False)
    torch.testing.assert_close(clipped(5.0).combine(own, sent, weights), mixed)
    torch.testing.assert_close(Attack((0,), "noise", 2.0).message(own, start, key), noise, check_dtype=False)
    assert torch.equal(rows.read([0, 3]), read)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_a_copy_from_pinned_memory_has_the_values_of_its_time():
    device, source, copies = torch.device("cuda"), torch.empty(1 << 22), []
    for number in range(20):
        source.fill_(number)
        copies.append(places.copy_to_device(source, device))
    assert [float(copy.min()) for copy in copies] == [float(copy.max()) for copy in copies] == list(range(20))
