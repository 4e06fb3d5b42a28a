"""Tasks: what is being optimized, and by how many clients."""

from hansa.tasks.base import TaskLike
from hansa.tasks.exams import personalise
from hansa.tasks.functions import function, quadratic
from hansa.tasks.module import Task

__all__ = ["Task", "TaskLike", "function", "personalise", "quadratic"]
