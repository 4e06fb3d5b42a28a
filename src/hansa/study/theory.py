"""`hansa.theory`: what the papers prove about an algorithm, with the numbers of a setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum, isnan, nan, pi, prod, sqrt
from typing import Any

from hansa.aggregate import BaseAggregator, aware, client_weights, mean
from hansa.algorithm import Algorithm, participants_of
from hansa.compress import direct, error_feedback, sign
from hansa.compress.base import Coder
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.schedule import rate_at
from hansa.core.types import MODEL, Population
from hansa.gossip import available, cluster_rho, everyone, resample
from hansa.local import BaseLocalWork
from hansa.local.solvers import sgd
from hansa.pace import synchronous
from hansa.rounds.measures import heterogeneity, smoothness
from hansa.runs.metrics import is_finite
from hansa.runs.record import to_plain_json
from hansa.sample import per_cluster, uniform
from hansa.server import ams, amsgrad, chain, scale
from hansa.study.theorems import Family, ProblemConstants, TheoremResult, TheorySetting, format_fact, theorem_results

MEASURED = ("q", "gamma", "chi_square", "surrogate_diversity")
"""Columns of a run's history that replace values which the composition does not determine."""
TYPICAL_SIZE = 1_000_000  # parameters, if the contraction depends on their unknown number
NORMAL_SIGN = sqrt(1 - 2 / pi)  # q of sign compression for normal entries; other compressors use their bound
SAMPLES, HESSIANS, ITERATIONS = 16, 8, 12  # of estimates: gradients a client, clients, steps of a power iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoryReport:
    """What the theorems say about a setting.

    >>> import hansa
    >>> report = theory(hansa.presets.fedams(steps=10, participation=1.0), clients=20, rounds=500)
    >>> [result.name for result in report.results]
    ['[CAMS] Corollary 4.6', '[CAMS] Theorem 4.4']
    >>> report["Corollary 4.6"].conditions
    {'T = 500 >= K m = 200': True}
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

    def __str__(self) -> str:
        return "\n".join(f"{heading:24}{text}".rstrip() for heading, text in self.rows())

    def record(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        facts = {
            "setting": {**asdict(self.setting), "rho_max": self.setting.rho_max},
            "constants": self.problem.known(),
            "estimated": self.estimated,
            "theorems": [asdict(result) for result in self.results],
        }
        return dict(to_plain_json(facts))

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a heading and a text, for a table of two columns."""
        for name, value in asdict(self.setting).items():
            if name == "deviations":
                yield from (("not covered", text) for text in value)
            elif isinstance(value, tuple) and value:
                yield name, ", ".join(map(format_fact, sorted(set(value)))) if len(set(value)) <= 8 else "different"
            elif value not in (None, "", ()) and not (isinstance(value, float) and isnan(value)):
                yield name, format_fact(value)
        yield "constants", ", ".join(f"{name} = {value:.4g}" for name, value in self.problem.known().items()) or "none"
        if self.estimated:
            yield "", "estimated at one model: lower bounds of the true constants, up to sampling"
        for result in self.results:
            yield from (("", ""), *result.rows())


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
    """Return what the papers prove about an algorithm, with the numbers of a setting.

    For FedAMS, FedAMSGrad and FedCAMS these are [CAMS] Corollaries 4.6, 4.11 and 4.20 and the bounds and limits on the
    local rate of Theorems 4.4, 4.9, 4.18 and B.2; for HA-Fed [HAFED] Corollary 5.11 and Theorems 5.6 and 5.8; for AFGA
    and CAFGA [AFGA] Theorems 4.6 and D.3; for FedAWARE [AWARE] Corollary 3.2, Lemma 4.1, Theorems 4.1 and 4.2. Orders
    omit constants: only their ratios are meaningful. Values that need unknown constants are NaN.

    Args:
        algorithm: A preset or a composition.
        task: The task, which has the clients, their samples and, with ``estimate``, the constants.
        clients: Number of clients, without a task.
        rounds: Number of rounds.
        steps: Local steps, if they follow from the data and there is no task.
        parameters: Number of parameters, without a task.
        constants: Known constants by name, such as ``{"L": 10.0}``; see `ProblemConstants`.
        estimate: Estimate the other constants from the task, at its initial model.
        measured: Values that a run recorded: q, gamma, chi_square, surrogate_diversity.
        seed: Seed of random clusters and of the estimates.

    >>> import hansa
    >>> report = theory(hansa.presets.fedcams(steps=10, participation=1.0), clients=20, rounds=500)
    >>> report["Corollary 4.20"].orders["rate"][0]
    'O(1/((1 - q) sqrt(T K m)))'
    """
    for name, number in (("clients", clients), ("rounds", rounds), ("steps", steps), ("parameters", parameters)):
        if number is not None:
            check_integer("theory", name, number)
    if clients is None and task is None:
        raise HansaError("theory(clients=None, task=None): expected one of the two.")
    if estimate and task is None:
        raise HansaError("theory(estimate=True, task=None): constants are estimated from a task.")
    samples = None if task is None else tuple(task.population.samples)
    count = clients if samples is None else len(samples)
    assert count is not None
    problem = estimate_constants(algorithm, task, seed=seed) if estimate else ProblemConstants()
    if task is not None and not estimate:
        parameters = task.start(Key(seed), task.dtype)[MODEL].numel()
    if parameters is not None:
        problem = problem.updated({"d": float(parameters)})
    problem = problem.updated(dict(constants or {}))
    labels = getattr(getattr(task, "data", None), "label_counts", None)  # for clusterings that need them
    key, recorded = Key(seed), measured or {}
    bound = algorithm.bind(count, key, labels)
    model, mixing = bound.channels[MODEL], bound.local.mixing
    transforms = model.server.transforms if isinstance(model.server, chain) else (model.server,)
    adaptive = next((transform for transform in transforms if isinstance(transform, ams | amsgrad)), None)
    if isinstance(model.aggregate, aware):
        family: Family = "aware"
    elif adaptive is None or bound.serverless:
        raise HansaError(
            f"{algorithm.name}: no theorem covers it. Theorems cover servers with ams() or amsgrad() (FedAMS, "
            "FedAMSGrad, FedCAMS, HA-Fed, AFGA, CAFGA) and the aggregator aware() (FedAWARE)."
        )
    elif mixing is None:
        family = "adaptive"
    else:
        active = mixing.active.activity if isinstance(mixing.active, available) else mixing.active
        family = "resampled" if isinstance(active, resample) else "clustered"
    clusters = () if mixing is None else mixing.cluster_lists()
    sizes = tuple(len(group) for group in clusters)
    population = Population(samples if samples is not None else (1,) * count)
    participants = bound.sampler.select(0, population, key)
    compressor = model.uplink.compressor if isinstance(model.uplink, error_feedback) else None
    if compressor is None or isinstance(compressor, sign):
        contraction = 0.0 if compressor is None else NORMAL_SIGN
    else:
        size = TYPICAL_SIZE if isnan(problem.d) else int(problem.d)
        contraction = min(1.0, with_defaults(compressor, Coder).contraction(size))
    weights = with_defaults(model.aggregate, BaseAggregator).weights
    alpha = model.aggregate.alpha if isinstance(model.aggregate, aware) else nan
    local_steps = _steps(bound, count, steps, samples, key)
    setting = TheorySetting(
        method=algorithm.name, family=family, clients=count, steps=local_steps,
        participants=participants_of(bound.sampler, count) or len(participants),
        server_lr=prod(rate_at(transform.lr, 0) for transform in transforms if isinstance(transform, scale)),
        local_lr=rate_at(bound.local.lr, 0), rounds=nan if rounds is None else rounds,
        **({} if adaptive is None else {"b1": adaptive.b1, "b2": adaptive.b2, "eps": adaptive.eps}),
        compressor="" if compressor is None else repr(compressor),
        q=recorded.get("q", contraction), gamma=recorded.get("gamma", 0.0), sizes=sizes,
        reporters=tuple(len(set(group) & set(participants)) for group in clusters),
        cluster_rho=() if mixing is None else cluster_rho(mixing.topology, sizes),
        alpha=alpha if isinstance(alpha, float) else fsum(alpha) / len(alpha),
        weights=tuple(client_weights(_equal(weights), range(count), population.samples)),
        chi_square=recorded.get("chi_square", nan), diversity=recorded.get("surrogate_diversity", nan),
        deviations=tuple(_deviations(bound, family, local_steps, sizes)),
    )  # fmt: skip
    return TheoryReport(setting=setting, problem=problem, estimated=estimate, results=theorem_results(setting, problem))


def recorded_values(history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the values of `MEASURED` that a run recorded: the largest q and gamma, the others of the last round.

    Args:
        history: The records of the run.

    >>> recorded_values([{"q": 0.5, "chi_square": 9.0}, {"q": 0.25, "chi_square": 8.0}])
    {'q': 0.5, 'chi_square': 8.0}
    """
    records = list(history)
    columns = {name: [float(record[name]) for record in records if is_finite(record.get(name))] for name in MEASURED}
    return {name: max(values) if name in ("q", "gamma") else values[-1] for name, values in columns.items() if values}


def estimate_constants(algorithm: Algorithm, task: Any, seed: int = 0) -> ProblemConstants:
    """Estimate L, G, the sigmas, zeta and f_0 at the initial model of a seed.

    Batches, clusters and weights are those of the algorithm. ``gap`` is the initial loss, which bounds f_0 - f* for
    nonnegative losses. The assumptions bound these quantities at every model, the estimates at one.

    Args:
        algorithm: A preset or a composition.
        task: A task.
        seed: Seed of the initial model and of all draws.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic([[[2.0]], [[3.0]]], [[0.0], [3.0]])
    >>> constants = estimate_constants(hansa.presets.fedams(), task)
    >>> round(constants.L, 6), constants.sigma_g, constants.gap
    (9.0, 4.5, 2.25)
    """
    bound = algorithm.bind(task.population.count, Key(seed), getattr(getattr(task, "data", None), "label_counts", None))
    mixing = bound.local.mixing
    weights = with_defaults(bound.channels[MODEL].aggregate, BaseAggregator).weights
    size = bound.local.batch_size or max(task.population.samples)
    spread = heterogeneity(
        task, clusters=None if mixing is None else mixing.cluster_lists(), batch_size=size, samples=SAMPLES,
        weights=_equal(weights), seed=seed,
    )  # fmt: skip
    smooth = smoothness(task, clients=HESSIANS, iterations=ITERATIONS, batch_size=size, seed=seed)
    return ProblemConstants(
        L=smooth.L, G=smooth.G, sigma_l=spread.sigma_l, sigma_g=spread.sigma_g, zeta=spread.zeta,
        sigma_within=nan if spread.sigma_within is None else spread.sigma_within,
        sigma_between=nan if spread.sigma_between is None else spread.sigma_between,
        gap=smooth.loss if smooth.loss >= 0 else nan, gradient_norm=spread.gradient_norm,
        gradient_scale=sqrt(spread.sigma_g**2 + spread.gradient_norm**2),
        d=float(task.start(Key(seed), task.dtype)[MODEL].numel()),
    )  # fmt: skip


def _equal(weights: Any) -> Any:
    """Return the weights of an aggregator in the objective, where clusters are weighted equally."""
    return "uniform" if weights == "clusters" else weights


def _steps(
    algorithm: Algorithm, clients: int, steps: int | None, samples: Sequence[int] | None, key: Key
) -> tuple[int, ...]:
    """Return K_i of every client: the common one, or those of the first round."""
    work = with_defaults(algorithm.local.steps, BaseLocalWork)
    common: int | None = work.common if steps is None else steps
    if common is not None:
        return (common,) * clients
    if samples is None:
        per_client = getattr(algorithm.local.steps, "steps", None)
        return tuple(per_client) if isinstance(per_client, tuple) else ()
    pairs = enumerate(samples)
    return tuple(algorithm.local.draw_work(i, count, key.child("local", 0, i)).steps for i, count in pairs)


def _deviations(algorithm: Algorithm, family: Family, steps: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[str]:
    """Yield the properties of an algorithm that the theorems of a family do not cover."""
    local, model, mixing = algorithm.local, algorithm.channels[MODEL], algorithm.local.mixing
    aware_family, plain = family == "aware", "the theorems have plain SGD"
    equal = isinstance(model.aggregate, mean) and model.aggregate.weights in ("uniform", "clusters")
    own_alphas = isinstance(model.aggregate, aware) and isinstance(model.aggregate.alpha, tuple)
    neutral = {"momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None, "optimizer": None}
    settings = {name: getattr(local, name) for name in neutral}
    checks = [
        (type(local.solver) is sgd, f"the local solver {local.solver!r}: {plain}"),
        *((value == neutral[name], f"local {name}={value!r}: {plain}") for name, value in settings.items()),
        (algorithm.pace == synchronous(), f"{algorithm.pace!r}: the theorems are of synchronous rounds"),
        (isinstance(algorithm.sampler, (uniform, per_cluster)), f"the sampler {algorithm.sampler!r}: the theorems draw "
         "a fixed number uniformly, without replacement"),
        (not own_alphas, "alpha for each client: the theorems have one; the mean is used"),
        (aware_family or equal, f"{model.aggregate!r}: the theorems average the updates with equal weights"),
        (aware_family or len(set(steps)) < 2, "the K_i differ: the theorems assume equal ones; the largest is used"),
        (len(set(sizes)) < 2, "clusters differ in size: the theorems assume equal ones; bounds are of the smallest, "
         "conditions of all"),
        (isinstance(model.downlink, direct), f"the downlink {model.downlink!r}: the theorems have an uncompressed "
         "broadcast"),
        (family == "adaptive" or isinstance(model.uplink, direct), f"the uplink {model.uplink!r}: only [CAMS] covers "
         "compressed updates"),
    ]  # fmt: skip
    if mixing is not None:
        restricted = family == "resampled" and isinstance(mixing.active, available)
        checks += [
            (mixing.gossip_every == 1, f"gossip_every={mixing.gossip_every}: the theorems gossip after every step"),
            (not mixing.reporters_only, "reporters_only: in the theorems all clients of a cluster gossip"),
            (mixing.compressor is None, f"the gossip compressor {mixing.compressor!r}: in the theorems neighbours "
             "exchange whole models"),
            (mixing.robust is None, f"the rule {mixing.robust!r}: in the theorems models are mixed by W"),
            (not restricted, "active=available(...): in the theorems every client can be drawn at every step"),
            (family != "clustered" or mixing.active == everyone(), f"active={mixing.active!r}: in HA-Fed's theorems "
             "all clients compute at every step"),
        ]  # fmt: skip
    yield from (text for covered, text in checks if not covered)
