"""The local step y <- y - lr d of one client in one round, and named blocks of the model that stay with a client or are
not trained. Local methods differ in the terms of d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.native.network import AffineStep
from hansa.core.types import Population, RoundContext, State, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.layout import Layout, TensorEntry
from hansa.local.solvers import AscentOffset
from hansa.server import ServerTransform

_ALONE = Population((1,))

Tensors: TypeAlias = "list[torch.Tensor] | tuple[torch.Tensor, ...]"


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, init=False)
class blocks:
    """The parameters and buffers whose names match one of the patterns: ``blocks("bn*", "*.norm.*", "head.*")``.

    Binding to a model's layout determines their positions in the flat vectors.

    >>> from torch import nn
    >>> found = blocks("1.*").bind(Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    >>> found.parameters, found.take(torch.arange(13.0))
    (((9, 13),), tensor([ 9., 10., 11., 12.]))
    """

    patterns: tuple[str, ...]
    parameters: Ranges | None
    buffers: Ranges

    def __init__(self, *patterns: str, parameters: Ranges | None = None, buffers: Ranges = ()) -> None:
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise invalid_argument(
                "blocks", "patterns", patterns, "names or patterns of them", 'blocks("bn*", "head.*").'
            )
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "buffers", buffers)

    def __repr__(self) -> str:
        return f"blocks({', '.join(map(repr, self.patterns))})"

    def bind(self, layout: Layout | None) -> blocks:
        """Return the blocks with their positions; raise if a pattern matches no parameter."""
        if layout is None:
            raise HansaError(f"{self!r}: this task is a function of a flat vector, without parameter names.")
        names = [entry.name for entry in layout.parameters]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise HansaError(f"{self!r}: no parameter matches {pattern!r}. {suggestion(pattern, names)}")
        bound = blocks(*self.patterns, parameters=self._ranges(layout.parameters), buffers=self._ranges(layout.buffers))
        if bound.parameters == ((0, layout.dim),):
            raise HansaError(f"{self!r}: matches every parameter, so that none is shared.")
        return bound

    def _ranges(self, entries: Sequence[TensorEntry]) -> Ranges:
        joined: list[tuple[int, int]] = []
        for entry in entries:
            if any(fnmatchcase(entry.name, pattern) for pattern in self.patterns):
                start, stop = entry.offset, entry.offset + entry.size
                if joined and joined[-1][1] == start:
                    start = joined.pop()[0]
                joined.append((start, stop))
        return tuple(joined)

    def outside(self, dim: int, *, of_buffers: bool = False) -> Ranges:
        """Return the ranges of a vector of ``dim`` entries that are not in the blocks.

        >>> blocks("b", parameters=((2, 4),)).outside(6)
        ((0, 2), (4, 6))
        """
        ends = [0, *(end for bounds in self._bound(of_buffers) for end in bounds), dim]
        return tuple((start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop)

    def take(self, x: Vector, *, of_buffers: bool = False) -> Vector:
        """Return the entries of the blocks, concatenated."""
        ranges = self._bound(of_buffers)
        return torch.cat([x[start:stop] for start, stop in ranges]) if ranges else x.new_empty(0)

    def put(self, x: Vector, values: Vector | float, *, of_buffers: bool = False) -> Vector:
        """Write the entries of the blocks in place."""
        offset = 0
        for start, stop in self._bound(of_buffers):
            x[start:stop] = values[offset : offset + stop - start] if isinstance(values, torch.Tensor) else values
            offset += stop - start
        return x

    def without(self, parameters: Sequence[Vector], gradients: Sequence[Vector]) -> list[Vector]:
        """Return the gradients with those of the blocks' parameters, which are whole, set to zero."""
        ranges, shared, offset = self._bound(of_buffers=False), [], 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            inside = any(start <= offset < stop for start, stop in ranges)
            shared.append(torch.zeros_like(gradient) if inside else gradient)
            offset += parameter.numel()
        return shared

    def _bound(self, of_buffers: bool) -> Ranges:
        if self.parameters is None:
            raise HansaError(f"{self!r}: not bound to a model yet. Bind the algorithm with `bind`.")
        return self.buffers if of_buffers else self.parameters


@dataclass(slots=True, eq=False)
class LocalStep(AffineStep):
    """One client's step in one round: y <- y - lr d, with d = g + weight_decay y + prox_weight (y - anchor) + shift.

    With momentum d <- momentum d + that sum, from zero each round unless ``velocity`` is restored. ``max_grad_norm``
    clips g first. ``optimizer`` is any server transform, applied to -d. With ``decoupled_weight_decay`` the decay is
    not part of d: y <- (1 - lr weight_decay) y comes first. ``ascent_offset`` gives the offset at which the gradient is
    taken; ``frozen_blocks`` keep their values and do not count in the norm that is clipped. ``round`` is that of
    schedules inside the optimizer.

    >>> LocalStep(0.1, torch.zeros(2), momentum=0.9).is_affine
    True
    """

    anchor: Vector
    optimizer: ServerTransform | None = None
    decoupled_weight_decay: bool = False
    ascent_offset: AscentOffset | None = None
    frozen_blocks: blocks | None = None
    state: State = field(default_factory=dict)
    round: int = 0

    @property
    def is_affine(self) -> bool:
        """Whether this is a plain affine step, which native code supports."""
        parts = (self.optimizer, self.ascent_offset, self.frozen_blocks)
        return not self.decoupled_weight_decay and all(part is None for part in parts)

    def step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """Take one step in place; absent terms cost no pass over y. The parameters are views of y; y and all vectors of
        the step may be matrices with a row for each of several models."""
        if self.frozen_blocks is None:
            self._step(y, parameters, gradients)
            return
        frozen = self.frozen_blocks.take(y)
        if self.max_grad_norm is not None:
            gradients = self.frozen_blocks.without(parameters, gradients)
        self._step(y, parameters, gradients)
        self.frozen_blocks.put(y, frozen)

    def _step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        if self.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            gradients = torch._foreach_mul(gradients, torch.clamp(self.max_grad_norm / (norm + 1e-12), max=1.0))
        if self.momentum or self.optimizer is not None:
            self._step_with_state(y, parameters, gradients)
            return
        a, s = self.prox_weight, self.shift
        if self.weight_decay:  # decoupled or not, without momentum it is the same step
            y.mul_(1 - self.lr * (self.weight_decay + a))
            if a:
                y.add_(self.anchor, alpha=self.lr * a)
        elif a:
            y.lerp_(self.anchor, self.lr * a)
        if s is not None:
            y.sub_(s, alpha=self.lr)
        torch._foreach_add_(parameters, gradients, alpha=-self.lr)

    def _step_with_state(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """Take the step with d as one vector, for momentum or an optimizer."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(y)
        a, s = self.prox_weight, self.shift
        v = self.velocity.mul_(self.momentum)
        decay = 0.0 if self.decoupled_weight_decay else self.weight_decay
        if decay or a:
            v.add_(y, alpha=decay + a)
        if a:
            v.sub_(self.anchor, alpha=a)
        if s is not None:
            v.add_(s)
        offset = v.storage_offset() - y.storage_offset()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            v.as_strided(parameter.shape, parameter.stride(), offset + parameter.storage_offset()).add_(gradient)
        if self.decoupled_weight_decay:
            y.mul_(1 - self.lr * self.weight_decay)
        if self.optimizer is None:
            y.sub_(v, alpha=self.lr)
            return
        self.init_state()
        step, self.state = self.optimizer.update(v.neg(), self.state, RoundContext(self.round, _ALONE, (0,)))
        y.add_(step, alpha=self.lr)

    def init_velocity(self) -> Vector:
        """Return the velocity, zero at first."""
        if self.velocity is None:
            self.velocity = allocator.empty_like(self.anchor).zero_()
        return self.velocity

    def init_state(self) -> None:
        """Initialize the optimizer's state if there is none."""
        if self.optimizer is not None and not self.state:
            self.state = self.optimizer.init(self.anchor)

    def memory_rows(self) -> Vectors:
        """Return the optimizer's state and the velocity as memory rows; numbers become tensors, marked by #."""
        rows = _flatten_state(self.state)
        if self.momentum and self.velocity is not None:
            rows["velocity"] = self.velocity
        return rows

    def restore(self, rows: Vectors, y: Vector) -> None:
        """Restore the state from `memory_rows`; state without a row starts as in the first round."""
        if "velocity" in rows:
            self.velocity = rows["velocity"].clone()
        rows = {name: row for name, row in rows.items() if name != "velocity"}
        if self.optimizer is None or not rows:
            return
        self.state = self.optimizer.init(y)
        for name, row in rows.items():
            *folders, leaf = name.split("/")
            branch = self.state
            for part in folders:
                branch = branch.setdefault(part, {})
            branch[leaf.removesuffix("#")] = row.item() if leaf.endswith("#") else row


def _flatten_state(state: State, prefix: str = "") -> Vectors:
    rows: Vectors = {}
    for name, value in state.items():
        if isinstance(value, dict):
            rows.update(_flatten_state(value, f"{prefix}{name}/"))
        elif isinstance(value, torch.Tensor):
            rows[prefix + name] = value
        else:
            is_integer = isinstance(value, int)
            rows[f"{prefix}{name}#"] = torch.tensor([value], dtype=torch.int64 if is_integer else torch.float64)
    return rows


def effective_steps(steps: int, lr: float, momentum: float, prox_weight: float) -> float:
    """Return FedNova's tau: the total weight of the gradients in y - x, divided by lr. Plain SGD: the number of steps.

    >>> effective_steps(3, 0.1, 0.0, 0.0)
    3.0
    >>> effective_steps(2, 0.1, 0.5, 0.0)  # 1 + (1 + 0.5)
    2.5
    """
    if not momentum and not prox_weight:
        return float(steps)
    total, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - prox_weight * lr * total
        total += velocity
    return total
