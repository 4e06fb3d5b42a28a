"""The shortest vector in a convex hull, from inner products: Frank-Wolfe, then an exact active-set method."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from hansa.core.errors import HansaError, check_positive, invalid_argument

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Array: TypeAlias = "Tensor | npt.NDArray[Any]"
MinNormSolver: TypeAlias = Literal["exact", "authors"]
SOLVERS: tuple[MinNormSolver, ...] = ("exact", "authors")

EPS = sys.float_info.epsilon
FRANK_WOLFE_STEPS = 32
INTERIOR_STEPS = 50
MANY, JOINING = 256, 32  # rows above which a subset is tried first; rows added at a time
FIRST_ROUNDS = 6  # Newton rounds from the Frank-Wolfe point before the interior-point method is used
PATIENCE = 6  # rounds without progress after which only rounding error remains
INDEFINITE = "min_norm: not a Gram matrix: it has a negative eigenvalue. Expected G_ij = <v_i, v_j>."


@dataclass(frozen=True, slots=True)
class Certificate:
    """A bound on the distance to the optimum: with x = sum lambda_i v_i and the shortest vector x*,
    ``|x - x*|^2 <= gap`` and ``|x|^2 - |x*|^2 <= 2 gap``; ``value`` is |x|^2.

    >>> Certificate(value=1.0, gap=0.0, iterations=3).gap
    0.0
    """

    value: float
    gap: float
    iterations: int

    @property
    def relative_gap(self) -> float:
        """``gap / value``; infinite if the shortest vector is zero up to rounding and the gap is not."""
        return self.gap / self.value if self.value > 0 else (0.0 if self.gap == 0 else float("inf"))


class MinNorm(NamedTuple):
    """Weights lambda on the simplex and their certificate: ``weights, certificate = min_norm(gram)``.

    >>> weights, certificate = min_norm(torch.eye(2, dtype=torch.float64))
    >>> weights
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    weights: Tensor
    certificate: Certificate

    @property
    def value(self) -> float:
        return self.certificate.value

    @property
    def gap(self) -> float:
        return self.certificate.gap


def min_norm(
    gram: Array,
    *,
    lower: float | Array = 0.0,
    upper: float | Array = 1.0,
    tolerance: float = 1e-12,
    solver: MinNormSolver = "exact",
) -> MinNorm:
    """Return lambda = argmin lambda' G lambda, sum lambda = 1, lower <= lambda <= upper, for G_ij = <v_i, v_j>.

    Frank-Wolfe with exact line search (as FedAWARE), then Newton steps on the active set, restarted from a
    primal-dual interior point if the first guess of the support is poor. Stops at a duality gap
    max_s (G lambda)'(lambda - s) <= tolerance * value, or at rounding error. The point sum lambda_i v_i is unique;
    the weights need not be. ``solver="authors"`` is the Frank-Wolfe of FedAWARE's code without the second stage:
    from the best pair of vectors, at most 1000 steps, until the weights change by less than 1e-5.
    Wolfe, *Finding the nearest point in a polytope*, 1976; Mehrotra, 1992.

    Args:
        gram: Inner products G of the vectors.
        lower: Lower bound of the weights, one number or one per vector.
        upper: Upper bound of the weights, one number or one per vector.
        tolerance: Relative duality gap at which the solver stops.
        solver: "exact" or "authors".

    >>> answer = min_norm(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    >>> answer.weights.tolist(), round(answer.value, 12)
    ([0.8, 0.2], 0.8)
    >>> min_norm(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), lower=0.4, upper=0.6).weights.tolist()
    [0.6, 0.4]
    """
    check_positive("min_norm", "tolerance", tolerance)
    if solver not in SOLVERS:
        raise invalid_argument("min_norm", "solver", solver, "'exact' or 'authors'")
    matrix = _check_gram(gram)
    size = len(matrix)
    low, high = _check_bound("lower", lower, size), _check_bound("upper", upper, size)
    if bool((low < 0).any()) or bool((low > high).any()):
        raise HansaError("min_norm: expected 0 <= lower <= upper for every weight.")
    if float(low.sum()) > 1 + 1e-9 or float(high.sum()) < 1 - 1e-9:
        raise HansaError(
            f"min_norm: no weights within the bounds have sum 1: lower sums to {float(low.sum()):g}, upper to "
            f"{float(high.sum()):g}. Widen them."
        )
    scale = float(matrix.diagonal().max())
    with _one_thread():
        problem = _Problem(matrix / scale if scale > 0 else matrix, low, high, tolerance)
        answer = problem.solve() if solver == "exact" else problem.authors()
    if answer.value < -1e-5:  # relative to the largest G_ii: more than float32 rounding error
        raise HansaError(INDEFINITE)
    value, gap = scale * max(answer.value, 0.0), scale * max(answer.gap, 0.0)
    return MinNorm(answer.weights, Certificate(value, gap, problem.iterations))


def _check_gram(gram: Array) -> Tensor:
    """Return G in float64, exactly symmetric."""
    matrix = torch.as_tensor(gram).detach().to(device="cpu", dtype=torch.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise invalid_argument("min_norm", "gram", tuple(matrix.shape), "a square matrix of at least one row")
    if not bool(torch.isfinite(matrix).all()):
        row = int((~torch.isfinite(matrix)).any(1).nonzero()[0])
        raise HansaError(f"min_norm: row {row} of the Gram matrix is not finite. Leave that vector out.")
    diagonal = matrix.diagonal()
    scale = float(diagonal.abs().max())
    if float((matrix - matrix.T).abs().max()) > 1e-6 * scale:
        raise HansaError("min_norm: the Gram matrix is not symmetric. Expected G_ij = <v_i, v_j>.")
    length = diagonal.clamp(min=0).sqrt()
    # Cauchy-Schwarz, with a tolerance for inner products summed in float32
    if bool((diagonal < 0).any()) or bool((matrix.abs() > torch.outer(length, length) + 1e-5 * scale).any()):
        raise HansaError("min_norm: not a Gram matrix: expected G_ii >= 0 and |G_ij| <= sqrt(G_ii G_jj).")
    return (matrix + matrix.T) / 2


def _check_bound(name: str, value: float | Array, size: int) -> Tensor:
    bound = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    if bound.ndim > 1 or (bound.ndim == 1 and len(bound) != size) or not bool(torch.isfinite(bound).all()):
        raise invalid_argument("min_norm", name, value, f"one finite number, or one for each of the {size} rows")
    return bound.expand(size).contiguous()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the number of threads changes the last bits, which can change the support."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """A feasible lambda, its gradient G lambda, lambda' G lambda and the duality gap."""

    weights: Tensor
    gradient: Tensor
    value: float
    gap: float
    optimal: bool  # the gap is within the tolerance
    settled: bool  # ... or within the rounding error of the gradient


class _Problem:
    """min lambda' G lambda over {sum lambda = 1, low <= lambda <= high}, rows scaled so that max G_ii = 1."""

    def __init__(self, matrix: Tensor, low: Tensor, high: Tensor, tolerance: float) -> None:
        self.matrix, self.low, self.high, self.tolerance = matrix, low, high, tolerance
        self.size = len(matrix)
        self.rounding = EPS * (8 + self.size**0.5)
        self.length = matrix.diagonal().clamp(min=0).sqrt()
        self.movable = low < high
        self.simplex = float(low.max()) == 0 and float(high.min()) >= 1
        self.iterations = 0

    def solve(self) -> _Point:
        """Return equal weights if they are optimal; otherwise run Frank-Wolfe and the active set.

        If that fails, restart from a subset of the rows (for many rows), then from an interior point.
        """
        best = self.evaluate(project_to_simplex(torch.full_like(self.low, 1 / self.size), self.low, self.high, 1.0))
        subset = [(self.few_rows, False)] if self.simplex and self.size >= MANY else []
        for start, patient in [(self.frank_wolfe, False), *subset, (self.interior_point, True)]:
            if best.settled:
                break
            point = self.active_set(start(), patient)
            best = point if point.gap < best.gap else best
        return best

    def authors(self) -> _Point:
        if not self.simplex:
            raise HansaError("min_norm(solver='authors'): supports the whole simplex only. Omit lower and upper.")
        weights, self.iterations = pairwise_frank_wolfe(self.matrix)
        return self.evaluate(weights)

    def evaluate(self, weights: Tensor) -> _Point:
        gradient = self.matrix @ weights
        value = float(weights @ gradient)
        vertex = self.vertex(gradient)
        gap = value - float(vertex @ gradient)
        length = float(self.length @ weights)
        noise = self.rounding * length * max(length, float(self.length @ vertex))
        optimal = gap <= self.tolerance * value
        return _Point(weights, gradient, value, gap, optimal, optimal or gap <= noise)

    def vertex(self, cost: Tensor) -> Tensor:
        """Return argmin cost's over the feasible set: fill the cheapest weights first, ties in order."""
        if self.simplex:
            vertex = torch.zeros_like(self.low)
            vertex[int(cost.argmin())] = 1
            return vertex
        order = torch.argsort(cost, stable=True)
        widths = (self.high - self.low)[order]
        filled = widths.cumsum(0) - widths
        vertex = self.low.clone()
        vertex[order] += torch.minimum(widths, (1 - float(self.low.sum()) - filled).clamp(min=0))
        return vertex

    def frank_wolfe(self) -> Tensor:
        """Iterate lambda <- lambda + a (s - lambda) with exact line search, from the vertex of the shortest rows."""
        weights = self.vertex(self.matrix.diagonal())
        gradient = self.matrix @ weights
        for _ in range(FRANK_WOLFE_STEPS):
            step = self.vertex(gradient) - weights
            slope = -float(gradient @ step)
            if slope <= self.tolerance * float(weights @ gradient):
                break
            along = self.matrix @ step
            curvature = float(step @ along)
            size = slope / curvature if curvature > slope else 1.0
            weights = weights + size * step
            gradient = gradient + size * along
            self.iterations += 1
        return torch.minimum(torch.maximum(weights, self.low), self.high)

    def few_rows(self) -> Tensor:
        """Solve exactly over few rows, adding the rows with the smallest inner products until none lowers the value.

        A solution over a subset is optimal over all rows once no other row has a smaller inner product with it. Stops
        when a quarter of the rows is not enough: the interior-point method is then no slower.
        """
        chosen = self.matrix.diagonal().topk(JOINING, largest=False).indices.sort().values
        while True:
            block = self.matrix[chosen][:, chosen]
            subproblem = _Problem(block, self.low[chosen], self.high[chosen], self.tolerance)
            solution = subproblem.solve()
            self.iterations += subproblem.iterations
            weights = torch.zeros_like(self.low)
            weights[chosen] = solution.weights
            point = self.evaluate(weights)
            below = point.gradient.clone()
            below[chosen] = torch.inf
            joining = below.topk(JOINING, largest=False).indices
            joining = joining[below[joining] < point.value]
            if point.settled or not len(joining) or 4 * len(chosen) > self.size:
                return weights
            chosen = torch.cat([chosen, joining]).sort().values

    def active_set(self, weights: Tensor, patient: bool) -> _Point:
        """Minimize exactly over the weights between their bounds, until no weight at a bound would leave it.

        All such weights are freed at once while that descends. If it does not, the method stops, or with ``patient``
        frees one weight at a time and stops at the first bound, which cannot cycle.
        """
        point = best = self.evaluate(weights)
        waited, lowest = 0, point.value
        for _ in range(4 * self.size + 50 if patient else FIRST_ROUNDS):
            if point.optimal or waited > (0 if best.settled else PATIENCE):
                break
            self.iterations += 1
            moved = self.newton_step(point)
            if moved is None and not patient:
                break
            point = self.evaluate(self.step_length(point) if moved is None else moved)
            progress = point.value < lowest - 1e-14 * abs(lowest) or point.gap < 0.5 * best.gap
            waited = 0 if progress else waited + 1
            lowest = min(lowest, point.value)
            best = point if point.gap < best.gap else best
        return best

    def newton_step(self, point: _Point) -> Tensor | None:
        """Return the projected Newton step on the weights inside their bounds and all that would leave one; None unless
        it descends."""
        weights, gradient = point.weights, point.gradient
        inside = (weights > self.low) & (weights < self.high)
        free = (inside | (self.target(point, inside) > 0)).nonzero()[:, 0]
        target = weights[free] + self.newton(gradient, free)
        moved = weights.clone()
        moved[free] = project_to_simplex(target, self.low[free], self.high[free], float(weights[free].sum()))
        descent = float(gradient @ (moved - weights))
        return moved if descent < 0 and float(moved @ (self.matrix @ moved)) <= point.value + 0.1 * descent else None

    def step_length(self, point: _Point) -> Tensor:
        """Return the Newton step to the first bound, on the weights inside and, once these are optimal, on the weight
        at a bound that would gain most by leaving it."""
        weights, gradient = point.weights, point.gradient
        inside = (weights > self.low) & (weights < self.high)
        urgency = self.target(point, inside)
        if not bool(inside.any()):  # a vertex: shift weight from the most to the least expensive
            inside[int(torch.where(weights < self.high, gradient, torch.inf).argmin())] = True
            inside[int(torch.where(weights > self.low, gradient, -torch.inf).argmax())] = True
        elif float(gradient[inside].max() - gradient[inside].min()) <= float(urgency.max()):
            inside[int(urgency.argmax())] = True
        free = inside.nonzero()[:, 0]
        low, high, start = self.low[free], self.high[free], weights[free]
        step = self.newton(gradient, free)
        room = torch.where(step < 0, (low - start) / step, torch.where(step > 0, (high - start) / step, torch.inf))
        reach = min(1.0, max(0.0, float(room.min())))
        stopped = torch.where(room <= reach, torch.where(step < 0, low, high), start + reach * step)
        moved = weights.clone()
        moved[free] = torch.minimum(torch.maximum(stopped, low), high)
        return moved

    def target(self, point: _Point, inside: Tensor) -> Tensor:
        """Return how much each weight at a bound would lower the value by leaving it; not positive if it would not."""
        weights, gradient = point.weights, point.gradient
        if bool(inside.any()):
            middle = float(gradient[inside].mean())
        else:
            rising = torch.where(weights < self.high, gradient, torch.inf).min()
            falling = torch.where(weights > self.low, gradient, -torch.inf).max()
            middle = float(rising + falling) / 2
        urgency = torch.where(weights <= self.low, middle - gradient, gradient - middle)
        return torch.where(self.movable & ~inside, urgency, -torch.inf)

    def newton(self, gradient: Tensor, free: Tensor) -> Tensor:
        """Return the step to the minimum over the free weights at constant sum.

        A ridge near rounding error makes rank-deficient blocks solvable. Steps use the true gradient, so iterating
        removes the effect of the ridge.
        """
        block = self.matrix.clone() if len(free) == self.size else self.matrix[free][:, free]
        diagonal = block.diagonal().clone()
        uneven = gradient[free] - gradient[free].mean()  # centre first, to reduce rounding error
        rhs = torch.stack((uneven, torch.ones_like(uneven)), 1)
        ridge = self.length[free].square().clamp(min=1e-30) * (4 * self.size * EPS)
        for _ in range(12):
            block.diagonal().copy_(diagonal + ridge)
            factor, failed = torch.linalg.cholesky_ex(block)
            if not int(failed):
                first, second = _solve(factor, rhs).unbind(1)
                step = second * (first.sum() / second.sum()) - first
                return step - step.mean()  # remove the rounding error of the zero sum
            ridge = ridge * 10
        raise HansaError(INDEFINITE)

    def interior_point(self) -> Tensor:
        """Run Mehrotra's predictor-corrector, about ten factorizations at any rank; then fix bounds that look active.

        Slacks and duals are [2, n]: below ``sides * (weights - bounds) >= 0`` with sides +1 (lower) and -1 (upper).
        """
        free = self.movable.nonzero()[:, 0]
        fixed = torch.where(self.movable, 0.0, self.low)
        matrix, shift = self.matrix[free][:, free], self.matrix[free] @ fixed
        low, high, total = self.low[free], self.high[free], 1 - float(fixed.sum())
        implied = total - (low.sum() - low)
        sides = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        # relax upper bounds that the sum implies, because their duals are not unique
        bounds = torch.stack((low, torch.where(high < implied, high, implied + 1)))
        width = torch.minimum(high, implied) - low
        centre = low + width * ((total - low.sum()) / width.sum())
        inverse = 1 / self.length[free].square().clamp(min=1e-30)  # the solution for orthogonal rows
        weights = 0.9 * project_to_simplex(inverse * (total / inverse.sum()), low, high, total) + 0.1 * centre
        gradient = matrix @ weights + shift
        value = level = float(weights @ gradient)
        slack = sides * (weights - bounds)
        dual = (sides * (gradient - level)).clamp(min=0) + value
        system = matrix.clone()

        for _ in range(INTERIOR_STEPS):
            gradient = matrix @ weights + shift
            value = float(weights @ gradient)
            residual = gradient - level - (sides * dual).sum(0)
            product = float((slack * dual).sum())
            # the residual stays zero up to rounding
            if product <= max(1e-10 * value, self.rounding * float(self.length[free] @ weights) ** 2):
                break
            system.diagonal().copy_(matrix.diagonal() + (dual / slack).sum(0))
            factor, failed = torch.linalg.cholesky_ex(system)
            if int(failed):
                break
            self.iterations += 1
            unit = _solve(factor, torch.ones_like(residual)[:, None])[:, 0]
            newton = _Newton(factor, unit, residual, slack, dual, sides, total - float(weights.sum()))
            step, rise, dual_step = newton.toward(-slack * dual)
            reach = min(1.0, _max_step(slack, sides * step), _max_step(dual, dual_step))
            predicted = float(((slack + reach * sides * step) * (dual + reach * dual_step)).sum())
            centring = (predicted / product) ** 3 * product / slack.numel()
            step, rise, dual_step = newton.toward(centring - slack * dual - sides * step * dual_step)
            reach = min(1.0, 0.995 * _max_step(slack, sides * step), 0.995 * _max_step(dual, dual_step))
            weights, level, dual = weights + reach * step, level + reach * rise, dual + reach * dual_step
            slack = slack + reach * sides * step

        tied = slack * self.length[free].square() * len(free) < dual
        loose = ~tied.any(0)
        if bool(loose.any()):  # if the shortest vector is zero, active bounds are neither identifiable nor needed
            weights = torch.where(tied[0], low, torch.where(tied[1], high, weights))
            weights[loose] = project_to_simplex(
                weights[loose], low[loose], high[loose], total - float(weights[~loose].sum())
            )
        answer = self.low.clone()
        answer[free] = weights
        return answer


@dataclass(frozen=True, slots=True, eq=False)
class _Newton:
    """The linear system of one interior-point iteration, factored once and solved for two targets."""

    factor: Tensor
    unit: Tensor
    residual: Tensor
    slack: Tensor
    dual: Tensor
    sides: Tensor
    missing: float

    def toward(self, target: Tensor) -> tuple[Tensor, float, Tensor]:
        rhs = (self.sides * (target / self.slack)).sum(0) - self.residual
        solved = _solve(self.factor, rhs[:, None])[:, 0]
        rise = float((self.missing - solved.sum()) / self.unit.sum())
        step = solved + rise * self.unit
        return step, rise, (target - self.dual * (self.sides * step)) / self.slack


def _solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """Solve L L' x = right by two triangular solves, several times faster than cholesky_solve."""
    half = torch.linalg.solve_triangular(factor, rhs, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved


def _max_step(value: Tensor, step: Tensor) -> float:
    """Return the largest step length for which a positive vector stays non-negative."""
    return float(torch.where(step < 0, -value / step, torch.inf).min())


STEPS = 1000
STILL = 1e-5  # L1 change of the weights at which the iteration stops


def pairwise_frank_wolfe(gram: Tensor) -> tuple[Tensor, int]:
    """Return the weights lambda and the number of steps of at most 1000 Frank-Wolfe steps.

    A step is lambda <- c lambda + (1-c) e_t, t = argmin (G lambda)_t, with the c that gives the shortest point. It
    starts at the pair whose segment comes nearest to zero. If an end of a segment is nearest, c is 0.999 or 0.001
    (Sener and Koltun 2018, the origin of the code).

    >>> weights, steps = pairwise_frank_wolfe(torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    >>> weights.tolist(), steps
    ([0.75, 0.25], 0)
    """
    size = len(gram)
    weights = torch.zeros(size, dtype=gram.dtype)
    if size == 1:
        return weights + 1, 0
    first, second, share = _best_pair(gram)
    weights[first], weights[second] = share, 1 - share
    if size == 2:
        return weights, 0
    for step in range(STEPS):
        gradient = gram @ weights
        corner = int(gradient.argmin())
        keep = _segment_weight(float(weights @ gradient), float(gradient[corner]), float(gram[corner, corner]))
        moved = keep * weights
        moved[corner] += 1 - keep
        if float((moved - weights).abs().sum()) < STILL:
            return weights, step
        weights = moved
    return weights, STEPS


def _segment_weight(aa: float, ab: float, bb: float) -> float:
    """Return the c that minimizes ||c a + (1-c) b||, from the three inner products."""
    if ab >= aa:
        return 0.999
    if ab >= bb:
        return 0.001
    return (bb - ab) / (aa + bb - 2 * ab)


def _best_pair(gram: Tensor) -> tuple[int, int, float]:
    """Return the first pair i < j whose segment comes nearest to zero, and the weight of i."""
    square = gram.diagonal()
    aa, bb = square[:, None], square[None, :]
    inside = (gram < aa) & (gram < bb)
    share = torch.where(inside, (bb - gram) / (aa + bb - 2 * gram), 0.0)
    value = torch.where(inside, bb + share * (gram - bb), torch.minimum(aa, bb))
    value[torch.ones_like(gram, dtype=torch.bool).tril()] = torch.inf
    first, second = divmod(int(value.argmin()), len(gram))
    return first, second, _segment_weight(float(square[first]), float(gram[first, second]), float(square[second]))


def project_to_simplex(x: Tensor, low: Tensor, high: Tensor, total: float) -> Tensor:
    """Return the nearest point to x with sum ``total`` within the bounds: clip(x - t, low, high)."""
    breakpoints = torch.cat((x - high, x - low))
    order = torch.argsort(breakpoints, stable=True)
    breakpoints = breakpoints[order]
    slopes = torch.cat((torch.ones_like(x), -torch.ones_like(x)))[order].cumsum(0)
    decreases = torch.zeros_like(breakpoints)
    decreases[1:] = (slopes[:-1] * breakpoints.diff()).cumsum(0)
    decrease = float(high.sum()) - total
    segment = min(max(int(torch.searchsorted(decreases, decrease, right=True)) - 1, 0), len(breakpoints) - 1)
    slope = slopes[segment]
    shift = breakpoints[segment] + ((decrease - decreases[segment]) / slope if float(slope) > 0 else 0.0)
    nearest = torch.minimum(torch.maximum(x - shift, low), high)
    inside = (nearest > low) & (nearest < high)
    if bool(inside.any()):  # correct the rounding error of the sum
        nearest = nearest + torch.where(inside, (total - nearest.sum()) / inside.sum(), 0.0)
    return torch.minimum(torch.maximum(nearest, low), high)
