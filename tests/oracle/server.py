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

from collections.abc import Callable
from typing import Any

import numpy as np

from oracle.quadratic import Array, State, Weights, averaging


def fedavg(*lab: Any, eta: float = 1.0, weights: Weights = "uniform") -> tuple[Array, State]:
    """x <- x + eta Delta."""
    return averaging(*lab, weights=weights, server=lambda t, Delta: eta * Delta), {}


def fedavgm(*lab: Any, eta: float = 1.0, beta: float = 0.9, weights: Weights = "uniform") -> tuple[Array, State]:
    """m <- beta m + Delta; x <- x + eta m."""
    state: State = {"m": 0.0}

    def step(t: int, Delta: Array) -> Array:
        state["m"] = beta * state["m"] + Delta
        return eta * state["m"]

    return averaging(*lab, weights=weights, server=step), state


def adaptive(
    *lab: Any,
    second: Callable[[State, Array], Array],
    eta: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    weights: Weights = "uniform",
    v0: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
) -> tuple[Array, State]:
    """m <- b1 m + (1 - b1) Delta; x <- x + eta m / (sqrt s + eps), where `second` moves v and returns s."""
    state: State = {"m": 0.0, "v": v0}

    def step(t: int, Delta: Array) -> Array:
        m = state["m"] = b1 * state["m"] + (1 - b1) * Delta
        s = second(state, Delta)
        if bias_correction:
            m, s = m / (1 - b1 ** (t + 1)), s / (1 - b2 ** (t + 1))
        return eta * m / (np.sqrt(s + eps) if eps_inside else np.sqrt(s) + eps)

    return averaging(*lab, weights=weights, server=step), state


def fedadagrad(*lab: Any, b1: float = 0.0, **options: Any) -> tuple[Array, State]:
    """v <- v + Delta^2, which is not corrected; x <- x + eta m / (sqrt v + eps)."""

    def second(state: State, Delta: Array) -> Array:
        state["v"] = state["v"] + Delta**2
        return state["v"]

    return adaptive(*lab, second=second, b1=b1, b2=0.0, **options)


def fedadam(*lab: Any, b2: float = 0.99, **options: Any) -> tuple[Array, State]:
    """v <- b2 v + (1 - b2) Delta^2; x <- x + eta m / (sqrt v + eps)."""

    def second(state: State, Delta: Array) -> Array:
        state["v"] = b2 * state["v"] + (1 - b2) * Delta**2
        return state["v"]

    return adaptive(*lab, second=second, b2=b2, **options)


def fedyogi(*lab: Any, b2: float = 0.99, **options: Any) -> tuple[Array, State]:
    """v <- v - (1 - b2) Delta^2 sign(v - Delta^2), with sign(0) = 0; the step as FedAdam."""

    def second(state: State, Delta: Array) -> Array:
        state["v"] = state["v"] - (1 - b2) * Delta**2 * np.sign(state["v"] - Delta**2)
        return state["v"]

    return adaptive(*lab, second=second, b2=b2, **options)


def fedamsgrad(*lab: Any, b2: float = 0.99, **options: Any) -> tuple[Array, State]:
    """v as FedAdam; vhat <- max(vhat, v); x <- x + eta m / (sqrt vhat + eps) (option 2 of the FedAMS paper)."""

    def second(state: State, Delta: Array) -> Array:
        state["v"] = b2 * state["v"] + (1 - b2) * Delta**2
        state["vhat"] = np.maximum(state.get("vhat", 0.0), state["v"])
        return state["vhat"]

    return adaptive(*lab, second=second, b2=b2, **options)


def fedams(*lab: Any, eta: float = 1.0, b2: float = 0.99, eps: float = 1e-3, **options: Any) -> tuple[Array, State]:
    """v as FedAdam; vhat <- max(vhat, v, eps) entry by entry; x <- x + eta m / sqrt vhat (option 1)."""

    def second(state: State, Delta: Array) -> Array:
        state["v"] = b2 * state["v"] + (1 - b2) * Delta**2
        state["vhat"] = np.maximum(np.maximum(state.get("vhat", 0.0), state["v"]), eps)
        return state["vhat"]

    return adaptive(*lab, second=second, eta=eta, b2=b2, eps=0.0, **options)
