"""Client work: solvers as affine corrections, how much work, and the one gradient loop."""

from hansa.local.blocks import blocks
from hansa.local.descent import ClientJob, LocalResult, LocalStep, Trainer, descend, effective_steps, train
from hansa.local.distributions import Distribution, between, lognormal, one_of
from hansa.local.solvers import (
    AscentOffset,
    Correction,
    Solver,
    SolverResult,
    dyn,
    prox,
    sam,
    scaffold,
    sgd,
    solver_receives,
)
from hansa.local.work import LocalWork, Work, deadline, drawn, epochs, fixed, hybrid_plus, random_steps
from hansa.schedule import cosine, inverse_sqrt, piecewise, step_decay, warmup

__all__ = [
    "AscentOffset",
    "ClientJob",
    "Correction",
    "Distribution",
    "LocalResult",
    "LocalStep",
    "LocalWork",
    "Solver",
    "SolverResult",
    "Trainer",
    "Work",
    "between",
    "blocks",
    "cosine",
    "deadline",
    "descend",
    "drawn",
    "dyn",
    "effective_steps",
    "epochs",
    "fixed",
    "hybrid_plus",
    "inverse_sqrt",
    "lognormal",
    "one_of",
    "piecewise",
    "prox",
    "random_steps",
    "sam",
    "scaffold",
    "sgd",
    "solver_receives",
    "step_decay",
    "train",
    "warmup",
]
