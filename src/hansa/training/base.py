"""What a task is to the rest of the product: clients with samples, a start, a place to train, a way to evaluate."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hansa.core.keys import Key
from hansa.core.types import Population, Vectors
from hansa.local.descent import Trainer


class TaskLike(Protocol):
    """A model plus a loss on federated data, or any function of a flat vector.

    >>> from hansa.core.protocols import lacking
    >>> import torch
    >>> from hansa.training import quadratic
    >>> lacking(quadratic(torch.eye(2)[None], torch.ones(1, 2)), TaskLike), lacking(print, TaskLike)
    ([], [])
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def population(self) -> Population: ...

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """The first vectors: the model, and the buffers where there are any."""
        ...

    def shell(self, dtype: torch.dtype, device: torch.device) -> Trainer: ...

    def evaluate(self, shell: Any, vectors: Vectors) -> dict[str, float]: ...
