"""Trainers: one worker's training of client models, one step at a time or through an optional fast path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError, add_step
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.local.batching import PassPosition, Positions, batching
from hansa.local.step import LocalStep, Tensors
from hansa.local.work import Work

if TYPE_CHECKING:
    from hansa.core.native.clients import ClientKernel
    from hansa.local.loops import ClientLoop, LoopResult

DrawRows: TypeAlias = Callable[[Sequence[int], Sequence[bytes], Any], Any]
"""From clients, the keys of their batches and the rows that each needs: the row numbers, one client after the other."""
BatchRows: TypeAlias = Any
"""The batches of a round, one entry per step: row numbers [steps, batch], or a trainer-defined object."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientJobs:
    """The local training of clients in a round; each column has an entry for every client.

    Args:
        clients: The clients.
        works: The number of steps and the batch size of each.
        models: The model that each starts from, often one object for all.
        steps: The local step of each, one object for all that have the same.
        key: The key above those of the clients: client c draws from ``key.child(c)``.
        buffers: The buffers that each starts from; None if the model has none.
        batches: The batches of each; None lets the trainer draw them with the keys.
        keep_models: Whether the results contain the models and buffers.
        first_step: The number of the first step, for the keys of noise.

    >>> x = torch.zeros(2)
    >>> ClientJobs.of(x, 3, Work(5, 32), LocalStep(0.1, x), Key(0)).clients
    (3,)
    """

    clients: Sequence[int]
    works: Sequence[Work]
    models: Sequence[Vector]
    steps: Sequence[LocalStep]
    key: Key
    buffers: Sequence[Vector] | None = None
    batches: Sequence[BatchRows] | None = None
    keep_models: bool = False
    first_step: int = 0

    @classmethod
    def of(cls, x: Vector, client: int, work: Work, step: LocalStep, key: Key, **columns: Any) -> ClientJobs:
        """Return the job of one client."""
        return cls((client,), (work,), (x,), (step,), key, **columns)

    def __len__(self) -> int:
        return len(self.clients)

    def key_of(self, index: int) -> Key:
        """Return the key of one client."""
        return self.key.child(self.clients[index])

    def batches_of(self, index: int) -> BatchRows | None:
        """Return the given batches of one client, if any."""
        return None if self.batches is None else self.batches[index]

    def buffers_of(self, index: int) -> Vector | None:
        """Return the buffers of one client, if the model has any."""
        return None if self.buffers is None else self.buffers[index]

    def part(self, indices: Sequence[int]) -> ClientJobs:
        """Return the jobs of the clients at these indices."""
        columns = {name: getattr(self, name) for name in ("clients", "works", "models", "steps", "buffers", "batches")}
        chosen: dict[str, Any] = {
            name: [column[index] for index in indices] for name, column in columns.items() if column is not None
        }
        return replace(self, **chosen)


@dataclass(slots=True, eq=False)
class LocalResults:
    """The results of `ClientJobs`, in their order.

    Args:
        changes: The change y - x of each model: a matrix with a row of each, or a vector of each.
        losses: The mean loss of each client's steps.
        failures: Why a change is not finite, by index; such a client drops out.
        models: The trained models, if requested.
        buffers: The trained buffers; empty if the model has none.

    >>> LocalResults(torch.ones(2, 3), [0.5, 0.25]).failures
    {}
    """

    changes: list[Vector] | Vector = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    models: list[Vector] = field(default_factory=list)
    buffers: list[Vector] = field(default_factory=list)

    def add_model(
        self, x: Vector, y: Vector, losses: list[float], buffers: Vector | None = None, *, keep_model: bool = False
    ) -> None:
        """Add the result of one client, whose model has become ``y``, to lists of results. What is kept is copied."""
        assert isinstance(self.changes, list)
        change = torch.sub(y, x, out=allocator.empty_like(x))
        finite = all_finite(change)
        if not finite:
            step = next((t for t, loss in enumerate(losses) if not math.isfinite(loss)), None)
            cause = "an overflow" if step is None else f"the loss was {losses[step]} at step {step}"
            self.failures[len(self.losses)] = f"{cause}; a smaller local learning rate or max_grad_norm= may help"
        self.changes.append(change)
        self.losses.append(math.fsum(losses) / len(losses) if finite else math.nan)
        if keep_model:
            self.models.append(y.clone())
        if buffers is not None:
            self.buffers.append(buffers.clone())

    def extend(self, results: LocalResults) -> None:
        """Add the results of further clients."""
        assert isinstance(self.changes, list)
        self.failures.update({len(self.losses) + index: reason for index, reason in results.failures.items()})
        self.changes.extend(results.changes)
        self.losses.extend(results.losses)
        self.models.extend(results.models)
        self.buffers.extend(results.buffers)


class NativeSteps(NamedTuple):
    """The native code of gossiping clients' steps, and the function that draws several clients' batches, if any."""

    kernel: ClientKernel
    draw_rows: DrawRows | None


class Trainer(Protocol):
    """Trains one model at a time for one worker. ``parameters`` are views of ``y``, so a step copies nothing.

    A trainer that also has the fast paths of `BaseTrainer` trains several clients, or a gossiping cohort, in one call.
    """

    @property
    def y(self) -> Vector: ...

    @property
    def parameters(self) -> Tensors: ...

    def load(self, model: Vector, buffers: Vector | None) -> None:
        """Copy a model and its buffers into the trainer."""
        ...

    def batches(self, client: int, work: Work, key: Key) -> BatchRows | None:
        """Draw the batches of a client's round; None if the trainer uses full gradients."""
        ...

    def seed(self, key: Key) -> None:
        """Seed the generators that a step may draw from."""
        ...

    def gradient(self, client: int, rows: BatchRows | None) -> tuple[torch.Tensor, Tensors]:
        """Return the loss of one batch and its gradient at ``y``."""
        ...

    def read_buffers(self) -> Vector | None:
        """Return the buffers as one vector; None if the model has none."""
        ...


class BaseTrainer:
    """The optional traits of trainers: two fast paths, bit-identical to the plain loop and off by default.

    >>> BaseTrainer().releases_gil, BaseTrainer().train_clients([])
    (False, None)
    """

    releases_gil: bool = False
    """Whether its steps release the GIL, so that workers can be threads."""

    seeds_own_generators: bool = False
    """Whether ``seed`` touches no generator that other threads share."""

    clients_per_call: int = 1
    """How many clients `train_clients` trains at once without native code."""

    def batches_at(self, client: int, positions: Sequence[Positions], key: Key) -> BatchRows | None:
        """Return batches of the client's rows at these positions, one array per step; None if the trainer uses full
        gradients. ``key`` is the address of their augmentation."""
        raise HansaError(
            f"{type(self).__name__}: draws full batches only. Give the trainer a method batches_at(client, positions, "
            "key), or use batches='full'."
        )

    def train_clients(self, jobs: ClientJobs) -> LocalResults | None:
        """Train clients in one call, with the results of single steps; None if there is no fast path for these jobs."""
        return None

    def native_steps(self) -> NativeSteps | None:
        """Return the native code of gossiping clients' steps; None if there is none."""
        return None

    def run_loop(
        self, loop: ClientLoop, client: int, rows: BatchRows | None, lr: float, got: Vectors, memory: Vectors, key: Key
    ) -> LoopResult:
        """Run a client's own loop on the model that is loaded; ``rows`` are its batches."""
        raise HansaError(f"{type(self).__name__}: has no module that a client loop could train.")

    def interrupt(self) -> None:
        """Interrupt a fast path that runs in another thread; it raises there."""


def train(trainer: Trainer, jobs: ClientJobs) -> LocalResults:
    """Train clients by the trainer's fast path if it has one for these jobs, otherwise by single steps.

    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> trainer, start = task.trainer(torch.float32, torch.device("cpu")), torch.zeros(2)
    >>> train(trainer, ClientJobs.of(start, 0, Work(1, 2), LocalStep(0.5, start), hansa.Key(0))).changes
    [tensor([0.2500, 0.2500])]
    """
    results = with_defaults(trainer, BaseTrainer).train_clients(jobs)
    return train_by_steps(trainer, jobs) if results is None else results


def train_by_steps(trainer: Trainer, jobs: ClientJobs) -> LocalResults:
    """Train clients one after the other by single steps. The last one's model and buffers stay in the trainer."""
    results = LocalResults()
    for index, (client, x) in enumerate(zip(jobs.clients, jobs.models, strict=True)):
        trainer.load(x, jobs.buffers_of(index))
        rows, first = jobs.batches_of(index), jobs.first_step
        losses = take_steps(trainer, client, jobs.works[index], jobs.steps[index], jobs.key_of(index), rows, first)
        results.add_model(x, trainer.y, losses.tolist(), trainer.read_buffers(), keep_model=jobs.keep_models)
    return results


def draw_batches(
    trainer: Trainer,
    division: batching,
    client: int,
    samples: int,
    work: Work,
    key: Key,
    run_key: Key,
    position: PassPosition,
) -> BatchRows | None:
    """Draw a client's batches of a round; ``key`` is their address, ``position`` the client's in its passes."""
    if division.is_default:
        return trainer.batches(client, work, key)
    positions = division.draw(client, samples, work.batch_size, work.steps, key, run_key, position)
    return with_defaults(trainer, BaseTrainer).batches_at(client, positions, key)


@torch.no_grad()
def take_steps(
    trainer: Trainer,
    client: int,
    work: Work,
    step: LocalStep,
    key: Key,
    batches: BatchRows | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Take all local steps of one client on the trainer's model, on the given batches or on those that the trainer
    draws; return the loss of each. ``first`` is the number of the first step.

    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> trainer = task.trainer(torch.float32, torch.device("cpu"))
    >>> trainer.load(torch.zeros(2), None)
    >>> len(take_steps(trainer, 0, Work(3, 2), LocalStep(0.1, torch.zeros(2)), hansa.Key(0)))
    3
    """
    rows = trainer.batches(client, work, key.child("batch")) if batches is None else batches
    losses = torch.empty(work.steps, dtype=trainer.y.dtype, device=trainer.y.device)
    t = 0
    try:
        for t in range(work.steps):
            losses[t] = take_step(
                trainer, client, None if rows is None else rows[t], step, key.child("noise", first + t)
            )
    except Exception as error:
        add_step(error, client, t)
        raise
    return losses


def take_step(trainer: Trainer, client: int, rows: BatchRows | None, step: LocalStep, key: Key) -> torch.Tensor:
    """Take one step on the trainer's model, with the gradient at y, or at y + e with an ascent offset."""
    trainer.seed(key)
    loss, gradients = trainer.gradient(client, rows)
    if step.ascent_offset is not None:
        offset, y = step.ascent_offset(gradients), trainer.y.clone()
        torch._foreach_add_(trainer.parameters, offset)
        _, gradients = trainer.gradient(client, rows)
        trainer.y.copy_(y)
    step.step(trainer.y, trainer.parameters, gradients)
    return loss
