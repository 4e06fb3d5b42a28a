"""The gossip methods against the NumPy reference under replayed selections and re-samplings: 1e-10 over 30 rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from exactness.laboratory import assert_agree, task
from hansa import presets
from hansa.gossip import clipped, complete, matrix, ring, trimmed
from oracle import gossip
from oracle.quadratic import heterogeneous

N, DIM, ROUNDS, STEPS = 8, 5, 30, 5
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
UNEQUAL = [[6, 0, 3, 1, 5], [2, 7, 4]]
SERVER = {"server_lr": 0.05, "b1": 0.8, "b2": 0.95, "eps": 1e-4}
THEIRS = {"eta": 0.05, "b1": 0.8, "b2": 0.95, "eps": 1e-4}
WORDS = {"local_lr": 0.05, "steps": STEPS, **SERVER}


def lab():
    return heterogeneous(11, N, [3, 5, 4, 6, 8, 4, 7, 5], DIM)


def pick(rng, groups, count):
    return [int(client) for group in groups for client in rng.permutation(group)[:count]]


def drawn(seed, groups, count):
    """Per round, ``count`` of each group."""
    rng = np.random.default_rng(seed)
    return [pick(rng, groups, count) for _ in range(ROUNDS)]


def resampled(seed, groups, count):
    rng = np.random.default_rng(seed)
    return [[pick(rng, groups, count) for _ in range(STEPS)] for _ in range(ROUNDS)]


def run(algorithm):
    return hansa.run(algorithm, task(lab()), rounds=ROUNDS, dtype=torch.float64, keep_params=True)


def rings(groups):
    return [gossip.ring(len(group)) for group in groups]


def follows(expected, preset, chosen, active=None, **words):
    """Assert that a preset follows its reference under these selections."""
    replayed = {"reporters": hansa.sample.replay(chosen)}
    if active is not None:
        replayed["active"] = hansa.gossip.replay(active)
    assert_agree(run(preset(**replayed, **words, **WORDS)), expected[0])


X0 = np.zeros(DIM)


@pytest.mark.parametrize("groups", [HALVES, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("reporters", [None, 2], ids=["full", "partial"])
def test_ha_fed(groups, reporters):
    chosen = [list(range(N))] * ROUNDS if reporters is None else drawn(1, groups, reporters)
    expected = gossip.ha_fed(lab(), X0, groups, rings(groups), chosen, STEPS, 0.05, **THEIRS)
    follows(expected, presets.ha_fed, chosen, clusters=groups, topology=ring())


def test_ha_fed_partially_active_gossiping_every_second_step():
    chosen = drawn(1, HALVES, 2)
    rng = np.random.default_rng(9)
    active = [[np.flatnonzero(rng.random(N) < 0.5).tolist() for _ in range(STEPS)] for _ in range(ROUNDS)]
    expected = gossip.ha_fed(lab(), X0, HALVES, rings(HALVES), chosen, STEPS, 0.05, active=active, every=2, **THEIRS)
    follows(expected, presets.ha_fed, chosen, active, clusters=HALVES, gossip_every=2)


def test_afga():
    everybody = [list(range(N))]
    chosen, active = drawn(2, everybody, 3), resampled(3, everybody, 3)
    expected = gossip.afga(lab(), X0, gossip.ring(N), chosen, active, STEPS, 0.05, **THEIRS)
    follows(expected, presets.afga, chosen, active)


W4 = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.0, 0.3], [0.4, 0.0, 0.5, 0.1], [0.0, 0.1, 0.3, 0.6]]
W3 = [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]


@pytest.mark.parametrize(
    ("groups", "W", "topology"),
    [
        (HALVES, rings(HALVES), ring()),
        (UNEQUAL, rings(UNEQUAL), ring()),
        (HALVES, [W4, W4], matrix(W4)),
        (UNEQUAL, [gossip.ring(5), W3], [ring(), matrix(W3)]),
    ],
    ids=["equal", "unequal", "given matrix", "matrix by cluster"],
)
def test_cafga(groups, W, topology):
    chosen, active = drawn(4, groups, 2), resampled(5, groups, 2)
    W = [np.array(each) for each in W]
    expected = gossip.cafga(lab(), X0, groups, W, chosen, active, STEPS, 0.05, **THEIRS)
    follows(expected, presets.cafga, chosen, active, clusters=groups, topology=topology)


def test_afga_adapted():
    chosen = drawn(6, [list(range(N))], 4)
    follows(gossip.afga_adapted(lab(), X0, chosen, STEPS, 0.05, **THEIRS), presets.afga, chosen, reporters_only=True)


def test_cafga_adapted():
    chosen = drawn(7, UNEQUAL, 3)
    expected = gossip.cafga_adapted(lab(), X0, UNEQUAL, chosen, STEPS, 0.05, **THEIRS)
    follows(expected, presets.cafga, chosen, clusters=UNEQUAL, reporters_only=True)


ADAPT = {"order": "adapt-then-combine"}
COMBINE = {"order": "combine-then-adapt"}
ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}


def top_two(x):
    kept = np.argsort(-np.abs(x), kind="stable")[:2]
    return np.where(np.isin(np.arange(len(x)), kept), x, 0.0)


CHOCO = {"gossip_compressor": hansa.compress.top_k(0.4), "consensus_rate": 0.4}
DECENTRALIZED = {
    "dsgd": (presets.dsgd, gossip.dsgd, {}, {}),
    "dsgd, adapting first": (presets.dsgd, gossip.dsgd, ADAPT, {"adapt_first": True}),
    "dsgd with momentum": (presets.dsgd, gossip.dsgd, {"local_momentum": 0.5}, {"momentum": 0.5}),
    "gossip_pga": (presets.gossip_pga, gossip.gossip_pga, {"period": 4}, {"period": 4}),
    "gossip_pga, combining first": (
        presets.gossip_pga, gossip.gossip_pga, {"period": 4, **COMBINE}, {"period": 4, "adapt_first": False},
    ),
    "dadam": (presets.dadam, gossip.dadam, ADAM, ADAM),
    "dadam, adapting first": (presets.dadam, gossip.dadam, {**ADAM, **ADAPT}, {**ADAM, "adapt_first": True}),
    "d_amsgrad": (presets.d_amsgrad, gossip.d_amsgrad, ADAM, ADAM),
    "d_amsgrad, adapting first": (
        presets.d_amsgrad, gossip.d_amsgrad, {**ADAM, **ADAPT}, {**ADAM, "adapt_first": True},
    ),
    "d_amsgrad, local": (
        presets.d_amsgrad, gossip.dadam, {**ADAM, "second_moment": "local"}, {**ADAM, "amsgrad": True},
    ),
    "choco_sgd": (presets.choco_sgd, gossip.choco_sgd, CHOCO, {"gamma": 0.4, "compress": top_two}),
    "dsgd, compressed": (presets.dsgd, gossip.choco_sgd, CHOCO, {"gamma": 0.4, "compress": top_two}),
}  # fmt: skip


@pytest.mark.parametrize("clusters", [None, UNEQUAL], ids=["whole", "clusters"])
@pytest.mark.parametrize("name", DECENTRALIZED)
def test_decentralized_methods(name, clusters):
    preset, reference, mine, theirs = DECENTRALIZED[name]
    W = gossip.ring(N) if clusters is None else gossip.block(clusters, rings(clusters))
    if clusters is not None:
        mine = {**mine, "clusters": clusters}
        theirs = {**theirs, "clusters": clusters} if reference is gossip.gossip_pga else theirs
    expected, state = reference(lab(), X0, W, ROUNDS, STEPS, 0.02, **theirs)
    found = run(preset(topology=ring(), local_lr=0.02, steps=STEPS, **mine))
    assert_agree(found, expected)
    for client in range(N):
        rows = found.store.read(client)
        np.testing.assert_allclose(rows["local/row"].numpy(), state["X"][client], atol=1e-9)
        if "public" in state:
            np.testing.assert_allclose(rows["local/public"].numpy(), state["public"][client], atol=1e-9)
    if clusters is None:
        np.testing.assert_allclose([r["consensus"] for r in found.history], state["consensus"], rtol=1e-8, atol=1e-12)
    assert found.ledger.up_bytes == 0
    assert found.ledger.down_bytes == 0
    assert found.ledger.peer_bytes > 0


def test_a_complete_graph_is_one_averaged_model():
    """Full averaging after every step is gradient descent on the cluster's mean loss."""
    problem = lab()
    found = run(presets.ha_fed(clusters=1, reporters=N, topology=complete(), **WORDS)).trajectory[0].numpy()
    x = np.zeros(DIM)
    for _ in range(STEPS):
        x = x - 0.05 * np.mean([problem.grad(i, x) for i in range(N)], axis=0)
    m, v = 0.2 * x, 0.05 * x**2
    np.testing.assert_allclose(found, 0.05 * m / np.sqrt(v + 1e-4), atol=1e-12)


@pytest.mark.parametrize("topology", [ring(), complete(), hansa.gossip.star(), hansa.gossip.exponential()], ids=repr)
def test_lazy_rows_equal_dense_rows(topology, monkeypatch):
    words = {"participation": 0.25, "topology": topology, **WORDS}
    import hansa.gossip.cohort as loop

    monkeypatch.setattr(loop, "lazy_pays", lambda *a: True)
    lazy = run(presets.afga(**words))
    monkeypatch.setattr(loop, "lazy_pays", lambda *a: False)
    dense = run(presets.afga(**words))
    assert torch.allclose(lazy.trajectory, dense.trajectory, rtol=1e-10, atol=1e-12)
    assert not torch.equal(dense.trajectory[0], dense.trajectory[1])
    apart = [record["consensus"] for record in dense.history]
    assert [record["consensus"] for record in lazy.history] == pytest.approx(apart, rel=1e-8, abs=1e-12)
    assert min(apart) > 1e-4 or topology == complete()


@pytest.mark.parametrize("lazily", [True, False])
def test_a_client_lost_in_mid_round_leaves_its_cluster_going(lazily, monkeypatch):
    """From step 2 on it is as if the ring had closed over the survivors; what the lost one had passed on stays."""
    import hansa.gossip.cohort as loop

    monkeypatch.setattr(loop, "lazy_pays", lambda *a: lazily)
    calls = {"lost": 0}

    def loss(client, x):
        if client == 2:
            calls["lost"] += 1
            if calls["lost"] > 2:
                return (x * torch.nan).sum()
        return 0.5 * (x - client).square().sum()

    function = hansa.training.function(loss, clients=4, x0=torch.zeros(1, dtype=torch.float64))
    algorithm = presets.ha_fed(clusters=1, reporters=4, topology=ring(), local_lr=0.1, steps=4, server_lr=1.0, eps=1.0)
    found = hansa.run(algorithm, function, rounds=1, evaluate_every=0)

    X, targets = np.zeros(4), np.arange(4.0)
    for _ in range(2):
        X = gossip.ring(4) @ (X - 0.1 * (X - targets))
    X, targets = X[[0, 1, 3]], targets[[0, 1, 3]]
    for _ in range(2):
        X = gossip.ring(3) @ (X - 0.1 * (X - targets))
    delta = X.mean()
    expected = 0.1 * delta / np.sqrt(0.01 * delta**2 + 1.0)
    np.testing.assert_allclose(found.params.numpy(), [expected], atol=1e-12)
    assert found.history[0]["reasons"] == {"non-finite": 1}
    assert found.history[0]["participants"] == 3


def test_peer_bytes_are_counted_by_edges_and_apart():
    found = run(presets.ha_fed(clusters=HALVES, reporters=2, **WORDS))
    size = hansa.compress.Packet.of(torch.zeros(DIM, dtype=torch.float64)).nbytes
    # two rings of four: eight directed edges each, five steps, and two clients a cluster get the model from a peer
    assert found.history[0]["peer_bytes"] == 2 * (8 * STEPS + 2) * size
    assert found.history[0]["up_bytes"] == 4 * size


RULES = {
    "plain": (None, gossip.clipped_mix(np.inf, [3, 4], 2.0)),
    "clipped": (clipped(0.05), gossip.clipped_mix(0.05, [3, 4], 2.0)),
    "trimmed": (trimmed(1), gossip.trimmed_mix(1, [3, 4], 2.0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_malicious_neighbours_and_robust_mixing(rule):
    robust, mix = RULES[rule]
    chosen = drawn(4, UNEQUAL, 2)
    graphs = [np.full((len(group), len(group)), 1 / len(group)) for group in UNEQUAL]
    if rule == "trimmed":  # three clients have two neighbours each: too few
        groups, graphs = [list(range(N))], [np.full((N, N), 1 / N)]
        chosen = drawn(4, groups, 2)
    else:
        groups = UNEQUAL
    expected, _ = gossip.ha_fed(lab(), X0, groups, graphs, chosen, STEPS, 0.05, mix=mix, **THEIRS)
    honest, _ = gossip.ha_fed(lab(), X0, groups, graphs, chosen, STEPS, 0.05, **THEIRS)
    assert np.abs(expected - honest).max() > 1e-3
    algorithm = presets.ha_fed(
        clusters=groups, reporters=hansa.sample.replay(chosen), topology=complete(), robust=robust, **WORDS
    )
    attacked = hansa.faults(malicious=(3, 4), attack="flip", attack_scale=2.0)
    options = {"dtype": torch.float64, "keep_params": True, "faults": attacked, "workers": 1}
    assert_agree(hansa.run(algorithm, task(lab()), rounds=ROUNDS, **options), expected)
