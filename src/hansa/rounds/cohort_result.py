"""What a cohort holds: its models as a matrix, what it has passed on, and what its round came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hansa.core.types import Vector
from hansa.core.vectors import allocator
from hansa.gossip.rows import Mixer
from hansa.local.descent import LocalStep
from hansa.rounds.messages import DroppedClient, LocalUpdate, WorkOrder


@dataclass(slots=True, eq=False)
class CohortResult:
    """What a cohort's round came to."""

    trained: dict[int, LocalUpdate] = field(default_factory=dict)
    lost: list[DroppedClient] = field(default_factory=list)
    peer: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    info: dict[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    alive: int = 0


def passed_on(order: WorkOrder, alive: int, size: int) -> Counter[int]:
    """The bytes that the reporters send when they pass the model on, which the server sent them, inside the cluster."""
    sent: Counter[int] = Counter()
    reporters, others = order.reporters, alive - len(order.reporters)
    for place, client in enumerate(reporters):
        share = others // len(reporters) + (place < others % len(reporters))
        if share:
            sent[client] += share * size
    return sent


def blank(n: int, like: Vector) -> torch.Tensor:
    """A matrix of n such rows with anything in it, in memory that is used again."""
    if like.device.type != "cpu":
        return like.new_empty(n, like.numel())
    return allocator.empty(n * like.numel(), like.dtype).view(n, -1)


def stacked(rows: Sequence[Vector]) -> torch.Tensor:
    """The rows as a matrix of their own, in memory that is used again."""
    first = rows[0]
    if first.device.type != "cpu":
        return torch.stack(list(rows))
    held = blank(len(rows), first)
    for place, row in zip(held, rows, strict=True):
        place.copy_(row)
    return held


def share(descents: Sequence[LocalStep], name: str, mixer: Mixer, averaged: bool) -> None:
    """A row of the local optimizers of the survivors gossips with the models, or is averaged."""
    for descent in descents:
        descent.begin()
    rows = torch.stack([descent.state[name] for descent in descents])
    if averaged:
        mixed = rows.mean(dim=0).expand_as(rows)
    else:
        mixed = mixer.dense(rows.dtype).to(rows.device) @ rows
    for descent, row in zip(descents, mixed, strict=True):
        descent.state = {**descent.state, name: row}
