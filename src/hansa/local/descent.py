"""The one gradient loop: every local method is this loop with another (a, s)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from hansa.keys import Key
from hansa.local.solvers import Correction
from hansa.local.work import Work
from hansa.server import ServerTransform
from hansa.types import Population, RoundContext, State, Vector, Vectors

_ALONE = RoundContext(0, Population(()), ())

Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


class Shell(Protocol):
    """A worker's own place to train one model at a time. ``parameters`` are views of ``y``: a step copies nothing."""

    y: Vector
    buffers: Vector | None

    @property
    def parameters(self) -> Tensors: ...

    def load(self, model: Vector, buffers: Vector | None) -> None: ...

    def read_buffers(self) -> Vector | None: ...

    def rows(self, client: int, work: Work, key: Key) -> torch.Tensor | None: ...

    def seed(self, key: Key) -> None: ...

    def descend(self, rows: torch.Tensor | None, descent: Descent) -> torch.Tensor | None:
        """The whole loop in one go where the shell knows a faster way, giving the losses; otherwise None."""
        ...

    def gradient(self, client: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, Tensors]: ...


@dataclass(slots=True)
class Descent:
    """One client's descent in one round: y <- y - lr d, with d = g + weight_decay y + a (y - x) + s, or with local
    momentum d <- momentum d + that sum, from zero each round. The raw gradient is clipped first. A local ``optimizer``
    is any server transform, applied to -d."""

    lr: float
    anchor: Vector
    correction: Correction
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    optimizer: ServerTransform | None = None
    velocity: Vector | None = field(default=None)
    state: State = field(default_factory=dict)

    def step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """One step in place; no pass over y is made for a term that is absent."""
        if self.clip is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            gradients = torch._foreach_mul(gradients, torch.clamp(self.clip / (norm + 1e-12), max=1.0))
        if self.momentum or self.optimizer is not None:
            self._with_memory(y, parameters, gradients)
            return
        a, s = self.correction
        if self.weight_decay:
            y.mul_(1 - self.lr * (self.weight_decay + a))
            if a:
                y.add_(self.anchor, alpha=self.lr * a)
        elif a:
            y.lerp_(self.anchor, self.lr * a)
        if s is not None:
            y.sub_(s, alpha=self.lr)
        torch._foreach_add_(parameters, gradients, alpha=-self.lr)

    def _with_memory(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """The same sum gathered into one vector, which momentum or an optimizer keeps."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(y)
        a, s = self.correction
        v = self.velocity.mul_(self.momentum)
        if self.weight_decay or a:
            v.add_(y, alpha=self.weight_decay + a)
        if a:
            v.sub_(self.anchor, alpha=a)
        if s is not None:
            v.add_(s)
        offset = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            size = parameter.numel()
            v[offset : offset + size].as_strided(parameter.shape, parameter.stride()).add_(gradient)
            offset += size
        if self.optimizer is None:
            y.sub_(v, alpha=self.lr)
            return
        if not self.state:
            self.state = self.optimizer.init(y)
        step, self.state = self.optimizer.update(v.neg(), self.state, _ALONE)
        y.add_(step, alpha=self.lr)

    def kept(self) -> Vectors:
        """The optimizer's state as rows of memory; whole numbers become tensors of one."""
        return {
            name: value if isinstance(value, torch.Tensor) else torch.tensor([value])
            for name, value in self.state.items()
        }

    def restore(self, rows: Vectors) -> None:
        """The state that `kept` gave."""
        whole = (torch.int64, torch.int32)
        self.state = {name: int(row) if row.dtype in whole else row for name, row in rows.items()}


@torch.no_grad()
def descend(shell: Shell, client: int, work: Work, descent: Descent, key: Key) -> torch.Tensor:
    """All local steps of one client, on the model the shell holds; returns the loss of each step."""
    rows = shell.rows(client, work, key.child("batch"))
    shell.seed(key.child("noise"))
    found = shell.descend(rows, descent)
    if found is not None:
        return found
    losses = torch.empty(work.steps, dtype=shell.y.dtype)
    for t in range(work.steps):
        loss, gradients = shell.gradient(client, None if rows is None else rows[t])
        losses[t] = loss
        descent.step(shell.y, shell.parameters, gradients)
    return losses


def effective_steps(steps: int, lr: float, momentum: float, a: float) -> float:
    """FedNova's tau: the total weight of the gradients in y - x, over lr. Plain SGD: the number of steps.

    >>> effective_steps(3, 0.1, 0.0, 0.0)
    3.0
    >>> effective_steps(2, 0.1, 0.5, 0.0)  # 1 + (1 + 0.5)
    2.5
    """
    if not momentum and not a:
        return float(steps)
    total, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - a * lr * total
        total += velocity
    return total
