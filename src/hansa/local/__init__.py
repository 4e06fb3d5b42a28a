"""Client work: solvers as affine corrections, how much work, and the one gradient loop."""

from hansa.local.descent import Descent, Shell, descend, effective_steps
from hansa.local.distributions import Distribution, between, lognormal, one_of
from hansa.local.solvers import Correction, Finished, Solver, dyn, prox, scaffold, sgd
from hansa.local.work import LocalWork, Work, deadline, drawn, epochs, fixed, hybrid_plus, random_steps
from hansa.schedule import cosine, inverse_sqrt, piecewise, step_decay, warmup

__all__ = [
    "Correction",
    "Descent",
    "Distribution",
    "Finished",
    "LocalWork",
    "Shell",
    "Solver",
    "Work",
    "between",
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
    "scaffold",
    "sgd",
    "step_decay",
    "warmup",
]
