"""Clients tested one by one on their own test rows: with the model that each has, and after some steps of its own."""

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
from hansa.local.descent import LocalStep, train
from hansa.local.solvers import Correction

Marks: TypeAlias = dict[str, float]
"""What tests of one client came to: test_loss, test_accuracy, personal_loss, ..."""

_CLIENTS, _ROWS = 64, 4000  # of one exam, at most: results do not depend on how clients are put together


@dataclass(frozen=True, slots=True)
class personalise:
    """Before a client is tested, ``steps`` of plain SGD on its own training rows, from the model that it has.

    The run goes on as if they had never been taken. ``batch_size`` None takes all of a client's rows at each step.

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
        """The steps of a client that holds so many rows."""
        return Work(self.steps, samples if self.batch_size is None else min(self.batch_size, samples))


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """Clients to be tested: with the server's vectors after so many rounds, and what each remembers of its own."""

    vectors: Vectors
    clients: tuple[int, ...]
    round: int
    key: Key
    tuned: personalise | None = None
    memory: Mapping[int, Vectors] = field(default_factory=dict)


@runtime_checkable
class Examinable(Protocol):
    """A task whose test rows may have owners."""

    @property
    def examinees(self) -> Mapping[int, int]:
        """How many test rows each client has that owns some."""
        ...

    def examine(self, shell: Any, client: int) -> Marks:
        """Loss, accuracy and metrics, by name, of the model that the shell holds on a client's own test rows."""
        ...


def exams(clients: Mapping[int, int], exam: Exam) -> Iterator[Exam]:
    """An exam of many clients in handy parts, by how many test rows each has."""
    some: list[int] = []
    size = 0
    for client, count in clients.items():
        if some and (len(some) == _CLIENTS or size + count > _ROWS):
            yield replace(exam, clients=tuple(some))
            some, size = [], 0
        some.append(client)
        size += count
    if some:
        yield replace(exam, clients=tuple(some))


def marks(algorithm: Algorithm, task: Any, shell: Any, exam: Exam) -> list[Marks]:
    """Every client's marks, in the exam's order. A client's are a function of the vectors, its memory and the key."""
    found = []
    for client in exam.clients:
        model, buffers = own_model(algorithm.local, exam.vectors, exam.memory.get(client, {}))
        shell.load(model, buffers)
        tested = {f"test_{name}": value for name, value in task.examine(shell, client).items()}
        if exam.tuned is not None:
            _tune(algorithm.local, task, shell, client, model, buffers, exam)
            tested |= {f"personal_{name}": value for name, value in task.examine(shell, client).items()}
        found.append(tested)
    return found


def own_model(phase: LocalPhase, vectors: Vectors, memory: Mapping[str, Vector]) -> tuple[Vector, Vector | None]:
    """The model that a client has, and its buffers: its own where clients keep theirs (there is no server), otherwise
    the server's with the client's private blocks in it."""
    model, buffers = vectors[MODEL], vectors.get(BUFFERS)
    if phase.mixing is not None and phase.mixing.keep_local_models:
        row = memory.get("local/row")
        if row is None:
            return model, buffers
        return row[: model.numel()], None if buffers is None else row[model.numel() :]
    model = phase.client_start(model, memory)
    return model, None if buffers is None else phase.client_start(buffers, memory, of_buffers=True)


def _tune(
    phase: LocalPhase, task: Any, shell: Any, client: int, model: Vector, buffers: Vector | None, exam: Exam
) -> None:
    assert exam.tuned is not None
    model = model.to(shell.y.device)
    descent = LocalStep(
        exam.tuned.lr, model, Correction(), max_grad_norm=phase.max_grad_norm, frozen_blocks=phase.frozen_blocks
    )
    work = exam.tuned.work(task.population.samples[client])
    train(shell, model, buffers, client, work, descent, exam.key.child("personalise", exam.round, client))


def owned_rows(owners: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The test rows of each client that has some.

    >>> owned_rows(torch.tensor([2, -1, 0, 2]))
    {0: tensor([2]), 2: tensor([0, 3])}
    """
    if owners is None:
        return {}
    order = torch.argsort(owners, stable=True)
    clients, counts = torch.unique_consecutive(owners[order], return_counts=True)
    parts = zip(clients.tolist(), torch.split(order, counts.tolist()), strict=True)
    return {client: rows for client, rows in parts if client >= 0}
