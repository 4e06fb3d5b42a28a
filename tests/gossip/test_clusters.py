"""Who gossips with whom and who computes: clusterings, topologies by cluster, activities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa import gossip, presets
from hansa.config import build_algorithm, from_yaml
from hansa.core.keys import Key
from hansa.gossip import by_cluster, complete, erdos_renyi, ring
from hansa.gossip.activity import count_of
from mistakes import refused


def dirichlet(clients: int, classes: int, seed: int, alpha: float = 0.3) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.array([draw.multinomial(100, draw.dirichlet([alpha] * classes)) for _ in range(clients)])


@settings(max_examples=80, deadline=None)
@given(population=st.integers(1, 60), data=st.data(), seed=st.integers(0, 1000))
def test_every_rule_gives_every_client_one_cluster_of_even_size(
    population: int, data: st.DataObject, seed: int
) -> None:
    k = data.draw(st.integers(1, population))
    labels = dirichlet(population, 5, seed)
    labels[:: max(2, population // 3)] = 0  # some clients hold nothing
    for rule in (k, gossip.equal(k), gossip.random(k), gossip.by_labels(k), gossip.by_labels(k, diverse=True)):
        groups = gossip.resolve(rule, population, Key(seed), labels)
        assert sorted(client for group in groups for client in group) == list(range(population))
        assert len(groups) == k
        assert {len(group) for group in groups} <= {population // k, -(-population // k)}
        assert all(group == sorted(group) for group in groups)
    uneven = gossip.resolve(gossip.by_labels(k, even=False), population, Key(seed), labels)
    assert sorted(client for group in uneven for client in group) == list(range(population))
    assert len(uneven) == k
    assert all(uneven)


def test_a_number_is_equal_clusters_of_neighbours_and_a_list_is_kept_as_it_is() -> None:
    assert gossip.resolve(4, 8, Key(0)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert gossip.resolve([[3, 0], [1, 2, 4]], 5, Key(0)) == [[3, 0], [1, 2, 4]]
    assert gossip.resolve(gossip.given([[3, 0], [1, 2]]), 4, Key(0)) == [[3, 0], [1, 2]]


@pytest.mark.parametrize("even", [True, False])
def test_clients_of_one_kind_are_found_together(even: bool) -> None:
    kind = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 6))
    counts = np.eye(4)[kind] * 90 + np.random.default_rng(1).integers(0, 8, (24, 4))
    groups = gossip.resolve(gossip.by_labels(4, even=even), 24, Key(0), torch.from_numpy(counts))
    assert sorted(groups) == sorted(np.flatnonzero(kind == k).tolist() for k in range(4))


def test_uneven_kinds_are_found_only_without_even_sizes() -> None:
    counts = np.eye(3)[[0] * 7 + [1] * 2 + [2] * 3] * 50
    assert gossip.resolve(gossip.by_labels(3, even=False), 12, Key(0), counts) == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8],
        [9, 10, 11],
    ]
    assert [len(g) for g in gossip.resolve(gossip.by_labels(3), 12, Key(0), counts)] == [4, 4, 4]


def test_diverse_clusters_each_hold_every_label() -> None:
    counts = np.eye(4)[np.random.default_rng(3).permutation(np.repeat(np.arange(4), 5))] * 30
    for group in gossip.resolve(gossip.by_labels(5, diverse=True), 20, Key(0), counts):
        assert counts[group].sum(0).tolist() == [30.0] * 4


test_bad_clusters_are_refused_with_the_offending_id = refused(
    (0, r"equal\(k=0\)"),
    (9, r"equal\(k=9\): expected at most one cluster a client, and there are 4"),
    (True, r"equal\(k=True\)"),
    (gossip.random(5), r"random\(k=5\)"),
    ([[0, 1], [1, 2, 3]], "client 1 is in 2 clusters"),
    ([[0, 0], [1, 2, 3]], "client 0 is in 2 clusters"),
    ([[0, 1], [3]], "client 2 is in 0 clusters"),
    ([[0, 1], [2, 3, 4]], "client 4 is in 1 clusters: expected each client from 0 to 3"),
    ([[0, 1, 2, 3], [-1]], "client -1 is in 1"),
    ([[0, 1.5], [2, 3]], "client 1 is in 0"),
    ([[0, 1, 2, 3], []], "cluster 1 is empty"),
    ([0, 1], r"given\(groups=\[0, 1\]\): expected a list of lists"),
    (gossip.by_labels(2), r"by_labels\(k=2, .*\) needs the label counts"),
    by=lambda clusters: gossip.resolve(clusters, 4, Key(0)),
)


test_bad_label_counts_are_refused_with_their_place = refused(
    ([[1, 2]] * 3, r"labels of shape \(3, 2\): expected one row .* each of 4 clients"),
    ([1, 2, 3, 4], r"labels of shape \(4,\)"),
    ([[1, 2], [1, -2], [1, 2], [1, 2]], "label counts >= 0"),
    ([[1, 2], [1, 2], [float("nan"), 2], [1, 2]], "label counts >= 0"),
    by=lambda labels: gossip.resolve(gossip.by_labels(2), 4, Key(0), labels),
)


test_bad_rules_are_refused = refused(
    (lambda: gossip.by_labels(0), r"by_labels\(k=0\)"),
    (lambda: gossip.by_labels(2, diverse=True, even=False), "even=True with diverse=True"),
    (lambda: gossip.resolve(1, 0, Key(0)), r"clusters\(population=0\)"),
    (lambda: presets.ha_fed(clusters=4, topology=[ring()] * 2).bind(16, Key(0)), "2 topologies for 4 clusters"),
    (lambda: by_cluster([]), "one topology per cluster"),
    (lambda: by_cluster([ring(), "ring"]), "a topology"),
)


def test_a_list_in_a_configuration():
    document = {
        "algorithm": {"preset": "cafga"},
        "gossip": {"clusters": 3, "reporters": 1, "topology": ["ring", {"kind": "erdos_renyi", "p": 0.5}, "complete"]},
        "local": {"lr": 0.1, "steps": 2},
    }
    algorithm = build_algorithm(from_yaml(yaml.safe_dump(document)))
    mixing = algorithm.bind(12, Key(0)).local.mixing
    assert mixing is not None
    assert mixing.topology == by_cluster([ring(), erdos_renyi(0.5), complete()])
    document["gossip"]["topology"] = {"kind": "by_cluster", "topologies": ["ring", "ring", "ring"]}
    again = build_algorithm(from_yaml(yaml.safe_dump(document))).local.mixing
    assert again is not None
    assert again.topology == by_cluster([ring()] * 3)


RULES = [
    gossip.everyone(),
    gossip.selected(),
    gossip.resample(2),
    gossip.resample(0.4),
    gossip.bernoulli(0.5),
    gossip.replay([[[0, 3, 7]]]),
]


@pytest.mark.parametrize(("m", "expected"), [(1, 1), (3, 3), (10, 10), (0.25, 3), (0.2, 2), (0.01, 1), (1.0, 10)])
def test_resample_takes_a_count_or_a_share(m: float, expected: int) -> None:
    assert len(gossip.resample(m).draw(0, 0, range(10), Key(0))) == expected
    assert count_of("resample", "m", m, 10) == expected


def test_resample_uses_the_address_of_the_cohorts_first_client() -> None:
    chance = Key(5).child("active", 3, 4, 2).numpy()
    expected = sorted(4 + i for i in chance.choice(6, 2, replace=False, shuffle=False).tolist())
    assert gossip.resample(2).draw(3, 2, range(4, 10), Key(5)) == expected


def test_resample_takes_all_where_losses_left_no_more_than_m() -> None:
    assert gossip.resample(3).draw(0, 0, [4, 2], Key(0)) == [2, 4]
    assert gossip.resample(3).draw(0, 0, [], Key(0)) == []
    assert gossip.bernoulli(0.5).draw(0, 0, [], Key(0)) == []


def test_bernoulli_is_a_coin_of_the_cohorts_address() -> None:
    coins = Key(5).child("active", 3, 4, 2).numpy().random(6)
    assert gossip.bernoulli(0.4).draw(3, 2, range(4, 10), Key(5)) == [4 + i for i in np.flatnonzero(coins < 0.4)]
    assert gossip.bernoulli(1.0).draw(0, 0, range(4), Key(0)) == [0, 1, 2, 3]


def test_replay_gives_each_cluster_its_own_and_starts_again() -> None:
    rule = gossip.replay([[[4, 0], [1, 5]], [[2], [3, 7]]])
    rule.check([[0, 1, 2, 3], [4, 5, 6, 7]], steps=2)
    assert [rule.draw(0, 0, c, Key(0)) for c in ([0, 1, 2, 3], [4, 5, 6, 7])] == [[0], [4]]
    assert [rule.draw(5, 1, c, Key(0)) for c in ([0, 1, 2, 3], [4, 5, 6, 7])] == [[3], [7]]
    assert rule.draw(1, 0, [4, 5, 6, 7], Key(0)) == []


test_bad_activity_is_refused_with_the_offending_number = refused(
    (lambda: gossip.resample(0), r"resample\(m=0\): expected a whole number >= 1"),
    (lambda: gossip.resample(1.5), r"resample\(m=1.5\): expected 0 < m <= 1. .* for a count give a whole number"),
    (lambda: gossip.resample(True), r"resample\(m=True\)"),
    (lambda: gossip.bernoulli(0.0), r"bernoulli\(p=0.0\): expected 0 < p <= 1"),
    (lambda: gossip.bernoulli(2), r"bernoulli\(p=2\)"),
    (lambda: gossip.replay([]), r"replay\(rounds=\[\]\): expected for each round, for each step, a list"),
    (lambda: gossip.replay([[[0]], []]), "for each round"),
    (lambda: gossip.replay([[[0.5]]]), "a list of different client ids"),
    (lambda: gossip.replay([[[0], [2, 1, 2]]]), "a list of different client ids"),
    (lambda: gossip.replay([[[0], [9]]]).check([[0, 1], [2, 3]]), "step 1 names client 9, which is in no cluster"),
    (lambda: gossip.replay([[[0], [1]], [[0]]]).check([[0, 1]], steps=2), "round 1 has 1 steps"),
    (lambda: gossip.replay([[[0]]]).draw(3, 1, [0], Key(0)), "round 0 has 1 steps: no step 1"),
    (lambda: gossip.resample(3).check([[0, 1, 2], [3, 4]]), r"resample\(m=3\): expected .* <= 2"),
    (lambda: gossip.as_activity("all"), r"gossip\(active='all'\): expected a count, a probability or an activity"),
    (lambda: gossip.as_activity(True), r"gossip\(active=True\)"),
    (lambda: count_of("ha_fed", "reporters", 9, 8), r"ha_fed\(reporters=9\): .* <= 8"),
    (lambda: gossip.available([[0], [9]]).check([[0, 1], [2, 3]]), "names client 9"),
    (lambda: gossip.available([]), "trace"),
    (lambda: gossip.available([["a"]]), "trace"),
)


def test_resampling_among_those_available_never_draws_others_and_is_fair() -> None:
    rule = gossip.available([[0, 2, 4, 6], [1, 3]], gossip.resample(2))
    drawn = [rule.draw(0, step, range(8), Key(3)) for step in range(400)]
    counts = {client: sum(client in step for step in drawn) for client in range(8)}
    assert all(len(step) == 2 for step in drawn)
    assert {client for client, count in counts.items() if count} == {0, 2, 4, 6}
    assert all(abs(counts[client] - 200) < 50 for client in (0, 2, 4, 6))
    assert rule.draw(1, 0, range(8), Key(3)) == [1, 3]
    assert rule.draw(2, 0, [5, 7], Key(3)) == []
    assert rule.draw(2, 0, [4, 5, 7], Key(3)) == [4]  # after dropouts
    assert gossip.available([[0, 1, 2]]).among([5]).draw(0, 0, range(4), Key(0)) in ([0], [1], [2])


@pytest.mark.parametrize("rule", RULES)
def test_the_draws_of_several_steps_are_those_of_each(rule):
    clients = [9, 3, 7, 0, 5]
    steps = range(1) if isinstance(rule, gossip.replay) else range(2, 9)
    expected = [rule.draw(4, step, clients, Key(1)) for step in steps]
    assert rule.draw_steps(4, steps, clients, Key(1)) == expected


def test_a_subclass_that_draws_otherwise_is_asked_at_every_step():
    class first(gossip.resample):
        def draw(self, round, step, clients, key):
            return sorted(clients)[: 1 + step]

    assert first(2).draw_steps(0, range(3), [5, 4, 6], Key(0)) == [[4], [4, 5], [4, 5, 6]]
