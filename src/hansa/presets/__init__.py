"""Published methods by name: each preset is a composition of components.

All presets share the arguments of `Common`; most have additional ones. ``help(hansa.presets.fedadam)`` lists
every argument of a preset with its default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack

from hansa.aggregate import aware, mean, mgda, nova
from hansa.algorithm import Algorithm, Channel
from hansa.compress import sign
from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.schedule import Rate
from hansa.core.types import CONTROL, MODEL
from hansa.local import dyn as dyn_solver
from hansa.local import fixed, prox, scaffold_derived
from hansa.local import scaffold as scaffold_solver
from hansa.presets.asynchronous import Asynchronous, AsynchronousAdaptive, ca2fl, fadas, fedasync, fedbuff
from hansa.presets.gossip import (
    Clusters,
    Decentralized,
    Gossip,
    afga,
    cafga,
    choco_sgd,
    d_amsgrad,
    dadam,
    dsgd,
    gossip_pga,
    ha_fed,
)
from hansa.presets.hyperparameters import (
    Adaptive,
    AdaptiveEps,
    Common,
    compose,
    compose_adaptive,
    document_arguments,
    local_work,
    preset,
    select_sampler,
    with_lr,
)
from hansa.sample import explore as explore_all
from hansa.sample import startup as everyone_first
from hansa.server import (
    ServerTransform,
    adagrad,
    adam,
    ams,
    amsgrad,
    chain,
    derived_control,
    dyn,
    participation_scale,
    scale,
    yogi,
)
from hansa.server import momentum as server_momentum

__all__ = [
    "CATALOGUE", "Adaptive", "AdaptiveEps", "Asynchronous", "AsynchronousAdaptive", "Aware", "Clusters", "Common",
    "Decentralized", "Gossip", "afga", "ca2fl", "cafga", "catalogue", "choco_sgd", "d_amsgrad", "dadam", "dsgd",
    "fadas", "fedadagrad", "fedadam", "fedams", "fedamsgrad", "fedasync", "fedavg", "fedavgm", "fedaware",
    "fedaware_yogi", "fedbuff", "fedcams", "feddyn", "fedmgda", "fedmgda_plus", "fednova", "fedprox", "fedyogi", "get",
    "gossip_pga", "ha_fed", "scaffold",
]  # fmt: skip


@preset()
def fedavg(**common: Unpack[Common]) -> Algorithm:
    """FedAvg: local SGD, x <- x + eta mean Delta_i (McMahan 2017).

    Args:
        **common: See `Common`.

    >>> fedavg(local_lr=0.1, steps=5, participation=0.1).channels["model"].server
    scale(lr=1.0)
    """
    return compose("fedavg", **common)


@preset()
def fedavgm(*, momentum: float = 0.9, **common: Unpack[Common]) -> Algorithm:
    """FedAvgM: m <- beta m + Delta; x <- x + eta m (Hsu 2019).

    Args:
        momentum: beta, the server's momentum.
        **common: See `Common`.

    >>> fedavgm(momentum=0.7).channels["model"].server
    chain(momentum(beta=0.7), scale(lr=1.0))
    """
    return compose("fedavgm", **common).with_server(with_lr(server_momentum(momentum), common))


@preset()
def fedprox(*, mu: float = 0.01, **common: Unpack[Common]) -> Algorithm:
    """FedProx: local steps with the proximal term mu (y - x) (Li 2020).

    Args:
        mu: Weight of the proximal term.
        **common: See `Common`.

    >>> fedprox(mu=0.1).local.solver
    prox(mu=0.1)
    """
    return compose("fedprox", solver=prox(mu), **common)


@preset()
def scaffold(*, control: Literal["sent", "derived"] = "sent", **common: Unpack[Common]) -> Algorithm:
    """SCAFFOLD, option II: local steps corrected by c - c_i; c has its own channel (Karimireddy 2020).

    With ``weights="samples"`` the model and c are both means by sample count, as in FLamby and NVFlare.

    Args:
        control: "sent": clients report c_i' - c_i too, twice the uplink of FedAvg. "derived": the server derives c from
            the mean of y - x, which needs one number of steps for all clients and no compressor.
        **common: See `Common`.

    >>> sorted(scaffold(steps=5).channels), scaffold().local.solver
    (['control', 'model'], scaffold())
    >>> scaffold(steps=5, control="derived").channels["control"].server
    derived_control(steps=5, lr=0.05, weights='uniform')
    """
    weights: Any = common["weights"]
    if control == "sent":
        sent = Channel(aggregate=mean(weights), server=participation_scale(weights))
        return compose("scaffold", solver=scaffold_solver(), channels={CONTROL: sent}, **common)
    steps = local_work(common)
    if control != "derived" or not isinstance(steps, fixed) or steps.common is None:
        expected = "'sent', or 'derived' with one number of steps"
        raise invalid_argument("scaffold", "control", control, expected, "steps=100 is one.")
    derived = Channel(follows=MODEL, server=derived_control(steps.common, common["local_lr"], weights))
    return compose("scaffold", solver=scaffold_derived(), channels={CONTROL: derived}, **common)


@preset()
def fednova(**common: Unpack[Common]) -> Algorithm:
    """FedNova: x <- x + eta (sum p_i tau_i) sum p_i Delta_i / tau_i (Wang 2020).

    Args:
        **common: See `Common`.

    >>> fednova(weights="samples").channels["model"].aggregate
    nova(weights='samples')
    """
    return compose("fednova", **common).on(MODEL, aggregate=nova(common["weights"]))


@preset()
def feddyn(*, alpha: float = 0.1, **common: Unpack[Common]) -> Algorithm:
    """FedDyn: local steps with alpha (y - x) - h_i; the server subtracts h/alpha (Acar 2021).

    Args:
        alpha: Weight of the dynamic regularizer.
        **common: See `Common`; ``server_lr`` must be 1.

    >>> feddyn(alpha=0.01).channels["model"].server
    dyn(alpha=0.01)
    """
    if common["server_lr"] != 1.0:
        remedy = "FedDyn's server has no learning rate."
        raise invalid_argument("feddyn", "server_lr", common["server_lr"], "1", remedy)
    return compose("feddyn", solver=dyn_solver(alpha), **common).with_server(dyn(alpha))


@preset(server_lr=0.5)
def fedmgda(*, epsilon: float = 1.0, **common: Unpack[Common]) -> Algorithm:
    """FedMGDA+: unit updates combined with min-norm weights, within epsilon of uniform (Hu 2022).

    Args:
        epsilon: Largest distance of a weight from 1/M.
        **common: See `Common`; ``weights`` must be "uniform".

    >>> fedmgda(epsilon=0.1).channels["model"].aggregate
    mgda(epsilon=0.1)
    """
    if common["weights"] != "uniform":
        remedy = "FedMGDA+ computes the weights itself."
        raise invalid_argument("fedmgda", "weights", common["weights"], "'uniform'", remedy)
    return compose("fedmgda", **common).on(MODEL, aggregate=mgda(epsilon))


fedmgda_plus = fedmgda


@preset(adagrad, server_lr=0.03)
def fedadagrad(**options: Unpack[AdaptiveEps]) -> Algorithm:
    """FedAdagrad: v <- v + Delta^2; x <- x + eta m/(sqrt v + eps), b1 = 0 (Reddi 2020).

    Args:
        **options: See `AdaptiveEps` and `Common`.

    >>> fedadagrad(server_lr=0.1).channels["model"].server
    chain(adagrad(b1=0.0, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return compose_adaptive("fedadagrad", adagrad, options)


@preset(adam, server_lr=0.03)
def fedadam(**options: Unpack[AdaptiveEps]) -> Algorithm:
    """FedAdam: v <- b2 v + (1-b2) Delta^2; x <- x + eta m/(sqrt v + eps) (Reddi 2020).

    Args:
        **options: See `AdaptiveEps` and `Common`.

    >>> fedadam(server_lr=0.1, eps=0.01).channels["model"].server
    chain(adam(b1=0.9, b2=0.99, eps=0.01, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return compose_adaptive("fedadam", adam, options)


@preset(yogi, server_lr=0.03)
def fedyogi(**options: Unpack[AdaptiveEps]) -> Algorithm:
    """FedYogi: v <- v - (1-b2) Delta^2 sign(v - Delta^2); x <- x + eta m/(sqrt v + eps) (Reddi 2020).

    Args:
        **options: See `AdaptiveEps` and `Common`.

    >>> fedyogi(server_lr=0.1).channels["model"].server
    chain(yogi(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return compose_adaptive("fedyogi", yogi, options)


@preset(amsgrad, server_lr=0.03)
def fedamsgrad(**options: Unpack[AdaptiveEps]) -> Algorithm:
    """FedAMSGrad: vhat <- max(vhat, v); x <- x + eta m/(sqrt vhat + eps) (Tong 2020).

    Args:
        **options: See `AdaptiveEps` and `Common`.

    >>> fedamsgrad(server_lr=0.1).channels["model"].server
    chain(amsgrad(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return compose_adaptive("fedamsgrad", amsgrad, options)


@preset(ams, server_lr=0.3)
def fedams(**options: Unpack[Adaptive]) -> Algorithm:
    """FedAMS: vhat <- max(vhat, v, eps); x <- x + eta m/sqrt vhat (Wang 2022).

    Args:
        **options: See `Adaptive` and `Common`.

    >>> fedams(server_lr=0.1).channels["model"].server
    chain(ams(b1=0.9, b2=0.99, eps=0.001, bias_correction=False, v0=0.0), scale(lr=0.1))
    """
    return compose_adaptive("fedams", ams, options)


@preset(ams, compressor=sign(), server_lr=0.3)
def fedcams(**options: Unpack[Adaptive]) -> Algorithm:
    """FedCAMS: FedAMS with compressed uploads and error feedback, by default scaled sign; ``two_way`` compresses the
    broadcasts too (Wang 2022).

    Args:
        **options: See `Adaptive` and `Common`.

    >>> method = fedcams(two_way=True)
    >>> method.channels["model"].uplink, method.channels["model"].downlink
    (error_feedback(compressor=sign()), replica(compressor=sign(), public_start=True, every=1))
    """
    return compose_adaptive("fedcams", ams, options)


class Aware(Common, total=False):
    """The arguments of the FedAWARE presets.

    Args:
        alpha: Decay rate of the clients' momenta, or one for each client.
        normalize: Scale momenta to unit length before they are combined.
        explore: Select every client once before any is selected again, and average until then.
        startup: Full participation in the first round, as in the paper.
        from_zero: Start momenta from zero instead of from the first update.
        min_norm: Solver of the min-norm problem: "exact", or "authors" for the one of the authors' code.
        momentum_storage: Keep the momenta in memory ("ram") or on disk ("disk").
        length: Length of the step: "min-norm" as in Algorithm 1, or "average", that of the participants' mean update.

    >>> "alpha" in Aware.__annotations__
    True
    """

    alpha: float | tuple[float, ...]
    normalize: bool
    explore: bool
    startup: bool
    from_zero: bool
    min_norm: Literal["exact", "authors"]
    momentum_storage: Literal["ram", "disk"]
    length: Literal["min-norm", "average"]


document_arguments(Aware)
AWARE: dict[str, Any] = {
    "alpha": 0.5, "normalize": False, "explore": False, "startup": False, "from_zero": False, "min_norm": "exact",
    "momentum_storage": "ram", "length": "min-norm",
}  # fmt: skip


@preset(**AWARE)
def fedaware(*, project: ServerTransform | None = None, **options: Unpack[Aware]) -> Algorithm:
    """FedAWARE: the shortest convex combination of the momenta of all clients seen (Zeng et al.).

    The authors' code is ``normalize=True, explore=True, from_zero=True, min_norm="authors", weights="samples"``, with
    ``startup=True`` in its statistical-only setting.

    Args:
        project: Server transform whose step is projected onto the direction.
        **options: See `Aware` and `Common`; ``weights`` are those of the objective, in averages and diversities.

    >>> fedaware(alpha=0.3, momentum_storage="disk").channels["model"].aggregate.momentum_storage
    'disk'
    """
    return _compose_aware("fedaware", project, options)


@preset(**AWARE)
def fedaware_yogi(
    *, yogi_lr: Rate = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-4, **options: Unpack[Aware]
) -> Algorithm:
    """FedAWARE as a projection: FedYogi's step, projected onto FedAWARE's direction.

    Args:
        yogi_lr: Learning rate of the Yogi step.
        b1: Decay rate of Yogi's first moment.
        b2: Decay rate of Yogi's second moment.
        eps: Term added to Yogi's denominator.
        **options: See `Aware` and `Common`.

    >>> fedaware_yogi(yogi_lr=0.1).channels["model"].aggregate.project
    chain(yogi(b1=0.9, b2=0.99, eps=0.0001, bias_correction=False, v0=0.0, eps_inside=False), scale(lr=0.1))
    """
    return _compose_aware("fedaware_yogi", chain(yogi(b1, b2, eps), scale(yogi_lr)), options)


def _compose_aware(name: str, project: ServerTransform | None, options: Aware) -> Algorithm:
    common: Any = {argument: value for argument, value in options.items() if argument not in AWARE}
    explore, storage = options["explore"], options["momentum_storage"]
    direction = aware(
        options["alpha"], options["normalize"], explore, project, storage,
        from_zero=options["from_zero"], min_norm=options["min_norm"], weights=options["weights"],
        length=options["length"],
    )  # fmt: skip
    if explore and common.get("sampler") is None:
        common["sampler"] = explore_all(common["participation"], then="uniform")
    if options["startup"]:
        common["sampler"] = everyone_first(select_sampler(common))
    return compose(name, **common).on(MODEL, aggregate=direction)


CATALOGUE: tuple[Callable[..., Algorithm], ...] = (
    fedavg, fedavgm, fedprox, scaffold, fednova, feddyn, fedmgda, fedadagrad, fedadam, fedyogi, fedamsgrad,
    fedams, fedcams, fedaware, fedaware_yogi, fedasync, fedbuff, fadas, ca2fl, ha_fed, afga, cafga, dsgd,
    choco_sgd, gossip_pga, dadam, d_amsgrad,
)  # fmt: skip


def catalogue() -> dict[str, Callable[..., Algorithm]]:
    """Return every preset by name.

    >>> "fedcams" in catalogue(), catalogue()["fedavg"] is fedavg
    (True, True)
    """
    return {preset.__name__: preset for preset in CATALOGUE}


def get(name: str, **options: Any) -> Algorithm:
    """Return a preset by its name: ``get("fedams", local_lr=0.05)`` is ``fedams(local_lr=0.05)``.

    Args:
        name: Name of the preset, in any case; "-" counts as "_", and "+" is ignored.
        **options: Arguments of the preset.

    >>> get("FedAvgM", momentum=0.5).name
    'fedavgm'
    """
    normalized = name.lower().replace("+", "").replace("-", "_")
    presets = catalogue()
    if normalized not in presets:
        raise HansaError(f"unknown preset {name!r}. {suggestion(normalized, presets)}")
    return presets[normalized](**options)
