"""Tasks whose clients, or validation rows, are drawn with the seed of a run."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from hansa.core.types import Population
from hansa.training.batch_sources import ClientData
from hansa.training.client_evaluation import rows_by_owner
from hansa.training.evaluation import NamedTestSet

if TYPE_CHECKING:
    from hansa.training.task import Task

VALIDATION = "validation"
"""The name of the test set of validation rows."""

_drawn: WeakKeyDictionary[Any, WeakValueDictionary[int, Any]] = WeakKeyDictionary()


def task_for_seed(task: Task, seed: int) -> Task:
    """Return a task with the clients that a run's seed draws; itself if they are fixed.

    It is the same object as long as a run or the caller holds it.
    """
    known = _drawn.setdefault(task, WeakValueDictionary())
    result: Task | None = known.get(seed)
    if result is None:
        data: Any = task.data
        drawn = data.for_seed(seed) if hasattr(data, "for_seed") else data
        if drawn is data:
            return task
        other = copy.copy(task)
        other.data, other.population = drawn, Population(samples_of(drawn))
        other.test_sets = {name: drawn if test is data else test for name, test in task.test_sets.items()}
        other.test_sets |= validation_set(drawn)
        other._client_test_rows = rows_by_owner(getattr(drawn, "test_owners", None))
        known[seed] = result = other
    return result


def validation_set(data: Any) -> dict[str, NamedTestSet]:
    """Return the validation rows of some data as a test set by name; empty if there are none."""
    targets = getattr(data, "validation_targets", None)
    return {} if targets is None else {VALIDATION: NamedTestSet(VALIDATION, data.validation_inputs, targets)}


def samples_of(data: ClientData) -> tuple[int, ...]:
    """Return the number of samples of each client, without a call per client if the data has ``sizes``."""
    sizes = getattr(data, "sizes", None)
    if isinstance(sizes, torch.Tensor) and sizes.shape == (data.population,):
        return tuple(sizes.tolist())
    return tuple(data.samples(client) for client in range(data.population))
