"""Devices on which clients train and the server computes: the CPU, or accelerators supported by torch.

Client memory and encoded packets are on the CPU always, the server's vectors by default, so that compression,
aggregation, run folders and exact resume do not depend on the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hansa.core.errors import HansaError, argument_error, invalid_argument

Device: TypeAlias = "str | torch.device | Sequence[str | torch.device]"
PINNED_DEVICES = frozenset({"cuda", "xpu"})
"""Types of devices that copy from pinned memory of the host while the host continues."""


def available_cores() -> int:
    """Return the number of cores this process may use: its affinity, limited by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota ("max"), or no control groups
        return count


def available_devices() -> dict[torch.device, str]:
    """Return the devices of this machine and their names."""
    devices = {torch.device("cpu"): "CPU"}
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return devices
    module: Any = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind.type
        devices[torch.device(kind.type, index)] = str(name)
    return devices


def resolve_devices(requested: Device, component: str = "run", argument: str = "device") -> tuple[torch.device, ...]:
    """Return the requested devices; raise if one is not available. Workers are assigned several in turn.

    >>> resolve_devices("cpu:0"), resolve_devices(["cpu", "cpu"])
    ((device(type='cpu'),), (device(type='cpu'), device(type='cpu')))
    >>> resolve_devices("cuda:9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hansa.core.errors.HansaError: run(device='cuda:9'): there is no such device here. There is: cpu (CPU)...
    """
    words = [requested] if isinstance(requested, (str, torch.device)) else list(requested)
    if not words:
        raise invalid_argument(component, argument, requested, "a device such as 'cpu' or 'cuda:0', or several")
    available = available_devices()
    devices = [_find_device(word, available) for word in words]
    if None in devices:
        listed = ", ".join(f"{device} ({name})" for device, name in available.items())
        if argument == "server_device":
            listed += ". Without server_device the server computes on the CPU"
        missing = words[devices.index(None)]
        raise argument_error(
            component, argument, str(missing) if isinstance(missing, torch.device) else missing,
            f"there is no such device here. There is: {listed}.",
        )  # fmt: skip
    return tuple(device for device in devices if device is not None)


def _find_device(requested: str | torch.device, available: Iterable[torch.device]) -> torch.device | None:
    """Return the first available device that a word names, if any; the CPU is also ``cpu:0``."""
    try:
        named = torch.device(requested)
    except (RuntimeError, TypeError):  # unknown to torch
        return None
    candidates = (device for device in available if device.type == named.type)
    return next((device for device in candidates if named.index in (None, device.index or 0)), None)


def resolve_server_device(requested: str | torch.device) -> torch.device:
    """Return the device of the server's arithmetic; raise if it is not available.

    >>> resolve_server_device("cpu")
    device(type='cpu')
    >>> resolve_server_device("cuda:9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hansa.core.errors.HansaError: run(server_device='cuda:9'): there is no such device here. There is: cpu (CPU)...
    """
    if not isinstance(requested, (str, torch.device)):
        raise invalid_argument("run", "server_device", requested, "one device such as 'cpu' or 'cuda:0'")
    (device,) = resolve_devices(requested, argument="server_device")
    return device


def device_name(device: torch.device, *, numbered: bool = True) -> str:
    """Return a device and what it is, for records; without its number if that means nothing elsewhere.

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    if device.type == "cpu":
        return "cpu"
    return f"{device if numbered else device.type} ({available_devices().get(device, '?')})"


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether the host reads the tensor without waiting for a device."""
    return tensor.is_cpu


def copy_to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of the host on a device, without waiting for the device if it reads pinned memory.

    The values are first copied to new pinned memory, so the caller may overwrite its tensor at once. Torch reuses
    pinned memory only after the copies from it have finished.

    Args:
        tensor: The tensor; one that is not on the host is moved as ``tensor.to`` does.
        device: The device.
        dtype: The dtype on the device; None keeps that of the tensor.

    >>> copy_to_device(torch.tensor([1, 2]), torch.device("cpu"), torch.float64)
    tensor([1., 2.], dtype=torch.float64)
    """
    if device.type not in PINNED_DEVICES or tensor.device.type != "cpu":
        return tensor.to(device=device, dtype=dtype)
    if dtype is not None and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)  # before the copy: fewer bytes
    staged = empty_pinned(tensor).copy_(tensor)
    copied = staged.to(device, non_blocking=True)
    return copied if dtype is None else copied.to(dtype)


def empty_pinned(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor in pinned memory of the host."""
    return torch.empty_like(like, pin_memory=True)


def index_on_device(device: torch.device, positions: Any) -> torch.Tensor:
    """Return positions as an index on a device; a list as index would make the host wait for the device.

    Args:
        device: The device of the tensor to be indexed.
        positions: A list or an array of integers.

    >>> index_on_device(torch.device("cpu"), [2, 0])
    tensor([2, 0])
    """
    return copy_to_device(torch.as_tensor(positions, dtype=torch.int64), device)


def use_device(device: torch.device) -> None:
    """Make an accelerator the default of this process, so that nothing is allocated on another."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def release_cached_memory(device: torch.device) -> None:
    """Return memory of an accelerator that this process no longer uses, so that other processes can."""
    if device.type != "cpu" and (release := getattr(torch.get_device_module(device), "empty_cache", None)) is not None:
        release()


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    return device.type != "mps"


def where_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, moved to the CPU if its device has no float64."""
    return tensor if has_float64(tensor.device) else tensor.cpu()


def check_dtype(device: torch.device, dtype: torch.dtype, component: str = "run", argument: str = "device") -> None:
    """Raise if a device does not support a dtype."""
    if dtype == torch.float64 and not has_float64(device):
        raise HansaError(f"{component}({argument}={str(device)!r}, dtype=torch.float64): this device has no float64.")
