"""What the papers prove about an algorithm, with its own numbers: conditions, limits on rates, orders and bounds."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.study.theory.adaptive_bounds import AdaptiveBound, adaptive_orders
    from hansa.study.theory.aware_bounds import AwareBound
    from hansa.study.theory.constants import ProblemConstants
    from hansa.study.theory.estimation import estimate_constants
    from hansa.study.theory.gossip_bounds import ClusteredBound, ResampledBound
    from hansa.study.theory.report import TheoremResult, TheoryReport, theory
    from hansa.study.theory.setting import TheorySetting

__all__ = [
    "AdaptiveBound",
    "AwareBound",
    "ClusteredBound",
    "ProblemConstants",
    "ResampledBound",
    "TheoremResult",
    "TheoryReport",
    "TheorySetting",
    "adaptive_orders",
    "estimate_constants",
    "theory",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
