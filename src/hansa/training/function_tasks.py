"""Tasks that are functions of a flat vector, for exact tests and for studies of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Population, Vector, Vectors
from hansa.local.trainer import BaseTrainer
from hansa.local.work import Work

Gradient = Callable[[int, Vector], tuple[torch.Tensor, Vector]]


class FunctionTrainer(BaseTrainer):
    """Trains a flat vector with full gradients."""

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device, gradient: Gradient) -> None:
        self.y = torch.zeros(dim, dtype=dtype, device=device)
        self.buffers: Vector | None = None
        self.parameters = [self.y]
        self._gradient = gradient

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)

    def read_buffers(self) -> Vector | None:
        return None

    def batches(self, client: int, work: Work, key: Key) -> None:
        return None

    def batches_at(self, client: int, positions: Any, key: Key) -> None:
        return None

    def seed(self, key: Key) -> None:
        return None

    def gradient(self, client: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss, gradient = self._gradient(client, self.y)
        return loss, (gradient,)


class _FunctionTask:
    """A start vector, a population, and the mean of the clients' losses as evaluation."""

    def __init__(self, name: str, x0: Vector, samples: Sequence[int]) -> None:
        self.name, self.dtype, self.x0 = name, x0.dtype, x0
        self.population = Population(tuple(samples))

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        return {MODEL: self.x0.to(dtype, copy=True)}

    def trainer(self, dtype: torch.dtype, device: torch.device) -> FunctionTrainer:
        return FunctionTrainer(self.x0.numel(), dtype, device, self._gradient(dtype, device))

    def _gradient(self, dtype: torch.dtype, device: torch.device) -> Gradient:
        raise NotImplementedError

    def evaluate(self, trainer: Any, vectors: Vectors) -> dict[str, float]:
        """Return the global loss: the mean of the clients' losses."""
        trainer.load(vectors[MODEL], vectors.get(BUFFERS))
        with torch.no_grad():
            losses = [float(trainer.gradient(i, None)[0]) for i in range(self.population.count)]
        return {"loss": math.fsum(losses) / len(losses)}


class quadratic(_FunctionTask):
    """Least squares with full gradients: client i has f_i(x) = ||A_i x - b_i||^2 / (2 rows_i).

    The dtype is that of A unless the run sets another.

    Args:
        A: One matrix per client, [N, rows, d] or a list of [rows_i, d].
        b: One vector per client, [N, rows] or a list of [rows_i].
        x0: The initial vector, [d]; default 0.

    >>> task = quadratic(torch.ones(2, 3, 1), torch.tensor([[1.0] * 3, [3.0] * 3]))
    >>> task.population.samples, round(float(task.optimum()), 9)
    ((3, 3), 2.0)
    """

    def __init__(self, A: Any, b: Any, *, x0: Any = None) -> None:
        self.A = [torch.as_tensor(a) for a in A]
        self.b = [torch.as_tensor(v) for v in b]
        if not self.A or len(self.A) != len(self.b):
            raise HansaError(
                f"quadratic: {len(self.A)} matrices A and {len(self.b)} vectors b: expected one of each per client."
            )
        dim = self.A[0].shape[-1]
        for i, (a, v) in enumerate(zip(self.A, self.b, strict=True)):
            if a.ndim != 2 or a.shape[1] != dim or not a.numel():
                raise HansaError(
                    f"quadratic: A[{i}] has shape {tuple(a.shape)}: expected [rows, d] with one d for all."
                )
            if v.shape != a.shape[:1]:
                raise HansaError(f"quadratic: b[{i}] has shape {tuple(v.shape)}: expected ({a.shape[0]},).")
            if not (torch.isfinite(a).all() and torch.isfinite(v).all()):
                raise HansaError(f"quadratic: client {i} has a NaN or infinite entry in A or b.")
        dtype = self.A[0].dtype if self.A[0].is_floating_point() else torch.get_default_dtype()
        start = torch.zeros(dim, dtype=dtype) if x0 is None else torch.as_tensor(x0, dtype=dtype)
        if start.shape != (dim,):
            raise HansaError(f"quadratic(x0): shape {tuple(start.shape)}, expected ({dim},) as the columns of A.")
        super().__init__("quadratic", start, [a.shape[0] for a in self.A])

    def _gradient(self, dtype: torch.dtype, device: torch.device) -> Gradient:
        A = [a.to(device, dtype) for a in self.A]
        b = [v.to(device, dtype) for v in self.b]

        def gradient(client: int, x: Vector) -> tuple[torch.Tensor, Vector]:
            residual = A[client] @ x - b[client]
            rows = residual.numel()
            return residual.dot(residual) / (2 * rows), (A[client].T @ residual).div_(rows)

        return gradient

    def optimum(self) -> Vector:
        """Return the minimiser of the uniform mean of the f_i, in float64."""
        A = torch.cat([a.double() / math.sqrt(a.shape[0]) for a in self.A])
        b = torch.cat([v.double() / math.sqrt(v.numel()) for v in self.b])
        solution: Vector = torch.linalg.lstsq(A, b[:, None], driver="gelsd").solution[:, 0]
        return solution


class function(_FunctionTask):
    """Any differentiable function of (client, x), with the gradient by autograd.

    Args:
        loss: ``loss(client, x)`` returns the scalar loss of a client.
        clients: Number of clients.
        x0: The initial vector, 1-D and floating point.
        samples: Number of samples of each client, for weights; default 1 each.

    >>> task = function(lambda client, x: ((x - client) ** 2).sum(), clients=2, x0=torch.zeros(3))
    >>> task.evaluate(task.trainer(torch.float64, torch.device("cpu")), {"model": torch.zeros(3)})
    {'loss': 1.5}
    """

    def __init__(
        self,
        loss: Callable[[int, Vector], torch.Tensor],
        *,
        clients: int,
        x0: Any,
        samples: Sequence[int] | None = None,
    ) -> None:
        start = torch.as_tensor(x0)
        if start.ndim != 1 or not start.is_floating_point():
            raise HansaError(f"function(x0): {start.dtype} of shape {tuple(start.shape)}: expected a 1-D float vector.")
        if clients < 1 or (samples is not None and len(samples) != clients):
            raise HansaError(
                f"function(clients={clients!r}, samples={samples!r}): expected one sample count per client."
            )
        super().__init__("function", start, list(samples) if samples is not None else [1] * clients)
        self.loss = loss

    def _gradient(self, dtype: torch.dtype, device: torch.device) -> Gradient:
        def gradient(client: int, x: Vector) -> tuple[torch.Tensor, Vector]:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                loss = self.loss(client, point)
                (result,) = torch.autograd.grad(loss, point)
            return loss.detach(), result

        return gradient
