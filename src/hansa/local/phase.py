"""The local phase: a client's training in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from hansa.core.bounds import Checked, bound, or_none
from hansa.core.errors import (
    argument_error,
    check_decay,
    check_integer,
    check_non_negative,
    check_positive,
    invalid_argument,
)
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.schedule import Rate, check_rate, rate_at
from hansa.core.types import Vector, Vectors
from hansa.core.vectors.layout import Layout
from hansa.gossip import Topology
from hansa.gossip.mixing import Mixing
from hansa.local import Correction, LocalStep, LocalWork, Solver, Work, blocks, epochs, solver_receives
from hansa.local import sgd as sgd_solver
from hansa.local.loops import BaseClientLoop, ClientLoop, require_loop
from hansa.local.solvers import BaseSolver, require_solver
from hansa.local.work import (
    BaseLocalWork,
    Batches,
    PassPosition,
    as_batching,
    batching,
    is_set_by_samples,
    require_work,
)
from hansa.server import BaseServerTransform, ServerTransform
from hansa.server.base import require_server

_ALL = "None takes all of a client's samples at each step."
POSITION_ROW = "local/place"
"""The row of a client's memory with its position in its passes."""


def _check_optimizer_state(owner: str, argument: str, value: object) -> object:
    if not isinstance(value, Mapping) and value not in ("fresh", "kept"):
        raise invalid_argument(owner, argument, value, "'fresh', 'kept' or a mapping to channels")
    return dict(value) if isinstance(value, Mapping) else value


def _check_blocks(owner: str, argument: str, value: object) -> None:
    if not isinstance(value, blocks):
        raise invalid_argument(owner, argument, value, "blocks of the model", 'hansa.local.blocks("bn*").')


@dataclass(frozen=True, slots=True)
class LocalPhase(Checked):
    """A client's training in a round: solver, amount of work, learning rate.

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
        batches: How a client's rows become batches: "full" batches from a new pass each round; "short" and "drop" keep
            the smaller last batch of a pass or omit it; "continued" is "short" with passes that continue across
            rounds; or a `batching`.
        loop: Training code of your own that replaces the steps, on the same batches (`hansa.local.ClientLoop`).

    >>> LocalPhase(lr=0.1, batch_size=None).lr
    0.1
    """

    solver: Solver = field(default_factory=sgd_solver, metadata=bound(require_solver))
    steps: LocalWork = field(default_factory=lambda: epochs(1), metadata=bound(require_work))
    lr: Rate = field(default=0.05, metadata=bound(check_rate))
    batch_size: int | None = field(default=32, metadata=bound(or_none, check_integer, _ALL))
    momentum: float = field(default=0.0, metadata=bound(check_decay, "0.9 is usual, 0 is none."))
    weight_decay: float = field(default=0.0, metadata=bound(check_non_negative))
    max_grad_norm: float | None = field(default=None, metadata=bound(check_positive, "None does not clip."))
    optimizer: ServerTransform | None = field(default=None, metadata=bound(require_server))
    mixing: Mixing | None = None
    optimizer_state: Literal["fresh", "kept"] | Mapping[str, str] = field(
        default="fresh", metadata=bound(_check_optimizer_state)
    )
    decoupled_weight_decay: bool = False
    private_blocks: blocks | None = field(default=None, metadata=bound(_check_blocks))
    frozen_blocks: blocks | None = field(default=None, metadata=bound(_check_blocks))
    batches: Batches = field(default="full", metadata=bound(lambda owner, _, value: as_batching(value, owner)))
    loop: ClientLoop | None = field(default=None, metadata=bound(require_loop))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.optimizer is not None and self.momentum:
            expected = "0 with a local optimizer, which has its own"
            raise invalid_argument("LocalPhase", "momentum", self.momentum, expected)
        if self.optimizer is None and isinstance(self.optimizer_state, Mapping):
            expected = "a local optimizer to start from it"
            raise invalid_argument("LocalPhase", "optimizer_state", self.optimizer_state, expected)
        if self.loop is not None:
            self._check_loop()
        if self.mixing is not None:
            self._check_mixing(self.mixing)

    def _check_loop(self) -> None:
        """Raise for options that a custom loop would ignore."""
        plain = {item.name: item.default for item in fields(self)} | {"solver": sgd_solver()}
        used = {"loop", "lr", "steps", "batch_size", "batches", "private_blocks"}
        for name in plain:
            if name not in used and getattr(self, name) != plain[name]:
                problem = f"has no effect, since the client loop {self.loop!r} replaces the local steps. Leave it out."
                raise argument_error("LocalPhase", name, getattr(self, name), problem)

    def _check_mixing(self, mixing: Mixing) -> None:
        """Raise for options that gossip does not support."""
        if not isinstance(mixing, Mixing):
            expected = f"Mixing({mixing!r})" if isinstance(mixing, Topology) else "Mixing(ring()) or None"
            raise invalid_argument("LocalPhase", "mixing", mixing, expected)
        solver, shares_state = with_defaults(self.solver, BaseSolver), has_shared_state(self.optimizer)
        remedy = "Use server.amsgrad(), which stays with each client, or no Mixing"

        def refuse(argument: str, problem: str) -> None:
            raise argument_error("LocalPhase", argument, getattr(self, argument), problem)

        if self.private_blocks or self.frozen_blocks or self.optimizer_state != "fresh":
            refuse("mixing", "clients that gossip share the whole model and keep their optimizers as long as "
                   "their models. Omit private, frozen and optimizer_state.")  # fmt: skip
        if solver.memory or solver.channels:
            refuse("solver", "clients that gossip keep no variates of their own. Use sgd() or prox(mu).")
        if mixing.keep_local_models and (solver.prox_weight or solver_receives(self.solver)):
            refuse("solver", "clients with their own models receive no model for a proximal term. Use sgd().")
        if shares_state and mixing.robust is not None:
            refuse("optimizer", f"its second moment gossips without a rule. {remedy}(robust=...).")
        if shares_state and mixing.compressor is not None:
            refuse("optimizer", f"its second moment gossips uncompressed only. {remedy}(compressor=...).")
        if self.division.continued and not mixing.keep_local_models:
            refuse("batches", "continued passes need client memory, which clients that gossip have only with "
                   "keep_local_models=True. Use batches='short'.")  # fmt: skip
        if with_defaults(self.steps, BaseLocalWork).common is None:
            refuse("steps", "expected one number of steps for all: clients that gossip step together.")

    @property
    def receives(self) -> tuple[str, ...]:
        """The channels that clients only receive."""
        state = self.optimizer_state
        by_loop = () if self.loop is None else with_defaults(self.loop, BaseClientLoop).receives
        return (*solver_receives(self.solver), *(state.values() if isinstance(state, Mapping) else ()), *by_loop)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels, besides the model, that clients receive and report on."""
        loop_channels = () if self.loop is None else with_defaults(self.loop, BaseClientLoop).channels
        return (*with_defaults(self.solver, BaseSolver).channels, *loop_channels)

    @property
    def division(self) -> batching:
        """The division of a client's rows into batches."""
        return as_batching(self.batches)

    def draw_work(self, client: int, samples: int, key: Key) -> Work:
        """Return a client's work in a round; ``key`` is the address of (round, client)."""
        if self.division.last == "fill" or not with_defaults(self.steps, BaseLocalWork).counts_passes:
            return self.steps.draw(client, samples, self.batch_size, key)
        return self.steps.draw(client, samples, self.batch_size, key, self.division)  # type: ignore[call-arg]

    def rows_of(self, work: Work, samples: int) -> int:
        """Return how many different rows of a client with some samples the work of a round uses at least."""
        batch = min(work.batch_size, samples)
        available = samples - samples % batch if self.division.last == "drop" else samples
        rows = work.steps * batch
        if self.division.last == "short" and self.division.continued and samples % batch:
            rows -= batch - samples % batch  # the short batch of a pass may be among them
        return min(rows, available)

    def draw_works(self, clients: Sequence[int], samples: Sequence[int], key: Key) -> tuple[Work, ...]:
        """Return the work of each client in the round whose address is ``key``, by the samples of the whole population.
        Equal works are one object: garbage collection visits all."""
        counts, unique = [samples[client] for client in clients], dict[Work, Work]()
        if is_set_by_samples(self.steps):
            drawn = ((count, self.draw_work(0, count, key)) for count in set(counts))
            works = {count: unique.setdefault(work, work) for count, work in drawn}
            return tuple([works[count] for count in counts])
        pairs = zip(clients, counts, strict=True)
        drawn_works = (self.draw_work(client, count, key.child(client)) for client, count in pairs)
        return tuple([unique.setdefault(work, work) for work in drawn_works])

    def pass_position(self, memory: Mapping[str, Vector]) -> PassPosition:
        """Return a client's position in its passes, from its memory."""
        row = memory.get(POSITION_ROW)
        return PassPosition() if row is None or not self.division.continued else PassPosition(*row.tolist())

    def position_memory(self, samples: int, batch_size: int, steps: int, memory: Mapping[str, Vector]) -> Vectors:
        """Return the memory row of a client's position after some steps; empty if passes are not continued."""
        if not self.division.continued:
            return {}
        position = self.division.position_after(samples, batch_size, steps, self.pass_position(memory))
        return {POSITION_ROW: torch.tensor(position)}

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
        """Return one client's local step in a round, from the received model and its memory."""
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
            round=round,
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
        """Return the model that a client starts from: the received one with the client's private blocks."""
        values = memory.get("local/private_buffers" if of_buffers else "local/private")
        if self.private_blocks is None or values is None:
            return x
        return self.private_blocks.put(x.clone(), values, of_buffers=of_buffers)

    def without_private_blocks(self, change: Vector, *, of_buffers: bool = False) -> Vector:
        """Return the change with its private blocks set to zero."""
        return change if self.private_blocks is None else self.private_blocks.put(change, 0.0, of_buffers=of_buffers)

    def memory_after(self, step: LocalStep, y: Vector | None, buffers: Vector | None) -> Vectors:
        """Return a client's memory after its training; ``y`` is its model, which private blocks require."""
        memory: Vectors = {}
        if self.private_blocks is not None and y is not None:
            memory["local/private"] = self.private_blocks.take(y)
            if buffers is not None and self.private_blocks.buffers:
                memory["local/private_buffers"] = self.private_blocks.take(buffers, of_buffers=True)
        if self.optimizer_state == "kept":
            memory.update({f"local/optimizer/{name}": row for name, row in step.memory_rows().items()})
        return memory

    def bind(self, layout: Layout | None) -> LocalPhase:
        """Return the phase with its blocks bound to a model's layout."""
        chosen = {"private_blocks": self.private_blocks, "frozen_blocks": self.frozen_blocks}
        bound: dict[str, Any] = {name: value.bind(layout) for name, value in chosen.items() if value is not None}
        return replace(self, **bound) if bound else self


def has_shared_state(optimizer: ServerTransform | None) -> bool:
    """Return whether rows of a local optimizer's state are mixed with the models."""
    return optimizer is not None and bool(with_defaults(optimizer, BaseServerTransform).shared)
