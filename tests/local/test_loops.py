"""Client loops of one's own, against fedavg and against references in plain PyTorch that share no code with the run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import compress, presets
from hansa.algorithm import Channel
from hansa.engine import Loopback
from hansa.local import BaseClientLoop, LoopResult, blocks, prox
from hansa.runs.driver import Run
from hansa.sample import replay
from hansa.testing import ContractError, check
from mistakes import refused

pytestmark = pytest.mark.usefixtures("shared_workers")

SIZES = (5, 23, 9, 14)
WHO = ((0, 1, 3), (1, 2), (0, 3), (0, 1, 2, 3))
WORDS: dict[str, Any] = {"local_lr": 0.1, "steps": 4, "batch_size": 3, "sampler": replay(WHO)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Noisy(Net):
    """With dropout, statistics that are averaged, and a counter that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(6), nn.Dropout(0.3), 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.drop(self.norm(torch.tanh(self.body(x))))) / min(self.calls, 4)


def people() -> Any:
    draw = torch.Generator().manual_seed(3)
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    inputs, targets = torch.randn(len(owners), 4, generator=draw), torch.randint(3, (len(owners),), generator=draw)
    return hansa.data.from_arrays(inputs, targets, clients=owners)


def task(model: Any = Net, **words: Any) -> hansa.Task:
    return hansa.Task(model, F.cross_entropy, people(), **words)


@dataclass(frozen=True)
class plain(BaseClientLoop):
    """Plain SGD by torch's optimizer."""

    def train(self, model, batches, lr, received, memory, key):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return LoopResult(sum(losses) / len(losses))


@dataclass(frozen=True)
class mutual(BaseClientLoop):
    """A network that travels and one that stays teach each other; noise by the key, and a report."""

    channels: ClassVar[tuple[str, ...]] = ("extra",)

    def train(self, model, batches, lr, received, memory, key):
        own = copy.deepcopy(model)
        if memory:
            own.load_state_dict(memory)
        chance, losses = key.torch(), []
        optimizer = torch.optim.SGD([*model.parameters(), *own.parameters()], lr)
        for x, y in batches:
            x = x + 0.1 * torch.randn(x.shape, generator=chance)
            shared, kept = model(x), own(x)
            loss = F.cross_entropy(shared, y) + F.cross_entropy(kept, y)
            loss = loss + F.mse_loss(shared, kept.detach()) + F.mse_loss(kept, shared.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        report = received["extra"] * 0.5 + torch.full_like(received["extra"], len(memory) + 1.0)
        return LoopResult(sum(losses) / len(losses), own.state_dict(), {"extra": report})


def with_extra(method: hansa.Algorithm) -> hansa.Algorithm:
    return method.exchange(local={"loop": mutual()}, channels={"extra": {}})


def rows_of(client: int, round: int) -> list[torch.Tensor]:
    """The batches of a client in a round, as documented: passes over its rows, each shuffled by a key."""
    data, work = people(), 4 * 3
    draw = hansa.Key(0).child("local", round, client, "batch").numpy()
    positions = [row for _ in range(-(-work // SIZES[client])) for row in draw.permutation(SIZES[client])][:work]
    return [(data.inputs[rows].double(), data.targets[rows]) for rows in data.rows(client)[positions].view(4, 3)]


def reference(step: Any, rounds: int = 4) -> torch.Tensor:
    """FedAvg of plain PyTorch: ``step(model, batches, memory, key)`` trains and returns the client's memory."""
    model, memory = Run(presets.fedavg(**WORDS), task(), seed=0, dtype=torch.float64).model, dict[int, Any]()
    for round, who in enumerate(WHO[:rounds]):
        trained = []
        for client in who:
            local = copy.deepcopy(model)
            memory[client] = step(local, rows_of(client, round), memory.get(client), key_of(client, round))
            trained.append(local.state_dict())
        start = model.state_dict()
        mean = {name: x + sum(y[name] - x for y in trained) / len(who) for name, x in start.items()}
        model.load_state_dict(mean)
    return torch.cat([each.flatten() for each in model.parameters()]).detach()


def key_of(client: int, round: int) -> hansa.Key:
    return hansa.Key(0).child("local", round, client)


def run_of(method: hansa.Algorithm, model: Any = Net, rounds: int = 4, **words: Any) -> Any:
    return hansa.run(method, task(model), rounds=rounds, seed=0, **words)


@pytest.mark.parametrize("model", [Net, Noisy])
@pytest.mark.parametrize(
    "more", [{}, {"batches": "short"}, {"batches": "continued"}], ids=["full", "short", "continued"]
)
def test_plain_sgd_as_a_loop_is_fedavg_bit_for_bit(model, more):
    method = presets.fedavg(**WORDS, weights="samples").with_local(**more)
    eager = hansa.run(method, task(model, execution="eager"), rounds=4, seed=0)
    own = hansa.run(method.with_local(loop=plain()), task(model), rounds=4, seed=0)
    assert torch.equal(own.params, eager.params)
    assert [row["test_loss"] if "test_loss" in row else row["train_loss"] for row in own.history] == pytest.approx(
        [row["test_loss"] if "test_loss" in row else row["train_loss"] for row in eager.history], abs=1e-6
    )


def test_two_networks_equal_plain_pytorch():
    def step(model, batches, memory, key):
        own, chance = copy.deepcopy(model) if memory is None else memory, key.torch()
        for x, y in batches:
            x = x + 0.1 * torch.randn(x.shape, generator=chance)
            one, other = model(x), own(x)
            losses = (F.cross_entropy(one, y) + F.mse_loss(one, other.detach()),
                      F.cross_entropy(other, y) + F.mse_loss(other, one.detach()))  # fmt: skip
            for net, loss in zip((model, own), losses, strict=True):
                gradients = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for parameter, g in zip(net.parameters(), gradients, strict=True):
                        parameter -= 0.1 * g
        return own

    found = run_of(with_extra(presets.fedavg(**WORDS)), dtype=torch.float64)
    torch.testing.assert_close(found.params, reference(step), rtol=0, atol=1e-12)
    extra, seen = 0.0, set()
    for who in WHO:  # the first report of a client is 1, the later ones 5: its memory has four rows
        extra = extra + sum(0.5 * extra + (5.0 if client in seen else 1.0) for client in who) / len(who)
        seen.update(who)
    torch.testing.assert_close(found.state.vectors["extra"], torch.full_like(found.params, extra))


def test_workers_and_a_resume_change_nothing(tmp_path):
    method = with_extra(presets.fedavg(**WORDS, compressor=compress.top_k(1 / 4)))
    whole = run_of(method, Noisy, out=tmp_path / "whole", workers=1)
    two = run_of(method, Noisy, workers=2)
    carried = Run(method, task(Noisy), seed=0, engine=Loopback).advance(4)
    run_of(method, Noisy, out=tmp_path / "parts", callbacks=[lambda run, record: run.state.round == 2])
    parts = hansa.resume(tmp_path / "parts", method, task(Noisy))
    assert whole.state.round == parts.state.round == 4
    for other in (two, carried, parts):
        assert torch.equal(whole.params, other.params)
        assert whole.store.digest() == other.store.digest()
    assert (
        whole.history[-1]["up_bytes"]
        < run_of(method.on("model", uplink=compress.direct()), Noisy).history[-1]["up_bytes"]
    )


@dataclass(frozen=True)
class counting(BaseClientLoop):
    """Counts its accepted rounds; from the second on one client sends what is refused."""

    def train(self, model, batches, lr, received, memory, key):
        rounds = memory.get("rounds", torch.zeros(1, dtype=torch.int64))
        rounds += 1  # in place: rows are copies
        with torch.no_grad():
            model.head.bias += 1e6 if rounds > 1 and len(batches) == 4 and model.head.bias.sum() > 2 else 1.0
        return LoopResult(0.0, {"rounds": rounds})


def test_the_memory_of_a_refused_update_is_dropped():
    method = presets.fedavg(**{**WORDS, "sampler": replay(((0, 1), (0, 1), (2,)))}).with_local(loop=counting())
    run = run_of(method, rounds=3, max_norm=1e3)
    assert run.history[1]["lost"] == 2
    assert {client: run.store.read(client)["loop/rounds"].item() for client in range(3)} == {0: 1, 1: 1, 2: 1}


def test_private_blocks_stay_with_their_client():
    method = presets.fedavg(**WORDS).with_local(private_blocks=blocks("head.*"))
    eager = hansa.run(method, task(execution="eager"), rounds=4, seed=0)
    own = run_of(method.with_local(loop=plain()))
    assert torch.equal(own.params, eager.params)
    assert torch.equal(own.store.read(1)["local/private"], eager.store.read(1)["local/private"])


@dataclass(frozen=True)
class careless(BaseClientLoop):
    """Leaves behind what the next client must not see."""

    how: str = "grad"

    def train(self, model, batches, lr, received, memory, key):
        if self.how == "other":
            model.head = nn.Linear(6, 3)
        if self.how == "tuple":
            return 0.5
        if self.how == "report":
            return LoopResult(0.5, {}, {"extra": received["model"]})
        if self.how == "row":
            return LoopResult(0.5, {"row": 3})
        received["model"].zero_()
        model.eval().requires_grad_(False)
        model.extra = "seen"
        for parameter in model.parameters():
            parameter.data = parameter.data + torch.rand(parameter.shape)
        assert model.head.weight.grad is None
        return LoopResult(0.5)


def test_what_a_loop_leaves_behind_is_put_back():
    method = presets.fedavg(**WORDS).with_local(loop=careless())
    first, second = run_of(method, workers=1), run_of(method, workers=2)
    assert torch.equal(first.params, second.params)
    assert not torch.equal(first.params, Run(method, task(), seed=0).params)


test_what_a_loop_cannot_be_is_refused = refused(
    (lambda: presets.ha_fed().with_local(loop=plain()), "client loop plain"),
    (lambda: presets.fedavg().with_local(loop=plain(), solver=prox(0.1)), r"solver=prox.*replaces the local steps"),
    (lambda: presets.scaffold().with_local(loop=plain()), "solver=scaffold"),
    (lambda: presets.fedavg(local_momentum=0.9).with_local(loop=plain()), "momentum=0.9"),
    (lambda: presets.fedavg().with_local(loop=plain(), frozen_blocks=blocks("head.*")), "frozen_blocks"),
    (lambda: presets.fedavg().with_local(loop=mutual()), r"the loop mutual\(\) reports on channel 'extra'"),
    (lambda: presets.fedavg().with_local(loop=plain), r"expected a client loop, with train"),
    (lambda: presets.fedavg().with_local(loop=Net()), "loop=Net.: expected a client loop"),
    (lambda: run_of(presets.fedavg().with_local(loop=careless("other")), rounds=1), "head.weight: training re"),
    (lambda: run_of(presets.fedavg().with_local(loop=careless("tuple")), rounds=1), "returned a float, expected L"),
    (lambda: run_of(presets.fedavg().with_local(loop=careless("report")), rounds=1), r"reports on \['extra'\]"),
    (lambda: run_of(presets.fedavg().with_local(loop=careless("row")), rounds=1), "'row' is a int, expected a"),
    *[(lambda words=words: hansa.run(presets.fedavg().with_local(loop=plain()), task(**words), rounds=1),
       "expected hansa.Task.*'auto' or 'eager'") for words in
      ({"execution": "vmap"}, {"execution": "native"}, {"autocast": "bfloat16"})],
    (lambda: hansa.run(presets.fedavg().with_local(loop=plain()),
                       hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2)), rounds=1),
     "a client loop is PyTorch code for a module"),
)  # fmt: skip


@dataclass(frozen=True)
class one_channel(plain):
    channels: ClassVar[Any] = "extra"


def test_check_accepts_loops_and_names_what_is_wrong():
    for loop in (plain(), mutual()):
        check(loop)
    with pytest.raises(ContractError, match="channels = 'extra', expected a tuple"):
        check(one_channel())
    with pytest.raises(ContractError, match="expected a client loop"):
        check(Net())


def test_the_loop_and_its_channel_are_part_of_a_composition():
    method = hansa.Algorithm(local=hansa.LocalPhase(loop=mutual()), channels={"model": Channel(), "extra": Channel()})
    assert method.local.channels == ("extra",)
    assert "mutual()" in repr(method)
