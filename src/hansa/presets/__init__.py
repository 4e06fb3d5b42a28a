"""The catalogue: each famous name is a composition of parts.

All share one vocabulary (`Common`), then have words of their own. ``steps`` counts local steps (a number, or a part
such as ``hansa.local.fixed([1, 2, 4])``); ``epochs`` counts passes; ``participation`` is a fraction, ``sampler`` any
sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Unpack

from hansa.aggregate import aware, mgda, nova
from hansa.algorithm import Algorithm, Channel
from hansa.compress import sign
from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.types import CONTROL, MODEL
from hansa.local import dyn as dyn_solver
from hansa.local import prox
from hansa.local import scaffold as scaffold_solver
from hansa.presets.gossip import Clusters, afga, cafga, choco_sgd, d_amsgrad, dadam, dsgd, gossip_pga, ha_fed
from hansa.presets.hyperparameters import Adaptive, Common, Rooted, adaptive, federated, rated, sampler_of
from hansa.sample import explore as explore_all
from hansa.sample import startup as begin_with_everyone
from hansa.schedule import Rate
from hansa.server import ServerTransform, adagrad, adam, ams, amsgrad, chain, dyn, participation_scale, scale, yogi
from hansa.server import momentum as server_momentum

__all__ = [
    "CATALOGUE", "Adaptive", "Clusters", "Common", "Rooted", "afga", "cafga", "catalogue", "choco_sgd", "d_amsgrad",
    "dadam", "dsgd", "fedadagrad", "fedadam", "fedams", "fedamsgrad", "fedavg", "fedavgm", "fedaware", "fedaware_yogi",
    "fedcams", "feddyn", "fedmgda", "fedmgda_plus", "fednova", "fedprox", "fedyogi", "gossip_pga", "ha_fed", "named",
    "scaffold",
]  # fmt: skip


def fedavg(**common: Unpack[Common]) -> Algorithm:
    """FedAvg: local SGD, x <- x + eta mean Delta_i (McMahan 2017).

    >>> fedavg(local_lr=0.1, steps=5, participation=0.1).channels["model"].server
    scale(lr=1.0)
    """
    return federated("fedavg", **common)


def fedavgm(*, momentum: float = 0.9, **common: Unpack[Common]) -> Algorithm:
    """FedAvgM: m <- beta m + Delta; x <- x + eta m (Hsu 2019).

    >>> fedavgm(momentum=0.7).channels["model"].server
    chain(momentum(beta=0.7), scale(lr=1.0))
    """
    algorithm = federated("fedavgm", **common)
    return algorithm.with_server(rated(server_momentum(momentum), common))


def fedprox(*, mu: float = 0.01, **common: Unpack[Common]) -> Algorithm:
    """FedProx: local steps with the pull mu (y - x) (Li 2020).

    >>> fedprox(mu=0.1).local.solver
    prox(mu=0.1)
    """
    return federated("fedprox", **common).with_local(solver=prox(mu))


def scaffold(**common: Unpack[Common]) -> Algorithm:
    """SCAFFOLD, option II: local steps corrected by c - c_i; c travels on a channel of its own (Karimireddy 2020).

    >>> sorted(scaffold(steps=5).channels), scaffold().local.solver
    (['control', 'model'], scaffold())
    """
    control = Channel(server=participation_scale())
    return federated("scaffold", solver=scaffold_solver(), channels={CONTROL: control}, **common)


def fednova(**common: Unpack[Common]) -> Algorithm:
    """FedNova: x <- x + eta (sum p_i tau_i) sum p_i Delta_i / tau_i (Wang 2020).

    >>> fednova(weights="samples").channels["model"].aggregate
    nova(weights='samples')
    """
    return federated("fednova", **common).on(MODEL, aggregate=nova(common.get("weights", "uniform")))


def feddyn(*, alpha: float = 0.1, **common: Unpack[Common]) -> Algorithm:
    """FedDyn: local steps with alpha (y - x) - h_i; the server subtracts h/alpha (Acar 2021).

    >>> feddyn(alpha=0.01).channels["model"].server
    dyn(alpha=0.01)
    """
    if common.get("server_lr", 1.0) != 1.0:
        raise invalid_argument(
            "feddyn", "server_lr", common["server_lr"], "1", "FedDyn's server has no rate of its own."
        )
    return federated("feddyn", solver=dyn_solver(alpha), **common).with_server(dyn(alpha))


def fedcams(**words: Unpack[Adaptive]) -> Algorithm:
    """FedCAMS: FedAMS with compressed uploads and error feedback, by default scaled sign; ``two_way`` compresses the
    broadcast too (Wang 2022).

    >>> method = fedcams(two_way=True)
    >>> method.channels["model"].uplink, method.channels["model"].downlink
    (error_feedback(compressor=sign()), replica(compressor=sign(), public_start=True, every=1))
    """
    return adaptive("fedcams", ams, {"compressor": sign(), **words}, server_lr=1.0)


def fedaware(
    *,
    alpha: float = 0.5,
    normalize: bool = False,
    explore: bool = False,
    startup: bool = False,
    from_zero: bool = False,
    min_norm: Literal["exact", "authors"] = "exact",
    project: ServerTransform | None = None,
    momentum_storage: Literal["ram", "disk"] = "ram",
    **common: Unpack[Common],
) -> Algorithm:
    """FedAWARE: the shortest combination of the momenta of all clients seen (Zeng et al.). ``momentum_storage="disk"`` keeps the
    momenta on disk; ``weights`` are those of the objective, in averages and diversities.

    ``startup`` has everyone take part in the first round, as the paper proposes; ``explore`` asks every client once
    before any again, averaging until then. The authors' code is ``normalize=True, explore=True, from_zero=True,
    min_norm="authors", weights="samples"``, with ``startup=True`` in its statistical-only setting.

    >>> fedaware(alpha=0.3, momentum_storage="disk").channels["model"].aggregate.momentum_storage
    'disk'
    """
    weights = common.get("weights", "uniform")
    direction = aware(
        alpha, normalize, explore, project, momentum_storage, from_zero=from_zero, min_norm=min_norm, weights=weights
    )
    if explore and "sampler" not in common:
        common["sampler"] = explore_all(common.pop("participation", 1.0), then="uniform")
    if startup:
        everyone_first = begin_with_everyone(sampler_of("fedaware", common))
        common.pop("participation", None)
        common["sampler"] = everyone_first
    return federated("fedaware", **common).on(MODEL, aggregate=direction)


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
    min_norm: Literal["exact", "authors"] = "exact",
    momentum_storage: Literal["ram", "disk"] = "ram",
    **common: Unpack[Common],
) -> Algorithm:
    """FedAWARE as a projection: FedYogi's step, with its rate ``yogi_lr``, projected onto FedAWARE's direction.

    >>> fedaware_yogi(yogi_lr=0.1).channels["model"].aggregate.project
    chain(yogi(b1=0.9, b2=0.99, eps=0.0001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    direction = fedaware(
        alpha=alpha,
        normalize=normalize,
        explore=explore,
        startup=startup,
        from_zero=from_zero,
        min_norm=min_norm,
        project=chain(yogi(b1, b2, eps), scale(yogi_lr)),
        momentum_storage=momentum_storage,
        **common,
    )
    return replace(direction, name="fedaware_yogi")


def fedmgda(*, epsilon: float = 1.0, **common: Unpack[Common]) -> Algorithm:
    """FedMGDA+: unit updates combined with min-norm weights, within epsilon of uniform (Hu 2022).

    >>> fedmgda(epsilon=0.1).channels["model"].aggregate
    mgda(epsilon=0.1)
    """
    if common.get("weights", "uniform") != "uniform":
        raise invalid_argument(
            "fedmgda", "weights", common["weights"], "'uniform'", "FedMGDA+ finds the weights itself."
        )
    return federated("fedmgda", **common).on(MODEL, aggregate=mgda(epsilon))


fedmgda_plus = fedmgda


def fedadagrad(**words: Unpack[Rooted]) -> Algorithm:
    """FedAdagrad: v <- v + Delta^2; x <- x + eta m/(sqrt v + eps), b1 = 0 (Reddi 2020).

    >>> fedadagrad(server_lr=0.1).channels["model"].server
    chain(adagrad(b1=0.0, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return adaptive("fedadagrad", adagrad, words)


def fedadam(**words: Unpack[Rooted]) -> Algorithm:
    """FedAdam: v <- b2 v + (1-b2) Delta^2; x <- x + eta m/(sqrt v + eps) (Reddi 2020).

    >>> fedadam(server_lr=0.1, eps=0.01).channels["model"].server
    chain(adam(b1=0.9, b2=0.99, eps=0.01, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return adaptive("fedadam", adam, words)


def fedyogi(**words: Unpack[Rooted]) -> Algorithm:
    """FedYogi: v <- v - (1-b2) Delta^2 sign(v - Delta^2); x <- x + eta m/(sqrt v + eps) (Reddi 2020).

    >>> fedyogi(server_lr=0.1).channels["model"].server
    chain(yogi(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return adaptive("fedyogi", yogi, words)


def fedamsgrad(**words: Unpack[Rooted]) -> Algorithm:
    """FedAMSGrad: vhat <- max(vhat, v); x <- x + eta m/(sqrt vhat + eps) (Tong 2020).

    >>> fedamsgrad(server_lr=0.1).channels["model"].server
    chain(amsgrad(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return adaptive("fedamsgrad", amsgrad, words)


def fedams(**words: Unpack[Adaptive]) -> Algorithm:
    """FedAMS: vhat <- max(vhat, v, eps); x <- x + eta m/sqrt vhat (Wang 2022).

    >>> fedams(server_lr=0.1).channels["model"].server
    chain(ams(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0), scale(lr=0.1))
    """
    return adaptive("fedams", ams, words, server_lr=1.0)


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
    choco_sgd,
    gossip_pga,
    dadam,
    d_amsgrad,
)


def catalogue() -> dict[str, Callable[..., Algorithm]]:
    """Every preset by name.

    >>> "fedcams" in catalogue(), catalogue()["fedavg"] is fedavg
    (True, True)
    """
    return {preset.__name__: preset for preset in CATALOGUE}


def named(name: str, **words: Any) -> Algorithm:
    """A preset by its name: ``named("fedams", local_lr=0.05)`` is ``fedams(local_lr=0.05)``.

    >>> named("FedAvgM", momentum=0.5).name
    'fedavgm'
    """
    plain = name.lower().replace("+", "").replace("-", "_")
    known = catalogue()
    if plain not in known:
        raise HansaError(f"unknown preset {name!r}. {suggestion(plain, known)}")
    return known[plain](**words)
