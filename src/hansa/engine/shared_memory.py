"""Memory that the processes of a run share, and objects whose large contents lie in it.

The memory is a file without a name: workers receive its descriptor, and the system frees it with the last process that
holds it, so that nothing stays behind however a run ends (nor does the size of /dev/shm matter). Pickle is spoken only
between a run and the workers it started itself, over a private socket: never from a file, never from a network. Code of
a script, a notebook or a closure, which no worker could import, travels by value (cloudpickle) in the same memory.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import torch

_ALIGN = 64  # a cache line: also enough for every vector instruction
_LONG = 1024  # shorter byte strings travel with the skeleton
_BYTES = (bytes, bytearray, memoryview)


class Memory:
    """A nameless file, mapped, that grows. Maps made before it grew stay valid.

    >>> memory = Memory()
    >>> memory.write(64, "Lübeck".encode())
    >>> Memory(memory.handle()).mapped(71)[64:71].decode()
    'Lübeck'
    """

    descriptor = -1

    def __init__(self, descriptor: int | None = None, *, private: bool = False) -> None:
        self.descriptor = _nameless() if descriptor is None else descriptor
        self._access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._map: mmap.mmap | None = None

    def handle(self) -> int:
        """Another descriptor of the same memory."""
        return os.dup(self.descriptor)

    def mapped(self, size: int) -> mmap.mmap:
        """The first ``size`` bytes or more; the file grows to hold them."""
        if self._map is None or len(self._map) < size:
            held = os.fstat(self.descriptor).st_size
            if held < size:
                held = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self.descriptor, held)
            self._map = mmap.mmap(self.descriptor, held, access=self._access)
        return self._map

    def tensor(self, place: TensorPlace) -> torch.Tensor:
        """The tensor that lies at a place: a view, never a copy."""
        count, size = place.entries, place.entries * place.dtype.itemsize
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        flat = torch.frombuffer(self.mapped(place.offset + size), dtype=place.dtype, count=count, offset=place.offset)
        return flat if place.stride == (1,) else flat.as_strided(place.shape, place.stride)

    def write(self, offset: int, content: bytes | bytearray | memoryview) -> None:
        """Copy bytes to an offset."""
        end = offset + len(content)
        self.mapped(end)[offset:end] = content

    def unmap(self) -> None:
        """Hold the memory without looking at it."""
        self._map = None

    def clear(self) -> None:
        """Give back what it holds; nobody may look at it before it is written again."""
        self._map = None
        os.ftruncate(self.descriptor, 0)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; tensors that still lie here keep their map."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map = -1, None


class TensorPlace(NamedTuple):
    """Where a tensor lies: in which memory, from which byte, in which layout."""

    memory: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def entries(self) -> int:
        return torch.Size(self.shape).numel()


class BytesPlace(NamedTuple):
    """Where a byte string lies."""

    memory: int
    offset: int
    size: int


Place: TypeAlias = TensorPlace | BytesPlace


class PackedObject(NamedTuple):
    """Where a packed object lies: its skeleton, which refers to the tensors and bytes laid before it."""

    offset: int
    size: int


class _Laying:
    """Where a pickler lays tensors and long byte strings: into a memory, densely, each object once."""

    def __init__(self, memory: Memory, start: int = 0, placed: Mapping[int, TensorPlace] | None = None) -> None:
        self._skeleton = io.BytesIO()
        super().__init__(self._skeleton, protocol=5)  # type: ignore[call-arg]
        self.memory, self.end = memory, start
        self._first, self._given = start, placed
        self._placed: dict[int, Place] = dict(placed or {})
        self._alive: list[Any] = []  # an id stands for its object only while that lives

    def _packed(self, item: Any) -> PackedObject:
        self.dump(item)  # type: ignore[attr-defined]
        skeleton = self._skeleton.getbuffer()
        offset = self._room(len(skeleton))
        self.memory.write(offset, skeleton)
        return PackedObject(offset, len(skeleton))

    def lay(self, tensor: torch.Tensor, memory: int = 0) -> TensorPlace:
        """Write one tensor; once for each object, however often it is asked for."""
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        offset = self._room(tensor.numel() * tensor.dtype.itemsize)
        place = TensorPlace(memory, offset, tensor.dtype, tuple(tensor.shape), tuple(stride))
        if tensor.numel():
            self.memory.tensor(place).copy_(tensor)
        self._placed[id(tensor)] = place
        self._alive.append(tensor)
        return place

    def persistent_id(self, item: Any) -> Place | None:
        kind = type(item)
        if kind is torch.Tensor:
            return self._placed.get(id(item)) or (self.lay(item) if _plain(item) else None)
        if kind in _BYTES and memoryview(item).nbytes >= _LONG:
            offset = self._room(memoryview(item).nbytes)
            self.memory.write(offset, memoryview(item).cast("B"))
            return BytesPlace(0, offset, memoryview(item).nbytes)
        return None

    def _room(self, size: int) -> int:
        offset = -(-self.end // _ALIGN) * _ALIGN
        self.end = offset + size
        return offset


class CodePacker(_Laying, cloudpickle.Pickler):  # type: ignore[misc]
    """A `Packer` that sends by value what the other process cannot import: the code of a script, a notebook's cell, a
    lambda or a closure, with the globals that it reads."""

    def pack(self, item: Any) -> PackedObject:
        """Write the whole object; the packed is all that must be sent."""
        return self._packed(item)


class Packer(_Laying, pickle.Pickler):
    """Lays an object's tensors and long byte strings into a memory, densely; the rest becomes a short skeleton.

    ``placed`` names tensors that lie elsewhere already, by their ``id``. A tensor keeps its strides where it is dense,
    so that channels-last data stay channels-last.
    """

    def pack(self, item: Any) -> PackedObject:
        """Write the whole object; the packed is all that must be sent."""
        try:
            return self._packed(item)
        except (_OwnCode, pickle.PicklingError, AttributeError):  # rare: a part's own class in a message
            other = CodePacker(self.memory, self._first, self._given)
            packed = other.pack(item)
            self.end = other.end
            return packed

    def reducer_override(self, item: Any) -> Any:
        """Nothing is reduced in another way; what the script itself defines goes by value."""
        if isinstance(item, type | FunctionType) and item.__module__ == "__main__":
            raise _OwnCode
        return NotImplemented


class _OwnCode(Exception):
    """Something that only the script has."""


class _Unpacker(pickle.Unpickler):
    def __init__(self, skeleton: bytes, memories: Sequence[Memory], copy: bool) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._memories, self._copy = memories, copy

    def persistent_load(self, place: Place) -> Any:
        memory = self._memories[place.memory]
        if isinstance(place, BytesPlace):
            return memory.mapped(place.offset + place.size)[place.offset : place.offset + place.size]
        tensor = memory.tensor(place)
        return tensor.clone() if self._copy else tensor


def unpack(packed: PackedObject, memories: Sequence[Memory], *, copy: bool) -> Any:
    """The object a packed stands for. Its tensors are views of the memories, or with ``copy`` the reader's own.

    >>> memory = Memory()
    >>> packed = Packer(memory).pack({"x": torch.arange(3.0), "n": 1})
    >>> unpack(packed, [memory], copy=True)
    {'x': tensor([0., 1., 2.]), 'n': 1}
    """
    end = packed.offset + packed.size
    return _Unpacker(memories[0].mapped(end)[packed.offset : end], memories, copy).load()


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in this computer's memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hansa")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
