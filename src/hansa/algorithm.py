"""An algorithm is a value: who takes part, what clients do, and what happens on each channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hansa.aggregate import Aggregator, BaseAggregator, mean
from hansa.aggregate.base import Weights, require_aggregator
from hansa.compress import Downlink, Uplink, direct
from hansa.compress.downlink import require_downlink
from hansa.compress.uplink import require_uplink
from hansa.core.citations import check_citations
from hansa.core.errors import (
    HansaError,
    check_decay,
    check_integer,
    check_non_negative,
    check_positive,
    invalid_argument,
    suggestion,
)
from hansa.core.html_repr import HtmlRepr
from hansa.core.keys import Key
from hansa.core.protocols import walk_components, with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.layout import Layout
from hansa.gossip import BaseActivity, Topology, resolve
from hansa.local import Correction, LocalStep, LocalWork, Solver, blocks, epochs, solver_receives
from hansa.local import sgd as sgd_solver
from hansa.local.mixing import Mixing as Mixing
from hansa.local.solvers import BaseSolver, require_solver
from hansa.local.work import BaseLocalWork, require_work
from hansa.sample import BaseSampler, Sampler, require_sampler, uniform
from hansa.schedule import Rate, check_rate, rate_at
from hansa.server import BaseServerTransform, ServerTransform, scale
from hansa.server.base import require_server


@dataclass(frozen=True, slots=True)
class Channel:
    """A named vector's way: down to the clients, up from them, into an aggregate, through the server.

    ``follows`` names another channel: then this one is broadcast only. Nothing is reported on it; after each round its
    vector is what its server makes of the other's aggregate, as FedCM's momentum is of the model's.

    Args:
        downlink: How the server's vector reaches the clients.
        uplink: How updates reach the server.
        aggregate: How updates are combined.
        server: What the server does with the aggregate before adding it.
        follows: Channel whose reports move this one; clients only receive it.

    >>> Channel().aggregate
    mean(weights='uniform')
    """

    downlink: Downlink = field(default_factory=direct)
    uplink: Uplink = field(default_factory=direct)
    aggregate: Aggregator = field(default_factory=mean)
    server: ServerTransform = field(default_factory=scale)
    follows: str | None = None

    def __post_init__(self) -> None:
        require_downlink("Channel", "downlink", self.downlink)
        require_uplink("Channel", "uplink", self.uplink)
        require_aggregator("Channel", "aggregate", self.aggregate)
        require_server("Channel", "server", self.server)


@dataclass(frozen=True, slots=True)
class LocalPhase:
    """What a client does in a round: a solver, an amount of work, a learning rate.

    Args:
        solver: Correction of the local steps.
        steps: Amount of local work.
        lr: Learning rate, a number or a schedule by round.
        batch_size: Rows per batch; None takes all rows of the client.
        momentum: Momentum of the local steps, starting from zero in every round.
        weight_decay: L2 penalty of the local steps.
        max_grad_norm: Clip gradients to this norm; None does not clip.
        optimizer: Any server transform, applied to -g; None takes plain steps.
        mixing: Gossip between the local steps; None trains every client alone.
        optimizer_state: "fresh" in every round, "kept" in the client's memory, or received: ``{"m": "momentum"}``
            starts m from the channel "momentum".
        decoupled_weight_decay: Decay the weights directly instead of through the optimizer (AdamW).
        private_blocks: Blocks that stay with their client and are never sent (FedBN).
        frozen_blocks: Blocks that are not trained.

    >>> LocalPhase(lr=0.1, batch_size=None).lr
    0.1
    """

    solver: Solver = field(default_factory=sgd_solver)
    steps: LocalWork = field(default_factory=lambda: epochs(1))
    lr: Rate = 0.05
    batch_size: int | None = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    optimizer: ServerTransform | None = None
    mixing: Mixing | None = None
    optimizer_state: Literal["fresh", "kept"] | Mapping[str, str] = "fresh"
    decoupled_weight_decay: bool = False
    private_blocks: blocks | None = None
    frozen_blocks: blocks | None = None

    def __post_init__(self) -> None:
        require_solver("LocalPhase", "solver", self.solver)
        require_work("LocalPhase", "steps", self.steps)
        if self.optimizer is not None:
            require_server("LocalPhase", "optimizer", self.optimizer)
        check_rate("LocalPhase", "lr", self.lr)
        if self.batch_size is not None:
            check_integer(
                "LocalPhase", "batch_size", self.batch_size, "None takes all of a client's samples at each step."
            )
        check_decay("LocalPhase", "momentum", self.momentum, "0.9 is usual, 0 is none.")
        check_non_negative("LocalPhase", "weight_decay", self.weight_decay)
        if self.max_grad_norm is not None:
            check_positive(
                "LocalPhase",
                "max_grad_norm",
                self.max_grad_norm,
                "It bounds the norm of a gradient; None does not clip.",
            )
        if self.optimizer is not None and self.momentum:
            raise invalid_argument(
                "LocalPhase", "momentum", self.momentum, "0 with a local optimizer, which has its own"
            )
        self._check_state()
        if self.mixing is not None:
            if not isinstance(self.mixing, Mixing):
                expected = f"Mixing({self.mixing!r})" if isinstance(self.mixing, Topology) else "Mixing(ring()) or None"
                raise invalid_argument("LocalPhase", "mixing", self.mixing, expected)
            if with_defaults(self.solver, BaseSolver).memory or with_defaults(self.solver, BaseSolver).channels:
                raise HansaError(
                    f"LocalPhase(solver={self.solver!r}, mixing=...): clients that gossip keep no variates of their "
                    "own. Use sgd() or prox(mu).",
                    component="LocalPhase",
                    argument="solver",
                )
            if self.mixing.keep_local_models and (
                with_defaults(self.solver, BaseSolver).prox_weight or solver_receives(self.solver)
            ):
                raise HansaError(
                    f"LocalPhase(solver={self.solver!r}, mixing=Mixing(keep_local_models=True)): clients that keep "
                    "their own models receive no model for a proximal term. Use sgd().",
                    component="LocalPhase",
                    argument="solver",
                )
            if self.mixing.compressor is not None and _has_shared_state(self.optimizer):
                raise HansaError(
                    f"LocalPhase(optimizer={self.optimizer!r}, mixing=Mixing(compressor=...)): its second moment "
                    "gossips uncompressed only. Use server.amsgrad(), which stays with each client, or no compressor.",
                    component="LocalPhase",
                    argument="optimizer",
                )
            if with_defaults(self.steps, BaseLocalWork).common is None:
                raise invalid_argument(
                    "LocalPhase", "steps", self.steps, "one number of steps for all", "Those who gossip step together."
                )

    def _check_state(self) -> None:
        state = self.optimizer_state
        if isinstance(state, Mapping):
            object.__setattr__(self, "optimizer_state", dict(state))
            if self.optimizer is None:
                raise invalid_argument("LocalPhase", "optimizer_state", state, "a local optimizer to start from it")
        elif state not in ("fresh", "kept"):
            raise invalid_argument("LocalPhase", "optimizer_state", state, "'fresh', 'kept' or a mapping to channels")
        for name, chosen in (("private_blocks", self.private_blocks), ("frozen_blocks", self.frozen_blocks)):
            if chosen is not None and not isinstance(chosen, blocks):
                raise invalid_argument("LocalPhase", name, chosen, "blocks of the model", 'hansa.local.blocks("bn*").')
        if self.mixing is not None and (self.private_blocks or self.frozen_blocks or state != "fresh"):
            raise HansaError(
                "LocalPhase(mixing=...): clients that gossip share the whole model, and their optimizers last as long "
                "as their models do. Leave out private, frozen and optimizer_state.",
                component="LocalPhase",
                argument="mixing",
            )

    @property
    def receives(self) -> tuple[str, ...]:
        """The channels that clients only receive."""
        state = self.optimizer_state
        return (*solver_receives(self.solver), *(state.values() if isinstance(state, Mapping) else ()))

    def lr_at(self, round: int) -> float:
        return rate_at(self.lr, round)

    def local_step(
        self,
        round: int,
        anchor: Vector,
        correction: Correction,
        got: Vectors | None = None,
        memory: Vectors | None = None,
    ) -> LocalStep:
        """Return one client's local step in a round, from the model it received and what it remembers."""
        step = LocalStep(
            self.lr_at(round),
            anchor,
            correction.prox_weight,
            correction.shift,
            self.weight_decay,
            self.momentum,
            self.max_grad_norm,
            optimizer=self.optimizer,
            decoupled_weight_decay=self.decoupled_weight_decay,
            ascent_offset=with_defaults(self.solver, BaseSolver).ascent_offset,
            frozen_blocks=self.frozen_blocks,
        )
        if isinstance(self.optimizer_state, Mapping):
            assert got is not None
            step.restore({name: got[channel] for name, channel in self.optimizer_state.items()}, anchor)
        elif self.optimizer_state == "kept" and memory:
            prefix = "local/optimizer/"
            rows = {name[len(prefix) :]: row for name, row in memory.items() if name.startswith(prefix)}
            step.restore(rows, anchor)
        return step

    def client_start(self, x: Vector, memory: Mapping[str, Vector], *, of_buffers: bool = False) -> Vector:
        """The model that a client starts from: the received one with its own private blocks in it."""
        own = memory.get("local/private_buffers" if of_buffers else "local/private")
        if self.private_blocks is None or own is None:
            return x
        return self.private_blocks.put(x.clone(), own, of_buffers=of_buffers)

    def without_private_blocks(self, change: Vector, *, of_buffers: bool = False) -> Vector:
        """What of a change is reported: nothing of private blocks."""
        return change if self.private_blocks is None else self.private_blocks.put(change, 0.0, of_buffers=of_buffers)

    def memory_after(self, step: LocalStep, y: Vector, buffers: Vector | None) -> Vectors:
        """What a client remembers of its training."""
        memory: Vectors = {}
        if self.private_blocks is not None:
            memory["local/private"] = self.private_blocks.take(y)
            if buffers is not None and self.private_blocks.buffers:
                memory["local/private_buffers"] = self.private_blocks.take(buffers, of_buffers=True)
        if self.optimizer_state == "kept":
            memory.update({f"local/optimizer/{name}": row for name, row in step.memory_rows().items()})
        return memory

    def bind(self, layout: Layout | None) -> LocalPhase:
        """The same phase with its blocks placed in a model."""
        if self.private_blocks is None and self.frozen_blocks is None:
            return self
        private = None if self.private_blocks is None else self.private_blocks.bind(layout)
        return replace(
            self,
            private_blocks=private,
            frozen_blocks=None if self.frozen_blocks is None else self.frozen_blocks.bind(layout),
        )


@dataclass(frozen=True, slots=True)
class Algorithm(HtmlRepr):
    """A federated method as a composition of components. `hansa.presets` has published ones.

    Args:
        name: Name in tables and errors.
        sampler: Who takes part in a round.
        local: What clients do.
        channels: Channels by name; "model" is the trained one.

    >>> from hansa import presets
    >>> method = presets.fedavg(steps=5)
    >>> method.name, sorted(method.channels), method.with_local(lr=0.5).local.lr
    ('fedavg', ['model'], 0.5)
    """

    name: str = "custom"
    sampler: Sampler = field(default_factory=lambda: uniform(0.1))
    local: LocalPhase = field(default_factory=LocalPhase)
    channels: Mapping[str, Channel] = field(default_factory=lambda: {MODEL: Channel()})

    def __post_init__(self) -> None:
        require_sampler("Algorithm", "sampler", self.sampler)
        if not isinstance(self.local, LocalPhase):
            raise invalid_argument(
                "Algorithm", "local", self.local, "a local phase", "LocalPhase(steps=fixed(5)) is one."
            )
        if not isinstance(self.channels, Mapping):
            raise invalid_argument(
                "Algorithm", "channels", self.channels, "channels by name", "{'model': Channel(...)}."
            )
        for name, channel in self.channels.items():
            if not isinstance(channel, Channel):
                expected = f"a channel, Channel(...), on {name!r}"
                raise invalid_argument("Algorithm", "channels", self.channels, expected)
        object.__setattr__(self, "channels", dict(self.channels))
        self.validate()

    def validate(self) -> None:
        """Refuse compositions that would quietly compute something else."""
        check_citations(self.components())
        if MODEL not in self.channels:
            raise HansaError(f"{self.name}: channels {sorted(self.channels)} lack {MODEL!r}, the one that is trained.")
        solver = self.local.solver
        reports: tuple[str, ...] = with_defaults(solver, BaseSolver).channels
        for name in reports:
            if name not in self.channels:
                raise HansaError(
                    f"{self.name}: the solver {solver!r} reports on channel {name!r}, which is not there. "
                    f"Add channels={{{name!r}: Channel(...)}}.",
                    component="solver",
                    argument=name,
                )
        for name, channel in self.channels.items():
            followed = self.channels.get(channel.follows) if channel.follows is not None else None
            if channel.follows is not None and (followed is None or followed.follows is not None):
                raise HansaError(
                    f"{self.name}: channel {name!r} follows {channel.follows!r}, on which nothing is reported. "
                    f"{suggestion(channel.follows, [n for n, c in self.channels.items() if c.follows is None])}",
                    component="channels",
                    argument=name,
                )
        for name in self.local.receives:
            if name not in self.channels:
                raise HansaError(
                    f"{self.name}: clients receive channel {name!r}, which is not there. "
                    f"Add channels={{{name!r}: Channel(follows='model', ...)}}."
                )
        known = {MODEL, BUFFERS, *reports, *self.local.receives}
        for name in self.channels:
            if name not in known:
                raise HansaError(
                    f"{self.name}: nothing reports on channel {name!r}. {suggestion(name, known)}",
                    component="channels",
                    argument=name,
                )
        weights = with_defaults(self.channels[MODEL].aggregate, BaseAggregator).weights
        if with_defaults(solver, BaseSolver).uniform_only and weights != "uniform":
            raise invalid_argument(
                self.name,
                "weights",
                weights,
                "'uniform'",
                f"{type(solver).__name__} is defined for equal weights only.",
            )
        if reports and self.local.momentum:
            raise invalid_argument(
                self.name, "local_momentum", self.local.momentum, "0", "SCAFFOLD reads gradients off y - x, which "
                "momentum would distort."
            )  # fmt: skip

        if self.serverless:
            self._validate_serverless()

    @property
    def serverless(self) -> bool:
        """Whether clients keep their own models, so that the server only looks on."""
        return self.local.mixing is not None and self.local.mixing.keep_local_models

    @property
    def needs_client_stats(self) -> bool:
        """Whether a sampler or an aggregator asks for what was last heard of every client."""
        aggregators = (
            with_defaults(channel.aggregate, BaseAggregator).needs_client_stats for channel in self.channels.values()
        )
        declared_needs = (with_defaults(self.sampler, BaseSampler).needs_client_stats, *aggregators)
        return any(declared_needs) or any(
            getattr(part, "needs_client_stats", False) is True for part in self.components() if part is not self
        )

    def bind_layout(self, layout: Layout | None) -> Algorithm:
        """The same algorithm for a given model: named blocks have their places in its flat vector."""
        return replace(self, local=self.local.bind(layout))

    def _validate_serverless(self) -> None:
        """Clients that keep their own models all take part, and the server only averages what it sees."""
        model = self.channels[MODEL]
        wanted = {
            "sampler": (self.sampler, uniform(1.0)),
            "aggregate": (model.aggregate, mean()),
            "server": (model.server, scale(1.0)),
            "uplink": (model.uplink, direct()),
            "downlink": (model.downlink, direct()),
        }
        for argument, (component, allowed) in wanted.items():
            if component != allowed:
                raise HansaError(
                    f"{self.name}({argument}={component!r}): with Mixing(keep_local_models=True) there is no server "
                    f"and everyone takes part: expected {allowed!r}. Leave out keep_local_models to use a server.",
                    component=self.name,
                    argument=argument,
                )

    def bind(self, population: int, key: Key, labels: Any = None) -> Algorithm:
        """The same algorithm for a given population: clusters are lists of clients, whatever rule made them.

        ``labels``: counts [clients, classes] or a function that gives them, for rules that look at labels.
        """
        mixing, sampler = self.local.mixing, self.sampler
        if mixing is None:
            self.check(population)
            return self
        groups = tuple(tuple(group) for group in resolve(mixing.clusters, population, key.child("clusters"), labels))
        known = with_defaults(sampler, BaseSampler).bind(groups)
        bound = replace(self, sampler=known).with_local(mixing=replace(mixing, clusters=groups))
        bound.check(population)
        return bound

    def check(self, population: int) -> None:
        """Raise if the components cannot serve a population of this size."""
        with_defaults(self.sampler, BaseSampler).check(population)
        mixing, steps = self.local.mixing, self.local.steps
        if mixing is None:
            self._check_alone()
        else:
            with_defaults(mixing.active, BaseActivity).check(
                mixing.cluster_lists(), with_defaults(steps, BaseLocalWork).common
            )
        with_defaults(steps, BaseLocalWork).check(population)
        for channel in self.channels.values():
            weights = with_defaults(channel.aggregate, BaseAggregator).weights
            if isinstance(weights, tuple) and len(weights) != population:
                raise HansaError(f"{self.name}: {len(weights)} weights for {population} clients: give one a client.")

    def _check_alone(self) -> None:
        """What only clients that gossip have."""
        for name, channel in self.channels.items():
            if with_defaults(channel.aggregate, BaseAggregator).weights == "clusters":
                raise invalid_argument(
                    self.name, "weights", "clusters", "'uniform' or 'samples'", f"On {name!r} nobody has a cluster."
                )
        if _has_shared_state(self.local.optimizer):
            raise HansaError(
                f"{self.name}(optimizer={self.local.optimizer!r}): nobody gossips. Use hansa.server.amsgrad().",
                component=self.name,
                argument="optimizer",
            )

    def on(self, name: str, **changes: Any) -> Algorithm:
        """The same algorithm with parts of one channel exchanged: ``algo.on("model", uplink=...)``."""
        if name not in self.channels:
            raise HansaError(f"{self.name} has no channel {name!r}. {suggestion(name, self.channels)}")
        return self.exchange(channels={name: changes})

    def exchange(
        self,
        *,
        sampler: Sampler | None = None,
        local: Mapping[str, Any] | None = None,
        channels: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Algorithm:
        """The same algorithm with parts exchanged in several places at once, for changes that need each other: a solver
        and the channel that it reports on. A channel that is not there yet is added."""
        changed = {
            name: replace(self.channels.get(name, Channel()), **parts) for name, parts in (channels or {}).items()
        }
        return replace(
            self,
            sampler=self.sampler if sampler is None else sampler,
            local=replace(self.local, **(local or {})),
            channels={**self.channels, **changed},
        )

    def with_server(self, server: ServerTransform) -> Algorithm:
        """The same algorithm with another server for the model."""
        return self.on(MODEL, server=server)

    def with_local(self, **changes: Any) -> Algorithm:
        """The same algorithm with parts of the local phase exchanged."""
        return self.exchange(local=changes)

    def with_buffers(self) -> Algorithm:
        """The same algorithm with a channel for buffers: averaged as the model's updates are, never optimized."""
        if BUFFERS in self.channels:
            return self
        weights: Weights = with_defaults(self.channels[MODEL].aggregate, BaseAggregator).weights
        return replace(self, channels={**self.channels, BUFFERS: Channel(aggregate=mean(weights))})

    def components(self) -> Iterator[Any]:
        """Every part in use, outermost first."""
        yield from walk_components(self)


def _has_shared_state(optimizer: ServerTransform | None) -> bool:
    """Whether rows of a local optimizer's state are mixed with the models."""
    return optimizer is not None and bool(with_defaults(optimizer, BaseServerTransform).shared)
