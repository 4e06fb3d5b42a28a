"""The papers' conditions as printed, that each proposed change is enough and none smaller is, and wanted rhos found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa import gossip
from hansa.core.errors import HansaError


def ring_rho(n: int) -> float:
    return 0.0 if n <= 3 else max(abs(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n))


def printed(rho: float, n: int, m: int, k: int) -> bool:
    """rho_max <= 1/(2 sqrt(n - m)) and K < n, free of rho when m = n, as in the paper."""
    return k < n and (m == n or 2 * rho * math.sqrt(n - m) <= 1 + 1e-9)


def test_the_papers_default_setting_does_not_meet_the_corollary_and_its_denser_graphs_do() -> None:
    found = gossip.corollary(gossip.ring(), [8] * 4, 2)
    assert found.rho_max == pytest.approx(0.805, abs=5e-4)
    assert found.bound == pytest.approx(1 / (2 * math.sqrt(6)))
    assert (found.clients, found.clusters, found.few_enough, found.dense_enough, found.holds) == (
        32,
        4,
        True,
        False,
        False,
    )
    assert gossip.corollary(gossip.unbalanced_complete(seed=30, spread=0.35), [8] * 4, 2).holds  # rho 0.125
    assert gossip.corollary(gossip.complete(), [8] * 4, 2).holds


def test_everyone_reporting_leaves_rho_free_but_not_the_number_of_clusters() -> None:
    found = gossip.corollary(gossip.ring(), [8] * 4, 8)
    assert found.bound == math.inf
    assert found.holds
    assert not gossip.corollary(gossip.ring(), [8] * 8, 8).holds
    assert gossip.corollary(gossip.ring(), [8] * 7, 8).holds


def test_rho_meeting_the_bound_exactly_is_enough() -> None:
    assert gossip.corollary(gossip.hypercube(), [8] * 4, 7).holds  # rho = 1/2 = 1/(2 sqrt 1)
    assert gossip.corollary(gossip.hypercube(), [4] * 2, 2).rho_max == pytest.approx(1 / 3)
    assert gossip.corollary(gossip.hypercube(), [4] * 2, 2).holds  # 1/3 <= 1/(2 sqrt 2)
    assert not gossip.corollary(gossip.hypercube(), [8] * 4, 6).holds


def test_unequal_clusters_are_held_to_the_tightest_bound_and_the_smallest_size() -> None:
    found = gossip.corollary(gossip.complete(), [3, 9], 2)
    assert found.bound == pytest.approx(1 / (2 * math.sqrt(7)))
    assert found.few_enough
    assert not gossip.corollary(gossip.complete(), [2, 10], 2).few_enough
    assert gossip.corollary(gossip.ring(), [4, 8], 0.25).reporters == (1, 2)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 24), k=st.integers(1, 12), data=st.data())
def test_the_check_is_the_printed_condition_and_every_change_is_the_smallest(
    n: int, k: int, data: st.DataObject
) -> None:
    m = data.draw(st.integers(1, n))
    found = gossip.corollary(gossip.ring(), [n] * k, m)
    assert found.holds == printed(ring_rho(n), n, m, k)
    changes = gossip.suggest_changes(found, m)
    if found.holds:
        assert changes == ()
        return
    assert bool(changes) == (n * k > 1)
    for change in changes:
        size = n * k // change.clusters
        after = gossip.corollary(change.topology, [size] * change.clusters, change.reporters)
        assert after.holds, change
        if change.kind == "reporters":
            assert change.topology == gossip.ring()
            assert not printed(ring_rho(size), size, change.reporters - 1, change.clusters)
        if change.kind == "clusters":
            assert (change.topology, change.reporters) == (gossip.ring(), m)
            for other in range(change.clusters + 1, k):
                if n * k % other == 0:
                    assert not printed(ring_rho(n * k // other), n * k // other, m, other)
        if change.kind == "graph":
            cost = gossip.messages(change.topology(size))
            for other in (gossip.ring(), gossip.torus(), gossip.exponential()):
                if gossip.messages(other(size)) < cost:
                    assert not printed(gossip.rho(other(size)), size, m, change.clusters)


def test_each_kind_of_change_is_found() -> None:
    kinds = {c.kind: c for c in gossip.suggest_changes(gossip.corollary(gossip.ring(), [5] * 2, 1), 1)}
    assert kinds["reporters"].reporters == 5 - math.floor(1 / (4 * ring_rho(5) ** 2))
    assert kinds["graph"].topology == gossip.exponential()  # rho 1/4 = 1/(2 sqrt 4)
    fewer = {c.kind: c for c in gossip.suggest_changes(gossip.corollary(gossip.complete(), [4] * 9, 2), 2)}
    assert set(fewer) == {"clusters"}
    assert (fewer["clusters"].clusters, fewer["clusters"].summary) == (4, "4 clusters of 9 instead of 9")


def test_a_share_stays_a_share_as_clusters_grow() -> None:
    change = gossip.suggest_changes(gossip.corollary(gossip.complete(), [4] * 9, 0.5), 0.5)[0]
    assert change.reporters == 5  # half of nine


def test_where_no_single_change_is_enough_fewer_clusters_come_with_another() -> None:
    found = gossip.corollary(gossip.ring(), [10] * 10, 3)
    assert [change.summary for change in gossip.suggest_changes(found, 3)] == [
        "5 clusters of 20 instead of 10, and 20 reporters a cluster instead of 3",
        "5 clusters of 20 instead of 10, and complete() instead of ring(): rho 0.000",
    ]


def test_a_graph_of_one_size_only_is_replaced_when_clusters_grow() -> None:
    pair = gossip.matrix([[0.7, 0.3], [0.3, 0.7]])
    changes = gossip.suggest_changes(gossip.corollary(pair, [2] * 6, 1), 1)
    assert {change.kind for change in changes} == {"graph"}
    assert gossip.corollary(changes[0].topology, [12 // changes[0].clusters] * changes[0].clusters, 1).holds


def test_bad_settings_are_refused() -> None:
    with pytest.raises(HansaError, match=r"corollary\(reporters=9\): expected at most the 8 clients"):
        gossip.corollary(gossip.ring(), [8, 8], 9)
    with pytest.raises(HansaError, match=r"corollary\(sizes=0\)"):
        gossip.corollary(gossip.ring(), [8, 0], 1)
    with pytest.raises(HansaError, match=r"corollary\(reporters=1.5\)"):
        gossip.corollary(gossip.ring(), [8, 8], 1.5)


def test_one_client_alone_has_no_change_to_make() -> None:
    assert gossip.suggest_changes(gossip.corollary(gossip.ring(), [1], 1), 1) == ()
    assert np.isinf(gossip.corollary(gossip.ring(), [1], 1).bound)


def test_the_afga_theorems_as_printed() -> None:
    """rho <= M/(M+N) over all clients, rho_max <= m/(m+n) over clusters, the tightest where sizes differ."""
    ring = gossip.afga_theorem(gossip.ring(), [50], 5)
    assert (ring.name, ring.holds) == ("Theorem 4.6", False)
    assert ring.bound == pytest.approx(5 / 55)
    assert gossip.afga_theorem(gossip.ring(), [50], 50).bound == 0.5
    clustered = gossip.afga_theorem(gossip.complete(), [4, 16], 0.5)
    assert (clustered.name, clustered.reporters, clustered.holds) == ("Theorem D.3", (2, 8), True)
    uneven = gossip.afga_theorem(gossip.complete(), [4, 16], 2)
    assert uneven.bound == pytest.approx(2 / 18)
    assert gossip.afga_theorem(gossip.hypercube(), [4], 2).holds  # rho = 1/3 = 2/6, met exactly


def test_rates_scale_as_the_theorems_say_and_without_steps_there_are_no_numbers() -> None:
    found = gossip.corollary(gossip.complete(), [8] * 4, 2)
    once, four_times = found.orders(12, 1000), found.orders(48, 1000)
    assert four_times.server_scale == pytest.approx(2 * once.server_scale)
    assert four_times.local_scale == pytest.approx(once.local_scale / 2)
    assert four_times.rate_scale == pytest.approx(once.rate_scale / 2)
    assert (found.participants, once.least_rounds) == (8, 97)
    assert (once.enough(96), once.enough(97), found.orders().enough(97)) == (False, True, None)
    assert found.orders().server_scale is None
    assert found.orders(12).local_scale is None
    afga = gossip.afga_theorem(gossip.complete(), [50], 5)
    once, four_times = afga.orders(12, 1000), afga.orders(48, 1000)
    assert once.server_scale == pytest.approx(50 * math.sqrt(12 / 5))
    assert four_times.local_scale == pytest.approx(once.local_scale / 4)
    assert four_times.rate_scale == pytest.approx(once.rate_scale / 2)
    assert (once.enough(59), once.enough(60)) == (False, True)


@pytest.mark.parametrize(("rho", "steps", "expected"), [(0.0, 48, 1.0), (0.8, 3, 3.0), (0.8, 48, 5.0), (1.0, 48, 48.0)])
def test_drift_stops_growing_at_the_time_that_mixing_takes(rho: float, steps: int, expected: float) -> None:
    assert gossip.drift(rho, steps) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "target"), [(8, 0.0), (8, 0.125), (8, 0.599), (8, 0.805), (10, 0.335), (10, 0.766)])
def test_graphs_of_the_papers_rhos_are_found(n: int, target: float) -> None:
    found = gossip.with_rho(target, [n, n])
    assert found.rho == pytest.approx(target, abs=0.006)
    assert gossip.rho(found.topology(n)) == found.rho
    assert gossip.with_rho(target, [n]) == found


def test_of_graphs_near_enough_the_one_with_the_fewest_messages_is_taken() -> None:
    assert gossip.with_rho(0.805, [8]).topology == gossip.ring()
    assert gossip.with_rho(0.0, [8]).topology == gossip.complete()
    assert gossip.with_rho(0.5, [8], "hypercube").topology == gossip.hypercube()
    assert isinstance(gossip.with_rho(0.3, [8], "unbalanced-complete").topology, gossip.unbalanced_complete)
    two = gossip.with_rho(0.6, [6, 9])
    assert two.rho == pytest.approx(max(gossip.rho(two.topology(n)) for n in (6, 9)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((1.0, [8]), "target=1.0"),
        ((-0.1, [8]), "target=-0.1"),
        ((0.5, []), "at least one cluster size"),
        ((0.5, [0]), "sizes=0"),
        ((0.5, [8], "rign"), "kind='rign'.*Did you mean ring"),
        ((0.5, [7], "hypercube"), r"does not come in the sizes \[7\]"),
    ],
)
def test_rhos_that_no_graph_has_are_refused(call: tuple[object, ...], message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.with_rho(*call)  # type: ignore[arg-type]
