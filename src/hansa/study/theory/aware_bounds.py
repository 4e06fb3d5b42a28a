"""FedAWARE: [AWARE] Corollary 3.2, Lemma 4.1, Theorems 4.1 and 4.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hansa.study.theory.constants import UNKNOWN, ProblemConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class AwareBound:
    """The local drift of clients with unequal steps, the gap of the momenta, and the bounds of both theorems.

    Args:
        steps: K_i of every client.
        weights: lambda, the weights of the clients in the objective.
        local_lr: eta_l.
        alpha: Decay rate of the momenta.
        participation: p, the chance that a client takes part in a round.
        problem: Constants of the assumptions, with zeta.
        chi_square: sum lambda~_i^2/lambda_i^2.
        chi: sum lambda~_i/lambda_i; N for uniform lambda.
        diversity: Surrogate diversity D~.

    >>> bound = AwareBound(steps=(2, 4), weights=(0.5, 0.5), local_lr=0.1, alpha=0.5, participation=0.5)
    >>> bound.K_tilde, bound.K_min, bound.beta
    (3.0, 2, 0.25)
    """

    steps: Sequence[int]
    weights: Sequence[float]
    local_lr: float
    alpha: float
    participation: float
    problem: ProblemConstants = UNKNOWN
    chi_square: float = math.nan
    chi: float = math.nan
    diversity: float = math.nan

    @property
    def K_tilde(self) -> float:
        """K~ = sum lambda_i K_i."""
        return math.fsum(weight * count for weight, count in zip(self.weights, self.steps, strict=True))

    @property
    def K_min(self) -> int:
        """The smallest K_i."""
        return min(self.steps)

    @property
    def beta(self) -> float:
        """beta = (1 - alpha) p."""
        return (1 - self.alpha) * self.participation

    @property
    def local_lr_limit(self) -> float:
        """1/K_i at the largest K_i (Corollary 3.2)."""
        return 1 / max(self.steps)

    @property
    def phi_hetero(self) -> float:
        """Phi_Hetero = sum_i 30 eta_l (K_i - K_min) zeta_i, as printed without lambda_i; 0 for equal steps."""
        if max(self.steps) == self.K_min:
            return 0.0
        if len(self.problem.zeta) != len(self.steps):
            return math.nan
        more = ((count - self.K_min) * zeta for count, zeta in zip(self.steps, self.problem.zeta, strict=True))
        return 30 * self.local_lr * math.fsum(more)

    @property
    def sigma_square(self) -> float:
        """sigma^2 = 5 eta_l (sigma_l^2 + 6 K_min^2 sigma_g^2) (Theorem 4.1)."""
        return 5 * self.local_lr * (self.problem.sigma_l**2 + 6 * self.K_min**2 * self.problem.sigma_g**2)

    @property
    def drift(self) -> float:
        """The right-hand side of Corollary 3.2: sigma^2 + 30 eta_l K~ ||grad f||^2 + Phi_Hetero."""
        moving = 30 * self.local_lr * self.K_tilde * self.problem.gradient_norm**2
        return self.sigma_square + moving + self.phi_hetero

    @property
    def momentum_gap(self) -> float:
        """Lemma 4.1: sum lambda_i E||m_i - grad f_i||^2 <= beta^2 L^2 times the drift."""
        return self.beta**2 * self.problem.L**2 * self.drift

    @property
    def weight_gap(self) -> float:
        """N + chi^2 - 2 chi = sum (lambda~_i - lambda_i)^2/lambda_i^2; 0 if lambda~ = lambda."""
        apart = len(self.weights) + self.chi_square - 2 * self.chi
        return 0.0 if apart < 0 else apart  # below 0 by rounding only; NaN stays NaN

    @property
    def rho_t(self) -> float:
        """The coefficient rho^t of Theorem 4.1, which must be above 0 for the theorem to say anything."""
        last = 6 * self.K_tilde * self._slope
        return 1 - math.sqrt(self.weight_gap) - self.weight_gap - last

    @property
    def _slope(self) -> float:
        """beta L G~ sqrt(chi^2)/D~."""
        return self.beta * self.problem.L * self.problem.gradient_scale * math.sqrt(self.chi_square) / self.diversity

    @property
    def stationary_bound(self) -> float:
        """Theorem 4.1 without its vanishing terms: beta L G~ sqrt(chi^2) sqrt(sigma^2 + Phi_Hetero)/(rho^t D~).

        Infinite if rho^t is not above 0.
        """
        if math.isnan(self.rho_t):
            return math.nan
        spread = math.sqrt(self.sigma_square + self.phi_hetero)
        return self._slope * spread / self.rho_t if self.rho_t > 0 else math.inf

    def surrogate_bound(self, mean_square: float) -> float:
        """Theorem 4.2: 2 (N + chi^2 - 2 chi) sigma_g^2 + 2 (1 + N + chi^2 - 2 chi) times the mean of ||grad f(x_t)||^2.

        Args:
            mean_square: The mean of ||grad f(x_t)||^2 over the rounds, or a bound of it.
        """
        return 2 * self.weight_gap * self.problem.sigma_g**2 + 2 * (1 + self.weight_gap) * mean_square
