"""One copy of a task's data and frozen parameters per device and process: trainers share those of one in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

_trainers: WeakKeyDictionary[Any, dict[Any, ref[ModuleTrainer]]] = WeakKeyDictionary()


def existing_trainer(task: Task, dtype: torch.dtype, device: torch.device) -> ModuleTrainer | None:
    """Return a trainer of the task in this process that is in use; None if there is none."""
    known = _trainers.get(task, {}).get((dtype, device))
    return None if known is None else known()


def remember_trainer(trainer: ModuleTrainer) -> None:
    """Let later trainers of the task share this one's data while it is in use."""
    _trainers.setdefault(trainer.task, {})[trainer.dtype, trainer.device] = ref(trainer)
