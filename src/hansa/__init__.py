"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from importlib import import_module
from typing import TYPE_CHECKING

from hansa import aggregate, compress, data, gossip, local, measures, models, presets, sample, server, store, tasks
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.citations import cite
from hansa.engine import workers
from hansa.errors import HansaError
from hansa.keys import Key
from hansa.rounds.faults import faults
from hansa.runs.driver import Run
from hansa.runs.metrics import load_run
from hansa.tasks import Task
from hansa.vectors.layout import Layout

if TYPE_CHECKING:
    from hansa.report.results import Comparison, Runs
    from hansa.runs.trained import load_model, predict
    from hansa.study import compare, resume, run

__version__ = "0.1.0"

_LATER = {
    "Comparison": "hansa.report.results",
    "Runs": "hansa.report.results",
    "compare": "hansa.study",
    "load_model": "hansa.runs.trained",
    "predict": "hansa.runs.trained",
    "resume": "hansa.study",
    "run": "hansa.study",
}
"""Names whose modules are imported when one is asked for: workers, which start often, need none of them."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'hansa' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "Algorithm",
    "Channel",
    "Comparison",
    "HansaError",
    "Key",
    "Layout",
    "LocalPhase",
    "Mixing",
    "Run",
    "Runs",
    "Task",
    "aggregate",
    "cite",
    "compare",
    "compress",
    "data",
    "faults",
    "gossip",
    "load_model",
    "load_run",
    "local",
    "measures",
    "models",
    "predict",
    "presets",
    "resume",
    "run",
    "sample",
    "server",
    "store",
    "tasks",
    "workers",
]
