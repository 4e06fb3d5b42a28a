"""The exact min-norm point and FedAWARE: closed forms, exhaustive search, optimality conditions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from oracle import aware, minnorm, server
from oracle.quadratic import Array, heterogeneous
from oracle.tiny import rounds


class TestMinNorm:
    @pytest.mark.parametrize("seed", range(10))
    def test_two_vectors_in_closed_form(self, seed: int) -> None:
        a, b = np.random.default_rng(seed).normal(size=(2, 3)) + 0.5
        share = np.clip(b @ (b - a) / ((a - b) @ (a - b)), 0.0, 1.0)
        assert np.allclose(minnorm.simplex_weights(np.array([a, b])), [share, 1 - share], atol=1e-13)

    @pytest.mark.parametrize("seed", range(20))
    def test_nnls_agrees_with_trying_every_support(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n, d = int(rng.integers(2, 6)), int(rng.integers(2, 8))
        P = rng.normal(size=(n, d)) + rng.uniform(0, 1.5) * rng.normal(size=d)
        best = np.inf
        for size in range(1, n + 1):
            for support in itertools.combinations(range(n), size):
                rows = P[list(support)]
                # stationarity and sum one: [G 1; 1' 0] (lambda, nu) = (0, 1)
                kkt = np.block([[rows @ rows.T, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
                lam = np.linalg.lstsq(kkt, np.append(np.zeros(size), 1.0), rcond=None)[0][:size]
                if lam.min() >= 0 and abs(lam.sum() - 1) < 1e-9:
                    best = min(best, float(np.linalg.norm(lam @ rows)))
        assert np.linalg.norm(minnorm.simplex_weights(P) @ P) == pytest.approx(best, abs=1e-10)

    @pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
    @pytest.mark.parametrize(("n", "d"), [(1, 4), (5, 40), (60, 80), (60, 20)])
    def test_every_vector_reaches_at_least_as_far_along_the_point(self, n: int, d: int, scale: float) -> None:
        P = (np.random.default_rng(n + d).normal(size=(n, d)) + 0.2) * scale
        point = minnorm.simplex_weights(P) @ P
        assert (P @ point).min() >= point @ point - 1e-12 * scale**2

    @pytest.mark.parametrize(
        "rows", [[[0, 0]], [[1, 0], [0, 0]], [[1, 1], [-1, -1]], [[2, 0], [2, 0]], [[0, 0], [0, 0]]]
    )
    def test_degenerate(self, rows: list[list[float]]) -> None:
        P = np.array(rows, dtype=float)
        want = [2.0, 0.0] if P.min() == 0 and P.max() == 2 else [0.0, 0.0]
        assert np.allclose(minnorm.simplex_weights(P) @ P, want, atol=1e-14)

    @pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.2, 0.6])
    def test_box_weights_beat_every_feasible_point(self, epsilon: float) -> None:
        rng = np.random.default_rng(7)
        for n in (2, 3, 5):
            P = rng.normal(size=(n, 6)) * rng.uniform(0.1, 3.0, size=(n, 1))
            lam = minnorm.box_weights(P, epsilon)
            low, high = max(0.0, 1 / n - epsilon), min(1.0, 1 / n + epsilon)
            assert minnorm.optimal(P, lam, low, high, 1e-10)
            other = rng.dirichlet(np.ones(n), size=20000)
            other = other[(other.min(axis=1) >= low) & (other.max(axis=1) <= high)]
            lengths = np.linalg.norm(np.vstack([other, np.full((1, n), 1 / n)]) @ P, axis=1)
            assert np.linalg.norm(lam @ P) <= lengths.min() + 1e-12

    def test_a_wide_box_is_the_simplex(self) -> None:
        P = np.random.default_rng(3).normal(size=(4, 7)) + 0.5
        assert np.allclose(minnorm.box_weights(P, 1.0) @ P, minnorm.simplex_weights(P) @ P, atol=1e-12)


class TestAware:
    problem = heterogeneous(9, 4, [6, 14, 9, 4], 12)
    start = np.zeros(12)

    def delta(self, i: int, x: Array, steps: int) -> Array:
        return self.problem.descend(i, x, steps, 0.1) - x

    @pytest.mark.parametrize("normalize", [False, True])
    def test_three_rounds_with_two_clients_in_closed_form(self, normalize: bool) -> None:
        got, state = aware.fedaware(
            self.problem, self.start, [[0], [1], [0]], [1, 2, 3, 4], 0.1, alpha=0.25, normalize=normalize, eta=0.5
        )

        def shape(row: Array) -> Array:
            return row / np.linalg.norm(row) if normalize else row

        def nearest(a: Array, b: Array) -> Array:
            share = np.clip(b @ (b - a) / ((a - b) @ (a - b)), 0.0, 1.0)
            return share * a + (1 - share) * b

        m_0 = self.delta(0, self.start, 1)
        x = self.start + 0.5 * shape(m_0)
        assert np.allclose(got[0], x, atol=1e-13)
        m_1 = self.delta(1, x, 2)
        x = x + 0.5 * nearest(shape(m_0), shape(m_1))
        assert np.allclose(got[1], x, atol=1e-13)
        m_0 = 0.25 * m_0 + 0.75 * self.delta(0, x, 1)
        x = x + 0.5 * nearest(shape(m_0), shape(m_1))
        assert np.allclose(got[2], x, atol=1e-13)
        assert np.allclose(state["rows"][0], m_0, atol=1e-13)

    def test_explore_averages_until_the_round_that_meets_the_last_client(self) -> None:
        chosen = [[0, 1], [1, 2], [2, 3], [0, 1]]
        got, _ = aware.fedaware(self.problem, self.start, chosen, 2, 0.1, explore=True)
        average, _ = server.fedavg(self.problem, self.start, chosen, 2, 0.1)
        assert np.allclose(got[:2], average[:2], atol=1e-14)
        assert np.linalg.norm(got[2] - average[2]) > 1e-3

    def test_the_step_helps_every_row(self) -> None:
        _, state = aware.fedaware(self.problem, self.start, rounds(3, 4, 2, 12), [1, 2, 3, 4], 0.1)
        rows, d = np.array([state["rows"][i] for i in sorted(state["rows"])]), state["direction"]
        assert (rows @ d).min() >= d @ d * (1 - 1e-9)

    def test_projected_yogi_steps_along_the_direction(self) -> None:
        chosen = [[0, 1, 2, 3]]
        got, _ = aware.fedaware_yogi(self.problem, self.start, chosen, 2, 0.1)
        d, _ = aware.fedaware(self.problem, self.start, chosen, 2, 0.1)
        s, _ = server.fedyogi(self.problem, self.start, chosen, 2, 0.1, eta=0.1, eps=1e-4)
        along = got[0] @ d[0] / np.linalg.norm(d[0])
        assert along == pytest.approx(s[0] @ d[0] / np.linalg.norm(d[0]), rel=1e-12)
        assert np.linalg.norm(got[0]) == pytest.approx(abs(along), rel=1e-12)

    def test_diversity_by_hand(self) -> None:
        assert aware.diversity(np.array([[3.0, 4.0], [3.0, 4.0]])) == pytest.approx(1.0)
        assert aware.diversity(np.array([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(math.sqrt(2.0))
        assert aware.diversity(np.array([[1.0, 0.0], [-1.0, 0.0]])) == math.inf
        assert aware.diversity(np.array([[1.0, 0.0], [0.0, 3.0]]), found=np.array([0.9, 0.1])) == pytest.approx(
            math.sqrt(5.0 / 0.9)
        )
        assert aware.chi_square(np.array([1.0, 0.0, 0.0]), np.full(3, 1 / 3)) == pytest.approx(9.0)
        assert aware.chi_square(np.array([0.25, 0.75]), np.array([0.25, 0.75])) == pytest.approx(2.0)

    def test_the_authors_solver_by_hand(self) -> None:
        """Four corners of a square whose centre is not zero: the best pair is an edge, and the edge is the answer."""
        P = np.array([[1.0, -1.0], [1.0, 1.0], [3.0, -1.0], [3.0, 1.0]])
        assert np.allclose(minnorm.authors_weights(P) @ P, [1.0, 0.0], atol=1e-3)
        assert np.allclose(minnorm.authors_weights(P[:2]), [0.5, 0.5])
        assert np.allclose(minnorm.authors_weights(np.array([[1.0, 0.0], [2.0, 0.0]])), [0.999, 0.001])
