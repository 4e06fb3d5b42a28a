"""The methods on mini-batches of unequal clients: a recording model tells the batches, the references take the same.

Full gradients hide errors of batches: which rows, how many, in whose step. The model is written as users write theirs.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

import hansa
from exactness.laboratory import CLIENTS, DIM, LOCAL_LR, STEPS, WEIGHTS, assert_agree, problem
from gossip.laboratory import RecordedLeastSquares, regression
from hansa import presets
from hansa.gossip import ring
from oracle import aware, compression, gossip, local, server
from oracle.quadratic import Quadratics

ROUNDS, BATCH = 12, 4
ADAM = {"b1": 0.8, "b2": 0.95, "eps": 0.02}
GROUPS = [[6, 0, 3, 1], [2, 5, 4]]


class Replayed(Quadratics):
    """The problem with the recorded batches: the n-th gradient of a client is that of its n-th batch."""

    def __init__(self, reference: Quadratics, batches: list[list[int]]) -> None:
        super().__init__(reference.A, reference.b)
        first = np.cumsum([0, *self.samples])
        self.queues: list[deque[list[int]]] = [deque() for _ in self.A]
        for rows in batches:
            (owner,) = {int(np.searchsorted(first, row, side="right")) - 1 for row in rows}
            self.queues[owner].append([row - first[owner] for row in rows])

    def grad(self, i: int, x: np.ndarray) -> np.ndarray:
        rows = self.queues[i].popleft()
        assert len(rows) == min(BATCH, self.samples[i])
        A, b = self.A[i][rows], self.b[i][rows]
        return A.T @ (A @ x - b) / len(rows)


def recorded(algorithm: hansa.Algorithm, steps: int | None = None) -> tuple[hansa.Run, Replayed]:
    """A run of so many local steps in all, and the problem with its batches; earlier batches probe the model."""
    reference = problem()
    task = regression(reference)
    RecordedLeastSquares.log.clear()
    run = hansa.run(algorithm, task, rounds=ROUNDS, dtype=torch.float64, keep_params=True, workers=1)
    if steps is None:
        steps = sum(STEPS[client] for clients in chosen() for client in clients)
    return run, Replayed(reference, RecordedLeastSquares.log[-steps:])


def chosen(count: int = 3) -> list[list[int]]:
    draw = np.random.default_rng(8)
    return [draw.permutation(CLIENTS)[: count + (t % 2)].tolist() for t in range(ROUNDS)]


def words(**more: object) -> dict[str, object]:
    sampler = hansa.sample.replay(chosen())
    return {"local_lr": LOCAL_LR, "steps": hansa.local.fixed(STEPS), "batch_size": BATCH, "sampler": sampler, **more}


def finish(run: hansa.Run, replayed: Replayed, expected: np.ndarray) -> None:
    """Every round agrees, and the reference used every batch."""
    assert_agree(run, expected)
    assert not any(replayed.queues)


@pytest.mark.parametrize("weights", ["uniform", "samples", WEIGHTS], ids=["uniform", "samples", "given"])
@pytest.mark.parametrize(
    ("preset", "reference", "mine", "theirs"),
    [
        (presets.fedavg, server.fedavg, {"server_lr": 0.7}, {"eta": 0.7}),
        (presets.fedprox, local.fedprox, {"mu": 0.7, "server_lr": 0.9}, {"mu": 0.7, "eta": 0.9}),
        (presets.fednova, local.fednova, {"server_lr": 0.8}, {"eta": 0.8}),
        (presets.fedavgm, server.fedavgm, {"server_lr": 0.5, "momentum": 0.7}, {"eta": 0.5, "beta": 0.7}),
        (presets.fedadagrad, server.fedadagrad, {"server_lr": 0.3, "eps": 0.02}, {"eta": 0.3, "eps": 0.02}),
        (presets.fedadam, server.fedadam, {"server_lr": 0.3, **ADAM}, {"eta": 0.3, **ADAM}),
        (presets.fedamsgrad, server.fedamsgrad, {"server_lr": 0.3, **ADAM}, {"eta": 0.3, **ADAM}),
        (presets.fedams, server.fedams, {"server_lr": 0.3, **ADAM}, {"eta": 0.3, **ADAM}),
        (presets.fedyogi, server.fedyogi, {"server_lr": 0.3, **ADAM}, {"eta": 0.3, **ADAM}),
    ],
    ids=["fedavg", "fedprox", "fednova", "fedavgm", "fedadagrad", "fedadam", "fedamsgrad", "fedams", "fedyogi"],
)
def test_averaging_and_adaptive_methods(preset, reference, mine, theirs, weights):
    run, replayed = recorded(preset(**words(weights=weights, **mine)))
    expected, _ = reference(replayed, np.zeros(DIM), chosen(), STEPS, LOCAL_LR, weights=weights, **theirs)
    finish(run, replayed, expected)


@pytest.mark.parametrize(
    ("preset", "reference", "mine"),
    [(presets.scaffold, local.scaffold, {}), (presets.feddyn, local.feddyn, {"alpha": 0.3})],
    ids=["scaffold", "feddyn"],
)
def test_corrected_methods(preset, reference, mine):
    run, replayed = recorded(preset(**words(**mine)))
    expected, _ = reference(replayed, np.zeros(DIM), chosen(), STEPS, LOCAL_LR, **mine)
    finish(run, replayed, expected)


def test_fedcams():
    run, replayed = recorded(presets.fedcams(**words(server_lr=0.3, compressor=hansa.compress.sign(), **ADAM)))
    C = compression.compressor("sign")
    expected, _ = compression.fedcams(replayed, np.zeros(DIM), chosen(), STEPS, LOCAL_LR, C=C, eta=0.3, **ADAM)
    finish(run, replayed, expected)


def test_fedaware():
    run, replayed = recorded(presets.fedaware(**words(server_lr=0.9, alpha=0.4)))
    expected, _ = aware.fedaware(replayed, np.zeros(DIM), chosen(), STEPS, LOCAL_LR, eta=0.9, alpha=0.4)
    finish(run, replayed, expected)


@pytest.mark.parametrize("name", ["ha_fed", "cafga", "afga"])
def test_gossip_in_unequal_clusters_and_over_one_graph(name):
    draw, steps, W = np.random.default_rng(3), 5, [gossip.ring(len(group)) for group in GROUPS]
    groups = [list(range(CLIENTS))] if name == "afga" else GROUPS

    def pick() -> list[int]:
        return [int(client) for group in groups for client in draw.permutation(group)[: 4 - len(groups)]]

    reporters, numbers = [pick() for _ in range(ROUNDS)], {"b1": 0.8, "b2": 0.95, "eps": 1e-4}
    mine = {"local_lr": LOCAL_LR, "steps": steps, "batch_size": BATCH, "topology": ring(), "server_lr": 0.05, **numbers}
    mine |= {"reporters": hansa.sample.replay(reporters)} | ({} if name == "afga" else {"clusters": GROUPS})
    if name == "ha_fed":
        run, replayed = recorded(presets.ha_fed(**mine), ROUNDS * steps * CLIENTS)
        given = (GROUPS, W, reporters)
    else:
        active = [[pick() for _ in range(steps)] for _ in range(ROUNDS)]
        method = presets.get(name, active=hansa.gossip.replay(active), **mine)
        run, replayed = recorded(method, ROUNDS * steps * len(active[0][0]))
        given = (gossip.ring(CLIENTS), reporters, active) if name == "afga" else (GROUPS, W, reporters, active)
    expected, _ = getattr(gossip, name)(replayed, np.zeros(DIM), *given, steps, LOCAL_LR, eta=0.05, **numbers)
    finish(run, replayed, expected)


@pytest.mark.parametrize(
    ("preset", "reference", "words"),
    [
        (presets.dsgd, gossip.dsgd, {}),
        (presets.dadam, gossip.dadam, ADAM),
        (presets.d_amsgrad, gossip.d_amsgrad, ADAM),
    ],
    ids=["dsgd", "dadam", "d_amsgrad"],
)
def test_methods_without_a_server(preset, reference, words):
    steps = 3
    made = preset(local_lr=LOCAL_LR, steps=steps, batch_size=BATCH, topology=ring(), **words)
    run, replayed = recorded(made, ROUNDS * steps * CLIENTS)
    expected, _ = reference(replayed, np.zeros(DIM), gossip.ring(CLIENTS), ROUNDS, steps, LOCAL_LR, **words)
    finish(run, replayed, expected)


def test_a_wrong_batch_is_seen():
    """The comparison can fail: two batches of one client exchanged."""
    run, replayed = recorded(presets.fedavg(**words()))
    queue = replayed.queues[6]
    queue[0], queue[1] = queue[1], queue[0]
    expected, _ = server.fedavg(replayed, np.zeros(DIM), chosen(), STEPS, LOCAL_LR)
    with pytest.raises(AssertionError):
        assert_agree(run, expected)
