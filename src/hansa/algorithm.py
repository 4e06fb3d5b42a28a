"""An algorithm is a value: who takes part, what clients do, and what happens on each channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from hansa.aggregate import Aggregator, mean
from hansa.aggregate.base import Weights
from hansa.compress import Downlink, Uplink, direct
from hansa.errors import HansaError, decay, near, non_negative, positive, refuse, whole
from hansa.local import LocalWork, Solver, epochs
from hansa.local import sgd as sgd_solver
from hansa.sample import Sampler, uniform
from hansa.schedule import Rate, check_rate, rate_at
from hansa.server import ServerTransform, scale
from hansa.types import BUFFERS, MODEL


@dataclass(frozen=True, slots=True)
class Channel:
    """A named vector's way: down to the clients, up from them, into an aggregate, through the server."""

    downlink: Downlink = field(default_factory=direct)
    uplink: Uplink = field(default_factory=direct)
    aggregate: Aggregator = field(default_factory=mean)
    server: ServerTransform = field(default_factory=scale)


@dataclass(frozen=True, slots=True)
class LocalPhase:
    """What a client does with a round: a solver, an amount of work, a rate."""

    solver: Solver = field(default_factory=sgd_solver)
    steps: LocalWork = field(default_factory=lambda: epochs(1))
    lr: Rate = 0.05
    batch_size: int | None = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_rate("LocalPhase", "lr", self.lr)
        if self.batch_size is not None:
            whole("LocalPhase", "batch_size", self.batch_size, "None takes all of a client's samples at each step.")
        decay("LocalPhase", "momentum", self.momentum, "0.9 is usual, 0 is none.")
        non_negative("LocalPhase", "weight_decay", self.weight_decay)
        if self.clip is not None:
            positive("LocalPhase", "clip", self.clip, "It bounds the norm of a gradient; None does not clip.")

    def lr_at(self, round: int) -> float:
        return rate_at(self.lr, round)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A federated method as a composition of parts. `hansa.presets` has the famous ones."""

    name: str = "custom"
    sampler: Sampler = field(default_factory=lambda: uniform(0.1))
    local: LocalPhase = field(default_factory=LocalPhase)
    channels: Mapping[str, Channel] = field(default_factory=lambda: {MODEL: Channel()})

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", dict(self.channels))
        self.validate()

    def validate(self) -> None:
        """Refuse compositions that would quietly compute something else."""
        if MODEL not in self.channels:
            raise HansaError(f"{self.name}: channels {sorted(self.channels)} lack {MODEL!r}, the one that is trained.")
        solver = self.local.solver
        for name in solver.channels:
            if name not in self.channels:
                raise HansaError(
                    f"{self.name}: the solver {solver!r} reports on channel {name!r}, which is not there. "
                    f"Add channels={{{name!r}: Channel(...)}}."
                )
        known = {MODEL, BUFFERS, *solver.channels}
        for name in self.channels:
            if name not in known:
                raise HansaError(f"{self.name}: nothing reports on channel {name!r}. {near(name, known)}")
        weights = getattr(self.channels[MODEL].aggregate, "weights", "uniform")
        if solver.uniform_only and weights != "uniform":
            raise refuse(
                self.name,
                "weights",
                weights,
                "'uniform'",
                f"{type(solver).__name__} is defined for equal weights only.",
            )
        if solver.channels and self.local.momentum:
            raise refuse(
                self.name, "local_momentum", self.local.momentum, "0", "SCAFFOLD reads gradients off y - x, which "
                "momentum would distort."
            )  # fmt: skip

    def check(self, population: int) -> None:
        """Refuse a population that the parts cannot serve."""
        self.sampler.check(population)
        self.local.steps.check(population)
        for channel in self.channels.values():
            weights = getattr(channel.aggregate, "weights", None)
            if isinstance(weights, tuple) and len(weights) != population:
                raise HansaError(f"{self.name}: {len(weights)} weights for {population} clients: give one a client.")

    def on(self, name: str, **changes: Any) -> Algorithm:
        """The same algorithm with parts of one channel exchanged: ``algo.on("model", uplink=...)``."""
        if name not in self.channels:
            raise HansaError(f"{self.name} has no channel {name!r}. {near(name, self.channels)}")
        return replace(self, channels={**self.channels, name: replace(self.channels[name], **changes)})

    def with_server(self, server: ServerTransform) -> Algorithm:
        """The same algorithm with another server for the model."""
        return self.on(MODEL, server=server)

    def with_local(self, **changes: Any) -> Algorithm:
        """The same algorithm with parts of the local phase exchanged."""
        return replace(self, local=replace(self.local, **changes))

    def with_buffers(self) -> Algorithm:
        """The same algorithm with a channel for buffers: averaged as the model's updates are, never optimized."""
        if BUFFERS in self.channels:
            return self
        weights: Weights = getattr(self.channels[MODEL].aggregate, "weights", "uniform")
        return replace(self, channels={**self.channels, BUFFERS: Channel(aggregate=mean(weights))})

    def parts(self) -> Iterator[Any]:
        """Every part in use, outermost first."""
        yield from _walk(self)


def _walk(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        yield value
        for item in fields(value):
            yield from _walk(getattr(value, item.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (tuple, list)) and any(is_dataclass(item) for item in value):
        for item in value:
            yield from _walk(item)
