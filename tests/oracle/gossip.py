"""Neighbours talk first: HA-Fed, AFGA, CAFGA and the decentralized baselines, with every choice given from outside.

A cluster is a list of client ids and a doubly stochastic W whose row r belongs to the r-th id of the list. One step is
X <- W (X - lr G): first the local step (G is zero in the rows of idle clients), then the mixing. `reporters[t]` are the
clients that report in round t, over all clusters; `active[t][s]` those that compute at step s of it. The server is
AMSGrad with eps inside the root, on Delta = (1/K) sum_k (1/m_k) sum_{i in S_k} (x_i - x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def amsgrad(
    x: Array,
    rounds: int,
    update: Callable[[int, Array], Array],
    *,
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Array, State]:
    """The server's rounds on Delta = update(t, x)."""
    m, v, vhat, trajectory = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), []
    for t in range(rounds):
        Delta = update(t, x)
        m = b1 * m + (1 - b1) * Delta
        v = b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        x = x + eta * m / np.sqrt(vhat + eps)
        trajectory.append(x)
    return np.array(trajectory), {"m": m, "v": v, "vhat": vhat}


def rates(local_lr: ArrayLike, rounds: int) -> Array:
    return np.broadcast_to(np.asarray(local_lr, dtype=np.float64), (rounds,))


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
    mix: Callable[[Array, Array, Array, Sequence[int]], Array] | None = None,
    **server: float,
) -> tuple[Array, State]:
    """HA-Fed. reporters[t] = everyone is Alg. 1, a few of each cluster Alg. 2. `active` None: all compute, always.

    Partially active (App. F.3): `active` lists who computes; gossip after steps every, 2 every, ... of each round.
    """
    lr = rates(local_lr, len(reporters))

    def update(t: int, x: Array) -> Array:
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
        return Delta

    return amsgrad(x0, len(reporters), update, **server)


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


def cafga(
    problem: Quadratics,
    x0: Array,
    clusters: Sequence[Sequence[int]],
    W: Sequence[Array],
    reporters: Rounds,
    active: Activity,
    steps: int,
    local_lr: ArrayLike,
    **server: float,
) -> tuple[Array, State]:
    """CAFGA, Alg. 2: in each of K clusters S_{r,t} computes, all gossip, S_r reports; updates are averaged within and
    then over the clusters."""
    lr = rates(local_lr, len(reporters))

    def update(r: int, x: Array) -> Array:
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
            Delta += sum(local[i] - x for i in S_k) / (len(clusters) * len(S_k))
        return Delta

    return amsgrad(x0, len(reporters), update, **server)


def afga(problem: Quadratics, x0: Array, W: Array, *rounds: Any, **server: float) -> tuple[Array, State]:
    """AFGA, Alg. 1: one graph over all N."""
    return cafga(problem, x0, [range(problem.clients)], [W], *rounds, **server)


def cafga_adapted(
    problem: Quadratics,
    x0: Array,
    clusters: Sequence[Sequence[int]],
    selected: Rounds,
    steps: int,
    local_lr: ArrayLike,
    **server: float,
) -> tuple[Array, State]:
    """CAFGA(a): only the round's selected are online.

    Those of a cluster form a ring in ascending order of client id, all compute and gossip at every step, all report.
    """
    lr = rates(local_lr, len(selected))

    def update(t: int, x: Array) -> Array:
        Delta = np.zeros_like(x)
        for members in clusters:
            online = sorted(i for i in members if i in selected[t])
            X = np.array([x for _ in online])
            for _ in range(steps):
                X = ring(len(online)) @ (X - lr[t] * np.array([problem.grad(i, X[r]) for r, i in enumerate(online)]))
            Delta += (X - x).mean(axis=0) / len(clusters)
        return Delta

    return amsgrad(x0, len(selected), update, **server)


def afga_adapted(problem: Quadratics, x0: Array, *rounds: Any, **server: float) -> tuple[Array, State]:
    """AFGA(a): the same with all clients in one cluster."""
    return cafga_adapted(problem, x0, [range(problem.clients)], *rounds, **server)


def block(clusters: Sequence[Sequence[int]], W: Sequence[Array]) -> Array:
    """One W over all clients from those of the clusters."""
    whole = np.zeros((sum(map(len, clusters)),) * 2)
    for members, W_k in zip(clusters, W, strict=True):
        whole[np.ix_(members, members)] = W_k
    return whole


def decentralized(
    problem: Quadratics,
    x0: Array,
    rounds: int,
    steps: int,
    local_lr: ArrayLike,
    *,
    step: Callable[[int, Array, Array, float], Array],
    state: State,
) -> tuple[Array, State]:
    """X <- step(t, X, G, lr), G the gradient of every client at its own model, t counted over the whole run.

    No server. The trajectory is the mean model. `state`: X, every client's own model, and consensus, sqrt of mean
    ||x_i - mean||^2 after each round.
    """
    lr = rates(local_lr, rounds)
    X, trajectory, consensus = np.tile(x0, (problem.clients, 1)), [], []
    for t in range(rounds * steps):
        G = np.array([problem.grad(i, X[i]) for i in range(problem.clients)])
        X = step(t, X, G, lr[t // steps])
        if (t + 1) % steps == 0:
            trajectory.append(X.mean(axis=0))
            consensus.append(float(np.sqrt(np.mean(np.sum((X - X.mean(axis=0)) ** 2, axis=1)))))
    return np.array(trajectory), {**state, "X": X, "consensus": consensus}


def mixed(W: Array, X: Array, change: Array, adapt_first: bool) -> Array:
    """x_i <- sum_j W_ij x_j - change_i, as the papers list it; `adapt_first`: x_i <- sum_j W_ij (x_j - change_j)."""
    return W @ (X - change) if adapt_first else W @ X - change


def dsgd(
    problem: Quadratics, x0: Array, W: Array, *run: Any, adapt_first: bool = False, momentum: float = 0.0
) -> tuple[Array, State]:
    """Lian 2017: x_i <- sum_j W_ij x_j - lr grad f_i(x_i), `steps` times a round.

    Heavy-ball momentum of each client lasts the whole run: d_i <- momentum d_i + g_i takes the place of g_i.
    """
    state: State = {"d": 0.0}

    def step(t: int, X: Array, G: Array, lr: float) -> Array:
        state["d"] = momentum * state["d"] + G
        return mixed(W, X, lr * state["d"], adapt_first)

    return decentralized(problem, x0, *run, step=step, state=state)


def gossip_pga(
    problem: Quadratics,
    x0: Array,
    W: Array,
    *run: Any,
    period: int,
    adapt_first: bool = True,
    clusters: Sequence[Sequence[int]] | None = None,
) -> tuple[Array, State]:
    """Chen 2021. The mixing is the exact average, in each cluster, when t + 1 is a multiple of H."""
    groups = [list(range(problem.clients))] if clusters is None else clusters
    J = block(groups, [np.full((len(g), len(g)), 1.0 / len(g)) for g in groups])

    def step(t: int, X: Array, G: Array, lr: float) -> Array:
        return mixed(J if (t + 1) % period == 0 else W, X, lr * G, adapt_first)

    return decentralized(problem, x0, *run, step=step, state={})


def choco_sgd(
    problem: Quadratics, x0: Array, W: Array, *run: Any, gamma: float, compress: Callable[[Array], Array]
) -> tuple[Array, State]:
    """Koloskova 2019, Alg. 2, in coordinates around the common first model, so that xhat_i = x0 at first.

    x_i^{t+1/2} = x_i - lr grad f_i(x_i); q_i = C(x_i^{t+1/2} - xhat_i); xhat_i <- xhat_i + q_i;
    x_i = x_i^{t+1/2} + gamma sum_j W_ij (xhat_j - xhat_i). The copies last as long as the run.
    """
    public = np.tile(x0, (problem.clients, 1))

    def step(t: int, X: Array, G: Array, lr: float) -> Array:
        half = X - lr * G
        for i in range(problem.clients):
            public[i] = public[i] + compress(half[i] - public[i])
        return half + gamma * (W @ public - W.sum(axis=1, keepdims=True) * public)

    return decentralized(problem, x0, *run, step=step, state={"public": public})


def dadam(
    problem: Quadratics,
    x0: Array,
    W: Array,
    *run: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    bias_correction: bool = False,
    amsgrad: bool = False,
    adapt_first: bool = False,
) -> tuple[Array, State]:
    """Every client runs Adam on its own model, with moments of its own for the whole run; only the models gossip.

    m_i <- b1 m_i + (1 - b1) g_i; v_i <- b2 v_i + (1 - b2) g_i^2; the change is lr m_i/(sqrt v_i + eps). `amsgrad` has
    vhat_i <- max(vhat_i, v_i) under the root. The bias correction divides m by 1 - b1^t and v (or vhat) by 1 - b2^t, t
    from 1 over the whole run.
    """
    state: State = {"m": 0.0, "v": 0.0, "vhat": 0.0}

    def step(t: int, X: Array, G: Array, lr: float) -> Array:
        m = state["m"] = b1 * state["m"] + (1 - b1) * G
        v = state["v"] = b2 * state["v"] + (1 - b2) * G**2
        state["vhat"] = np.maximum(state["vhat"], v)
        second = state["vhat"] if amsgrad else v
        if bias_correction:
            m, second = m / (1 - b1 ** (t + 1)), second / (1 - b2 ** (t + 1))
        return mixed(W, X, lr * m / (np.sqrt(second) + eps), adapt_first)

    return decentralized(problem, x0, *run, step=step, state=state)


def d_amsgrad(
    problem: Quadratics,
    x0: Array,
    W: Array,
    *run: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
    adapt_first: bool = False,
) -> tuple[Array, State]:
    """Decentralized AMSGrad (Chen et al.). u~ starts at vhat_0 = eps. With the gradient at x_i, line by line:

    m, v, vhat as AMSGrad; u~_{t,i} = sum_j W_ij u~_{t-1/2,j}; u_i = max(u~_{t,i}, eps); the change is lr m_i/sqrt u_i;
    u~_{t+1/2,i} = u~_{t,i} - vhat_{t-1,i} + vhat_{t,i}.
    """
    start = np.full((problem.clients, len(x0)), eps)
    state: State = {"m": 0.0, "v": 0.0, "vhat": start, "u_half": start}

    def step(t: int, X: Array, G: Array, lr: float) -> Array:
        state["m"] = b1 * state["m"] + (1 - b1) * G
        state["v"] = b2 * state["v"] + (1 - b2) * G**2
        before, state["vhat"] = state["vhat"], np.maximum(state["vhat"], state["v"])
        u_tilde = W @ state["u_half"]
        state["u_half"] = u_tilde - before + state["vhat"]
        return mixed(W, X, lr * state["m"] / np.sqrt(np.maximum(u_tilde, eps)), adapt_first)

    return decentralized(problem, x0, *run, step=step, state=state)
