"""Per-client evaluation: each client's model on its own test rows, optionally after local fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.algorithm import Algorithm, LocalPhase
from hansa.core.errors import check_integer, check_non_negative
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.local import Work
from hansa.local.step import LocalStep
from hansa.local.trainer import ClientJob, train

ClientMetrics: TypeAlias = dict[str, float]
"""Metrics of one client: test_loss, test_accuracy, personal_loss, ..."""

_MAX_CLIENTS, _MAX_ROWS = 64, 4000  # of one job; results do not depend on them


@dataclass(frozen=True, slots=True)
class personalise:
    """Fine-tune each client's model with plain SGD on its training rows before it is evaluated.

    The run itself is not affected.

    Args:
        steps: Number of local steps.
        lr: Learning rate.
        batch_size: Rows per step; None takes all rows of the client.

    >>> personalise(steps=5, lr=0.01).steps
    5
    """

    steps: int = 5
    lr: float = 0.01
    batch_size: int | None = 32

    def __post_init__(self) -> None:
        check_integer("personalise", "steps", self.steps)
        check_non_negative("personalise", "lr", self.lr)
        if self.batch_size is not None:
            check_integer("personalise", "batch_size", self.batch_size, "None takes all of a client's rows.")

    def work(self, samples: int) -> Work:
        """Return the local work of a client with this many samples."""
        return Work(self.steps, samples if self.batch_size is None else min(self.batch_size, samples))


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationJob:
    """Clients to evaluate after a round, with the server's vectors and the clients' memory."""

    vectors: Vectors
    clients: tuple[int, ...]
    round: int
    key: Key
    personalisation: personalise | None = None
    memory: Mapping[int, Vectors] = field(default_factory=dict)


@runtime_checkable
class ClientEvaluable(Protocol):
    """A task whose test rows may belong to clients."""

    @property
    def client_test_sizes(self) -> Mapping[int, int]:
        """Number of test rows of each client that has its own."""
        ...

    def evaluate_client(self, trainer: Any, client: int) -> ClientMetrics:
        """Return loss, accuracy and metrics of the trainer's model on a client's own test rows."""
        ...


def split_job(test_sizes: Mapping[int, int], job: EvaluationJob) -> Iterator[EvaluationJob]:
    """Split the evaluation of many clients into jobs of bounded size, given the clients' numbers of test rows."""
    clients: list[int] = []
    rows = 0
    for client, count in test_sizes.items():
        if clients and (len(clients) == _MAX_CLIENTS or rows + count > _MAX_ROWS):
            yield replace(job, clients=tuple(clients))
            clients, rows = [], 0
        clients.append(client)
        rows += count
    if clients:
        yield replace(job, clients=tuple(clients))


def run_evaluation(algorithm: Algorithm, task: Any, trainer: Any, job: EvaluationJob) -> list[ClientMetrics]:
    """Return the metrics of each client of a job; they depend only on the vectors, the client's memory and the key."""
    results = []
    for client in job.clients:
        model, buffers = client_model(algorithm.local, job.vectors, job.memory.get(client, {}))
        trainer.load(model, buffers)
        metrics = {f"test_{name}": value for name, value in task.evaluate_client(trainer, client).items()}
        if job.personalisation is not None:
            _fine_tune(algorithm.local, task, trainer, client, model, buffers, job)
            metrics |= {f"personal_{name}": value for name, value in task.evaluate_client(trainer, client).items()}
        results.append(metrics)
    return results


def client_model(phase: LocalPhase, vectors: Vectors, memory: Mapping[str, Vector]) -> tuple[Vector, Vector | None]:
    """Return a client's model and buffers: its local model if clients keep theirs, otherwise the server's model with
    the client's private blocks."""
    model, buffers = vectors[MODEL], vectors.get(BUFFERS)
    if phase.mixing is not None and phase.mixing.keep_local_models:
        row = memory.get("local/row")
        if row is None:
            return model, buffers
        return row[: model.numel()], None if buffers is None else row[model.numel() :]
    model = phase.client_start(model, memory)
    return model, None if buffers is None else phase.client_start(buffers, memory, of_buffers=True)


def _fine_tune(
    phase: LocalPhase, task: Any, trainer: Any, client: int, model: Vector, buffers: Vector | None, job: EvaluationJob
) -> None:
    assert job.personalisation is not None
    model = model.to(trainer.y.device)
    step = LocalStep(
        job.personalisation.lr, model, max_grad_norm=phase.max_grad_norm, frozen_blocks=phase.frozen_blocks
    )
    work = job.personalisation.work(task.population.samples[client])
    key = job.key.child("personalise", job.round, client)
    train(trainer, ClientJob(model, client, work, step, key, buffers))


def rows_by_owner(owners: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Return the rows of each client that has some.

    >>> rows_by_owner(torch.tensor([2, -1, 0, 2]))
    {0: tensor([2]), 2: tensor([0, 3])}
    """
    if owners is None:
        return {}
    order = torch.argsort(owners, stable=True)
    clients, counts = torch.unique_consecutive(owners[order], return_counts=True)
    parts = zip(clients.tolist(), torch.split(order, counts.tolist()), strict=True)
    return {client: rows for client, rows in parts if client >= 0}
