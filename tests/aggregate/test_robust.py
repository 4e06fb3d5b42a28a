from __future__ import annotations

import numpy as np
import pytest
import torch

from hansa import aggregate
from hansa.core.types import Population, RoundContext, Update


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


def test_a_share_of_updates_is_the_decimal_that_was_written():
    rows = np.random.default_rng(1).normal(size=(100, 3))  # 0.29 * 100 is 28.999999999999996
    found = combine(aggregate.trimmed_mean(0.29), rows).vector
    np.testing.assert_allclose(found, np.sort(rows, axis=0)[29:-29].mean(axis=0), atol=1e-15)
