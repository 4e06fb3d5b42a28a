"""The messages before the first round: a server enrolls a site, the site replies or refuses."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from hansa.federation.messages import PROTOCOL, Message, check_protocol
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs, Frame

ENROLLMENT, ENROLLMENT_REPLY, REFUSAL, BATCH = "charge", "hello", "refused", "several"


def numeric_platform() -> dict[str, str]:
    """Return the platform properties that bit-equal results depend on."""
    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}


@dataclass(frozen=True, slots=True, eq=False)
class EnrollmentRequest(Message):
    """Asks a site to join a run: the configuration, the site's clients, the population, and, once they are
    known, the run and the clusters. Without a run it only asks which data the site has."""

    kind = ENROLLMENT
    site: str
    version: str
    config: str
    clients: tuple[int, ...]
    population: int
    run: str = ""
    clusters: tuple[tuple[int, ...], ...] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=numeric_platform)

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            "site": self.site,
            "version": self.version,
            "config": self.config,
            "clients": self.clients,
            "population": self.population,
            "run": self.run,
            "clusters": self.clusters,
            "arithmetic": dict(self.arithmetic),
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
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
class EnrollmentReply(Message):
    """A site's reply to the enrollment with this digest: its clients' numbers of samples, their label counts if its
    policy permits, and the digest of the initial model that it builds."""

    kind = ENROLLMENT_REPLY
    enrollment: str
    version: str
    samples: Mapping[int, int]
    model: str
    labels: Mapping[int, tuple[int, ...]] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=numeric_platform)

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        labels = self.labels
        return {
            "charge": self.enrollment,
            "version": self.version,
            "samples": {str(client): count for client, count in self.samples.items()},
            "model": self.model,
            "labels": None if labels is None else {str(client): list(counts) for client, counts in labels.items()},
            "arithmetic": dict(self.arithmetic),
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
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
class Refusal(Message):
    """A refusal of a frame: a reason code for counting, and a message."""

    kind = REFUSAL
    reason: str
    detail: str

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {"reason": self.reason, "detail": self.detail[:_MAX_TEXT]}

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(str(head["reason"])[:_MAX_TEXT], str(head["detail"])[:_MAX_TEXT])


_MAX_TEXT = 2000


def pack_batch(parts: list[bytes]) -> bytes:
    """Pack several frames into one.

    >>> unpack_batch(pack_batch([b"a", b"bc"]), limit=100)
    [b'a', b'bc']
    """
    return wire_format.pack(BATCH, {"protocol": PROTOCOL}, parts)


def unpack_batch(data: wire_format.Blob, *, limit: int | None = None) -> list[bytes]:
    """Return the frames that `pack_batch` packed."""
    frame = wire_format.unpack(data, BATCH, limit=limit)
    check_protocol(frame.head)
    return [bytes(blob) for blob in frame.blobs]


def frame_digest(data: bytes) -> str:
    """Return the digest that identifies a frame."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
