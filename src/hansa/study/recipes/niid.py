"""NIID-Bench's form of SCAFFOLD (Li et al. 2022), written from a description of its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.errors import check_decay
from hansa.core.types import CONTROL, Vector, Vectors
from hansa.local import BaseSolver, Correction, SolverResult, scaffold


@dataclass(frozen=True, slots=True)
class momentum_scaffold(BaseSolver):
    """SCAFFOLD's correction next to local momentum beta instead of in it: y <- y - lr (v + c - c_i), v <- beta v + g.

    Then c_i' = c_i - c + (x - y)/(tau lr), which is about 1/(1 - beta) times the mean gradient. Hansa adds the
    correction to the momentum, which multiplies it by 1/(1 - beta) after the first steps, so it is scaled by 1 - beta
    here: the sum over tau steps has tau - beta (1 - beta^tau)/(1 - beta) terms c - c_i in place of tau.

    Args:
        beta: The local momentum.

    >>> momentum_scaffold(0.9).channels
    ('control',)
    """

    beta: float
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020", "li2022")
    channels: ClassVar[tuple[str, ...]] = (CONTROL,)
    memory: ClassVar[tuple[str, ...]] = (CONTROL,)

    def __post_init__(self) -> None:
        check_decay("momentum_scaffold", "beta", self.beta, "0.9 is usual.")

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        plain = scaffold().correction(got, memory).shift
        return Correction(shift=None if plain is None else (1 - self.beta) * plain)

    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        return scaffold().finish(change, steps, lr, got, memory)
