"""Validation: an upload is accepted whole, or refused with a reason, before any state changes.

==============  ========================================================================
reason          error, in the order of the checks
==============  ========================================================================
``sender``      the client is not a reporter of the round, or not of this cohort
``run``         made for another run
``round``       made for another round: too late, too early or replayed
``base``        made from another model than the broadcast one
``duplicate``   one of several uploads of a client: the right one is unknown
``channels``    a channel is missing, or one too many
``loss``        the reported loss is not a finite number
``payload``     a packet has the wrong length, kind, dim or dtype, or does not decode
``shape``       the decoded vector has another dtype, shape or device than the model
``non-finite``  it contains a NaN or an infinity
``norm``        its norm exceeds the run's limit
``malformed``   any other error while decoding
==============  ========================================================================

An upload does not contain its weight: weights come from the server's own table.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from hansa.compress import Packet, PacketError, Uplink, direct
from hansa.core.errors import HansaError
from hansa.core.types import MODEL, Vector, Vectors
from hansa.core.vectors.arithmetic import all_finite, native_fits, norm
from hansa.core.vectors.kernels import row_norms
from hansa.rounds.messages import Report

NOBODY = -1
"""The client number in a refusal if the sender is unknown."""

LARGEST_LOSS = 1e300  # so that the sum over clients stays finite


class RefusedUpdate(HansaError):
    """An upload that was refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedUpload:
    """The server's record of what it requested, against which every upload is validated.

    ``reporters`` maps each requested client to its cohort, None if it trains alone. ``versions`` has the round and base
    of each client in asynchronous rounds, where they differ. ``devices`` has the devices on which the updates of
    channels are validated and aggregated, if not those of ``vectors``.
    """

    run: str
    round: int
    base: bytes
    reporters: Mapping[int, int | None]
    links: Mapping[str, Uplink]
    vectors: Vectors
    max_norm: float = 1e12
    versions: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    devices: Mapping[str, torch.device] = field(default_factory=dict)


class ValidUpload(NamedTuple):
    """A valid upload: a function that decodes its vector, its norm and its bytes, by channel.

    Encoded packets stay encoded: the vector decoded for validation is not kept.
    """

    vectors: dict[str, Callable[[], Vector]]
    norms: dict[str, float]
    nbytes: dict[str, int]


def validate_upload(
    report: Report, index: int, expected: ExpectedUpload, repeated: Collection[int] = ()
) -> ValidUpload:
    """Validate the upload of one client of a report, or raise `RefusedUpdate`; no content of it raises anything else.

    ``repeated`` are the clients that sent several uploads.
    """
    try:
        client = _check_address(report, index, expected)
        if client in repeated:
            raise RefusedUpdate("duplicate", f"client {client} sent more than one update this round")
        return _check_contents(report.packets(index), report.losses[index], expected)
    except RefusedUpdate:
        raise
    except Exception as error:  # built-in or user-defined decoders: one client's bytes never end the round
        raise RefusedUpdate("malformed", f"{type(error).__name__}: {_safe_repr(str(error))}") from error


def validate_rows(report: Report, expected: ExpectedUpload, *earlier: Collection[int]) -> list[float] | None:
    """Return the norms of all uploads of a report if it is one matrix and `validate_upload` accepts every row,
    otherwise None.

    ``earlier`` are the clients that have sent an update.
    """
    changes, like = report.rows.get(MODEL), expected.vectors[MODEL]
    if not isinstance(changes, Tensor) or set(report.rows) != {MODEL} or set(expected.links) != {MODEL}:
        return None
    if (report.run, report.round, report.base) != (expected.run, expected.round, expected.base) or expected.versions:
        return None
    clients = report.clients
    if set(map(expected.reporters.get, clients, repeat(NOBODY))) != {report.cohort}:
        return None
    senders = set(clients)
    if len(senders) < len(clients) or not all(map(senders.isdisjoint, earlier)) or set(map(type, clients)) != {int}:
        return None
    if type(expected.links[MODEL]) is not direct or changes.shape != (len(clients), like.numel()):
        return None
    if like.dtype != torch.float32 or not native_fits(changes, like):
        return None
    norms, losses = row_norms(changes), report.losses
    bounded = all(length <= expected.max_norm for length in norms)  # false for NaN
    return norms if bounded and all(type(loss) is float and abs(loss) <= LARGEST_LOSS for loss in losses) else None


def repeated_senders(report: Report, expected: ExpectedUpload) -> frozenset[int]:
    """Return the clients with more than one valid upload in a report."""
    counts: Counter[int] = Counter()
    for index in range(len(report.clients)):
        try:
            counts[_check_address(report, index, expected)] += 1
        except RefusedUpdate:
            continue
    return frozenset(client for client, count in counts.items() if count > 1)


def sender_of(client: object) -> int:
    """Return the client to name in a refusal, or `NOBODY` if it is not a number.

    >>> sender_of("a client"), sender_of(True), sender_of(3)
    (-1, -1, 3)
    """
    return client if type(client) is int and 0 <= client < 1 << 63 else NOBODY


def _check_address(report: Report, index: int, expected: ExpectedUpload) -> int:
    """Return the client of an upload if it answers this round's order. Types are checked exactly: True is not 1."""
    client = report.clients[index]
    cohort = expected.reporters.get(client, NOBODY) if type(client) is int else NOBODY
    if cohort == NOBODY or cohort != report.cohort:
        raise RefusedUpdate("sender", f"client {_safe_repr(client)} is not a reporter of round {expected.round}")
    if type(report.run) is not str or report.run != expected.run:
        raise RefusedUpdate("run", f"from run {_safe_repr(report.run)}, this is {expected.run!r}")
    round, base = expected.versions.get(client, (expected.round, expected.base))
    if type(report.round) is not int or report.round != round:
        raise RefusedUpdate("round", f"for round {_safe_repr(report.round)}, this is round {round}")
    if type(report.base) is not bytes or report.base != base:
        raise RefusedUpdate("base", "made from another model than the one sent out this round")
    return client


def _check_contents(packets: Mapping[str, object], loss: object, expected: ExpectedUpload) -> ValidUpload:
    if set(packets) != set(expected.links):
        raise RefusedUpdate("channels", f"channels {_safe_repr(packets)}, expected {sorted(expected.links)}")
    if loss is not None and (not isinstance(loss, float) or not abs(loss) <= LARGEST_LOSS):
        raise RefusedUpdate("loss", f"the reported loss is {_safe_repr(loss)}")
    admitted = ValidUpload({}, {}, {})
    for name, link in expected.links.items():
        like = expected.vectors[name]
        device = expected.devices.get(name, like.device)
        try:
            packet = _rebuild_packet(packets[name])
            decode: Callable[[], Vector] = partial(_decode, link, packet, like, device)
            vector = decode()
        except HansaError as error:
            raise RefusedUpdate("payload", f"channel {name!r}: {error}") from error
        expected_form = (like.dtype, like.shape, like.layout, device)
        if (received := (vector.dtype, vector.shape, vector.layout, vector.device)) != expected_form:
            raise RefusedUpdate("shape", f"channel {name!r}: {received}, expected {expected_form}")
        if isinstance(packet.content, Tensor) and packet.content.device != device:
            decode = partial(_return_vector, vector)  # whole vectors travel between devices once
        admitted.vectors[name], admitted.nbytes[name] = decode, packet.nbytes
        admitted.norms[name] = _check_norm(name, vector, expected.max_norm)
    return admitted


def _rebuild_packet(packet: object) -> Packet:
    """Rebuild the packet from its contents, so that none of its own properties is trusted."""
    if type(packet) is not Packet:
        raise PacketError(f"packet: expected a packet, got a {type(packet).__name__}.")
    if isinstance(packet.content, Tensor):
        return Packet.of(packet.content)
    return Packet.parse(packet.content)


def _return_vector(vector: Vector) -> Vector:
    return vector


def _decode(link: Uplink, packet: Packet, like: Vector, device: torch.device) -> Vector:
    """Decode a packet; move a vector of the CPU or of the server's device to where it is aggregated."""
    vector = link.receive(packet, dim=like.numel(), dtype=like.dtype)
    movable = vector.is_cpu or vector.device == like.device
    return vector.to(device) if movable else vector


def _check_norm(name: str, vector: Vector, limit: float) -> float:
    length = norm(vector)
    if not length <= limit:  # or NaN; infinite entries and overflow make the norm inf or NaN
        reason = "norm" if all_finite(vector) else "non-finite"
        raise RefusedUpdate(reason, f"channel {name!r}: norm {length}, at most {limit} is accepted")
    return length


def _safe_repr(value: object) -> str:
    """Return a short repr of any received value."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"a {type(value).__name__}"
