"""Engines execute the work of a round: serially, in a pool of processes or threads, or on a Ray cluster."""

from hansa.engine.auto import ENGINES, EngineFactory, EngineOptions, auto_engine, build_engine
from hansa.engine.pool import Pool
from hansa.engine.processes import ProcessGroup, reuse_workers, workers
from hansa.engine.ray_pool import RayPool
from hansa.engine.serial import (
    ClientEvaluationEngine,
    DeviceEngine,
    Engine,
    Loopback,
    MeteredEngine,
    ObservedEngine,
    RemoteEngine,
    Serial,
)

__all__ = [
    "ENGINES",
    "ClientEvaluationEngine",
    "DeviceEngine",
    "Engine",
    "EngineFactory",
    "EngineOptions",
    "Loopback",
    "MeteredEngine",
    "ObservedEngine",
    "Pool",
    "ProcessGroup",
    "RayPool",
    "RemoteEngine",
    "Serial",
    "auto_engine",
    "build_engine",
    "reuse_workers",
    "workers",
]
