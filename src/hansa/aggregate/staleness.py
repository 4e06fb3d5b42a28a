"""Aggregators of asynchronous methods: updates discounted by staleness, mixed models, and cached updates."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

from hansa.aggregate.base import WEIGHTS, BaseAggregator, Combined, Weights, mean, normalize_weights, sum_updates
from hansa.core.bounds import Checked, bound, one_of
from hansa.core.errors import HansaError, check_fraction, check_non_negative
from hansa.core.protocols import check_component
from hansa.core.types import RoundContext, State, Update, Vector, in_client_order

CACHED_UPDATE = "server/calibrated/update"


@runtime_checkable
class Discount(Protocol):
    """A factor s(tau) for an update that is tau server steps old, with s(0) = 1 for a fresh one."""

    __slots__ = ()

    @abstractmethod
    def factor(self, staleness: int) -> float:
        """Return the factor of an update."""


@dataclass(frozen=True, slots=True)
class constant:
    """s(tau) = 1: staleness does not matter.

    >>> constant().factor(9)
    1.0
    """

    def factor(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class polynomial(Checked):
    """s(tau) = (1 + tau)^-a (Xie et al. 2019; FedBuff uses a = 0.5).

    Args:
        a: Exponent; 0 is constant.

    >>> polynomial(0.5).factor(3)
    0.5
    """

    a: float = field(default=0.5, metadata=bound(check_non_negative, "0.5 is usual."))
    cites: ClassVar[tuple[str, ...]] = ("xie2019",)

    def factor(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.a)


@dataclass(frozen=True, slots=True)
class hinge(Checked):
    """s(tau) = 1 for tau <= b, else 1 / (a (tau - b) + 1) (Xie et al. 2019).

    Args:
        a: Slope after b.
        b: Staleness up to which the factor is 1.

    >>> hinge(a=10.0, b=4).factor(4), hinge(a=10.0, b=4).factor(5)
    (1.0, 0.09090909090909091)
    """

    a: float = field(default=10.0, metadata=bound(check_non_negative))
    b: float = field(default=4.0, metadata=bound(check_non_negative))
    cites: ClassVar[tuple[str, ...]] = ("xie2019",)

    def factor(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)


DISCOUNT = bound(check_component, Discount, "a discount", example="hansa.aggregate.polynomial(0.5) is one.")


def _factors(discount: Discount, updates: Sequence[Update]) -> list[float]:
    factors = [float(discount.factor(update.staleness)) for update in updates]
    for update, factor in zip(updates, factors, strict=True):
        if not math.isfinite(factor) or factor < 0:
            raise HansaError(f"{discount!r}: the factor of staleness {update.staleness} is {factor}: expected >= 0.")
    return factors


@dataclass(frozen=True, slots=True)
class discounted(BaseAggregator):
    """Delta = sum_i p_i s(tau_i) Delta_i with weights p that sum to one: old updates count less (FedBuff, Nguyen 2022).

    As in FedBuff the factors are not normalized: a step of old updates is shorter. ``normalize`` divides by
    sum p_i s(tau_i). Without stale updates it is the mean, bit for bit.

    Args:
        staleness: Factor of an update by its staleness.
        weights: "uniform", "samples", or one number per client.
        normalize: Whether the factors only shift weight between updates.

    >>> from hansa.core.types import Population
    >>> updates = [Update(0, 0, torch.ones(1), 9, 1), Update(1, 1, torch.ones(1), 9, 1, staleness=3)]
    >>> discounted().combine(updates, {}, RoundContext(5, Population((9, 9)), (0, 1))).vector
    tensor([0.7500])
    """

    staleness: Discount = field(default_factory=polynomial, metadata=DISCOUNT)
    weights: Weights = field(default="uniform", metadata=WEIGHTS)
    normalize: bool = False
    cites: ClassVar[tuple[str, ...]] = ("nguyen2022",)
    on_device: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        factors = _factors(self.staleness, ordered)
        if all(factor == 1.0 for factor in factors):
            return mean(self.weights).combine(ordered, state, ctx)
        shares = normalize_weights(self.weights, ordered)
        weights = [share * factor for share, factor in zip(shares, factors, strict=True)]
        if self.normalize:
            total = math.fsum(weights)
            weights = [weight / total for weight in weights] if total > 0 else weights
        return Combined(sum_updates(ordered, weights), state, {})


@dataclass(frozen=True, slots=True)
class mixed_models(BaseAggregator):
    """x <- (1 - a) x + a y_i for each update in the order of arrival, a = alpha s(tau_i) (FedAsync, Xie et al. 2019).

    y_i is the client's model: the version that it started from plus its update. The step is the sum of these changes.

    Args:
        alpha: Share of a fresh client model.
        staleness: Factor of alpha by staleness.

    >>> from hansa.core.types import Population
    >>> updates = [Update(0, 0, torch.ones(1), 9, 1), Update(1, 1, torch.ones(1), 9, 1)]
    >>> mixed_models(0.5).combine(updates, {}, RoundContext(5, Population((9, 9)), (0, 1))).vector
    tensor([0.7500])
    """

    alpha: float = field(default=0.6, metadata=bound(check_fraction, "1 replaces the model by the client's."))
    staleness: Discount = field(default_factory=polynomial, metadata=DISCOUNT)
    cites: ClassVar[tuple[str, ...]] = ("xie2019",)
    on_device: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        total: Vector | None = None
        shares = [self.alpha * factor for factor in _factors(self.staleness, ordered)]
        for update, share in zip(ordered, shares, strict=True):
            change, base = update.vector, update.base_change
            if base is not None:
                change = change + base
            total = change * share if total is None else total.mul_(1 - share).add_(change, alpha=share)
        assert total is not None
        return Combined(total, state, {"mixing_rate": math.fsum(shares) / len(shares)})


@dataclass(frozen=True, slots=True)
class calibrated(BaseAggregator):
    """Delta = h + mean_S (Delta_i - h_i); h <- h + (1/N) sum_S (Delta_i - h_i); h_i <- Delta_i (CA2FL, Wang 2024).

    h_i is the last update of client i, 0 before its first, and h their mean over all N clients: clients that are slow
    or absent contribute their cached updates. The rows h_i are stored with the run, in memory or on disk.

    Args:
        momentum_storage: Keep the cached updates in memory ("ram") or on disk ("disk").

    >>> calibrated("disk").momentum_storage
    'disk'
    """

    momentum_storage: Literal["ram", "disk"] = field(default="ram", metadata=bound(one_of, "ram", "disk"))
    cites: ClassVar[tuple[str, ...]] = ("wang2024ca2fl",)

    def init(self, dim: int, population: int) -> State:
        return {"seen": torch.zeros(population, dtype=torch.bool), "mean": torch.zeros(0)}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        if ctx.rows is None:
            raise HansaError("calibrated keeps a row of every client: close the round with a store of rows.")
        ordered, seen = in_client_order(updates), state["seen"].clone()
        first = ordered[0].vector
        cache: Vector = state["mean"] if state["mean"].numel() else torch.zeros_like(first)
        total = torch.zeros_like(first)
        rows: dict[int, dict[str, Vector]] = {}
        for update in ordered:
            vector = update.vector
            total.add_(vector)
            if seen[update.client]:
                total.sub_(ctx.rows.read_many([update.client], CACHED_UPDATE)[0].to(vector))
            rows[update.client] = {CACHED_UPDATE: vector}
            seen[update.client] = True
        direction = cache + total / len(ordered)
        new_state = {"seen": seen, "mean": cache + total / ctx.population.count}
        return Combined(direction, new_state, {"seen": int(seen.sum())}, rows)
