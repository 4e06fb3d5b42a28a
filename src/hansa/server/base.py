"""The server transform protocol, learning rates, chains, and FedDyn's server."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from hansa.core.errors import check_positive, invalid_argument
from hansa.core.protocols import check_component
from hansa.core.types import RoundContext, State, Vector
from hansa.core.vectors import allocator
from hansa.schedule import Rate, check_rate, rate_at


@runtime_checkable
class ServerTransform(Protocol):
    """Turns an aggregate into a step. ``init`` returns the state; ``update`` does not modify its arguments.

    `BaseServerTransform` declares the optional traits.
    """

    __slots__ = ()

    @abstractmethod
    def init(self, x: Vector) -> State:
        """Return the state before the first round, a plain tree, for the vector that the server holds."""

    @abstractmethod
    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        """Return the step that the server adds to its vector, and the state after it."""


class BaseServerTransform(ServerTransform):
    """The optional traits of server transforms, with their defaults.

    >>> scale().cites
    ()
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    """Keys of Hansa's bibliography, or whole BibTeX entries."""
    shared: ClassVar[tuple[str, ...]] = ()
    """For local optimizers: the entries of the state that gossip with the models."""


def require_server(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a server transform."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    instead = f"scale({value!r})" if number else ""
    check_component(
        owner, argument, value, ServerTransform, "a server transform", instead=instead, example="scale(0.1) is one."
    )


@dataclass(frozen=True, slots=True)
class scale(BaseServerTransform):
    """step = lr * delta; with lr = 1 this is FedAvg's server (McMahan 2017).

    Args:
        lr: Learning rate of the server, a number or a schedule.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> scale(0.1).update(torch.ones(2), {}, ctx)[0]
    tensor([0.1000, 0.1000])
    """

    lr: Rate = 1.0
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_rate("scale", "lr", self.lr)

    def init(self, x: Vector) -> State:
        return {}

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


@dataclass(frozen=True, slots=True)
class participation_scale(BaseServerTransform):
    """step = (M/N) delta: SCAFFOLD's rule for the control variate, c <- c + (M/N) mean (Karimireddy 2020).

    >>> participation_scale()
    participation_scale()
    """

    cites: ClassVar[tuple[str, ...]] = ()

    def init(self, x: Vector) -> State:
        return {}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        return delta * ctx.fraction, state


@dataclass(frozen=True, slots=True, init=False)
class chain(BaseServerTransform):
    """Transforms applied in sequence: ``chain(ams(), scale(0.1))``.

    Args:
        *transforms: Server transforms; each gets the step of the one before.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> both = chain(scale(0.5), scale(0.5))
    >>> both.update(torch.ones(2), both.init(torch.zeros(2)), ctx)[0]
    tensor([0.2500, 0.2500])
    """

    transforms: tuple[ServerTransform, ...]
    cites: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *transforms: ServerTransform) -> None:
        if not transforms:
            raise invalid_argument(
                "chain", "transforms", transforms, "at least one transform", "chain(ams(), scale(0.1))."
            )
        for transform in transforms:
            require_server("chain", "transforms", transform)
        object.__setattr__(self, "transforms", tuple(transforms))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"

    def init(self, x: Vector) -> State:
        return {str(i): transform.init(x) for i, transform in enumerate(self.transforms)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        after: State = {}
        for i, transform in enumerate(self.transforms):
            delta, after[str(i)] = transform.update(delta, state[str(i)], ctx)
        return delta, after


@dataclass(frozen=True, slots=True)
class dyn(BaseServerTransform):
    """FedDyn's server: h <- h - (alpha/N) sum_S Delta_i; step = Delta - h/alpha (Acar 2021).

    The server's h stays the mean of the clients' duals h_i.

    Args:
        alpha: Weight of the dynamic regularizer; that of the local solver.

    >>> dyn(0.1).init(torch.zeros(2))
    {'h': tensor([0., 0.])}
    """

    alpha: float
    cites: ClassVar[tuple[str, ...]] = ("acar2021",)

    def __post_init__(self) -> None:
        check_positive("dyn", "alpha", self.alpha, "The paper uses 0.1, 0.01 or 0.001.")

    def init(self, x: Vector) -> State:
        return {"h": x.new_zeros(x.shape)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        h = state["h"] - (self.alpha * ctx.fraction) * delta
        return delta - h / self.alpha, {"h": h}
