"""NIID-Bench's form of SCAFFOLD (Li et al. 2022), written from a description of its code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hansa import presets
from hansa.aggregate import mean
from hansa.algorithm import Algorithm, Channel
from hansa.core.errors import check_decay
from hansa.core.protocols import component
from hansa.core.types import CONTROL, Vector, Vectors
from hansa.local import BaseSolver, Correction, SolverResult, scaffold
from hansa.server import scale


@dataclass(frozen=True, slots=True)
class momentum_scaffold(BaseSolver):
    """SCAFFOLD's correction next to local momentum beta instead of in it: y <- y - lr (v + c - c_i), v <- beta v + g.

    Then c_i' = c_i - c + (x - y)/(tau lr), which is about 1/(1 - beta) times the mean gradient. Hansa's steps have the
    correction in the momentum, which multiplies it by 1/(1 - beta) after the first steps. So it is divided by that
    here: the sum over tau steps has tau - beta (1 - beta^tau)/(1 - beta) parts c - c_i in place of tau.

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


@component
def scaffold_of_niid_bench(
    *,
    local_lr: float = 0.01,
    epochs: float = 10,
    batch_size: int = 64,
    local_momentum: float = 0.9,
    weight_decay: float = 1e-5,
    participation: float = 1.0,
) -> Algorithm:
    """Return SCAFFOLD as NIID-Bench has it: local momentum, and c <- c + mean (c_i' - c_i) of the participants, without
    the factor M/N of Karimireddy et al. 2020.

    Args:
        local_lr: Learning rate of the clients.
        epochs: Passes over a client's data per round.
        batch_size: Rows per batch; the last batch of a pass is short.
        local_momentum: Momentum of the local steps, starting from zero in every round.
        weight_decay: L2 penalty of the local steps.
        participation: Fraction of the clients that participate in a round.

    >>> scaffold_of_niid_bench().channels["control"].server
    scale(lr=1.0)
    """
    plain = presets.fedavg(
        local_lr=local_lr, epochs=epochs, batch_size=batch_size, batches="short", local_momentum=local_momentum,
        weight_decay=weight_decay, participation=participation, weights="samples",
    )  # fmt: skip
    local = replace(plain.local, solver=momentum_scaffold(local_momentum))
    control = Channel(aggregate=mean("uniform"), server=scale(1.0))
    return Algorithm("scaffold", plain.sampler, local, {**plain.channels, CONTROL: control})
