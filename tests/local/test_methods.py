"""Local methods beyond the affine correction, each against a reference of its own: FedSAM, FedBN, FedCM, kept AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from exactness.laboratory import problem
from exactness.laboratory import task as matrices
from hansa import presets
from hansa.algorithm import Channel
from hansa.engine import Loopback
from hansa.local import Correction, SolverResult, blocks, sam
from hansa.sample import replay
from hansa.server import adam, chain, scale
from mistakes import refused
from oracle.quadratic import averaging

pytestmark = pytest.mark.usefixtures("shared_workers")

LAB = problem()
WHO = ((0, 1, 3), (1, 2), (0, 3), (0, 1, 2, 3))


def bowls() -> Any:
    return matrices(LAB)


def follow(local: Any, steps: int, lr: float, server: Any = lambda t, mean: mean) -> np.ndarray:
    """The model after rounds in which WHO train by ``local``, in NumPy."""
    return averaging(LAB, np.zeros(LAB.dim), WHO, steps, lr, local=local, server=server)[-1]


def test_fedsam_takes_its_gradient_ahead():
    rho, lr = 0.3, 0.05

    def local(client, x, steps, lr):
        for _ in range(steps):
            g = LAB.grad(client, x)
            x = x - lr * LAB.grad(client, x + rho * g / np.linalg.norm(g))
        return x

    x = follow(local, 3, lr)
    method = presets.fedavg(local_lr=lr, steps=3, sampler=replay(WHO)).with_local(solver=sam(rho))
    run = hansa.run(method, bowls(), rounds=len(WHO), dtype=torch.float64)
    np.testing.assert_allclose(run.params.numpy(), x, rtol=0, atol=1e-12)
    plain = hansa.run(presets.fedavg(local_lr=lr, steps=3, sampler=replay(WHO)), bowls(), rounds=4, dtype=torch.float64)
    assert not np.allclose(plain.params.numpy(), x, atol=1e-4)


@dataclass(frozen=True, slots=True)
class leaning:
    """FedCM's client: steps along alpha g + (1 - alpha) Delta, at the rate alpha lr with s = (1/alpha - 1) Delta."""

    alpha: float
    channels: ClassVar[tuple[str, ...]] = ()
    receives: ClassVar[tuple[str, ...]] = ("momentum",)
    memory: ClassVar[tuple[str, ...]] = ()
    uniform_only: ClassVar[bool] = False
    cites: ClassVar[tuple[str, ...]] = ()
    pull: ClassVar[float] = 0.0

    def correction(self, got, memory):
        return Correction(shift=(1 / self.alpha - 1) * got["momentum"])

    def finish(self, change, steps, lr, got, memory):
        return SolverResult({}, {})


@dataclass(frozen=True, slots=True)
class descent_direction:
    """Delta = - aggregate / (tau lr): the mean gradient along the way."""

    times: float

    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta * -self.times, state


def fedcm(alpha: float, lr: float, steps: int, **words: Any) -> hansa.Algorithm:
    plain = presets.fedavg(local_lr=alpha * lr, steps=steps, **words)
    momentum = Channel(follows="model", server=descent_direction(1 / (steps * lr)))
    local = hansa.LocalPhase(solver=leaning(alpha), steps=plain.local.steps, lr=plain.local.lr)
    return hansa.Algorithm("fedcm", plain.sampler, local, {**plain.channels, "momentum": momentum})


def test_fedcm_hears_a_momentum_that_the_server_makes():
    alpha, lr, steps = 0.2, 0.1, 3
    delta = np.zeros(LAB.dim)

    def local(client, x, steps, lr):
        for _ in range(steps):
            x = x - lr * (alpha * LAB.grad(client, x) + (1 - alpha) * delta)
        return x

    def server(t, mean):
        delta[:] = -mean / (steps * lr)
        return mean

    x = follow(local, steps, lr, server)
    run = hansa.run(fedcm(alpha, lr, steps, sampler=replay(WHO)), bowls(), rounds=len(WHO), dtype=torch.float64)
    np.testing.assert_allclose(run.params.numpy(), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.state.vectors["momentum"].numpy(), delta, rtol=0, atol=1e-12)
    assert all(record["down_bytes"] == 2 * record["up_bytes"] for record in run.history), "it goes one way only"


class Normed(nn.Module):
    """A model as people write them, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Headed(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


SIZES = (5, 9, 7)


def normed_data() -> Any:
    draw = torch.Generator().manual_seed(3)
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    inputs = torch.randn(sum(SIZES), 4, generator=draw, dtype=torch.float64)
    return hansa.data.from_arrays(
        inputs, torch.randint(2, (sum(SIZES),), generator=draw), clients=owners, dtype=torch.float64
    )


def normed() -> hansa.Task:
    return hansa.Task(Normed, nn.functional.cross_entropy, normed_data())


def test_fedbn_keeps_normalisation_at_home():
    task, data = normed(), normed_data()
    who = ((0, 1), (1, 2), (0, 2), (0, 1, 2))
    words = {"local_lr": 0.1, "steps": 2, "batch_size": None, "sampler": replay(who)}
    method = presets.fedavg(**words).with_local(private_blocks=blocks("norm.*"))
    run = hansa.run(method, task, rounds=len(who), dtype=torch.float64)
    start = task.module(task.start(hansa.Key(0), torch.float64)).double()
    shared = {name: p.detach().clone() for name, p in start.named_parameters() if not name.startswith("norm")}
    private = {
        client: {name: v.detach().clone() for name, v in start.state_dict().items() if name.startswith("norm")}
        for client in range(3)
    }
    for round in who:
        ends = []
        for client in round:
            module = Normed().double()
            module.load_state_dict({**shared, **private[client]})
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            rows = data.rows(client)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(data.inputs[rows].double()), data.targets[rows]).backward()
                optimizer.step()
            private[client] = {n: v.detach().clone() for n, v in module.state_dict().items() if n.startswith("norm")}
            ends.append({n: p.detach() for n, p in module.named_parameters() if n in shared})
        shared = {name: torch.stack([end[name] for end in ends]).mean(dim=0) for name in shared}
    found = task.layout.unpack(run.params)
    for name, value in shared.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    for name in ("norm.weight", "norm.bias"):
        assert torch.equal(found[name], start.get_parameter(name).detach()), "private blocks never reach the server"
    for client in range(3):
        own = torch.cat([private[client]["norm.weight"], private[client]["norm.bias"]])
        torch.testing.assert_close(run.store.read(client)["local/private"], own, rtol=0, atol=1e-12)


SLOW_LINKS = hansa.pace.devices(up_bandwidth=10.0, down_bandwidth=10.0)


@pytest.mark.parametrize(
    "make",
    [
        presets.fedavg,
        presets.scaffold,
        presets.fedcams,
        partial(presets.fedcams, two_way=True),
        presets.ca2fl,
        partial(presets.fedbuff, compressor=hansa.compress.sign()),
    ],
    ids=["fedavg", "scaffold", "fedcams", "fedcams, two ways", "ca2fl", "fedbuff of signs"],
)
def test_private_blocks_are_not_on_the_wire(make):
    words, links = {"local_lr": 0.1, "steps": 2, "batch_size": 3, "participation": 1.0}, {"profile": SLOW_LINKS}
    task, body = (hansa.Task(m, nn.functional.cross_entropy, normed_data()) for m in (Headed, lambda: nn.Linear(4, 3)))
    run = hansa.run(make(**words).with_local(private_blocks=blocks("last.*")), task, rounds=3, **links)
    whole = hansa.run(make(**words), body, rounds=3, **links)
    for private, same in zip(run.history, whole.history, strict=True):
        for counted in ("up_bytes", "down_bytes", "simulated_seconds"):
            assert private[counted] == same[counted], counted
    start, end = (task.layout.unpack(v) for v in (task.start(hansa.Key(0), torch.float32)["model"], run.params))
    for name in start:  # nor do they reach the compressor or the server's optimizer
        assert torch.equal(start[name], end[name]) == name.startswith("last."), name


@pytest.mark.parametrize("split", [(6, 1), (2, 3), (1, 6)])
def test_adamw_with_kept_state_is_one_long_adamw(split):
    steps, rounds = split
    data = hansa.data.from_arrays(
        normed_data().inputs[:9].double(), torch.arange(9) % 2, clients=[0] * 9, dtype=torch.float64
    )
    task = hansa.Task(lambda: nn.Linear(4, 2), nn.functional.cross_entropy, data)
    local = {
        "optimizer": adam(0.9, 0.999, 1e-8, bias_correction=True),
        "decoupled_weight_decay": True,
        "optimizer_state": "kept",
    }
    words = {"local_lr": 0.03, "steps": steps, "batch_size": None, "weight_decay": 0.1}
    run = hansa.run(presets.fedavg(**words).with_local(**local), task, rounds=rounds, dtype=torch.float64)
    module = task.module(task.start(hansa.Key(0), torch.float64)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.03, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(data.inputs.double()), data.targets).backward()
        optimizer.step()
    found = task.layout.unpack(run.params)
    for name, value in module.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


def test_an_optimizer_may_start_from_what_the_server_sends():
    """Heavy-ball momentum of the server's making, as in Mime: m starts each round from a broadcast channel."""
    held, lr, beta = np.zeros(LAB.dim), 0.05, 0.8

    def train(client, x, steps, lr):
        m = held
        for _ in range(steps):
            m = beta * m - LAB.grad(client, x)
            x = x + lr * m
        return x

    def server(t, mean):
        held[:] = 0.5 * mean
        return mean

    x = follow(train, 2, lr, server)
    plain = presets.fedavg(local_lr=lr, steps=2, sampler=replay(WHO))
    local = {"optimizer": hansa.server.momentum(beta), "optimizer_state": {"m": "momentum"}}
    phase = hansa.LocalPhase(steps=plain.local.steps, lr=lr, **local)
    channels = {**plain.channels, "momentum": Channel(follows="model", server=scale(0.5))}
    run = hansa.run(hansa.Algorithm("mime", plain.sampler, phase, channels), bowls(), rounds=4, dtype=torch.float64)
    np.testing.assert_allclose(run.params.numpy(), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3])
def test_all_of_them_are_the_same_for_any_number_of_workers(workers):
    local = {
        "optimizer": chain(adam(), scale(0.5)),
        "optimizer_state": "kept",
        "private_blocks": blocks("norm.*"),
        "frozen_blocks": blocks("last.bias"),
        "solver": sam(0.1),
    }
    words = {"local_lr": 0.05, "steps": 2, "batch_size": 3, "participation": 0.7}
    method = presets.fedavg(**words).with_local(**local)
    alone, several = (hansa.run(method, normed(), rounds=3, workers=count) for count in (1, workers))
    for other in (several, hansa.Run(method, normed(), engine=Loopback).advance(3)):
        assert torch.equal(alone.params, other.params)
        assert alone.store.digest() == other.store.digest()


test_what_makes_no_sense_is_refused = refused(
    (lambda: hansa.LocalPhase(optimizer_state="keep"), "optimizer_state='keep'"),
    (lambda: hansa.LocalPhase(optimizer_state={"m": "momentum"}), "a local optimizer"),
    (lambda: hansa.LocalPhase(private_blocks="bn*"), r'hansa.local.blocks\("bn\*"\)'),
    (lambda: blocks(), "names or patterns"),
    (lambda: presets.ha_fed().with_local(private_blocks=blocks("a")), "Omit private, frozen and optimizer"),
    (lambda: hansa.Algorithm(channels={"model": Channel(), "extra": Channel(follows="mode")}), "mean model"),
    (lambda: hansa.Algorithm(local=hansa.LocalPhase(solver=leaning(0.5))), "Channel\\(follows='model'"),
    (lambda: hansa.Run(presets.fedavg().with_local(private_blocks=blocks("a")), bowls()), "without parameter names"),
    (lambda: hansa.Run(presets.fedavg().with_local(private_blocks=blocks("nrm.*")), normed()), "no parameter matches"),
    (lambda: hansa.Run(presets.fedavg().with_local(private_blocks=blocks("*")), normed()), "so that none is shared"),
)


def test_a_schedule_inside_a_local_optimizer_follows_the_round():
    rate = hansa.local.piecewise((0.1, 0.02, 0.3))
    scheduled = presets.fedavg(local_lr=1.0, steps=3, sampler=replay(WHO)).with_local(optimizer=scale(rate))
    plain = presets.fedavg(local_lr=rate, steps=3, sampler=replay(WHO))
    expected = hansa.run(plain, bowls(), rounds=4, dtype=torch.float64).params
    torch.testing.assert_close(hansa.run(scheduled, bowls(), rounds=4, dtype=torch.float64).params, expected)
    mixed = presets.dsgd(local_lr=1.0, steps=2).with_local(optimizer=chain(scale(rate)))
    alone = presets.dsgd(local_lr=rate, steps=2)
    expected = hansa.run(alone, bowls(), rounds=4, dtype=torch.float64).params
    torch.testing.assert_close(hansa.run(mixed, bowls(), rounds=4, dtype=torch.float64).params, expected)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return 100 * self.first(x) + self.second(x)


def test_frozen_blocks_do_not_count_in_the_norm_that_is_clipped():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    rows = hansa.data.from_arrays(x, x[:, :2] - 5, clients=[0] * 8)
    task = hansa.Task(Halves, nn.functional.mse_loss, rows)
    method = presets.fedavg(local_lr=1.0, steps=1, batch_size=None, max_grad_norm=0.5)
    run = hansa.Run(method.with_local(frozen_blocks=blocks("first.*")), task)
    before = run.model.state_dict()
    run.advance(1)
    after = run.model.state_dict()
    assert torch.equal(before["first.weight"], after["first.weight"])
    change = torch.cat([(after[name] - before[name]).flatten() for name in ("second.weight", "second.bias")])
    assert float(change.norm()) == pytest.approx(0.5, rel=1e-5)
