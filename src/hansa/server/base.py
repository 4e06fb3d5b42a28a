"""The server transform protocol, learning rates, chains, and FedDyn's server."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.core.bounds import Checked, bound, one_of, rule_or_numbers
from hansa.core.errors import check_integer, check_positive, invalid_argument
from hansa.core.protocols import check_component, with_defaults
from hansa.core.schedule import Rate, check_rate, rate_at
from hansa.core.types import RoundContext, State, Vector
from hansa.core.vectors import allocator


@runtime_checkable
class ServerTransform(Protocol):
    """Turns an aggregate into a step. ``init`` returns the state; ``update`` does not modify its arguments.

    Vectors are flat, in the order of ``model.named_parameters()``, with convolution weights channels-last: read a
    parameter by the ``view`` of its entry in ``task.layout``. `BaseServerTransform` declares the optional traits.
    """

    __slots__ = ()

    @abstractmethod
    def init(self, x: Vector) -> State:
        """Return the state before the first round, a plain tree, for the vector that the server holds."""

    @abstractmethod
    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        """Return the step made of the aggregate, and the state after it.

        A channel adds the step to its vector. A channel that ``follows`` another takes the step as its vector.
        """


class BaseServerTransform(Checked, ServerTransform):
    """The optional traits of server transforms, with their defaults.

    >>> scale().cites
    ()
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    """Keys of Hansa's bibliography, or whole BibTeX entries."""
    shared: ClassVar[tuple[str, ...]] = ()
    """For local optimizers: the entries of the state that gossip with the models."""

    def init(self, x: Vector) -> State:
        return {}

    @property
    def on_device(self) -> bool:
        """Whether ``update`` computes with torch on the device of its arguments; otherwise they are on the CPU."""
        return False


require_server = partial(
    check_component, protocol=ServerTransform, noun="a server transform", example="scale(0.1) is one."
)


@dataclass(frozen=True, slots=True)
class scale(BaseServerTransform):
    """step = lr * delta; with lr = 1 this is FedAvg's server (McMahan 2017).

    Args:
        lr: Learning rate of the server, a number or a schedule.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> scale(0.1).update(torch.ones(2), {}, ctx)[0]
    tensor([0.1000, 0.1000])
    """

    lr: Rate = field(default=1.0, metadata=bound(check_rate))
    on_device: ClassVar[bool] = True

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        lr = rate_at(self.lr, ctx.round)
        return (delta if lr == 1.0 else torch.mul(delta, lr, out=allocator.empty_like(delta))), state


def sgd(lr: Rate = 1.0) -> scale:
    """Alias of `scale`: the server's plain gradient step.

    Args:
        lr: Learning rate of the server, a number or a schedule.

    >>> sgd(0.1)
    scale(lr=0.1)
    """
    return scale(lr)


ShareWeights: TypeAlias = Literal["uniform", "samples"] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class participation_scale(BaseServerTransform):
    """step = share * delta: SCAFFOLD's rule for the control variate, c <- c + (M/N) mean (Karimireddy 2020).

    The share is that of the accepted updates in the weights of all clients: M/N, or their share of all samples.

    Args:
        weights: "uniform", "samples", or one number per client: those with which the updates are averaged.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((30, 10)), (0,))
    >>> [float(participation_scale(rule).update(torch.ones(1), {}, ctx)[0]) for rule in ("uniform", "samples")]
    [0.5, 0.75]
    """

    weights: ShareWeights = field(default="uniform", metadata=bound(rule_or_numbers, "uniform", "samples"))
    on_device: ClassVar[bool] = True

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        return delta * participating_share(self.weights, ctx), state


def participating_share(weights: ShareWeights, ctx: RoundContext) -> float:
    """Return the share of a round's clients in the weights of all clients."""
    if weights == "uniform":
        return ctx.fraction
    client_weights = ctx.population.samples if weights == "samples" else weights
    return math.fsum(client_weights[client] for client in ctx.clients) / math.fsum(client_weights)


@dataclass(frozen=True, slots=True)
class derived_control(BaseServerTransform):
    """SCAFFOLD's c from the mean change of the model, for a channel that follows it: with s the share of
    `participation_scale`, c <- (1 - s) c - s Delta / (steps lr), which is c + s mean(c_i' - c_i).

    Args:
        steps: The local steps of every client.
        lr: The local learning rate, a number or a schedule; in a round of rate 0, c stays.
        weights: "uniform", "samples", or one number per client: those with which the updates are averaged.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(0, Population((30, 10)), (0, 1))
    >>> control = derived_control(steps=4, lr=0.5)
    >>> control.update(torch.ones(1), control.init(torch.zeros(1)), ctx)[0]
    tensor([-0.5000])
    """

    steps: int = field(metadata=bound(check_integer))
    lr: Rate = field(metadata=bound(check_rate))
    weights: ShareWeights = field(default="uniform", metadata=bound(rule_or_numbers, "uniform", "samples"))
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020",)
    on_device: ClassVar[bool] = True

    def init(self, x: Vector) -> State:
        return {"c": x.new_zeros(x.shape)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        lr = rate_at(self.lr, ctx.round)
        if not lr:
            return state["c"], state
        share = participating_share(self.weights, ctx)
        c = state["c"] * (1 - share) - delta * (share / (self.steps * lr))
        return c, {"c": c}


@dataclass(frozen=True, slots=True, init=False)
class chain(BaseServerTransform):
    """Transforms applied in sequence: ``chain(ams(), scale(0.1))``.

    Args:
        *transforms: Server transforms; each gets the step of the one before.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> both = chain(scale(0.5), scale(0.5))
    >>> both.update(torch.ones(2), both.init(torch.zeros(2)), ctx)[0]
    tensor([0.2500, 0.2500])
    """

    transforms: tuple[ServerTransform, ...]

    def __init__(self, *transforms: ServerTransform) -> None:
        if not transforms:
            raise invalid_argument("chain", "transforms", transforms, "at least one transform")
        for transform in transforms:
            require_server("chain", "transforms", transform)
        object.__setattr__(self, "transforms", tuple(transforms))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"

    @property
    def on_device(self) -> bool:
        """Whether all transforms compute on the device of their arguments."""
        return all(with_defaults(transform, BaseServerTransform).on_device for transform in self.transforms)

    def init(self, x: Vector) -> State:
        return {str(i): transform.init(x) for i, transform in enumerate(self.transforms)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        new_state: State = {}
        for i, transform in enumerate(self.transforms):
            delta, new_state[str(i)] = transform.update(delta, state[str(i)], ctx)
        return delta, new_state


@dataclass(frozen=True, slots=True)
class dyn(BaseServerTransform):
    """FedDyn's server: h <- h - (alpha/N) sum_S Delta_i; step = Delta - h/alpha (Acar 2021).

    The server's h stays the mean of the clients' duals h_i.

    Args:
        alpha: Weight of the dynamic regularizer; that of the local solver.

    >>> dyn(0.1).init(torch.zeros(2))
    {'h': tensor([0., 0.])}
    """

    alpha: float = field(metadata=bound(check_positive, "The paper uses 0.1, 0.01 or 0.001."))
    cites: ClassVar[tuple[str, ...]] = ("acar2021",)
    on_device: ClassVar[bool] = True

    def init(self, x: Vector) -> State:
        return {"h": x.new_zeros(x.shape)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        h = state["h"] - (self.alpha * ctx.fraction) * delta
        return delta - h / self.alpha, {"h": h}


@dataclass(frozen=True, slots=True)
class delay_adaptive(BaseServerTransform):
    """step = eta_t delta with eta_t = min(eta, 1/tau_max) if tau_max > tau_c, else eta (FADAS, Wang 2024, eq. 4).

    tau_max is the largest staleness of the step's updates. The authors' code (github.com/yujiaw98/FADAS,
    g_delay_adaptive.py) has eta / tau_max instead of the minimum: ``rule="authors"``.

    Args:
        lr: Learning rate eta, a number or a schedule.
        threshold: Staleness tau_c up to which the rate is eta.
        rule: "paper" or "authors".

    >>> from hansa.core.types import Population
    >>> ctx = RoundContext(9, Population((10, 10)), (0, 1), staleness=(1, 4))
    >>> delay_adaptive(0.5, threshold=1).update(torch.ones(1), {}, ctx)[0]
    tensor([0.2500])
    >>> delay_adaptive(0.5, threshold=1, rule="authors").update(torch.ones(1), {}, ctx)[0]
    tensor([0.1250])
    """

    lr: Rate = field(default=1.0, metadata=bound(check_rate))
    threshold: int = field(default=1, metadata=bound(check_integer, "FADAS uses 1 and more.", minimum=0))
    rule: Literal["paper", "authors"] = field(default="paper", metadata=bound(one_of, "paper", "authors"))
    cites: ClassVar[tuple[str, ...]] = ("wang2024fadas",)
    on_device: ClassVar[bool] = True

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        lr, oldest = rate_at(self.lr, ctx.round), ctx.max_staleness
        if oldest > self.threshold:
            lr = min(lr, 1.0 / oldest) if self.rule == "paper" else lr / oldest
        return (delta if lr == 1.0 else torch.mul(delta, lr, out=allocator.empty_like(delta))), state
