"""What the host does not wait for on a device: the same results as with checks at every step, and pinned copies.

The forms that run on devices are made to run on the CPU here, which has numbers to compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hansa
from contracts import small
from engine import problems
from engine.test_devices import META, SEEDED, Pretended, Smooth
from hansa.core import devices as places
from hansa.gossip import executors
from hansa.gossip.robust import Attack, clipped
from hansa.gossip.rows import DenseRows, Mixer
from hansa.rounds import round
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


def test_compressed_gossip_on_a_device_agrees_with_that_of_the_host(monkeypatch):
    task = problems.task(problems.perceptron, execution="eager")
    method = GOSSIP["choco_sgd"]
    expected = Run(method, task).advance(2)
    monkeypatch.setattr("hansa.gossip.cohort.on_host", lambda tensor: False)
    found = Run(method, task).advance(2)
    torch.testing.assert_close(found.params, expected.params)
    assert [record["peer_bytes"] for record in found.history] == [record["peer_bytes"] for record in expected.history]


@pytest.mark.parametrize("name", ["dsgd", "cafga", "alone"])
def test_a_device_without_float64_computes_the_spread_on_the_host(name, monkeypatch):
    """Apple's devices have none; the pretended one refuses it here."""
    monkeypatch.setattr(places, "has_float64", lambda device: device != META)
    task = hansa.Task(Smooth, nn.functional.cross_entropy, problems.data(), execution="eager")
    run = Run(GOSSIP[name], task)
    opened = round.open_round(run.algorithm, run.state, task.population, "run", run.key)
    order = replace(opened.orders[0], mean=True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SEEDED)
    got = {name: sent.packets[0].content for name, sent in order.broadcasts.items()}

    class WithoutFloat64(Pretended):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, torch.Tensor) and result.device == META:
                assert result.dtype != torch.float64, func
            return result

    with WithoutFloat64():
        trainer = task.trainer(torch.float32, META)
        (result,) = round._train(run.algorithm, [order], [got], trainer, task.population)
    assert len(result.changes)
    assert result.report.mean is not None


class OnDemand:
    """Data that is fetched, of which nothing is on the device, and which reuses one buffer for its batches."""

    classes, name, test_count = 3, "fetched", 40

    def __init__(self) -> None:
        self._data, self.asked = problems.data(test=40), set[torch.device]()
        self.population = self._data.population
        self.rows, self.samples = self._data.rows, self._data.samples
        self._buffer = torch.empty(600, 1, 6, 6)

    def fetch(self, client, rows):
        self.asked.add(rows.device)
        batch = self._buffer[: len(rows)].copy_(self._data.inputs[rows])
        return batch, self._data.targets[rows]

    def fetch_test(self, rows):
        self.asked.add(rows.device)
        return self._data.test_inputs[rows], self._data.test_targets[rows]


def test_data_on_the_host_is_asked_for_rows_there_and_copied_from_pinned_memory(monkeypatch):
    data = OnDemand()
    task = hansa.Task(Smooth, nn.functional.cross_entropy, data, execution="eager")
    vectors = task.start(hansa.Key(0), torch.float32)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SEEDED)
    with Pretended() as pretended:
        monkeypatch.setattr(places, "PINNED_DEVICES", {"meta"})
        monkeypatch.setattr(places, "empty_pinned", pretended.empty_pinned)
        trainer = task.trainer(torch.float32, META)
        pretended.reset()
        rows = trainer.batches(0, hansa.local.Work(4, 5), hansa.Key(0))
        batches = [trainer.batch(0, rows[step]) for step in range(4)]
        trainer.evaluate({name: vector.to(META) for name, vector in vectors.items()}, 0, 40)
    assert data.asked == {torch.device("cpu")}
    assert {leaf.device for batch in batches for leaf in batch} == {META}
    batches_sent = [memory for memory, _ in pretended.staged if memory.ndim == 4]
    assert len({memory.data_ptr() for memory in batches_sent}) == len(batches_sent) == 5
    assert all(memory._version == version for memory, version in pretended.staged)
    first = data._data.inputs[rows.rows[0]]
    assert torch.equal(batches_sent[0], first)  # although the data has written three batches over it since


def test_a_copy_that_gets_smaller_is_converted_first_and_otherwise_on_the_device(monkeypatch):
    with Pretended() as pretended:
        monkeypatch.setattr(places, "PINNED_DEVICES", {"meta"})
        monkeypatch.setattr(places, "empty_pinned", pretended.empty_pinned)
        for given, wanted, sent in ((torch.float64, torch.float32, 4), (torch.uint8, torch.float32, 1)):
            copied = places.copy_to_device(torch.ones(3, dtype=given), META, wanted)
            assert copied.dtype == wanted
            assert pretended.staged[-1][0].element_size() == sent
        assert pretended.waits == 0
    monkeypatch.undo()
    values = torch.arange(3)
    assert places.copy_to_device(values, torch.device("cpu")) is values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_a_copy_from_pinned_memory_has_the_values_of_its_time():
    device, source, copies = torch.device("cuda"), torch.empty(1 << 22), []
    for number in range(20):
        source.fill_(number)
        copies.append(places.copy_to_device(source, device))
    assert [float(copy.min()) for copy in copies] == [float(copy.max()) for copy in copies] == list(range(20))
