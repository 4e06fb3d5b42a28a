"""Adaptive server transforms.

All keep m <- b1 m + (1-b1) Delta and step eta m / (a root of v); they differ in v and in the position of eps. Combine
with a learning rate: ``chain(adam(), scale(0.1))``. Other implementations of the same names differ: here, by default,
there is no bias correction, v starts at 0 and eps is outside the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hansa.core.bounds import bound
from hansa.core.errors import check_decay, check_non_negative
from hansa.core.types import RoundContext, State, Vector
from hansa.core.vectors import arithmetic, kernels
from hansa.server.base import BaseServerTransform

_MOMENTS = ("m", "v", "vhat")
START = "Reddi et al. start v at tau squared, with tau their eps."


@dataclass(frozen=True, slots=True)
class momentum(BaseServerTransform):
    """m <- beta m + Delta; step m (FedAvgM, Hsu 2019).

    Args:
        beta: Decay rate of the momentum.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = momentum().update(torch.ones(1), momentum().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (1.0, ['m'])
    """

    beta: float = field(default=0.9, metadata=bound(check_decay, "0.9 is usual."))
    cites: ClassVar[tuple[str, ...]] = ("hsu2019",)
    on_device: ClassVar[bool] = True

    def init(self, x: Vector) -> State:
        return {"m": x.new_zeros(x.shape)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        m = state["m"] * self.beta + delta
        return m, {"m": m}


@dataclass(frozen=True, slots=True)
class _Adaptive(BaseServerTransform):
    """The common update; subclasses define v and the denominator."""

    b1: float = field(default=0.9, metadata=bound(check_decay, "0.9 is usual."))
    b2: float = field(default=0.99, metadata=bound(check_decay, "0.99 is usual."))
    eps: float = field(default=1e-3, metadata=bound(check_non_negative))
    bias_correction: bool = False
    v0: float = field(default=0.0, metadata=bound(check_non_negative, START))
    keeps_maximum: ClassVar[bool] = False
    corrects_second: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def init(self, x: Vector) -> State:
        state: State = {"t": 0, "m": x.new_zeros(x.shape), "v": x.new_full(x.shape, self.v0)}
        if self.keeps_maximum:
            state["vhat"] = x.new_zeros(x.shape)
        return state

    def second(self, v: Vector, squared: Vector) -> Vector:
        return v.mul(self.b2).add_(squared, alpha=1 - self.b2)

    def denominator(self, v: Vector) -> Vector:
        raise NotImplementedError

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        t = state["t"] + 1
        if type(self) in _FUSED and arithmetic.native_fits(delta, *(state[name] for name in _MOMENTS if name in state)):
            fused_step = kernels.server_step(
                type(self).__name__, delta, state["m"], state["v"], state.get("vhat"), b1=self.b1, b2=self.b2,
                eps=self.eps, eps_inside=getattr(self, "eps_inside", False), bias_correction=self.bias_correction, t=t,
            )  # fmt: skip
            fused: State = {"t": t, "m": fused_step.m, "v": fused_step.v}
            return fused_step.step, fused if fused_step.vhat is None else {**fused, "vhat": fused_step.vhat}
        m = state["m"].mul(self.b1).add_(delta, alpha=1 - self.b1)
        v = self.second(state["v"], delta * delta)
        new_state: State = {"t": t, "m": m, "v": v}
        if self.keeps_maximum:
            v = new_state["vhat"] = self.maximum(state["vhat"], v)
        if self.bias_correction:
            m = m / (1 - self.b1**t)
            v = v / (1 - self.b2**t) if self.corrects_second else v
        root = self.denominator(v)
        if self.eps == 0:  # where m and v are both 0, the step is 0
            root = torch.where(root == 0, torch.ones_like(root), root)
        return m / root, new_state

    def maximum(self, vhat: Vector, v: Vector) -> Vector:
        return torch.maximum(vhat, v)


@dataclass(frozen=True, slots=True)
class _AdaptiveEps(_Adaptive):
    """sqrt(v) + eps, or sqrt(v + eps) with ``eps_inside``."""

    eps_inside: bool = False

    def denominator(self, v: Vector) -> Vector:
        return (v + self.eps).sqrt_() if self.eps_inside else v.sqrt().add_(self.eps)


@dataclass(frozen=True, slots=True)
class adagrad(_AdaptiveEps):
    """v <- v + Delta^2; step m/(sqrt v + eps), with b1 = 0 unless given (FedAdagrad, Reddi 2020).

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Term added to the denominator.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.
        eps_inside: Divide by sqrt(v + eps) instead of sqrt(v) + eps.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = adagrad().update(torch.ones(1), adagrad().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.999, ['m', 't', 'v'])
    """

    b1: float = field(default=0.0, metadata=bound(check_decay, "0.9 is usual."))
    corrects_second: ClassVar[bool] = False
    cites: ClassVar[tuple[str, ...]] = ("reddi2021",)

    def second(self, v: Vector, squared: Vector) -> Vector:
        return v + squared


@dataclass(frozen=True, slots=True)
class adam(_AdaptiveEps):
    """v <- b2 v + (1-b2) Delta^2; step m/(sqrt v + eps) (FedAdam, Reddi 2020).

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Term added to the denominator.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.
        eps_inside: Divide by sqrt(v + eps) instead of sqrt(v) + eps.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = adam().update(torch.ones(1), adam().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.9901, ['m', 't', 'v'])
    """

    cites: ClassVar[tuple[str, ...]] = ("reddi2021",)


@dataclass(frozen=True, slots=True)
class yogi(_AdaptiveEps):
    """v <- v - (1-b2) Delta^2 sign(v - Delta^2); step m/(sqrt v + eps) (FedYogi, Reddi 2020).

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Term added to the denominator.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.
        eps_inside: Divide by sqrt(v + eps) instead of sqrt(v) + eps.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = yogi().update(torch.ones(1), yogi().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.9901, ['m', 't', 'v'])
    """

    cites: ClassVar[tuple[str, ...]] = ("reddi2021",)

    def second(self, v: Vector, squared: Vector) -> Vector:
        return v.sub(squared * torch.sign(v - squared), alpha=1 - self.b2)


@dataclass(frozen=True, slots=True)
class amsgrad(_AdaptiveEps):
    """v as in adam; vhat <- max(vhat, v); step m/(sqrt vhat + eps) (FedAMSGrad, Tong 2020).

    The maximum uses the uncorrected v; ``bias_correction`` applies to m and vhat when the step is computed.

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Term added to the denominator.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.
        eps_inside: Divide by sqrt(v + eps) instead of sqrt(v) + eps.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = amsgrad().update(torch.ones(1), amsgrad().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.9901, ['m', 't', 'v', 'vhat'])
    """

    keeps_maximum: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("tong2020",)


@dataclass(frozen=True, slots=True)
class ams(_Adaptive):
    """v as in adam; vhat <- max(vhat, v, eps) entrywise; step m/sqrt vhat (FedAMS, Wang 2022, option 1).

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Lower bound of vhat.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.

    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = ams().update(torch.ones(1), ams().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (1.0, ['m', 't', 'v', 'vhat'])
    """

    keeps_maximum: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("wang2022",)

    def maximum(self, vhat: Vector, v: Vector) -> Vector:
        return torch.maximum(vhat, v).clamp_(min=self.eps)

    def denominator(self, v: Vector) -> Vector:
        return v.sqrt()


_FUSED = frozenset({adagrad, adam, yogi, amsgrad, ams})  # exact types: a subclass may differ
