"""Devices on which clients train: the CPU, or accelerators supported by torch.

Only local training and evaluation use them. The server's vectors, client state and packets stay on the CPU, so that
compression, aggregation, run folders and exact resume do not depend on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from hansa.core.errors import HansaError, invalid_argument, short_repr

Device: TypeAlias = "str | torch.device | Sequence[str | torch.device]"
CPU = torch.device("cpu")


def available_devices() -> dict[torch.device, str]:
    """Return the devices of this machine and their names."""
    devices = {CPU: "CPU"}
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return devices
    module: Any = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind.type
        devices[torch.device(kind.type, index)] = str(name)
    return devices


def resolve_devices(requested: Device, component: str = "run") -> tuple[torch.device, ...]:
    """Return the requested devices; raise if one is not available. Workers are assigned several in turn.

    >>> resolve_devices("cpu:0"), resolve_devices(["cpu", "cpu"])
    ((device(type='cpu'),), (device(type='cpu'), device(type='cpu')))
    >>> resolve_devices("cuda:9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hansa.core.errors.HansaError: run(device='cuda:9'): there is no such device here. There is: cpu (CPU)...
    """
    each = [requested] if isinstance(requested, (str, torch.device)) else list(requested)
    if not each:
        raise invalid_argument(component, "device", requested, "a device such as 'cpu' or 'cuda:0', or several")
    there = available_devices()
    return tuple(_resolve_device(word, there, component) for word in each)


def _resolve_device(requested: str | torch.device, available: dict[torch.device, str], component: str) -> torch.device:
    listed = ", ".join(f"{device} ({name})" for device, name in available.items())
    try:
        wanted = torch.device(requested)
    except (RuntimeError, TypeError) as error:
        raise HansaError(
            f"{component}(device={short_repr(requested)}): torch knows no such device. There is: {listed}."
        ) from error
    if wanted.index is None:
        same = [device for device in available if device.type == wanted.type]
        match = same[0] if same else None
    else:
        match = wanted if wanted in available else None
        if wanted.type == "cpu" and wanted.index == 0:
            match = CPU
    if match is None:
        shown = short_repr(str(requested) if isinstance(requested, torch.device) else requested)
        raise HansaError(f"{component}(device={shown}): there is no such device here. There is: {listed}.")
    return match


def check_dtype(device: torch.device, dtype: torch.dtype, component: str = "run") -> None:
    """Raise if a device does not support a dtype."""
    if device.type == "mps" and dtype == torch.float64:
        raise HansaError(f"{component}(device={str(device)!r}, dtype=torch.float64): this device has no float64.")
