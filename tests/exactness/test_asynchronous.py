"""Asynchronous presets against an event simulator that shares no code with them: 1e-10 over 200 server steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hansa
from hansa import aggregate, presets
from oracle import asynchronous as oracle
from pace.lab import BATCH, LOCAL_LR, SEED, SIZES, START, Local, Waves, seconds, table, task

STEPS = 200
COMMON = {"local_lr": LOCAL_LR, "batch_size": BATCH, "sampler": hansa.sample.uniform(count=4)}


def root(tau: int) -> float:
    return (1.0 + tau) ** -0.5


def hinge(tau: int) -> float:
    return 1.0 if tau <= 1 else 1.0 / (2.0 * (tau - 1) + 1.0)


CASES = {
    "fedasync": (
        presets.fedasync(alpha=0.6, concurrency=5, **COMMON), (1, 5, None), oracle.fedasync(0.6, root), 0.0,
    ),
    "fedasync, prox, hinge, three at a time": (
        presets.fedasync(
            alpha=0.4, mu=0.3, size=3, concurrency=6, staleness=aggregate.hinge(2.0, 1), max_staleness=3, **COMMON
        ),
        (3, 6, 3), oracle.fedasync(0.4, hinge), 0.3,
    ),
    "fedbuff": (
        presets.fedbuff(size=3, concurrency=6, server_lr=0.8, **COMMON),
        (3, 6, None), oracle.fedbuff(0.8, root, lambda _: 1.0), 0.0,
    ),
    "fedbuff, by samples, old ones refused": (
        presets.fedbuff(size=2, concurrency=7, max_staleness=2, weights="samples", server_lr=1.0, **COMMON),
        (2, 7, 2), oracle.fedbuff(1.0, root, lambda client: SIZES[client]), 0.0,
    ),
    "fadas": (
        presets.fadas(size=2, concurrency=6, server_lr=0.3, tau_c=2, b1=0.8, b2=0.95, eps=0.01, **COMMON),
        (2, 6, None), oracle.fadas(0.3, 0.8, 0.95, 0.01, 2), 0.0,
    ),
    "fadas, the authors' rate": (
        presets.fadas(size=2, concurrency=6, server_lr=0.3, delay_rule="authors", eps=0.01, **COMMON),
        (2, 6, None), oracle.fadas(0.3, 0.9, 0.99, 0.01, 1, authors=True), 0.0,
    ),
    "ca2fl": (
        presets.ca2fl(size=3, concurrency=5, server_lr=0.5, **COMMON),
        (3, 5, None), oracle.ca2fl(0.5, len(SIZES)), 0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_presets_follow_the_event_simulator(name: str, tmp_path: Path) -> None:
    method, (size, slots, oldest), server, prox = CASES[name]
    problem = task()
    events = oracle.simulate(len(SIZES), Waves(COMMON["sampler"], len(SIZES)), seconds, size, slots, oldest)
    expected = oracle.run(START, STEPS, events, Local(problem, prox), server)
    run = hansa.run(
        method, problem, rounds=STEPS, seed=SEED, dtype=torch.float64, profile=table(tmp_path), keep_params=True,
        evaluate_every=0, workers=1,
    )  # fmt: skip
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3
    np.testing.assert_allclose(run.trajectory.numpy(), expected, rtol=0, atol=1e-10 * max(1, np.abs(expected).max()))
    assert max(record["staleness_max"] for record in run.history) >= 2, "the case has stale updates"
    assert (oldest is None) == (not any(record["lost"] for record in run.history)), "refusals occur where allowed"
