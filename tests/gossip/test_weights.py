"""The checks every mixing matrix passes, and Sinkhorn scaling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_array

from hansa import gossip
from hansa.core.errors import HansaError
from hansa.gossip.weights import as_sparse, circulant


@pytest.mark.parametrize(
    ("W", "message"),
    [
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
        (torch.eye(3), "W is disconnected: 3 parts, client 1 never hears client 0"),
        (torch.block_diag(torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)), "2 parts, client 2 never hears"),
        ([[0.0, 1.0], [1.0, 0.0]], "W is periodic"),
        (torch.roll(torch.eye(5), 1, 0), "W is periodic"),
    ],
)
def test_check_names_what_is_wrong_and_where(W: object, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.check_mixing_matrix(W)  # type: ignore[arg-type]


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


def test_circulant_counts_coinciding_offsets_once() -> None:
    assert circulant(2, (1, -1)).toarray().tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert circulant(1, (1, -1)).toarray().tolist() == [[1.0]]
    assert circulant(4, (2,)).toarray()[3].tolist() == [0.0, 0.5, 0.0, 0.5]


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


@pytest.mark.parametrize(
    ("A", "message"),
    [
        (
            [[1.0, 1.0], [0.0, 1.0]],
            "still off by .* after 200 sweeps",
        ),  # no second diagonal: [0, 1] can never carry weight
        ([[1.0, -1.0], [1.0, 1.0]], "finite numbers >= 0"),
        ([[1.0, 0.0], [1.0, 0.0]], "a positive one in every row and column"),
        ([[1.0, float("nan")], [1.0, 1.0]], "finite"),
    ],
)
def test_sinkhorn_refuses_what_has_no_doubly_stochastic_scaling(A: list[list[float]], message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.sinkhorn(A, sweeps=200)
