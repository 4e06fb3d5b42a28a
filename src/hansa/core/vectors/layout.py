"""Conversion between modules and flat vectors. Parameters are views, so a training step copies nothing.

Convolution weights are stored in channels-last order, so that their channels-last form is a view, or in torch's order
for a model that does not support it.

Persistent floating-point buffers (BatchNorm's statistics, ...) have a separate vector, with those counters and flags
that `Layout.sending` names: these are rounded to the nearest whole number where they are written to a module. Frozen
parameters are never sent, nor are other integer, boolean, complex or non-finite buffers (indices, masks): these keep
their initial value on the server and on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from hansa.core.errors import HansaError
from hansa.core.types import Vector

if TYPE_CHECKING:
    from torch import nn

Module = TypeVar("Module", bound="nn.Module")
Conversion: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The position of one tensor of a module in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    dtype: torch.dtype
    channels_last: bool = True

    def view(self, flat: Vector) -> torch.Tensor:
        """Return the tensor as a view of the flat vector, in which convolution weights are channels-last."""
        piece = flat[self.offset : self.offset + self.size]
        if self.channels_last and len(self.shape) in (4, 5):
            first, channels, *sides = self.shape
            return piece.view(first, *sides, channels).movedim(-1, 1)
        return piece.view(self.shape)

    def value(self, flat: Vector) -> torch.Tensor:
        """Return the tensor as `view` does; a counter or flag as rounded copy of its own dtype."""
        if self.dtype.is_floating_point:
            return self.view(flat)
        return self.view(flat).round().to(self.dtype)


def _entries(named: Sequence[tuple[str, torch.Tensor]], channels_last: bool = True) -> tuple[TensorEntry, ...]:
    entries, offset = [], 0
    for name, tensor in named:
        entries.append(TensorEntry(name, tuple(tensor.shape), offset, tensor.numel(), tensor.dtype, channels_last))
        offset += tensor.numel()
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of all trainable parameters and averaged buffers.

    >>> layout = Layout.of(torch.nn.Linear(3, 2))
    >>> layout.dim, layout.buffer_dim, [entry.name for entry in layout.parameters]
    (8, 0, ['weight', 'bias'])
    """

    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    channels_last: bool = True
    own_dtypes: frozenset[str] = frozenset()
    """Frozen parameters and buffers that keep their own dtype."""

    @classmethod
    def of(cls, module: nn.Module, channels_last: bool = True) -> Layout:
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise HansaError(f"{type(module).__name__} has no trainable parameter: nothing to optimize.")
        for name, parameter in trainable:
            if not parameter.is_floating_point():
                raise HansaError(
                    f"parameter {name} is {parameter.dtype}: only real floating-point ones can be trained. Keep a "
                    "complex one as torch.view_as_real(...), and use torch.view_as_complex(...) in forward()."
                )
        _refuse_shared_memory(module)
        persistent = module.state_dict(keep_vars=True)
        buffers = [
            (name, buffer)
            for name, buffer in module.named_buffers()
            if name in persistent and buffer.is_floating_point() and bool(torch.isfinite(buffer).all())
        ]
        return cls(_entries(trainable, channels_last), _entries(buffers, channels_last), channels_last)

    def without(self, names: Collection[str]) -> Layout:
        """Return the layout without some buffers, which keep their initial value."""
        remaining = [entry for entry in self.buffers if entry.name not in names]
        starts = accumulate((entry.size for entry in remaining), initial=0)
        moved = (replace(entry, offset=start) for entry, start in zip(remaining, starts, strict=False))
        return replace(self, buffers=tuple(moved))

    def sending(self, module: nn.Module, names: Collection[str]) -> Layout:
        """Return the layout with further buffers of a module, such as counters."""
        sent = {entry.name for entry in self.buffers} | set(names)
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in sent]
        return replace(self, buffers=_entries(buffers, self.channels_last)) if names else self

    @property
    def dim(self) -> int:
        return sum(entry.size for entry in self.parameters)

    @property
    def buffer_dim(self) -> int:
        return sum(entry.size for entry in self.buffers)

    def pack(self, module: nn.Module, dtype: torch.dtype) -> tuple[Vector, Vector]:
        """Copy the module's parameters and buffers into two flat vectors."""
        with torch.no_grad():
            flat, buffers = torch.empty(self.dim, dtype=dtype), torch.empty(self.buffer_dim, dtype=dtype)
            for vector, entries in ((flat, self.parameters), (buffers, self.buffers)):
                tensors = _named_tensors(module)
                for entry in entries:
                    entry.view(vector).copy_(tensors[entry.name])
        return flat, buffers

    def bind(self, module: nn.Module, flat: Vector) -> list[nn.Parameter]:
        """Make the module's parameters views of ``flat`` and return them in the vector's order."""
        self._check(flat, self.dim, "parameters")
        named = dict(module.named_parameters())
        for entry in self.parameters:
            named[entry.name].data = entry.view(flat)
        return [named[entry.name] for entry in self.parameters]

    def write_buffers(self, module: nn.Module, buffers: Vector) -> None:
        """Copy a flat vector into the module's buffers."""
        self._check(buffers, self.buffer_dim, "buffers")
        tensors = _named_tensors(module)
        with torch.no_grad():
            for entry in self.buffers:
                tensors[entry.name].copy_(entry.value(buffers))

    def read_buffers(self, module: nn.Module, buffers: Vector) -> Vector:
        """Copy the module's buffers into a flat vector."""
        tensors = _named_tensors(module)
        with torch.no_grad():
            for entry in self.buffers:
                entry.view(buffers).copy_(tensors[entry.name])
        return buffers

    def unpack(self, flat: Vector, buffers: Vector | None = None) -> dict[str, torch.Tensor]:
        """Return the vectors as named tensors in the shapes of the ``state_dict``, without those never sent."""
        self._check(flat, self.dim, "parameters")
        tensors = {entry.name: entry.view(flat) for entry in self.parameters}
        if buffers is not None:
            tensors |= {entry.name: entry.value(buffers) for entry in self.buffers}
        return tensors

    @staticmethod
    def _check(flat: Vector, dim: int, kind: str) -> None:
        if flat.shape != (dim,):
            raise HansaError(f"a vector of shape {tuple(flat.shape)} for {kind}: expected ({dim},).")


def _named_tensors(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def convert_module(
    module: Module, dtype: torch.dtype, device: torch.device | None = None, keep: Collection[str] = ()
) -> Module:
    """Convert the module in place: real tensors to ``dtype``, complex ones to the corresponding complex dtype.

    ``module.to(dtype)`` would drop the imaginary parts.

    Args:
        module: The module.
        dtype: The dtype of its real tensors.
        device: Their device; None leaves them where they are.
        keep: Names of tensors that keep their dtype.

    >>> layer = torch.nn.Linear(2, 1).to(torch.bfloat16)
    >>> convert_module(layer, torch.float32, keep=["weight"]).weight.dtype, layer.bias.dtype
    (torch.bfloat16, torch.float32)
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(device=device, dtype=dtype.to_complex())
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return _convert(module, keep, convert, lambda tensor: tensor.to(device=device))


def widen_module(module: Module, dtype: torch.dtype, keep: Collection[str] = ()) -> Module:
    """Convert the module in place to at least the precision of ``dtype``, without loss; ``keep`` names exceptions."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        number = tensor.is_floating_point() or tensor.is_complex()
        return tensor.to(torch.promote_types(tensor.dtype, dtype)) if number else tensor

    return _convert(module, keep, widen, lambda tensor: tensor)


def _convert(module: Module, keep: Collection[str], convert: Conversion, exempt: Conversion) -> Module:
    kept = {id(tensor) for name, tensor in _named_tensors(module).items() if name in keep} if keep else ()
    module._apply(lambda tensor: (exempt if id(tensor) in kept else convert)(tensor))  # type: ignore[no-untyped-call]
    return module


def _refuse_shared_memory(module: nn.Module) -> None:
    """Raise if distinct parameters share memory, because a flat vector would separate them."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in _stored(module):
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise HansaError(f"parameter {name} repeats its own memory (expand?): make it contiguous with clone().")
        begin = tensor.data_ptr()
        span = 1 + sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((begin, begin + span * tensor.element_size(), name))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise HansaError(
                f"{first} and {second} share memory, but one flat vector separates them. Tie them as one "
                "parameter (module.b = module.a), or clone() one of them."
            )


def _stored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            raise HansaError(f"{name} has no shape yet: give lazy layers their sizes, or run them once in the factory.")
        if tensor.numel() and tensor.device.type != "meta":
            yield name, tensor.detach()
