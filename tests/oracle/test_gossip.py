"""The gossip references: published rho, one round by hand, and where the algorithms must coincide."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from oracle import gossip, server
from oracle.quadratic import Quadratics, heterogeneous
from oracle.tiny import ZERO, pair, rounds


class TestGossip:
    problem = heterogeneous(8, 8, [4, 5, 6, 7, 8, 9, 5, 6], 5)
    start = np.zeros(5)
    halves: tuple[list[int], list[int]] = ([0, 1, 2, 3, 4], [5, 6, 7])

    def test_ha_fed_by_hand(self) -> None:
        # one step to 0.1 and -0.4, both become -0.15; v = 0.0225, sqrt(0.0225 + 0.0175) = 0.2
        settings: dict[str, Any] = {"b1": 0.0, "b2": 0.0, "eps": 0.0175, "eta": 0.4}
        got, _ = gossip.ha_fed(pair(), ZERO, [[0, 1]], [gossip.ring(2)], [[0]], 1, 0.1, **settings)
        assert got[0, 0] == pytest.approx(-0.3, rel=1e-13)

    def test_idle_clients_wait_and_gossip_comes_every_second_step(self) -> None:
        # step 1: client 1 to -0.4; step 2: client 0 to 0.1; both -0.15; step 3: -0.035 and -0.49, no gossip
        settings: dict[str, Any] = {"b1": 0.0, "b2": 0.0, "eps": 1.0, "eta": 1.0, "every": 2}
        got, _ = gossip.ha_fed(
            pair(), ZERO, [[0, 1]], [gossip.ring(2)], [[0]], 3, 0.1, active=[[[1], [0], [0, 1]]], **settings
        )
        assert got[0, 0] == pytest.approx(-0.035 / math.sqrt(1 + 0.035**2), rel=1e-12)

    def test_unmixed_and_everyone_active_is_fedamsgrad(self) -> None:
        chosen = rounds(0, 8, 3, 15)
        want, _ = server.fedamsgrad(self.problem, self.start, chosen, 4, 0.1, eps=1e-4, eps_inside=True)
        got, _ = gossip.ha_fed(self.problem, self.start, [range(8)], [np.eye(8)], chosen, 4, 0.1, eps=1e-4)
        assert np.allclose(got, want, atol=1e-12)

    def test_complete_graph_is_gradient_descent_on_the_mean_whoever_reports(self) -> None:
        A = np.vstack([A / math.sqrt(n) for A, n in zip(self.problem.A, self.problem.samples, strict=True)])
        b = np.concatenate([b / math.sqrt(n) for b, n in zip(self.problem.b, self.problem.samples, strict=True)])
        scale = math.sqrt(len(b) / 8)
        merged = Quadratics([A * scale], [b * scale])
        complete = [np.full((8, 8), 1 / 8)]
        got, _ = gossip.ha_fed(self.problem, self.start, [range(8)], complete, [[3], [5], [0, 1]], 4, 0.1, eps=1e-4)
        want, _ = server.fedamsgrad(merged, self.start, [[0]] * 3, 4, 0.1, eps=1e-4, eps_inside=True)
        assert np.allclose(got, want, atol=1e-12)

    def test_cafga_is_ha_fed_with_the_same_clients_active(self) -> None:
        rng = np.random.default_rng(1)
        reporters = [[0, 2, 5, 6], [1, 4, 6, 7], [3, 7], [0, 1, 2, 5]] * 3
        active = [[rng.choice(8, 4, replace=False).tolist() for _ in range(5)] for _ in reporters]
        everyone = [[list(range(8))] * 5] * len(reporters)
        W = [gossip.ring(5), gossip.ring(3)]
        for computing in (active, everyone):
            cafga, _ = gossip.cafga(self.problem, self.start, self.halves, W, reporters, computing, 5, 0.1)
            ha_fed, _ = gossip.ha_fed(self.problem, self.start, self.halves, W, reporters, 5, 0.1, active=computing)
            assert np.allclose(cafga, ha_fed, atol=1e-12)

    def test_adapted_with_everyone_selected_is_ha_fed_on_rings(self) -> None:
        everyone = [list(range(8))] * 6
        W = [gossip.ring(5), gossip.ring(3)]
        want, _ = gossip.ha_fed(self.problem, self.start, self.halves, W, everyone, 4, 0.1)
        assert np.allclose(
            gossip.cafga_adapted(self.problem, self.start, self.halves, everyone, 4, 0.1)[0], want, atol=1e-12
        )

    def test_row_r_of_w_belongs_to_the_rth_member_and_says_whom_it_hears(self) -> None:
        # everyone adopts the model of the next in the list: of [2, 0, 1], client 2 reports what client 0 computed
        shift = np.roll(np.eye(3), 1, axis=1)
        settings: dict[str, Any] = {"b1": 0.0, "b2": 0.0, "eps": 1.0, "eta": 1.0}
        Delta = -0.1 * self.problem.grad(0, self.start)
        want = Delta / np.sqrt(Delta**2 + 1)
        got, _ = gossip.ha_fed(self.problem, self.start, [[2, 0, 1]], [shift], [[2]], 1, 0.1, **settings)
        assert np.allclose(got[0], want, atol=1e-14)
        got, _ = gossip.cafga(self.problem, self.start, [[2, 0, 1]], [shift], [[2]], [[[0]]], 1, 0.1, **settings)
        assert np.allclose(got[0], want, atol=1e-14)
        shift = np.roll(np.eye(8), 1, axis=1)
        got, _ = gossip.afga(self.problem, self.start, shift, [[7]], [[[0]]], 1, 0.1, **settings)
        assert np.allclose(got[0], want, atol=1e-14)

    def test_adapted_ring_is_in_ascending_order_whatever_the_order_of_the_lists(self) -> None:
        selected, ring = [[6, 0, 3, 5, 2]] * 3, [gossip.ring(5)]
        got, _ = gossip.cafga_adapted(self.problem, self.start, [[7, 3, 0, 6, 1, 5, 4, 2]], selected, 3, 0.1)
        want, _ = gossip.ha_fed(self.problem, self.start, [[0, 2, 3, 5, 6]], ring, selected, 3, 0.1)
        other, _ = gossip.ha_fed(self.problem, self.start, [[3, 0, 6, 5, 2]], ring, selected, 3, 0.1)
        assert np.allclose(got, want, atol=1e-12)
        assert np.abs(got - other).max() > 1e-4

    def test_adapted_never_asks_the_others(self) -> None:
        small = Quadratics([self.problem.A[i] for i in (1, 4, 6)], [self.problem.b[i] for i in (1, 4, 6)])
        got, _ = gossip.afga_adapted(self.problem, self.start, [[6, 1, 4]] * 4, 3, 0.1)
        want, _ = gossip.ha_fed(small, self.start, [range(3)], [gossip.ring(3)], [[0, 1, 2]] * 4, 3, 0.1)
        assert np.allclose(got, want, atol=1e-12)

    def test_dsgd_moves_the_mean_by_the_mean_gradient(self) -> None:
        got, state = gossip.dsgd(self.problem, self.start, gossip.ring(8), 6, 1, 0.1)
        _, before = gossip.dsgd(self.problem, self.start, gossip.ring(8), 5, 1, 0.1)
        step = np.mean([self.problem.grad(i, before["X"][i]) for i in range(8)], axis=0)
        assert np.allclose(got[5], got[4] - 0.1 * step, atol=1e-13)
        assert state["consensus"][-1] > 0.01

    def test_dsgd_on_a_complete_graph_reaches_the_optimum_and_on_a_ring_misses_it(self) -> None:
        full = np.full((8, 8), 1 / 8)
        complete, _ = gossip.dsgd(self.problem, self.start, full, 400, 5, 0.1, adapt_first=True)
        ring, _ = gossip.dsgd(self.problem, self.start, gossip.ring(8), 400, 5, 0.1, adapt_first=True)
        assert np.linalg.norm(complete[-1] - self.problem.optimum()) < 1e-8
        # combining first the last gradients are never mixed, so that even a complete graph misses it
        apart, _ = gossip.dsgd(self.problem, self.start, full, 400, 5, 0.1)
        assert np.linalg.norm(apart[-1] - self.problem.optimum()) > 1e-3
        assert np.linalg.norm(ring[-1] - self.problem.optimum()) > 1e-3

    def test_gossip_pga_averages_on_multiples_of_the_period_over_the_run(self) -> None:
        # two steps a round, H = 3: exact averages at steps 3 and 6, so rounds 3 and 6 end in consensus, no other does
        _, state = gossip.gossip_pga(self.problem, self.start, gossip.ring(8), 6, 2, 0.1, period=3)
        assert [c < 1e-12 for c in state["consensus"]] == [False, False, True, False, False, True]

    @pytest.mark.parametrize("bias_correction", [False, True])
    def test_a_lone_adam_client_is_fedadam_with_one_step_of_rate_one(self, bias_correction: bool) -> None:
        alone, W = Quadratics(self.problem.A[:1], self.problem.b[:1]), np.eye(1)
        settings: dict[str, Any] = {"eps": 1e-4, "bias_correction": bias_correction}
        chosen = [[0]] * 20
        want, _ = server.fedadam(alone, self.start, chosen, 1, 1.0, eta=0.05, **settings)
        assert np.allclose(gossip.dadam(alone, self.start, W, 20, 1, 0.05, **settings)[0], want, atol=1e-12)
        want, _ = server.fedamsgrad(alone, self.start, chosen, 1, 1.0, eta=0.05, **settings)
        local = gossip.dadam(alone, self.start, W, 20, 1, 0.05, amsgrad=True, **settings)
        assert np.allclose(local[0], want, atol=1e-12)

    def test_dadam_mixes_models_and_keeps_moments_private(self) -> None:
        _, state = gossip.dadam(self.problem, self.start, np.full((8, 8), 1 / 8), 1, 1, 0.1, adapt_first=True)
        want = [0.1 * self.problem.grad(i, self.start) for i in range(8)]
        assert np.allclose(state["m"], want, atol=1e-14)
        assert np.allclose(state["X"], state["X"][0], atol=1e-14)

    def test_combining_first_takes_the_gradient_before_the_mixing(self) -> None:
        W = gossip.ring(8)
        _, one = gossip.dsgd(self.problem, self.start, W, 1, 1, 0.1)
        G = np.array([self.problem.grad(i, self.start) for i in range(8)])
        assert np.allclose(one["X"], self.start - 0.1 * G, atol=1e-14)  # all begin alike: the first mixing does nothing
        _, other = gossip.dsgd(self.problem, self.start, W, 1, 1, 0.1, adapt_first=True)
        assert np.allclose(other["X"], W @ one["X"], atol=1e-14)
        # the two orders take the same gradients W apart: mixing the one gives the other, with gradients at mixed points
        _, two = gossip.dsgd(self.problem, self.start, W, 2, 1, 0.1)
        H = np.array([self.problem.grad(i, one["X"][i]) for i in range(8)])
        assert np.allclose(two["X"], W @ one["X"] - 0.1 * H, atol=1e-13)

    def test_the_second_moment_comes_to_the_mean_by_gossip(self) -> None:
        _, state = gossip.d_amsgrad(self.problem, self.start, gossip.ring(8), 10, 3, 0.01, eps=1e-3)
        assert np.allclose(state["u_half"].sum(axis=0), state["vhat"].sum(axis=0), atol=1e-12)
        apart = np.ptp(state["u_half"], axis=0) / np.ptp(state["vhat"], axis=0)
        assert apart.max() < 0.6

    def test_choco_with_everything_sent_is_gossip_and_with_nothing_sent_is_alone(self) -> None:
        want, _ = gossip.dsgd(self.problem, self.start, gossip.ring(8), 5, 3, 0.1, adapt_first=True)
        got, _ = gossip.choco_sgd(self.problem, self.start, gossip.ring(8), 5, 3, 0.1, gamma=1.0, compress=lambda x: x)
        assert np.allclose(got, want, atol=1e-12)
        _, alone = gossip.dsgd(self.problem, self.start, np.eye(8), 5, 3, 0.1)
        _, silent = gossip.choco_sgd(
            self.problem, self.start, gossip.ring(8), 5, 3, 0.1, gamma=1.0, compress=np.zeros_like
        )
        assert np.allclose(silent["X"], alone["X"], atol=1e-12)
