"""Adaptive server transforms.

All keep m <- b1 m + (1-b1) Delta and step eta m / (a root of v); they differ in v and in the position of eps. Combine
with a learning rate: ``chain(adam(), scale(0.1))``. Other implementations of the same names differ: here, by default,
there is no bias correction, v starts at 0 and eps is outside the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hansa.core.errors import check_decay, check_non_negative
from hansa.core.types import RoundContext, State, Vector
from hansa.core.vectors import arithmetic, kernels
from hansa.server.base import BaseServerTransform

_MOMENTS = ("m", "v", "vhat")


@dataclass(frozen=True, slots=True)
class momentum(BaseServerTransform):
    """m <- beta m + Delta; step m (FedAvgM, Hsu 2019).

    Args:
        beta: Decay rate of the momentum.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = momentum().update(torch.ones(1), momentum().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (1.0, ['m'])
    """

    beta: float = 0.9
    cites: ClassVar[tuple[str, ...]] = ("hsu2019",)
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_decay("momentum", "beta", self.beta, "0.9 is usual.")

    def init(self, x: Vector) -> State:
        return {"m": x.new_zeros(x.shape)}

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        m = state["m"] * self.beta + delta
        return m, {"m": m}


@dataclass(frozen=True, slots=True)
class _Adaptive(BaseServerTransform):
    """The common update; subclasses define v and the denominator."""

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-3
    bias_correction: bool = False
    v0: float = 0.0
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_decay(name, "b1", self.b1, "0.9 is usual.")
        check_decay(name, "b2", self.b2, "0.99 is usual.")
        check_non_negative(name, "eps", self.eps)
        check_non_negative(name, "v0", self.v0, "Reddi et al. start v at tau squared, with tau their eps.")

    def init(self, x: Vector) -> State:
        state: State = {"t": 0, "m": x.new_zeros(x.shape), "v": x.new_full(x.shape, self.v0)}
        if self.keeps_maximum():
            state["vhat"] = x.new_zeros(x.shape)
        return state

    def keeps_maximum(self) -> bool:
        return False

    def second(self, v: Vector, squared: Vector) -> Vector:
        return v.mul(self.b2).add_(squared, alpha=1 - self.b2)

    def corrects_second(self) -> bool:
        return True

    def denominator(self, v: Vector) -> Vector:
        raise NotImplementedError

    def update(self, delta: Vector, state: State, ctx: RoundContext) -> tuple[Vector, State]:
        t = state["t"] + 1
        if type(self) in _FUSED and arithmetic.native_fits(delta, *(state[name] for name in _MOMENTS if name in state)):
            return self._fused(delta, state, t)
        m = state["m"].mul(self.b1).add_(delta, alpha=1 - self.b1)
        v = self.second(state["v"], delta * delta)
        after: State = {"t": t, "m": m, "v": v}
        if self.keeps_maximum():
            v = after["vhat"] = self.maximum(state["vhat"], v)
        if self.bias_correction:
            m = m / (1 - self.b1**t)
            v = v / (1 - self.b2**t) if self.corrects_second() else v
        root = self.denominator(v)
        if self.eps == 0:  # where m and v are both 0, the step is 0
            root = torch.where(root == 0, torch.ones_like(root), root)
        return m / root, after

    def _fused(self, delta: Vector, state: State, t: int) -> tuple[Vector, State]:
        """Apply the update in one pass of native code."""
        done = kernels.server_step(
            type(self).__name__,
            delta,
            state["m"],
            state["v"],
            state.get("vhat"),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            eps_inside=getattr(self, "eps_inside", False),
            bias_correction=self.bias_correction,
            t=t,
        )
        after: State = {"t": t, "m": done.m, "v": done.v}
        return done.step, after if done.vhat is None else {**after, "vhat": done.vhat}

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

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = adagrad().update(torch.ones(1), adagrad().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.999, ['m', 't', 'v'])
    """

    b1: float = 0.0
    cites: ClassVar[tuple[str, ...]] = ("reddi2021",)

    def second(self, v: Vector, squared: Vector) -> Vector:
        return v + squared

    def corrects_second(self) -> bool:
        return False


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

    >>> import torch
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

    >>> import torch
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

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = amsgrad().update(torch.ones(1), amsgrad().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (0.9901, ['m', 't', 'v', 'vhat'])
    """

    cites: ClassVar[tuple[str, ...]] = ("tong2020",)

    def keeps_maximum(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ams(_Adaptive):
    """v as in adam; vhat <- max(vhat, v, eps) entrywise; step m/sqrt vhat (FedAMS, Wang 2022, option 1).

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Lower bound of vhat.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext
    >>> ctx = RoundContext(1, Population((10, 10)), (0, 1))
    >>> step, state = ams().update(torch.ones(1), ams().init(torch.zeros(1)), ctx)
    >>> round(float(step), 4), sorted(state)
    (1.0, ['m', 't', 'v', 'vhat'])
    """

    cites: ClassVar[tuple[str, ...]] = ("wang2022",)

    def keeps_maximum(self) -> bool:
        return True

    def maximum(self, vhat: Vector, v: Vector) -> Vector:
        return torch.maximum(vhat, v).clamp_(min=self.eps)

    def denominator(self, v: Vector) -> Vector:
        return v.sqrt()


_FUSED = frozenset({adagrad, adam, yogi, amsgrad, ams})  # exact types: a subclass may differ
