"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from hansa import aggregate, compress, data, gossip, local, measures, models, presets, sample, server, store, tasks
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.citations import cite
from hansa.errors import HansaError
from hansa.keys import Key
from hansa.rounds.faults import faults
from hansa.runs.driver import Run, run
from hansa.runs.metrics import load_run
from hansa.tasks import Task
from hansa.vectors.layout import Layout

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Channel",
    "HansaError",
    "Key",
    "Layout",
    "LocalPhase",
    "Mixing",
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
