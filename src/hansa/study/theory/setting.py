"""What the theorems need to know of an algorithm: numbers, rates, topology, compression, and what they do not cover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hansa.aggregate import BaseAggregator, aware, client_weights, mean
from hansa.algorithm import Algorithm
from hansa.compress import Compressor, direct, error_feedback, sign
from hansa.compress.base import Coder
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.schedule import Rate, rate_at
from hansa.core.types import MODEL, Population
from hansa.gossip import available, cluster_rho, everyone, resample
from hansa.local import BaseLocalWork
from hansa.local.solvers import sgd
from hansa.pace import synchronous
from hansa.pace.composition import participants_of
from hansa.sample import per_cluster, uniform
from hansa.server import ams, amsgrad, chain, scale

Family: TypeAlias = Literal["adaptive", "clustered", "resampled", "aware"]
"""The theorems that apply: FedAMS and FedCAMS, HA-Fed, AFGA and CAFGA, FedAWARE."""

TYPICAL_SIZE = 1_000_000  # parameters, where the contraction depends on their number and it is not known
NORMAL_SIGN = math.sqrt(1 - 2 / math.pi)  # q of the sign of a vector with normal entries


@dataclass(frozen=True, slots=True, kw_only=True)
class TheorySetting:
    """The facts of an algorithm over a population that the theorems use. NaN stands for what it does not have."""

    method: str
    family: Family | None
    clients: int
    participants: int
    steps: tuple[int, ...]
    """K_i of every client, or () if they depend on data that are not at hand."""
    rounds: int | None
    server_lr: float
    local_lr: float
    b1: float
    b2: float
    eps: float
    compressor: str
    q: float
    gamma: float
    sizes: tuple[int, ...]
    reporters: tuple[int, ...]
    cluster_rho: tuple[float, ...]
    alpha: float
    weights: tuple[float, ...]
    deviations: tuple[str, ...]
    """What the algorithm has that the theorems do not cover."""

    @property
    def compressed(self) -> bool:
        """Whether updates are compressed."""
        return bool(self.compressor)

    @property
    def most_steps(self) -> int | None:
        """The largest K_i: the theorems of all papers but [AWARE] assume equal ones."""
        return max(self.steps) if self.steps else None

    @property
    def rho_max(self) -> float:
        """The largest rho_k, or NaN without gossip."""
        return max(self.cluster_rho, default=math.nan)


def compression_q(compressor: Compressor, parameters: int) -> float:
    """Return q: of the sign of a vector with normal entries, sqrt(1 - 2/pi), or the bound of other compressors.

    >>> from hansa.compress import sign, top_k
    >>> round(compression_q(sign(), 1000), 3), compression_q(top_k(0.75), 1000)
    (0.603, 0.5)
    """
    if isinstance(compressor, sign):
        return NORMAL_SIGN
    return min(1.0, with_defaults(compressor, Coder).contraction(parameters))


def read_setting(
    algorithm: Algorithm,
    clients: int,
    *,
    rounds: int | None = None,
    steps: int | None = None,
    samples: Sequence[int] | None = None,
    parameters: int | None = None,
    labels: Any = None,
    seed: int = 0,
    q: float | None = None,
    gamma: float | None = None,
) -> TheorySetting:
    """Read a setting from an algorithm.

    Args:
        algorithm: A preset or a composition.
        clients: Number of clients.
        rounds: Number of rounds, if known.
        steps: Local steps, where they follow from the data and these are not at hand.
        samples: Number of samples of each client, if known.
        parameters: Number of parameters, if known.
        labels: Label counts of the clients, for clusterings that need them.
        seed: Seed of random clusters and of drawn steps.
        q: Measured contraction, instead of the compressor's.
        gamma: Measured compression dissimilarity; 0 if not measured.
    """
    key = Key(seed)
    bound = algorithm.bind(clients, key, labels)
    model, mixing = bound.channels[MODEL], bound.local.mixing
    transforms = _transforms(model.server)
    adaptive = next((each for each in transforms if type(each) in (ams, amsgrad)), None)
    lists = () if mixing is None else mixing.cluster_lists()
    sizes = tuple(len(group) for group in lists)
    population = Population(tuple(samples) if samples is not None else (1,) * clients)
    chosen = bound.sampler.select(0, population, key)
    participants = participants_of(bound.sampler, clients) or len(chosen)
    reporters = tuple(len(set(group) & set(chosen)) for group in lists)
    compressor = model.uplink.compressor if isinstance(model.uplink, error_feedback) else None
    measured = 0.0 if compressor is None else compression_q(compressor, parameters or TYPICAL_SIZE)
    weights = with_defaults(model.aggregate, BaseAggregator).weights
    lam = client_weights("uniform" if weights == "clusters" else weights, range(clients), population.samples)
    alpha = model.aggregate.alpha if isinstance(model.aggregate, aware) else math.nan
    family = _family(bound, adaptive)
    return TheorySetting(
        method=algorithm.name,
        family=family,
        clients=clients,
        participants=participants,
        steps=_steps(bound, clients, steps, samples, key),
        rounds=rounds,
        server_lr=math.prod(_first_rate(each.lr) for each in transforms if isinstance(each, scale)),
        local_lr=_first_rate(bound.local.lr),
        b1=math.nan if adaptive is None else adaptive.b1,
        b2=math.nan if adaptive is None else adaptive.b2,
        eps=math.nan if adaptive is None else adaptive.eps,
        compressor="" if compressor is None else repr(compressor),
        q=measured if q is None else q,
        gamma=0.0 if gamma is None else gamma,
        sizes=sizes,
        reporters=reporters,
        cluster_rho=() if mixing is None else cluster_rho(mixing.topology, sizes),
        alpha=alpha if isinstance(alpha, float) else math.fsum(alpha) / len(alpha),
        weights=tuple(lam),
        deviations=tuple(_deviations(bound, family)),
    )


def _transforms(server: Any) -> tuple[Any, ...]:
    return tuple(server.transforms) if isinstance(server, chain) else (server,)


def _first_rate(rate: Rate) -> float:
    return rate_at(rate, 0)


def _family(algorithm: Algorithm, adaptive: Any) -> Family | None:
    mixing = algorithm.local.mixing
    if isinstance(algorithm.channels[MODEL].aggregate, aware):
        return "aware"
    if adaptive is None or algorithm.serverless:
        return None
    if mixing is None:
        return "adaptive"
    active = mixing.active.activity if isinstance(mixing.active, available) else mixing.active
    return "resampled" if isinstance(active, resample) else "clustered"


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
    size, division = algorithm.local.batch_size, algorithm.local.division
    draws = (
        work.draw_passes(client, count, size, key.child("local", 0, client), division)
        for client, count in enumerate(samples)
    )
    return tuple(work.steps for work in draws)


def _deviations(algorithm: Algorithm, family: Family | None) -> Iterator[str]:
    """Yield what the theorems of a family do not cover."""
    local, model = algorithm.local, algorithm.channels[MODEL]
    if type(local.solver) is not type(sgd()):
        yield f"the local solver {local.solver!r}: the theorems have plain SGD"
    for name, off in (("momentum", 0.0), ("weight_decay", 0.0), ("max_grad_norm", None), ("optimizer", None)):
        if getattr(local, name) != off:
            yield f"local {name}={getattr(local, name)!r}: the theorems have plain SGD"
    if algorithm.pace != synchronous():
        yield f"{algorithm.pace!r}: the theorems are of synchronous rounds"
    if not isinstance(algorithm.sampler, (uniform, per_cluster)):
        yield f"the sampler {algorithm.sampler!r}: the theorems draw a fixed number uniformly, without replacement"
    if family == "aware":
        if isinstance(model.aggregate, aware) and isinstance(model.aggregate.alpha, tuple):
            yield "alpha for each client: the theorems have one; the mean is used"
    elif not isinstance(model.aggregate, mean) or model.aggregate.weights not in ("uniform", "clusters"):
        yield f"{model.aggregate!r}: the theorems average the updates with equal weights"
    if not isinstance(model.downlink, direct):
        yield f"the downlink {model.downlink!r}: the theorems have an uncompressed broadcast"
    if family != "adaptive" and not isinstance(model.uplink, direct):
        yield f"the uplink {model.uplink!r}: only [CAMS] covers compressed updates"
    mixing = local.mixing
    if mixing is None:
        return
    if mixing.gossip_every != 1:
        yield f"gossip_every={mixing.gossip_every}: the theorems gossip after every step"
    if mixing.reporters_only:
        yield "reporters_only: in the theorems all clients of a cluster gossip"
    if mixing.compressor is not None:
        yield f"the gossip compressor {mixing.compressor!r}: in the theorems neighbours exchange whole models"
    if mixing.robust is not None:
        yield f"the rule {mixing.robust!r}: in the theorems models are mixed by W"
    if family == "resampled" and isinstance(mixing.active, available):
        yield "active=available(...): in the theorems every client can be drawn at every step"
    if family == "clustered" and mixing.active != everyone():
        yield f"active={mixing.active!r}: in HA-Fed's theorems all clients compute at every step"


def require_family(setting: TheorySetting) -> None:
    """Raise if none of the four papers has a theorem for the method."""
    if setting.family is None:
        raise HansaError(
            f"{setting.method}: none of the theorems covers it. They are of servers with ams() or amsgrad() (FedAMS, "
            "FedAMSGrad, FedCAMS, HA-Fed, AFGA, CAFGA) and of the aggregator aware() (FedAWARE)."
        )
