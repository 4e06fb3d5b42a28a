"""Topologies, mixing matrices and their rates against textbook weights, networkx and dense algebra."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_array

from hansa import gossip
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.gossip import spectral
from hansa.gossip.topology import _random_pairs
from hansa.gossip.weights import as_sparse, sparse_identity
from mistakes import refused

ANY_SIZE = [
    gossip.ring(), gossip.complete(), gossip.unbalanced_complete(seed=1),
    gossip.unbalanced_complete(seed=1, spread=0.3), gossip.erdos_renyi(0.7, seed=2), gossip.torus(),
    gossip.star(), gossip.exponential(), gossip.isolated(),
]  # fmt: skip
FIXED_SIZE = [
    (gossip.hypercube(), 16),
    (gossip.torus(rows=3), 12),
    (gossip.edges([(0, 1), (1, 2), (2, 3), (3, 1)]), 4),
    (gossip.matrix([[0.2, 0.8, 0.0], [0.0, 0.2, 0.8], [0.8, 0.0, 0.2]]), 3),
]


def assert_doubly_stochastic(W: torch.Tensor, n: int) -> None:
    assert W.shape == (n, n)
    assert W.dtype == torch.float64
    assert (W >= 0).all()
    torch.testing.assert_close(W.sum(0), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(W.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_topologies_have_their_textbook_weights() -> None:
    third = 1 / 3
    assert [gossip.ring()(n)[0].tolist() for n in (1, 2, 3)] == [[1.0], [0.5, 0.5], [third] * 3]
    assert gossip.ring()(5)[3].tolist() == [0.0, 0.0, third, third, third]
    assert gossip.complete()(4).tolist() == [[0.25] * 4] * 4
    star = gossip.star()(4)
    assert star[0].tolist() == [0.25] * 4
    torch.testing.assert_close(star[2], torch.tensor([0.25, 0, 0.75, 0], dtype=torch.float64))
    assert gossip.exponential()(8)[0].tolist() == [0.25, 0.25, 0.25, 0, 0.25, 0, 0, 0]
    assert gossip.exponential()(8)[6].tolist() == [0.25, 0, 0.25, 0, 0, 0, 0.25, 0.25]
    assert gossip.hypercube()(8)[5].tolist() == [0, 0.25, 0, 0, 0.25, 0.25, 0, 0.25]
    torus = gossip.torus(rows=3)(12)
    assert torus[0].nonzero().ravel().tolist() == [0, 1, 3, 4, 8]  # right, left around, down, up around
    assert torus[0, 1] == 0.2
    assert torch.equal(gossip.torus()(7), gossip.ring()(7))
    assert torch.equal(gossip.torus()(12), gossip.torus(rows=3)(12))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 25), p=st.floats(0.05, 0.9), seed=st.integers(0, 10**6))
def test_edges_weigh_any_graph_by_metropolis_hastings(n: int, p: float, seed: int) -> None:
    graph = nx.compose(nx.path_graph(n), nx.gnp_random_graph(n, p, seed=seed))
    W = gossip.edges([*graph.edges, *((j, i) for i, j in graph.edges)])(n)  # an edge named both ways counts once
    for i, j in graph.edges:
        expected = 1 / (1 + max(graph.degree[i], graph.degree[j]))
        assert W[i, j] == W[j, i] == pytest.approx(expected, abs=1e-15)
    assert torch.count_nonzero(W).item() == 2 * graph.number_of_edges() + n


def test_erdos_renyi_joins_every_pair_with_chance_p() -> None:
    n, p, draws = 6, 0.3, 4000
    chance = np.random.default_rng(0)
    seen = np.zeros((n, n))
    for _ in range(draws):
        i, j = _random_pairs(n, p, chance).T
        assert (i < j).all()
        seen[i, j] += 1
    counts = seen[np.triu_indices(n, 1)]
    five_sigma = 5 * np.sqrt(draws * p * (1 - p))
    assert np.abs(counts - draws * p).max() < five_sigma
    assert counts.sum() == seen.sum()
    assert len(_random_pairs(50, 1.0, chance)) == 50 * 49 // 2
    assert len({tuple(pair) for pair in _random_pairs(50, 1.0, chance).tolist()}) == 50 * 49 // 2


def test_erdos_renyi_is_the_first_connected_of_its_draws_and_gives_up_after_a_hundred() -> None:
    tried = []
    for seed in range(10):
        for draw in range(100):
            graph = nx.empty_graph(8)
            graph.add_edges_from(_random_pairs(8, 0.25, Key(seed).child("erdos_renyi", 8, draw).numpy()).tolist())
            if nx.is_connected(graph):
                break
        tried.append(draw)
        assert torch.equal(gossip.erdos_renyi(0.25, seed)(8), gossip.edges(graph.edges)(8))
    assert max(tried) > 0
    with pytest.raises(HansaError, match=r"erdos_renyi\(p=0.001, seed=0\): none of 100 graphs over 30 .*= 0.113"):
        gossip.erdos_renyi(0.001)(30)


def test_topologies_are_values_whose_repr_is_the_call() -> None:
    for topology, n in [*((topology, 8) for topology in ANY_SIZE), *FIXED_SIZE]:
        again = eval(repr(topology), vars(gossip))
        assert again == topology
        assert hash(again) == hash(topology)
        assert torch.equal(again(n), topology(n))
    assert str(gossip.edges([(i, i + 1) for i in range(100)])) == "edges(...)"


def test_a_single_precision_matrix_is_completed_to_double() -> None:
    single = gossip.ring()(200).float()
    W = gossip.matrix(single)(200)
    assert_doubly_stochastic(W, 200)
    torch.testing.assert_close(W.float(), single, rtol=0, atol=1e-7)
    assert torch.equal(W != 0, single != 0)


test_bad_topologies_are_refused_with_the_offending_number = refused(
    (lambda: gossip.ring()(0), r"ring\(n=0\): expected a whole number >= 1"),
    (lambda: gossip.ring()(2.5), r"ring\(n=2.5\)"),
    (lambda: gossip.hypercube()(12), r"hypercube\(n=12\): expected a power of two"),
    (lambda: gossip.torus(rows=0), r"torus\(rows=0\)"),
    (lambda: gossip.torus(rows=3)(8), r"torus\(rows=3\): expected a divisor of the 8 clients"),
    (lambda: gossip.erdos_renyi(1.5), r"erdos_renyi\(p=1.5\): expected 0 < p <= 1"),
    (lambda: gossip.erdos_renyi(0.0), r"erdos_renyi\(p=0.0\)"),
    (lambda: gossip.erdos_renyi(0.5, seed=-1), r"erdos_renyi\(seed=-1\)"),
    (lambda: gossip.unbalanced_complete(seed="a"), r"unbalanced_complete\(seed='a'\)"),
    (lambda: gossip.unbalanced_complete(spread=2.0), r"unbalanced_complete\(spread=2.0\)"),
    (lambda: gossip.edges([(0, 0)]), r"edges\(pair=\(0, 0\)\): expected the positions of two different clients"),
    (lambda: gossip.edges([(0, -1)]), r"edges\(pair=\(0, -1\)\): expected the positions"),
    (lambda: gossip.edges([(0, 1, 2)]), r"edges\(pair=\(0, 1, 2\)\)"),
    (lambda: gossip.edges([3]), r"edges\(pair=3\)"),
    (lambda: gossip.edges([(0, "b")]), r"edges\(pair=\(0, 'b'\)\)"),
    (lambda: gossip.edges([(0, 1), (1, 9)])(3), r"edges\(pair=\(1, 9\)\): expected positions 0 to 2"),
    (lambda: gossip.edges([(0, 1), (2, 3)])(4), "disconnected: 2 components, and client 2 receives nothing"),
    (lambda: gossip.edges([(0, 1)])(3), "edges over 3 clients is disconnected: 2 components, and client 2"),
    (lambda: gossip.edges([])(2), "disconnected"),
    (lambda: gossip.matrix([[1.0, 0.0], [0.0, 1.0]]), "disconnected: 2 components, and client 1 .*isolated"),
    (lambda: gossip.matrix([[0.5, 0.5], [0.5, 0.5]])(3), r"matrix\(n=3\): expected 2, the size"),
    (lambda: gossip.matrix([[0.5, 0.5]]), "matrix has shape 1 x 2: expected a square matrix"),
)


def test_parametric_topologies_apply_their_rule_to_the_survivors() -> None:
    alive = [True] * 9
    alive[0] = alive[4] = False
    for topology in (gossip.ring(), gossip.star(), gossip.complete(), gossip.exponential(), gossip.isolated()):
        assert torch.equal(gossip.to_dense(gossip.over_survivors(topology, alive)), topology(7))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 12), data=st.data())
def test_the_stochastic_complement_is_the_sum_over_detours_and_forgets_the_order_of_losses(
    seed: int, n: int, data: st.DataObject
) -> None:
    W = gossip.unbalanced_complete(seed=seed)(n).numpy()
    lost = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=n - 1, unique=True))
    alive = [client not in lost for client in range(n)]
    s, d = np.flatnonzero(alive), np.sort(lost)
    detours, power = np.zeros((len(s), len(s))), np.eye(len(d))
    for _ in range(4000):  # 0, 1, 2, ... further hops among the lost
        detours += W[np.ix_(s, d)] @ power @ W[np.ix_(d, s)]
        power = power @ W[np.ix_(d, d)]
        if power.max() < 1e-15:
            break
    at_once = gossip.over_survivors(W, alive).toarray()
    np.testing.assert_allclose(at_once, W[np.ix_(s, s)] + detours, atol=1e-10)
    step, left = W, list(range(n))
    for client in lost:
        step = gossip.over_survivors(step, [other != client for other in left]).toarray()
        left.remove(client)
    np.testing.assert_allclose(at_once, step, atol=1e-12)


test_what_is_no_mixing_matrix_is_refused = refused(
    (lambda: gossip.over_survivors(gossip.ring(), [False, False]), "at least one client"),
    (lambda: gossip.over_survivors(gossip.ring()(3), [False] * 3), "for each of 3 clients"),
    (lambda: gossip.over_survivors(gossip.ring()(3), [True, True]), "for each of 3 clients"),
    (lambda: gossip.over_survivors(torch.eye(2), [True, False]), "disconnected"),
    (lambda: gossip.rho(torch.ones(2, 2)), "row 0 sums to 2"),
    (lambda: gossip.rho_max(gossip.ring(), []), "at least one cluster"),
)


test_check_names_what_is_wrong_and_where = refused(
    ([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], "W has shape 2 x 3: expected a square matrix"),
    (torch.ones(3), "W has shape 3: expected a square"),
    ([[1.0], [0.5, 0.5]], "rows of equal length"),
    ([["a"]], "matrix of numbers"),
    (torch.zeros(0, 0), "W has shape 0 x 0"),
    (torch.zeros(2, 2), "row 0 sums to 0"),
    ([[1.5, -0.5], [-0.5, 1.5]], r"W\[0, 1\] = -0.5: expected non-negative weights"),
    ([[0.5, float("nan")], [0.5, 0.5]], r"W\[0, 1\] = nan: expected finite weights"),
    ([[1.0, 0.0], [float("inf"), 0.0]], r"W\[1, 0\] = inf"),
    ([[0.5, 0.5], [0.3, 0.5]], "row 1 sums to 0.8, expected 1"),
    ([[0.9, 0.1], [0.5, 0.5]], "column 0 sums to 1.4, expected 1"),
    ([[0.5, 0.5], [0.5, 0.5 + 1e-8]], "row 1 sums to 1.00000001"),
    (torch.eye(3), "W is disconnected: 3 components, and client 1 receives nothing from client 0"),
    (torch.block_diag(torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)), "2 components.*client 2 receives"),
    ([[0.0, 1.0], [1.0, 0.0]], "W is periodic"),
    (torch.roll(torch.eye(5), 1, 0), "W is periodic"),
    by=gossip.check_mixing_matrix,
)


def test_check_takes_every_form_of_matrix() -> None:
    W = gossip.ring()(6)
    for form in (W, W.float(), W.to_sparse(), W.numpy(), W.tolist(), csr_array(W.numpy()), coo_array(W.numpy())):
        gossip.check_mixing_matrix(form)
    gossip.check_mixing_matrix(torch.eye(4), connected=False)
    gossip.check_mixing_matrix([[1.0]])


def test_tolerance_follows_the_dtype() -> None:
    W = gossip.ring()(6)
    off = W + 1e-7
    gossip.check_mixing_matrix(off.float())
    gossip.check_mixing_matrix(W.to(torch.bfloat16))
    with pytest.raises(HansaError, match=r"row 0 sums to 1.0000006"):
        gossip.check_mixing_matrix(off)


def test_connected_without_self_weight_is_fine_when_cycles_of_coprime_length_meet() -> None:
    triangle = [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]  # cycles of two and three
    gossip.check_mixing_matrix(triangle)
    assert gossip.rho(triangle) == pytest.approx(0.5)


def test_checking_does_not_change_the_matrix_given() -> None:
    W = csr_array(([0.5, 0.25, 0.25, 0.5, 0.5, 0.0], ([0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1])), shape=(2, 2))
    W = csr_array((W.data.copy(), W.indices.copy(), W.indptr.copy()), shape=(2, 2))
    before = (W.data.copy(), W.indices.copy(), W.indptr.copy())
    gossip.check_mixing_matrix(W)
    assert as_sparse(W).nnz == 4
    for kept, now in zip(before, (W.data, W.indices, W.indptr), strict=True):
        assert np.array_equal(kept, now)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_sinkhorn_scales_rows_and_columns_only(n: int, seed: int) -> None:
    A = np.random.default_rng(seed).random((n, n)) + 0.01
    P = gossip.sinkhorn(A).numpy()
    assert np.abs(P.sum(0) - 1).max() < 1e-12
    assert np.abs(P.sum(1) - 1).max() < 1e-12
    # D1 A D2: every 2 x 2 cross ratio of A survives
    ratio = P / A
    np.testing.assert_allclose(ratio * ratio[0, 0], np.outer(ratio[:, 0], ratio[0]), rtol=1e-9)


def test_sinkhorn_finishes_on_slowly_mixing_patterns() -> None:
    # plain sweeps gain a factor rho^2 = 0.9997 each here: 1e5 of them for this accuracy
    noisy = gossip.ring()(120).numpy() * (1 + 1e-4 * np.random.default_rng(0).standard_normal((120, 120)))
    P = gossip.sinkhorn(noisy, sweeps=500)
    assert (P.sum(1) - 1).abs().max() < 1e-12
    assert (P.sum(0) - 1).abs().max() < 1e-12


test_sinkhorn_refuses_what_has_no_doubly_stochastic_scaling = refused(
    ([[1.0, 1.0], [0.0, 1.0]], "still off by .* after 200 sweeps"),  # [0, 1] is on no second diagonal
    ([[1.0, -1.0], [1.0, 1.0]], "finite numbers >= 0"),
    ([[1.0, 0.0], [1.0, 0.0]], "a positive one in every row and column"),
    ([[1.0, float("nan")], [1.0, 1.0]], "finite"),
    by=lambda A: gossip.sinkhorn(A, sweeps=200),
)


TOPOLOGIES = ANY_SIZE[:-1]  # all that mix


@pytest.mark.parametrize("n", [4, 5, 8, 10, 33, 50, 200])
def test_rho_matches_closed_forms(n: int) -> None:
    assert gossip.rho(gossip.ring()(n)) == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3, abs=1e-12)
    assert gossip.rho(gossip.isolated()(n)) == pytest.approx(1, abs=1e-12)
    assert gossip.rho(gossip.star()(n)) == pytest.approx(1 - 1 / n, abs=1e-12)
    exponential, bound = gossip.rho(gossip.exponential()(n)), 1 - 2 / (1 + math.ceil(math.log2(n)))
    if n % 2 == 0:  # Ying et al. 2021, Proposition 1
        assert exponential == pytest.approx(bound, abs=1e-12)
    else:
        assert exponential < bound


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
