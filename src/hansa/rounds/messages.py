"""What travels between the server and where clients are: orders out, reports back. All of it is data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hansa.compress import Packet
from hansa.keys import Key
from hansa.local.work import Work
from hansa.types import Vector, Vectors


@dataclass(frozen=True, slots=True)
class Lost:
    """A client that a round goes on without, and why. The reason is a word to count by, the detail is for people."""

    client: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A cohort's work of one round: who trains, who reports, what they received, what they remember. Those of the
    clients who are ``absent`` cannot be reached: the others go on without them."""

    run: str
    round: int
    cohort: int
    clients: tuple[int, ...]
    reporters: tuple[int, ...]
    work: Work
    base: bytes
    got: Vectors
    key: Key
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What training made of one reporting client: how far its model and buffers moved, and its loss on the way
    (None where nobody computed)."""

    change: Vector
    buffers: Vector | None
    loss: float | None
    memory: Vectors = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """What one client sends: a packet a channel, and the few facts the server checks it by."""

    run: str
    round: int
    base: bytes
    client: int
    packets: Mapping[str, Packet]
    loss: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A cohort's answer. The memory in it counts only once the round has closed with the client's upload admitted.

    ``peer`` has the bytes each client sent to neighbours, ``exchanges`` how often neighbours exchanged.
    """

    cohort: int
    uploads: tuple[Upload, ...] = ()
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    peer: Mapping[int, int] = field(default_factory=dict)
    exchanges: int = 0
    info: Mapping[str, float] = field(default_factory=dict)


def scoped(memory: Mapping[str, torch.Tensor], scope: str) -> Vectors:
    """The rows of a client's memory that belong to one part.

    >>> sorted(scoped({"solver/control": torch.zeros(1), "uplink/model/residual": torch.zeros(1)}, "solver"))
    ['control']
    """
    prefix = scope + "/"
    return {name[len(prefix) :]: row for name, row in memory.items() if name.startswith(prefix)}
