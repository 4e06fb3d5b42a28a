"""FedMGDA+: the common descent direction of this round's participants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hansa.aggregate.base import BaseAggregator, Combined, gram_matrix, sum_updates
from hansa.aggregate.min_norm import min_norm
from hansa.core.errors import check_fraction
from hansa.core.types import RoundContext, State, Update, in_client_order


@dataclass(frozen=True, slots=True)
class mgda(BaseAggregator):
    """u_i = Delta_i/||Delta_i||; lambda = argmin ||sum lambda_i u_i|| over the simplex, |lambda_i - 1/M| <= epsilon;
    Delta = sum lambda_i u_i (FedMGDA+, Hu 2022).

    epsilon = 1 is the whole simplex, epsilon = 0 the plain mean of unit updates. Zero updates are left out.

    Args:
        epsilon: Largest distance of a weight from 1/M; 1 does not constrain.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> mgda().combine(updates, {}, ctx).vector
    tensor([1.])
    """

    epsilon: float = 1.0
    cites: ClassVar[tuple[str, ...]] = ("hu2022",)
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction("mgda", "epsilon", self.epsilon, "1 leaves the weights free on the simplex.", above_zero=False)

    def init(self, dim: int, population: int) -> State:
        return {}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        products = gram_matrix([update.vector for update in ordered])
        norms = products.diagonal().sqrt()
        moving = [i for i in range(len(ordered)) if norms[i] > 0]
        if not moving:
            return Combined(ordered[0].vector.clone(), state, {"weights": [0.0] * len(ordered)})
        scale = 1 / norms[moving]
        unit = products[moving][:, moving] * scale[:, None] * scale[None, :]
        uniform = 1 / len(moving)
        solved = min_norm(unit, lower=max(0.0, uniform - self.epsilon), upper=min(1.0, uniform + self.epsilon)).weights
        coefficients = [0.0] * len(ordered)
        weights = [0.0] * len(ordered)
        for position, i in enumerate(moving):
            weights[i] = float(solved[position])
            coefficients[i] = float(solved[position] * scale[position])
        return Combined(sum_updates(ordered, coefficients), state, {"weights": weights})
