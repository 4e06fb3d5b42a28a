"""FedAWARE.

Zeng et al., Tackling Hybrid Heterogeneity on Federated Optimization via Gradient Diversity Maximization.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from oracle.minnorm import simplex_weights
from oracle.quadratic import Array, Quadratics, Rounds, State, schedule


def fedaware(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    eta: float = 1.0,
) -> tuple[Array, State]:
    """Alg. 1. For i in S_t: m_i <- alpha m_i + (1 - alpha) Delta_i, the first time m_i = Delta_i; others keep m_i.

    lambda = argmin ||sum lambda_i m_i||^2 over the simplex of the clients seen so far; x <- x + eta sum lambda_i m_i.
    `normalize`: m_i/||m_i|| takes the place of m_i in both. `explore`: while some client was never seen (this round's
    participants count as seen) x <- x + eta mean_S Delta_i. A zero update never enters a row.
    `state`: rows {client: m_i}, direction of the last round, and per round the surrogate diversity of the rows used.
    """
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    m: dict[int, Array] = {}
    x, direction, trajectory, diversities = x0.copy(), np.zeros_like(x0), [], []
    for t, chosen in enumerate(participants):
        Delta = {i: problem.descend(i, x, tau[t, i], lr[t]) - x for i in chosen}
        for i in chosen:
            if Delta[i].any():
                m[i] = alpha * m[i] + (1 - alpha) * Delta[i] if i in m else Delta[i]
        if explore and len(m) < problem.clients:
            direction = np.mean([Delta[i] for i in chosen], axis=0)
        else:
            rows = np.array([m[i] / np.linalg.norm(m[i]) if normalize else m[i] for i in sorted(m)])
            lam = simplex_weights(rows)
            direction = lam @ rows
            diversities.append(diversity(rows, lam))
        x = x + eta * direction
        trajectory.append(x)
    return np.array(trajectory), {"rows": m, "direction": direction, "diversity": diversities}


def fedaware_yogi(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
) -> tuple[Array, State]:
    """FedYogi on the mean of the round's updates; its step s is projected on FedAWARE's direction d: (s.d / d.d) d.

    With `explore` the step is not projected while some client was never seen.
    """
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    rows_of: dict[int, Array] = {}
    x, first, second = x0.copy(), np.zeros_like(x0), np.zeros_like(x0)
    trajectory = []
    for t, chosen in enumerate(participants):
        Delta = {i: problem.descend(i, x, tau[t, i], lr[t]) - x for i in chosen}
        for i in chosen:
            if Delta[i].any():
                rows_of[i] = alpha * rows_of[i] + (1 - alpha) * Delta[i] if i in rows_of else Delta[i]
        mean = sum(Delta.values()) / len(chosen)
        first = b1 * first + (1 - b1) * mean
        second = second - (1 - b2) * mean**2 * np.sign(second - mean**2)
        step = eta * first / (np.sqrt(second) + eps)
        if not (explore and len(rows_of) < problem.clients):
            rows = np.array([m / np.linalg.norm(m) if normalize else m for _, m in sorted(rows_of.items())])
            d = simplex_weights(rows) @ rows
            step = (step @ d) / (d @ d) * d if d.any() else np.zeros_like(step)
        x = x + step
        trajectory.append(x)
    return np.array(trajectory), {"rows": rows_of, "m": first, "v": second}


def diversity(g: Array, lam: Array | None = None) -> float:
    """D = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda_i g_i||^2 ) >= 1, lambda uniform when not given."""
    lam = np.full(len(g), 1.0 / len(g)) if lam is None else lam
    mean = lam @ g
    return float(np.sqrt((lam @ np.sum(g**2, axis=1)) / (mean @ mean))) if mean.any() else float("inf")


def chi_square_to_uniform(lam: Array) -> float:
    """chi^2 = sum_i (lambda_i - 1/n)^2 / (1/n): 0 for uniform weights, n - 1 for a single client."""
    n = len(lam)
    return float(n * np.sum((lam - 1.0 / n) ** 2))
