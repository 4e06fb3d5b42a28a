"""Neighbours talk first: HA-Fed, AFGA, CAFGA and the decentralized baselines, with every choice given from outside.

A cluster is a list of client ids and a doubly stochastic W whose row r belongs to the r-th id of the list. One step is
X <- W (X - lr G): first the local step (G is zero in the rows of idle clients), then the mixing. `reporters[t]` are the
clients that report in round t, over all clusters; `active[t][s]` those that compute at step s of it. The server is
AMSGrad with eps inside the root, on Delta = (1/K) sum_k (1/m_k) sum_{i in S_k} (x_i - x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    mix: Callable[[Array, Array, Array, Sequence[int]], Array] | None = None,
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
                    X = W_k @ X if mix is None else mix(W_k, X, x, members)
            reporting = [r for r, i in enumerate(members) if i in reporters[t]]
            Delta += (X[reporting] - x).mean(axis=0) / len(clusters)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def flipped(X: Array, start: Array, members: Sequence[int], malicious: Sequence[int], scale: float) -> Array:
    """What each member sends: malicious ones the start of the round minus scale times their change."""
    return np.array([start - scale * (x - start) if i in malicious else x for x, i in zip(X, members, strict=True)])


def clipped_mix(tau: float, malicious: Sequence[int] = (), scale: float = 1.0):
    """ClippedGossip (He, Karimireddy, Jaggi 2022): x_i <- sum_j W_ij (x_i + clip(x_j - x_i, tau))."""

    def mix(W: Array, X: Array, start: Array, members: Sequence[int]) -> Array:
        sent, out = flipped(X, start, members, malicious, scale), np.zeros_like(X)
        for i in range(len(X)):
            for j in range(len(X)):
                z = (sent[j] if j != i else X[i]) - X[i]
                length = np.sqrt((z**2).sum())
                out[i] += W[i, j] * (X[i] + (z if length <= tau else z * tau / length))
        return out

    return mix


def trimmed_mix(b: int, malicious: Sequence[int] = (), scale: float = 1.0):
    """BRIDGE-T (Fang, Yang, Bajwa 2022): the mean of one's own value and the neighbours' without 2b extreme ones."""

    def mix(W: Array, X: Array, start: Array, members: Sequence[int]) -> Array:
        sent, out = flipped(X, start, members, malicious, scale), np.zeros_like(X)
        for i in range(len(X)):
            near = [j for j in range(len(X)) if W[i, j] > 0 and j != i]
            for c in range(X.shape[1]):
                values = sorted(sent[j, c] for j in near)[b : len(near) - b]
                out[i, c] = (X[i, c] + sum(values)) / (1 + len(values))
        return out

    return mix


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


def block(clusters: Sequence[Sequence[int]], W: Sequence[Array]) -> Array:
    """One W over all clients from those of the clusters."""
    whole = np.zeros((sum(map(len, clusters)),) * 2)
    for members, W_k in zip(clusters, W, strict=True):
        whole[np.ix_(members, members)] = W_k
    return whole


def _watch(X: Array, trajectory: list[Array], consensus: list[float]) -> None:
    trajectory.append(X.mean(axis=0))
    consensus.append(float(np.sqrt(np.mean(np.sum((X - X.mean(axis=0)) ** 2, axis=1)))))


def dsgd(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    adapt_first: bool = False,
    momentum: float = 0.0,
) -> tuple[Array, State]:
    """Lian 2017, as listed: x_i <- sum_j W_ij x_j - lr grad f_i(x_i), `steps` times a round; no server.

    `adapt_first`: x_i <- sum_j W_ij (x_j - lr grad f_j(x_j)). The trajectory is the mean model. `state`: X, every
    client's own model, and consensus, sqrt of mean ||x_i - mean||^2 after each round. Heavy-ball momentum of each
    client lasts the whole run: d_i <- momentum d_i + g_i takes the place of g_i.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    X, trajectory, consensus = np.tile(x0, (problem.clients, 1)), [], []
    d = np.zeros_like(X)
    for t in range(rounds * steps):
        G = np.array([problem.grad(i, X[i]) for i in range(problem.clients)])
        d = momentum * d + G
        X = W @ (X - lr[t // steps] * d) if adapt_first else W @ X - lr[t // steps] * d
        if (t + 1) % steps == 0:
            _watch(X, trajectory, consensus)
    return np.array(trajectory), {"X": X, "consensus": consensus}


def gossip_pga(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    period: int,
    adapt_first: bool = True,
    clusters: Sequence[Sequence[int]] | None = None,
) -> tuple[Array, State]:
    """Chen 2021. Adapt-then-combine; the mixing is the exact average, in each cluster, when t + 1 is a multiple of H, t
    counted over the whole run."""
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N = problem.clients
    groups = [list(range(N))] if clusters is None else clusters
    J = block(groups, [np.full((len(g), len(g)), 1.0 / len(g)) for g in groups])
    X, trajectory, consensus = np.tile(x0, (N, 1)), [], []
    for t in range(rounds * steps):
        G = np.array([problem.grad(i, X[i]) for i in range(N)])
        M = J if (t + 1) % period == 0 else W
        X = M @ (X - lr[t // steps] * G) if adapt_first else M @ X - lr[t // steps] * G
        if (t + 1) % steps == 0:
            _watch(X, trajectory, consensus)
    return np.array(trajectory), {"X": X, "consensus": consensus}


def choco_sgd(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    gamma: float,
    compress: Callable[[Array], Array],
) -> tuple[Array, State]:
    """Koloskova 2019, Alg. 2, in coordinates around the common first model, so that xhat_i = x0 at first.

    x_i^{t+1/2} = x_i - lr grad f_i(x_i); q_i = C(x_i^{t+1/2} - xhat_i); xhat_i <- xhat_i + q_i;
    x_i = x_i^{t+1/2} + gamma sum_j W_ij (xhat_j - xhat_i). The copies last as long as the run.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N = problem.clients
    X, public = np.tile(x0, (N, 1)), np.tile(x0, (N, 1))
    trajectory: list[Array] = []
    consensus: list[float] = []
    for t in range(rounds * steps):
        half = np.array([X[i] - lr[t // steps] * problem.grad(i, X[i]) for i in range(N)])
        for i in range(N):
            public[i] = public[i] + compress(half[i] - public[i])
        X = np.array([half[i] + gamma * sum(W[i, j] * (public[j] - public[i]) for j in range(N)) for i in range(N)])
        if (t + 1) % steps == 0:
            _watch(X, trajectory, consensus)
    return np.array(trajectory), {"X": X, "public": public, "consensus": consensus}


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
    adapt_first: bool = False,
) -> tuple[Array, State]:
    """Every client runs Adam on its own model, with moments of its own for the whole run; only the models gossip.

    m_i <- b1 m_i + (1 - b1) g_i; v_i <- b2 v_i + (1 - b2) g_i^2; x_i <- sum_j W_ij x_j - lr m_i/(sqrt v_i + eps), or
    with `adapt_first` X <- W X after the step. `amsgrad` has vhat_i <- max(vhat_i, v_i) under the root. The bias
    correction divides m by 1 - b1^t and v (or vhat) by 1 - b2^t, t from 1 over the whole run.
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N, d = problem.clients, len(x0)
    X, m, v, vhat = np.tile(x0, (N, 1)), np.zeros((N, d)), np.zeros((N, d)), np.zeros((N, d))
    trajectory, consensus = [], []
    for t in range(rounds * steps):
        step = np.zeros_like(X)
        for i in range(N):
            g = problem.grad(i, X[i])
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            vhat[i] = np.maximum(vhat[i], v[i])
            second = vhat[i] if amsgrad else v[i]
            first_scale = 1 - b1 ** (t + 1) if bias_correction else 1.0
            second_scale = 1 - b2 ** (t + 1) if bias_correction else 1.0
            step[i] = lr[t // steps] * (m[i] / first_scale) / (np.sqrt(second / second_scale) + eps)
        X = W @ (X - step) if adapt_first else W @ X - step
        if (t + 1) % steps == 0:
            _watch(X, trajectory, consensus)
    return np.array(trajectory), {"X": X, "m": m, "v": v, "vhat": vhat, "consensus": consensus}


def d_amsgrad(
    problem: Quadratics,
    x0: Array,
    W: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
    adapt_first: bool = False,
) -> tuple[Array, State]:
    """Decentralized AMSGrad (Chen et al.). u~ starts at vhat_0 = eps. With the gradient at x_i, line by line:

    m, v, vhat as AMSGrad; x_{t+1/2,i} = sum_j W_ij x_j; u~_{t,i} = sum_j W_ij u~_{t-1/2,j}; u_i = max(u~_{t,i}, eps);
    x_i = x_{t+1/2,i} - lr m_i/sqrt u_i; u~_{t+1/2,i} = u~_{t,i} - vhat_{t-1,i} + vhat_{t,i}.
    `adapt_first`: x_i = sum_j W_ij (x_j - lr m_j/sqrt u_j).
    """
    lr = np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))
    N, d = problem.clients, len(x0)
    X, m, v = np.tile(x0, (N, 1)), np.zeros((N, d)), np.zeros((N, d))
    vhat, u_half = np.full((N, d), eps), np.full((N, d), eps)
    trajectory, consensus = [], []
    for t in range(rounds * steps):
        G = np.array([problem.grad(i, X[i]) for i in range(N)])
        m = b1 * m + (1 - b1) * G
        v = b2 * v + (1 - b2) * G**2
        before, vhat = vhat, np.maximum(vhat, v)
        u_tilde = W @ u_half
        step = lr[t // steps] * m / np.sqrt(np.maximum(u_tilde, eps))
        X = W @ (X - step) if adapt_first else W @ X - step
        u_half = u_tilde - before + vhat
        if (t + 1) % steps == 0:
            _watch(X, trajectory, consensus)
    return np.array(trajectory), {"X": X, "m": m, "v": v, "vhat": vhat, "u_half": u_half, "consensus": consensus}
