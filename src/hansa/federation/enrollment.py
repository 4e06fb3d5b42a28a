"""What a server and a site say to each other before the rounds: the charge, the hello, a refusal with its reason."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hansa.federation.messages import PROTOCOL, checked
from hansa.rounds import wire_format

CHARGE, HELLO, REFUSED, SEVERAL = "charge", "hello", "refused", "several"


def arithmetic() -> dict[str, str]:
    """What equal bits on two machines depend on beside the code."""
    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """What a site is asked to take part in: the configuration, its clients among how many, and, once the server knows
    them, the run and the clusters. Without a run it only enquires who is there and what they hold."""

    site: str
    version: str
    config: str
    clients: tuple[int, ...]
    population: int
    run: str = ""
    clusters: tuple[tuple[int, ...], ...] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=arithmetic)

    def to_bytes(self) -> bytes:
        head = {
            "protocol": PROTOCOL,
            "site": self.site,
            "version": self.version,
            "config": self.config,
            "clients": self.clients,
            "population": self.population,
            "run": self.run,
            "clusters": self.clusters,
            "arithmetic": dict(self.arithmetic),
        }
        return wire_format.pack(CHARGE, head)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Charge:
        head = checked(wire_format.unpack(data, CHARGE, limit=limit).head)
        with wire_format.reading(CHARGE):
            groups = head["clusters"]
            return cls(
                str(head["site"]),
                str(head["version"]),
                str(head["config"]),
                tuple(int(client) for client in head["clients"]),
                int(head["population"]),
                str(head["run"]),
                None if groups is None else tuple(tuple(int(client) for client in group) for group in groups),
                {str(name): str(value) for name, value in head["arithmetic"].items()},
            )


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """A site's answer to a charge, named by its digest: samples of its clients, their label counts if its policy lets
    them leave, a digest of the model that the configuration makes there."""

    charge: str
    version: str
    samples: Mapping[int, int]
    model: str
    labels: Mapping[int, tuple[int, ...]] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=arithmetic)

    def to_bytes(self) -> bytes:
        labels = self.labels
        head = {
            "protocol": PROTOCOL,
            "charge": self.charge,
            "version": self.version,
            "samples": {str(client): count for client, count in self.samples.items()},
            "model": self.model,
            "labels": None if labels is None else {str(client): list(counts) for client, counts in labels.items()},
            "arithmetic": dict(self.arithmetic),
        }
        return wire_format.pack(HELLO, head)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Hello:
        head = checked(wire_format.unpack(data, HELLO, limit=limit).head)
        with wire_format.reading(HELLO):
            labels = head["labels"]
            return cls(
                str(head["charge"]),
                str(head["version"]),
                {int(client): int(count) for client, count in head["samples"].items()},
                str(head["model"]),
                None
                if labels is None
                else {int(client): tuple(int(count) for count in counts) for client, counts in labels.items()},
                {str(name): str(value) for name, value in head["arithmetic"].items()},
            )


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame that was not answered, and why: a word to count by, and a sentence for people."""

    reason: str
    detail: str

    def to_bytes(self) -> bytes:
        return wire_format.pack(
            REFUSED, {"protocol": PROTOCOL, "reason": self.reason, "detail": self.detail[:_LONGEST]}
        )

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Refused:
        head = checked(wire_format.unpack(data, REFUSED, limit=limit).head)
        with wire_format.reading(REFUSED):
            return cls(str(head["reason"])[:_LONGEST], str(head["detail"])[:_LONGEST])


_LONGEST = 2000


def several(parts: list[bytes]) -> bytes:
    """Frames that travel as one.

    >>> apart(several([b"a", b"bc"]), limit=100)
    [b'a', b'bc']
    """
    return wire_format.pack(SEVERAL, {"protocol": PROTOCOL}, parts)


def apart(data: wire_format.Blob, *, limit: int | None = None) -> list[bytes]:
    """The frames in what `several` made."""
    frame = wire_format.unpack(data, SEVERAL, limit=limit)
    checked(frame.head)
    return [bytes(blob) for blob in frame.blobs]


def digest(data: bytes) -> str:
    """The name of a charge."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
