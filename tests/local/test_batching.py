"""Batches, passes and SCAFFOLD's forms against plain PyTorch loops over a `DataLoader`, as FLamby writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hansa
from golden import problems as golden
from hansa import HansaError, Key, local, presets
from hansa.config import build_algorithm, from_yaml
from hansa.core import native
from hansa.local.work import PassPosition, as_batching
from mistakes import refused

SIZES = (13, 5, 22, 8)
STEPS: dict[str, Any] = {"local_lr": 0.05, "steps": 3, "batch_size": 4}


class Own(nn.Module):
    """A regression written as users write one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.hidden(x)))
        return y.squeeze(1)


def data() -> Any:
    draw = np.random.default_rng(0)
    owners = draw.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    x = draw.standard_normal((len(owners), 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + owners
    return hansa.data.from_arrays(x, y, clients=owners, test=(x[:10], y[:10]), dtype=torch.float64)


def task() -> Any:
    return hansa.training.Task(Own, nn.functional.mse_loss, data())


class Passes(torch.utils.data.Sampler[int]):
    """The orders that Hansa draws, one for each time that a DataLoader is walked."""

    def __init__(self, client: int, samples: int, seed: int) -> None:
        self.client, self.samples, self.key, self.number = client, samples, Key(seed), 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        order = self.key.child("pass", self.client, self.number).numpy().permutation(self.samples)
        self.number += 1
        return iter(order.tolist())


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator that restarts when it is exhausted."""
    while True:
        yield from loader


def flamby(rounds: int, *, seed: int, scaffold: bool) -> Tensor:
    """FedAvg, or SCAFFOLD from x and y_i alone, of all clients by sample count, each with an iterator that goes on."""
    problem = task()
    rows = [problem.data.rows(client) for client in range(len(SIZES))]
    sets = [TensorDataset(problem.data.inputs[own], problem.data.targets[own]) for own in rows]
    loaders = [
        endless(DataLoader(each, batch_size=4, sampler=Passes(client, len(each), seed)))
        for client, each in enumerate(sets)
    ]
    model = Own()
    x = start(problem, seed)
    corrections = [torch.zeros_like(x) for _ in SIZES]
    for _ in range(rounds):
        changes = []
        for client, loader in enumerate(loaders):
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(3):
                inputs, targets = next(loader)
                loss = nn.functional.mse_loss(model(inputs), targets)
                if scaffold:
                    loss = loss - corrections[client] @ nn.utils.parameters_to_vector(model.parameters())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            changes.append(nn.utils.parameters_to_vector(model.parameters()).detach() - x)
        mean = sum(size * change for size, change in zip(SIZES, changes, strict=True)) / sum(SIZES)
        for client, change in enumerate(changes):
            corrections[client] = corrections[client] + (mean - change) / (0.05 * 3)
        x = x + mean
    return x


def start(problem: Any, seed: int) -> Tensor:
    vector: Tensor = hansa.Run(presets.fedavg(**STEPS), problem, seed=seed).state.vectors["model"].clone()
    return vector


@pytest.mark.parametrize("form", ["fedavg", "sent", "derived"])
def test_flambys_loops_come_out(form: str) -> None:
    common: Any = {**STEPS, "weights": "samples", "batches": "continued"}
    method = presets.fedavg(**common) if form == "fedavg" else presets.scaffold(**common, control=form)  # type: ignore[arg-type]
    run = hansa.Run(method, task(), seed=3)
    run.advance(6)
    expected = flamby(6, seed=3, scaffold=form != "fedavg")
    assert torch.allclose(run.state.vectors["model"], expected, atol=1e-12, rtol=0)
    plain = hansa.Run(presets.fedavg(**STEPS, weights="samples"), task(), seed=3)
    plain.advance(6)
    assert not torch.allclose(plain.state.vectors["model"], expected, atol=1e-4, rtol=0)


def test_the_derived_control_is_the_sent_one_when_few_take_part_and_at_rate_0() -> None:
    for weights in ("uniform", "samples", (1.0, 3.0, 0.5, 2.0)):
        common: Any = {**STEPS, "participation": 0.5, "weights": weights, "local_lr": local.cosine(0.05, rounds=4)}
        sent, derived = (hansa.Run(presets.scaffold(**common, control=form), task()) for form in ("sent", "derived"))
        for run in (sent, derived):
            run.advance(7)
            assert run.state.round == 7
            assert not any(record["lost"] for record in run.history)  # the rate is 0 from round 4
        for name in ("model", "control"):
            assert torch.allclose(sent.state.vectors[name], derived.state.vectors[name], atol=1e-12, rtol=0)
        share = torch.tensor({"uniform": (1.0,) * 4, "samples": SIZES}.get(weights, weights), dtype=torch.float64)  # type: ignore[call-overload]
        rows = [sent.store.read(client).get("solver/control") for client in range(4)]
        mean = sum(w * row for w, row in zip(share / share.sum(), rows, strict=True) if row is not None)
        assert torch.allclose(sent.state.vectors["control"], mean, atol=1e-12, rtol=0)  # type: ignore[arg-type]
        assert derived.history[-1]["up_bytes"] < 0.6 * sent.history[-1]["up_bytes"]


@pytest.mark.parametrize(("samples", "size"), [(13, 4), (12, 4), (5, 5), (3, 1), (7, 3)])
@pytest.mark.parametrize("last", ["fill", "short", "drop"])
def test_passes_hold_every_row_once_and_go_on_where_they_ended(last: Any, samples: int, size: int) -> None:
    division = local.batching(last, continued=True)
    whole = division.draw(2, samples, size, 12, Key(1), Key(0))
    place, pieces = PassPosition(), []
    for round, steps in enumerate((5, 1, 4, 2)):
        pieces += division.draw(2, samples, size, steps, Key(1).child(round), Key(0), place)
        place = division.position_after(samples, size, steps, place)
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces, strict=True))
    per_pass = {"fill": samples, "short": samples, "drop": samples - samples % size}[last]
    rows = np.concatenate(whole)
    for first in range(0, len(rows) - per_pass + 1, per_pass):
        assert len(set(rows[first : first + per_pass].tolist())) == per_pass
    loader = DataLoader(range(samples), batch_size=size, drop_last=last == "drop")  # type: ignore[arg-type]
    sizes = [len(batch) for _ in range(12) for batch in loader][:12]
    assert [len(batch) for batch in whole] == ([size] * 12 if last == "fill" else sizes)
    steps = division.epoch_steps(2, samples, size)
    assert steps == (2 * samples // size if last == "fill" else 2 * len(loader))


def runs(method: Any, problem: Any = None, **options: Any) -> hansa.Run:
    run = hansa.Run(method, problem or task(), seed=2, **options)
    run.advance(4)
    return run


@pytest.mark.parametrize("batches", ["short", "continued", "drop"])
@pytest.mark.parametrize("preset", ["fedavg", "scaffold", "dsgd", "cafga"])
def test_native_steps_equal_pytorchs(batches: str, preset: str) -> None:
    if (preset, batches) == ("cafga", "continued"):
        with pytest.raises(HansaError, match="only with keep_local_models=True"):
            presets.cafga(**STEPS, batches="continued")
        return
    method = getattr(presets, preset)(**STEPS, batches=batches, **({"clusters": 2} if preset == "cafga" else {}))
    models = []
    for name in ("mlp", "mlp, eager"):
        problem = golden.task(name)
        assert (problem.network is not None) == (name == "mlp" and native.available())
        models.append(runs(method, problem).state.vectors["model"])
    assert torch.allclose(*models, atol=2e-5)


def test_a_file_says_it_with_a_word_or_in_full() -> None:
    word = build_algorithm(from_yaml("local: {batches: continued, steps: 3, batch_size: 4, lr: 0.05}"))
    assert word == presets.fedavg(**STEPS, batches="continued")
    full = build_algorithm(from_yaml("local: {batches: {last: drop, continued: true, order: in_order}}"))
    assert full == presets.fedavg(batches=local.batching("drop", continued=True, order=local.in_order()))
    derived = build_algorithm(from_yaml("algorithm: {preset: scaffold, control: derived}\nlocal: {steps: 3}"))
    assert derived == presets.scaffold(steps=3, control="derived")
    sampled = build_algorithm(from_yaml("algorithm: scaffold\nserver: {weights: samples}"))
    assert sampled == presets.scaffold(weights="samples")


class Backwards:
    """A user's own order."""

    def permutation(self, client: int, samples: int, number: int, key: Key) -> Any:
        return np.arange(samples)[::-1] if client else [0] * samples


def test_an_order_of_ones_own_is_used_and_checked() -> None:
    division = local.batching("short", order=Backwards())
    assert division.draw(1, 5, 2, 3, Key(0), Key(0))[2].tolist() == [0]
    with pytest.raises(HansaError, match="pass 0 of client 0 is not a permutation of its 5 rows"):
        division.draw(0, 5, 2, 3, Key(0), Key(0))


test_wrong_words_are_named = refused(
    (lambda: presets.fedavg(batches="shrot"), r"fedavg\(batches='shrot'\).*Did you mean short"),
    (lambda: local.batching("cut"), r"batching\(last='cut'\)"),
    (lambda: local.batching(continued=1), r"batching\(continued=1\)"),
    (lambda: local.batching(order=3), r"batching\(order=3\): expected an order of passes"),
    (lambda: as_batching(7), r"LocalPhase\(batches=7\)"),
    (lambda: presets.scaffold(control="derived"), "one number of steps"),
    (lambda: presets.scaffold(steps=[1, 2], control="derived"), "one number of steps"),
    (lambda: presets.scaffold(steps=2, control="derived").with_local(lr=0.7), r"derived_control\(lr=0.05\)"),
    (lambda: presets.scaffold(steps=2, control="derived", compressor=hansa.compress.sign()), "control='sent'"),
    (lambda: presets.scaffold(steps=2, control="derived", local_momentum=0.9), "local_momentum=0.9"),
)
