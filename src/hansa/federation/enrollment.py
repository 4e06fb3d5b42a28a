"""The messages before the first round: a server enrolls a site, the site replies or refuses."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from hansa.data.schema import MISFIT_CODES
from hansa.federation.messages import PROTOCOL, Message, check_protocol
from hansa.federation.reasons import REASONS, known
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs, Frame

ENROLLMENT, ENROLLMENT_REPLY, REFUSAL, BATCH, OVER = "charge", "hello", "refused", "several", "over"


def numeric_platform() -> dict[str, str]:
    """Return the platform properties that bit-equal results depend on."""
    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}


@dataclass(frozen=True, slots=True, eq=False)
class EnrollmentRequest(Message):
    """Asks a site to join a run: the configuration, the site's clients, the population, and, once they are
    known, the run and the clusters. Without a run it only asks which data the site has. ``schema`` is the schema of its
    tables, as JSON."""

    kind = ENROLLMENT
    site: str
    version: str
    config: str
    clients: tuple[int, ...]
    population: int
    run: str = ""
    clusters: tuple[tuple[int, ...], ...] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=numeric_platform)
    schema: str = ""

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            **({"schema": self.schema} if self.schema else {}),
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
            str(head.get("schema", "")),
        )


@dataclass(frozen=True, slots=True, eq=False)
class EnrollmentReply(Message):
    """A site's reply to the enrollment with this digest: its clients' numbers of samples, their label counts if its
    policy permits, the digest of the initial model that it builds, and the SHA-256 of the schema of its tables."""

    kind = ENROLLMENT_REPLY
    enrollment: str
    version: str
    samples: Mapping[int, int]
    model: str
    labels: Mapping[int, tuple[int, ...]] | None = None
    arithmetic: Mapping[str, str] = field(default_factory=numeric_platform)
    schema: str = ""

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        labels = self.labels
        return {
            **({"schema": self.schema} if self.schema else {}),
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
            _text(head["charge"]),
            _text(head["version"]),
            {
                wire_format.whole_key(client): wire_format.integer(count, most=MAX_SAMPLES)
                for client, count in head["samples"].items()
            },
            _text(head["model"]),
            None
            if labels is None
            else {wire_format.whole_key(client): wire_format.integers(counts) for client, counts in labels.items()},
            {_text(name): _text(value) for name, value in list(head["arithmetic"].items())[:_MAX_FACTS]},
            _text(head.get("schema", "")),
        )


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """A refusal of a frame: a code of `REASONS`; for a table that does not fit also a code and a column of the schema.

    >>> Refusal("schema", "not-a-number", "age").detail
    "column 'age': not-a-number"
    >>> Refusal("steps").detail
    "the run has more local steps than the site's policy permits"
    """

    kind = REFUSAL
    reason: str
    misfit: str = ""
    column: str = ""

    @property
    def detail(self) -> str:
        """The text of the codes."""
        column = f"column {self.column!r}: " if self.column else ""
        return f"{column}{self.misfit}" if self.misfit else REASONS[self.reason]

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {"reason": self.reason, **({"misfit": self.misfit, "column": self.column} if self.misfit else {})}

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        code = str(head.get("misfit", ""))
        column = wire_format.sentence(str(head.get("column", "")))[:_MAX_NAME]
        misfit = code if code in MISFIT_CODES else ""
        return cls(known(str(head["reason"])), misfit, column if misfit else "")


def _text(value: Any) -> str:
    """Return a short text of a site, without characters that a terminal would interpret."""
    return wire_format.sentence(str(value))[:_MAX_NAME]


_MAX_NAME, _MAX_FACTS = 200, 20
MAX_SAMPLES = 1 << 40
"""The most samples of a client: more are not plausible."""


@dataclass(frozen=True, slots=True)
class RunOver(Message):
    """Tells a site that the server has no more work for it; the site acknowledges it with the same."""

    kind = OVER

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {}

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls()


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
