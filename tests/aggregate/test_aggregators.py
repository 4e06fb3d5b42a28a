"""Means fold in one order and hold few decoded vectors; robust aggregators follow their definitions."""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from contracts.small import bowls
from hansa import aggregate
from hansa.aggregate.base import Participants, sum_updates
from hansa.compress import links, sign
from hansa.core import native
from hansa.core.types import EncodedUpdate, Population, RoundContext, Update
from hansa.core.vectors import arithmetic


@pytest.mark.parametrize("native", ["", "off"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 50])
def test_a_sum_in_parts_is_the_sum_at_once_to_the_bit(count: int, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANSA_NATIVE", native)
    rows = list(torch.randn(count, 1003, generator=torch.Generator().manual_seed(count)))
    weights = [(i + 1) / (count * (count + 1) / 2) for i in range(count)]
    updates = [Update(i, i, row, 1, 1.0) for i, row in enumerate(rows)]
    packed = [EncodedUpdate(i, i, lambda row=row: row, 1, 1.0) for i, row in enumerate(rows)]
    assert torch.equal(sum_updates(updates, weights), arithmetic.weighted_sum(rows, weights))
    assert torch.equal(sum_updates(packed, weights), arithmetic.weighted_sum(rows, weights))


@pytest.mark.parametrize("weights", ["uniform", "samples", "clusters", (0.0, 0.25, 0.0, 3.0, 1.5)], ids=str)
@pytest.mark.parametrize("as_rows", [False, True])
def test_a_running_mean_weighs_each_client_by_its_own_weight(weights: Any, as_rows: bool) -> None:
    """Against the definition in float64; shares come one by one or as columns, updates one by one or as a matrix."""
    if as_rows and not native.available():
        pytest.skip("no native kernels")
    clients, cohorts, samples = [0, 1, 2, 3, 4], {0: 0, 1: 0, 2: 1, 3: 0, 4: 1}, [3, 1, 4, 1, 5]
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    raw = {"uniform": [1] * 5, "samples": samples, "clusters": [1 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 2]}.get(
        weights, weights
    )
    wanted = (torch.tensor(raw, dtype=torch.float64) @ rows.double()) / sum(raw)
    shares = Participants.of(clients, cohorts, samples)
    for given in (shares, list(shares)):
        running = hansa.aggregate.mean(weights).running(given)
        if as_rows:
            running.add_rows(clients[:2], rows[:2])
            running.add_rows(clients[2:], rows[2:])
        else:
            for client in clients:
                running.add(Update(client, cohorts[client], rows[client], samples[client], 1.0))
        torch.testing.assert_close(running.vector().double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("preset", ["fedavg", "fednova"])
def test_compressed_updates_are_never_all_decoded_at_once(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    living, most, decoded, decode = 0, 0, 0, links.decode

    def ended() -> None:
        nonlocal living
        living -= 1

    def counted(*arguments: Any, **words: Any) -> torch.Tensor:
        nonlocal living, most, decoded
        vector = decode(*arguments, **words)
        if vector is arguments[0].content:  # the broadcast, which is nobody's copy
            return vector
        weakref.finalize(vector, ended)
        living, decoded = living + 1, decoded + 1
        most = max(most, living)
        return vector

    monkeypatch.setattr(links, "decode", counted)
    task = bowls(100, dim=30, dtype=torch.float32)
    algorithm = hansa.presets.get(preset, steps=2).on("model", uplink=links.memoryless(sign()))
    run = hansa.run(algorithm, task, rounds=2, workers=1)
    assert run.history[-1]["participants"] == 100
    assert decoded >= 400, "every update is decoded to be checked and again to be added"
    assert most <= 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_how_many_are_folded_at_a_time_changes_no_bit(dtype, monkeypatch):
    draw = torch.Generator().manual_seed(3)
    updates = [Update(i, i, torch.randn(1003, generator=draw, dtype=dtype), 3 + 5 * i, 1.0) for i in range(37)]
    ctx, found = RoundContext(0, Population((1,) * 37), tuple(range(37))), []
    for waiting in (1, 5 * updates[0].vector.nbytes, 1 << 30):
        monkeypatch.setattr(import_module("hansa.aggregate.base"), "MAX_DECODED_BYTES", waiting)
        found.append(hansa.aggregate.mean("samples").combine(updates, {}, ctx).vector)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def combine(part, rows):
    updates = [Update(i, i, torch.tensor(row, dtype=torch.float64), 1, 1.0) for i, row in enumerate(rows)]
    ctx = RoundContext(0, Population((1,) * len(rows)), tuple(range(len(rows))))
    return part.combine(updates, part.init(len(rows[0]), len(rows)), ctx)


ROWS = np.random.default_rng(0).normal(size=(9, 7))


def test_median_is_numpys():
    for n in (1, 2, 5, 8):
        np.testing.assert_allclose(
            combine(aggregate.median(), ROWS[:n]).vector, np.median(ROWS[:n], axis=0), atol=1e-15
        )


@pytest.mark.parametrize(("trim", "cut"), [(0.25, 2), (0.0, 0)])
def test_trimmed_mean_drops_the_ends_of_each_coordinate(trim, cut):
    found = combine(aggregate.trimmed_mean(trim), ROWS).vector
    np.testing.assert_allclose(found, np.sort(ROWS, axis=0)[cut : 9 - cut].mean(axis=0), atol=1e-15)


def test_krum_by_its_definition():
    f = 2
    scores = []
    for i in range(9):
        others = sorted(np.sum((ROWS[i] - ROWS[j]) ** 2) for j in range(9) if j != i)
        scores.append(sum(others[: 9 - f - 2]))
    combined = combine(aggregate.krum(byzantine=f), ROWS)
    np.testing.assert_allclose(combined.vector, ROWS[int(np.argmin(scores))])
    assert combined.info["chosen"] == [int(np.argmin(scores))]
    best = np.argsort(scores)[:3]
    np.testing.assert_allclose(
        combine(aggregate.krum(byzantine=f, keep=3), ROWS).vector, ROWS[best].mean(0), atol=1e-14
    )


def test_clipping_bounds_each_update_before_the_mean():
    combined = combine(aggregate.clipped(aggregate.mean(), norm=1.0), ROWS)
    lengths = np.linalg.norm(ROWS, axis=1, keepdims=True)
    np.testing.assert_allclose(combined.vector, (ROWS / np.maximum(lengths, 1.0)).mean(0), atol=1e-14)
    assert combined.info["clipped"] == int((lengths > 1).sum())


class lowest_loss(aggregate.BaseAggregator):
    """The update of the client with the lowest loss: a user's aggregator that reads ``update.loss``."""

    def combine(self, updates, state, ctx):
        best = min(updates, key=lambda update: update.loss)
        return aggregate.Combined(best.vector, state, {})


def test_a_clipped_update_keeps_its_loss():
    updates = [Update(i, i, torch.full((2,), 10.0 * (i + 1)), 3, 1.0, 5.0 - i) for i in range(3)]
    ctx = RoundContext(0, Population((3,) * 3), (0, 1, 2))
    found = aggregate.clipped(lowest_loss(), 2.0).combine(updates, {}, ctx)
    torch.testing.assert_close(found.vector, torch.full((2,), 2**0.5))
    assert found.info == {"clipped": 3}
