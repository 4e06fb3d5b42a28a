"""Client work: solvers as affine corrections, the amount of work, the local step and trainers."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports
from hansa.core.schedule import cosine, inverse_sqrt, piecewise, step_decay, warmup
from hansa.local.batching import Batches, PassOrder, as_batching, batching, in_order
from hansa.local.loops import BaseClientLoop, ClientLoop, LoopResult
from hansa.local.solvers import (
    AscentOffset,
    BaseSolver,
    Correction,
    Solver,
    SolverResult,
    dyn,
    prox,
    sam,
    scaffold,
    scaffold_derived,
    sgd,
    solver_receives,
)
from hansa.local.step import LocalStep, blocks, effective_steps
from hansa.local.work import (
    BaseLocalWork,
    Distribution,
    LocalWork,
    Work,
    between,
    deadline,
    drawn,
    epochs,
    fixed,
    half_normal,
    hybrid_plus,
    lognormal,
    one_of,
    random_steps,
    zipf,
)

if TYPE_CHECKING:
    from hansa.local.trainer import BaseTrainer, ClientJobs, LocalResults, Trainer, take_steps, train

__all__ = [
    "AscentOffset",
    "BaseClientLoop",
    "BaseLocalWork",
    "BaseSolver",
    "BaseTrainer",
    "Batches",
    "ClientJobs",
    "ClientLoop",
    "Correction",
    "Distribution",
    "LocalResults",
    "LocalStep",
    "LocalWork",
    "LoopResult",
    "PassOrder",
    "Solver",
    "SolverResult",
    "Trainer",
    "Work",
    "as_batching",
    "batching",
    "between",
    "blocks",
    "cosine",
    "deadline",
    "drawn",
    "dyn",
    "effective_steps",
    "epochs",
    "fixed",
    "half_normal",
    "hybrid_plus",
    "in_order",
    "inverse_sqrt",
    "lognormal",
    "one_of",
    "piecewise",
    "prox",
    "random_steps",
    "sam",
    "scaffold",
    "scaffold_derived",
    "sgd",
    "solver_receives",
    "step_decay",
    "take_steps",
    "train",
    "warmup",
    "zipf",
]

if not TYPE_CHECKING:  # trainers import torch, which is slow: commands that only read files skip it
    __getattr__, __dir__ = lazy_exports(__name__)
