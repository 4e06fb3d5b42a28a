"""The laboratory: least squares on every client, where gradients and the optimum are exact.

The references in this folder are float64 NumPy, written from the papers. They import nothing of the package under test.
Shared vocabulary: `lab` is (problem, x0, participants, steps, local_lr), with which every method of a server begins:
`participants[t]` lists the clients of round t; `steps` is one number, one per client or [rounds, N]; `local_lr` is one
number or one per round. Every method returns `(trajectory, state)`: the model after each round as [rounds, d], and the
memory that is left at the end as a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
State = dict[str, Any]
Rounds = Sequence[Sequence[int]]
Weights = str | Sequence[float]


class Quadratics:
    """f_i(x) = ||A_i x - b_i||^2 / (2 rows_i), one function per client; rows may differ between clients."""

    def __init__(self, A: Sequence[ArrayLike], b: Sequence[ArrayLike]) -> None:
        self.A = [np.asarray(matrix, dtype=np.float64) for matrix in A]
        self.b = [np.asarray(vector, dtype=np.float64) for vector in b]
        self.clients = len(self.A)
        self.dim = self.A[0].shape[1]
        self.samples = [len(vector) for vector in self.b]

    def loss(self, i: int, x: Array) -> float:
        residual = self.A[i] @ x - self.b[i]
        return float(residual @ residual) / (2 * self.samples[i])

    def grad(self, i: int, x: Array) -> Array:
        return self.A[i].T @ (self.A[i] @ x - self.b[i]) / self.samples[i]

    def optimum(self) -> Array:
        """The minimiser of (1/N) sum_i f_i, from the normal equations."""
        H = sum(A.T @ A / n for A, n in zip(self.A, self.samples, strict=True))
        r = sum(A.T @ b / n for A, b, n in zip(self.A, self.b, self.samples, strict=True))
        return np.asarray(np.linalg.solve(H, r))

    def descend(self, i: int, x: Array, steps: int, lr: float) -> Array:
        """Plain local training, y <- y - lr grad f_i(y), `steps` times from x."""
        y = x.copy()
        for _ in range(steps):
            y = y - lr * self.grad(i, y)
        return y


def heterogeneous(seed: int, clients: int, rows: int | Sequence[int], dim: int) -> Quadratics:
    """Clients that disagree badly: curvatures spread over a decade, directions of stretch and optima all different.

    The largest eigenvalue of any client's Hessian is at most 4, so that local rates below 0.5 are stable.
    """
    rng = np.random.default_rng(seed)
    sizes = [rows] * clients if isinstance(rows, int) else list(rows)
    A, b = [], []
    for n in sizes:
        matrix = rng.normal(size=(n, dim)) * 10.0 ** rng.uniform(-0.5, 0.5, size=dim)
        top = np.linalg.norm(matrix, ord=2) ** 2 / n
        matrix *= np.sqrt(4.0 * rng.uniform(0.2, 1.0) / top)
        own_optimum = rng.normal(size=dim) + 3.0 * rng.normal(size=dim)
        A.append(matrix)
        b.append(matrix @ own_optimum + 0.1 * rng.normal(size=n))
    return Quadratics(A, b)


def shares(problem: Quadratics, chosen: Sequence[int], weights: Weights) -> dict[int, float]:
    """p_i over the participants, summing to one: uniform, by number of samples, or from one number per client."""
    if isinstance(weights, str):
        raw = {i: 1.0 if weights == "uniform" else float(problem.samples[i]) for i in chosen}
        assert weights in ("uniform", "samples")
    else:
        raw = {i: float(weights[i]) for i in chosen}
    total = sum(raw.values())
    return {i: value / total for i, value in raw.items()}


def laid_out(
    problem: Quadratics, x0: Array, participants: Rounds, steps: ArrayLike, local_lr: ArrayLike
) -> tuple[Quadratics, Array, Rounds, NDArray[np.int64], Array]:
    """A lab with tau[t, i] and lr[t] in place of their short forms."""
    rounds = len(participants)
    tau = np.broadcast_to(np.asarray(steps, dtype=np.int64), (rounds, problem.clients))
    return problem, x0, participants, tau, np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))


def averaging(
    *lab: Any,
    server: Callable[[int, Array], Array],
    local: Callable[[int, Array, int, float], Array] | None = None,
    weights: Weights = "uniform",
) -> Array:
    """x <- x + server(t, Delta), Delta = sum_S p_i (y_i - x), y_i = local(i, x, tau_i, lr), else plain descent."""
    problem, x, participants, tau, lr = laid_out(*lab)
    train, trajectory = local or problem.descend, []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        x = x + server(t, sum(p[i] * (train(i, x, tau[t, i], lr[t]) - x) for i in chosen))
        trajectory.append(x)
    return np.array(trajectory)
