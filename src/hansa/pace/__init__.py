"""Paces: when the server steps, on a virtual clock; and the speeds of the clients' devices."""

from hansa.pace.base import Pace, buffered, deadline, overselect, synchronous
from hansa.pace.profiles import Device, Profile, device_table, devices, tiers

__all__ = [
    "Device", "Pace", "Profile", "buffered", "deadline", "device_table", "devices", "overselect", "synchronous",
    "tiers",
]  # fmt: skip
