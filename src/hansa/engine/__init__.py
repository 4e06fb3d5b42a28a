"""Engines execute the work of a round: serially, in a pool of processes or threads, or on a Ray cluster."""

from hansa.engine.auto import EngineFactory, auto_engine, build_engine
from hansa.engine.pool import Pool
from hansa.engine.processes import ProcessGroup, reuse_workers, workers
from hansa.engine.ray_pool import RayPool
from hansa.engine.serial import BaseEngine, Engine, Loopback, Serial

__all__ = [
    "BaseEngine",
    "Engine",
    "EngineFactory",
    "Loopback",
    "Pool",
    "ProcessGroup",
    "RayPool",
    "Serial",
    "auto_engine",
    "build_engine",
    "reuse_workers",
    "workers",
]
