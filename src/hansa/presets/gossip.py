"""Presets in which clients gossip with their neighbours: with a server (HA-Fed, AFGA, CAFGA), or without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, Unpack

from hansa.algorithm import Algorithm
from hansa.compress import Compressor, sign
from hansa.core.errors import HansaError, argument_error, invalid_argument
from hansa.gossip import (
    Activity,
    Clustering,
    MixingRule,
    Topology,
    as_activity,
    as_topology,
    consensus_amsgrad,
    everyone,
    resample,
    ring,
)
from hansa.gossip.mixing import Mixing, StepOrder
from hansa.presets.hyperparameters import AdaptiveEps, Common, compose, compose_adaptive, document_arguments, preset
from hansa.sample import Sampler, per_cluster
from hansa.server import adam, amsgrad

Clusters: TypeAlias = int | Sequence[Sequence[int]] | Clustering
RING = ring()
SIGN = sign()


class Gossip(AdaptiveEps, total=False):
    """The arguments of presets in which clients gossip and some of them report to an adaptive server.

    Args:
        topology: Topology of every cluster, or a list with one for each.
        reporters: Clients of each cluster that report: a number, a fraction, or a sampler.
        active: Clients that compute at a step: a number, a probability, or an activity such as `hansa.gossip.resample`.
        gossip_every: Local steps from one exchange with the neighbours to the next.
        gossip_compressor: Compressor of what neighbours exchange; None exchanges whole models.
        consensus_rate: Step size of compressed gossip, gamma.
        robust: Rule against malicious neighbours, such as `hansa.gossip.clipped`; None mixes by W.

    >>> "topology" in Gossip.__annotations__
    True
    """

    topology: Topology | Sequence[Topology]
    reporters: int | float | Sampler
    active: float | Activity
    gossip_every: int
    gossip_compressor: Compressor | None
    consensus_rate: float
    robust: MixingRule | None


class Decentralized(Common, total=False):
    """The arguments of presets without a server.

    Args:
        topology: Topology of every cluster, or a list with one for each.
        clusters: Clusters that gossip among themselves: a number, lists of clients, or a clustering.
        robust: Rule against malicious neighbours, such as `hansa.gossip.clipped`; None mixes by W.

    >>> "clusters" in Decentralized.__annotations__
    True
    """

    topology: Topology | Sequence[Topology]
    clusters: Clusters
    robust: MixingRule | None


document_arguments(Gossip, Decentralized)
GOSSIP: dict[str, Any] = {
    "steps": 1, "participation": None, "weights": "clusters", "server_lr": 0.01, "eps": 1e-8, "eps_inside": True,
    "topology": RING, "gossip_every": 1, "gossip_compressor": None, "consensus_rate": 1.0, "robust": None,
}  # fmt: skip
DECENTRALIZED: dict[str, Any] = {
    "local_lr": 0.1, "steps": 1, "participation": None, "server_lr": None, "weights": None, "two_way": None,
    "topology": RING, "clusters": 1, "robust": None,
}  # fmt: skip
ADAPTIVE_LOCAL: dict[str, Any] = {**DECENTRALIZED, "local_lr": 0.005}


@preset(amsgrad, **GOSSIP, reporters=2, active=1.0)
def ha_fed(*, clusters: Clusters = 4, **options: Unpack[Gossip]) -> Algorithm:
    """HA-Fed: all clients of a cluster step and gossip, ``reporters`` of each report; AMSGrad server with eps inside
    the root (HA-Fed Alg. 1 and 2; ``active`` and ``gossip_every`` are its partially active form).

    Args:
        clusters: Clusters that gossip among themselves: a number, lists of clients, or a clustering.
        **options: See `Gossip`, `AdaptiveEps` and `Common`.

    >>> method = ha_fed(clusters=4, reporters=2, steps=48)
    >>> method.local.mixing.topology, method.sampler.reporters
    (ring(), 2)
    """
    return _with_server("ha_fed", clusters, options)


@preset(amsgrad, **GOSSIP, reporters=1, active=None)
def cafga(*, clusters: Clusters = 5, reporters_only: bool = False, **options: Unpack[Gossip]) -> Algorithm:
    """CAFGA: at every step ``active`` clients of each cluster, drawn anew and by default as many as report, compute;
    all gossip (AFGA Alg. 2).

    Args:
        clusters: Clusters that gossip among themselves: a number, lists of clients, or a clustering.
        reporters_only: Only the reporters train and gossip.
        **options: See `Gossip`, `AdaptiveEps` and `Common`.

    >>> cafga(clusters=5, reporters=1).local.mixing.active
    resample(m=None)
    """
    return _with_server("cafga", clusters, options, reporters_only)


@preset(amsgrad, **{**GOSSIP, "participation": 0.1}, reporters=None, active=None)
def afga(*, reporters_only: bool = False, **options: Unpack[Gossip]) -> Algorithm:
    """AFGA: CAFGA with one cluster of all clients; ``participation`` is the fraction that reports, and at every step as
    many, drawn anew, compute (AFGA Alg. 1).

    Args:
        reporters_only: Only the reporters train and gossip.
        **options: See `Gossip`, `AdaptiveEps` and `Common`.

    >>> afga(participation=0.1).local.mixing.clusters
    1
    """
    if "reporters" not in options:
        options["reporters"] = float(options.pop("participation"))
    return _with_server("afga", 1, options, reporters_only)


@preset(**DECENTRALIZED)
def dsgd(
    *,
    order: StepOrder | None = None,
    gossip_compressor: Compressor | None = None,
    consensus_rate: float = 1.0,
    **options: Unpack[Decentralized],
) -> Algorithm:
    """DSGD: no server; every client keeps its own model, x_i <- sum_j W_ij x_j - eta g_i(x_i) (Lian 2017). The mean of
    the models is evaluated.

    Args:
        order: "combine-then-adapt" as above, or "adapt-then-combine": x_i <- sum_j W_ij (x_j - eta g_j(x_j)).
        gossip_compressor: Compressor of what neighbours exchange; with one this is CHOCO-SGD, which adapts first.
        consensus_rate: Step size of compressed gossip, gamma.
        **options: See `Decentralized` and `Common`.

    >>> dsgd(local_lr=0.1).local.mixing.order, dsgd().local.mixing.keep_local_models
    ('combine-then-adapt', True)
    """
    default: StepOrder = "combine-then-adapt" if gossip_compressor is None else "adapt-then-combine"
    mixing = {"compressor": gossip_compressor, "consensus_rate": consensus_rate, "order": order or default}
    return _without_server("dsgd", options, **mixing)


@preset(**DECENTRALIZED)
def choco_sgd(
    *, gossip_compressor: Compressor = SIGN, consensus_rate: float = 0.3, **options: Unpack[Decentralized]
) -> Algorithm:
    """CHOCO-SGD: y_i = x_i - eta g_i(x_i); neighbours receive q_i = C(y_i - xhat_i), xhat_i <- xhat_i + q_i;
    x_i <- y_i + gamma sum_j W_ij (xhat_j - xhat_i) (Koloskova 2019). The public copies xhat start at the common initial
    model.

    Args:
        gossip_compressor: Compressor C of what neighbours exchange.
        consensus_rate: Step size gamma: the coarser the compressor, the smaller.
        **options: See `Decentralized` and `Common`.

    >>> choco_sgd(consensus_rate=0.2).local.mixing.compressor
    sign()
    """
    mixing = {"compressor": gossip_compressor, "consensus_rate": consensus_rate, "order": "adapt-then-combine"}
    return _without_server("choco_sgd", options, **mixing)


@preset(**DECENTRALIZED)
def gossip_pga(
    *, period: int = 6, order: StepOrder = "adapt-then-combine", **options: Unpack[Decentralized]
) -> Algorithm:
    """Gossip-PGA: DSGD with an exact average at every ``period``-th step (Chen 2021).

    Args:
        period: Steps from one exact average to the next.
        order: "adapt-then-combine" as published, or "combine-then-adapt".
        **options: See `Decentralized` and `Common`.

    >>> gossip_pga(period=6).local.mixing.average_every
    6
    """
    return _without_server("gossip_pga", options, average_every=period, order=order)


@preset(**ADAPTIVE_LOCAL)
def dadam(
    *,
    order: StepOrder = "combine-then-adapt",
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    **options: Unpack[Decentralized],
) -> Algorithm:
    """DAdam: DSGD in which every client has its own Adam (Nazari 2022).

    Args:
        order: "combine-then-adapt" or "adapt-then-combine".
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Term added to the denominator.
        **options: See `Decentralized` and `Common`.

    >>> dadam(local_lr=0.001).local.optimizer
    adam(b1=0.9, b2=0.99, eps=1e-08, bias_correction=False, v0=0.0, eps_inside=False)
    """
    return _without_server("dadam", options, order=order).with_local(optimizer=adam(b1, b2, eps))


@preset(**ADAPTIVE_LOCAL)
def d_amsgrad(
    *,
    order: StepOrder = "combine-then-adapt",
    second_moment: Literal["gossip", "local"] = "gossip",
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
    **options: Unpack[Decentralized],
) -> Algorithm:
    """Decentralized AMSGrad: the second moment gossips with the model, so that all clients get the same step sizes
    (Chen 2023; `hansa.gossip.consensus_amsgrad`).

    Args:
        order: "combine-then-adapt" or "adapt-then-combine".
        second_moment: "gossip", or "local" for an independent AMSGrad at every client.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Lower bound of the denominator.
        **options: See `Decentralized` and `Common`.

    >>> d_amsgrad(local_lr=0.001, second_moment="local").local.optimizer
    amsgrad(b1=0.9, b2=0.99, eps=0.0001, bias_correction=False, v0=0.0, eps_inside=False)
    """
    if second_moment not in ("gossip", "local"):
        raise invalid_argument("d_amsgrad", "second_moment", second_moment, "'gossip' or 'local'")
    optimizer = consensus_amsgrad(b1, b2, eps) if second_moment == "gossip" else amsgrad(b1, b2, eps)
    return _without_server("d_amsgrad", options, order=order).with_local(optimizer=optimizer)


def _with_server(name: str, clusters: Clusters, options: Gossip, reporters_only: bool = False) -> Algorithm:
    """Return an algorithm of gossiping clusters and an AMSGrad server with eps inside the root."""
    arguments: dict[str, Any] = {**options}
    if arguments.get("sampler") is not None or arguments.get("participation") is not None:
        raise HansaError(f"{name}: the reporters are the participants: give reporters=2, a fraction, or a sampler.")
    reporters, active = arguments.pop("reporters"), arguments.pop("active", None)
    if active is None:
        active = everyone() if reporters_only else resample()
    mixing = Mixing(
        as_topology(arguments.pop("topology")),
        clusters,
        as_activity(active),
        arguments.pop("gossip_every"),
        reporters_only,
        compressor=arguments.pop("gossip_compressor", None),
        consensus_rate=arguments.pop("consensus_rate"),
        robust=arguments.pop("robust", None),
    )
    arguments["sampler"] = per_cluster(reporters) if isinstance(reporters, (int, float)) else reporters
    return compose_adaptive(name, amsgrad, arguments).with_local(mixing=mixing)


def _without_server(name: str, options: Decentralized, **mixing: Any) -> Algorithm:
    """Return an algorithm in which all clients participate and keep their own models; the server's is their mean."""
    arguments: dict[str, Any] = {**options}
    for argument in ("sampler", "participation", "server_lr", "weights", "compressor", "two_way"):
        if arguments.get(argument) is not None:
            problem = "there is no server and all clients participate."
            raise argument_error(name, argument, arguments[argument], problem)
    topology, clusters = as_topology(arguments.pop("topology")), arguments.pop("clusters")
    mixing["robust"] = arguments.pop("robust", None)
    server: Any = {"participation": 1.0, "server_lr": 1.0, "weights": "uniform", "two_way": False}
    algorithm = compose(name, **{**arguments, **server})
    return algorithm.with_local(mixing=Mixing(topology, clusters, keep_local_models=True, **mixing))
