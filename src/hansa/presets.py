"""The catalogue: each famous name is a composition of parts.

All share one vocabulary (`Common`), then have words of their own. ``steps`` counts local steps (a number, or a part
such as ``hansa.local.fixed([1, 2, 4])``); ``epochs`` counts passes; ``participation`` is a fraction, ``sampler`` any
sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from hansa.aggregate import aware, mean, mgda, nova
from hansa.aggregate.base import Weights
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.compress import Compressor, Downlink, Uplink, direct, error_feedback, replica, sign
from hansa.errors import HansaError, near, refuse
from hansa.gossip import Activity, Clustering, Topology, as_activity, everyone, resample, ring
from hansa.local import LocalWork, fixed, prox, sgd
from hansa.local import dyn as dyn_solver
from hansa.local import epochs as passes
from hansa.local import scaffold as scaffold_solver
from hansa.local.solvers import Solver
from hansa.sample import Sampler, per_cluster, uniform
from hansa.sample import explore as explore_all
from hansa.sample import startup as begin_with_everyone
from hansa.schedule import Rate
from hansa.server import ServerTransform, adagrad, adam, ams, amsgrad, chain, dyn, participation_scale, scale, yogi
from hansa.server import momentum as server_momentum
from hansa.types import CONTROL, MODEL

Clusters: TypeAlias = int | Sequence[Sequence[int]] | Clustering
RING = ring()


class Common(TypedDict, total=False):
    """The words every preset understands."""

    local_lr: Rate
    steps: int | Sequence[int] | LocalWork
    epochs: float
    batch_size: int | None
    participation: float
    sampler: Sampler
    server_lr: Rate
    weights: Weights
    local_momentum: float
    weight_decay: float
    clip: float | None
    compressor: Compressor
    two_way: bool | Compressor | Downlink


class Adaptive(Common, total=False):
    """The words of the adaptive servers, on top of the common ones."""

    b1: float
    b2: float
    eps: float
    bias_correction: bool
    v0: float


class Rooted(Adaptive, total=False):
    """The words of the adaptive servers whose eps may stand inside the root."""

    eps_inside: bool


def fedavg(**common: Unpack[Common]) -> Algorithm:
    """FedAvg: local SGD, x <- x + eta mean Delta_i (McMahan 2017)."""
    return _federated("fedavg", **common)


def fedavgm(*, momentum: float = 0.9, **common: Unpack[Common]) -> Algorithm:
    """FedAvgM: m <- beta m + Delta; x <- x + eta m (Hsu 2019)."""
    algorithm = _federated("fedavgm", **common)
    return algorithm.with_server(_rated(server_momentum(momentum), common))


def fedprox(*, mu: float = 0.01, **common: Unpack[Common]) -> Algorithm:
    """FedProx: local steps with the pull mu (y - x) (Li 2020)."""
    return _federated("fedprox", **common).with_local(solver=prox(mu))


def scaffold(**common: Unpack[Common]) -> Algorithm:
    """SCAFFOLD, option II: local steps corrected by c - c_i; c travels on a channel of its own (Karimireddy 2020)."""
    control = Channel(server=participation_scale())
    return _federated("scaffold", solver=scaffold_solver(), channels={CONTROL: control}, **common)


def fednova(**common: Unpack[Common]) -> Algorithm:
    """FedNova: x <- x + eta (sum p_i tau_i) sum p_i Delta_i / tau_i (Wang 2020)."""
    return _federated("fednova", **common).on(MODEL, aggregate=nova(common.get("weights", "uniform")))


def feddyn(*, alpha: float = 0.1, **common: Unpack[Common]) -> Algorithm:
    """FedDyn: local steps with alpha (y - x) - h_i; the server subtracts h/alpha (Acar 2021)."""
    if common.get("server_lr", 1.0) != 1.0:
        raise refuse("feddyn", "server_lr", common["server_lr"], "1", "FedDyn's server has no rate of its own.")
    return _federated("feddyn", solver=dyn_solver(alpha), **common).with_server(dyn(alpha))


def fedcams(**words: Unpack[Adaptive]) -> Algorithm:
    """FedCAMS: FedAMS with compressed uploads and error feedback, by default scaled sign; ``two_way`` compresses the
    broadcast too (Wang 2022)."""
    return _adaptive("fedcams", ams, {"compressor": sign(), **words}, server_lr=1.0)


def ha_fed(
    *,
    clusters: Clusters = 4,
    reporters: int | float | Sampler = 2,
    topology: Topology = RING,
    active: float | Activity = 1.0,
    every: int = 1,
    gossip_compressor: Compressor | None = None,
    **words: Unpack[Rooted],
) -> Algorithm:
    """HA-Fed: all clients of a cluster step and gossip, ``reporters`` of each report; AMSGrad server, eps inside the
    root (HA-Fed Alg. 1 and 2; ``active`` and ``every`` are its partially active form)."""
    mixing = Mixing(topology, clusters, as_activity(active), every, compressor=gossip_compressor)
    return _gossiping("ha_fed", mixing, reporters, words)


def cafga(
    *,
    clusters: Clusters = 5,
    reporters: int | float | Sampler = 1,
    topology: Topology = RING,
    active: float | Activity | None = None,
    every: int = 1,
    adapted: bool = False,
    gossip_compressor: Compressor | None = None,
    **words: Unpack[Rooted],
) -> Algorithm:
    """CAFGA: at every step ``active`` clients of each cluster, drawn afresh and by default as many as report, compute;
    all gossip (AFGA Alg. 2). ``adapted``: only the reporters train and gossip."""
    if active is None:
        active = everyone() if adapted else resample()
    mixing = Mixing(topology, clusters, as_activity(active), every, adapted, compressor=gossip_compressor)
    return _gossiping("cafga", mixing, reporters, words)


def afga(
    *,
    topology: Topology = RING,
    reporters: int | float | Sampler | None = None,
    active: float | Activity | None = None,
    every: int = 1,
    adapted: bool = False,
    gossip_compressor: Compressor | None = None,
    **words: Unpack[Rooted],
) -> Algorithm:
    """AFGA: CAFGA with one cluster of all clients; ``participation`` is the share that reports, and at every step as
    many, drawn afresh, compute (AFGA Alg. 1)."""
    if reporters is not None and "participation" in words:
        raise HansaError(
            f"afga(participation={words['participation']!r}, reporters={reporters!r}): expected one of the two."
        )
    share = float(words.pop("participation", 0.1))
    one_cluster = cafga(
        clusters=1,
        reporters=share if reporters is None else reporters,
        topology=topology,
        active=active,
        every=every,
        adapted=adapted,
        gossip_compressor=gossip_compressor,
        **words,
    )
    return replace(one_cluster, name="afga")


def dsgd(*, topology: Topology = RING, **common: Unpack[Common]) -> Algorithm:
    """DSGD: no server; every client keeps its own model, steps and gossips (Lian 2017). Evaluated at the mean."""
    return _decentralized("dsgd", Mixing(topology, persistent=True), common)


def gossip_pga(*, topology: Topology = RING, period: int = 6, **common: Unpack[Common]) -> Algorithm:
    """Gossip-PGA: DSGD with an exact average at every ``period``-th step (Chen 2021)."""
    return _decentralized("gossip_pga", Mixing(topology, persistent=True, average_every=period), common)


def dadam(
    *, topology: Topology = RING, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-8, **common: Unpack[Common]
) -> Algorithm:
    """DAdam: DSGD with an Adam of its own at every client (Nazari 2022)."""
    algorithm = _decentralized("dadam", Mixing(topology, persistent=True), common)
    return algorithm.with_local(optimizer=adam(b1, b2, eps))


def d_amsgrad(
    *, topology: Topology = RING, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-8, **common: Unpack[Common]
) -> Algorithm:
    """D-AMSGrad: DSGD with an AMSGrad of its own at every client."""
    return _decentralized("d_amsgrad", Mixing(topology, persistent=True), common).with_local(
        optimizer=amsgrad(b1, b2, eps)
    )


def fedaware(
    *,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    startup: bool = False,
    from_zero: bool = False,
    solver: Literal["exact", "authors"] = "exact",
    project: ServerTransform | None = None,
    rows: Literal["ram", "disk"] = "ram",
    **common: Unpack[Common],
) -> Algorithm:
    """FedAWARE: the shortest combination of the momenta of all clients seen (Zeng et al.). ``rows="disk"`` keeps the
    momenta on disk; ``weights`` are those of the objective, in averages and diversities.

    ``startup`` has everyone take part in the first round, as the paper proposes; ``explore`` asks every client once
    before any again, averaging until then. The authors' code is ``normalize=True, explore=True, from_zero=True,
    solver="authors", weights="samples"``, with ``startup=True`` in its statistical-only setting.
    """
    weights = common.get("weights", "uniform")
    direction = aware(alpha, normalize, explore, project, rows, from_zero=from_zero, solver=solver, weights=weights)
    if explore and "sampler" not in common:
        common["sampler"] = explore_all(common.pop("participation", 1.0), then="uniform")
    if startup:
        everyone_first = begin_with_everyone(_sampler("fedaware", common))
        common.pop("participation", None)
        common["sampler"] = everyone_first
    return _federated("fedaware", **common).on(MODEL, aggregate=direction)


def fedaware_yogi(
    *,
    yogi_lr: Rate = 0.01,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    startup: bool = False,
    from_zero: bool = False,
    solver: Literal["exact", "authors"] = "exact",
    rows: Literal["ram", "disk"] = "ram",
    **common: Unpack[Common],
) -> Algorithm:
    """FedAWARE as a projection: FedYogi's step, with its rate ``yogi_lr``, projected onto FedAWARE's direction."""
    direction = fedaware(
        alpha=alpha,
        normalize=normalize,
        explore=explore,
        startup=startup,
        from_zero=from_zero,
        solver=solver,
        project=chain(yogi(b1, b2, eps), scale(yogi_lr)),
        rows=rows,
        **common,
    )
    return replace(direction, name="fedaware_yogi")


def fedmgda(*, epsilon: float = 1.0, **common: Unpack[Common]) -> Algorithm:
    """FedMGDA+: unit updates combined with min-norm weights, within epsilon of uniform (Hu 2022)."""
    if common.get("weights", "uniform") != "uniform":
        raise refuse("fedmgda", "weights", common["weights"], "'uniform'", "FedMGDA+ finds the weights itself.")
    return _federated("fedmgda", **common).on(MODEL, aggregate=mgda(epsilon))


fedmgda_plus = fedmgda


def fedadagrad(**words: Unpack[Rooted]) -> Algorithm:
    """FedAdagrad: v <- v + Delta^2; x <- x + eta m/(sqrt v + eps), b1 = 0 (Reddi 2020)."""
    return _adaptive("fedadagrad", adagrad, words)


def fedadam(**words: Unpack[Rooted]) -> Algorithm:
    """FedAdam: v <- b2 v + (1-b2) Delta^2; x <- x + eta m/(sqrt v + eps) (Reddi 2020)."""
    return _adaptive("fedadam", adam, words)


def fedyogi(**words: Unpack[Rooted]) -> Algorithm:
    """FedYogi: v <- v - (1-b2) Delta^2 sign(v - Delta^2); x <- x + eta m/(sqrt v + eps) (Reddi 2020)."""
    return _adaptive("fedyogi", yogi, words)


def fedamsgrad(**words: Unpack[Rooted]) -> Algorithm:
    """FedAMSGrad: vhat <- max(vhat, v); x <- x + eta m/(sqrt vhat + eps) (Tong 2020)."""
    return _adaptive("fedamsgrad", amsgrad, words)


def fedams(**words: Unpack[Adaptive]) -> Algorithm:
    """FedAMS: vhat <- max(vhat, v, eps); x <- x + eta m/sqrt vhat (Wang 2022)."""
    return _adaptive("fedams", ams, words, server_lr=1.0)


CATALOGUE: tuple[Callable[..., Algorithm], ...] = (
    fedavg,
    fedavgm,
    fedprox,
    scaffold,
    fednova,
    feddyn,
    fedmgda,
    fedadagrad,
    fedadam,
    fedyogi,
    fedamsgrad,
    fedams,
    fedcams,
    fedaware,
    fedaware_yogi,
    ha_fed,
    afga,
    cafga,
    dsgd,
    gossip_pga,
    dadam,
    d_amsgrad,
)


def catalogue() -> dict[str, Callable[..., Algorithm]]:
    """Every preset by name."""
    return {preset.__name__: preset for preset in CATALOGUE}


def named(name: str, **words: Any) -> Algorithm:
    """A preset by its name: ``named("fedams", local_lr=0.05)`` is ``fedams(local_lr=0.05)``.

    >>> named("FedAvgM", momentum=0.5).name
    'fedavgm'
    """
    plain = name.lower().replace("+", "").replace("-", "_")
    known = catalogue()
    if plain not in known:
        raise HansaError(f"unknown preset {name!r}. {near(plain, known)}")
    return known[plain](**words)


def _federated(
    name: str, *, solver: Solver | None = None, channels: Mapping[str, Channel] | None = None, **common: Unpack[Common]
) -> Algorithm:
    """The common composition: what the words of `Common` mean."""
    _known(name, common, Common)
    links = _links(name, common)
    model = Channel(*links, mean(common.get("weights", "uniform")), scale(common.get("server_lr", 1.0)))
    others = {key: replace(channel, downlink=links[0], uplink=links[1]) for key, channel in (channels or {}).items()}
    local = LocalPhase(
        solver=sgd() if solver is None else solver,
        steps=_work(name, common),
        lr=common.get("local_lr", 0.05),
        batch_size=common.get("batch_size", 32),
        momentum=common.get("local_momentum", 0.0),
        weight_decay=common.get("weight_decay", 0.0),
        clip=common.get("clip"),
    )
    return Algorithm(name, _sampler(name, common), local, {MODEL: model, **others})


def _adaptive(
    name: str, part: Callable[..., ServerTransform], words: Mapping[str, Any], server_lr: Rate = 0.1
) -> Algorithm:
    """FedAvg with an adaptive server in front of the server's rate."""
    own = {item.name for item in fields(part)}  # type: ignore[arg-type]
    _known(name, words, Common, own)
    common: Any = {word: value for word, value in words.items() if word not in own}
    adaptive = part(**{word: value for word, value in words.items() if word in own})
    return _federated(name, **common).with_server(_rated(adaptive, common, server_lr))


def _gossiping(name: str, mixing: Mixing, reporters: int | float | Sampler, words: Mapping[str, Any]) -> Algorithm:
    """An AMSGrad server with eps inside the root, over clusters that gossip."""
    if "sampler" in words or "participation" in words:
        raise HansaError(f"{name}: the reporters say who takes part: reporters=2, a share, or a sampler.")
    sampler = per_cluster(reporters) if isinstance(reporters, (int, float)) else reporters
    defaults = {"sampler": sampler, "steps": 1, "weights": "clusters", "eps": 1e-8, "eps_inside": True}
    return _adaptive(name, amsgrad, {**defaults, **words}, server_lr=0.01).with_local(mixing=mixing)


def _decentralized(name: str, mixing: Mixing, common: Common) -> Algorithm:
    """Everyone takes part and keeps its own model; the server's model is their mean."""
    words: dict[str, Any] = {"steps": 1, **common}
    for word in ("sampler", "participation", "server_lr", "weights", "compressor", "two_way"):
        if word in words:
            raise HansaError(f"{name}({word}={words[word]!r}): there is no server and everyone takes part.")
    return _federated(name, **words).with_local(mixing=mixing)


def _rated(server: ServerTransform, common: Common, server_lr: Rate = 1.0) -> ServerTransform:
    return chain(server, scale(common.get("server_lr", server_lr)))


def _known(name: str, words: Mapping[str, Any], common: type, own: set[str] | frozenset[str] = frozenset()) -> None:
    known = {*common.__annotations__, *own}
    for word in words:
        if word not in known:
            raise HansaError(f"{name}({word}={words[word]!r}): no such argument. {near(word, known)}")


def _links(name: str, common: Common) -> tuple[Downlink, Uplink]:
    """Uncompressed links; or error feedback up, and with ``two_way`` a compressed replica down, by the same compressor
    or by the one given: a client that was away hears what it missed, so the downlink may want fewer bytes."""
    if "compressor" not in common:
        if common.get("two_way"):
            raise refuse(name, "two_way", True, "a compressor with it", "compressor=hansa.compress.sign().")
        return direct(), direct()
    compressor = common["compressor"]
    if not hasattr(compressor, "encode"):
        raise refuse(name, "compressor", compressor, "a compressor", "hansa.compress.sign() is one.")
    down = common.get("two_way", False)
    if isinstance(down, bool):
        return replica(compressor) if down else direct(), error_feedback(compressor)
    return replica(down) if isinstance(down, Compressor) else down, error_feedback(compressor)


def _work(name: str, common: Common) -> LocalWork:
    if "steps" in common and "epochs" in common:
        raise HansaError(
            f"{name}(steps={common['steps']!r}, epochs={common['epochs']!r}): expected one of the two. "
            "steps counts gradient steps, epochs passes over a client's data."
        )
    if "steps" in common:
        steps = common["steps"]
        return fixed(steps) if isinstance(steps, (int, Sequence)) else steps
    return passes(common.get("epochs", 1))


def _sampler(name: str, common: Common) -> Sampler:
    if "sampler" in common and "participation" in common:
        raise HansaError(
            f"{name}(sampler={common['sampler']!r}, participation={common['participation']!r}): expected one of the "
            "two."
        )
    return common["sampler"] if "sampler" in common else uniform(common.get("participation", 1.0))
