"""Trainers: one worker's training of client models, one step at a time or through an optional fast path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError, add_step
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import Vector
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.local.batching import Place, Positions, batching
from hansa.local.step import LocalStep, Tensors
from hansa.local.work import Work

if TYPE_CHECKING:
    from hansa.core.native.client_kernel import ClientKernel

DrawRows: TypeAlias = Callable[[Sequence[int], Sequence[bytes], Any], Any]
"""From clients, the keys of their batches and the rows that each needs: the row numbers, one client after the other."""
BatchRows: TypeAlias = Any
"""The batches of a round, one entry per step: row numbers [steps, batch], or a trainer-defined object."""


class ClientJob(NamedTuple):
    """One client's local training in a round.

    Args:
        x: The model it starts from.
        client: The client.
        work: The number of steps and the batch size.
        step: The local step.
        key: The address of the client's randomness in the round.
        buffers: The buffers it starts from.
        keep_model: Whether to leave the trained model in the trainer's ``y``.
        batches: The batches to step on; None lets the trainer draw them with the key.

    >>> x = torch.zeros(2)
    >>> ClientJob(x, 3, Work(5, 32), LocalStep(0.1, x), Key(0)).keep_model
    False
    """

    x: Vector
    client: int
    work: Work
    step: LocalStep
    key: Key
    buffers: Vector | None = None
    keep_model: bool = False
    batches: BatchRows | None = None


class LocalResult(NamedTuple):
    """The result of one client's local training.

    Args:
        delta: The change y - x of the model.
        losses: The loss of each step.
        finite: Whether every entry of the delta is finite.

    >>> LocalResult(torch.ones(2), [0.5], True).finite
    True
    """

    delta: Vector
    losses: list[float]
    finite: bool


class TrainedRows(NamedTuple):
    """The results of several clients: a row of changes y - x for each, and the mean of its losses.

    Args:
        changes: The changes, [clients, d]; all finite.
        losses: The mean loss of each client's steps.

    >>> TrainedRows(torch.ones(2, 3), [0.5, 0.25]).losses
    [0.5, 0.25]
    """

    changes: Vector
    losses: list[float]


class NativeSteps(NamedTuple):
    """The native code of the steps of gossiping clients.

    Args:
        kernel: Takes the steps.
        draw_rows: Draws the batches of several clients in one call; None if they are drawn client by client.
    """

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

    def train_clients(self, jobs: Sequence[ClientJob]) -> list[LocalResult] | None:
        """Train several clients in one call; None if there is no fast path for these jobs."""
        return None

    def train_rows(
        self, first: ClientJob, clients: Sequence[int], works: Sequence[Work], key: Key
    ) -> TrainedRows | None:
        """Train clients that start from one model with one step and no memory, in one call.

        Client c draws from ``key.child(c)``, as in `train_clients`. None if there is no fast path, or the change of a
        client is not finite.

        Args:
            first: The job of the first client.
            clients: The clients.
            works: The number of steps and the batch size of each.
            key: The address above those of the clients.
        """
        return None

    def native_steps(self) -> NativeSteps | None:
        """Return the native code of the steps of gossiping clients; None if single steps have to be taken."""
        return None

    def interrupt(self) -> None:
        """Interrupt a fast path that runs in another thread; it raises there."""


def train(trainer: Trainer, job: ClientJob) -> LocalResult:
    """Train one client and leave its model and buffers in the trainer.

    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> trainer, start = task.trainer(torch.float32, torch.device("cpu")), torch.zeros(2)
    >>> train(trainer, ClientJob(start, 0, Work(1, 2), LocalStep(0.5, start), hansa.Key(0))).delta
    tensor([0.2500, 0.2500])
    """
    results = with_defaults(trainer, BaseTrainer).train_clients([job._replace(keep_model=True)])
    return train_by_steps(trainer, job) if results is None else results[0]


def train_by_steps(trainer: Trainer, job: ClientJob) -> LocalResult:
    """Train one client without a fast path and leave its model and buffers in the trainer."""
    trainer.load(job.x, job.buffers)
    losses = take_steps(trainer, job.client, job.work, job.step, job.key, job.batches)
    delta = torch.sub(trainer.y, job.x, out=allocator.empty_like(job.x))
    return LocalResult(delta, losses.tolist(), all_finite(delta))


def draw_batches(
    trainer: Trainer,
    division: batching,
    client: int,
    samples: int,
    work: Work,
    key: Key,
    run_key: Key,
    place: Place,
) -> BatchRows | None:
    """Draw a client's batches of a round; ``key`` is their address, ``place`` where the client is in its passes."""
    if division.is_default:
        return trainer.batches(client, work, key)
    positions = division.draw(client, samples, work.batch_size, work.steps, key, run_key, place)
    return with_defaults(trainer, BaseTrainer).batches_at(client, positions, key)


@torch.no_grad()
def take_steps(
    trainer: Trainer, client: int, work: Work, step: LocalStep, key: Key, batches: BatchRows | None = None
) -> torch.Tensor:
    """Take all local steps of one client on the trainer's model, on the given batches or on those that the trainer
    draws; return the loss of each.

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
            losses[t] = take_step(trainer, client, None if rows is None else rows[t], step, key.child("noise", t))
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
