"""Engines: they only transport."""

from hansa.engine.choose import choose
from hansa.engine.cluster import RayPool
from hansa.engine.loopback import Loopback
from hansa.engine.pool import Pool
from hansa.engine.processes import Processes
from hansa.engine.serial import Engine, Examining, Metered, Networked, Serial
from hansa.engine.staff import keep_workers, workers

__all__ = [
    "Engine",
    "Examining",
    "Loopback",
    "Metered",
    "Networked",
    "Pool",
    "Processes",
    "RayPool",
    "Serial",
    "choose",
    "keep_workers",
    "workers",
]
