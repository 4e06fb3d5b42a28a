"""Learning rates of the server that depend on the staleness of the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from hansa.core.errors import check_integer, invalid_argument
from hansa.core.schedule import Rate, check_rate, rate_at
from hansa.core.types import RoundContext, State, Vector
from hansa.core.vectors import allocator
from hansa.server.base import BaseServerTransform


@dataclass(frozen=True, slots=True)
class delay_adaptive(BaseServerTransform):
    """step = eta_t delta with eta_t = min(eta, 1/tau_max) if tau_max > tau_c, else eta (FADAS, Wang 2024, eq. 4).

    tau_max is the largest staleness of the step's updates. The authors' code (github.com/yujiaw98/FADAS,
    g_delay_adaptive.py) has eta / tau_max instead of the minimum: ``rule="authors"``.

    Args:
        lr: Learning rate eta, a number or a schedule.
        threshold: Staleness tau_c up to which the rate is eta.
        rule: "paper" or "authors".

    >>> from hansa.core.types import Population
    >>> ctx = RoundContext(9, Population((10, 10)), (0, 1), staleness=(1, 4))
    >>> delay_adaptive(0.5, threshold=1).update(torch.ones(1), {}, ctx)[0]
    tensor([0.2500])
    >>> delay_adaptive(0.5, threshold=1, rule="authors").update(torch.ones(1), {}, ctx)[0]
    tensor([0.1250])
    """

    lr: Rate = 1.0
    threshold: int = 1
    rule: Literal["paper", "authors"] = "paper"
    cites: ClassVar[tuple[str, ...]] = ("wang2024fadas",)
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rate("delay_adaptive", "lr", self.lr)
        check_integer("delay_adaptive", "threshold", self.threshold, "FADAS uses 1 and more.", minimum=0)
        if self.rule not in ("paper", "authors"):
            raise invalid_argument("delay_adaptive", "rule", self.rule, "'paper' or 'authors'")

    def init(self, x: Vector) -> State:
        return {}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        lr, oldest = rate_at(self.lr, ctx.round), ctx.max_staleness
        if oldest > self.threshold:
            lr = min(lr, 1.0 / oldest) if self.rule == "paper" else lr / oldest
        return (delta if lr == 1.0 else torch.mul(delta, lr, out=allocator.empty_like(delta))), state
