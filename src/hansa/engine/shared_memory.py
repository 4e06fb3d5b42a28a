"""Shared memory for worker processes, and objects packed into it.

The memory is an anonymous file: workers receive its descriptor, and the system frees it with the last process that
holds it, however a run ends. Pickle is used only between a run and the workers it started itself, over a private pipe:
never from a file or a network. Code that a worker cannot import (a script, a notebook, a closure) is sent by value
(cloudpickle).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import cloudpickle
import torch

_ALIGN = 64  # a cache line: also enough for every vector instruction


class TensorSpan(NamedTuple):
    """The location of a tensor: the number of the memory, the offset in bytes, and the layout."""

    memory: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def entries(self) -> int:
        return torch.Size(self.shape).numel()


class PackedObject(NamedTuple):
    """The location of a packed object: its pickle, which refers to tensors written before it."""

    offset: int
    size: int


class SharedMemory:
    """An anonymous mapped file that grows. Maps made before it grew stay valid.

    >>> memory = SharedMemory()
    >>> memory.write(64, "Lübeck".encode())
    >>> SharedMemory(os.dup(memory.fd)).mapped(71)[64:71].decode()
    'Lübeck'
    """

    fd = -1

    def __init__(self, descriptor: int | None = None, *, private: bool = False) -> None:
        self.fd = _anonymous_file() if descriptor is None else descriptor
        self._access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._map: mmap.mmap | None = None

    def mapped(self, size: int) -> mmap.mmap | memoryview:
        """Map at least the first ``size`` bytes; the file grows if needed."""
        if self._map is None or len(self._map) < size:
            capacity = os.fstat(self.fd).st_size
            if capacity < size:
                capacity = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self.fd, capacity)
            self._map = mmap.mmap(self.fd, capacity, access=self._access)
        return self._map

    def tensor(self, span: TensorSpan) -> torch.Tensor:
        """Return the tensor at a location, as a view."""
        count, size = span.entries, span.entries * span.dtype.itemsize
        if not count:
            return torch.empty(span.shape, dtype=span.dtype)
        flat = torch.frombuffer(self.mapped(span.offset + size), dtype=span.dtype, count=count, offset=span.offset)
        return flat if span.stride == (1,) else flat.as_strided(span.shape, span.stride)

    def write(self, offset: int, content: bytes | bytearray | memoryview) -> None:
        """Copy bytes to an offset."""
        end = offset + len(content)
        self.mapped(end)[offset:end] = content

    def unmap(self) -> None:
        """Drop the map but keep the descriptor."""
        self._map = None

    def clear(self) -> None:
        """Free the content; no process may read it before it is written again."""
        self._map = None
        os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; existing tensors keep their map."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map = -1, None


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes an object into a memory: first its tensors, each once, then a short pickle of the rest, with code by value
    that the other process cannot import.

    ``spans`` has the locations of tensors that are already written, by ``id``. Dense tensors keep their strides
    (channels-last data stay channels-last).
    """

    def __init__(self, memory: SharedMemory, start: int = 0, spans: Mapping[int, TensorSpan] | None = None) -> None:
        self._pickle = io.BytesIO()
        super().__init__(self._pickle, protocol=5)
        self.memory, self.end = memory, start
        self._spans: dict[int, TensorSpan] = dict(spans or {})
        self._alive: list[Any] = []  # an id is valid only while its object lives

    def pack(self, item: Any) -> PackedObject:
        """Write the object; only the returned location must be sent."""
        self.dump(item)
        pickled = self._pickle.getbuffer()
        offset = self._reserve(len(pickled))
        self.memory.write(offset, pickled)
        return PackedObject(offset, len(pickled))

    def write_tensor(self, tensor: torch.Tensor, memory: int = 0) -> TensorSpan:
        """Write one tensor."""
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        offset = self._reserve(tensor.numel() * tensor.dtype.itemsize)
        span = TensorSpan(memory, offset, tensor.dtype, tuple(tensor.shape), tuple(stride))
        if tensor.numel():
            self.memory.tensor(span).copy_(tensor)
        self._spans[id(tensor)] = span
        self._alive.append(tensor)
        return span

    def write_shared(self, vectors: Iterable[torch.Tensor]) -> dict[int, TensorSpan]:
        """Write vectors that the requests of a round share, each once; return their locations for the packers of the
        requests, in which this memory is the second one."""
        by_id = {id(vector): vector for vector in vectors}
        return {name: self.write_tensor(vector, memory=1) for name, vector in by_id.items()}

    def persistent_id(self, item: Any) -> TensorSpan | None:
        if type(item) is not torch.Tensor:
            return None
        return self._spans.get(id(item)) or (self.write_tensor(item) if _is_plain(item) else None)

    def reducer_override(self, item: Any) -> Any:
        """Leave Hansa's own classes to pickle, which is faster, and reduce a class method to its class and name.

        cloudpickle does not find the function behind a class method by its name and would send it by value, with what
        its decorators hold: the generator of a context manager, which cannot be packed.
        """
        if isinstance(item, type) and item.__module__.startswith("hansa.") and "." not in item.__qualname__:
            return NotImplemented
        if isinstance(item, MethodType) and isinstance(item.__self__, type):
            name = item.__func__.__name__
            if getattr(item.__self__, name, None) == item:
                return getattr, (item.__self__, name)
        return super().reducer_override(item)

    def _reserve(self, size: int) -> int:
        """Return the aligned offset of the next ``size`` bytes."""
        offset = -(-self.end // _ALIGN) * _ALIGN
        self.end = offset + size
        return offset


class CodeChecker(Packer):
    """Checks whether an object can be packed, without copying its tensors.

    >>> CodeChecker().check({"x": torch.zeros(3), "f": lambda: 1})
    ''
    >>> bool(CodeChecker().check(number for number in ()))
    True
    """

    def __init__(self) -> None:
        super().__init__(SharedMemory.__new__(SharedMemory))
        self.code: list[type | FunctionType] = []
        """The classes and functions of the object."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, type | FunctionType):
            self.code.append(item)
        return super().reducer_override(item)

    def check(self, item: Any) -> str:
        """Return why the object cannot be packed; "" if it can."""
        try:
            self.dump(item)
        except Exception as error:
            return (str(error).strip() or type(error).__name__).splitlines()[0]
        return ""

    def persistent_id(self, item: Any) -> TensorSpan | None:
        plain = type(item) is torch.Tensor and _is_plain(item)
        return TensorSpan(0, 0, item.dtype, (0,), (1,)) if plain else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes | memoryview, memories: Sequence[SharedMemory], copy: bool) -> None:
        super().__init__(io.BytesIO(pickled))
        self._memories, self._copy = memories, copy
        self._loaded: dict[TensorSpan, torch.Tensor] = {}

    def persistent_load(self, span: TensorSpan) -> torch.Tensor:
        if span not in self._loaded:  # one object stays one: data compare their tensors by identity
            tensor = self._memories[span.memory].tensor(span)
            self._loaded[span] = tensor.clone() if self._copy else tensor
        return self._loaded[span]


def unpack_object(packed: PackedObject, memories: Sequence[SharedMemory], *, copy: bool) -> Any:
    """Return the packed object. Its tensors are views of the memories, or copies with ``copy``.

    >>> memory = SharedMemory()
    >>> packed = Packer(memory).pack({"x": torch.arange(3.0), "n": 1})
    >>> unpack_object(packed, [memory], copy=True)
    {'x': tensor([0., 1., 2.]), 'n': 1}
    """
    end = packed.offset + packed.size
    return _Unpacker(memories[0].mapped(end)[packed.offset : end], memories, copy).load()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain strided CPU memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hansa")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
