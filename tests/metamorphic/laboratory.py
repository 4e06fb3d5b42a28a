"""Five clients of very unequal sizes, on an eager and on a native model; and what relations are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from contracts.small import NAMES
from exactness.laboratory import task
from hansa import compress, gossip, presets, sample
from hansa.core import native
from hansa.core.keys import Key
from hansa.data.federated import FederatedData
from oracle.quadratic import heterogeneous

SIZES = (4, 40, 17, 9, 23)
CLIENTS, ROUNDS, STEPS, BATCH = len(SIZES), 3, 3, 6
CHOSEN = ((0, 2), (1, 2, 4), (0, 3))
"""Who takes part, round by round."""
GROUPS = ((3, 0, 2), (4, 1))
"""Clusters, in the order of their rings."""
REPORTERS = ((0, 2, 4), (3, 1), (2, 3, 4, 1))
COMPUTING = (((0, 4), (3, 2, 1), (1,)), ((2, 4, 1), (3,), (0, 4)), ((0, 1), (3, 4), (0, 2, 3)))

GOSSIPING = ("ha_fed", "afga", "cafga")
DECENTRALIZED = ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")
FEDERATED = tuple(name for name in NAMES if name not in (*GOSSIPING, *DECENTRALIZED))
ASYNCHRONOUS = ("fedasync", "fedbuff", "fadas", "ca2fl")
COUNTS_EVERYBODY = ("scaffold", "feddyn", "ca2fl")
"""Methods in which the number of all clients stands in an equation."""


class Net(nn.Module):
    """As users write theirs: normalisation with buffers, a layer that draws, a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(nn.functional.dropout(hidden, 0.2, self.training))


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(17)
    rows = sum(SIZES)
    owner = np.repeat(np.arange(CLIENTS), SIZES)
    inputs = draw.normal(size=(rows, 4)) + 0.7 * np.sin(owner)[:, None]
    return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy((draw.integers(0, 3, rows) + owner // 2) % 3)


def held(owners: Sequence[int] = tuple(range(CLIENTS))) -> FederatedData:
    """Client i holds the rows of client ``owners[i]`` of the laboratory."""
    ends = np.cumsum((0, *SIZES))
    rows = [np.arange(ends[owner], ends[owner + 1]) for owner in owners]
    offsets = torch.tensor([0, *np.cumsum([len(own) for own in rows]).tolist()])
    return FederatedData(*samples(), torch.from_numpy(np.concatenate(rows)), offsets, classes=3, name="unequal")


@cache
def bowls() -> hansa.training.quadratic:
    """The same clients with losses written as matrices: every gradient is a full one."""
    return task(heterogeneous(23, CLIENTS, list(SIZES), 6))


class Path:
    """A way to compute: a model, a precision, and how far apart equal sums may lie."""

    def __init__(self, name: str, model: Any, dtype: torch.dtype, near: float, execution: Any) -> None:
        self.name, self.model, self.dtype, self.near, self.execution = name, model, dtype, near, execution

    def task(self, owners: Sequence[int] = tuple(range(CLIENTS)), loss: Any = cross_entropy) -> hansa.Task:
        return hansa.Task(self.model, loss, held(owners), execution=self.execution, name="unequal")

    def run(self, algorithm: hansa.Algorithm, on: hansa.Task | None = None, rounds: int = ROUNDS) -> hansa.Run:
        on = self.task() if on is None else on
        return hansa.run(algorithm, on, rounds=rounds, dtype=self.dtype, keep_params=True, evaluate_every=0)

    def __repr__(self) -> str:
        return self.name


EAGER = Path("eager", Net, torch.float64, 1e-9, "eager")
NATIVE = Path("native", stack, torch.float32, 2e-4, "native" if native.available() else "eager")
PATHS = (EAGER, NATIVE)

UPLINK = {"compressor": compress.top_k(0.3), "two_way": True}
HEARD = {"gossip_compressor": compress.quantize(4), "consensus_rate": 0.5}
OPTIONS = {"local_momentum": 0.5, "weight_decay": 0.01}


def variants(name: str) -> dict[str, dict[str, Any]]:
    """A preset as it is, with local options, and compressed wherever something can be."""
    found: dict[str, dict[str, Any]] = {"plain": {}}
    if name not in ("scaffold", "dadam", "d_amsgrad"):  # these have no place for momentum
        found["options"] = OPTIONS
    if name in GOSSIPING:
        found["compressed"] = {**UPLINK, **HEARD}
    elif name in ASYNCHRONOUS:  # refuse two-way replicas
        found["compressed"] = {"compressor": compress.top_k(0.3)}
    elif name not in DECENTRALIZED:
        found["compressed"] = UPLINK
    return found


CASES = [(name, variant) for name in NAMES for variant in variants(name)]


def method(name: str, variant: str = "plain", *, rename: Mapping[int, int] | None = None, **words: Any) -> Any:
    """A preset on the laboratory's clients, all choices given from outside, clients renamed where that is asked."""
    to = dict(enumerate(range(100))) if rename is None else rename
    said: dict[str, Any] = {"local_lr": 0.1, "steps": STEPS, "batch_size": BATCH, **variants(name)[variant]}
    if name in GOSSIPING:
        said["reporters"] = sample.replay([[to[c] for c in chosen] for chosen in REPORTERS])
        said["clusters"] = [[to[c] for c in group] for group in GROUPS]
        if name != "ha_fed":
            said["active"] = gossip.replay([[[to[c] for c in now] for now in steps] for steps in COMPUTING])
        if name == "afga":  # one graph over all: complete, so that it has no order of its own
            del said["clusters"]
            said["topology"] = gossip.complete()
    elif name in DECENTRALIZED:
        said["clusters"] = [[to[c] for c in group] for group in GROUPS]
    else:
        said["sampler"] = sample.replay([[to[c] for c in chosen] for chosen in CHOSEN])
    return presets.get(name, **{**said, **words})


class _Sharing:
    """Whether runs of methods as they are, which several relations start from, are computed once."""

    on = False


@contextmanager
def sharing() -> Iterator[None]:
    """Let `plain_run` compute each run once. Not where the code under test is changed."""
    _Sharing.on = True
    try:
        yield
    finally:
        _Sharing.on = False


@cache
def _shared_run(path: Path, name: str, variant: str) -> hansa.Run:
    return path.run(method(name, variant))


def plain_run(path: Path, name: str, variant: str, **words: Any) -> hansa.Run:
    """Three rounds of a method on the laboratory's clients."""
    return path.run(method(name, variant, **words)) if words or not _Sharing.on else _shared_run(path, name, variant)


_PLACES = {"local": 2, "uplink": 3, "gossip": 2, "work": 2}
"""Where a client stands in an address."""


@contextmanager
def drawing_as(others: Mapping[int, int]) -> Iterator[None]:
    """Clients draw what others would: every address that names a client is read as the other's."""
    real, real_digests = Key.digest, Key.digests

    def digests(self: Key, numbers: Iterable[int], *parts: str | int, size: int = 16) -> list[bytes]:
        return [self.child(number, *parts).digest(size) for number in numbers]

    def digest(self: Key, size: int = 16) -> bytes:
        place = _PLACES.get(str(self.path[0])) if self.path else None
        if place is None or len(self.path) <= place:
            return real(self, size)
        client = self.path[place]
        path = (*self.path[:place], others.get(client, client), *self.path[place + 1 :])  # type: ignore[call-overload]
        return real(Key(self.seed, path), size)

    Key.digest, Key.digests = digest, digests  # type: ignore[method-assign]
    try:
        yield
    finally:
        Key.digest, Key.digests = real, real_digests  # type: ignore[method-assign]


def assert_moved(run: hansa.Run) -> None:
    """A relation between runs that stand still shows nothing."""
    start = run.task.start(run.key, run.dtype)["model"]
    assert (run.trajectory - start).abs().amax(dim=1).min() > 1e-4


def assert_near(found: torch.Tensor, expected: torch.Tensor, near: float) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=near * scale)


def assert_same_rows(
    found: hansa.Run, expected: hansa.Run, near: float = 0.0, to: Mapping[int, int] | None = None
) -> None:
    """What clients remember, client by client; ``to`` has their other numbers."""
    for client in range(CLIENTS):
        mine, theirs = found.store.read((to or {}).get(client, client)), expected.store.read(client)
        assert mine.keys() == theirs.keys()
        for name, row in theirs.items():
            assert mine[name].dtype == row.dtype
            assert_near(mine[name].double(), row.double(), near)
