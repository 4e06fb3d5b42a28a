"""The typed theorems: values computed by hand, and where one theorem must become another."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oracle import theory

EASY: dict[str, Any] = {"b1": 0.5, "b2": 0.5, "L": 1.0, "G": 2.0, "d": 3.0, "gap": 5.0, "eta": 1.0}
"""C1 = 1; sqrt(2 (1 - b2)) = 1."""


def test_fedams_by_hand() -> None:
    # bracket: (3 + 1) 1 + 2 * 1 * 2 = 8; K = 2, m = 4, eps = 2: sqrt(2 eps) = 2
    limit, psi, phi, bound = theory.cams_full(2, 4, 10, eta_l=0.5, eps=2.0, sl=1.0, sg=1.0, **EASY)
    assert limit == pytest.approx(min(1 / 16, 2 / (2 * math.sqrt(0.5 * 4 * 4 + 2) * 8)))  # 0.0395...
    assert psi == pytest.approx(1 * 4 * 3 / math.sqrt(2) + 2 * 0.5 * 2 * 4 * 3 / 2)  # 12/sqrt 2 + 12
    assert phi == pytest.approx(5 * 0.25 * 2 / 2 * 13 + 8 * 0.5 / 16)  # 16.25 + 0.25
    assert bound == pytest.approx(4 * math.sqrt(0.5 * 0.25 * 4 * 4 + 2) * (5 / 10 + psi / 10 + phi))  # root is 2


def test_partial_participation_by_hand() -> None:
    # n = 2 of m = 4: the sampling term is 8 * 0.5 * 2/(2*2*3*2) [15*4*0.25*13 + 6] = (1/3) * 201
    _, psi, phi, bound = theory.cams_partial(2, 4, 2, 10, eta_l=0.5, eps=2.0, sl=1.0, sg=1.0, **EASY)
    assert phi == pytest.approx(16.25 + 8 * 0.5 / 8 + 201 / 3)
    assert bound == pytest.approx(8 * 2 * (0.5 + psi / 10 + phi))


def test_compression_by_hand() -> None:
    # q^2 = 1/2: 2q/(1 - q^2) = 2 sqrt 2; 4 (q + 0)^2/(1/4) = 8; 4 (3/2)^3/(1/4) = 54
    limit, psi, phi, _ = theory.cams_compressed(
        2, 4, 10, eta_l=0.5, eps=2.0, sl=1.0, sg=1.0, q=math.sqrt(0.5), gamma=0.0, **EASY
    )
    c1 = 1 + 2 * math.sqrt(2)
    assert psi == pytest.approx(c1 * 12 / math.sqrt(2) + c1**2 * 12)
    assert phi == pytest.approx(16.25 + (3 + 2 * 9 + 4) * 0.5 / 16)
    assert limit == pytest.approx(2 / (2 * math.sqrt(54 * 0.5 * 16 + 2) * 25))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_more_participants_lower_phi_and_all_of_them_give_that_of_full_participation(n: int) -> None:
    common: dict[str, Any] = {**EASY, "eta_l": 0.1, "eps": 1e-3, "sl": 1.0, "sg": 2.0}
    some, more = (theory.cams_partial(4, 8, count, 100, **common)[2] for count in (n, n + 1))
    assert more < some
    assert theory.cams_partial(4, 8, 8, 100, **common)[1:3] == pytest.approx(theory.cams_full(4, 8, 100, **common)[1:3])


def test_no_compression_and_no_momentum_give_fedams() -> None:
    common: dict[str, Any] = {**EASY, "b1": 0.0, "eta_l": 0.1, "eps": 1e-3, "sl": 1.0, "sg": 2.0}
    plain, sent = theory.cams_full(4, 8, 100, **common), theory.cams_compressed(4, 8, 100, q=0.0, gamma=0.0, **common)
    assert sent[1:3] == pytest.approx(plain[1:3])
    no_second_moment = {**common, "b2": 0.0}  # 4 beta_2 K^2 G^2 is the only difference left
    assert theory.cams_compressed(4, 8, 100, q=0.0, gamma=0.0, **no_second_moment) == pytest.approx(
        theory.cams_full(4, 8, 100, **no_second_moment)
    )


def test_the_corollarys_rates_give_its_order_and_the_other_reading_of_eta_l_does_not() -> None:
    """With T = (K m) c the bound times sqrt(T K m) stays within a constant as K grows."""

    def scaled(K: int, m: int, local: Any) -> float:
        T = 100 * K * m
        common: dict[str, Any] = {**EASY, "b1": 0.0, "eta": math.sqrt(K * m), "eps": 1.0, "sl": 1.0, "sg": 1.0}
        return theory.cams_full(K, m, T, eta_l=local(T, K), **common)[3] * math.sqrt(T * K * m)

    right = [scaled(K, 10, lambda T, K: 1 / (math.sqrt(T) * K)) for K in (10, 1000, 100_000)]
    wrong = [scaled(K, 10, lambda T, K: 1 / math.sqrt(T * K)) for K in (10, 1000, 100_000)]
    assert max(right) < 2 * min(right)
    assert wrong[-1] > 100 * wrong[0]


def test_ha_fed_by_hand() -> None:
    # rho = 1/2, tau = 4: D = 2; c = 1; cbe = 4 + 2 sqrt(1/2) 2; eps = 1, eta_l = 1/2, n = 3, m = 1, K = 2
    cbe = 4 + 4 * math.sqrt(0.5)
    limits, psi, phis, bound = theory.hafed(
        2, 3, 1, 0.5, 4, 10, eta_l=0.5, eps=1.0, s=1.0, within=2.0, between=1.0, **EASY
    )
    c0 = math.sqrt(0.5 * 0.25 * 16 * 4 + 1)  # 3
    assert c0 == pytest.approx(3)
    assert limits == pytest.approx(
        [1 / (12 * cbe * 3), 1 / (2 * math.sqrt(12 * 4.5)), 2 / (128 * 3 * cbe) / (1 + 1 / 16)]
    )
    assert psi == pytest.approx(12 + 2 * 0.5 * 4 * 12)
    tail = 0.5 * (1 + 4 + 1 + 2 / 48)
    want = (
        0.25 / 4 * (16 + 4 * 0.25 * 2 * 4 + 4 * (1 / 3 + 0.25)),
        cbe * (1 + 2 * 0.25) * 0.5 / 6,
        cbe * 1 * 0.5 * tail,
        cbe * 0.125 * tail,
    )
    assert phis == pytest.approx(want)
    assert bound == pytest.approx(24 * (5 / (0.5 * 4 * 10) + psi / 10 + sum(want)))


def test_a_complete_graph_makes_partial_ha_fed_the_full_one_up_to_the_half_of_phi_2() -> None:
    """Remark 5.9."""
    common: dict[str, Any] = {**EASY, "eta_l": 0.1, "eps": 1e-3, "s": 1.0, "within": 2.0, "between": 1.0}
    _, psi, partial, _ = theory.hafed(2, 8, 2, 0.0, 4, 10, **common)
    _, psi_full, full, _ = theory.hafed(2, 8, 8, 0.0, 4, 10, **common)
    assert psi == psi_full
    assert partial[2:] == (0.0, 0.0)
    assert partial[0] == full[0]
    assert partial[1] == pytest.approx(2 * full[1])


def test_afga_by_hand_and_its_clusters_as_one() -> None:
    assert theory.afga(2, 4, 0.5, 9, 100, 2.0, 3.0, 1.0, 2.0, 1.0, 5.0) == pytest.approx(
        ((5 + 2 * (1 + 4 + 1 + 0.5)) / 60, (9 + 4 * (1 + 1.25 * 4) + 0.25 / 9) / 100)
    )


def test_aware_by_hand() -> None:
    # K = (2, 4), eta_l = 0.01: Phi = 30 * 0.01 * 2 * 3 = 1.8; K~ = 3; drift = 0.05 (1 + 24*4 + 18*1) + 1.8
    hetero, drift, gap, rho, stationary, factors = theory.aware(
        (2, 4), (0.5, 0.5), (0.5, 0.5), 0.01, 0.5, 0.5, 0.1, 1.0, 2.0, (1.0, 3.0), 1.0, 0.5, 2.0
    )
    assert hetero == pytest.approx(1.8)
    assert drift == pytest.approx(0.05 * (1 + 96 + 18) + 1.8)
    assert gap == pytest.approx(0.0625 * 0.01 * drift)
    assert rho == pytest.approx(1 - 18 * 0.25 * 0.1 * 0.5 * math.sqrt(2) / 2)
    assert factors == (0.0, 2.0)  # lambda~ = lambda
    assert stationary == pytest.approx(0.25 * 0.1 * 0.5 * math.sqrt(2) / (2 * rho) * math.sqrt(0.05 * 97 + 1.8))
