"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from hansa import aggregate, compress, gossip, local, measures, presets, sample, server, store, tasks
from hansa.algorithm import Algorithm, Channel, LocalPhase
from hansa.cite import cite
from hansa.errors import HansaError
from hansa.faults import faults
from hansa.keys import Key
from hansa.layout import Layout
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
    "faults",
    "gossip",
    "local",
    "measures",
    "presets",
    "run",
    "sample",
    "server",
    "store",
    "tasks",
]
