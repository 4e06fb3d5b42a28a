"""Robust aggregators, which tolerate a few bad clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from hansa.aggregate.base import (
    Aggregator,
    BaseAggregator,
    Combined,
    Weights,
    gram_matrix,
    require_aggregator,
    sum_updates,
)
from hansa.core.bounds import bound, floor_share
from hansa.core.errors import HansaError, check_decay, check_integer, check_positive
from hansa.core.protocols import with_defaults
from hansa.core.types import RoundContext, State, Update, Vector, in_client_order
from hansa.core.vectors.arithmetic import norm_on_device, sort_vectors

_BLOCK = 1 << 14  # coordinates; a few dozen updates of them are in the cache


def _mean_of_middle(updates: Sequence[Update], middle: slice) -> Vector:
    """Average a range of the sorted values of each coordinate, block by block to bound memory."""
    vectors = [update.vector for update in updates]
    out = torch.empty_like(vectors[0])
    for start in range(0, out.numel(), _BLOCK):
        ordered = sort_vectors([v[start : start + _BLOCK] for v in vectors])
        out[start : start + _BLOCK] = torch.stack(ordered[middle]).mean(dim=0)
    return out


@dataclass(frozen=True, slots=True)
class median(BaseAggregator):
    """Coordinate-wise median; for an even number, the mean of the two middle values (Yin 2018).

    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> median().combine(updates, {}, ctx).vector
    tensor([2.])
    """

    cites: ClassVar[tuple[str, ...]] = ("yin2018",)
    on_device: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        n = len(updates)
        middle = slice((n - 1) // 2, n // 2 + 1)
        return Combined(_mean_of_middle(in_client_order(updates), middle), state, {})


@dataclass(frozen=True, slots=True)
class trimmed_mean(BaseAggregator):
    """Coordinate-wise mean without the floor(trim * M) smallest and as many largest values (Yin 2018).

    Args:
        trim: Fraction of the values dropped at either end, below 0.5.

    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> trimmed_mean(0.34).combine(updates, {}, ctx).vector
    tensor([2.])
    """

    trim: float = field(default=0.1, metadata=bound(check_decay, "0.1 drops a tenth at either end.", below=0.5))
    cites: ClassVar[tuple[str, ...]] = ("yin2018",)
    on_device: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        cut = floor_share(self.trim, len(updates))
        middle = slice(cut, len(updates) - cut)
        return Combined(_mean_of_middle(in_client_order(updates), middle), state, {})


@dataclass(frozen=True, slots=True)
class krum(BaseAggregator):
    """The mean of the ``keep`` updates with the smallest sums of squared distances to their M - f - 2 nearest others
    (Krum with keep = 1, Multi-Krum above; Blanchard 2017).

    Args:
        byzantine: Number f of bad clients to tolerate.
        keep: Number of updates to average.

    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> krum(byzantine=0).combine(updates, {}, ctx).vector
    tensor([1.])
    """

    byzantine: int = field(default=1, metadata=bound(check_integer, minimum=0))
    keep: int = field(default=1, metadata=bound(check_integer))
    cites: ClassVar[tuple[str, ...]] = ("blanchard2017",)
    on_device: ClassVar[bool] = True

    @property
    def min_updates(self) -> int:
        """Minimum number of updates; a round with fewer is below the quorum."""
        return max(self.byzantine + 3, self.keep)

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        n = len(ordered)
        nearest = n - self.byzantine - 2
        if n < self.min_updates:
            raise HansaError(
                f"krum(byzantine={self.byzantine}, keep={self.keep}) needs at least {self.min_updates} updates, this "
                f"round has {n}. Sample more clients, or lower byzantine or keep.",
                component="krum",
                argument="byzantine",
            )
        products = gram_matrix([update.vector for update in ordered])
        squared = products.diagonal()
        distances = (squared[:, None] + squared[None, :] - 2 * products).clamp_(min=0)
        distances.fill_diagonal_(math.inf)
        scores = distances.sort(dim=1).values[:, :nearest].sum(dim=1)
        chosen = sorted(torch.argsort(scores, stable=True)[: self.keep].tolist())
        picked = [ordered[i] for i in chosen]
        vector = sum_updates(picked, [1 / self.keep] * self.keep)
        return Combined(vector, state, {"chosen": [update.client for update in picked]})


@dataclass(frozen=True, slots=True)
class clipped(BaseAggregator):
    """Clip every update to at most ``norm`` before the wrapped aggregator.

    Args:
        inner: Aggregator of the clipped updates.
        norm: Largest norm of an update.

    >>> from hansa.aggregate import mean
    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> clipped(mean(), norm=3.0).combine(updates, {}, ctx).vector
    tensor([2.])
    """

    inner: Aggregator = field(metadata=bound(require_aggregator))
    norm: float = field(metadata=bound(check_positive))

    @property
    def min_updates(self) -> int:
        """Minimum number of updates of the wrapped aggregator."""
        return with_defaults(self.inner, BaseAggregator).min_updates

    @property
    def weights(self) -> Weights:
        """Weights of the wrapped aggregator."""
        return with_defaults(self.inner, BaseAggregator).weights

    @property
    def on_device(self) -> bool:
        """Whether the wrapped aggregator computes on the device of the updates."""
        return with_defaults(self.inner, BaseAggregator).on_device

    @property
    def momentum_storage(self) -> Literal["ram", "disk"]:
        """Row storage of the wrapped aggregator."""
        return with_defaults(self.inner, BaseAggregator).momentum_storage

    def init(self, dim: int, population: int) -> State:
        return self.inner.init(dim, population)

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        bounded, count = [], 0
        for update in in_client_order(updates):
            length = float(norm_on_device(update.vector))
            if length > self.norm:
                shorter = update.vector * (self.norm / length)
                update = Update(update.client, update.cohort, shorter, update.samples, update.steps, update.loss)
                count += 1
            bounded.append(update)
        combined = self.inner.combine(bounded, state, ctx)
        return combined._replace(info={**combined.info, "clipped": count})
