"""Min-norm directions: FedAWARE over the momenta of all clients, FedMGDA+ over updates; gradient diversity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from hansa.aggregate.base import (
    BaseAggregator,
    Combined,
    Weights,
    client_weights,
    gram_matrix,
    normalize_weights,
    sum_updates,
)
from hansa.aggregate.min_norm import SOLVERS, MinNormSolver, min_norm
from hansa.core.bounds import Checked, bound, one_of, rule_or_numbers
from hansa.core.errors import HansaError, check_decay, check_fraction, invalid_argument
from hansa.core.types import RoundContext, RowReader, State, Update, Vector, in_client_order
from hansa.core.vectors import arithmetic
from hansa.server import ServerTransform
from hansa.server.base import require_server

FREE = "1 leaves the weights free on the simplex."
MOMENTUM = "server/aware/momentum"


def _check_decays(component: str, argument: str, alpha: Any) -> Any:
    """Raise unless alpha is a decay rate, or one for each client."""
    decays = tuple(alpha) if isinstance(alpha, (list, tuple)) else alpha
    for decay in decays if isinstance(decays, tuple) else (decays,):
        check_decay(component, argument, decay, "The paper uses 0.5; 0 forgets at once.")
    return decays


@dataclass(frozen=True, slots=True)
class aware(BaseAggregator):
    """m_i <- alpha m_i + (1-alpha) Delta_i for participants, m_i = Delta_i on first participation; lambda~ = argmin
    ||sum lambda_i m_i||^2 over the simplex of all clients seen; Delta = sum lambda~_i m_i (FedAWARE Alg. 1).

    Options reproduce the authors' code where it differs: ``normalize`` replaces m_i by m_i/||m_i|| (0 for 0) in both;
    ``explore`` averages, by ``weights``, until every client has participated; ``from_zero`` starts every m_i at 0;
    ``min_norm="authors"`` is their Frank-Wolfe, which stops before the minimum, so that steps are longer.
    ``project`` is a server transform whose step on the mean update is projected onto the direction.

    The shortest vector in the hull of very different momenta is short, and so are the steps of Algorithm 1.
    ``length="average"`` keeps the direction and gives it the length of FedAvg's step:
    Delta = ||sum_S lambda_i Delta_i|| d/||d|| with d = sum lambda~_i m_i, and 0 for d = 0. Its inner product with every
    m_i stays non-negative, so it is a common descent direction still.

    ``weights`` are the objective's lambda: they affect averages and reported diversities, not the direction.
    A zero momentum makes the direction zero, because zero is then the shortest vector.
    Only the Gram matrix is part of the state; the momenta are stored as rows of the run, in memory or on disk, in the
    run's dtype or in ``momentum_dtype``.

    Args:
        alpha: Decay rate of the momenta, or one for each client: a client that is seldom seen may forget faster.
        normalize: Scale momenta to unit length before they are combined.
        explore: Average the updates until every client has participated once.
        project: Server transform whose step is projected onto the direction.
        momentum_storage: Keep the momenta in memory ("ram") or on disk ("disk").
        momentum_dtype: "float32", "float64" or "bfloat16"; None stores the momenta in the dtype of the run.
        from_zero: Start momenta from zero instead of from the first update.
        min_norm: Solver of the min-norm problem: "exact", or "authors" for the one of the authors' code.
        weights: Weights of the clients in the objective.
        length: Length of the step: "min-norm" as in Algorithm 1, or "average", that of the participants' mean update.

    >>> rule = aware(alpha=0.5)
    >>> rule.alpha, rule.momentum_storage
    (0.5, 'ram')
    """

    alpha: float | tuple[float, ...] = field(default=0.5, metadata=bound(_check_decays))
    normalize: bool = False
    explore: bool = False
    project: ServerTransform | None = field(default=None, metadata=bound(require_server))
    momentum_storage: Literal["ram", "disk"] = field(default="ram", metadata=bound(one_of, "ram", "disk"))
    momentum_dtype: Literal["float32", "float64", "bfloat16"] | None = field(
        default=None, metadata=bound(one_of, "float32", "float64", "bfloat16")
    )
    from_zero: bool = False
    min_norm: MinNormSolver = field(default="exact", metadata=bound(one_of, *SOLVERS))
    weights: Weights = field(default="uniform", metadata=bound(rule_or_numbers, "uniform", "samples"))
    length: Literal["min-norm", "average"] = field(default="min-norm", metadata=bound(one_of, "min-norm", "average"))
    cites: ClassVar[tuple[str, ...]] = ("zeng2024",)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.length == "average" and self.project is not None:
            raise invalid_argument("aware", "length", self.length, "'min-norm': a projected step has its own length")

    def init(self, dim: int, population: int) -> State:
        if isinstance(self.alpha, tuple) and len(self.alpha) != population:
            expected = f"one number, or one for each of {population} clients"
            raise invalid_argument("aware", "alpha", f"{len(self.alpha)} numbers", expected)
        return {"clients": [], "gram": torch.zeros(0, 0, dtype=torch.float64), "project": {}}

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        if ctx.rows is None:
            raise HansaError("aware keeps a row of every client: close the round with a store of rows.")
        ordered = in_client_order(updates)
        fresh = self._update_momenta(ordered, state["clients"], ctx.rows)
        seen, gram = _update_gram(state["clients"], state["gram"], fresh, ctx.rows)
        exploring = self.explore and len(seen) < ctx.population.count
        average = None
        if exploring or self.project is not None or self.length == "average":
            average = sum_updates(ordered, normalize_weights(self.weights, ordered))
        info: dict[str, Any]
        if exploring:
            assert average is not None
            direction, info = average, {"exploring": 1.0, "seen": len(seen)}
        else:
            direction, info = self._direction(seen, gram, fresh, ctx, ordered[0].vector)
            if self.length == "average":
                assert average is not None
                direction = _with_length(direction, average)
        project_state = state["project"]
        if self.project is not None:
            assert average is not None
            step, project_state = self.project.update(average, project_state or self.project.init(average), ctx)
            direction = step if exploring else _project_onto(step, direction)
        rows = {client: {MOMENTUM: row} for client, row in fresh.items()}
        return Combined(direction, {"clients": seen, "gram": gram, "project": project_state}, info, rows)

    def _update_momenta(self, updates: Sequence[Update], seen: Sequence[int], rows: RowReader) -> dict[int, Vector]:
        """Return the participants' momenta after this round, as they will be stored."""
        fresh = {}
        seen_before = set(seen)
        for update in updates:
            row = update.vector
            alpha = self.alpha[update.client] if isinstance(self.alpha, tuple) else self.alpha
            if update.client in seen_before:
                momentum = rows.read_many([update.client], MOMENTUM)[0].to(row)
                row = momentum.mul_(alpha).add_(row, alpha=1 - alpha)
            elif self.from_zero:
                row = (1 - alpha) * row
            fresh[update.client] = row if self.momentum_dtype is None else row.to(getattr(torch, self.momentum_dtype))
        return fresh

    def _direction(
        self, seen: list[int], gram: torch.Tensor, fresh: dict[int, Vector], ctx: RoundContext, like: Vector
    ) -> tuple[Vector, dict[str, Any]]:
        assert ctx.rows is not None
        lengths = gram.diagonal().sqrt()
        scale = torch.where(lengths > 0, 1 / lengths, 0.0) if self.normalize else torch.ones_like(lengths)
        scaled = gram * scale[:, None] * scale[None, :]
        solved = min_norm(scaled, solver=self.min_norm)
        weights: torch.Tensor = solved.weights
        used = weights.nonzero()[:, 0].tolist()
        stored = [i for i in used if seen[i] not in fresh]
        total = torch.zeros(like.numel(), dtype=torch.float64)
        if stored:
            coefficients = [float(weights[i] * scale[i]) for i in stored]
            total += ctx.rows.combine([seen[i] for i in stored], MOMENTUM, coefficients)
        for i in used:
            if seen[i] in fresh:
                total.add_(fresh[seen[i]].double(), alpha=float(weights[i] * scale[i]))
        squares = scaled.diagonal().tolist()
        objective = client_weights(self.weights, seen, ctx.population.samples)
        objective_weights = torch.tensor(objective, dtype=torch.float64)
        info = {
            "weights": {seen[i]: float(weights[i]) for i in used},
            "density": len(used),
            "seen": len(seen),
            "zero_rows": int((lengths == 0).sum()),
            "surrogate_diversity": surrogate_diversity(squares, objective, solved.value),
            "momentum_diversity": diversity(squares, objective, float(objective_weights @ scaled @ objective_weights)),
            "chi_square": chi_square(weights.tolist(), objective),
            "min_norm_gap": solved.gap,
            "min_norm_steps": solved.certificate.iterations,
        }
        return total.to(like), info


def _update_gram(
    clients: Sequence[int], gram: torch.Tensor, fresh: dict[int, Vector], rows: RowReader
) -> tuple[list[int], torch.Tensor]:
    """Return the Gram matrix over all clients seen, with the rows of this round's participants recomputed."""
    seen = sorted({*clients, *fresh})
    row_of = {client: i for i, client in enumerate(seen)}
    grown = torch.zeros(len(seen), len(seen), dtype=torch.float64)
    old_rows = [row_of[client] for client in clients]
    if old_rows:
        grown[torch.tensor(old_rows)[:, None], torch.tensor(old_rows)[None, :]] = gram
    if not fresh:
        return seen, grown
    updated = sorted(fresh)
    updated_rows = torch.tensor([row_of[client] for client in updated])
    vectors = torch.stack([fresh[client] for client in updated])
    grown[updated_rows[:, None], updated_rows[None, :]] = arithmetic.inner_products(vectors, vectors)
    unchanged = [client for client in clients if client not in fresh]
    if unchanged:
        cross = rows.dot(unchanged, MOMENTUM, vectors)
        unchanged_rows = torch.tensor([row_of[client] for client in unchanged])
        grown[unchanged_rows[:, None], updated_rows[None, :]] = cross
        grown[updated_rows[:, None], unchanged_rows[None, :]] = cross.T
    return seen, grown


def _with_length(direction: Vector, like: Vector) -> Vector:
    """Return ||like|| d/||d||, or 0 if d is 0."""
    d = direction.double()
    length = float(d.norm())
    return (d * (float(like.double().norm()) / length if length else 0.0)).to(direction)


def _project_onto(step: Vector, direction: Vector) -> Vector:
    """Return (s.d / d.d) d, or 0 if d is 0."""
    s, d = step.double(), direction.double()
    square = float(d @ d)
    return (d * (float(s @ d) / square if square else 0.0)).to(step)


@dataclass(frozen=True, slots=True)
class mgda(BaseAggregator):
    """u_i = Delta_i/||Delta_i||; lambda = argmin ||sum lambda_i u_i|| over the simplex, |lambda_i - 1/M| <= epsilon;
    Delta = sum lambda_i u_i (FedMGDA+, Hu 2022).

    epsilon = 1 is the whole simplex, epsilon = 0 the plain mean of unit updates. Zero updates are ignored.

    Args:
        epsilon: Largest distance of a weight from 1/M; 1 does not constrain.

    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> mgda().combine(updates, {}, ctx).vector
    tensor([1.])
    """

    epsilon: float = field(default=1.0, metadata=bound(check_fraction, FREE, above_zero=False))
    cites: ClassVar[tuple[str, ...]] = ("hu2022",)
    on_device: ClassVar[bool] = True

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


def diversity(squares: Sequence[float], weights: Sequence[float], combined: float) -> float:
    """Return D = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda_i g_i||^2 ) >= 1 (Def. 3.1).

    Args:
        squares: Squared norms ||g_i||^2.
        weights: Weights lambda of the objective.
        combined: Squared norm ||sum lambda_i g_i||^2.

    >>> round(diversity([1.0, 1.0], [0.5, 0.5], 0.5), 6)
    1.414214
    """
    if combined <= 0:
        return math.inf if any(squares) else 1.0
    return math.sqrt(math.fsum(w * s for w, s in zip(weights, squares, strict=True)) / combined)


def surrogate_diversity(squares: Sequence[float], weights: Sequence[float], surrogate: float) -> float:
    """Return D~ = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda~_i g_i||^2 ) (Def. 3.2).

    The numerator has the objective's weights lambda, the denominator the direction's weights lambda~.

    Args:
        squares: Squared norms ||g_i||^2.
        weights: Weights lambda of the objective.
        surrogate: Squared norm ||sum lambda~_i g_i||^2.

    >>> round(surrogate_diversity([1.0, 9.0], [0.5, 0.5], 0.9), 6)  # sqrt(5 / 0.9)
    2.357023
    """
    return diversity(squares, weights, surrogate)


def chi_square(used: Sequence[float], weights: Sequence[float]) -> float:
    """Return chi^2 = sum lambda~_i^2 / lambda_i^2, how far the direction's weights are from the objective's (Thm. 4.1).

    It is n for lambda~ = lambda, and at uniform lambda n^2 sum lambda~_i^2: up to n^2 for a single client.

    Args:
        used: Weights lambda~ of the direction.
        weights: Weights lambda of the objective.

    >>> chi_square([0.25, 0.75], [0.5, 0.5])
    2.5
    """
    pairs = [(f, w) for f, w in zip(used, weights, strict=True) if f]
    return math.inf if any(w == 0 for _, w in pairs) else math.fsum((f / w) ** 2 for f, w in pairs)
