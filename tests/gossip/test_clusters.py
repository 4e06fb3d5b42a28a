"""Clusters: disjoint and covering by every rule, label clustering against planted answers, errors with the id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa import gossip
from hansa.core.errors import HansaError
from hansa.core.keys import Key


def dirichlet(clients: int, classes: int, seed: int, alpha: float = 0.3) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.array([draw.multinomial(100, draw.dirichlet([alpha] * classes)) for _ in range(clients)])


def unlikeness(groups: list[list[int]], counts: np.ndarray) -> float:
    """Mean total variation between a cluster's average label shares and the population's."""
    share = counts / counts.sum(1, keepdims=True)
    return float(np.mean([np.abs(share[group].mean(0) - share.mean(0)).sum() / 2 for group in groups]))


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


def test_random_clusters_are_a_function_of_the_key() -> None:
    assert gossip.resolve(gossip.random(4), 32, Key(1)) == gossip.resolve(gossip.random(4), 32, Key(1))
    assert gossip.resolve(gossip.random(4), 32, Key(1)) != gossip.resolve(gossip.random(4), 32, Key(2))
    together = sum(
        any({0, 1} <= set(group) for group in gossip.resolve(gossip.random(4), 32, Key(seed))) for seed in range(400)
    )
    assert abs(together / 400 - 7 / 31) < 5 * np.sqrt(7 / 31 * 24 / 31 / 400)  # seven of the other 31 share a cluster


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


@pytest.mark.parametrize("seed", range(5))
def test_diverse_is_more_alike_and_similar_less_alike_than_chance(seed: int) -> None:
    counts = dirichlet(40, 10, seed)
    similar, by_chance, diverse = (
        unlikeness(gossip.resolve(rule, 40, Key(seed), counts), counts)
        for rule in (gossip.by_labels(5), gossip.random(5), gossip.by_labels(5, diverse=True))
    )
    assert diverse < 0.6 * by_chance
    assert similar > 1.5 * by_chance


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
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
    ],
)
def test_bad_clusters_are_refused_with_the_offending_id(clusters: object, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.resolve(clusters, 4, Key(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[1, 2]] * 3, r"labels of shape \(3, 2\): expected one row .* each of 4 clients"),
        ([1, 2, 3, 4], r"labels of shape \(4,\)"),
        ([[1, 2], [1, -2], [1, 2], [1, 2]], "label counts >= 0"),
        ([[1, 2], [1, 2], [float("nan"), 2], [1, 2]], "label counts >= 0"),
    ],
)
def test_bad_label_counts_are_refused_with_their_place(labels: object, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.resolve(gossip.by_labels(2), 4, Key(0), labels)


def test_bad_rules_are_refused() -> None:
    with pytest.raises(HansaError, match=r"by_labels\(k=0\)"):
        gossip.by_labels(0)
    with pytest.raises(HansaError, match="even=True with diverse=True"):
        gossip.by_labels(2, diverse=True, even=False)
    with pytest.raises(HansaError, match=r"clusters\(population=0\)"):
        gossip.resolve(1, 0, Key(0))


def test_common_size_names_the_cluster_that_differs() -> None:
    assert gossip.common_size([[0, 1], [2, 3]], "ha_fed") == 2
    with pytest.raises(
        HansaError, match="ha_fed needs clusters of equal size: cluster 0 has 2 clients, cluster 1 has 3"
    ):
        gossip.common_size([[0, 1], [2, 3, 4]], "ha_fed")
