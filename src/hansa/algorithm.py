"""An algorithm: a sampler, local work, and channels between the clients and the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import Any

from hansa.aggregate import Aggregator, BaseAggregator, discounted, mean, mixed_models
from hansa.aggregate.base import Weights, require_aggregator
from hansa.compress import Downlink, Uplink, direct
from hansa.compress.links import partial, require_downlink, require_uplink
from hansa.core.bounds import Checked, bound
from hansa.core.errors import HansaError, argument_error, invalid_argument, suggestion
from hansa.core.keys import Key
from hansa.core.protocols import check_citations, walk_components, with_defaults
from hansa.core.types import BUFFERS, MODEL
from hansa.core.vectors.layout import Layout
from hansa.gossip import BaseActivity, resolve
from hansa.gossip.mixing import Mixing as Mixing
from hansa.local.phase import LocalPhase as LocalPhase
from hansa.local.phase import has_shared_state
from hansa.local.solvers import BaseSolver
from hansa.local.work import BaseLocalWork
from hansa.pace.base import Pace, buffered, require_pace, synchronous
from hansa.sample import BaseSampler, Sampler, require_sampler, uniform
from hansa.server import ServerTransform, dyn, scale
from hansa.server.base import require_server

__all__ = ["Algorithm", "Channel"]


@dataclass(frozen=True, slots=True)
class Channel(Checked):
    """The path of a named vector: downlink to the clients, uplink from them, aggregation, server transform.

    A channel with ``follows`` is only broadcast. Clients report nothing on it; after each round its server transform is
    applied to the aggregate of the other channel, and the step that it returns becomes the channel's vector: it is not
    added to the one before. So FedCM's momentum is ``Channel(follows="model", server=momentum())``.

    Args:
        downlink: How the server's vector reaches the clients.
        uplink: How updates reach the server.
        aggregate: How updates are combined.
        server: What the server does with the aggregate before adding it.
        follows: Channel whose aggregate makes this one's vector; clients only receive it.

    >>> Channel().aggregate
    mean(weights='uniform')
    """

    downlink: Downlink = field(default_factory=direct, metadata=bound(require_downlink))
    uplink: Uplink = field(default_factory=direct, metadata=bound(require_uplink))
    aggregate: Aggregator = field(default_factory=mean, metadata=bound(require_aggregator))
    server: ServerTransform = field(default_factory=scale, metadata=bound(require_server))
    follows: str | None = None

    def sharing(self, shared: tuple[tuple[int, int], ...], dim: int) -> Channel:
        """Return the channel with links on which only some ranges of a vector of ``dim`` entries travel."""
        return replace(self, downlink=partial(self.downlink, shared, dim), uplink=partial(self.uplink, shared, dim))


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A federated method as a composition of components. `hansa.presets` has published methods.

    Args:
        name: Name in tables and errors.
        sampler: Sampler of the participants.
        local: Local work of the clients.
        channels: Channels by name; "model" is the trained one.
        pace: Which updates a server step waits for.

    >>> from hansa import presets
    >>> method = presets.fedavg(steps=5)
    >>> method.name, sorted(method.channels), method.with_local(lr=0.5).local.lr
    ('fedavg', ['model'], 0.5)
    """

    name: str = "custom"
    sampler: Sampler = field(default_factory=lambda: uniform(0.1))
    local: LocalPhase = field(default_factory=LocalPhase)
    channels: Mapping[str, Channel] = field(default_factory=lambda: {MODEL: Channel()})
    pace: Pace = field(default_factory=synchronous)

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.name != "pace" or self.pace != synchronous()]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_html_(self) -> str:
        """Return a table of the fields, for notebooks."""
        rows = (
            f"<tr><th>{item.name}</th><td>{escape(repr(getattr(self, item.name)))}</td></tr>" for item in fields(self)
        )
        return f"<table>{''.join(rows)}</table>"

    def __post_init__(self) -> None:
        require_sampler("Algorithm", "sampler", self.sampler)
        if not isinstance(self.local, LocalPhase):
            example = "LocalPhase(steps=fixed(5)) is one."
            raise invalid_argument("Algorithm", "local", self.local, "a local phase", example)
        require_pace("Algorithm", "pace", self.pace)
        if not isinstance(self.channels, Mapping):
            example = "{'model': Channel(...)}."
            raise invalid_argument("Algorithm", "channels", self.channels, "channels by name", example)
        for name, channel in self.channels.items():
            if not isinstance(channel, Channel):
                expected = f"a channel, Channel(...), on {name!r}"
                raise invalid_argument("Algorithm", "channels", self.channels, expected)
        object.__setattr__(self, "channels", dict(self.channels))
        self.validate()

    def validate(self) -> None:
        """Raise for compositions that would silently compute something else."""
        check_citations(self.components())
        channels, solver = self.channels, with_defaults(self.local.solver, BaseSolver)
        if MODEL not in channels:
            raise self._refusal(MODEL, f"channels {sorted(channels)} lack {MODEL!r}, the one that is trained.")
        if channels[MODEL].follows is not None:
            raise self._refusal(
                MODEL, f"channel {MODEL!r} follows {channels[MODEL].follows!r}, but clients train the model and report "
                "on it. Omit follows, or let the other channel follow the model."
            )  # fmt: skip
        part = "solver" if self.local.loop is None else "loop"
        needed = {
            **dict.fromkeys(self.local.receives, ("clients receive", "follows='model', ...")),
            **dict.fromkeys(self.local.channels, (f"the {part} {getattr(self.local, part)!r} reports on", "...")),
        }
        for name, (subject, arguments) in needed.items():
            if name not in channels:
                remedy = f"Add channels={{{name!r}: Channel({arguments})}}."
                component = part if name in self.local.channels else "channels"
                raise self._refusal(name, f"{subject} channel {name!r}, which does not exist. {remedy}", component)
        reported = [name for name, channel in channels.items() if channel.follows is None]
        for name, channel in channels.items():
            if channel.follows is not None and channel.follows not in reported:
                hint = suggestion(channel.follows, reported)
                problem = f"channel {name!r} follows {channel.follows!r}, on which nothing is reported. {hint}"
                raise self._refusal(name, problem)
            if name not in (reported_names := {MODEL, BUFFERS, *needed}):
                raise self._refusal(name, f"nothing reports on channel {name!r}. {suggestion(name, reported_names)}")
        weights = with_defaults(channels[MODEL].aggregate, BaseAggregator).weights
        if solver.uniform_only and weights != "uniform":
            remedy = f"{type(self.local.solver).__name__} is defined for equal weights only."
            raise invalid_argument(self.name, "weights", weights, "'uniform'", remedy)
        solver.check_composition(self.name, self.local, channels)
        if self.serverless:
            self._validate_serverless()
        check_pace_composition(self.name, self.pace, self.local, channels)

    def _refusal(self, channel: str, problem: str, component: str = "channels") -> HansaError:
        return HansaError(f"{self.name}: {problem}", component=component, argument=channel)

    @property
    def serverless(self) -> bool:
        """Whether clients keep their own models and the server only averages them for evaluation."""
        return self.local.mixing is not None and self.local.mixing.keep_local_models

    @property
    def needs_client_stats(self) -> bool:
        """Whether the sampler or an aggregator needs client statistics."""
        parts = (self.sampler, *(channel.aggregate for channel in self.channels.values()), *self.components())
        return any(getattr(part, "needs_client_stats", False) is True for part in parts if part is not self)

    def bind_layout(self, layout: Layout | None) -> Algorithm:
        """Return the algorithm for a given model, with named blocks resolved to ranges of its flat vector, and links
        that carry what is outside of private blocks."""
        local = self.local.bind(layout)
        if local.private_blocks is None or layout is None:
            return replace(self, local=local)
        shared = local.private_blocks.outside(layout.dim)
        channels = {name: channel.sharing(shared, layout.dim) for name, channel in self.channels.items()}
        return replace(self, local=local, channels=channels)

    def _validate_serverless(self) -> None:
        """Raise unless all clients participate and the server only averages, as serverless methods require."""
        model = self.channels[MODEL]
        allowed = {"sampler": uniform(1.0), **{item.name: getattr(Channel(), item.name) for item in fields(Channel)}}
        for argument, expected in allowed.items():
            component = self.sampler if argument == "sampler" else getattr(model, argument)
            if component != expected:
                raise argument_error(
                    self.name, argument, component, "with Mixing(keep_local_models=True) there is no server and "
                    f"all clients participate: expected {expected!r}. Omit keep_local_models to use a server.",
                )  # fmt: skip

    def bind(self, population: int, key: Key, labels: Any = None) -> Algorithm:
        """Return the algorithm for a given population, with clusters resolved to lists of clients.

        ``labels`` are counts [clients, classes], or a function that returns them, for rules that use labels.
        """
        mixing, sampler = self.local.mixing, self.sampler
        if mixing is None:
            self.check(population)
            return self
        groups = tuple(tuple(group) for group in resolve(mixing.clusters, population, key.child("clusters"), labels))
        bound_sampler = with_defaults(sampler, BaseSampler).bind(groups)
        bound = replace(self, sampler=bound_sampler).with_local(mixing=replace(mixing, clusters=groups))
        bound.check(population)
        return bound

    def check(self, population: int) -> None:
        """Raise if the components do not support a population of this size."""
        with_defaults(self.sampler, BaseSampler).check(population)
        self.pace.check(population, participants_of(self.sampler, population))
        mixing, steps = self.local.mixing, self.local.steps
        if mixing is None:
            self._check_without_gossip()
        else:
            mixing.topology.check_clusters(len(mixing.cluster_lists()))
            mixing.check_neighbours()
            with_defaults(mixing.active, BaseActivity).check(
                mixing.cluster_lists(), with_defaults(steps, BaseLocalWork).common
            )
        with_defaults(steps, BaseLocalWork).check(population)
        for channel in self.channels.values():
            weights = with_defaults(channel.aggregate, BaseAggregator).weights
            if isinstance(weights, tuple) and len(weights) != population:
                raise HansaError(f"{self.name}: {len(weights)} weights for {population} clients: give one a client.")

    def _check_without_gossip(self) -> None:
        """Raise for components that require gossip."""
        for name, channel in self.channels.items():
            if with_defaults(channel.aggregate, BaseAggregator).weights == "clusters":
                raise invalid_argument(
                    self.name, "weights", "clusters", "'uniform' or 'samples'", f"Channel {name!r} has no clusters."
                )
        if has_shared_state(self.local.optimizer):
            problem = "clients do not gossip. Use hansa.server.amsgrad()."
            raise argument_error(self.name, "optimizer", self.local.optimizer, problem)

    def on(self, name: str, **changes: Any) -> Algorithm:
        """Return the algorithm with components of one channel replaced: ``algo.on("model", uplink=...)``."""
        if name not in self.channels:
            raise HansaError(f"{self.name} has no channel {name!r}. {suggestion(name, self.channels)}")
        return self.exchange(channels={name: changes})

    def exchange(
        self,
        *,
        sampler: Sampler | None = None,
        local: Mapping[str, Any] | None = None,
        channels: Mapping[str, Mapping[str, Any]] | None = None,
        pace: Pace | None = None,
    ) -> Algorithm:
        """Return the algorithm with several components replaced at once, for changes that depend on each other.

        An example is a solver and its channel. Missing channels are added.
        """
        changed = {
            name: replace(self.channels.get(name, Channel()), **parts) for name, parts in (channels or {}).items()
        }
        return replace(
            self,
            sampler=self.sampler if sampler is None else sampler,
            local=replace(self.local, **(local or {})),
            channels={**self.channels, **changed},
            pace=self.pace if pace is None else pace,
        )

    def with_server(self, server: ServerTransform) -> Algorithm:
        """Return the algorithm with another server transform for the model."""
        return self.on(MODEL, server=server)

    def with_pace(self, pace: Pace) -> Algorithm:
        """Return the algorithm with another pace: ``algo.with_pace(hansa.pace.buffered(10))``."""
        return self.exchange(pace=pace)

    def with_local(self, **changes: Any) -> Algorithm:
        """Return the algorithm with components of the local work replaced."""
        return self.exchange(local=changes)

    def with_buffers(self, dim: int) -> Algorithm:
        """Return the algorithm with a channel for ``dim`` buffer entries, which are averaged like the model's updates;
        those of private blocks stay at the clients."""
        if BUFFERS in self.channels:
            return self
        weights: Weights = with_defaults(self.channels[MODEL].aggregate, BaseAggregator).weights
        model = self.channels[MODEL].aggregate
        aggregate = model if isinstance(model, (discounted, mixed_models)) else mean(weights)
        channel, private = Channel(aggregate=aggregate), self.local.private_blocks
        if private is not None and private.buffers:
            channel = channel.sharing(private.outside(dim, of_buffers=True), dim)
        return replace(self, channels={**self.channels, BUFFERS: channel})

    def components(self) -> Iterator[Any]:
        """Yield every component in use, outermost first."""
        yield from walk_components(self)


def check_pace_composition(name: str, pace: Pace, local: LocalPhase, channels: Mapping[str, Any]) -> None:
    """Raise for components that would silently compute something else with this pace."""
    if local.mixing is not None and pace != synchronous():
        raise _refusal(
            name, pace, "clients that gossip exchange after every step and finish together, from one version. "
            "Use synchronous()."
        )  # fmt: skip
    if not isinstance(pace, buffered):
        return
    for label, channel in channels.items():
        if not isinstance(getattr(channel.downlink, "link", channel.downlink), direct):
            raise _refusal(
                name, pace, f"the downlink of {label!r} is {channel.downlink!r}: all clients share one replica, but "
                "clients at work hold different versions. Use direct()."
            )  # fmt: skip
        if any(isinstance(part, dyn) for part in walk_components(channel.server)):
            raise _refusal(
                name, pace, "FedDyn's server replaces the model by the mean of the clients' models minus h/alpha, "
                "which holds for updates of one version only. Use another preset, or synchronous()."
            )  # fmt: skip
        if isinstance(pace.size, int):
            check_enough_updates(name, pace, channels, pace.size)


def check_enough_updates(name: str, pace: Pace, channels: Mapping[str, Any], size: int) -> None:
    """Raise for aggregators that need more updates than a server step has."""
    for channel in channels.values():
        least = with_defaults(channel.aggregate, BaseAggregator).min_updates
        if least > size:
            raise _refusal(
                name, pace, f"{channel.aggregate!r} needs {least} updates, a step has {size}. Use a larger size."
            )  # fmt: skip


def _refusal(name: str, pace: Pace, reason: str) -> HansaError:
    return HansaError(f"{name}(pace={pace!r}): {reason}", component=name, argument="pace", value=pace)


def participants_of(sampler: Sampler, population: int) -> int | None:
    """Return how many clients a sampler selects, if its arguments say so.

    >>> from hansa.sample import uniform
    >>> participants_of(uniform(0.1), 50), participants_of(uniform(count=3), 50)
    (5, 3)
    """
    count, share = getattr(sampler, "count", None), getattr(sampler, "participation", None)
    if isinstance(count, int):
        return count
    return max(1, int(share * population + 0.5)) if isinstance(share, float) else None
