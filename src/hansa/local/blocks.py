"""Named blocks of a model's parameters, which a client can keep private or freeze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.types import Vector
from hansa.core.vectors.layout import Layout, TensorEntry

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
            raise HansaError(f"{self!r}: this task is a function of a flat vector, which has no names.")
        names = [entry.name for entry in layout.parameters]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise HansaError(f"{self!r}: no parameter matches {pattern!r}. {suggestion(pattern, names)}")
        bound = blocks(*self.patterns, parameters=self._ranges(layout.parameters), buffers=self._ranges(layout.buffers))
        if bound.parameters == ((0, layout.dim),):
            raise HansaError(f"{self!r}: matches every parameter: nothing would be left to share.")
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
        at = 0
        for start, stop in self._bound(of_buffers):
            x[start:stop] = values[at : at + stop - start] if isinstance(values, torch.Tensor) else values
            at += stop - start
        return x

    def without(self, parameters: Sequence[Vector], gradients: Sequence[Vector]) -> list[Vector]:
        """Return the gradients with those of the blocks' parameters, which are whole, set to zero."""
        ranges, shared, at = self._bound(of_buffers=False), [], 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            inside = any(start <= at < stop for start, stop in ranges)
            shared.append(torch.zeros_like(gradient) if inside else gradient)
            at += parameter.numel()
        return shared

    def _bound(self, of_buffers: bool) -> Ranges:
        if self.parameters is None:
            raise HansaError(f"{self!r}: not bound to a model yet: an algorithm is by `bind`.")
        return self.buffers if of_buffers else self.parameters
