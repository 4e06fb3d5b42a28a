"""Problems small enough for mental arithmetic, and random participants, for the tests of the references."""

from __future__ import annotations

import numpy as np

from oracle.quadratic import Quadratics


def unit() -> Quadratics:
    """One client, f(x) = (x - 1)^2 / 2. From 0 one step of rate 0.5 reports Delta = 0.5; from 0.5 it reports 0.25."""
    return Quadratics([[[1.0]]], [[1.0]])


def pair() -> Quadratics:
    """f_0 = (x - 1)^2 / 2 on one row, f_1 = 2 (x + 1)^2 on three.

    From 0 with rate 0.1: one step leads to 0.1 and -0.4, two to 0.19 and -0.64.
    """
    return Quadratics([[[1.0]], [[2.0], [2.0], [2.0]]], [[1.0], [-2.0, -2.0, -2.0]])


def plane() -> Quadratics:
    """One client in two dimensions; a step of rate 1 reports Delta = ((1, -0.5) - x) / 2."""
    return Quadratics([np.eye(2)], [[1.0, -0.5]])


ZERO, ZERO2 = np.zeros(1), np.zeros(2)


def rounds(seed: int, clients: int, size: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(clients, size, replace=False).tolist()) for _ in range(count)]
