"""Tasks: what is being optimized, and by how many clients."""

from hansa.training.base import TaskLike
from hansa.training.client_evaluation import personalise
from hansa.training.function_tasks import function, quadratic
from hansa.training.task import Task

__all__ = ["Task", "TaskLike", "function", "personalise", "quadratic"]
