"""What must hold for any input, by property."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

import hansa
from contracts.small import NAMES, small
from exactness.laboratory import CLIENTS, problem, task
from hansa import aggregate
from hansa.core.types import Population, RoundContext, Update
from hansa.rounds import ServerState, client_round, close_round, open_round

FINITE = st.floats(-1e3, 1e3, allow_nan=False, width=64)
AGGREGATORS = [
    aggregate.mean(),
    aggregate.mean("samples"),
    aggregate.mean("clusters"),
    aggregate.mean([1.0, 2.0, 3.0, 4.0, 5.0]),
    aggregate.nova("samples"),
    aggregate.mgda(),
    aggregate.median(),
    aggregate.trimmed_mean(0.2),
    aggregate.krum(byzantine=1, keep=2),
    aggregate.clipped(aggregate.mean(), norm=1.0),
]


def updates_of(matrix, samples=(3, 1, 4, 1, 5), steps=(1, 2, 3, 4, 5)):
    return [
        Update(i, i % 2, torch.tensor(row, dtype=torch.float64), samples[i], float(steps[i]))
        for i, row in enumerate(matrix)
    ]


CTX = RoundContext(0, Population((3, 1, 4, 1, 5)), (0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    "part", [a for a in AGGREGATORS if not isinstance(a, (aggregate.mgda, aggregate.clipped))], ids=repr
)
@settings(max_examples=20, deadline=None)
@given(row=arrays("float64", 6, elements=FINITE))
def test_equal_updates_aggregate_to_themselves_so_weights_are_normalised_once(part, row):
    if isinstance(part, aggregate.nova):
        updates = updates_of([row] * 5, steps=(2,) * 5)
    else:
        updates = updates_of([row] * 5)
    found = part.combine(updates, part.init(6, 5), CTX).vector
    assert torch.allclose(found, torch.from_numpy(row), rtol=1e-12, atol=1e-12)


@given(raw=st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5))
def test_weights_sum_to_one_and_keep_their_ratios(raw):
    shares = aggregate.normalize_weights(tuple(raw), updates_of([[0.0]] * 5))
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-12)
    assert math.isclose(shares[1] * raw[0], shares[0] * raw[1], rel_tol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None)
@given(shuffle=st.randoms(use_true_random=False))
def test_a_round_is_the_same_whatever_order_reports_come_in(name, shuffle):
    lab = task(problem())
    algorithm = small(name).bind(CLIENTS, hansa.Key(1))
    key = hansa.Key(1)
    trainer = lab.trainer(torch.float64, torch.device("cpu"))
    state = ServerState.start(algorithm, lab.start(key, torch.float64), CLIENTS)
    opened = open_round(algorithm, state, lab.population, "run", key)
    reports = client_round(algorithm, opened.orders, trainer, lab.population)
    straight = close_round(
        algorithm, opened.state, opened.orders, reports, lab.population, rows=hansa.runs.store.RamStore()
    )
    shuffle.shuffle(reports)
    shuffled = close_round(
        algorithm, opened.state, opened.orders, reports, lab.population, rows=hansa.runs.store.RamStore()
    )
    assert torch.equal(straight.state.vectors["model"], shuffled.state.vectors["model"])
    assert straight.outcome.applied
