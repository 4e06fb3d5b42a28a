"""What an augmentation is, and a list of them applied in turn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError, short_repr
from hansa.core.keys import Key
from hansa.core.protocols import declared


class Augmentation(Protocol):
    """A function of (batch, generator): the inputs of a batch in, those that the model is to see out.

    All that it draws comes from ``generator``, torch's on the CPU, which is at an address of its own for every round,
    client, step and place in the list: so a result depends neither on who computes it nor on what was drawn before.
    """

    @abstractmethod
    def __call__(self, batch: Any, generator: torch.Generator) -> Any: ...

    @property
    def on_test(self) -> bool:
        """Whether test rows go through it too: true of what draws nothing and only rescales."""
        return False


Augment: TypeAlias = "Augmentation | Callable[[Any, torch.Generator], Any]"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Augmentations in turn. ``on_test`` keeps those that test rows go through."""

    parts: tuple[Augment, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def own(self) -> bool:
        """Whether code of the user's takes part, which may draw from elsewhere."""
        return any(type(part).__module__ != "hansa.training.augment.images" for part in self.parts)

    def on_test(self) -> Pipeline:
        """What test rows go through."""
        return Pipeline(tuple(part for part in self.parts if declared(part, Augmentation, "on_test")))

    def __call__(self, batch: Any, key: Key, generator: torch.Generator) -> Any:
        """The batch after all of them, each drawing at its own address below ``key``."""
        for place, part in enumerate(self.parts):
            seed = int.from_bytes(key.child("augment", place).digest(8), "little") >> 1
            batch = part(batch, generator.manual_seed(seed))
            if batch is None:
                raise HansaError(f"augment: {_name(part)} gave None: expected the batch. Does it return it?")
        return batch


def pipeline(parts: Sequence[Augment] | Augment) -> Pipeline:
    """The list as a value, checked: every entry can be called with (batch, generator).

    >>> from hansa.training.augment import crop, flip
    >>> pipeline([crop(padding=4), flip()])
    Pipeline(parts=(crop(padding=4, fill=0.0), flip(p=0.5)))
    """
    listed = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)
    for part in listed:
        if isinstance(part, type) or not callable(part):
            call = f"{part.__name__}()" if isinstance(part, type) else "augment=[hansa.augment.flip()]"
            raise HansaError(f"augment: {short_repr(part)}: expected functions of (batch, generator), such as {call}.")
    return Pipeline(listed)


def _name(part: Any) -> str:
    while isinstance(part, partial):
        part = part.func
    return str(getattr(part, "__name__", type(part).__name__))
