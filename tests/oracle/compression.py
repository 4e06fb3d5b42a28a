"""FedCAMS: Wang, Lin, Chen, Communication-Efficient Adaptive Federated Learning, ICML 2022, Alg. 2 and App. D.

Two-way compression with partial participation goes beyond the paper (see `fedcams`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from oracle.quadratic import Array, State, laid_out

Compressor = Callable[[Array], Array]


def scaled_sign(x: Array) -> Array:
    """C(x) = (||x||_1 / d) sign(x), sign(0) = +1: an entry travels as one bit. C(0) = 0, for then the scale is 0."""
    scale = float(np.abs(x).sum()) / len(x)
    return np.where(x < 0, -scale, scale)


def top_k(ratio: float, x: Array) -> Array:
    """The k = max(1, floor(r d)) entries of largest magnitude, the others zero; of equal magnitudes the lower index."""
    k = max(1, int(np.floor(ratio * len(x))))
    by_size = sorted(range(len(x)), key=lambda j: (-abs(x[j]), j))
    kept = np.zeros_like(x)
    kept[by_size[:k]] = x[by_size[:k]]
    return kept


def compressor(name: str, ratio: float = 1.0) -> Compressor:
    """`sign`, `top_k` with its ratio, or `identity`."""
    known: dict[str, Compressor] = {"sign": scaled_sign, "top_k": partial(top_k, ratio), "identity": np.copy}
    return known[name]


def fedcams(
    *lab: Any,
    C: Compressor,
    two_way: bool = False,
    eta: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
) -> tuple[Array, State]:
    """Chat_i = C(Delta_i + e_i); e_i <- Delta_i + e_i - Chat_i (others keep theirs); FedAMS step on the mean of Chat_i.

    Two-way: everyone holds xhat, at first x_0. A round opens with q = C(x - xhat), xhat <- xhat + q; the participants
    train from xhat and report y_i - xhat; the server's own x takes the step. The trajectory is that of x.
    `state`: e (one row per client), replicas (xhat of each round), and gamma per round (Assumption 4.17):
    ||C(mean(Delta_i + e_i)) - mean C(Delta_i + e_i)|| / ||mean Delta_i||.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    xhat, m, v, vhat = x, np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    e = np.zeros((problem.clients, len(x)))
    trajectory, replicas, gamma = [], [], []
    for t, chosen in enumerate(participants):
        xhat = xhat + C(x - xhat) if two_way else x
        replicas.append(xhat)
        Delta = {i: problem.descend(i, xhat, tau[t, i], lr[t]) - xhat for i in chosen}
        carried = {i: Delta[i] + e[i] for i in chosen}
        Chat = {i: C(carried[i]) for i in chosen}
        for i in chosen:
            e[i] = carried[i] - Chat[i]
        mean = sum(Chat.values()) / len(chosen)
        gap = C(sum(carried.values()) / len(chosen)) - mean
        gamma.append(np.linalg.norm(gap) / np.linalg.norm(sum(Delta.values()) / len(chosen)))
        m = b1 * m + (1 - b1) * mean
        v = b2 * v + (1 - b2) * mean**2
        vhat = np.maximum(np.maximum(vhat, v), eps)
        x = x + eta * m / np.sqrt(vhat)
        trajectory.append(x)
    state = {"e": e, "xhat": xhat, "replicas": np.array(replicas), "gamma": gamma, "m": m, "v": v, "vhat": vhat}
    return np.array(trajectory), state


def fedavg_compressed(*lab: Any, C: Compressor, two_way: bool = False, eta: float = 1.0) -> tuple[Array, State]:
    """The same wire under FedAvg: x <- x + (eta/M) sum Chat_i."""
    problem, x, participants, tau, lr = laid_out(*lab)
    xhat, e = x, np.zeros((problem.clients, len(x)))
    trajectory, replicas = [], []
    for t, chosen in enumerate(participants):
        xhat = xhat + C(x - xhat) if two_way else x
        replicas.append(xhat)
        total = np.zeros_like(x)
        for i in chosen:
            carried = problem.descend(i, xhat, tau[t, i], lr[t]) - xhat + e[i]
            Chat = C(carried)
            e[i] = carried - Chat
            total += Chat / len(chosen)
        x = x + eta * total
        trajectory.append(x)
    return np.array(trajectory), {"e": e, "xhat": xhat, "replicas": np.array(replicas)}


def scaffold_compressed(*lab: Any, C: Compressor, eta: float = 1.0) -> tuple[Array, State]:
    """SCAFFOLD with both uploads compressed, each with a residual of its own; the downlink is exact.

    A client's own c_i is the exact one; the server moves c by what arrived.
    """
    problem, x, participants, tau, lr = laid_out(*lab)
    N, d = problem.clients, len(x)
    c, c_i = np.zeros(d), np.zeros((N, d))
    e_model, e_control = np.zeros((N, d)), np.zeros((N, d))
    trajectory = []
    for t, chosen in enumerate(participants):
        model, control = np.zeros(d), np.zeros(d)
        for i in chosen:
            y = x.copy()
            for _ in range(tau[t, i]):
                y = y - lr[t] * (problem.grad(i, y) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (tau[t, i] * lr[t])
            sent_model = C(y - x + e_model[i])
            e_model[i] = y - x + e_model[i] - sent_model
            sent_control = C(c_plus - c_i[i] + e_control[i])
            e_control[i] = c_plus - c_i[i] + e_control[i] - sent_control
            c_i[i] = c_plus
            model += sent_model
            control += sent_control
        x = x + eta * model / len(chosen)
        c = c + control / N
        trajectory.append(x)
    return np.array(trajectory), {"c": c, "c_i": c_i, "e_model": e_model, "e_control": e_control}
