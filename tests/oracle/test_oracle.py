"""The core references against numbers worked by hand, closed forms and theorems."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from oracle import local, server
from oracle.quadratic import Array, Quadratics, heterogeneous, shares
from oracle.tiny import ZERO, ZERO2, pair, rounds, unit


class TestQuadratic:
    def test_gradient_is_the_slope_of_the_loss(self) -> None:
        problem = heterogeneous(0, 3, [4, 6, 9], 5)
        x, h = np.linspace(-1, 1, 5), 1e-6
        for i in range(3):
            slopes = [(problem.loss(i, x + h * e) - problem.loss(i, x - h * e)) / (2 * h) for e in np.eye(5)]
            assert np.allclose(problem.grad(i, x), slopes, atol=1e-7)

    def test_mean_gradient_vanishes_at_the_optimum_and_clients_disagree_there(self) -> None:
        problem = heterogeneous(1, 6, [12, 7, 15, 9, 20, 6], 5)
        gradients = np.array([problem.grad(i, problem.optimum()) for i in range(6)])
        assert np.linalg.norm(gradients.mean(axis=0)) < 1e-12
        assert np.linalg.norm(gradients, axis=1).min() > 0.1

    def test_curvature_is_bounded_as_promised(self) -> None:
        for A in heterogeneous(2, 8, [3, 4, 5, 6, 7, 8, 9, 30], 4).A:
            assert np.linalg.norm(A, ord=2) ** 2 / len(A) <= 4.0 + 1e-12

    def test_shares_by_hand(self) -> None:
        assert shares(pair(), [0, 1], "uniform") == {0: 0.5, 1: 0.5}
        assert shares(pair(), [0, 1], "samples") == {0: 0.25, 1: 0.75}
        assert shares(pair(), [1], "samples") == {1: 1.0}
        assert shares(pair(), [0, 1], [3.0, 2.0]) == {0: 0.6, 1: 0.4}


class TestServersByHand:
    """With b1 = .9, b2 = .99 and a first Delta of 0.5: m = 0.05, v = 0.0025; corrected 0.5 and 0.25."""

    @pytest.mark.parametrize(("weights", "want"), [("uniform", -0.27), ("samples", -0.455), ([3.0, 2.0], -0.196)])
    def test_fedavg_weighs_0_1_and_minus_0_64(self, weights: str | list[float], want: float) -> None:
        got, _ = server.fedavg(pair(), ZERO, [[0, 1]], [1, 2], 0.1, weights=weights)
        assert got[0, 0] == pytest.approx(want, abs=1e-15)

    def test_fedavg_scales_by_eta(self) -> None:
        assert server.fedavg(unit(), ZERO, [[0]], 2, 0.5, eta=2.0)[0].tolist() == [[1.5]]

    def test_fedavgm(self) -> None:
        got, state = server.fedavgm(unit(), ZERO, [[0], [0]], 1, 0.5, beta=0.9)
        assert np.allclose(got, [[0.5], [1.2]], atol=1e-15)  # m: 0.5, then 0.45 + 0.25
        assert np.allclose(state["m"], 0.7)

    @pytest.mark.parametrize(
        ("flags", "want"),
        [
            ({}, 0.1 * 0.05 / 0.051),
            ({"bias_correction": True}, 0.1 * 0.5 / 0.501),
            ({"eps": 0.0075, "eps_inside": True}, 0.05),
            ({"v0": 1.0, "eps": 0.0}, 0.1 * 0.05 / math.sqrt(0.9925)),
        ],
    )
    def test_fedadam(self, flags: dict[str, Any], want: float) -> None:
        got, _ = server.fedadam(unit(), ZERO, [[0]], 1, 0.5, eta=0.1, **{"eps": 1e-3, **flags})
        assert got[0, 0] == pytest.approx(want, rel=1e-14)

    def test_fedadagrad_sums_squares(self) -> None:
        got, state = server.fedadagrad(unit(), ZERO, [[0], [0]], 1, 0.5, eta=0.5, eps=0.0)
        # x: 0.5 (0.5/0.5), then Delta = 0.25, v = 0.3125
        assert np.allclose(got[:, 0], [0.5, 0.5 + 0.5 * 0.25 / math.sqrt(0.3125)], atol=1e-15)
        assert np.allclose(state["v"], 0.3125)

    @pytest.mark.parametrize(("v0", "v"), [(0.0, 0.0025), (1.0, 0.9975), (0.25, 0.25)])
    def test_fedyogi_moves_v_towards_the_square_by_a_bounded_step(self, v0: float, v: float) -> None:
        got, state = server.fedyogi(unit(), ZERO, [[0]], 1, 0.5, eta=0.1, eps=0.0, v0=v0)
        assert state["v"][0] == pytest.approx(v, rel=1e-14)
        assert got[0, 0] == pytest.approx(0.1 * 0.05 / math.sqrt(v), rel=1e-14)

    def test_fedamsgrad_remembers_the_larger_v(self) -> None:
        # b1 = b2 = 0: Delta 0.5 then 0.25, v 0.25 then 0.0625, vhat stays 0.25
        settings: dict[str, Any] = {"eta": 0.5, "b1": 0.0, "b2": 0.0, "eps": 0.0}
        assert server.fedamsgrad(unit(), ZERO, [[0], [0]], 1, 0.5, **settings)[0].tolist() == [[0.5], [0.75]]
        assert server.fedadam(unit(), ZERO, [[0], [0]], 1, 0.5, **settings)[0].tolist() == [[0.5], [1.0]]

    def test_fedams_takes_eps_into_the_maximum_and_corrects_after_it(self) -> None:
        plain, _ = server.fedams(unit(), ZERO, [[0]], 1, 0.5, eta=0.6, b1=0.0, b2=0.0, eps=0.36)
        assert plain[0, 0] == pytest.approx(0.5, rel=1e-14)  # 0.6 * 0.5 / sqrt(max(0.25, 0.36))
        corrected, _ = server.fedams(unit(), ZERO, [[0]], 1, 0.5, eta=0.6, eps=0.0036, bias_correction=True)
        assert corrected[0, 0] == pytest.approx(0.5, rel=1e-13)  # vhat = 0.0036, over 1 - b2 = 0.36

    def test_without_eps_ams_is_amsgrad(self) -> None:
        problem, chosen = heterogeneous(3, 6, [5, 9, 4, 12, 7, 6], 4), rounds(0, 6, 3, 20)
        ams, _ = server.fedams(problem, np.zeros(4), chosen, [1, 2, 3, 4, 5, 6], 0.1, eps=0.0)
        amsgrad, _ = server.fedamsgrad(problem, np.zeros(4), chosen, [1, 2, 3, 4, 5, 6], 0.1, eps=0.0, eta=1.0)
        assert np.array_equal(ams, amsgrad)


class TestLocalByHand:
    def test_momentum_decay_and_clipping_start_afresh_each_round(self) -> None:
        options: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.2, "clip": 0.4}
        got, _ = local.fedavg_local_options(unit(), ZERO, [[0], [0]], [[2], [1]], 0.1, **options)
        # buf -0.4, y 0.04; buf -0.2 - 0.4 + 0.008, y 0.0992; next round buf -0.4 + 0.01984
        assert np.allclose(got[:, 0], [0.0992, 0.137216], atol=1e-15)

    def test_rate_per_round(self) -> None:
        assert np.allclose(server.fedavg(unit(), ZERO, [[0], [0]], 1, [0.1, 0.2])[0][:, 0], [0.1, 0.28], atol=1e-15)

    def test_fedprox(self) -> None:
        # from 0.5 to 0.55, where the pull is -0.45 + 2 (0.55 - 0.5)
        got, _ = local.fedprox(unit(), np.array([0.5]), [[0]], 2, 0.1, mu=2.0)
        assert got[0, 0] == pytest.approx(0.585, abs=1e-15)

    def test_scaffold(self) -> None:
        got, state = local.scaffold(pair(), ZERO, [[0, 1], [1]], [[1, 1], [2, 2]], 0.1)
        assert np.allclose(got[:, 0], [-0.15, -0.294], atol=1e-15)
        assert np.allclose(state["c_i"][:, 0], [-1.0, 3.22], atol=1e-14)
        assert np.allclose(state["c"], 1.11, atol=1e-14)

    def test_feddyn(self) -> None:
        got, state = local.feddyn(pair(), ZERO, [[0, 1], [0]], [[1, 1], [2, 2]], 0.1, alpha=2.0)
        assert np.allclose(got[:, 0], [-0.3, -0.1695], atol=1e-15)
        assert np.allclose(state["h_i"][:, 0], [-0.574, 0.8], atol=1e-15)
        assert np.allclose(state["h"], 0.113, atol=1e-15)

    def test_fednova(self) -> None:
        # tau = 1.5 on average; half of 0.1/1 and of -0.64/2
        assert local.fednova(pair(), ZERO, [[0, 1]], [1, 2], 0.1)[0][0, 0] == pytest.approx(-0.165, abs=1e-15)

    def test_fedmgda_stands_still_between_opposite_clients(self) -> None:
        assert abs(local.fedmgda(pair(), ZERO, [[0, 1]], 1, 0.1)[0][0, 0]) < 1e-15

    def test_fedmgda_ignores_the_length_of_updates(self) -> None:
        problem = Quadratics([[[1.0, 0.0]], [[0.0, 1.0]]], [[1.0], [50.0]])
        assert np.allclose(local.fedmgda(problem, ZERO2, [[0, 1]], 1, 0.1)[0], [[0.5, 0.5]], atol=1e-15)


class TestOptimum:
    """Local steps drag FedAvg and FedProx to a point that is not the optimum; SCAFFOLD and FedDyn correct the drift."""

    problem = heterogeneous(0, 6, [5, 8, 9, 4, 7, 6], 4)
    start = np.zeros(4)

    def distance(self, trajectory: Array) -> float:
        return float(np.linalg.norm(trajectory[-1] - self.problem.optimum()))

    def test_full_participation(self) -> None:
        everyone = [list(range(6))] * 2000
        steps, rate = [1, 2, 4, 8, 3, 5], 0.05
        assert self.distance(local.scaffold(self.problem, self.start, everyone, steps, rate)[0]) < 1e-9
        assert self.distance(local.feddyn(self.problem, self.start, everyone, steps, rate, alpha=0.5)[0]) < 1e-9
        assert self.distance(server.fedavg(self.problem, self.start, everyone, steps, rate)[0]) > 0.1
        assert self.distance(local.fedprox(self.problem, self.start, everyone, steps, rate, mu=0.1)[0]) > 0.1

    def test_partial_participation(self) -> None:
        chosen = rounds(4, 6, 3, 1500)
        got, state = local.scaffold(self.problem, self.start, chosen, 4, 0.05)
        assert self.distance(got) < 1e-9
        assert np.allclose(state["c"], state["c_i"].mean(axis=0), atol=1e-12)
        got, state = local.feddyn(self.problem, self.start, chosen, 8, 0.1, alpha=0.5)
        assert self.distance(got) < 1e-9
        assert np.allclose(state["h"], state["h_i"].mean(axis=0), atol=1e-12)

    def test_at_the_optimum_the_control_variates_are_the_gradients(self) -> None:
        _, state = local.scaffold(self.problem, self.start, [list(range(6))] * 2000, 4, 0.05)
        want = [self.problem.grad(i, self.problem.optimum()) for i in range(6)]
        assert np.allclose(state["c_i"], want, atol=1e-9)
