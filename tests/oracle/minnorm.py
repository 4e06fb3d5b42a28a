"""The point of least norm in a convex hull, by methods that share nothing with Frank-Wolfe.

On the simplex: with lambda = u / sum u, min_{u >= 0} ||P' u||^2 + (1'u - 1)^2 is reached along the min-norm lambda, for
at any sum s the first term is s^2 ||P' lambda||^2. So it is non-negative least squares on the stacked system [P'; 1'].
In a box around uniform: each weight is at its lower bound, at its upper bound or free; given which, the free ones
solve a linear least-squares problem, and the optimality conditions tell whether the guess was right.
`authors_weights` is Frank-Wolfe after all, the unfinished one of FedAWARE's authors.
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import minimize, nnls

from oracle.quadratic import Array


def _affine(P: Array, free: list[int], fixed: Array) -> Array:
    """Weights of sum one that minimise ||P' lambda||, all but `free` held; the first free one takes up the rest."""
    lam = fixed.copy()
    lam[free] = 0.0
    r, others = free[0], free[1:]
    lam[r] = 1.0 - lam.sum()
    if others:
        directions = (P[others] - P[r]).T
        z = np.linalg.lstsq(directions, -(P.T @ lam), rcond=None)[0]
        lam[others] = z
        lam[r] -= z.sum()
    return lam


def simplex_weights(P: Array) -> Array:
    """argmin ||sum_i lambda_i P_i||^2 over the simplex, P_i the rows of P. The point is unique, lambda may not be."""
    n = len(P)
    scale = np.linalg.norm(P, axis=1).max()
    if n == 1 or scale == 0.0:
        return np.full(n, 1.0 / n)
    Q = P / scale
    stacked = np.vstack([Q.T, np.ones(n)])
    u, _ = nnls(stacked, np.append(np.zeros(Q.shape[1]), 1.0), maxiter=100 * n)
    lam: Array = u / u.sum()
    # One orthogonal solve on the support found removes what normal equations inside NNLS may have lost.
    polished = _affine(Q, [int(i) for i in np.flatnonzero(lam)], np.zeros(n))
    if polished.min() >= 0.0 and np.linalg.norm(Q.T @ polished) <= np.linalg.norm(Q.T @ lam):
        return polished
    return lam


def box_weights(P: Array, epsilon: float) -> Array:
    """The same over lambda_i in [1/n - epsilon, 1/n + epsilon] within [0, 1], for the few vectors of one round."""
    n = len(P)
    low, high = max(0.0, 1.0 / n - epsilon), min(1.0, 1.0 / n + epsilon)
    scale = np.linalg.norm(P, axis=1).max()
    if n == 1 or epsilon == 0.0 or scale == 0.0:
        return np.full(n, 1.0 / n)
    Q = P / scale
    guess = minimize(  # type: ignore[call-overload]
        lambda lam: 0.5 * np.sum((Q.T @ lam) ** 2),
        np.full(n, 1.0 / n),
        jac=lambda lam: Q @ (Q.T @ lam),
        bounds=[(low, high)] * n,
        constraints={"type": "eq", "fun": lambda lam: lam.sum() - 1.0, "jac": lambda lam: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 500},
    ).x
    near = 1e-6 * (high - low)
    first = tuple(-1 if lam < low + near else 1 if lam > high - near else 0 for lam in guess)
    for active in itertools.chain([first], itertools.product((0, -1, 1), repeat=n)):
        fixed = np.where(np.array(active) < 0, low, high)
        free = [i for i in range(n) if active[i] == 0]
        if not free and abs(fixed.sum() - 1.0) > 1e-12:
            continue
        lam = _affine(Q, free, fixed) if free else fixed
        if optimal(Q, lam, low, high, 1e-12):
            return np.clip(lam, low, high)
    raise AssertionError("no active set satisfies the optimality conditions")


def optimal(P: Array, lam: Array, low: float, high: float, tolerance: float) -> bool:
    """Feasible, and no weight can be moved between two vectors to shorten the point (the problem is convex)."""
    if lam.min() < low - tolerance or lam.max() > high + tolerance or abs(lam.sum() - 1.0) > tolerance:
        return False
    slope = P @ (P.T @ lam)
    can_rise, can_fall = lam < high - tolerance, lam > low + tolerance
    if not can_rise.any() or not can_fall.any():
        return True
    return bool(slope[can_rise].min() >= slope[can_fall].max() - tolerance)


def authors_weights(P: Array, steps: int = 1000, still: float = 1e-5) -> Array:
    """Frank-Wolfe as FedAWARE's authors run it, on the vectors themselves: from the pair whose segment comes nearest to
    zero, at most `steps` steps, until the weights move by less than `still` in L1; the weights before that move."""

    def between(a: Array, b: Array) -> tuple[float, float]:
        """The share of a in the point of the segment nearest to zero, and its squared length."""
        if a @ b >= a @ a:
            return 0.999, float(a @ a)
        if a @ b >= b @ b:
            return 0.001, float(b @ b)
        share = (b @ b - a @ b) / ((a - b) @ (a - b))
        return float(share), float(np.sum((share * a + (1 - share) * b) ** 2))

    n = len(P)
    if n == 1:
        return np.ones(1)
    nearest, weights = np.inf, np.zeros(n)
    for i in range(n):
        for j in range(i + 1, n):
            share, square = between(P[i], P[j])
            if square < nearest * (1 - 1e-12):
                nearest, weights = square, share * np.eye(n)[i] + (1 - share) * np.eye(n)[j]
    if n == 2:
        return weights
    for _ in range(steps):
        point = weights @ P
        corner = int(np.argmin(P @ point))
        share, _ = between(point, P[corner])
        moved = share * weights + (1 - share) * np.eye(n)[corner]
        if np.abs(moved - weights).sum() < still:
            break
        weights = moved
    return weights
