"""Hansa: federated optimization for PyTorch in which neighbours talk first."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server, training
    from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
    from hansa.core import schedule
    from hansa.core.errors import HansaError
    from hansa.core.keys import Key
    from hansa.core.protocols import cite, component
    from hansa.core.vectors.layout import Layout
    from hansa.engine import workers
    from hansa.rounds import measures
    from hansa.rounds.faults import faults
    from hansa.runs import store
    from hansa.runs.driver import Run
    from hansa.runs.export import export, load_model, predict
    from hansa.runs.metrics import load_run
    from hansa.runs.search import search_range
    from hansa.study import compare, resume, run, run_config, search
    from hansa.study.report.results import Comparison, Runs, latex_by_data
    from hansa.study.theory import theory
    from hansa.training import Task, augment, losses, metrics, models
    from hansa.training.metric_direction import higher, lower

__version__ = "0.3.0.dev0"

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
    "cite",
    "compare",
    "component",
    "compress",
    "data",
    "export",
    "faults",
    "gossip",
    "higher",
    "latex_by_data",
    "load_model",
    "load_run",
    "local",
    "losses",
    "lower",
    "measures",
    "metrics",
    "models",
    "pace",
    "predict",
    "presets",
    "resume",
    "run",
    "run_config",
    "sample",
    "schedule",
    "search",
    "search_range",
    "server",
    "store",
    "theory",
    "training",
    "workers",
]

if not TYPE_CHECKING:  # type checkers see the names themselves, and tell of those that do not exist
    __getattr__, __dir__ = lazy_exports(__name__)
