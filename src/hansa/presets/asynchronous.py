"""Presets whose server does not wait for slow clients: FedAsync, FedBuff, FADAS, CA2FL."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, TypedDict, Unpack

from hansa.aggregate import Discount, calibrated, discounted, mixed_models, polynomial
from hansa.algorithm import Algorithm
from hansa.core.errors import invalid_argument
from hansa.core.types import MODEL
from hansa.local import prox, sgd
from hansa.pace import buffered
from hansa.presets.hyperparameters import AdaptiveEps, Common, compose, document_arguments, preset
from hansa.server import amsgrad, chain, delay_adaptive

POLYNOMIAL = polynomial(0.5)


class Paced(TypedDict, total=False):
    """The arguments of a server that does not wait.

    Args:
        size: Updates per server step: a number, or a fraction of the concurrency.
        concurrency: Clients that train at the same time; by default as many as the sampler selects.
        max_staleness: Updates of versions more than this many steps old are refused.

    >>> sorted(Paced.__annotations__)
    ['concurrency', 'max_staleness', 'size']
    """

    size: int | float
    concurrency: int
    max_staleness: int


class Asynchronous(Common, Paced, total=False):
    """The arguments of asynchronous presets: `Common` and ``size``, ``concurrency``, ``max_staleness``.

    >>> "size" in Asynchronous.__annotations__
    True
    """


class AsynchronousAdaptive(AdaptiveEps, Paced, total=False):
    """The arguments of asynchronous presets with an adaptive server: `AdaptiveEps` and those of `Asynchronous`.

    >>> "concurrency" in AsynchronousAdaptive.__annotations__
    True
    """


document_arguments(Paced)
PACE: dict[str, Any] = {"size": 0.2, "concurrency": None, "max_staleness": None}


def _compose_paced(name: str, options: Any, **components: Any) -> Algorithm:
    pace = buffered(options["size"], options.get("concurrency"), options.get("max_staleness"))
    common: Any = {argument: value for argument, value in options.items() if argument not in PACE}
    return compose(name, **common, **components).with_pace(pace)


@preset(**{**PACE, "size": 1})
def fedasync(
    *, alpha: float = 0.6, staleness: Discount = POLYNOMIAL, mu: float = 0.0, **options: Unpack[Asynchronous]
) -> Algorithm:
    """FedAsync: x <- (1 - a) x + a y_i with every client model y_i that arrives, a = alpha s(tau) (Xie et al. 2019).

    Args:
        alpha: Share of a fresh client model.
        staleness: Factor of alpha by staleness: `hansa.aggregate.constant`, ``polynomial`` or ``hinge``.
        mu: Weight of the proximal term of the local steps, the paper's rho.
        **options: See `Asynchronous` and `Common`; ``weights`` do not apply.

    >>> method = fedasync(alpha=0.9)
    >>> method.pace.size, method.channels["model"].aggregate
    (1, mixed_models(alpha=0.9, staleness=polynomial(a=0.5)))
    """
    method = _compose_paced("fedasync", options, solver=prox(mu) if mu else sgd())
    return method.on(MODEL, aggregate=mixed_models(alpha, staleness))


@preset(server_lr=0.5, **PACE)
def fedbuff(*, staleness: Discount = POLYNOMIAL, **options: Unpack[Asynchronous]) -> Algorithm:
    """FedBuff: x <- x + eta sum_i p_i s(tau_i) Delta_i with every K updates that arrive, in the paper p_i = 1/K (Nguyen
    et al. 2022).

    Args:
        staleness: Factor of an update by staleness: `hansa.aggregate.constant`, ``polynomial`` or ``hinge``.
        **options: See `Asynchronous` and `Common`.

    >>> fedbuff(size=10, concurrency=100).pace
    buffered(size=10, concurrency=100, max_staleness=None)
    """
    return _compose_paced("fedbuff", options).on(MODEL, aggregate=discounted(staleness, options["weights"]))


@preset(amsgrad, server_lr=0.001, **PACE)
def fadas(
    *,
    tau_c: int = 1,
    delay_rule: Literal["paper", "authors"] = "paper",
    **options: Unpack[AsynchronousAdaptive],
) -> Algorithm:
    """FADAS: AMSGrad on the mean of every K updates that arrive; the rate is min(eta, 1/tau_max) where the largest
    staleness exceeds tau_c (Wang et al., ICML 2024, Alg. 1 and eq. 4).

    The authors' code, github.com/yujiaw98/FADAS, has eta / tau_max: ``delay_rule="authors"``.

    Args:
        tau_c: Staleness up to which the rate is eta.
        delay_rule: "paper" or "authors".
        **options: See `AsynchronousAdaptive` and `Common`.

    >>> fadas(server_lr=0.01, tau_c=4).channels["model"].server.transforms[1]
    delay_adaptive(lr=0.01, threshold=4, rule='paper')
    """
    server_fields = {field.name for field in fields(amsgrad)}
    moments: Any = {name: value for name, value in options.items() if name in server_fields}
    common: Any = {name: value for name, value in options.items() if name not in server_fields}
    rate = delay_adaptive(common["server_lr"], tau_c, delay_rule)
    return _compose_paced("fadas", common).with_server(chain(amsgrad(**moments), rate))


@preset(server_lr=0.2, **PACE)
def ca2fl(*, momentum_storage: Literal["ram", "disk"] = "ram", **options: Unpack[Asynchronous]) -> Algorithm:
    """CA2FL: x <- x + eta (h + mean_S (Delta_i - h_i)), with h_i the cached last update of client i and h the mean of
    all h_i (Wang et al., ICLR 2024, Alg. 2).

    Args:
        momentum_storage: Keep the cached updates in memory ("ram") or on disk ("disk").
        **options: See `Asynchronous` and `Common`; ``weights`` must be "uniform".

    >>> ca2fl(momentum_storage="disk").channels["model"].aggregate
    calibrated(momentum_storage='disk')
    """
    if options["weights"] != "uniform":
        remedy = "CA2FL is defined for equal weights."
        raise invalid_argument("ca2fl", "weights", options["weights"], "'uniform'", remedy)
    return _compose_paced("ca2fl", options).on(MODEL, aggregate=calibrated(momentum_storage))
