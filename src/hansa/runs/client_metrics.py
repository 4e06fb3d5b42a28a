"""How well each client is served: evaluation client by client, and what it comes to over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.engine import Engine, Examining
from hansa.engine.serial import Serial
from hansa.runs.client_columns import Array, spread
from hansa.runs.metrics import smaller_is_better
from hansa.runs.store import ClientStore
from hansa.training import TaskLike, personalise
from hansa.training.client_evaluation import Exam, Examinable, Marks, exams

OWN_MODEL = ("local/private", "local/private_buffers", "local/row")
"""The rows of a client's memory that its own model is made of."""


class PerClient(NamedTuple):
    """When clients are evaluated one by one, 0 for never, and what they do before."""

    every: int
    tuned: personalise | None = None

    @classmethod
    def of(cls, task: TaskLike, asked: bool | int | None, tuned: Any, evaluate_every: int) -> PerClient:
        """What was asked for: every so many rounds, with each evaluation, never, or, with None, with each evaluation
        if test rows have owners."""
        steps = _personalise(tuned)
        owned = isinstance(task, Examinable) and bool(task.examinees)
        if asked is None:
            asked = owned
        if asked is False:
            if steps is not None:
                raise invalid_argument(
                    "run", "personalise", steps, "per_client=True beside it", "It is a test of every client."
                )
            return cls(-1)
        if asked is not True:
            check_integer("run", "per_client", asked, "True goes with each evaluation, False is never.")
        if not owned:
            raise HansaError(
                f"{task.name}: test rows have no owners, so that clients cannot be evaluated one by one. "
                "from_arrays(..., test_clients=OWNERS) names them; data: {test_clients: labels} deals them."
            )
        return cls(evaluate_every if asked is True else asked, steps)

    def due(self, round: int, final: bool) -> bool:
        """Whether this round is one of them."""
        return self.every >= 0 and (final or (self.every > 0 and round % self.every == 0))


def _personalise(tuned: Any) -> personalise | None:
    if tuned is None or isinstance(tuned, personalise):
        return tuned
    if not isinstance(tuned, Mapping):
        raise invalid_argument(
            "run", "personalise", tuned, "{'steps': 5, 'lr': 0.01}, or hansa.training.personalise(...)"
        )
    try:
        return personalise(**tuned)
    except TypeError as error:
        raise invalid_argument("run", "personalise", dict(tuned), "steps, lr and batch_size") from error


def tested(engine: Engine, algorithm: Algorithm, task: Any, exam: Exam, store: ClientStore) -> dict[str, Array]:
    """The marks of all clients that own test rows, as columns for the record."""
    own = algorithm.serverless or algorithm.local.private_blocks is not None

    def recall(asked: Exam) -> Exam:
        if not own:
            return asked
        kept = {client: store.read(client) for client in asked.clients}
        memory = {client: {name: rows[name] for name in OWN_MODEL if name in rows} for client, rows in kept.items()}
        return replace(asked, memory=memory)

    parts = list(exams(task.examinees, exam))
    if not isinstance(engine, Examining):
        first = next(iter(exam.vectors.values()))
        engine = Serial(algorithm, task, first.dtype, first.device)
    found: list[Marks] = [marks for answer in engine.examine(parts, recall) for marks in answer]
    columns: dict[str, Array] = {"client": np.array([client for part in parts for client in part.clients], np.int64)}
    with np.errstate(over="ignore"):  # what single precision cannot hold is infinite
        for name in found[0]:
            columns[name] = np.array([marks[name] for marks in found], np.float64).astype(np.float32)
    return columns


def served(columns: Mapping[str, Array]) -> dict[str, float]:
    """What the marks of clients come to, for the history: client_accuracy, over clients its deviation and the mean of
    the worst tenth, the same of every metric, and personal_accuracy likewise."""
    found: dict[str, float] = {}
    for name, values in columns.items():
        if name == "client":
            continue
        title = f"client_{name.removeprefix('test_')}" if name.startswith("test_") else name
        mean, deviation, worst = spread(values.astype(np.float64).tolist(), smaller_is_better(name))
        found |= {title: mean, f"{title}_std": deviation, f"{title}_worst": worst}
    return found
