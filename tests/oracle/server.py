"""Federated averaging and the adaptive servers: x <- x + step(Delta), Delta = sum_S p_i (y_i - x).

McMahan 2017 (FedAvg); Hsu 2019 (FedAvgM); Reddi 2020 (FedAdagrad, FedAdam, FedYogi); Tong 2020 (FedAMSGrad);
Wang, Lin, Chen 2022 (FedAMS). Flags of the adaptive methods:

- `v0`: every entry of v before the first round. m and vhat start at zero whatever v0 is.
- `eps_inside`: sqrt(v + eps) in place of sqrt(v) + eps.
- `bias_correction`: with t = 1 in the first round, m/(1 - b1^t) and v/(1 - b2^t) replace m and v *in the step only*.
  FedAdagrad: m alone, since v is a sum. FedAMSGrad and FedAMS: the maximum is taken over the uncorrected v (and eps,
  for FedAMS), then m and vhat are divided by their corrections when the step is formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from oracle.quadratic import Array, Quadratics, Rounds, State, schedule, shares

Weights = str | Sequence[float]


def fedavg(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 1.0,
    weights: Weights = "uniform",
) -> tuple[Array, State]:
    """x <- x + eta Delta."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, trajectory = x0.copy(), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        x = x + eta * Delta
        trajectory.append(x)
    return np.array(trajectory), {}


def fedavgm(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 1.0,
    beta: float = 0.9,
    weights: Weights = "uniform",
) -> tuple[Array, State]:
    """m <- beta m + Delta; x <- x + eta m."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, trajectory = x0.copy(), np.zeros_like(x0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = beta * m + Delta
        x = x + eta * m
        trajectory.append(x)
    return np.array(trajectory), {"m": m}


def fedadagrad(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.0,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """m <- b1 m + (1 - b1) Delta; v <- v + Delta^2; x <- x + eta m / (sqrt v + eps)."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, v, trajectory = x0.copy(), np.zeros_like(x0), np.full_like(x0, v0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = b1 * m + (1 - b1) * Delta
        v = v + Delta**2
        numerator = m / (1 - b1 ** (t + 1)) if bias_correction else m
        denominator = np.sqrt(v + eps) if eps_inside else np.sqrt(v) + eps
        x = x + eta * numerator / denominator
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v}


def fedadam(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """m <- b1 m + (1 - b1) Delta; v <- b2 v + (1 - b2) Delta^2; x <- x + eta m / (sqrt v + eps)."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, v, trajectory = x0.copy(), np.zeros_like(x0), np.full_like(x0, v0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        mhat = m / (1 - b1 ** (t + 1)) if bias_correction else m
        second = v / (1 - b2 ** (t + 1)) if bias_correction else v
        denominator = np.sqrt(second + eps) if eps_inside else np.sqrt(second) + eps
        x = x + eta * mhat / denominator
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v}


def fedyogi(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """v <- v - (1 - b2) Delta^2 sign(v - Delta^2), with sign(0) = 0; m and the step as FedAdam."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, v, trajectory = x0.copy(), np.zeros_like(x0), np.full_like(x0, v0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = b1 * m + (1 - b1) * Delta
        v = v - (1 - b2) * Delta**2 * np.sign(v - Delta**2)
        mhat = m / (1 - b1 ** (t + 1)) if bias_correction else m
        second = v / (1 - b2 ** (t + 1)) if bias_correction else v
        denominator = np.sqrt(second + eps) if eps_inside else np.sqrt(second) + eps
        x = x + eta * mhat / denominator
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v}


def fedamsgrad(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """m, v as FedAdam; vhat <- max(vhat, v); x <- x + eta m / (sqrt vhat + eps) (option 2 of the FedAMS paper)."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, v, vhat, trajectory = x0.copy(), np.zeros_like(x0), np.full_like(x0, v0), np.zeros_like(x0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        mhat = m / (1 - b1 ** (t + 1)) if bias_correction else m
        second = vhat / (1 - b2 ** (t + 1)) if bias_correction else vhat
        denominator = np.sqrt(second + eps) if eps_inside else np.sqrt(second) + eps
        x = x + eta * mhat / denominator
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def fedams(
    problem: Quadratics,
    x0: Array,
    participants: Rounds,
    steps: ArrayLike,
    local_lr: ArrayLike,
    *,
    eta: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """m, v as FedAdam; vhat <- max(vhat, v, eps) entry by entry; x <- x + eta m / sqrt vhat (option 1)."""
    tau, lr = schedule(problem, len(participants), steps, local_lr)
    x, m, v, vhat, trajectory = x0.copy(), np.zeros_like(x0), np.full_like(x0, v0), np.zeros_like(x0), []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        Delta = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) for i in chosen)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(np.maximum(vhat, v), eps)
        mhat = m / (1 - b1 ** (t + 1)) if bias_correction else m
        second = vhat / (1 - b2 ** (t + 1)) if bias_correction else vhat
        x = x + eta * mhat / np.sqrt(second)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}
