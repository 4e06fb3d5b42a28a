"""`hansa.theory`: what the papers prove about an algorithm, with its own numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer
from hansa.core.types import MODEL
from hansa.gossip.theory import AfgaTheorem, Corollary, ParameterOrders
from hansa.gossip.topology import Topology
from hansa.study.theory.adaptive_bounds import AdaptiveBound, adaptive_orders
from hansa.study.theory.aware_bounds import AwareBound
from hansa.study.theory.constants import ProblemConstants
from hansa.study.theory.estimation import estimate_constants
from hansa.study.theory.gossip_bounds import ClusteredBound, ResampledBound
from hansa.study.theory.setting import TheorySetting, read_setting, require_family

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MEASURED = ("q", "gamma", "chi_square", "surrogate_diversity")
"""Columns of a run's history that replace what the composition alone does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoremResult:
    """A theorem with the numbers of a setting. ``values`` that need an unknown constant are NaN."""

    name: str
    conditions: dict[str, bool | None] = field(default_factory=dict)
    """Each condition in words, with whether it holds; None if that is not known."""
    orders: ParameterOrders | None = None
    values: dict[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """The unknown constants that the unknown values need."""
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the result as plain data; unknown and infinite numbers are None."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        orders = None if self.orders is None else asdict(self.orders)
        return {"name": self.name, "conditions": self.conditions, "orders": orders, "values": values,
                "needs": list(self.needs), "notes": list(self.notes)}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoryReport:
    """What the theorems say about a setting, printable on a rich console.

    >>> import hansa
    >>> report = theory(hansa.presets.fedams(steps=10, participation=1.0), clients=20, rounds=500)
    >>> [each.name for each in report.results]
    ['[CAMS] Corollary 4.6', '[CAMS] Theorem 4.4']
    >>> report["Corollary 4.6"].conditions
    {'T >= K m = 200': True}
    """

    setting: TheorySetting
    problem: ProblemConstants
    estimated: bool
    results: tuple[TheoremResult, ...]

    def __getitem__(self, name: str) -> TheoremResult:
        """Return a theorem by name, such as "Corollary 4.6"."""
        for result in self.results:
            if result.name.endswith(name):
                return result
        raise KeyError(f"{name}: this setting has {', '.join(result.name for result in self.results)}.")

    def record(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self.setting).items()
        }
        known |= {"rho_max": None if not self.setting.sizes else self.setting.rho_max}
        return {
            "setting": known,
            "constants": self.problem.known(),
            "estimated": self.estimated,
            "theorems": [result.record() for result in self.results],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in self._lines():
            table.add_row(name, text)
        yield table

    def _lines(self) -> Iterator[tuple[str, str]]:
        setting = self.setting
        counts = f"{setting.participants} of {setting.clients} clients"
        steps = sorted(set(setting.steps))
        rounds = _range("round", [] if setting.rounds is None else [setting.rounds])
        yield "method", f"{setting.method}: {counts}, {_range('local step', steps)}, {rounds}"
        yield (
            "rates",
            f"server {setting.server_lr:.4g}, local {setting.local_lr:.4g}"
            + (
                "" if math.isnan(setting.b1) else f"; beta_1 {setting.b1:g}, beta_2 {setting.b2:g}, eps {setting.eps:g}"
            ),
        )
        if setting.compressed:
            yield "compression", f"{setting.compressor}: q = {setting.q:.4g}, gamma = {setting.gamma:.4g}"
        if setting.sizes:
            rates = ", ".join(f"{rate:.3f}" for rate in sorted(set(setting.cluster_rho)))
            yield "clusters", f"{len(setting.sizes)} of {_range('client', sorted(set(setting.sizes)))}, rho {rates}"
        known = self.problem.known()
        numbers = ", ".join(f"{name} = {value:.4g}" for name, value in known.items())
        yield "constants", numbers or "none known"
        if self.estimated:
            yield "", "estimated at one model: the true constants are at least these, up to sampling"
        for text in setting.deviations:
            yield "not covered", text
        for result in self.results:
            yield "", ""
            yield result.name, ""
            for text, holds in result.conditions.items():
                yield (
                    "  condition",
                    f"{text}: {'not known' if holds is None else 'holds' if holds else 'does not hold'}",
                )
            if result.orders is not None:
                yield from _order_lines(result.orders)
            for name, value in result.values.items():
                if not math.isnan(value):
                    yield f"  {name}", f"{value:.6g}"
            if unknown := [name for name, value in result.values.items() if math.isnan(value)]:
                why = f": needs {', '.join(result.needs)}" if result.needs else ""
                yield "  not known", f"{', '.join(unknown)}{why}"
            for text in result.notes:
                yield "", text


def theory(
    algorithm: Algorithm,
    task: Any = None,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    parameters: int | None = None,
    constants: Mapping[str, float] | None = None,
    estimate: bool = False,
    measured: Mapping[str, float] | None = None,
    seed: int = 0,
) -> TheoryReport:
    """Return what the papers prove about an algorithm, with its own numbers.

    For FedAMS, FedAMSGrad and FedCAMS these are [CAMS] Corollaries 4.6, 4.11 and 4.20 and the bounds and limits on the
    local rate of Theorems 4.4, 4.9, 4.18 and B.2; for HA-Fed [HAFED] Corollary 5.11 and Theorems 5.6 and 5.8; for AFGA
    and CAFGA [AFGA] Theorems 4.6 and D.3; for FedAWARE [AWARE] Corollary 3.2, Lemma 4.1, Theorems 4.1 and 4.2. Orders
    have no constants: only their ratios mean something. Values that need unknown constants are NaN.

    Args:
        algorithm: A preset or a composition.
        task: The task, which gives the clients, their samples and, with ``estimate``, the constants.
        clients: Number of clients, without a task.
        rounds: Number of rounds.
        steps: Local steps, where they follow from the data and there is no task.
        parameters: Number of parameters, without a task.
        constants: Known constants by name, such as ``{"L": 10.0}``; see `ProblemConstants`.
        estimate: Estimate the other constants from the task, at its first model.
        measured: Values that a run recorded: q, gamma, chi_square, surrogate_diversity.
        seed: Seed of random clusters and of the estimates.

    >>> import hansa
    >>> report = theory(hansa.presets.fedcams(steps=10, participation=1.0), clients=20, rounds=500)
    >>> report["Corollary 4.20"].orders.rate
    'O(1/((1 - q) sqrt(T K m)))'
    """
    for name, number in (("clients", clients), ("rounds", rounds), ("steps", steps), ("parameters", parameters)):
        if number is not None:
            check_integer("theory", name, number)
    if clients is None and task is None:
        raise HansaError("theory(clients=None, task=None): expected one of the two.")
    if estimate and task is None:
        raise HansaError("theory(estimate=True, task=None): constants are estimated from a task.")
    recorded = dict(measured or {})
    samples = None if task is None else tuple(task.population.samples)
    count = clients if samples is None else len(samples)
    assert count is not None
    problem = ProblemConstants()
    if estimate:
        problem = estimate_constants(algorithm, task, seed=seed)
    elif task is not None:
        parameters = sum(vector.numel() for name, vector in _start(task, seed).items() if name == MODEL)
    if parameters is not None:
        problem = problem.updated({"d": float(parameters)})
    problem = problem.updated(dict(constants or {}))
    setting = read_setting(
        algorithm,
        count,
        rounds=rounds,
        steps=steps,
        samples=samples,
        parameters=None if math.isnan(problem.d) else int(problem.d),
        labels=getattr(getattr(task, "data", None), "label_counts", None),
        seed=seed,
        q=recorded.get("q"),
        gamma=recorded.get("gamma"),
    )
    require_family(setting)
    mixing = algorithm.local.mixing
    match setting.family:
        case "adaptive":
            results = _adaptive(setting, problem)
        case "clustered":
            results = _clustered(setting, problem, None if mixing is None else mixing.topology)
        case "resampled":
            results = _resampled(setting, problem, None if mixing is None else mixing.topology)
        case _:
            results = _aware(setting, problem, recorded)
    return TheoryReport(setting=setting, problem=problem, estimated=estimate, results=tuple(results))


def _start(task: Any, seed: int) -> Mapping[str, Any]:
    from hansa.core.keys import Key

    return task.start(Key(seed), task.dtype)  # type: ignore[no-any-return]


def _adaptive(setting: TheorySetting, problem: ProblemConstants) -> Iterator[TheoremResult]:
    K, T, n, m = setting.most_steps, setting.rounds, setting.participants, setting.clients
    unequal = ("the K_i differ: the theorem assumes equal ones, and the largest is used",) * (
        len(set(setting.steps)) > 1
    )
    corollary = adaptive_orders(m, n, K, T, setting.q, setting.compressed)
    if corollary is not None:
        name, orders = corollary
        conditions = {}
        if setting.participants == setting.clients:
            least = "" if orders.least_rounds is None else f" = {orders.least_rounds:,}"
            conditions[orders.rounds + least] = orders.enough(T)
        yield TheoremResult(name=f"[CAMS] {name}", conditions=conditions, orders=orders, notes=unequal)
    bound = AdaptiveBound(
        clients=m,
        participants=n,
        steps=math.nan if K is None else K,
        rounds=math.nan if T is None else T,
        server_lr=setting.server_lr,
        local_lr=setting.local_lr,
        b1=setting.b1,
        b2=setting.b2,
        eps=setting.eps,
        problem=problem,
        compressed=setting.compressed,
        q=setting.q,
        gamma=setting.gamma,
    )
    values = {"C1": bound.C1, **({"C2": bound.C2} if setting.compressed and bound.full else {})}
    values |= {"largest eta_l": bound.local_lr_limit, "Psi": bound.psi, "Phi": bound.phi, "bound": bound.bound}
    notes = list(unequal if corollary is None else ())
    if corollary is None:
        notes.append("the paper states no rate for compressed updates at partial participation")
    yield TheoremResult(
        name=f"[CAMS] {bound.theorem}",
        conditions=_rate_condition(setting.local_lr, bound.local_lr_limit),
        values=values,
        needs=_needs(setting, problem, "L", "G", "sigma_l", "sigma_g", "gap", "d"),
        notes=(f"the limit is {bound.local_lr_formula}", *notes),
    )


def _clustered(setting: TheorySetting, problem: ProblemConstants, topology: Topology | None) -> Iterator[TheoremResult]:
    assert topology is not None
    corollary = Corollary(topology, setting.sizes, setting.reporters, setting.rho_max)
    tau, T = setting.most_steps, setting.rounds
    conditions: dict[str, bool | None] = {
        "m = n: rho_max is free"
        if math.isinf(corollary.bound)
        else f"rho_max = {corollary.rho_max:.3f} <= 1/(2 sqrt(n - m)) = {corollary.bound:.3f}": corollary.dense_enough,
        f"K = {corollary.clusters} < n = {min(setting.sizes)}": corollary.few_enough,
    }
    orders = corollary.orders(tau, T)
    if orders.least_rounds is not None:
        conditions[f"T > tau M = {orders.least_rounds - 1:,}"] = orders.enough(T)
    yield TheoremResult(name="[HAFED] Corollary 5.11", conditions=conditions, orders=orders)
    bound = ClusteredBound(
        clusters=len(setting.sizes),
        size=min(setting.sizes),
        reporters=min(setting.reporters),
        rho=setting.rho_max,
        steps=math.nan if tau is None else tau,
        rounds=math.nan if T is None else T,
        server_lr=setting.server_lr,
        local_lr=setting.local_lr,
        b1=setting.b1,
        b2=setting.b2,
        eps=setting.eps,
        problem=problem,
    )
    values = {"D_{tau,rho}": bound.D, "largest eta_l": bound.local_lr_limit, "Psi": bound.psi, "Phi_1": bound.phi_1}
    values |= {"Phi_2": bound.phi_2, "Phi_3": bound.phi_3, "Phi_4": bound.phi_4, "bound": bound.bound}
    unequal = ("clusters differ in size: the theorem assumes equal ones, and the smallest is used",)
    yield TheoremResult(
        name=f"[HAFED] {bound.theorem}",
        conditions=_rate_condition(setting.local_lr, bound.local_lr_limit),
        values=values,
        needs=_needs(setting, problem, "L", "G", "sigma_l", "sigma_within", "sigma_between", "gap", "d"),
        notes=(
            f"the limit is {bound.local_lr_formula}",
            "all up to the constants C and C~, which the paper does not give and which are 1 here",
            *(unequal if len(set(setting.sizes)) > 1 else ()),
        ),
    )


def _resampled(setting: TheorySetting, problem: ProblemConstants, topology: Topology | None) -> Iterator[TheoremResult]:
    assert topology is not None
    theorem = AfgaTheorem(topology, setting.sizes, setting.reporters, setting.rho_max)
    orders = theorem.orders(setting.most_steps, setting.rounds)
    ratio = "M/(M + N)" if len(setting.sizes) == 1 else "m/(m + n)"
    conditions: dict[str, bool | None] = {
        f"rho_max = {setting.rho_max:.3f} <= {ratio} = {theorem.bound:.3f}": theorem.holds
    }
    if orders.least_rounds is not None:
        conditions[f"R >= I M = {orders.least_rounds:,}"] = orders.enough(setting.rounds)
    bound = ResampledBound(
        clusters=len(setting.sizes),
        reporters=min(setting.reporters),
        rho=setting.rho_max,
        steps=setting.most_steps or math.nan,
        rounds=setting.rounds or math.nan,
        problem=problem,
    )
    one = len(setting.sizes) == 1
    needed = ("L", "G", "sigma_l", *(("sigma_g",) if one else ("sigma_within", "sigma_between")), "gap")
    yield TheoremResult(
        name=f"[AFGA] {theorem.name}",
        conditions=conditions,
        orders=orders,
        values={"inside O(1/sqrt(R I m))": bound.leading, "inside O(1/R)": bound.second},
        needs=_needs(setting, problem, *needed),
        notes=("the paper gives no constants in O(), and requires constraints on eta_l that it does not print",),
    )


def _aware(setting: TheorySetting, problem: ProblemConstants, recorded: Mapping[str, float]) -> Iterator[TheoremResult]:
    if not setting.steps:
        yield TheoremResult(
            name="[AWARE] Corollary 3.2", notes=("the K_i follow from the data, which are not at hand",)
        )
        return
    chi_square = recorded.get("chi_square", math.nan)
    uniform = len(set(setting.weights)) == 1
    bound = AwareBound(
        steps=setting.steps,
        weights=setting.weights,
        local_lr=setting.local_lr,
        alpha=setting.alpha,
        participation=setting.participants / setting.clients,
        problem=problem,
        chi_square=chi_square,
        chi=float(setting.clients) if uniform else math.nan,
        diversity=recorded.get("surrogate_diversity", math.nan),
    )
    yield TheoremResult(
        name="[AWARE] Corollary 3.2",
        conditions=_rate_condition(setting.local_lr, bound.local_lr_limit, "1/max K_i"),
        values={"K~": bound.K_tilde, "K_min": bound.K_min, "Phi_Hetero": bound.phi_hetero, "drift": bound.drift},
        needs=_needs(setting, problem, "sigma_l", "sigma_g", "gradient_norm"),
    )
    yield TheoremResult(
        name="[AWARE] Lemma 4.1",
        values={"beta = (1 - alpha) p": bound.beta, "momentum gap": bound.momentum_gap},
        needs=_needs(setting, problem, "L", "sigma_l", "sigma_g", "gradient_norm"),
    )
    run = () if not math.isnan(chi_square) else ("chi^2 and D~ are those of a run, which records them",)
    positive = None if math.isnan(bound.rho_t) else bound.rho_t > 0
    yield TheoremResult(
        name="[AWARE] Theorem 4.1",
        conditions={"rho^t > 0, without which it says nothing": positive},
        values={"chi^2": chi_square, "rho^t": bound.rho_t, "bound without vanishing terms": bound.stationary_bound},
        needs=_needs(setting, problem, "L", "sigma_l", "sigma_g", "gradient_scale"),
        notes=run,
    )
    yield TheoremResult(
        name="[AWARE] Theorem 4.2",
        values={
            "factor of sigma_g^2": 2 * bound.weight_gap,
            "factor of ||grad f||^2": 2 * (1 + bound.weight_gap),
            "bound at this model": bound.surrogate_bound(problem.gradient_norm**2),
        },
        needs=_needs(setting, problem, "sigma_g", "gradient_norm"),
        notes=run,
    )


def _rate_condition(local_lr: float, limit: float, words: str = "its limit") -> dict[str, bool | None]:
    holds = None if math.isnan(limit) else local_lr <= limit
    return {f"eta_l = {local_lr:.4g} <= {words}" + ("" if math.isnan(limit) else f" = {limit:.4g}"): holds}


def _needs(setting: TheorySetting, problem: ProblemConstants, *names: str) -> tuple[str, ...]:
    """Return what is missing: local steps that follow from the data, rounds, and constants."""
    unknown = [*(() if setting.steps else ("local steps",)), *(() if setting.rounds is not None else ("rounds",))]
    return (*unknown, *problem.missing(names))


def _order_lines(orders: ParameterOrders) -> Iterator[tuple[str, str]]:
    for name, words, number in (
        ("  server rate", orders.server_lr, orders.server_scale),
        ("  local rate", orders.local_lr, orders.local_scale),
        ("  then", orders.rate, orders.rate_scale),
    ):
        yield name, words if number is None else f"{words}, with {number:.3g} inside"


def _range(noun: str, numbers: list[int]) -> str:
    if not numbers:
        return f"unknown {noun}s"
    if len(numbers) == 1:
        return f"{numbers[0]} {noun}{'' if numbers[0] == 1 else 's'}"
    return f"{numbers[0]} to {numbers[-1]} {noun}s"
