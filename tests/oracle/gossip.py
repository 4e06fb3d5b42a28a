"""Neighbours talk first: HA-Fed, AFGA, CAFGA and the decentralized baselines, with every choice given from outside.

A cluster is a list of client ids and a doubly stochastic W whose row r belongs to the r-th id of the list. One step is
X <- W (X - lr G): first the local step (G is zero in the rows of idle clients), then the mixing. `reporters[t]` are the
clients that report in round t, over all clusters; `active[t][s]` those that compute at step s of it. The server is
AMSGrad with eps inside the root, on Delta = (1/K) sum_k (1/m_k) sum_{i in S_k} (x_i - x).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from oracle.quadratic import Array, Quadratics, Rounds, State

Activity = Sequence[Sequence[Sequence[int]]]


def ring(n: int) -> Array:
    """Self and two neighbours, 1/3 each; two clients 1/2; one client 1. Three clients: every entry 1/3."""
    if n <= 2:
        return np.full((n, n), 1.0 / n)
    W = np.zeros((n, n))
    for r in range(n):
        for s in (r - 1, r, r + 1):
            W[r, s % n] += 1.0 / 3.0
    return W


def rho(W: Array) -> float:
    """||W - 11'/n||_2."""
    return float(np.linalg.norm(W - 1.0 / len(W), ord=2))


def ha_fed(
    problem: Quadratics,
    x0: Array,
    clusters: Sequence[Sequence[int]],
    W: Sequence[Array],
    reporters: Rounds,
    steps: int,
    local_lr: ArrayLike,
    *,
    active: Activity | None = None,
    every: int = 1,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Array, State]:
    """HA-Fed. reporters[t] = everyone is Alg. 1, a few of each cluster Alg. 2. `active` None: all compute, always.

    Partially active (App. F.3): `active` lists who computes; gossip after steps every, 2 every, ... of each round.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (len(reporters),))
    x, m, v, vhat = x0.copy(), np.zeros_like(x0), np.zeros_like(x0), np.zeros_like(x0)
    trajectory = []
    for t in range(len(reporters)):
        Delta = np.zeros_like(x)
        for members, W_k in zip(clusters, W, strict=True):
            X = np.array([x for _ in members])
            for s in range(steps):
                for r, i in enumerate(members):
                    if active is None or i in active[t][s]:
                        X[r] = X[r] - lr[t] * problem.grad(i, X[r])
                if (s + 1) % every == 0:
                    X = W_k @ X
            reporting = [r for r, i in enumerate(members) if i in reporters[t]]
            Delta += (X[reporting] - x).mean(axis=0) / len(clusters)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def afga(
    problem: Quadratics,
    x0: Array,
    W: Array,
    reporters: Rounds,
    active: Activity,
    steps: int,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Array, State]:
    """AFGA, Alg. 1: one graph over all N. S_{r,t} computes, all gossip, S_r reports."""
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (len(reporters),))
    N = problem.clients
    x, m, v, vhat = x0.copy(), np.zeros_like(x0), np.zeros_like(x0), np.zeros_like(x0)
    trajectory = []
    for r, S_r in enumerate(reporters):
        X = np.tile(x, (N, 1))
        for t in range(steps):
            half = X.copy()
            for i in active[r][t]:
                half[i] = X[i] - lr[r] * problem.grad(i, X[i])
            for i in range(N):
                X[i] = sum(W[i, j] * half[j] for j in range(N))
        Delta = sum(X[i] - x for i in S_r) / len(S_r)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def cafga(
    problem: Quadratics,
    x0: Array,
    clusters: Sequence[Sequence[int]],
    W: Sequence[Array],
    reporters: Rounds,
    active: Activity,
    steps: int,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Array, State]:
    """CAFGA, Alg. 2: AFGA in each of K clusters, updates averaged within and then over the clusters."""
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (len(reporters),))
    K = len(clusters)
    x, m, v, vhat = x0.copy(), np.zeros_like(x0), np.zeros_like(x0), np.zeros_like(x0)
    trajectory = []
    for r in range(len(reporters)):
        Delta = np.zeros_like(x)
        for k, V_k in enumerate(clusters):
            local = {i: x.copy() for i in V_k}
            for t in range(steps):
                half = {}
                for i in V_k:
                    computes = i in active[r][t]
                    half[i] = local[i] - lr[r] * problem.grad(i, local[i]) if computes else local[i]
                for a, i in enumerate(V_k):
                    local[i] = sum(W[k][a, b] * half[j] for b, j in enumerate(V_k))
            S_k = [i for i in V_k if i in reporters[r]]
            Delta += sum(local[i] - x for i in S_k) / (K * len(S_k))
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def cafga_adapted(
    problem: Quadratics,
    x0: Array,
    clusters: Sequence[Sequence[int]],
    selected: Rounds,
    steps: int,
    local_lr: ArrayLike,
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Array, State]:
    """CAFGA(a): only the round's selected are online.

    Those of a cluster form a ring in ascending order of client id, all compute and gossip at every step, all report.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (len(selected),))
    x, m, v, vhat = x0.copy(), np.zeros_like(x0), np.zeros_like(x0), np.zeros_like(x0)
    trajectory = []
    for t in range(len(selected)):
        Delta = np.zeros_like(x)
        for members in clusters:
            online = sorted(i for i in members if i in selected[t])
            X = np.array([x for _ in online])
            for _ in range(steps):
                X = ring(len(online)) @ (X - lr[t] * np.array([problem.grad(i, X[r]) for r, i in enumerate(online)]))
            Delta += (X - x).mean(axis=0) / len(clusters)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def afga_adapted(
    problem: Quadratics, x0: Array, selected: Rounds, steps: int, local_lr: ArrayLike, **server: float
) -> tuple[Array, State]:
    """AFGA(a): the same with all clients in one cluster."""
    return cafga_adapted(problem, x0, [range(problem.clients)], selected, steps, local_lr, **server)


def dsgd(problem: Quadratics, x0: Array, W: Array, rounds: int, steps: int, local_lr: ArrayLike) -> tuple[Array, State]:
    """x_i <- sum_j W_ij (x_j - lr grad f_j(x_j)), `steps` times a round; no server. The trajectory is the mean model.

    `state`: X, every client's own model, and consensus, sqrt of mean ||x_i - mean||^2 after each round.
    """
    return _decentralized(problem, x0, W, rounds, steps, local_lr, exact_every=None)


def gossip_pga(
    problem: Quadratics, x0: Array, W: Array, rounds: int, steps: int, local_lr: ArrayLike, *, period: int
) -> tuple[Array, State]:
    """Chen 2021. DSGD whose mixing is the exact average when t + 1 is a multiple of H, t counted over the whole run."""
    return _decentralized(problem, x0, W, rounds, steps, local_lr, exact_every=period)


def _decentralized(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    exact_every: int | None,
) -> tuple[Array, State]:
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N = problem.clients
    X, trajectory, consensus = np.tile(x0, (N, 1)), [], []
    for t in range(rounds * steps):
        half = np.array([X[i] - lr[t // steps] * problem.grad(i, X[i]) for i in range(N)])
        exact = exact_every is not None and (t + 1) % exact_every == 0
        X = np.full((N, N), 1.0 / N) @ half if exact else W @ half
        if (t + 1) % steps == 0:
            trajectory.append(X.mean(axis=0))
            consensus.append(np.sqrt(np.mean(np.sum((X - X.mean(axis=0)) ** 2, axis=1))))
    return np.array(trajectory), {"X": X, "consensus": consensus}


def dadam(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    bias_correction: bool = False,
    amsgrad: bool = False,
) -> tuple[Array, State]:
    """Every client runs Adam on its own model, with moments of its own for the whole run; only the models gossip.

    m_i <- b1 m_i + (1 - b1) g_i; v_i <- b2 v_i + (1 - b2) g_i^2; x_i <- x_i - lr m_i/(sqrt v_i + eps); X <- W X.
    D-AMSGrad has vhat_i <- max(vhat_i, v_i) under the root. The bias correction divides m by 1 - b1^t and v (or vhat)
    by 1 - b2^t, t from 1 over the whole run.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N, d = problem.clients, len(x0)
    X, m, v, vhat = np.tile(x0, (N, 1)), np.zeros((N, d)), np.zeros((N, d)), np.zeros((N, d))
    trajectory, consensus = [], []
    for t in range(rounds * steps):
        for i in range(N):
            g = problem.grad(i, X[i])
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            vhat[i] = np.maximum(vhat[i], v[i])
            second = vhat[i] if amsgrad else v[i]
            first_scale = 1 - b1 ** (t + 1) if bias_correction else 1.0
            second_scale = 1 - b2 ** (t + 1) if bias_correction else 1.0
            X[i] = X[i] - lr[t // steps] * (m[i] / first_scale) / (np.sqrt(second / second_scale) + eps)
        X = W @ X
        if (t + 1) % steps == 0:
            trajectory.append(X.mean(axis=0))
            consensus.append(np.sqrt(np.mean(np.sum((X - X.mean(axis=0)) ** 2, axis=1))))
    return np.array(trajectory), {"X": X, "m": m, "v": v, "vhat": vhat, "consensus": consensus}


def d_amsgrad(
    problem: Quadratics, x0: Array, W: Array, rounds: int, steps: int, local_lr: ArrayLike, **adam: float
) -> tuple[Array, State]:
    """`dadam` with the running maximum of v under the root."""
    return dadam(problem, x0, W, rounds, steps, local_lr, amsgrad=True, **adam)  # type: ignore[arg-type]
