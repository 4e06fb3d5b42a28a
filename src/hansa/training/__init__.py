"""Tasks: models, losses, metrics and the trainers of federated data."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.training.evaluation import personalise
    from hansa.training.function_tasks import function, quadratic
    from hansa.training.task import Task, TaskLike

__all__ = ["Task", "TaskLike", "function", "personalise", "quadratic"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
