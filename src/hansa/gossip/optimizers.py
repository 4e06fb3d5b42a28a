"""Local optimizers with state that gossips with the models: ``shared`` names those entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hansa.core.bounds import Checked, bound
from hansa.core.errors import check_decay, check_positive
from hansa.core.types import RoundContext, State, Vector


@dataclass(frozen=True, slots=True)
class consensus_amsgrad(Checked):
    """AMSGrad with a second moment agreed on by gossip (Decentralized AMSGrad, Chen et al. 2023, Alg. 2).

    m <- b1 m + (1-b1) g; v <- b2 v + (1-b2) g^2; vhat' = max(vhat, v); step -m/sqrt(max(u, eps));
    u <- u - vhat + vhat'. ``u`` is mixed whenever the models are, so sum_i u_i = sum_i vhat_i always; u and
    vhat start at eps. A step uses the u from before it, so the first one divides by sqrt(eps) for any gradient: eps is
    more than a guard against zero. `hansa.server.amsgrad` divides by a client's own vhat.

    Args:
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Initial value of u and vhat, and lower bound of u.

    >>> rule = consensus_amsgrad(b1=0.0, b2=0.0, eps=0.25)
    >>> step, state = rule.update(torch.tensor([-3.0]), rule.init(torch.zeros(1)), None)
    >>> float(step), float(state["u"])
    (-6.0, 9.0)
    """

    b1: float = field(default=0.9, metadata=bound(check_decay, "0.9 is usual."))
    b2: float = field(default=0.99, metadata=bound(check_decay, "0.99 is usual."))
    eps: float = field(default=1e-4, metadata=bound(check_positive, "The first step is divided by its root."))
    shared: ClassVar[tuple[str, ...]] = ("u",)
    cites: ClassVar[tuple[str, ...]] = ("chen2023",)

    def init(self, x: Vector) -> State:
        zeros, initial = x.new_zeros(x.shape), x.new_full(x.shape, self.eps)
        return {"m": zeros, "v": zeros, "vhat": initial, "u": initial}

    def update(self, delta: Vector, state: State, ctx: RoundContext | None) -> tuple[Vector, State]:
        m = state["m"].mul(self.b1).add_(delta, alpha=1 - self.b1)
        v = state["v"].mul(self.b2).add_(delta * delta, alpha=1 - self.b2)
        vhat = torch.maximum(state["vhat"], v)
        step = m / state["u"].clamp(min=self.eps).sqrt_()
        return step, {"m": m, "v": v, "vhat": vhat, "u": state["u"] - state["vhat"] + vhat}
