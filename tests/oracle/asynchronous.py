"""Asynchronous rounds: an event simulator, and FedAsync, FedBuff, FADAS and CA2FL on it.

Xie, Koyejo, Gupta 2019 (FedAsync); Nguyen et al. 2022 (FedBuff); Wang, Wang, Lu, Chen 2024 (FADAS, Alg. 1 and eq. 4);
Wang, Cao, Wu, Chen, Chen 2024 (CA2FL, Alg. 2). The simulator walks over all clients at every event and keeps every
version: slow, and without a queue. Rules, from docs/async.md:

- C slots. A free slot goes to the next candidate that is idle and available; candidates come in waves.
- Slots that become free at an instant are filled after all arrivals of that instant, and after a server step at it.
- A client is idle if it is not training and has not arrived since the last server step.
- After max(64, 8 floor(N / idle)) candidates that are not idle, or 64 that are idle but not available, no more are
  tried: the earliest of those not available starts when it is available; else the slot stays free until the next event.
- A server step takes the next K arrivals, at the same instant by client. Older versions than S steps are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from oracle.quadratic import Array

Wave = Callable[[int], list[int]]
"""The candidates of a wave, in the order in which they are tried."""


@dataclass
class Step:
    """One server step: (client, version) of the arrivals in order, of those refused, the time, and jobs in flight."""

    used: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    time: float = 0.0
    in_flight: list[tuple[int, int]] = field(default_factory=list)


class Stuck(Exception):
    """No client is at work and none can start."""


def simulate(
    clients: int,
    waves: Wave,
    seconds: Callable[[int, int], float],
    size: int,
    concurrency: int,
    oldest: int | None = None,
    opens: Callable[[int, float], float] = lambda client, now: now,
) -> Iterator[Step]:
    """The server steps, forever. `seconds(client, version)` is the length of a job, `opens(client, now)` the first time
    from now on at which the client can start."""
    until = np.full(clients, np.inf)  # arrival of the job, inf where there is none
    version = np.zeros(clients, dtype=int)
    resting = np.zeros(clients, dtype=bool)  # arrived since the last server step
    now, free, wave = 0.0, concurrency, 0
    candidates: list[int] = []
    t = 0
    while True:
        step = Step()
        resting[:] = False
        while len(step.used) < size:
            while free and not (until <= now).any():
                client = None
                start = now
                idle = np.isinf(until) & ~resting
                if idle.any():
                    limit, busy_tried, closed = max(64, 8 * (clients // int(idle.sum()))), 0, []
                    while busy_tried < limit and len(closed) < 64:
                        if not candidates:
                            candidates = list(waves(wave))
                            wave += 1
                        c = candidates.pop(0)
                        if not idle[c]:
                            busy_tried += 1
                        elif opens(c, now) <= now:
                            client = c
                            break
                        else:
                            closed.append(c)
                    if client is None and closed:
                        times = [opens(c, now) for c in closed]
                        client, start = closed[int(np.argmin(times))], min(times)
                if client is None:
                    break
                until[client] = start + seconds(client, t)
                version[client] = t
                free -= 1
                assert until[client] > now, "the reference has no jobs of no length"
            if np.isinf(until).all():
                raise Stuck
            c = int(np.argmin(until))  # the first of equal ones: by client
            now, until[c] = float(until[c]), np.inf
            resting[c] = True
            free += 1
            stale = oldest is not None and t - version[c] > oldest
            (step.refused if stale else step.used).append((c, int(version[c])))
        step.time = now
        step.in_flight = [(c, int(version[c])) for c in range(clients) if np.isfinite(until[c])]
        yield step
        t += 1


Local = Callable[[int, Array, int], Array]
"""local(client, x, version): the client's model after training from x."""


def run(x0: Array, steps: int, events: Iterator[Step], local: Local, server: Callable[..., Array]) -> Array:
    """The model after each server step; `server(x, [(client, tau, base, y)])` is the method."""
    versions, x, trajectory = {0: x0}, x0, []
    for t, step in zip(range(steps), events, strict=False):
        arrived = []
        for client, v in step.used:
            base = versions[v]
            arrived.append((client, t - v, base, local(client, base, v)))
        x = server(x, arrived)
        versions[t + 1] = x
        trajectory.append(x)
    return np.array(trajectory)


def fedasync(alpha: float, s: Callable[[int], float]) -> Callable[..., Array]:
    """x <- (1 - a) x + a y, a = alpha s(tau), for one client model after another."""

    def server(x: Array, arrived: list[tuple[int, int, Array, Array]]) -> Array:
        for _, tau, _, y in arrived:
            a = alpha * s(tau)
            x = (1 - a) * x + a * y
        return x

    return server


def fedbuff(eta: float, s: Callable[[int], float], weight: Callable[[int], float]) -> Callable[..., Array]:
    """x <- x + eta sum_i p_i s(tau_i) (y_i - base_i), p_i = weight(i) / sum of the weights; in the paper 1/K."""

    def server(x: Array, arrived: list[tuple[int, int, Array, Array]]) -> Array:
        total = sum(weight(client) for client, *_ in arrived)
        return x + eta * sum(weight(client) / total * s(tau) * (y - base) for client, tau, base, y in arrived)

    return server


def fadas(eta: float, b1: float, b2: float, eps: float, tau_c: int, authors: bool = False) -> Callable[..., Array]:
    """AMSGrad on the mean of the updates, with min(eta, 1/tau_max) if tau_max > tau_c (the code: eta / tau_max)."""
    memory: dict[str, Array] = {}

    def server(x: Array, arrived: list[tuple[int, int, Array, Array]]) -> Array:
        Delta = np.mean([y - base for _, _, base, y in arrived], axis=0)
        m, v, vhat = (memory.get(name, np.zeros_like(x)) for name in ("m", "v", "vhat"))
        m, v = b1 * m + (1 - b1) * Delta, b2 * v + (1 - b2) * Delta**2
        vhat = np.maximum(vhat, v)
        memory.update(m=m, v=v, vhat=vhat)
        tau = max(tau for _, tau, *_ in arrived)
        rate = eta
        if tau > tau_c:
            rate = eta / tau if authors else min(eta, 1 / tau)
        return x + rate * m / (np.sqrt(vhat) + eps)

    return server


def ca2fl(eta: float, clients: int) -> Callable[..., Array]:
    """v = h + mean_S (Delta_i - h_i); x <- x + eta v; h_i <- Delta_i; h = (1/N) sum_i h_i, computed anew."""
    h: dict[int, Array] = {}

    def server(x: Array, arrived: list[tuple[int, int, Array, Array]]) -> Array:
        mean_of_all = sum(h.values(), np.zeros_like(x)) / clients
        change = np.mean([y - base - h.get(client, 0.0) for client, _, base, y in arrived], axis=0)
        for client, _, base, y in arrived:
            h[client] = y - base
        return x + eta * (mean_of_all + change)

    return server
