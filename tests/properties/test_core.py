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
from exactness.laboratory import CLIENTS, problem, task, words
from hansa import aggregate, presets, server
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


@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
@settings(max_examples=25, deadline=None)
@given(matrix=arrays("float64", (5, 6), elements=FINITE), order=st.permutations(range(5)))
def test_arrival_order_never_matters(part, matrix, order):
    updates = updates_of(matrix)
    straight = part.combine(updates, part.init(6, 5), CTX).vector
    shuffled = part.combine([updates[i] for i in order], part.init(6, 5), CTX).vector
    assert torch.equal(straight, shuffled)


@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_aggregating_never_changes_the_updates(part):
    matrix = torch.randn(5, 6, dtype=torch.float64).numpy()
    updates = updates_of(matrix)
    part.combine(updates, part.init(6, 5), CTX)
    for update, row in zip(updates, matrix, strict=True):
        assert torch.equal(update.vector, torch.from_numpy(row))


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


def test_cluster_weights_give_each_cluster_the_same_say():
    shares = aggregate.normalize_weights("clusters", updates_of([[0.0]] * 5))
    by_cluster = {0: shares[0] + shares[2] + shares[4], 1: shares[1] + shares[3]}
    assert math.isclose(by_cluster[0], 0.5)
    assert math.isclose(by_cluster[1], 0.5)


@pytest.mark.parametrize("part", [server.amsgrad(), server.ams(), server.amsgrad(bias_correction=True)], ids=repr)
@settings(max_examples=25, deadline=None)
@given(deltas=st.lists(arrays("float64", 4, elements=FINITE), min_size=2, max_size=8))
def test_vhat_never_falls(part, deltas):
    state = part.init(torch.zeros(4, dtype=torch.float64))
    for delta in deltas:
        before = state["vhat"].clone()
        _, state = part.update(torch.from_numpy(delta), state, CTX)
        assert (state["vhat"] >= before).all()


TRANSFORMS = [
    server.scale(0.5),
    server.momentum(),
    server.adagrad(),
    server.adam(),
    server.yogi(),
    server.amsgrad(),
    server.ams(),
    server.dyn(0.1),
    server.participation_scale(),
    server.chain(server.ams(), server.scale(0.1)),
]


@pytest.mark.parametrize("part", TRANSFORMS, ids=repr)
def test_a_server_transform_never_changes_what_it_is_given(part):
    delta = torch.randn(6, dtype=torch.float64)
    kept = delta.clone()
    state = part.init(delta)
    _, first = part.update(delta, state, CTX)
    before = repr(first)
    one, _ = part.update(delta, first, CTX)
    assert repr(first) == before
    two, _ = part.update(delta, first, CTX)
    assert torch.equal(one, two)
    assert torch.equal(delta, kept)


@pytest.mark.parametrize("seed", range(5))
def test_scaffold_c_is_the_mean_of_the_c_i_after_each_round(seed):
    lab = problem(seed)

    def check(run, record):
        rows = [
            run.store.read(i).get("solver/control", torch.zeros(lab.dim, dtype=torch.float64)) for i in range(CLIENTS)
        ]
        assert torch.allclose(run.state.vectors["control"], torch.stack(rows).mean(dim=0), atol=1e-12)

    algorithm = presets.scaffold(**{**words(), "sampler": hansa.sample.uniform(0.4)})
    run = hansa.run(algorithm, task(lab), rounds=15, seed=seed, callbacks=[check])
    assert run.state.vectors["control"].abs().max() > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_feddyn_h_is_the_mean_of_the_h_i_after_each_round(seed):
    lab = problem(seed)

    def check(run, record):
        rows = [run.store.read(i).get("solver/dual", torch.zeros(lab.dim, dtype=torch.float64)) for i in range(CLIENTS)]
        assert torch.allclose(run.state.server["model"]["h"], torch.stack(rows).mean(dim=0), atol=1e-12)

    algorithm = presets.feddyn(**{**words(alpha=0.5), "sampler": hansa.sample.uniform(0.4)})
    run = hansa.run(algorithm, task(lab), rounds=15, seed=seed, callbacks=[check])
    assert run.state.server["model"]["h"].abs().max() > 0.01


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


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_corrected_methods_reach_the_optimum_where_fedavg_does_not(method):
    lab = problem()
    words = {"local_lr": 0.1, "steps": 8, "participation": 1.0}
    optimum = torch.from_numpy(lab.optimum())
    own = {"alpha": 0.5} if method == "feddyn" else {}
    corrected = hansa.run(presets.get(method, **words, **own), task(lab), rounds=150, workers=1)
    averaged = hansa.run(presets.fedavg(**words), task(lab), rounds=150, workers=1)
    assert torch.linalg.vector_norm(corrected.params - optimum) < 1e-6
    assert torch.linalg.vector_norm(averaged.params - optimum) > 0.1
