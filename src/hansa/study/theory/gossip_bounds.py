"""HA-Fed and AFGA: [HAFED] Theorems 5.6 and 5.8 with Psi and Phi_1 to Phi_4, [AFGA] Theorems 4.6 and D.3."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hansa.gossip.theory import drift
from hansa.study.theory.constants import UNKNOWN, ProblemConstants, divided, smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredBound:
    """The bound of min_t E||grad f(x_t)||^2 for HA-Fed in K clusters of n clients, m of each reporting.

    It is 8 C_0 ((f_0 - f*)/(eta eta_l tau T) + Psi/T + Phi_1 + Phi_2 + Phi_3 + Phi_4) with C_0 = sqrt(beta_2 eta_l^2
    tau^2 G^2 + eps). Theorem 5.6 (m = n) has no Phi_3 and Phi_4 and half of Phi_2; otherwise it is Theorem 5.8. The
    papers' C and C~ are "constants irrelevant to parameters" and not given: with 1, as here, Phi_1, Phi_3 and Phi_4 are
    orders. Theorem 5.6 prints the first limit of eta_l without L, Theorem 5.8 its counterpart with L.

    Args:
        clusters: K.
        size: n.
        reporters: m.
        rho: rho_max.
        steps: tau.
        rounds: T.
        server_lr: eta.
        local_lr: eta_l.
        b1: beta_1.
        b2: beta_2.
        eps: epsilon.
        problem: Constants of the assumptions; sigma_within is the root of the mean of sigma_k^2.
        alpha: alpha of Assumption 5.4.
        C: The constant C.
        C_tilde: The constant C~.

    >>> bound = ClusteredBound(clusters=4, size=8, reporters=2, rho=0.75, steps=48, rounds=500, server_lr=0.1,
    ...                        local_lr=0.1)
    >>> bound.theorem, bound.D
    ('Theorem 5.8', 4.0)
    """

    clusters: int
    size: int
    reporters: int
    rho: float
    steps: float
    rounds: float
    server_lr: float
    local_lr: float
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    problem: ProblemConstants = UNKNOWN
    alpha: float = 1.0
    C: float = 1.0
    C_tilde: float = 1.0

    @property
    def full(self) -> bool:
        """Whether all clients report."""
        return self.reporters == self.size

    @property
    def theorem(self) -> str:
        """The theorem that applies."""
        return "Theorem 5.6" if self.full else "Theorem 5.8"

    @property
    def D(self) -> float:
        """D_{tau,rho} = min{1/(1 - rho_max), tau}."""
        return math.nan if math.isnan(self.steps) else drift(self.rho, int(self.steps))

    @property
    def C_beta(self) -> float:
        """beta_1/(1 - beta_1)."""
        return self.b1 / (1 - self.b1)

    @property
    def C_beta_eta(self) -> float:
        """(C_beta^2 + 3) eta L + 2 sqrt(1 - beta_2) G."""
        return (self.C_beta**2 + 3) * self.server_lr * self.problem.L + 2 * math.sqrt(1 - self.b2) * self.problem.G

    def C_0(self, local_lr: float) -> float:
        """sqrt(beta_2 eta_l^2 tau^2 G^2 + eps)."""
        return math.sqrt(self.b2 * (local_lr * self.steps * self.problem.G) ** 2 + self.eps)

    @property
    def local_lr_formula(self) -> str:
        """The limit of eta_l as printed."""
        drifted = "C_0 tau (tau + rho_max^2 D_{tau,rho})"
        if self.full:
            return f"min{{eps^(1/4)/(alpha sqrt(C {drifted})), eps/(2 tau C_0 C_{{beta,eta}})}}"
        return (
            f"min{{1/(4 C_0 C_{{beta,eta}} (tau - 1)), eps^(1/4)/(2 alpha L sqrt(C~ {drifted})), "
            "1/(128 alpha^2 C~ C_0 C_{beta,eta} rho_max^2 D_{tau,rho}) ((n - m)/(m (n - 1)) + 1/tau^2)^-1}"
        )

    def local_lr_limits(self, local_lr: float) -> dict[str, float]:
        """The terms of the minimum that bounds eta_l; C_0 in them depends on eta_l."""
        C_0, tau, squared = self.C_0(local_lr), self.steps, self.rho**2 * self.D
        root = self.eps**0.25
        drifted = math.sqrt(C_0 * tau * (tau + squared))
        if self.full:
            return {
                "by drift": divided(root, self.alpha * math.sqrt(self.C) * drifted),
                "by eps and G": divided(self.eps, 2 * tau * C_0 * self.C_beta_eta),
            }
        m, n = self.reporters, self.size
        gossiping = 128 * self.alpha**2 * self.C_tilde * C_0 * self.C_beta_eta * squared
        return {
            "by steps": divided(1.0, 4 * C_0 * self.C_beta_eta * (tau - 1)) if tau != 1 else math.inf,
            "by drift": divided(root, 2 * self.alpha * self.problem.L * math.sqrt(self.C_tilde) * drifted),
            "by rho": math.inf if self.rho == 0 else divided(1.0, gossiping * ((n - m) / (m * (n - 1)) + 1 / tau**2)),
        }

    @property
    def local_lr_limit(self) -> float:
        """The largest eta_l with eta_l <= limit(eta_l), up to C and C~; the limit falls as eta_l grows."""
        low, high = 0.0, smallest(self.local_lr_limits(0.0).values())
        if math.isnan(high) or math.isinf(high):
            return high
        for _ in range(200):
            middle = (low + high) / 2
            if middle <= smallest(self.local_lr_limits(middle).values()):
                low = middle
            else:
                high = middle
        return low

    @property
    def psi(self) -> float:
        """C_beta G^2 d/sqrt(eps) + 2 C_beta^2 eta eta_l tau L G^2 d/eps."""
        size = self.problem.G**2 * self.problem.d
        rates = self.server_lr * self.local_lr * self.steps * self.problem.L
        return self.C_beta * size / math.sqrt(self.eps) + 2 * self.C_beta**2 * rates * size / self.eps

    @property
    def phi_1(self) -> float:
        """(C L^2 eta_l^2/(4 sqrt(eps))) [tau^2 sigma_g^2 + tau rho^2 D sigma_L^2 + tau sigma^2 (1/n + rho^2)]."""
        p, tau, rho = self.problem, self.steps, self.rho
        inside = (tau * p.sigma_between) ** 2 + tau * p.sigma_l**2 * (1 / self.size + rho**2)
        if rho:
            inside += tau * rho**2 * self.D * p.sigma_within**2
        return self.C * (p.L * self.local_lr) ** 2 / (4 * math.sqrt(self.eps)) * inside

    @property
    def phi_2(self) -> float:
        """C_{beta,eta} [1 + ((n - m)/m) rho^2] eta_l sigma^2/(eps N); half of it if all report."""
        N = self.clusters * self.size
        if self.full:
            return self.C_beta_eta * self.local_lr / (2 * self.eps * N) * self.problem.sigma_l**2
        more = 1 + (self.size - self.reporters) / self.reporters * self.rho**2
        return self.C_beta_eta * more * self.local_lr / (self.eps * N) * self.problem.sigma_l**2

    @property
    def _gossip_variances(self) -> float:
        """D rho^2 [sigma_g^2 + sigma_L^2 + sigma^2 + D sigma^2/(tau^2 n)]."""
        p = self.problem
        if self.rho == 0:
            return 0.0
        noise = p.sigma_l**2 * (1 + self.D / (self.steps**2 * self.size))
        return self.D * self.rho**2 * (p.sigma_between**2 + p.sigma_within**2 + noise)

    @property
    def phi_3(self) -> float:
        """C~ C_{beta,eta} ((n - m)/(m (n - 1))) eta_l D rho^2 [...]; 0 if all report or rho = 0."""
        if self.full or self.rho == 0:
            return 0.0
        share = (self.size - self.reporters) / (self.reporters * (self.size - 1))
        return self.C_tilde * self.C_beta_eta * share * self.local_lr * self._gossip_variances

    @property
    def phi_4(self) -> float:
        """C~ C_{beta,eta} eta_l^3 L^2 D rho^2 [...]; 0 if all report or rho = 0."""
        if self.full or self.rho == 0:
            return 0.0
        return self.C_tilde * self.C_beta_eta * self.local_lr**3 * self.problem.L**2 * self._gossip_variances

    @property
    def bound(self) -> float:
        """The right-hand side of the theorem, up to C and C~."""
        started = self.problem.gap / (self.server_lr * self.local_lr * self.steps * self.rounds)
        lasting = self.phi_1 + self.phi_2 + self.phi_3 + self.phi_4
        return 8 * self.C_0(self.local_lr) * (started + self.psi / self.rounds + lasting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledBound:
    """The orders of the terms of [AFGA] Theorem 4.6 (one cluster) and D.3, each inside an O() of unknown constant.

    ``leading`` is [f_0 - f* + L (sigma^2 + sigma_g^2)]/sqrt(R I M); in K clusters [f_0 - f* + L (sigma^2 + sigma_l^2 +
    sigma_c^2 + sigma^2/K)]/sqrt(R I m). ``second`` is [G^2 + L^2 (1 + rho^2) sigma_g^2 + rho^2 sigma^2/I]/R; in
    clusters [G^2 + L^2 (sigma_c^2 + (1 + rho^2) sigma_l^2) + rho^2 sigma^2/I]/R. A third term is of order R^(-3/2).

    Args:
        clusters: K.
        reporters: m, which is M in one cluster.
        rho: rho_max.
        steps: I.
        rounds: R.
        problem: Constants; sigma_l is the paper's sigma, sigma_within its sigma_l, sigma_between sigma_c.

    >>> ResampledBound(clusters=1, reporters=5, rho=0.5, steps=24, rounds=500).theorem
    'Theorem 4.6'
    """

    clusters: int
    reporters: int
    rho: float
    steps: float
    rounds: float
    problem: ProblemConstants = UNKNOWN

    @property
    def theorem(self) -> str:
        """The theorem that applies."""
        return "Theorem 4.6" if self.clusters == 1 else "Theorem D.3"

    @property
    def leading(self) -> float:
        """The term of order 1/sqrt(R I m)."""
        p = self.problem
        if self.clusters == 1:
            variances = p.sigma_l**2 + p.sigma_g**2
        else:
            variances = p.sigma_l**2 * (1 + 1 / self.clusters) + p.sigma_within**2 + p.sigma_between**2
        return (p.gap + p.L * variances) / math.sqrt(self.rounds * self.steps * self.reporters)

    @property
    def second(self) -> float:
        """The term of order 1/R."""
        p, rho = self.problem, self.rho
        if self.clusters == 1:
            differences = (1 + rho**2) * p.sigma_g**2
        else:
            differences = p.sigma_between**2 + (1 + rho**2) * p.sigma_within**2
        return (p.G**2 + p.L**2 * differences + rho**2 / self.steps * p.sigma_l**2) / self.rounds
