"""Six custom components. Each is a value: a frozen dataclass whose arguments a configuration may give by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hansa import Algorithm, Key, component, presets
from hansa.aggregate import Combined
from hansa.compress import Coder
from hansa.core.schedule import Rate, rate_at
from hansa.core.types import Population, RoundContext, State, Update, in_client_order
from hansa.gossip import Topology, WeightMatrix, metropolis


@dataclass(frozen=True, slots=True)
class ternary(Coder):
    """C(x) = s t with t = sign(x) where |x| > threshold * mean |x|, else 0, and s the mean magnitude kept."""

    threshold: float = 0.7

    def payload(self, x: NDArray[Any], key: Key) -> list[bytes | NDArray[Any]]:
        size = np.abs(x)
        kept = size > self.threshold * size.mean()
        scale = size[kept].mean() if kept.any() else x.dtype.type(0)
        return [scale.astype(x.dtype).tobytes(), np.packbits(kept), np.packbits(kept & (x < 0))]

    def read(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        scale = np.frombuffer(payload, dtype, 1)[0]
        bits = np.frombuffer(payload[dtype.itemsize :], np.uint8).reshape(2, -(-dim // 8))
        kept, negative = np.unpackbits(bits, axis=1, count=dim)
        return np.asarray(scale * (kept.astype(dtype) - 2 * negative.astype(dtype)))

    def max_payload(self, dim: int, itemsize: int) -> int:
        return itemsize + 2 * -(-dim // 8)


@dataclass(frozen=True, slots=True)
class lion:
    """step = lr sign(b1 m + (1-b1) Delta); m <- b2 m + (1-b2) Delta (Chen 2023)."""

    lr: Rate = 0.01
    b1: float = 0.9
    b2: float = 0.99

    def init(self, x: Tensor) -> State:
        return {"m": torch.zeros_like(x)}

    def update(self, delta: Tensor, state: State, ctx: RoundContext) -> tuple[Tensor, State]:
        step = rate_at(self.lr, ctx.round) * torch.sign(self.b1 * state["m"] + (1 - self.b1) * delta)
        return step, {"m": self.b2 * state["m"] + (1 - self.b2) * delta}


@dataclass(frozen=True, slots=True)
class geometric_median:
    """The point with the least sum of distances to the updates, by Weiszfeld's iteration (Pillutla 2022)."""

    iterations: int = 8
    eps: float = 1e-6

    def init(self, dim: int, population: int) -> State:
        return {}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        points = torch.stack([update.vector for update in in_client_order(updates)])
        centre = points.mean(dim=0)
        for _ in range(self.iterations):
            near = 1 / (points - centre).norm(dim=1, keepdim=True).clamp_min(self.eps)
            centre = (near * points).sum(dim=0) / near.sum()
        return Combined(centre, state, {"spread": float((points - centre).norm(dim=1).mean())})


@dataclass(frozen=True, slots=True)
class round_robin:
    """Select ``count`` clients in each round, in cyclic order."""

    count: int = 2

    def check(self, population: int) -> None:
        if self.count > population:
            raise ValueError(f"round_robin(count={self.count}): there are {population} clients.")

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        first = round * self.count
        return tuple(sorted({(first + turn) % population.count for turn in range(self.count)}))


@dataclass(frozen=True, slots=True)
class chordal_ring(Topology):
    """A ring with additional edges to the client ``chord`` places on; Metropolis-Hastings weights."""

    chord: int = 3

    def weights(self, n: int) -> WeightMatrix:
        hops = {1 % n, self.chord % n} - {0}
        return metropolis(n, {tuple(sorted((i, (i + hop) % n))) for i in range(n) for hop in hops})


@component
def server_lion(*, lr: Rate = 0.01, **common: Unpack[presets.Common]) -> Algorithm:
    """Server Lion: FedAvg's clients, Lion at the server."""
    return presets.fedavg(**common).with_server(lion(lr))
