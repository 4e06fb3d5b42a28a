"""A simulated accelerator: a device of torch's (``PrivateUse1``, named "simulated") whose kernels are those of the CPU.

Its tensors are plain tensors of a device that is not the CPU, with autograd, views and storages. It computes with the
CPU's kernels, so that a run on it has the bits of a run on the CPU. As on a real accelerator

- an operation on tensors of both devices is an error, unless that of the CPU is a number without dimensions, or an
  index, which is copied to the device;
- memory of the device cannot be read through its address: addresses are shifted to where nothing is;
- the host waits for the device if it reads a number, copies to the CPU or needs a shape that depends on values, and for
  copies to the device that are not from pinned memory.

``TRAFFIC`` counts the latter, and copies in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.utils import backend_registration

NAME = "simulated"
SHIFT = 1 << 60  # from the address in memory to that on the device, which no instruction can read
CPU_KEY = torch._C.DispatchKey.CPU
aten = torch.ops.aten

WAITING = {
    aten.equal.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
}  # fmt: skip
"""Operations beside reads for which the host waits: their result, or its shape, is needed on the host."""

INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
"""Operations that copy indices on the CPU to the device."""


@dataclass
class Traffic:
    """What was counted: numbers read and copies to the CPU (``waits``), copies to the CPU and to the device and their
    bytes, copies to the device that the host waits for, and calls of kernels. ``staged`` are the sources of the other
    copies, under way, with the version of their content."""

    waits: int = 0
    copies_to_cpu: int = 0
    copies_to_device: int = 0
    bytes_to_cpu: int = 0
    bytes_to_device: int = 0
    unpinned: int = 0
    calls: int = 0
    staged: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


TRAFFIC = Traffic()


class _Module:
    """What torch expects of ``torch.simulated``. Only inside of `simulated_device` is there such a device."""

    visible, has_float64 = False, True

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.visible

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(self.visible)

    def get_device_name(self, index: int = 0) -> str:
        return "simulated accelerator"

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


MODULE = _Module()
_library: torch.library.Library | None = None


def _register() -> torch.device:
    """Register the device with torch, once per process and before its first gradient: then torch starts a thread for
    every kind of device, and there is no way back."""
    global _library
    if _library is None:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_call_on_cpu, "PrivateUse1")
        kernels = torch.library.Library("aten", "IMPL")
        for name, kernel in _KERNELS.items():
            kernels.impl(name, kernel, "PrivateUse1")
        _kept.append(kernels)
    return torch.device(NAME, 0)


_kept: list[Any] = []
_pinned: dict[int, torch.Tensor] = {}


def empty_pinned(like: torch.Tensor) -> torch.Tensor:
    """Stands in for that of `hansa.core.devices`; what it returned is kept, so that no address is used twice."""
    memory = torch.empty_like(like)
    _pinned[memory.data_ptr()] = memory
    return memory


@contextmanager
def simulated_device() -> Iterator[torch.device]:
    """Yield the device; it is available until the end of the block, and what it counts starts at zero."""
    device, MODULE.visible = _register(), True
    TRAFFIC.reset()
    try:
        yield device
    finally:
        MODULE.visible = False


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == NAME


def to_simulated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device over the memory of one of the CPU."""
    assert MODULE.has_float64 or tensor.dtype != torch.float64
    memory = tensor.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr() + SHIFT, torch.device(NAME, 0), memory.nbytes()
    )
    storage.memory = memory  # lives as long as the storage
    made = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return _set(made, storage, tensor)


def _set(target: torch.Tensor, storage: Any, like: torch.Tensor) -> torch.Tensor:
    return aten.set_.source_Storage_storage_offset._op_dk(
        CPU_KEY, target, storage, like.storage_offset(), like.shape, like.stride()
    )


def to_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the CPU whose memory a tensor of the device has."""
    found, storage = torch.empty(0, dtype=tensor.dtype), cast(Any, tensor.untyped_storage())
    found.set_(storage.memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found


class _Call:
    """The arguments of a call as the CPU's kernel takes them, and the way back of its results."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not on_device(value):
                if value.dim() and self.op._overloadpacket in INDEXING and value.dtype in (torch.int64, torch.bool):
                    TRAFFIC.copies_to_device += 1
                elif value.dim():
                    raise RuntimeError(
                        f"{self.op}: expected all tensors to be on the same device, but found at least two devices, "
                        f"{NAME}:0 and {value.device}"
                    )
                return value
            memory = to_memory(value)
            self.pairs.append((value, memory))
            return memory
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.lower, value))
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for own, memory in self.pairs:
                if value is memory:
                    return self._written(own, memory)
            for own, memory in self.pairs:
                if value.untyped_storage()._cdata == memory.untyped_storage()._cdata:
                    return aten.as_strided.default._op_dk(
                        CPU_KEY, own, value.shape, value.stride(), value.storage_offset()
                    )
            return to_simulated(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.lift, value))
        return value

    @staticmethod
    def _written(own: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor that was written to; an ``out`` may have got another shape and memory."""
        if memory.data_ptr() + SHIFT != own.data_ptr() or memory.shape != own.shape:
            made = to_simulated(memory)
            _set(own, made.untyped_storage(), memory)
        return own


def _call_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with the CPU's kernel on the same memory."""
    TRAFFIC.calls += 1
    TRAFFIC.waits += op in WAITING
    call = _Call(op)
    return call.lift(op(*call.lower(args), **{name: call.lower(value) for name, value in kwargs.items()}))


def _empty(size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return to_simulated(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, layout: Any = None,
                   device: Any = None, pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return to_simulated(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    there, here = on_device(source), not on_device(target)
    TRAFFIC.copies_to_cpu += there and here
    TRAFFIC.waits += there and here
    TRAFFIC.copies_to_device += not there
    if not there and non_blocking and source.data_ptr() in _pinned:
        TRAFFIC.staged.append((source, source._version))
    else:
        TRAFFIC.unpinned += not there
    TRAFFIC.bytes_to_cpu += source.nbytes if there and here else 0
    TRAFFIC.bytes_to_device += 0 if there else source.nbytes
    (target if here else to_memory(target)).copy_(to_memory(source) if there else source)
    return target


def _read_number(tensor: torch.Tensor) -> Any:
    TRAFFIC.waits += 1
    return aten._local_scalar_dense.default(to_memory(tensor))


def _on_own_storage(op: Any) -> Callable[..., Any]:
    """Return a kernel that makes a view: that of the CPU looks only at sizes and strides."""
    return lambda *args: op._op_dk(CPU_KEY, *args)


def _view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor((0,), dtype)
    return _set(made, tensor.untyped_storage(), to_memory(tensor).view(dtype))


def _convolution(*args: Any) -> Any:
    return _call_on_cpu(aten.convolution.default, *args)


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *rest: Any) -> Any:
    *settings, mask = rest
    bias = [gradient.shape[1]] if mask[2] else None
    return _call_on_cpu(aten.convolution_backward.default, gradient, inputs, weight, bias, *settings, mask)


OWN_KERNELS = ("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward")
"""Operations that torch would compose of others for a device, and for which the CPU has a kernel."""

_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _read_number,
    "as_strided": _on_own_storage(aten.as_strided.default),
    "view": _on_own_storage(aten.view.default),
    "view.dtype": _view_dtype,
    "_reshape_alias": _on_own_storage(aten._reshape_alias.default),
    "set_.source_Storage_storage_offset": _on_own_storage(aten.set_.source_Storage_storage_offset),
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    **{name: partial(_call_on_cpu, getattr(aten, name).default) for name in OWN_KERNELS},
}
