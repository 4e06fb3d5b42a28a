"""What a cohort holds: its models as a matrix, what it has passed on, and what its round came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hansa.rounds.messages import Lost, Order, Trained
from hansa.types import Vector
from hansa.vectors import allocate


@dataclass(slots=True, eq=False)
class Mixed:
    """What a cohort's round came to."""

    trained: dict[int, Trained] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    peer: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    info: dict[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    alive: int = 0


def passed_on(order: Order, alive: int, size: int) -> Counter[int]:
    """The bytes that the reporters send when they pass the model on, which the server sent them, inside the cluster."""
    sent: Counter[int] = Counter()
    reporters, others = order.reporters, alive - len(order.reporters)
    for place, client in enumerate(reporters):
        share = others // len(reporters) + (place < others % len(reporters))
        if share:
            sent[client] += share * size
    return sent


def stacked(rows: Sequence[Vector]) -> torch.Tensor:
    """The rows as a matrix of their own, in memory that is used again."""
    first = rows[0]
    if first.device.type != "cpu":
        return torch.stack(list(rows))
    held = allocate.empty(len(rows) * first.numel(), first.dtype).view(len(rows), -1)
    for place, row in zip(held, rows, strict=True):
        place.copy_(row)
    return held
