"""The full gradients of a task's clients at a model, and the noise of their batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Population, Vector, Vectors
from hansa.local.trainer import Trainer
from hansa.local.work import Work

PIECE = 500  # samples per gradient evaluation
MAX_CACHED_NUMBERS = 1 << 25  # entries: above this, the clients' gradients are computed twice instead of cached


class Trainable(Protocol):
    """The interface that measures of gradients need of a task."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def population(self) -> Population: ...
    def start(self, key: Key, dtype: torch.dtype) -> Vectors: ...
    def trainer(self, dtype: torch.dtype, device: torch.device) -> Trainer: ...


class ClientGradients:
    """The full gradients of all clients at one model, in float64."""

    def __init__(self, caller: str, task: Trainable, at: Vectors | Vector | None, key: Key, dtype: torch.dtype) -> None:
        start = task.start(key, dtype)
        vectors: Vectors = start if at is None else {**start, MODEL: at} if isinstance(at, torch.Tensor) else at
        self.dim = start[MODEL].numel()
        if vectors[MODEL].shape != start[MODEL].shape:
            raise HansaError(
                f"{caller}(at): a vector of shape {tuple(vectors[MODEL].shape)}, the model has ({self.dim},)."
            )
        self.trainer = task.trainer(dtype, torch.device("cpu"))
        self.weighted: Any = getattr(self.trainer, "weighted_gradient", None)
        self.couples_rows = self.weighted is not None and getattr(task, "loss_sums", True) is None
        self.is_row_mean = self.weighted is None or getattr(task, "is_row_mean", True)
        self.piece = min(PIECE, int(getattr(task, "evaluation_batch_size", PIECE)))
        self.samples, self.key = task.population.samples, key
        self.model, self.buffers = vectors[MODEL].to(dtype), vectors.get(BUFFERS)
        self.load(self.model)
        if hasattr(self.trainer, "module"):
            self.trainer.module.eval()
        self.gradients: list[Vector] | None = [] if len(self.samples) * self.dim <= MAX_CACHED_NUMBERS else None

    def load(self, model: Vector) -> None:
        """Take all further gradients at a model."""
        self.trainer.load(model, self.buffers)

    def each(self) -> Iterator[tuple[int, Vector]]:
        if self.gradients:
            yield from enumerate(self.gradients)
            return
        for client in range(len(self.samples)):
            gradient = self.full(client)
            if self.gradients is not None:
                self.gradients.append(gradient)
            yield client, gradient

    def full(self, client: int) -> Vector:
        rows = self.rows(client)
        if rows is None:
            return self.flat(client, None)
        total, divisor = torch.zeros(self.dim, dtype=torch.float64), 0.0
        size = len(rows) if self.couples_rows else self.piece
        for first in range(0, len(rows), size):
            weight, gradient = self.piece_gradient(client, rows[first : first + size])
            if weight:  # without labels that count, there is no gradient
                total.add_(gradient, alpha=weight)
                divisor += weight
        return total / divisor if divisor else total

    def loss(self, client: int) -> float:
        """Return the mean loss of a client's rows, in pieces weighted by their rows."""
        rows = self.rows(client)
        if rows is None:
            return float(self.trainer.gradient(client, None)[0])
        size = len(rows) if self.couples_rows else self.piece
        pieces = [rows[first : first + size] for first in range(0, len(rows), size)]
        return math.fsum(float(self.trainer.gradient(client, each)[0]) * len(each) for each in pieces) / len(rows)

    def noise(self, client: int, full: Vector, batch_size: int, samples: int | None) -> float:
        """E||g(batch) - g||^2 for batches without replacement: (n - B)/((n - 1) B) of a single sample's."""
        rows = self.rows(client)
        if rows is None or len(rows) == 1:
            return 0.0
        n = len(rows)
        batch = min(batch_size, n)
        if not self.is_row_mean and batch > 1:
            return self.noise_of_batches(client, full, batch, n if samples is None else samples)
        if samples is not None and samples < n:
            drawn = self.key.child("heterogeneity", client).numpy().choice(n, samples, replace=False, shuffle=False)
            rows = rows[torch.from_numpy(drawn)]
        apart = [square(self.flat(client, rows[i : i + 1]) - full) for i in range(len(rows))]
        single = math.fsum(apart) / len(rows)
        return single * (n - batch) / ((n - 1) * batch)

    def noise_of_batches(self, client: int, full: Vector, batch: int, count: int) -> float:
        """E||g(batch) - g||^2 as the mean over batches drawn without replacement."""
        rows = self.rows(client)
        assert rows is not None
        draw = self.key.child("heterogeneity", client).numpy()
        batches = (rows[torch.from_numpy(draw.choice(len(rows), batch, replace=False))] for _ in range(count))
        return math.fsum(square(self.flat(client, each) - full) for each in batches) / count

    def rows(self, client: int) -> torch.Tensor | None:
        """Return all rows of a client, in order."""
        key = self.key.child("heterogeneity", "rows")
        batches: Any = self.trainer.batches(client, Work(1, self.samples[client]), key)
        return None if batches is None else getattr(batches, "rows", batches)[0].sort().values

    def flat(self, client: int, rows: torch.Tensor | None) -> Vector:
        return self.piece_gradient(client, rows)[1]

    def piece_gradient(self, client: int, rows: torch.Tensor | None) -> tuple[float, Vector]:
        """Return the gradient on some rows, and its weight in that on more rows."""
        weight, gradients = (
            (float(0 if rows is None else len(rows)), self.trainer.gradient(client, rows)[1])
            if self.weighted is None or rows is None
            else self.weighted(client, rows)
        )
        flat = torch.cat([gradient.detach().reshape(-1).to(torch.float64) for gradient in gradients])
        return weight, flat if weight or rows is None else torch.zeros_like(flat)


def square(vector: Vector) -> float:
    """Return the squared norm."""
    return float(vector @ vector)
