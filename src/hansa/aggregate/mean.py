"""Means: FedAvg's, and FedNova's normalised one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hansa.aggregate.base import Combined, Weights, check_weights, normalise, weighted_sum
from hansa.types import RoundContext, State, Update, in_client_order


@dataclass(frozen=True, slots=True)
class mean:
    """Delta = sum_i p_i Delta_i with p normalised over the updates at hand (FedAvg, McMahan 2017)."""

    weights: Weights = "uniform"
    cites: ClassVar[tuple[str, ...]] = ("mcmahan2017",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights("mean", self.weights))

    def init(self, dim: int, population: int) -> State:
        return {}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        return Combined(weighted_sum(ordered, normalise(self.weights, ordered)), state, {})


@dataclass(frozen=True, slots=True)
class nova:
    """Delta = (sum_i p_i tau_i) sum_i p_i Delta_i / tau_i (FedNova, Wang 2020).

    tau_i is the number of local steps, or its generalisation under local momentum or a proximal term.
    Public implementations differ by normalising p twice or nowhere; here p sums to one over the participants.
    """

    weights: Weights = "uniform"
    cites: ClassVar[tuple[str, ...]] = ("wang2020",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights("nova", self.weights))

    def init(self, dim: int, population: int) -> State:
        return {}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        p = normalise(self.weights, ordered)
        equal = len({u.steps for u in ordered}) == 1  # then nova is exactly the mean, to the last bit
        effective = ordered[0].steps if equal else math.fsum(w * u.steps for w, u in zip(p, ordered, strict=True))
        coefficients = [w * (effective / u.steps) for w, u in zip(p, ordered, strict=True)]
        return Combined(weighted_sum(ordered, coefficients), state, {"tau_effective": effective})
