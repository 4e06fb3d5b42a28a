"""Methods that change what clients do, or how unequal clients are weighed, written as their pseudo-code."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.minnorm import box_weights, simplex_weights
from oracle.quadratic import Array, State, Weights, averaging, laid_out, shares


def fedavg_local_options(
    *lab: Any, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None
) -> tuple[Array, State]:
    """FedAvg with g <- clip(grad f_i(y)) + wd y; buf <- mu buf + g; y <- y - lr buf; buf = 0 when a round starts.

    The raw gradient is clipped by its norm, g min(1, clip/||g||), before the decay is added.
    """
    problem = lab[0]

    def local(i: int, x: Array, tau: int, lr: float) -> Array:
        y, buf = x, np.zeros_like(x)
        for _ in range(tau):
            g = problem.grad(i, y)
            if clip is not None and np.linalg.norm(g) > clip:
                g = g * (clip / np.linalg.norm(g))
            buf = momentum * buf + (g + weight_decay * y)
            y = y - lr * buf
        return y

    return averaging(*lab, local=local, server=lambda t, Delta: Delta), {}


def fedprox(*lab: Any, mu: float, eta: float = 1.0, weights: Weights = "uniform") -> tuple[Array, State]:
    """Li 2020. Clients descend f_i(y) + (mu/2) ||y - x||^2; the server averages."""
    problem = lab[0]

    def local(i: int, x: Array, tau: int, lr: float) -> Array:
        y = x
        for _ in range(tau):
            y = y - lr * (problem.grad(i, y) + mu * (y - x))
        return y

    return averaging(*lab, local=local, weights=weights, server=lambda t, Delta: eta * Delta), {}


def scaffold(*lab: Any, eta: float = 1.0) -> tuple[Array, State]:
    """Karimireddy 2020, Alg. 1 option II.

    y <- y - lr (grad f_i(y) - c_i + c); c_i+ = c_i - c + (x - y)/(tau_i lr);
    x <- x + (eta/M) sum (y_i - x); c <- c + (1/N) sum (c_i+ - c_i).
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    N = problem.clients
    c, c_i, trajectory = np.zeros_like(x), np.zeros((N, len(x))), []
    for t, chosen in enumerate(participants):
        Delta_y, Delta_c = np.zeros_like(x), np.zeros_like(x)
        for i in chosen:
            y = x.copy()
            for _ in range(tau[t, i]):
                y = y - lr[t] * (problem.grad(i, y) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (tau[t, i] * lr[t])
            Delta_y += y - x
            Delta_c += c_plus - c_i[i]
            c_i[i] = c_plus
        x = x + eta * Delta_y / len(chosen)
        c = c + Delta_c / N
        trajectory.append(x)
    return np.array(trajectory), {"c": c, "c_i": c_i}


def feddyn(*lab: Any, alpha: float) -> tuple[Array, State]:
    """Acar 2021. Clients descend f_i(y) - <h_i, y> + (alpha/2) ||y - x||^2; h_i <- h_i - alpha (y_i - x).

    Server: h <- h - (alpha/N) sum_S (y_i - x); x <- (1/M) sum_S y_i - h/alpha.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    N = problem.clients
    h, h_i, trajectory = np.zeros_like(x), np.zeros((N, len(x))), []
    for t, chosen in enumerate(participants):
        finals = []
        for i in chosen:
            y = x.copy()
            for _ in range(tau[t, i]):
                y = y - lr[t] * (problem.grad(i, y) - h_i[i] + alpha * (y - x))
            h_i[i] = h_i[i] - alpha * (y - x)
            finals.append(y)
        h = h - (alpha / N) * sum(y - x for y in finals)
        x = sum(finals) / len(finals) - h / alpha
        trajectory.append(x)
    return np.array(trajectory), {"h": h, "h_i": h_i}


def fednova(*lab: Any, eta: float = 1.0, weights: Weights = "uniform") -> tuple[Array, State]:
    """Wang 2020. With p_i summing to one on S_t: x <- x + eta (sum p_i tau_i) sum p_i (y_i - x)/tau_i."""
    problem, x, participants, tau, lr = laid_out(*lab)
    trajectory = []
    for t, chosen in enumerate(participants):
        p = shares(problem, chosen, weights)
        tau_effective = sum(p[i] * tau[t, i] for i in chosen)
        d = sum(p[i] * (problem.descend(i, x, tau[t, i], lr[t]) - x) / tau[t, i] for i in chosen)
        x = x + eta * tau_effective * d
        trajectory.append(x)
    return np.array(trajectory), {}


def fedmgda(*lab: Any, eta: float = 1.0, epsilon: float = 1.0) -> tuple[Array, State]:
    """FedMGDA+, Hu 2022. u_i = Delta_i/||Delta_i||; lambda = argmin ||sum lambda_i u_i||; x <- x + eta sum lambda_i u_i

    over the simplex of S_t with |lambda_i - 1/M| <= epsilon; epsilon = 1 leaves it free. A zero update stays zero.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    trajectory = []
    for t, chosen in enumerate(participants):
        U = np.array([problem.descend(i, x, tau[t, i], lr[t]) - x for i in chosen])
        lengths = np.linalg.norm(U, axis=1, keepdims=True)
        U = U / np.where(lengths > 0, lengths, 1.0)
        x = x + eta * ((simplex_weights(U) if epsilon >= 1.0 else box_weights(U, epsilon)) @ U)
        trajectory.append(x)
    return np.array(trajectory), {}
