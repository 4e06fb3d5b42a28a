"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from typing import TYPE_CHECKING

from hansa.later import later

if TYPE_CHECKING:
    from hansa import (
        aggregate,
        augment,
        compress,
        data,
        gossip,
        local,
        losses,
        measures,
        models,
        presets,
        sample,
        server,
        store,
        tasks,
    )
    from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
    from hansa.citations import cite
    from hansa.engine import workers
    from hansa.errors import HansaError
    from hansa.keys import Key
    from hansa.report.results import Comparison, Runs
    from hansa.rounds.faults import faults
    from hansa.runs.driver import Run
    from hansa.runs.metrics import load_run
    from hansa.runs.proposals import between
    from hansa.runs.trained import export, load_model, predict
    from hansa.study import compare, resume, run, search
    from hansa.tasks import Task
    from hansa.vectors.layout import Layout

__version__ = "0.2.0"

_HOMES = {
    "Algorithm": "hansa.algorithm",
    "Channel": "hansa.algorithm",
    "Comparison": "hansa.report.results",
    "HansaError": "hansa.errors",
    "Key": "hansa.keys",
    "Layout": "hansa.vectors.layout",
    "LocalPhase": "hansa.algorithm",
    "Mixing": "hansa.algorithm",
    "Run": "hansa.runs.driver",
    "Runs": "hansa.report.results",
    "Task": "hansa.tasks",
    "between": "hansa.runs.proposals",
    "cite": "hansa.citations",
    "compare": "hansa.study",
    "export": "hansa.runs.trained",
    "faults": "hansa.rounds.faults",
    "load_model": "hansa.runs.trained",
    "load_run": "hansa.runs.metrics",
    "predict": "hansa.runs.trained",
    "resume": "hansa.study",
    "run": "hansa.study",
    "search": "hansa.study",
    "workers": "hansa.engine",
}
"""Where each public name is at home; the others are rooms. All are imported when they are first asked for."""

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
    "augment",
    "between",
    "cite",
    "compare",
    "compress",
    "data",
    "export",
    "faults",
    "gossip",
    "load_model",
    "load_run",
    "local",
    "losses",
    "measures",
    "models",
    "predict",
    "presets",
    "resume",
    "run",
    "sample",
    "search",
    "server",
    "store",
    "tasks",
    "workers",
]

if not TYPE_CHECKING:  # type checkers see the names themselves, and tell of those that do not exist
    __getattr__, __dir__ = later(__name__, _HOMES, __all__)
