"""The options of a run, declared once for the functions of `hansa.study`, `hansa.Run` and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from hansa.core.devices import Device, resolve_devices
from hansa.core.errors import check_integer, check_positive, invalid_argument
from hansa.pace import Profile
from hansa.pace.profiles import require_profile
from hansa.rounds.faults import faults
from hansa.rounds.measures import Measure
from hansa.training import TaskLike, personalise

if TYPE_CHECKING:
    from hansa.runs.driver import Run

Record: TypeAlias = dict[str, Any]
"""The numbers of one round, by the names of `hansa.runs.columns`."""
Callback: TypeAlias = Callable[["Run", Record], bool | None]
"""Called after every round with the run and its newest record; a true result stops the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run as one value; `hansa.run` takes and documents each as a keyword argument.

    >>> RunOptions(quorum=2).changed()
    {'quorum': 2}
    """

    dtype: torch.dtype | None = None
    device: Device | None = None
    deterministic: bool | None = None
    server_device: str | torch.device | None = None
    workers: int | None = None
    quorum: int = 1
    keep_params: bool = False
    evaluate_every: int = 1
    callbacks: Sequence[Callback] = ()
    faults: faults | None = None
    max_norm: float = 1e12
    measures: Sequence[Measure] = ()
    per_client: bool | int | None = None
    personalise: personalise | Mapping[str, Any] | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        check_integer("run", "quorum", self.quorum)
        check_positive("run", "max_norm", self.max_norm, "Updates with a larger norm are refused.")
        check_integer("run", "evaluate_every", self.evaluate_every, "0 evaluates after the last round only.", minimum=0)
        if self.dtype not in (None, torch.float32, torch.float64):
            raise invalid_argument("run", "dtype", self.dtype, "torch.float32 or torch.float64")
        if self.deterministic not in (None, False, True):
            raise invalid_argument("run", "deterministic", self.deterministic, "True or False")
        object.__setattr__(self, "measures", tuple(self.measures))
        if self.profile is not None:
            require_profile("run", "profile", self.profile)
        object.__setattr__(self, "personalise", _as_personalise(self.personalise))

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def resolve_devices(self, task: TaskLike) -> tuple[torch.device, ...]:
        """Return the training devices: those of the options, else of the task, else the CPU."""
        return resolve_devices(self.device if self.device is not None else getattr(task, "device", None) or "cpu")


class RunOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments, for type checkers; `RunOptions` documents them."""

    dtype: torch.dtype | None
    device: Device | None
    deterministic: bool | None
    server_device: str | torch.device | None
    workers: int | None
    quorum: int
    keep_params: bool
    evaluate_every: int
    callbacks: Sequence[Callback]
    faults: faults | None
    max_norm: float
    measures: Sequence[Measure]
    per_client: bool | int | None
    personalise: personalise | Mapping[str, Any] | None
    profile: Profile | None


def device_names(device: Device) -> str | list[str]:
    """Return devices as a configuration names them.

    >>> device_names(["cpu", "cpu"]), device_names("cpu")
    (['cpu', 'cpu'], 'cpu')
    """
    names = [str(each) for each in resolve_devices(device)]
    return names if len(names) > 1 else names[0]


def _as_personalise(value: object) -> personalise | None:
    if value is None or isinstance(value, personalise):
        return value
    if not isinstance(value, Mapping):
        raise invalid_argument(
            "run", "personalise", value, "{'steps': 5, 'lr': 0.01}, or hansa.training.personalise(...)"
        )
    try:
        return personalise(**value)
    except TypeError as error:
        raise invalid_argument("run", "personalise", dict(value), "steps, lr and batch_size") from error
