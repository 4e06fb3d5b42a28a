"""Fuzzes modules as other people write them: random ones that do what libraries do to themselves while they train.

    PYTHONPATH=tests python tests/fuzz/fuzz_modules.py [--modules 300] [--seed 0]

A module is a function of the seed and its number: layers under spectral or weight norm, orthogonal, lazy, tied, with
normalisations, and in its ``forward()`` up to four habits (attributes, hooks, buffers and objects that come or change
later). Training by federated averaging equals a loop in plain PyTorch, buffers included, and two workers equal one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm

import hansa
from hansa.runs.driver import Run

FEATURES, CLASSES, STEPS, BATCH, LR, ROUNDS = 4, 3, 3, 4, 0.1, 2
WRAPS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda layer: layer,
    "spectral": parametrizations.spectral_norm,
    "hooked spectral": hooked_spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}
NORMS = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "group": partial(nn.GroupNorm, 2)}


@dataclass(frozen=True)
class Plan:
    """What a module is made of and does."""

    width: int
    wraps: tuple[str, str]
    norm: str
    tied: bool
    lazy: bool
    habits: tuple[str, ...]


class Facts:
    """A plain object beside a module."""

    def __init__(self) -> None:
        self.calls = 0


class Made(nn.Module):
    """A module by plan. Each habit is a method of the batch."""

    running: Tensor

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.facts, self.seen = plan, Facts(), {"means": []}
        first = nn.LazyLinear(plan.width) if plan.lazy else nn.Linear(FEATURES, plan.width)
        if plan.lazy:
            first(torch.zeros(1, FEATURES))
        self.first, self.second = WRAPS[plan.wraps[0]](first), WRAPS[plan.wraps[1]](nn.Linear(plan.width, plan.width))
        self.norm, self.last = NORMS[plan.norm](plan.width), nn.Linear(plan.width, CLASSES)
        self.third = nn.Linear(plan.width, plan.width)
        if plan.tied:
            tied = nn.Linear(plan.width, plan.width)
            tied.weight = self.third.weight
            self.third = nn.Sequential(self.third, nn.Tanh(), tied)
        self.register_buffer("on", torch.tensor(False))
        self.register_buffer("waiting", torch.tensor(True))
        self.register_buffer("center", torch.zeros(FEATURES))
        self.register_buffer("running", torch.zeros(FEATURES))
        self.register_buffer("level", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for habit in self.plan.habits:
            x = getattr(self, habit)(x)
        return self.last(self.third(torch.tanh(self.norm(self.second(torch.tanh(self.first(x)))))))

    def late_attribute(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x * (1 + 0.1 * self.calls)

    def late_hook(self, x: Tensor) -> Tensor:
        if not hasattr(self, "handle"):
            outputs: list[Tensor] = []
            self.handle = self.last.register_forward_hook(
                lambda part, given, out: out * (1 + 0.1 * (outputs.append(out.detach()) or len(outputs)))
            )
        return x

    def late_buffer(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().mean(0))
        return x - self.shift

    def first_batch(self, x: Tensor) -> Tensor:
        if self.training and not self.on:
            self.center.copy_(x.detach().mean(0))
            self.on.fill_(True)
        return x - self.center

    def until_first_batch(self, x: Tensor) -> Tensor:
        if self.training and self.waiting:
            self.center.copy_(x.detach().mean(0))
            self.waiting.fill_(False)
        return x - 0.2 * self.center

    def clipped_through_data(self, x: Tensor) -> Tensor:
        self.last.weight.data = self.last.weight.data.clamp(-0.2, 0.2)
        return x

    def first_batch_through_data(self, x: Tensor) -> Tensor:
        if self.training and not self.on:
            self.center.data = x.detach().mean(0)
            self.on.data.fill_(True)
        return x - 0.5 * self.center

    def running_mean(self, x: Tensor) -> Tensor:
        if self.training:
            self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return x - self.running

    def written_through_data(self, x: Tensor) -> Tensor:
        self.level.data.mul_(1.1)
        return x * self.level

    def plain_object(self, x: Tensor) -> Tensor:
        self.facts.calls += 1
        self.seen["means"].append(x.detach().mean())
        return x + 0.1 * self.facts.calls + sum(self.seen["means"])

    def dropout(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, self.training)

    def own_noise(self, x: Tensor) -> Tensor:
        if not hasattr(self, "noise"):
            self.noise = torch.randn(FEATURES)
        return x + 0.1 * self.noise


DRAWS = ("dropout", "own_noise")
HABITS = ("late_attribute", "late_hook", "late_buffer", "first_batch", "first_batch_through_data", "running_mean",
          "until_first_batch", "clipped_through_data", "written_through_data", "plain_object", *DRAWS)  # fmt: skip


def plan_of(seed: int, number: int) -> Plan:
    """Draw a module."""
    draw = random.Random(f"{seed} {number}")
    wraps = draw.choice(list(WRAPS)), draw.choice(list(WRAPS))
    lazy = draw.random() < 0.3
    habits = tuple(draw.sample(HABITS, draw.randint(0, 4)))
    return Plan(draw.choice((4, 6)), wraps, draw.choice(list(NORMS)), draw.random() < 0.3, lazy, habits)


def data_of(seed: int, number: int) -> Any:
    """Draw clients of different sizes."""
    draw = torch.Generator().manual_seed(1000 * seed + number)
    sizes = [int(size) for size in torch.randint(4, 12, (3,), generator=draw)]
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    inputs = torch.randn(len(owners), FEATURES, generator=draw)
    return hansa.data.from_arrays(inputs, torch.randint(CLASSES, (len(owners),), generator=draw), clients=owners)


def method() -> hansa.Algorithm:
    return hansa.presets.fedavg(local_lr=LR, steps=STEPS, batch_size=BATCH, participation=1.0)


def plain_loop(make: Callable[[], nn.Module], data: Any, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Federated averaging in plain PyTorch: each client begins with a new module and the server's state."""
    server = start
    for round in range(ROUNDS):
        ends = []
        for client in range(data.population):
            module, rows = make().double(), data.rows(client)
            module.load_state_dict(server)
            draw = hansa.Key(0).child("local", round, client, "batch").numpy()
            passes = [draw.permutation(len(rows)) for _ in range(-(-STEPS * BATCH // len(rows)))]
            order = torch.from_numpy(np.concatenate(passes))
            optimizer = torch.optim.SGD(module.parameters(), LR)
            for batch in rows[order[: STEPS * BATCH]].view(STEPS, BATCH):
                optimizer.zero_grad()
                cross_entropy(module(data.inputs[batch].double()), data.targets[batch]).backward()
                optimizer.step()
            ends.append({name: value.clone() for name, value in module.state_dict().items() if name in server})
        server = {name: _mean(name, value, [end[name] for end in ends]) for name, value in server.items()}
    return server


def _mean(name: str, before: Tensor, ends: list[Tensor]) -> Tensor:
    """The mean; of flags the nearest one; BatchNorm's count of batches, which has no effect, stays."""
    if name.endswith("num_batches_tracked"):
        return before
    return (
        torch.stack(ends).double().mean(0).round().to(before.dtype)
        if name in ("on", "waiting")
        else torch.stack(ends).mean(0)
    )


def check(seed: int, number: int, *, workers: bool = True) -> Plan:
    """Raise unless a module trains as by a plain loop, and by two workers as by one."""
    plan, data = plan_of(seed, number), data_of(seed, number)
    task = hansa.Task(partial(Made, plan), cross_entropy, data, execution="eager", name="Made")
    run = Run(method(), task, seed=0, dtype=torch.float64)
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.advance(ROUNDS)
    if not set(plan.habits) & set(DRAWS):
        found = run.model.state_dict()
        for name, value in plain_loop(task.model, data, start).items():
            close = torch.allclose(found[name].double(), value.double(), rtol=1e-9, atol=1e-11)
            assert close, f"module {number} of seed {seed}, {plan}: {name} is not that of a plain loop"
    if workers:
        one, two = (hansa.run(method(), task, rounds=ROUNDS, seed=0, workers=count) for count in (1, 2))
        assert torch.equal(one.params, two.params), f"module {number} of seed {seed}, {plan}: two workers differ"
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for number in range(arguments.modules):
        check(arguments.seed, number)
    print(f"{arguments.modules} modules: equal to a plain loop, and for two workers")


if __name__ == "__main__":
    main()
