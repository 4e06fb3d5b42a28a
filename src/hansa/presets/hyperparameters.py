"""What the words of the presets mean: the vocabulary that all share, and the compositions made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict, Unpack

from hansa.aggregate import mean
from hansa.aggregate.base import Weights
from hansa.algorithm import Algorithm, Channel, LocalPhase
from hansa.compress import Compressor, Downlink, Uplink, direct, error_feedback, replica
from hansa.compress.base import check_compressor
from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.protocols import missing_methods
from hansa.core.types import MODEL
from hansa.local import LocalWork, fixed, sgd
from hansa.local import epochs as passes
from hansa.local.solvers import Solver
from hansa.sample import Sampler, uniform
from hansa.schedule import Rate
from hansa.server import ServerTransform, chain, scale


class Common(TypedDict, total=False):
    """The words every preset understands.

    >>> sorted(Common.__annotations__)[:3]
    ['batch_size', 'compressor', 'downlink']
    """

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
    max_grad_norm: float | None
    compressor: Compressor
    two_way: bool | Compressor | Downlink


class Adaptive(Common, total=False):
    """The words of the adaptive servers, on top of the common ones.

    >>> "eps" in Adaptive.__annotations__
    True
    """

    b1: float
    b2: float
    eps: float
    bias_correction: bool
    v0: float


class Rooted(Adaptive, total=False):
    """The words of the adaptive servers whose eps may stand inside the root.

    >>> "eps_inside" in Rooted.__annotations__
    True
    """

    eps_inside: bool


def federated(
    name: str, *, solver: Solver | None = None, channels: Mapping[str, Channel] | None = None, **common: Unpack[Common]
) -> Algorithm:
    """The common composition: what the words of `Common` mean."""
    known(name, common, Common)
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
        max_grad_norm=common.get("max_grad_norm"),
    )
    return Algorithm(name, sampler_of(name, common), local, {MODEL: model, **others})


def adaptive(
    name: str, part: Callable[..., ServerTransform], words: Mapping[str, Any], server_lr: Rate = 0.1
) -> Algorithm:
    """FedAvg with an adaptive server in front of the server's rate."""
    own = {item.name for item in fields(part)}  # type: ignore[arg-type]
    known(name, words, Common, own)
    common: Any = {word: value for word, value in words.items() if word not in own}
    adaptive = part(**{word: value for word, value in words.items() if word in own})
    return federated(name, **common).with_server(rated(adaptive, common, server_lr))


def rated(server: ServerTransform, common: Common, server_lr: Rate = 1.0) -> ServerTransform:
    return chain(server, scale(common.get("server_lr", server_lr)))


def known(name: str, words: Mapping[str, Any], common: type, own: set[str] | frozenset[str] = frozenset()) -> None:
    known = {*common.__annotations__, *own}
    for word in words:
        if word not in known:
            raise HansaError(f"{name}({word}={words[word]!r}): no such argument. {suggestion(word, known)}")


def _links(name: str, common: Common) -> tuple[Downlink, Uplink]:
    """Uncompressed links; or error feedback up, and with ``two_way`` a compressed replica down, by the same compressor
    or by the one given: a client that was away hears what it missed, so the downlink may want fewer bytes."""
    if "compressor" not in common:
        if common.get("two_way"):
            raise invalid_argument(name, "two_way", True, "a compressor with it", "compressor=hansa.compress.sign().")
        return direct(), direct()
    compressor = common["compressor"]
    check_compressor(name, "compressor", compressor)
    down: Any = common.get("two_way", False)
    if isinstance(down, bool):
        return replica(compressor) if down else direct(), error_feedback(compressor)
    return down if missing_methods(down, Compressor) else replica(down), error_feedback(compressor)


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


def sampler_of(name: str, common: Common) -> Sampler:
    if "sampler" in common and "participation" in common:
        raise HansaError(
            f"{name}(sampler={common['sampler']!r}, participation={common['participation']!r}): expected one of the "
            "two."
        )
    return common["sampler"] if "sampler" in common else uniform(common.get("participation", 1.0))
