"""Local solvers: y <- y - lr (g + prox_weight (y - x) + shift). They differ in this scalar and this vector alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.compress import direct
from hansa.core.bounds import Checked, bound
from hansa.core.errors import HansaError, check_non_negative, check_positive, invalid_argument
from hansa.core.protocols import check_component, with_defaults
from hansa.core.types import CONTROL, MODEL, Vector, Vectors
from hansa.local.work import BaseLocalWork
from hansa.server import derived_control


class Correction(NamedTuple):
    """The affine term prox_weight (y - x) + shift of a round.

    Args:
        prox_weight: The weight of the pull towards the received model x.
        shift: A vector added to each gradient; None is zero.

    >>> Correction(prox_weight=0.1).shift is None
    True
    """

    prox_weight: float = 0.0
    shift: Vector | None = None


AscentOffset: TypeAlias = Callable[[Sequence["torch.Tensor"]], list["torch.Tensor"]]
"""Maps the gradients at y to the offset e, per tensor; the step takes its gradient at y + e."""


class SolverResult(NamedTuple):
    """A client's reports and memory after its local steps.

    Args:
        reports: A vector for each of the solver's own channels.
        memory: The rows that the client keeps.

    >>> SolverResult({}, {}).memory
    {}
    """

    reports: Vectors
    memory: Vectors


@runtime_checkable
class Solver(Protocol):
    """The correction of a client's local steps: y <- y - lr (g + prox_weight (y - x) + shift)."""

    __slots__ = ()

    @abstractmethod
    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        """Return the correction, from the vectors received and the client's memory."""

    @abstractmethod
    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        """Return the client's reports on other channels and its memory after the change y - x."""


class BaseSolver(Checked, Solver):
    """The optional traits of local solvers, with their defaults.

    >>> sgd().memory, prox(0.1).prox_weight
    ((), 0.1)
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    channels: ClassVar[tuple[str, ...]] = ()
    """Channels, besides the model, that it receives and reports on."""
    receives: ClassVar[tuple[str, ...]] = ()
    """Channels that it only receives; the server makes them."""
    memory: ClassVar[tuple[str, ...]] = ()
    """Names of the rows that each client keeps."""
    uniform_only: ClassVar[bool] = False
    """Whether the method is defined for equally weighted updates only."""
    on_device: ClassVar[bool] = False
    """Whether ``finish`` computes with torch on the device of its arguments; otherwise they are on the CPU."""

    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        """Return no reports and no memory."""
        return SolverResult({}, {})

    def check_composition(self, owner: str, phase: Any, channels: Mapping[str, Any]) -> None:
        """Raise for a local phase or channels that would change the method.

        Args:
            owner: The name of the algorithm, for messages.
            phase: The `hansa.LocalPhase` that the solver is part of.
            channels: The channels by name.
        """
        return

    @property
    def prox_weight(self) -> float:
        """The weight of the proximal term, which the server needs too."""
        return 0.0

    @property
    def ascent_offset(self) -> AscentOffset | None:
        """For a solver that takes gradients at y + e: the function from the gradients at y to e."""
        return None


def require_solver(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a local solver."""
    check_component(owner, argument, value, Solver, "a local solver", example="sgd() is one, prox(0.1) another.")


def solver_receives(solver: Solver) -> tuple[str, ...]:
    """Return the channels that a solver only receives.

    >>> solver_receives(sgd())
    ()
    """
    return tuple(with_defaults(solver, BaseSolver).receives)


@dataclass(frozen=True, slots=True)
class sgd(BaseSolver):
    """Plain stochastic gradient descent.

    >>> sgd().channels
    ()
    """

    on_device: ClassVar[bool] = True

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        return Correction()


@dataclass(frozen=True, slots=True)
class prox(BaseSolver):
    """A proximal term mu (y - x) towards the received model (FedProx, Li 2020).

    Args:
        mu: The weight of the term; 0 is plain SGD.

    >>> prox(0.1).mu
    0.1
    """

    mu: float = field(metadata=bound(check_non_negative, "0.01 to 10 were tried in the papers; 0 is plain SGD."))
    cites: ClassVar[tuple[str, ...]] = ("li2020",)
    on_device: ClassVar[bool] = True

    @property
    def prox_weight(self) -> float:
        return float(self.mu)

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        return Correction(prox_weight=self.prox_weight)


@dataclass(frozen=True, slots=True)
class scaffold(BaseSolver):
    """shift = c - c_i; then c_i' = c_i - c + (x - y)/(tau lr), and c_i' - c_i is reported (SCAFFOLD option II,
    Karimireddy 2020). At rate 0 nothing is learnt about the gradient: c_i stays.

    The control channel has the weights of the model: c is the mean of all c_i with these weights.

    >>> scaffold().channels
    ('control',)
    """

    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020",)
    on_device: ClassVar[bool] = True
    channels: ClassVar[tuple[str, ...]] = (CONTROL,)
    memory: ClassVar[tuple[str, ...]] = (CONTROL,)

    def check_composition(self, owner: str, phase: Any, channels: Mapping[str, Any]) -> None:
        _check_plain_steps(owner, phase)
        control, model = channels[CONTROL], channels[MODEL]
        model_weights = getattr(model.aggregate, "weights", "uniform")
        for component in (control.aggregate, control.server):
            weights = getattr(component, "weights", model_weights)
            if weights != model_weights:
                expected = f"{model_weights!r} on the channel 'control', as on 'model'"
                raise invalid_argument(
                    owner, "weights", weights, expected, f"presets.scaffold(weights={model_weights!r}) sets both."
                )

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        control = memory.get(CONTROL)
        return Correction(shift=got[CONTROL] - control if control is not None else got[CONTROL])

    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        difference = change / (-steps * lr) - got[CONTROL] if lr else torch.zeros_like(change)
        control = memory.get(CONTROL)
        return SolverResult({CONTROL: difference}, {CONTROL: difference if control is None else control + difference})


@dataclass(frozen=True, slots=True)
class scaffold_derived(BaseSolver):
    """SCAFFOLD with the uplink of FedAvg: clients report y - x alone, and the server derives c from the mean of it with
    `hansa.server.derived_control`. The steps and the c_i are those of `scaffold`.

    >>> scaffold_derived().channels, scaffold_derived().receives
    ((), ('control',))
    """

    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020",)
    on_device: ClassVar[bool] = True
    receives: ClassVar[tuple[str, ...]] = (CONTROL,)
    memory: ClassVar[tuple[str, ...]] = (CONTROL,)

    def check_composition(self, owner: str, phase: Any, channels: Mapping[str, Any]) -> None:
        _check_plain_steps(owner, phase)
        model, control = channels[MODEL], channels[CONTROL].server
        if not isinstance(control, derived_control):
            raise invalid_argument(
                owner, "control", control, "derived_control(...)", "presets.scaffold(control='derived') sets it."
            )
        steps = with_defaults(phase.steps, BaseLocalWork).common
        expected = {"lr": phase.lr, "steps": steps, "weights": getattr(model.aggregate, "weights", "uniform")}
        for name, value in expected.items():
            if getattr(control, name) != value:
                raise invalid_argument(
                    "derived_control",
                    name,
                    getattr(control, name),
                    f"that of the clients, {value!r}" if value is not None else "one number of steps for all clients",
                    "The server derives c from y - x = -lr steps (mean gradient).",
                )
        if not isinstance(model.uplink, direct) or not getattr(model.aggregate, "is_mean", False):
            raise HansaError(
                f"{owner}(control='derived'): needs the exact mean of the updates, not {model.aggregate!r} of what "
                f"{model.uplink!r} sends. Use control='sent'.",
                component=owner,
                argument="control",
            )

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        return scaffold().correction(got, memory)

    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        return SolverResult({}, scaffold().finish(change, steps, lr, got, memory).memory)


def _check_plain_steps(owner: str, phase: Any) -> None:
    """Raise unless y - x is the sum of gradients, as SCAFFOLD requires."""
    if phase.optimizer is not None:
        remedy = "SCAFFOLD needs y - x to be a sum of gradients. Use plain local steps."
        raise invalid_argument(owner, "optimizer", phase.optimizer, "None", remedy)
    if phase.momentum:
        remedy = "SCAFFOLD needs y - x to be a sum of gradients, without momentum."
        raise invalid_argument(owner, "local_momentum", phase.momentum, "0", remedy)


@dataclass(frozen=True, slots=True)
class dyn(BaseSolver):
    """prox_weight = alpha, shift = -h_i; then h_i <- h_i - alpha (y - x) (FedDyn, Acar 2021), with `hansa.server.dyn`.

    Args:
        alpha: The weight of the proximal term.

    >>> dyn(0.1).alpha
    0.1
    """

    alpha: float = field(metadata=bound(check_positive, "The paper uses 0.1, 0.01 or 0.001."))
    cites: ClassVar[tuple[str, ...]] = ("acar2021",)
    on_device: ClassVar[bool] = True
    memory: ClassVar[tuple[str, ...]] = ("dual",)
    uniform_only: ClassVar[bool] = True

    @property
    def prox_weight(self) -> float:
        return float(self.alpha)

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        h = memory.get("dual")
        return Correction(prox_weight=self.prox_weight, shift=None if h is None else -h)

    def finish(self, change: Vector, steps: int, lr: float, got: Vectors, memory: Vectors) -> SolverResult:
        h = memory.get("dual")
        moved = change * -self.alpha
        return SolverResult({}, {"dual": moved if h is None else h + moved})


@dataclass(frozen=True, slots=True)
class sam(BaseSolver):
    """Take the gradient of each step at y + rho g/||g||, on the same batch (FedSAM, Qu 2022; Foret 2021).

    Args:
        rho: The length of the ascent step.

    >>> sam(0.1).rho
    0.1
    """

    rho: float = field(default=0.05, metadata=bound(check_positive, "0.05 is usual."))
    cites: ClassVar[tuple[str, ...]] = ("qu2022",)
    on_device: ClassVar[bool] = True

    def correction(self, got: Vectors, memory: Vectors) -> Correction:
        return Correction()

    def ascent_offset(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return rho g/||g||, or 0 if g is 0."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        length = norm if norm.device.type == "mps" else norm.double()  # stays on its device: reading it would wait
        factor = torch.where(length > 0, self.rho / length, 0.0).to(norm.dtype)
        return list(torch._foreach_mul(list(gradients), factor))
