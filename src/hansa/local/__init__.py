"""Client work: solvers as affine corrections, how much work, and the one gradient loop."""

from hansa.local.loop import Descent, Shell, descend, effective_steps
from hansa.local.solvers import Correction, Finished, Solver, dyn, prox, scaffold, sgd
from hansa.local.work import LocalWork, Work, epochs, fixed, hybrid_plus, random_steps
from hansa.schedule import cosine, inverse_sqrt, piecewise, step_decay, warmup

__all__ = [
    "Correction",
    "Descent",
    "Finished",
    "LocalWork",
    "Shell",
    "Solver",
    "Work",
    "cosine",
    "descend",
    "dyn",
    "effective_steps",
    "epochs",
    "fixed",
    "hybrid_plus",
    "inverse_sqrt",
    "piecewise",
    "prox",
    "random_steps",
    "scaffold",
    "sgd",
    "step_decay",
    "warmup",
]
