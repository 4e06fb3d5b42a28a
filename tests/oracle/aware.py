"""FedAWARE.

Zeng et al., Tackling Hybrid Heterogeneity on Federated Optimization via Gradient Diversity Maximization.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.minnorm import authors_weights, simplex_weights
from oracle.quadratic import Array, State, laid_out


def momenta(m: dict[int, Array], Delta: dict[int, Array], alpha: float | Array, from_zero: bool) -> None:
    """m_i <- alpha m_i + (1 - alpha) Delta_i, Delta_i zero or not; the first time m_i = Delta_i, or as from m_i = 0.

    alpha may be one number for each client.
    """
    for i, update in Delta.items():
        a = float(alpha) if np.ndim(alpha) == 0 else float(np.asarray(alpha)[i])
        if i in m:
            m[i] = a * m[i] + (1 - a) * update
        else:
            m[i] = (1 - a) * update if from_zero else update


def unit(m: Array) -> Array:
    return m / np.linalg.norm(m) if m.any() else m


def shares(clients: list[int], weights: Array | None) -> Array:
    """The objective's weights over some clients: equal ones when none are given."""
    raw = np.ones(len(clients)) if weights is None else np.array([weights[i] for i in clients], dtype=float)
    return raw / raw.sum()


def fedaware(
    *lab: Any,
    alpha: float | Array = 0.5,
    normalize: bool = False,
    explore: bool = False,
    from_zero: bool = False,
    authors: bool = False,
    weights: Array | None = None,
    average_length: bool = False,
    eta: float = 1.0,
) -> tuple[Array, State]:
    """Alg. 1. For i in S_t: m_i <- alpha m_i + (1 - alpha) Delta_i, the first time m_i = Delta_i; others keep m_i.

    lambda~ = argmin ||sum lambda_i m_i||^2 over the simplex of the clients seen so far; x <- x + eta sum lambda~_i m_i.
    `normalize`: m_i/||m_i|| takes the place of m_i in both. `explore`: while some client was never seen (this round's
    participants count as seen) x <- x + eta sum_S p_i Delta_i, p the objective's `weights` over S.
    `average_length`: the direction is scaled to the length of sum_S p_i Delta_i.
    `state`: rows {client: m_i}, direction of the last round, and per round of the rows used D~, D and chi^2.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    m: dict[int, Array] = {}
    direction, trajectory = np.zeros_like(x), []
    told: dict[str, list[float]] = {"surrogate": [], "diversity": [], "chi_square": []}
    for t, chosen in enumerate(participants):
        Delta = {i: problem.descend(i, x, tau[t, i], lr[t]) - x for i in chosen}
        momenta(m, Delta, alpha, from_zero)
        if explore and len(m) < problem.clients:
            direction = shares(list(chosen), weights) @ np.array([Delta[i] for i in chosen])
        else:
            rows = np.array([unit(m[i]) if normalize else m[i] for i in sorted(m)])
            found = authors_weights(rows) if authors else simplex_weights(rows)
            given = shares(sorted(m), weights)
            direction = found @ rows
            if average_length and direction.any():
                mean = shares(list(chosen), weights) @ np.array([Delta[i] for i in chosen])
                direction = direction / np.sqrt(direction @ direction) * np.sqrt(mean @ mean)
            told["surrogate"].append(diversity(rows, given, found))
            told["diversity"].append(diversity(rows, given))
            told["chi_square"].append(chi_square(found, given))
        x = x + eta * direction
        trajectory.append(x)
    return np.array(trajectory), {"rows": m, "direction": direction, **told}


def fedaware_yogi(
    *lab: Any,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    weights: Array | None = None,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
) -> tuple[Array, State]:
    """FedYogi on the mean of the round's updates; its step s is projected on FedAWARE's direction d: (s.d / d.d) d.

    With `explore` the step is not projected while some client was never seen.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    rows_of: dict[int, Array] = {}
    first, second, trajectory = np.zeros_like(x), np.zeros_like(x), []
    for t, chosen in enumerate(participants):
        Delta = {i: problem.descend(i, x, tau[t, i], lr[t]) - x for i in chosen}
        momenta(rows_of, Delta, alpha, False)
        mean = shares(list(chosen), weights) @ np.array([Delta[i] for i in chosen])
        first = b1 * first + (1 - b1) * mean
        second = second - (1 - b2) * mean**2 * np.sign(second - mean**2)
        step = eta * first / (np.sqrt(second) + eps)
        if not (explore and len(rows_of) < problem.clients):
            rows = np.array([unit(m) if normalize else m for _, m in sorted(rows_of.items())])
            d = simplex_weights(rows) @ rows
            step = (step @ d) / (d @ d) * d if d.any() else np.zeros_like(step)
        x = x + step
        trajectory.append(x)
    return np.array(trajectory), {"rows": rows_of, "m": first, "v": second}


def diversity(g: Array, lam: Array | None = None, found: Array | None = None) -> float:
    """D = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda_i g_i||^2 ) >= 1, lambda uniform when not given; with the weights
    `found` below, and lambda above, it is the surrogate diversity."""
    lam = np.full(len(g), 1.0 / len(g)) if lam is None else lam
    below = (lam if found is None else found) @ g
    return float(np.sqrt((lam @ np.sum(g**2, axis=1)) / (below @ below))) if below.any() else float("inf")


def chi_square(found: Array, lam: Array) -> float:
    """chi^2 = sum_i lambda~_i^2 / lambda_i^2."""
    return float(np.sum((found / lam) ** 2))
