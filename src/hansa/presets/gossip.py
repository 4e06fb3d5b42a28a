"""The presets in which neighbours talk: with a server (HA-Fed, AFGA, CAFGA), or with none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, Unpack

from hansa.algorithm import Algorithm
from hansa.compress import Compressor, sign
from hansa.core.errors import HansaError, invalid_argument
from hansa.gossip import Activity, Clustering, Topology, as_activity, consensus_amsgrad, everyone, resample, ring
from hansa.local.mixing import Mixing, StepOrder
from hansa.presets.hyperparameters import Common, Rooted, adaptive, federated
from hansa.sample import Sampler, per_cluster
from hansa.server import adam, amsgrad

Clusters: TypeAlias = int | Sequence[Sequence[int]] | Clustering
RING = ring()
SIGN = sign()


def ha_fed(
    *,
    clusters: Clusters = 4,
    reporters: int | float | Sampler = 2,
    topology: Topology = RING,
    active: float | Activity = 1.0,
    gossip_every: int = 1,
    gossip_compressor: Compressor | None = None,
    consensus_rate: float = 1.0,
    **words: Unpack[Rooted],
) -> Algorithm:
    """HA-Fed: all clients of a cluster step and gossip, ``reporters`` of each report; AMSGrad server, eps inside the
    root (HA-Fed Alg. 1 and 2; ``active`` and ``every`` are its partially active form).

    >>> method = ha_fed(clusters=4, reporters=2, steps=48)
    >>> method.local.mixing.topology, method.sampler.reporters
    (ring(), 2)
    """
    mixing = Mixing(
        topology,
        clusters,
        as_activity(active),
        gossip_every,
        compressor=gossip_compressor,
        consensus_rate=consensus_rate,
    )
    return _gossiping("ha_fed", mixing, reporters, words)


def cafga(
    *,
    clusters: Clusters = 5,
    reporters: int | float | Sampler = 1,
    topology: Topology = RING,
    active: float | Activity | None = None,
    gossip_every: int = 1,
    reporters_only: bool = False,
    gossip_compressor: Compressor | None = None,
    consensus_rate: float = 1.0,
    **words: Unpack[Rooted],
) -> Algorithm:
    """CAFGA: at every step ``active`` clients of each cluster, drawn afresh and by default as many as report, compute;
    all gossip (AFGA Alg. 2). ``reporters_only``: only the reporters train and gossip.

    >>> cafga(clusters=5, reporters=1).local.mixing.active
    resample(m=None)
    """
    if active is None:
        active = everyone() if reporters_only else resample()
    mixing = Mixing(
        topology,
        clusters,
        as_activity(active),
        gossip_every,
        reporters_only,
        compressor=gossip_compressor,
        consensus_rate=consensus_rate,
    )
    return _gossiping("cafga", mixing, reporters, words)


def afga(
    *,
    topology: Topology = RING,
    reporters: int | float | Sampler | None = None,
    active: float | Activity | None = None,
    gossip_every: int = 1,
    reporters_only: bool = False,
    gossip_compressor: Compressor | None = None,
    consensus_rate: float = 1.0,
    **words: Unpack[Rooted],
) -> Algorithm:
    """AFGA: CAFGA with one cluster of all clients; ``participation`` is the share that reports, and at every step as
    many, drawn afresh, compute (AFGA Alg. 1).

    >>> afga(participation=0.1).local.mixing.clusters
    1
    """
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
        gossip_every=gossip_every,
        reporters_only=reporters_only,
        gossip_compressor=gossip_compressor,
        consensus_rate=consensus_rate,
        **words,
    )
    return replace(one_cluster, name="afga")


def dsgd(
    *,
    topology: Topology = RING,
    clusters: Clusters = 1,
    order: StepOrder | None = None,
    gossip_compressor: Compressor | None = None,
    consensus_rate: float = 1.0,
    **common: Unpack[Common],
) -> Algorithm:
    """DSGD: no server; every client keeps its own model, x_i <- sum_j W_ij x_j - eta g_i(x_i) (Lian 2017), evaluated at
    the mean. ``order="adapt-then-combine"``: x_i <- sum_j W_ij (x_j - eta g_j(x_j)). With a ``gossip_compressor`` it is
    CHOCO-SGD, which adapts first.

    >>> dsgd(local_lr=0.1).local.mixing.order, dsgd().local.mixing.keep_local_models
    ('combine-then-adapt', True)
    """
    default: StepOrder = "combine-then-adapt" if gossip_compressor is None else "adapt-then-combine"
    mixing = Mixing(
        topology,
        clusters,
        keep_local_models=True,
        compressor=gossip_compressor,
        consensus_rate=consensus_rate,
        order=order or default,
    )
    return _decentralized("dsgd", mixing, common)


def choco_sgd(
    *,
    topology: Topology = RING,
    clusters: Clusters = 1,
    gossip_compressor: Compressor = SIGN,
    consensus_rate: float = 0.3,
    **common: Unpack[Common],
) -> Algorithm:
    """CHOCO-SGD: y_i = x_i - eta g_i(x_i); neighbours hear q_i = C(y_i - xhat_i), xhat_i <- xhat_i + q_i;
    x_i <- y_i + gamma sum_j W_ij (xhat_j - xhat_i) (Koloskova 2019). The public copies xhat start at the common first
    model; gamma is the ``consensus_rate``: the coarser the compressor, the smaller.

    >>> choco_sgd(consensus_rate=0.2).local.mixing.compressor
    sign()
    """
    algorithm = dsgd(
        topology=topology,
        clusters=clusters,
        gossip_compressor=gossip_compressor,
        consensus_rate=consensus_rate,
        **common,
    )
    return replace(algorithm, name="choco_sgd")


def gossip_pga(
    *,
    topology: Topology = RING,
    clusters: Clusters = 1,
    period: int = 6,
    order: StepOrder = "adapt-then-combine",
    **common: Unpack[Common],
) -> Algorithm:
    """Gossip-PGA: DSGD, adapt-then-combine as listed, with an exact average at every ``period``-th step (Chen 2021).

    >>> gossip_pga(period=6).local.mixing.average_every
    6
    """
    mixing = Mixing(topology, clusters, keep_local_models=True, average_every=period, order=order)
    return _decentralized("gossip_pga", mixing, common)


def dadam(
    *,
    topology: Topology = RING,
    clusters: Clusters = 1,
    order: StepOrder = "combine-then-adapt",
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    **common: Unpack[Common],
) -> Algorithm:
    """DAdam: DSGD with an Adam of its own at every client (Nazari 2022).

    >>> dadam(local_lr=0.001).local.optimizer
    adam(b1=0.9, b2=0.99, eps=1e-08, bias_correction=False, v0=0.0, eps_inside=False)
    """
    algorithm = _decentralized("dadam", Mixing(topology, clusters, keep_local_models=True, order=order), common)
    return algorithm.with_local(optimizer=adam(b1, b2, eps))


def d_amsgrad(
    *,
    topology: Topology = RING,
    clusters: Clusters = 1,
    order: StepOrder = "combine-then-adapt",
    second_moment: Literal["gossip", "local"] = "gossip",
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-4,
    **common: Unpack[Common],
) -> Algorithm:
    """Decentralized AMSGrad: the second moment gossips with the model, so that all clients come to the same rates
    (Chen 2023; `hansa.gossip.consensus_amsgrad`). ``second_moment="local"``: an AMSGrad of its own at every client.

    >>> d_amsgrad(local_lr=0.001, second_moment="local").local.optimizer
    amsgrad(b1=0.9, b2=0.99, eps=0.0001, bias_correction=False, v0=0.0, eps_inside=False)
    """
    if second_moment not in ("gossip", "local"):
        raise invalid_argument("d_amsgrad", "second_moment", second_moment, "'gossip' or 'local'")
    algorithm = _decentralized("d_amsgrad", Mixing(topology, clusters, keep_local_models=True, order=order), common)
    optimizer = consensus_amsgrad(b1, b2, eps) if second_moment == "gossip" else amsgrad(b1, b2, eps)
    return algorithm.with_local(optimizer=optimizer)


def _gossiping(name: str, mixing: Mixing, reporters: int | float | Sampler, words: Mapping[str, Any]) -> Algorithm:
    """An AMSGrad server with eps inside the root, over clusters that gossip."""
    if "sampler" in words or "participation" in words:
        raise HansaError(f"{name}: the reporters say who takes part: reporters=2, a share, or a sampler.")
    sampler = per_cluster(reporters) if isinstance(reporters, (int, float)) else reporters
    defaults = {"sampler": sampler, "steps": 1, "weights": "clusters", "eps": 1e-8, "eps_inside": True}
    return adaptive(name, amsgrad, {**defaults, **words}, server_lr=0.01).with_local(mixing=mixing)


def _decentralized(name: str, mixing: Mixing, common: Common) -> Algorithm:
    """Everyone takes part and keeps its own model; the server's model is their mean."""
    words: dict[str, Any] = {"steps": 1, **common}
    for word in ("sampler", "participation", "server_lr", "weights", "compressor", "two_way"):
        if word in words:
            raise HansaError(f"{name}({word}={words[word]!r}): there is no server and everyone takes part.")
    return federated(name, **words).with_local(mixing=mixing)
