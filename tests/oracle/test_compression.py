"""Compression with error feedback: operators, three rounds by hand, conservation, published bit counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle import compression, local, server
from oracle.quadratic import heterogeneous
from oracle.tiny import ZERO2, plane, rounds


class TestCompression:
    def test_operators_by_hand(self) -> None:
        assert compression.scaled_sign(np.array([3.0, -1.0, 0.0, -4.0])).tolist() == [2.0, -2.0, 2.0, -2.0]
        assert compression.top_k(0.5, np.array([3.0, -1.0, 0.0, -4.0])).tolist() == [3.0, 0.0, 0.0, -4.0]
        assert compression.top_k(0.5, np.array([0.5, -1.0, 1.0, 1.0, 9.0])).tolist() == [0.0, -1.0, 0.0, 0.0, 9.0]
        assert compression.top_k(0.001, np.array([0.5, -1.0, 1.0])).tolist() == [0.0, -1.0, 0.0]
        for C in (compression.scaled_sign, compression.compressor("top_k", 0.5)):
            assert not C(np.zeros(4)).any()

    def test_sign_with_error_feedback(self) -> None:
        # vhat = eps = 1 throughout, so x moves by what was sent: (.375, -.375), then C(.3125 + .125, -.0625 + .125)
        settings: dict[str, Any] = {"b1": 0.0, "b2": 0.0, "eps": 1.0, "eta": 1.0}
        got, state = compression.fedcams(plane(), ZERO2, [[0], [0]], 1, 1.0, C=compression.scaled_sign, **settings)
        assert got.tolist() == [[0.375, -0.375], [0.625, -0.125]]
        assert state["e"].tolist() == [[0.1875, -0.1875]]

    def test_two_way_top_k_over_three_rounds(self) -> None:
        C, settings = compression.compressor("top_k", 0.5), {"b1": 0.5, "b2": 0.0, "eps": 1.0, "eta": 1.0}
        got, state = compression.fedcams(plane(), ZERO2, [[0]] * 3, 1, 1.0, C=C, two_way=True, **settings)
        assert got.tolist() == [[0.25, 0.0], [0.375, -0.25], [0.8125, -0.375]]
        assert state["replicas"].tolist() == [[0.0, 0.0], [0.25, 0.0], [0.25, -0.25]]
        assert state["e"].tolist() == [[0.0, -0.125]]

    @pytest.mark.parametrize("two_way", [False, True])
    def test_identity_is_fedams(self, two_way: bool) -> None:
        problem, chosen = heterogeneous(5, 6, [5, 9, 4, 12, 7, 6], 8), rounds(1, 6, 2, 20)
        C = compression.compressor("identity")
        got, state = compression.fedcams(problem, np.zeros(8), chosen, 3, 0.1, C=C, two_way=two_way)
        assert np.allclose(got, server.fedams(problem, np.zeros(8), chosen, 3, 0.1)[0], atol=1e-12)
        assert not state["e"].any()
        assert np.allclose(state["gamma"], 0.0, atol=1e-12)

    def test_residuals_of_absent_clients_do_not_change(self) -> None:
        problem, C = heterogeneous(5, 3, [5, 12, 8], 8), compression.compressor("top_k", 0.25)
        _, early = compression.fedcams(problem, np.zeros(8), [[0, 1]], 3, 0.1, C=C)
        _, late = compression.fedcams(problem, np.zeros(8), [[0, 1], [1, 2], [2]], 3, 0.1, C=C)
        assert early["e"][0].any()
        assert np.array_equal(early["e"][0], late["e"][0])

    @pytest.mark.parametrize("two_way", [False, True])
    @pytest.mark.parametrize("name", ["sign", "top_k"])
    def test_nothing_is_lost_model_plus_mean_residual_is_the_sum_of_all_updates(self, name: str, two_way: bool) -> None:
        problem, everyone = heterogeneous(6, 4, [10, 6, 17, 9], 8), [[0, 1, 2, 3]] * 30
        C = compression.compressor(name, 0.25)
        got, state = compression.fedavg_compressed(
            problem, np.zeros(8), everyone, 2, 0.05, C=C, two_way=two_way, eta=0.25
        )
        produced = sum(problem.descend(i, base, 2, 0.05) - base for base in state["replicas"] for i in range(4)) / 4
        assert np.linalg.norm(state["e"]) > 0.1
        assert np.allclose(got[-1], 0.25 * (produced - state["e"].mean(axis=0)), atol=1e-12)
        assert np.array_equal(state["replicas"][1:], got[:-1]) != two_way

    def test_uncompressed_scaffold_is_scaffold(self) -> None:
        problem, chosen = heterogeneous(6, 5, [6, 11, 4, 9, 7], 4), rounds(2, 5, 2, 20)
        C = compression.compressor("identity")
        got, state = compression.scaffold_compressed(problem, np.zeros(4), chosen, 3, 0.1, C=C)
        want, same = local.scaffold(problem, np.zeros(4), chosen, 3, 0.1)
        assert np.allclose(got, want, atol=1e-13)
        assert np.allclose(state["c"], same["c"], atol=1e-13)
