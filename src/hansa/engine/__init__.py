"""Engines: they only transport."""

from hansa.engine.auto import choose
from hansa.engine.loopback import Loopback
from hansa.engine.pool import Pool
from hansa.engine.processes import Processes
from hansa.engine.ray_pool import RayPool
from hansa.engine.serial import Engine, Examining, Metered, Networked, Serial
from hansa.engine.worker_reuse import keep_workers, workers

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
