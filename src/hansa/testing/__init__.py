"""Checks that custom components and tasks keep their contracts.

>>> from hansa import compress, testing
>>> testing.check(compress.sign())

`check` raises an AssertionError that names the requirement. Hansa's built-in components pass the same checks.
"""

from hansa.testing.contracts import ContractError, check
from hansa.testing.task_check import TaskCheck, check_task

__all__ = ["ContractError", "TaskCheck", "check", "check_task"]
