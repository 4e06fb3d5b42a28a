"""Robust mixing: rules for messages of neighbours of which some may be false, and the attacks to test them with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import torch

from hansa.core.bounds import Checked, bound, one_of
from hansa.core.devices import copy_to_device, on_host
from hansa.core.errors import check_integer, check_positive
from hansa.core.keys import Key
from hansa.core.protocols import check_component
from hansa.core.types import Vector
from hansa.core.vectors.arithmetic import norm, norm_on_device, sort_vectors

INFINITE = float("inf")
AttackKind: TypeAlias = Literal["flip", "noise"]


@runtime_checkable
class MixingRule(Protocol):
    """How a client combines its model with what its neighbours sent; without a rule it is sum_j W_ij x_j."""

    __slots__ = ()

    @abstractmethod
    def combine(self, own: Vector, received: Sequence[Vector], weights: Sequence[float]) -> Vector:
        """Return a client's next model from its own, those received, and the entries W_ij of their senders.

        The vectors must not be modified. ``received`` is in the order of the clients.
        """


require_mixing_rule = partial(
    check_component, protocol=MixingRule, noun="a mixing rule", example="clipped(1.0) is one."
)


@dataclass(frozen=True, slots=True)
class clipped(Checked):
    """x_i <- x_i + sum_j W_ij clip(x_j - x_i), where clip(z) = z min(1, radius/||z||) (ClippedGossip, He 2022).

    A neighbour moves a client by at most W_ij times the radius, whatever it sends. With a radius above all differences
    it is plain gossip.

    Args:
        radius: Largest difference to a neighbour that counts in full, tau.

    >>> clipped(1.0).combine(torch.zeros(2), [torch.tensor([3.0, 4.0])], [0.5])
    tensor([0.3000, 0.4000])
    """

    radius: float = field(metadata=bound(check_positive))
    cites: ClassVar[tuple[str, ...]] = ("he2022",)

    def combine(self, own: Vector, received: Sequence[Vector], weights: Sequence[float]) -> Vector:
        mixed = own.clone()
        for sent, weight in zip(received, weights, strict=True):
            difference = sent - own
            if not on_host(own):  # the same without reading the norm, for which the host would wait
                size = norm_on_device(difference)
                moved = difference * (weight * torch.clamp(self.radius / size, max=1.0))
                mixed.add_(torch.where(size < INFINITE, moved, 0.0))
                continue
            length = norm(difference)
            # a difference that is not finite carries nothing: its sender is ignored
            if length < INFINITE:
                mixed.add_(difference, alpha=weight * min(1.0, self.radius / length) if length else 0.0)
        return mixed


@dataclass(frozen=True, slots=True)
class trimmed(Checked):
    """In each coordinate the neighbours' ``count`` largest and smallest values are dropped, and the rest averaged with
    the client's own value, all with equal weights (BRIDGE-T, Fang 2022).

    Clients need more than twice as many neighbours as are trimmed; where dropouts leave fewer, fewer are trimmed.

    Args:
        count: How many malicious neighbours a client is protected from, b.

    >>> trimmed(1).combine(torch.zeros(1), [torch.tensor([v]) for v in (1.0, 3.0, 99.0)], [0.25] * 3)
    tensor([1.5000])
    """

    count: int = field(metadata=bound(check_integer))
    cites: ClassVar[tuple[str, ...]] = ("fang2022",)

    def combine(self, own: Vector, received: Sequence[Vector], weights: Sequence[float]) -> Vector:
        if not received:
            return own.clone()
        trim = min(self.count, (len(received) - 1) // 2)
        values = [sent.nan_to_num(nan=INFINITE, posinf=INFINITE, neginf=-INFINITE) for sent in received]
        mixed, remaining = own.clone(), sort_vectors(values)[trim : len(received) - trim]
        for row in remaining:  # in order, so that the sum does not depend on the number of threads
            mixed.add_(row)
        return mixed.div_(len(remaining) + 1)


@dataclass(frozen=True, slots=True)
class Attack(Checked):
    """Malicious clients of a cohort and what they send to their neighbours instead of their models.

    - flip: start - scale (x_i - start), the change since the start of the round reversed;
    - noise: x_i + scale ||x_i - start|| u with u uniform on the unit sphere, the same to all neighbours.

    Args:
        clients: The malicious clients.
        kind: "flip" or "noise".
        scale: Size of the false change, in units of the true one.

    >>> Attack((3,), "flip", 2.0).message(torch.tensor([2.0]), torch.tensor([1.0]), Key(0))
    tensor([-1.])
    """

    clients: tuple[int, ...]
    kind: AttackKind = field(default="flip", metadata=bound(one_of, *get_args(AttackKind)))
    scale: float = field(default=1.0, metadata=bound(check_positive))

    def message(self, row: Vector, start: Vector, key: Key) -> Vector:
        """Return what a malicious client sends; ``key`` is the address of the exchange and the client."""
        if self.kind == "flip":
            return start - self.scale * (row - start)
        direction = torch.from_numpy(key.numpy().standard_normal(row.numel())).to(row.dtype)
        if on_host(row):
            return row + direction * (self.scale * norm(row - start) / norm(direction))
        size = norm_on_device(row - start) * (self.scale / norm(direction))
        return row + copy_to_device(direction, row.device) * size


def exchange_messages(
    own: torch.Tensor, sent: torch.Tensor, weights: torch.Tensor, rule: MixingRule | None
) -> torch.Tensor:
    """Return the next model of every client, [n, d], from their own models and the messages that each sends to all.

    Args:
        own: The clients' models, [n, d].
        sent: What each client sends, [n, d].
        weights: W, [n, n].
        rule: A mixing rule, or None for W_ii x_i + sum_j W_ij times the message of j.
    """
    mixed = torch.empty_like(own)
    for i, row in enumerate(weights.tolist()):
        neighbours = [j for j, weight in enumerate(row) if weight and j != i]
        if rule is None:
            total = own[i] * row[i]
            for j in neighbours:
                total.add_(sent[j], alpha=row[j])
            mixed[i] = total
        else:
            mixed[i] = rule.combine(own[i], [sent[j] for j in neighbours], [row[j] for j in neighbours])
    return mixed
