"""The catalogue: each famous name is a composition of parts.

All share one vocabulary (`Common`), then have words of their own. ``steps`` counts local steps (a number, or a part
such as ``hansa.local.fixed([1, 2, 4])``); ``epochs`` counts passes; ``participation`` is a fraction, ``sampler`` any
sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, Unpack

from hansa.aggregate import mean, mgda, nova
from hansa.aggregate.base import Weights
from hansa.algorithm import Algorithm, Channel, LocalPhase
from hansa.errors import HansaError, near, refuse
from hansa.local import LocalWork, fixed, prox, sgd
from hansa.local import dyn as dyn_solver
from hansa.local import epochs as passes
from hansa.local import scaffold as scaffold_solver
from hansa.local.solvers import Solver
from hansa.sample import Sampler, uniform
from hansa.schedule import Rate
from hansa.server import ServerTransform, adagrad, adam, ams, amsgrad, chain, dyn, participation_scale, scale, yogi
from hansa.server import momentum as server_momentum
from hansa.types import CONTROL, MODEL


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
    model = Channel(aggregate=mean(common.get("weights", "uniform")), server=scale(common.get("server_lr", 1.0)))
    local = LocalPhase(
        solver=sgd() if solver is None else solver,
        steps=_work(name, common),
        lr=common.get("local_lr", 0.05),
        batch_size=common.get("batch_size", 32),
        momentum=common.get("local_momentum", 0.0),
        weight_decay=common.get("weight_decay", 0.0),
        clip=common.get("clip"),
    )
    return Algorithm(name, _sampler(name, common), local, {MODEL: model, **(channels or {})})


def _adaptive(
    name: str, part: Callable[..., ServerTransform], words: Mapping[str, Any], server_lr: Rate = 0.1
) -> Algorithm:
    """FedAvg with an adaptive server in front of the server's rate."""
    own = {item.name for item in fields(part)}  # type: ignore[arg-type]
    _known(name, words, Common, own)
    common: Any = {word: value for word, value in words.items() if word not in own}
    adaptive = part(**{word: value for word, value in words.items() if word in own})
    return _federated(name, **common).with_server(_rated(adaptive, common, server_lr))


def _rated(server: ServerTransform, common: Common, server_lr: Rate = 1.0) -> ServerTransform:
    return chain(server, scale(common.get("server_lr", server_lr)))


def _known(name: str, words: Mapping[str, Any], common: type, own: set[str] | frozenset[str] = frozenset()) -> None:
    known = {*common.__annotations__, *own}
    for word in words:
        if word not in known:
            raise HansaError(f"{name}({word}={words[word]!r}): no such argument. {near(word, known)}")


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
