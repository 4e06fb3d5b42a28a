"""What is said of a topology before a run: numbers by hand, a drawing, and graphs of a wanted rho."""

from __future__ import annotations

import json

import pytest

from hansa import gossip
from mistakes import refused


def test_numbers_of_the_papers_setting() -> None:
    found = gossip.describe(gossip.ring(), 32, 4, dim=29_000)
    assert json.loads(json.dumps(found)) == {
        "topology": "ring()",
        "clients": 32,
        "clusters": 4,
        "cluster_sizes": [8, 8, 8, 8],
        "cluster_rho": [pytest.approx(0.8047, abs=1e-4)] * 4,
        "rho_max": pytest.approx(0.8047, abs=1e-4),
        "drift_limit": pytest.approx(5.1213, abs=1e-3),
        "edges": 32,
        "messages_per_step": 64,
        "bytes_per_step": 7_424_000,
    }


def test_clusters_may_differ_in_size_and_graph() -> None:
    found = gossip.describe(gossip.ring(), 20, [list(range(8)), list(range(8, 20))])
    assert found["cluster_sizes"] == [8, 12]
    assert found["cluster_rho"] == pytest.approx([0.805, 0.911], abs=5e-4)
    mixed = gossip.describe(gossip.by_cluster([gossip.ring(), gossip.complete()]), 16, 2)
    assert (mixed["edges"], mixed["messages_per_step"]) == (8 + 28, 16 + 56)
    one_way = gossip.describe(gossip.exponential(), 8)  # 1 and 2 ahead are one way, 4 ahead is mutual
    assert (one_way["edges"], one_way["messages_per_step"]) == (20, 24)
    assert gossip.describe(gossip.isolated(), 4)["drift_limit"] is None


test_bad_questions_are_refused = refused(
    ({"clients": 8, "dim": 0}, r"describe\(dim=0\)"),
    ({"clients": 0}, "population=0"),
    ({"clients": 8, "clusters": gossip.by_labels(2)}, "needs the label counts"),
    by=lambda call: gossip.describe(gossip.ring(), **call),
)


@pytest.mark.parametrize(
    ("topology", "n"), [(gossip.ring(), 1), (gossip.ring(), 8), (gossip.star(), 33), (gossip.complete(), 12)]
)
def test_a_drawing_has_every_client_and_every_edge(topology: gossip.Topology, n: int) -> None:
    pytest.importorskip("matplotlib")
    W = topology(n)
    ax = gossip.draw(W)
    assert sorted(int(label.get_text()) for label in ax.texts) == list(range(n))
    lines = [len(part.get_segments()) for part in ax.collections if hasattr(part, "get_segments")]
    assert sum(lines) == gossip.edge_count(W)


def test_many_clients_are_drawn_as_the_pattern_of_the_matrix() -> None:
    pytest.importorskip("matplotlib")
    (pattern,) = gossip.draw(gossip.ring().sparse(128)).lines
    assert len(pattern.get_xdata()) == 3 * 128


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
    assert isinstance(gossip.with_rho(0.3, [8], "unbalanced_complete").topology, gossip.unbalanced_complete)
    two = gossip.with_rho(0.6, [6, 9])
    assert two.rho == pytest.approx(max(gossip.rho(two.topology(n)) for n in (6, 9)))


test_rhos_that_no_graph_has_are_refused = refused(
    ((1.0, [8]), "target=1.0"),
    ((-0.1, [8]), "target=-0.1"),
    ((0.5, []), "at least one cluster size"),
    ((0.5, [0]), "sizes=0"),
    ((0.5, [8], "rign"), "kind='rign'.*'ring'"),
    ((0.5, [7], "hypercube"), r"does not come in the sizes \[7\]"),
    by=lambda call: gossip.with_rho(*call),
)
