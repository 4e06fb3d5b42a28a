"""rho against closed forms and the contraction theorem; traffic counts by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from hansa import gossip
from hansa.core.errors import HansaError
from hansa.gossip import spectral
from hansa.gossip.weights import sparse_identity

TOPOLOGIES = [
    gossip.ring(),
    gossip.complete(),
    gossip.unbalanced_complete(seed=5),
    gossip.erdos_renyi(0.6, seed=5),
    gossip.torus(),
    gossip.star(),
    gossip.exponential(),
]


@pytest.mark.parametrize(("n", "published"), [(8, 0.805), (10, 0.873), (50, 0.995)])
def test_ring_has_the_published_rho(n: int, published: float) -> None:
    assert round(gossip.rho(gossip.ring()(n)), 3) == published


@pytest.mark.parametrize("n", [1, 2, 3, 8, 50, 1500])
def test_complete_graph_has_rho_zero(n: int) -> None:
    assert gossip.rho(gossip.complete().sparse(n)) == 0


@pytest.mark.parametrize("n", [4, 5, 8, 10, 33, 50, 200])
def test_rho_matches_closed_forms(n: int) -> None:
    assert gossip.rho(gossip.ring()(n)) == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3, abs=1e-12)
    assert gossip.rho(gossip.star()(n)) == pytest.approx(1 - 1 / n, abs=1e-12)
    exponential, bound = gossip.rho(gossip.exponential()(n)), 1 - 2 / (1 + math.ceil(math.log2(n)))
    if n % 2 == 0:  # Ying et al. 2021, Proposition 1
        assert exponential == pytest.approx(bound, abs=1e-12)
    else:
        assert exponential < bound


@pytest.mark.parametrize("power", [1, 2, 3, 5])
def test_hypercube_has_rho_one_minus_two_over_neighbours_and_self(power: int) -> None:
    assert gossip.rho(gossip.hypercube()(2**power)) == pytest.approx(1 - 2 / (1 + power), abs=1e-12)


def test_nobody_talking_has_rho_one() -> None:
    assert gossip.rho(gossip.isolated()(5)) == pytest.approx(1, abs=1e-12)
    assert gossip.rho(gossip.isolated().sparse(2000)) == pytest.approx(1, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(topology=st.sampled_from(TOPOLOGIES), n=st.integers(3, 40), seed=st.integers(0, 10**6))
def test_a_gossip_step_keeps_the_mean_and_contracts_by_rho_reached_by_the_singular_vector(
    topology: gossip.Topology, n: int, seed: int
) -> None:
    W = topology(n)
    rho = gossip.rho(W)
    X = torch.randn(n, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mean = X.mean(0, keepdim=True)
    torch.testing.assert_close((W @ X).mean(0, keepdim=True), mean, rtol=0, atol=1e-12)
    assert (W @ X - mean).norm() <= rho * (X - mean).norm() + 1e-12
    worst = torch.linalg.svd(W - 1 / n)[2][0]
    worst = worst - worst.mean()
    assert (W @ worst).norm() == pytest.approx(rho * worst.norm().item(), abs=1e-9)


@pytest.mark.parametrize("topology", [*TOPOLOGIES, gossip.hypercube()])
@pytest.mark.parametrize("n", [64, 128])
def test_lanczos_finds_what_singular_values_find(
    topology: gossip.Topology, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.linalg.matrix_norm(topology(n) - 1 / n, ord=2).item()
    monkeypatch.setattr(spectral, "DENSE_UP_TO", 0)
    assert gossip.rho(topology(n)) == pytest.approx(exact, abs=1e-9)


def test_rho_of_ten_thousand_clients_matches_closed_forms() -> None:
    n = 10_000
    assert gossip.rho(gossip.ring().sparse(n)) == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3, abs=1e-12)
    assert gossip.rho(gossip.exponential().sparse(n)) == pytest.approx(1 - 2 / 15, abs=1e-10)
    assert gossip.rho(gossip.torus().sparse(n)) == pytest.approx((3 + 2 * math.cos(2 * math.pi / 100)) / 5, abs=1e-10)
    path = gossip.edges([(i, i + 1) for i in range(n - 1)]).sparse(n)
    assert gossip.rho(path) == pytest.approx(1 - 2 / 3 * (1 - math.cos(math.pi / n)), abs=1e-12)


def test_rho_sees_the_negative_end_of_the_spectrum() -> None:
    n, keep = 3000, 1e-8  # neighbours all but swap: the smallest eigenvalue is -1 + 2 keep
    W = csr_array(keep * sparse_identity(n) + (1 - keep) / 2 * (3 * gossip.ring().sparse(n) - sparse_identity(n)))
    assert gossip.rho(W) == pytest.approx(1 - 2 * keep, abs=1e-12)


def test_rho_max_is_that_of_the_sparsest_cluster() -> None:
    assert gossip.rho_max(gossip.ring(), [3, 8, 10, 8]) == gossip.rho(gossip.ring()(10))
    with pytest.raises(HansaError, match="at least one cluster"):
        gossip.rho_max(gossip.ring(), [])


def test_rho_refuses_what_is_no_mixing_matrix() -> None:
    with pytest.raises(HansaError, match="row 0 sums to 2"):
        gossip.rho(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("topology", "n", "edges", "messages"),
    [
        (gossip.ring(), 1, 0, 0),
        (gossip.ring(), 2, 1, 2),
        (gossip.ring(), 8, 8, 16),
        (gossip.complete(), 5, 10, 20),
        (gossip.star(), 5, 4, 8),
        (gossip.torus(rows=3), 12, 24, 48),
        (gossip.hypercube(), 8, 12, 24),
        (gossip.exponential(), 8, 20, 24),  # 1 and 2 ahead are one way, 4 ahead is mutual
        (gossip.isolated(), 5, 0, 0),
    ],
)
def test_edges_messages_and_bytes_are_counted(topology: gossip.Topology, n: int, edges: int, messages: int) -> None:
    W = topology(n)
    assert (gossip.edge_count(W), gossip.messages(W)) == (edges, messages)
    assert gossip.step_bytes(W, 29_034) == messages * 29_034 * 4
    assert gossip.step_bytes(W, 10, itemsize=8) == messages * 80
