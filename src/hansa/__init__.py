"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from hansa import aggregate, compress, data, gossip, local, measures, models, presets, sample, server, store, tasks
from hansa.algorithm import Algorithm, Channel, LocalPhase
from hansa.cite import cite
from hansa.errors import HansaError
from hansa.faults import faults
from hansa.keys import Key
from hansa.layout import Layout
from hansa.metrics import load_run
from hansa.tasks import Task
from hansa.train import Run, run

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Channel",
    "HansaError",
    "Key",
    "Layout",
    "LocalPhase",
    "Run",
    "Task",
    "aggregate",
    "cite",
    "compress",
    "data",
    "faults",
    "gossip",
    "load_run",
    "local",
    "measures",
    "models",
    "presets",
    "run",
    "sample",
    "server",
    "store",
    "tasks",
]
