"""FedAMS and FedCAMS: [CAMS] Theorems 4.4, 4.9, 4.18 and B.2 with Corollaries 4.6, 4.11 and 4.20."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hansa.gossip.theory import ParameterOrders
from hansa.study.theory.constants import UNKNOWN, ProblemConstants, divided, smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBound:
    """The bound of min_t E||grad f(x_t)||^2 for FedAMS, and with ``compressed`` for FedCAMS.

    It is a factor times ((f_0 - f*)/(eta eta_l K T) + Psi/T + Phi). The theorem is 4.4 (all m clients take part), 4.9
    (n of m), 4.18 (compressed, all), or B.2 (compressed, n of m). Theorem 4.9 of the main text prints eta^2 in Phi; its
    proof (A.32) has eta_l^2, which is used here.

    Args:
        clients: m.
        participants: n.
        steps: K.
        rounds: T.
        server_lr: eta.
        local_lr: eta_l.
        b1: beta_1.
        b2: beta_2.
        eps: epsilon.
        problem: Constants of the assumptions.
        compressed: Whether updates are compressed with error feedback.
        q: Contraction of the compressor, ||C(x) - x|| <= q ||x|| (Assumption 4.14).
        gamma: Compression dissimilarity (Assumption 4.17).

    >>> bound = AdaptiveBound(clients=10, participants=10, steps=5, rounds=100, server_lr=1.0, local_lr=0.01)
    >>> bound.theorem, round(bound.C1, 6)
    ('Theorem 4.4', 9.0)
    """

    clients: int
    participants: int
    steps: float
    rounds: float
    server_lr: float
    local_lr: float
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-3
    problem: ProblemConstants = UNKNOWN
    compressed: bool = False
    q: float = 0.0
    gamma: float = 0.0

    @property
    def full(self) -> bool:
        """Whether all clients take part."""
        return self.participants == self.clients

    @property
    def theorem(self) -> str:
        """The theorem that applies."""
        if self.compressed:
            return "Theorem 4.18" if self.full else "Theorem B.2"
        return "Theorem 4.4" if self.full else "Theorem 4.9"

    @property
    def C1(self) -> float:
        """beta_1/(1 - beta_1), plus 2q/(1 - q^2) with compression."""
        return self.b1 / (1 - self.b1) + (divided(2 * self.q, 1 - self.q**2) if self.compressed and self.q else 0.0)

    @property
    def C2(self) -> float:
        """beta_1^2/(1 - beta_1)^2 + 4 (q + gamma)^2/(1 - q^2)^2 (Theorem 4.18)."""
        apart = 4 * (self.q + self.gamma) ** 2
        return (self.b1 / (1 - self.b1)) ** 2 + (divided(apart, (1 - self.q**2) ** 2) if apart else 0.0)

    @property
    def _growth(self) -> float:
        """4 (1 + q^2)^3/(1 - q^2)^2 with compression, 1 without: the factor of beta_2 K^2 G^2."""
        return divided(4 * (1 + self.q**2) ** 3, (1 - self.q**2) ** 2) if self.compressed else 1.0

    @property
    def _drift(self) -> float:
        """The bracket that multiplies the variances: (3 + C) eta L + 2 sqrt(2 (1 - beta_2)) G."""
        share = 2 * self.C2 if self.compressed else self.C1**2
        return (3 + share) * self.server_lr * self.problem.L + 2 * math.sqrt(2 * (1 - self.b2)) * self.problem.G

    @property
    def _partial_drift(self) -> float:
        """The bracket of Theorem B.2: eta L + sqrt(2 (1 - beta_2)) G."""
        return self.server_lr * self.problem.L + math.sqrt(2 * (1 - self.b2)) * self.problem.G

    @property
    def local_lr_formula(self) -> str:
        """The limit of eta_l as printed."""
        root = (
            "sqrt(4 beta_2 (1 + q^2)^3 (1 - q^2)^-2 K^2 G^2 + eps)" if self.compressed else "sqrt(beta_2 K^2 G^2 + eps)"
        )
        share = "2 C2" if self.compressed else "C1^2"
        bracket = f"[(3 + {share}) eta L + 2 sqrt(2 (1 - beta_2)) G]"
        if self.full:
            return f"min{{1/(8 K L), eps/(K {root} {bracket})}}"
        if self.compressed:
            bracket = "(eta L + sqrt(2 (1 - beta_2)) G)"
        return f"min{{1/(8 K L), n (m - 1) eps/({48 if self.compressed else 24} m (n - 1) K {root} {bracket})}}"

    @property
    def local_lr_limits(self) -> dict[str, float]:
        """The terms of the minimum that bounds eta_l."""
        K, m, n = self.steps, self.clients, self.participants
        root = K * math.sqrt(self._growth * self.b2 * K**2 * self.problem.G**2 + self.eps)
        first = divided(1.0, 8 * K * self.problem.L)
        if self.full:
            return {"1/(8 K L)": first, "by eps and G": divided(self.eps, root * self._drift)}
        if self.compressed:
            share, drift = 48.0, self._partial_drift
        else:
            share, drift = 24.0, self._drift
        return {"1/(8 K L)": first, "by eps and G": divided(n * (m - 1) * self.eps, share * m * (n - 1) * root * drift)}

    @property
    def local_lr_limit(self) -> float:
        """The largest eta_l of the theorem."""
        return smallest(self.local_lr_limits.values())

    @property
    def factor(self) -> float:
        """4 (all clients) or 8 (partial participation), times sqrt(beta_2 eta_l^2 K^2 G^2 + eps), with growth by q."""
        inside = self._growth * self.b2 * (self.local_lr * self.steps * self.problem.G) ** 2 + self.eps
        return (4 if self.full else 8) * math.sqrt(inside)

    @property
    def psi(self) -> float:
        """C1 G^2 d/sqrt(eps) + 2 C1^2 eta eta_l K L G^2 d/eps."""
        size = self.problem.G**2 * self.problem.d
        rates = self.server_lr * self.local_lr * self.steps * self.problem.L
        return self.C1 * size / math.sqrt(self.eps) + 2 * self.C1**2 * rates * size / self.eps

    @property
    def phi(self) -> float:
        """The terms that do not vanish with T at fixed rates."""
        p, K, m, n, lr = self.problem, self.steps, self.clients, self.participants, self.local_lr
        variances = p.sigma_l**2 + 6 * K * p.sigma_g**2
        drifted = 5 * lr**2 * K * p.L**2 / math.sqrt(2 * self.eps) * variances
        if self.full:
            return drifted + self._drift * lr / (2 * m * self.eps) * p.sigma_l**2
        sampling = 15 * (K * p.L * lr) ** 2 * variances + 3 * K * p.sigma_g**2
        if not self.compressed:
            noise = self._drift * lr / (2 * n * self.eps) * p.sigma_l**2
            return drifted + noise + self._drift * lr * (m - n) / (2 * n * (m - 1) * self.eps) * sampling
        stale = self.C1 * self.server_lr * lr * K * p.L * p.G**2 / self.eps
        noise = self._partial_drift * lr / (n * self.eps) * p.sigma_l**2
        return stale + drifted + noise + self._partial_drift * lr * (m - n) / (n * (m - 1) * self.eps) * sampling

    @property
    def bound(self) -> float:
        """The right-hand side of the theorem."""
        started = self.problem.gap / (self.server_lr * self.local_lr * self.steps * self.rounds)
        return self.factor * (started + self.psi / self.rounds + self.phi)


def adaptive_orders(
    clients: int, participants: int, steps: float | None, rounds: int | None, q: float = 0.0, compressed: bool = False
) -> tuple[str, ParameterOrders] | None:
    """Return the corollary that applies and its orders; None for compression at partial participation, which has none.

    Corollary 4.6 (all m clients): T >= K m, eta = Theta(sqrt(K m)), eta_l = Theta(1/(sqrt(T) K)), rate
    O(1/sqrt(T K m)); 4.11 (n of m): eta = Theta(sqrt(K n)), rate O(sqrt(K)/sqrt(T n)); 4.20 (compressed, all): as 4.6,
    with rate O(1/((1 - q) sqrt(T K m))) where the dependence on q is kept (Remark 4.22). The root of eta_l covers T
    alone: with 1/sqrt(T K), T >= K m would not give the rate.

    Args:
        clients: m.
        participants: n.
        steps: K, or None if it is not known.
        rounds: T, or None if it is not known.
        q: Contraction of the compressor.
        compressed: Whether updates are compressed.

    >>> name, orders = adaptive_orders(100, 10, 5, 500)
    >>> name, orders.rate, round(orders.rate_scale, 4)
    ('Corollary 4.11', 'O(sqrt(K)/sqrt(T n))', 0.0316)
    """
    full = clients == participants
    if compressed and not full:
        return None
    local = None if steps is None or rounds is None else 1 / (math.sqrt(rounds) * steps)
    server = None if steps is None else math.sqrt(steps * participants)
    if not full:
        scale = None if steps is None or rounds is None else math.sqrt(steps / (rounds * participants))
        rates = ("Theta(sqrt(K n))", "Theta(1/(sqrt(T) K))", "O(sqrt(K)/sqrt(T n))")
        return "Corollary 4.11", ParameterOrders("any T", *rates, None, server, local, scale)
    if steps is None or rounds is None:
        scale = None
    else:
        scale = divided(1.0, (1 - q) * math.sqrt(rounds * steps * clients))
    rate = "O(1/((1 - q) sqrt(T K m)))" if compressed else "O(1/sqrt(T K m))"
    least = None if steps is None else math.ceil(steps * clients)
    rates = ("Theta(sqrt(K m))", "Theta(1/(sqrt(T) K))", rate)
    name = "Corollary 4.20" if compressed else "Corollary 4.6"
    return name, ParameterOrders("T >= K m", *rates, least, server, local, scale)
