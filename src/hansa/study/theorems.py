"""The theorems of the four papers as a table: the conditions, orders and bound of each.

Orders omit constants: only their ratios are meaningful. Unknown numbers are NaN, as is every value that needs them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import fsum, inf, isfinite, isinf, isnan, nan, sqrt
from typing import Any, Literal, TypeAlias

from hansa.core.errors import HansaError, invalid_argument, suggestion

Family: TypeAlias = Literal["adaptive", "clustered", "resampled", "aware"]
"""The theorems that apply: FedAMS and FedCAMS, HA-Fed, AFGA and CAFGA, FedAWARE."""
SLACK = 1e-9  # rho and its bound are often equal up to rounding (hypercube of 8: 1/2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConstants:
    """The constants of the papers' assumptions.

    Args:
        L: Smoothness of every client's loss ([CAMS] 4.1, [HAFED] 5.1, [AFGA] 4.1, [AWARE] 2.1).
        G: Bound of the norm of a stochastic gradient ([CAMS] 4.2, [HAFED] 5.2, [AFGA] 4.3).
        sigma_l: Deviation of a stochastic gradient from its client's; [HAFED] and [AFGA] call it sigma.
        sigma_g: Deviation of the clients' gradients from their mean ([CAMS] 4.3, [AFGA] 4.4, [AWARE] 3.1).
        sigma_within: Deviation of the clients' gradients from the mean of their cluster, the root of the mean of
            sigma_k^2 ([HAFED] 5.4, [AFGA] D.1).
        sigma_between: Deviation of the clusters' gradients from the global one: sigma_g of [HAFED] 5.4 and sigma_c of
            [AFGA] D.1, at alpha = 1.
        gap: f_0 - f*, the initial loss above its minimum.
        gradient_norm: Norm of the global gradient.
        gradient_scale: sqrt(sum lambda_i ||grad f_i||^2), the G~ of [AWARE] Theorem 4.1.
        d: Number of parameters.
        zeta: ||grad f_i - grad f||^2 of every client ([AWARE] Corollary 3.2).

    >>> ProblemConstants(L=2.0).G
    nan
    """

    L: float = nan
    G: float = nan
    sigma_l: float = nan
    sigma_g: float = nan
    sigma_within: float = nan
    sigma_between: float = nan
    gap: float = nan
    gradient_norm: float = nan
    gradient_scale: float = nan
    d: float = nan
    zeta: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in CONSTANTS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0 or isinf(value):
                raise invalid_argument("ProblemConstants", name, value, "a number of at least 0, or NaN if unknown")

    def known(self) -> dict[str, float]:
        """Return the known numbers by name."""
        return {name: getattr(self, name) for name in CONSTANTS if not isnan(getattr(self, name))}

    def updated(self, values: Mapping[str, float]) -> ProblemConstants:
        """Return the constants with some replaced."""
        for name in (name for name in values if name not in CONSTANTS):
            raise HansaError(f"{name}: not a constant of the theorems. {suggestion(name, CONSTANTS)}")
        return replace(self, **values)  # type: ignore[arg-type]


CONSTANTS = tuple(item.name for item in fields(ProblemConstants) if item.name != "zeta")
"""The names of the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TheorySetting:
    """The facts of an algorithm over a population that the theorems use; unknown numbers are NaN."""

    method: str = ""
    family: Family | None = None
    clients: int
    participants: int
    steps: tuple[int, ...] = ()
    """K_i of every client, or () if they depend on data that is not available."""
    rounds: float = nan
    server_lr: float = nan
    local_lr: float = nan
    b1: float = nan
    b2: float = nan
    eps: float = nan
    compressor: str = ""
    q: float = 0.0
    """Contraction of the compressor, ||C(x) - x|| <= q ||x|| ([CAMS] 4.14)."""
    gamma: float = 0.0
    """Compression dissimilarity ([CAMS] 4.17)."""
    sizes: tuple[int, ...] = ()
    reporters: tuple[int, ...] = ()
    cluster_rho: tuple[float, ...] = ()
    alpha: float = nan
    """Decay rate of FedAWARE's momenta."""
    weights: tuple[float, ...] = ()
    """lambda, the weights of the clients in the objective."""
    chi_square: float = nan
    """sum lambda~_i^2/lambda_i^2 of a run."""
    diversity: float = nan
    """Surrogate diversity D~ of a run."""
    deviations: tuple[str, ...] = ()
    """The properties of the algorithm that the theorems do not cover."""

    @property
    def full(self) -> bool:
        """Whether all clients take part."""
        return self.participants == self.clients

    @property
    def max_steps(self) -> float:
        """The largest K_i: the theorems of all papers but [AWARE] assume equal ones."""
        return max(self.steps) if self.steps else nan

    @property
    def rho_max(self) -> float:
        """The largest rho_k, or NaN without gossip."""
        return max(self.cluster_rho, default=nan)


Values: TypeAlias = dict[str, float]
Relation: TypeAlias = tuple[str, float, Literal["<=", "<", ">=", ">"], str, float]
"""A condition of a theorem: a name and its value, a relation, and a name and its value."""
Order: TypeAlias = tuple[str, Callable[[TheorySetting], float]]
"""An order as printed, and the value of its argument."""


@dataclass(frozen=True, slots=True)
class Theorem:
    """A row of the table.

    Args:
        name: Its paper and number.
        family: The methods that it covers.
        applies: Whether it covers a setting of these methods.
        conditions: Its conditions on a setting and on its values.
        orders: The scaling of the server rate and of the local rate, and the rate of convergence that follows.
        values: The terms of its bound.
        needs: The constants that the terms need.
        note: A remark on its statement.
    """

    name: str
    family: Family
    applies: Callable[[TheorySetting], bool] = lambda s: True
    conditions: Callable[[TheorySetting, Values], list[Relation]] = lambda s, values: []
    orders: tuple[Order, ...] = ()
    values: Callable[[TheorySetting, ProblemConstants], Values] = lambda s, p: {}
    needs: tuple[str, ...] = ()
    note: str = ""

    def result(self, setting: TheorySetting, problem: ProblemConstants) -> TheoremResult:
        """Return the theorem with the numbers of a setting."""
        values = self.values(setting, problem)
        unknown = [*([] if setting.steps else ["local steps"]), *(["rounds"] if isnan(setting.rounds) else [])]
        orders = zip(("server rate", "local rate", "rate"), self.orders, strict=False)
        return TheoremResult(
            name=self.name,
            conditions=dict(map(_check_condition, self.conditions(setting, values))),
            orders={name: (text, value_of(setting)) for name, (text, value_of) in orders},
            values=values,
            needs=(*(unknown if values else ()), *(name for name in self.needs if isnan(getattr(problem, name)))),
            note=self.note,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoremResult:
    """A theorem with the numbers of a setting; numbers that need an unknown one are NaN."""

    name: str
    conditions: dict[str, bool | None]
    """Each condition in words, with whether it holds; None if unknown."""
    orders: dict[str, tuple[str, float]]
    """Each order as printed, with the value of its argument."""
    values: Values
    needs: tuple[str, ...]
    """The names that the unknown values need."""
    note: str

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a heading and a text, for a table of two columns."""
        yield self.name, ""
        for text, holds in self.conditions.items():
            yield "  condition", f"{text}: {'not known' if holds is None else 'holds' if holds else 'does not hold'}"
        for name, (text, argument) in self.orders.items():
            yield f"  {name}", text if isnan(argument) else f"{text}, with {argument:.3g} inside"
        unknown = [name for name, value in self.values.items() if isnan(value)]
        yield from ((f"  {name}", f"{value:.6g}") for name, value in self.values.items() if name not in unknown)
        if unknown:
            yield "  not known", ", ".join(unknown) + (f": needs {', '.join(self.needs)}" if self.needs else "")
        if self.note:
            yield "", self.note


def theorem_results(setting: TheorySetting, problem: ProblemConstants) -> tuple[TheoremResult, ...]:
    """Return the theorems that cover a setting, with its numbers."""
    rows = (row for row in THEOREMS if row.family == setting.family and row.applies(setting))
    return tuple(row.result(setting, problem) for row in rows)


def topology_results(
    sizes: Sequence[int], reporters: Sequence[int], rho: Sequence[float], steps: int | None, rounds: int | None
) -> list[TheoremResult]:
    """Return the conditions and orders of the theorems on topologies: [HAFED] Corollary 5.11, [AFGA] 4.6 or D.3.

    Args:
        sizes: Clients of each cluster.
        reporters: Reporters of each cluster.
        rho: rho of each cluster.
        steps: Local steps per round, if known.
        rounds: Number of rounds, if known.
    """
    setting = TheorySetting(
        clients=sum(sizes), participants=sum(reporters), sizes=tuple(sizes), reporters=tuple(reporters),
        rounds=nan if rounds is None else rounds,
        cluster_rho=tuple(rho), steps=() if steps is None else (steps,) * sum(sizes),
    )  # fmt: skip
    rows = [row for row in THEOREMS if row.orders and row.family in ("clustered", "resampled") and row.applies(setting)]
    return [replace(row, values=lambda s, p: {}, needs=(), note="").result(setting, ProblemConstants()) for row in rows]


# The terms of the bounds, in the papers' symbols.


def adaptive_bound(s: TheorySetting, p: ProblemConstants) -> Values:
    """The bound of min_t E||grad f(x_t)||^2 for FedAMS and, with a compressor, for FedCAMS.

    It is a factor times ((f_0 - f*)/(eta eta_l K T) + Psi/T + Phi). Theorem 4.9 of the main text prints eta^2 in Phi;
    its proof (A.32) has eta_l^2, which is used here.

    >>> setting = TheorySetting(clients=10, participants=10, steps=(5,) * 10, server_lr=1.0, local_lr=0.01, b1=0.9,
    ...                         b2=0.99, eps=1e-3)
    >>> round(adaptive_bound(setting, ProblemConstants())["C1"], 6)
    9.0
    """
    m, n, K, T, eta, lr, q = s.clients, s.participants, s.max_steps, s.rounds, s.server_lr, s.local_lr, s.q
    L, G, b = p.L, p.G, s.b1 / (1 - s.b1)
    C1 = b + (_divide(2 * q, 1 - q**2) if s.compressor and q else 0.0)
    dissimilarity = 4 * (q + s.gamma) ** 2
    C2 = b**2 + (_divide(dissimilarity, (1 - q**2) ** 2) if dissimilarity else 0.0)
    growth = _divide(4 * (1 + q**2) ** 3, (1 - q**2) ** 2) if s.compressor else 1.0
    drift = (3 + (2 * C2 if s.compressor else C1**2)) * eta * L + 2 * sqrt(2 * (1 - s.b2)) * G
    halves, divisor, residual = 2, 24.0, 0.0
    if s.compressor and not s.full:  # Theorem B.2
        drift = eta * L + sqrt(2 * (1 - s.b2)) * G
        halves, divisor, residual = 1, 48.0, C1 * eta * lr * K * L * G**2 / s.eps
    root = K * sqrt(growth * s.b2 * K**2 * G**2 + s.eps)
    if s.full:
        limit = _divide(s.eps, root * drift)
    else:
        limit = _divide(n * (m - 1) * s.eps, divisor * m * (n - 1) * root * drift)
    size = G**2 * p.d
    psi = C1 * size / sqrt(s.eps) + 2 * C1**2 * (eta * lr * K * L) * size / s.eps
    variances = p.sigma_l**2 + 6 * K * p.sigma_g**2
    phi = residual + 5 * lr**2 * K * L**2 / sqrt(2 * s.eps) * variances
    phi += drift * lr / (halves * n * s.eps) * p.sigma_l**2
    if not s.full:
        sampling = 15 * (K * L * lr) ** 2 * variances + 3 * K * p.sigma_g**2
        phi += drift * lr * (m - n) / (halves * n * (m - 1) * s.eps) * sampling
    factor = (4 if s.full else 8) * sqrt(growth * s.b2 * (lr * K * G) ** 2 + s.eps)
    return {
        "C1": C1,
        **({"C2": C2} if s.compressor and s.full else {}),
        "largest eta_l": _minimum(_divide(1.0, 8 * K * L), limit),
        "Psi": psi,
        "Phi": phi,
        "bound": factor * (p.gap / (eta * lr * K * T) + psi / T + phi),
    }


def _clustered_terms(s: TheorySetting, p: ProblemConstants) -> tuple[int, int, float, float, float, float]:
    """n, m, tau, rho, D = min{1/(1 - rho), tau} and C_{beta,eta} = (C_beta^2 + 3) eta L + 2 sqrt(1 - beta_2) G."""
    tau, rho = s.max_steps, s.rho_max
    D = tau if rho >= 1 else _minimum(1 / (1 - rho), tau)
    spread = ((s.b1 / (1 - s.b1)) ** 2 + 3) * s.server_lr * p.L + 2 * sqrt(1 - s.b2) * p.G
    return min(s.sizes), min(s.reporters), tau, rho, D, spread


def clustered_limits(s: TheorySetting, p: ProblemConstants, local_lr: float) -> tuple[float, ...]:
    """Return the terms of the minimum that bounds HA-Fed's eta_l; C_0 in them depends on eta_l.

    Args:
        s: The setting.
        p: The constants.
        local_lr: eta_l.
    """
    n, m, tau, rho, D, spread = _clustered_terms(s, p)
    C_0 = sqrt(s.b2 * (local_lr * tau * p.G) ** 2 + s.eps)
    drifted, root = sqrt(C_0 * tau * (tau + rho**2 * D)), s.eps**0.25
    if m == n:
        return _divide(root, drifted), _divide(s.eps, 2 * tau * C_0 * spread)
    return (
        inf if tau == 1 else _divide(1.0, 4 * C_0 * spread * (tau - 1)),
        _divide(root, 2 * p.L * drifted),
        inf if rho == 0 else _divide(1.0, 128 * C_0 * spread * rho**2 * D * ((n - m) / (m * (n - 1)) + 1 / tau**2)),
    )


def clustered_bound(s: TheorySetting, p: ProblemConstants) -> Values:
    """The bound of min_t E||grad f(x_t)||^2 for HA-Fed in K clusters of n clients, m of each reporting.

    It is 8 C_0 ((f_0 - f*)/(eta eta_l tau T) + Psi/T + Phi_1 + Phi_2 + Phi_3 + Phi_4) with C_0 = sqrt(beta_2 eta_l^2
    tau^2 G^2 + eps). Theorem 5.6 (m = n) has no Phi_3 and Phi_4 and half of Phi_2; otherwise it is Theorem 5.8.

    >>> setting = TheorySetting(clients=32, participants=8, sizes=(8,) * 4, reporters=(2,) * 4, cluster_rho=(0.75,) * 4,
    ...                         steps=(48,) * 32, b1=0.9, b2=0.99, eps=1e-8, server_lr=0.1, local_lr=0.1)
    >>> clustered_bound(setting, ProblemConstants())["D_{tau,rho}"]
    4.0
    """
    n, m, tau, rho, D, spread = _clustered_terms(s, p)
    T, eta, lr, L, N = s.rounds, s.server_lr, s.local_lr, p.L, len(s.sizes) * n
    low, high = 0.0, _minimum(*clustered_limits(s, p, 0.0))  # bisection: the limit falls as eta_l grows
    for _ in range(200 if isfinite(high) else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if middle <= _minimum(*clustered_limits(s, p, middle)) else (low, middle)
    b, size = s.b1 / (1 - s.b1), p.G**2 * p.d
    psi = b * size / sqrt(s.eps) + 2 * b**2 * (eta * lr * tau * L) * size / s.eps
    drift = (tau * p.sigma_between) ** 2 + tau * p.sigma_l**2 * (1 / n + rho**2)
    drift += tau * rho**2 * D * p.sigma_within**2 if rho else 0.0
    phi_1 = (L * lr) ** 2 / (4 * sqrt(s.eps)) * drift
    if m == n:
        phi_2, phi_3, phi_4 = spread * lr / (2 * s.eps * N) * p.sigma_l**2, 0.0, 0.0
    else:
        phi_2 = spread * (1 + (n - m) / m * rho**2) * lr / (s.eps * N) * p.sigma_l**2
        noise = p.sigma_l**2 * (1 + D / (tau**2 * n))
        gossip = D * rho**2 * (p.sigma_between**2 + p.sigma_within**2 + noise) if rho else 0.0
        phi_3 = spread * ((n - m) / (m * (n - 1))) * lr * gossip if rho else 0.0
        phi_4 = spread * lr**3 * L**2 * gossip if rho else 0.0
    factor = 8 * sqrt(s.b2 * (lr * tau * p.G) ** 2 + s.eps)
    initial_gap = p.gap / (eta * lr * tau * T)
    return {
        "D_{tau,rho}": D, "largest eta_l": low if isfinite(high) else high, "Psi": psi, "Phi_1": phi_1, "Phi_2": phi_2,
        "Phi_3": phi_3, "Phi_4": phi_4, "bound": factor * (initial_gap + psi / T + (phi_1 + phi_2 + phi_3 + phi_4)),
    }  # fmt: skip


def resampled_bound(s: TheorySetting, p: ProblemConstants) -> Values:
    """The orders of the terms of AFGA's bound, each inside an O() with an unknown constant.

    The first is [f_0 - f* + L (sigma^2 + sigma_g^2)]/sqrt(R I M), in K clusters [f_0 - f* + L (sigma^2 + sigma_l^2 +
    sigma_c^2 + sigma^2/K)]/sqrt(R I m). The second is [G^2 + L^2 (1 + rho^2) sigma_g^2 + rho^2 sigma^2/I]/R, in
    clusters [G^2 + L^2 (sigma_c^2 + (1 + rho^2) sigma_l^2) + rho^2 sigma^2/I]/R. A third term is of order R^(-3/2).
    """
    K, m, steps, rounds, rho = len(s.sizes), min(s.reporters), s.max_steps, s.rounds, s.rho_max
    if K == 1:
        variances, differences = p.sigma_l**2 + p.sigma_g**2, (1 + rho**2) * p.sigma_g**2
    else:
        variances = p.sigma_l**2 * (1 + 1 / K) + p.sigma_within**2 + p.sigma_between**2
        differences = p.sigma_between**2 + (1 + rho**2) * p.sigma_within**2
    return {
        "inside O(1/sqrt(R I m))": (p.gap + p.L * variances) / sqrt(rounds * steps * m),
        "inside O(1/R)": (p.G**2 + p.L**2 * differences + rho**2 / steps * p.sigma_l**2) / rounds,
    }


def aware_bound(s: TheorySetting, p: ProblemConstants) -> Values:
    """The local drift of clients with unequal steps, the gap of the momenta, and the bounds of FedAWARE's theorems.

    K~ = sum lambda_i K_i; Phi_Hetero = sum_i 30 eta_l (K_i - K_min) zeta_i, as printed without lambda_i; beta =
    (1 - alpha) p with the chance p that a client takes part; N + chi^2 - 2 chi = sum (lambda~_i - lambda_i)^2/
    lambda_i^2, where chi is N for uniform lambda.

    >>> setting = TheorySetting(clients=2, participants=1, steps=(2, 4), weights=(0.5, 0.5), alpha=0.5)
    >>> aware_bound(setting, ProblemConstants())["K~"]
    3.0
    """
    steps: Sequence[float] = s.steps or (nan,) * s.clients
    lr, K_min = s.local_lr, min(steps)
    K_tilde = fsum(weight * count for weight, count in zip(s.weights, steps, strict=True))
    if max(steps) == K_min:
        hetero = 0.0
    elif len(p.zeta) != len(steps):
        hetero = nan
    else:
        excess = ((count - K_min) * zeta for count, zeta in zip(steps, p.zeta, strict=True))
        hetero = 30 * lr * fsum(excess)
    sigma_square = 5 * lr * (p.sigma_l**2 + 6 * K_min**2 * p.sigma_g**2)
    drift = sigma_square + 30 * lr * K_tilde * p.gradient_norm**2 + hetero
    beta = (1 - s.alpha) * (s.participants / s.clients)
    chi = float(s.clients) if len(set(s.weights)) == 1 else nan
    weight_gap = len(s.weights) + s.chi_square - 2 * chi
    weight_gap = 0.0 if weight_gap < 0 else weight_gap  # below 0 by rounding only; NaN stays NaN
    slope = beta * p.L * p.gradient_scale * sqrt(s.chi_square) / s.diversity
    rho_t = 1 - sqrt(weight_gap) - weight_gap - 6 * K_tilde * slope
    stationary = inf if rho_t <= 0 else slope * sqrt(sigma_square + hetero) / rho_t
    return {
        "K~": K_tilde, "K_min": K_min, "Phi_Hetero": hetero, "drift": drift, "beta = (1 - alpha) p": beta,
        "momentum gap": beta**2 * p.L**2 * drift, "chi^2": s.chi_square, "rho^t": rho_t,
        "bound without vanishing terms": stationary,
        "factor of sigma_g^2": 2 * weight_gap, "factor of ||grad f||^2": 2 * (1 + weight_gap),
        "bound at this model": 2 * weight_gap * p.sigma_g**2 + 2 * (1 + weight_gap) * p.gradient_norm**2,
    }  # fmt: skip


def _rate_limit(s: TheorySetting, values: Values) -> list[Relation]:
    return [("eta_l", s.local_lr, "<=", "its limit", values["largest eta_l"])]


def _enough_rounds(s: TheorySetting, values: Values) -> list[Relation]:
    return [("T", s.rounds, ">=", "K m", s.max_steps * s.clients)]


def _density(s: TheorySetting, values: Values) -> list[Relation]:
    unreported = max(n - m for n, m in zip(s.sizes, s.reporters, strict=True))
    return [
        ("rho_max", s.rho_max, "<=", "1/(2 sqrt(n - m))", _divide(1, 2 * sqrt(unreported))),
        ("K", len(s.sizes), "<", "n", min(s.sizes)),
        ("T", s.rounds, ">", "tau M", s.max_steps * sum(s.reporters)),
    ]


def _resampled_density(s: TheorySetting, values: Values) -> list[Relation]:
    bound = min(m / (m + n) for n, m in zip(s.sizes, s.reporters, strict=True))
    return [
        ("rho_max", s.rho_max, "<=", "M/(M + N)" if len(s.sizes) == 1 else "m/(m + n)", bound),
        ("R", s.rounds, ">=", "I M", s.max_steps * sum(s.reporters)),
    ]


def _volume(s: TheorySetting) -> float:
    """Return the rounds times the local steps."""
    return s.rounds * s.max_steps


_SERVER: Order = ("Theta(sqrt(K m))", lambda s: sqrt(s.max_steps * s.clients))
_LOCAL: Order = ("Theta(1/(sqrt(T) K))", lambda s: 1 / (sqrt(s.rounds) * s.max_steps))
"""The root of eta_l covers T alone: with 1/sqrt(T K), T >= K m would not give the rate."""
_ALL_REPORTERS: tuple[Order, ...] = (
    ("Theta(sqrt(tau M))", lambda s: sqrt(s.max_steps * sum(s.reporters))),
    ("Theta(1/sqrt(T tau))", lambda s: 1 / sqrt(_volume(s))),
    ("O(1/sqrt(T tau M))", lambda s: 1 / sqrt(_volume(s) * sum(s.reporters))),
)


def _resampled_orders(n: str, m: str) -> tuple[Order, ...]:
    def server(s: TheorySetting) -> float:
        return max(size / sqrt(count) for size, count in zip(s.sizes, s.reporters, strict=True)) * sqrt(s.max_steps)

    return (
        (f"Theta({n} sqrt(I/{m}))", server),
        ("Theta(1/sqrt(R I^2))", _LOCAL[1]),
        (f"O(1/sqrt(R I {m}))", lambda s: 1 / sqrt(_volume(s) * min(s.reporters))),
    )


def _aware(*names: str) -> Callable[[TheorySetting, ProblemConstants], Values]:
    return lambda s, p: {name: value for name, value in aware_bound(s, p).items() if name in names}


_ROOT, _ROOT_Q = "K sqrt(beta_2 K^2 G^2 + eps)", "K sqrt(4 beta_2 (1 + q^2)^3 (1 - q^2)^-2 K^2 G^2 + eps)"
_CAMS = ("L", "G", "sigma_l", "sigma_g", "gap", "d")
_HAFED = ("L", "G", "sigma_l", "sigma_within", "sigma_between", "gap", "d")
_UNSTATED = "the paper states neither the constants in O() nor its constraints on eta_l"

THEOREMS: tuple[Theorem, ...] = (
    Theorem(
        "[CAMS] Corollary 4.6", "adaptive", lambda s: s.full and not s.compressor, _enough_rounds,
        (_SERVER, _LOCAL, ("O(1/sqrt(T K m))", lambda s: 1 / sqrt(_volume(s) * s.clients))),
    ),
    Theorem(
        "[CAMS] Corollary 4.11", "adaptive", lambda s: not s.full and not s.compressor,
        orders=(
            ("Theta(sqrt(K n))", lambda s: sqrt(s.max_steps * s.participants)), _LOCAL,
            ("O(sqrt(K)/sqrt(T n))", lambda s: sqrt(s.max_steps / (s.rounds * s.participants))),
        ),
    ),
    Theorem(
        "[CAMS] Corollary 4.20", "adaptive", lambda s: s.full and bool(s.compressor), _enough_rounds,
        (_SERVER, _LOCAL,
         ("O(1/((1 - q) sqrt(T K m)))", lambda s: _divide(1.0, (1 - s.q) * sqrt(_volume(s) * s.clients)))),
        note="the dependence on q is kept (Remark 4.22)",
    ),
    Theorem(
        "[CAMS] Theorem 4.4", "adaptive", lambda s: s.full and not s.compressor, _rate_limit, (), adaptive_bound, _CAMS,
        f"the limit is min{{1/(8 K L), eps/({_ROOT} [(3 + C1^2) eta L + 2 sqrt(2 (1 - beta_2)) G])}}",
    ),
    Theorem(
        "[CAMS] Theorem 4.9", "adaptive", lambda s: not s.full and not s.compressor, _rate_limit, (), adaptive_bound,
        _CAMS, f"the limit is min{{1/(8 K L), n (m - 1) eps/(24 m (n - 1) {_ROOT} [(3 + C1^2) eta L + 2 sqrt(2 (1 - "
        "beta_2)) G])}",
    ),
    Theorem(
        "[CAMS] Theorem 4.18", "adaptive", lambda s: s.full and bool(s.compressor), _rate_limit, (), adaptive_bound,
        _CAMS, f"the limit is min{{1/(8 K L), eps/({_ROOT_Q} [(3 + 2 C2) eta L + 2 sqrt(2 (1 - beta_2)) G])}}",
    ),
    Theorem(
        "[CAMS] Theorem B.2", "adaptive", lambda s: not s.full and bool(s.compressor), _rate_limit, (), adaptive_bound,
        _CAMS, f"the limit is min{{1/(8 K L), n (m - 1) eps/(48 m (n - 1) {_ROOT_Q} (eta L + sqrt(2 (1 - beta_2)) "
        "G))}; the paper states no rate for compressed updates at partial participation",
    ),
    Theorem("[HAFED] Corollary 5.11", "clustered", conditions=_density, orders=_ALL_REPORTERS),
    Theorem(
        "[HAFED] Theorem 5.6", "clustered", lambda s: min(s.sizes) == min(s.reporters), _rate_limit, (),
        clustered_bound, _HAFED, "the limit is min{eps^(1/4)/(alpha sqrt(C C_0 tau (tau + rho_max^2 D_{tau,rho}))), "
        "eps/(2 tau C_0 C_{beta,eta})}, printed without L; the paper gives no C: it is 1 here",
    ),
    Theorem(
        "[HAFED] Theorem 5.8", "clustered", lambda s: min(s.sizes) != min(s.reporters), _rate_limit, (),
        clustered_bound, _HAFED, "the limit is min{1/(4 C_0 C_{beta,eta} (tau - 1)), eps^(1/4)/(2 alpha L sqrt(C~ C_0 "
        "tau (tau + rho_max^2 D_{tau,rho}))), 1/(128 alpha^2 C~ C_0 C_{beta,eta} rho_max^2 D_{tau,rho}) ((n - m)/(m (n "
        "- 1)) + 1/tau^2)^-1}; the paper gives no C~: it is 1 here",
    ),
    Theorem(
        "[AFGA] Theorem 4.6", "resampled", lambda s: len(s.sizes) == 1, _resampled_density, _resampled_orders("N", "M"),
        resampled_bound, ("L", "G", "sigma_l", "sigma_g", "gap"), _UNSTATED,
    ),
    Theorem(
        "[AFGA] Theorem D.3", "resampled", lambda s: len(s.sizes) > 1, _resampled_density, _resampled_orders("n", "m"),
        resampled_bound, ("L", "G", "sigma_l", "sigma_within", "sigma_between", "gap"), _UNSTATED,
    ),
    Theorem(
        "[AWARE] Corollary 3.2", "aware",
        conditions=lambda s, values: [("eta_l", s.local_lr, "<=", "1/max K_i", 1 / s.max_steps)],
        values=_aware("K~", "K_min", "Phi_Hetero", "drift"), needs=("sigma_l", "sigma_g", "gradient_norm"),
    ),
    Theorem(
        "[AWARE] Lemma 4.1", "aware", values=_aware("beta = (1 - alpha) p", "momentum gap"),
        needs=("L", "sigma_l", "sigma_g", "gradient_norm"),
    ),
    Theorem(
        "[AWARE] Theorem 4.1", "aware",
        conditions=lambda s, values: [("rho^t", values["rho^t"], ">", "", 0)],
        values=_aware("chi^2", "rho^t", "bound without vanishing terms"),
        needs=("L", "sigma_l", "sigma_g", "gradient_scale"),
        note="vacuous unless rho^t > 0; chi^2 and D~ are recorded by runs",
    ),
    Theorem(
        "[AWARE] Theorem 4.2", "aware",
        values=_aware("factor of sigma_g^2", "factor of ||grad f||^2", "bound at this model"),
        needs=("sigma_g", "gradient_norm"), note="chi^2 is recorded by runs",
    ),
)  # fmt: skip
"""The theorems of the four papers."""


_HOLDS = {"<=": lambda a, b: a <= b + SLACK, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def _check_condition(relation: Relation) -> tuple[str, bool | None]:
    """Return a condition in words, with whether it holds; None if a side is unknown."""
    left, value, sign, right, bound = relation
    holds = None if isnan(value) or isnan(bound) else _HOLDS[sign](value, bound)
    return f"{_with_name(left, value)} {sign} {_with_name(right, bound)}", holds


def _with_name(name: str, value: float) -> str:
    return name if isnan(value) else f"{name} = {format_fact(value)}" if name else format_fact(value)


def format_fact(value: Any) -> str:
    """Return a number or another fact as text."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _minimum(*terms: float) -> float:
    """Return the smallest term, or NaN if one is unknown."""
    return nan if any(isnan(term) for term in terms) else min(terms)


def _divide(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; infinite for a zero denominator, which imposes no condition."""
    return inf if denominator == 0 else numerator / denominator
