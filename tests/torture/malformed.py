"""Malformed uploads: each is refused for its reason, and the round is that of a client who never answered."""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import hansa
from contracts.small import bowls as small_bowls
from engine import problems
from hansa import presets
from hansa.compress import Packet, cast, memoryless, quantize, random_k, top_k
from hansa.compress.packet import HEADER, KINDS
from hansa.core.keys import Key
from hansa.engine import Serial
from hansa.engine.requests import unchanged
from hansa.rounds import ClosedRound, ServerState, close_round, open_round
from hansa.rounds.messages import Report
from hansa.runs.driver import Run
from torture.kill import sha

CLIENTS, ROUNDS = 6, 3
COMMON: dict[str, Any] = {"steps": 2, "local_lr": 0.05}
HALF: dict[str, Any] = {**COMMON, "participation": 0.5}
CLUSTERS: dict[str, Any] = {**COMMON, "clusters": 2, "reporters": 2}
F32, F64 = torch.float32, torch.float64
BUFFERS = "fedams with BatchNorm buffers"
SCENES: dict[str, tuple[Callable[[], hansa.Algorithm], torch.dtype]] = {
    BUFFERS: (lambda: presets.fedams(**HALF, batch_size=4), F32),
    "fedavg": (lambda: presets.fedavg(**HALF, weights="samples"), F32),
    "fedams": (lambda: presets.fedams(**HALF), F64),
    "scaffold": (lambda: presets.scaffold(**HALF), F32),
    "feddyn": (lambda: presets.feddyn(**HALF), F64),
    "fednova": (lambda: presets.fednova(**HALF, weights="samples"), F64),
    "fedaware": (lambda: presets.fedaware(**HALF), F64),
    "fedcams": (lambda: presets.fedcams(**HALF), F32),
    "fedcams, two-way": (lambda: presets.fedcams(**HALF, two_way=True), F64),
    "fedcams, top-k": (lambda: presets.fedcams(**HALF, compressor=top_k(0.5)), F32),
    "scaffold, quantized": (lambda: presets.scaffold(**HALF, compressor=quantize(7)), F64),
    "fedavg, random-k": (lambda: presets.fedavg(**HALF, compressor=random_k(0.5)), F32),
    "fedavg, 16 bits": (lambda: presets.fedavg(**HALF).on("model", uplink=memoryless(cast())), F64),
    "cafga": (lambda: presets.cafga(**CLUSTERS), F32),
    "ha_fed, compressed": (lambda: presets.ha_fed(**CLUSTERS, compressor=top_k(0.5)), F64),
    "dsgd": (lambda: presets.dsgd(**COMMON), F64),
}


@dataclass(frozen=True, slots=True)
class Upload:
    """What one client says in a report."""

    run: Any
    round: Any
    base: Any
    client: Any
    packets: Any
    loss: Any

    @classmethod
    def each(cls, report: Report) -> list[Upload]:
        """The uploads in a report."""
        return [
            cls(report.run, report.round, report.base, client, report.packets(place), report.losses[place])
            for place, client in enumerate(report.clients)
        ]


def as_report(cohort: int | None, *uploads: Upload) -> Report:
    """Uploads with one head as a report."""
    first = uploads[0]
    rows = {name: [upload.packets[name] for upload in uploads] for name in first.packets}
    clients, losses = [upload.client for upload in uploads], [upload.loss for upload in uploads]
    return Report(first.run, first.round, first.base, cohort, clients, rows, losses)


class Bad(NamedTuple):
    """What arrives in place of a client's upload, and why it is refused."""

    uploads: tuple[Upload, ...]
    reasons: set[str]


def task(name: str) -> Any:
    if name == BUFFERS:
        return problems.task(problems.convolution)
    return small_bowls(CLIENTS, 9)


@dataclass(frozen=True)
class Scene:
    """A round in which all reports are in and nothing is folded yet; and the uploads of the round before."""

    run: Run
    state: ServerState
    orders: tuple[Any, ...]
    reports: tuple[Report, ...]
    earlier: tuple[Upload, ...]
    before: str

    @cached_property
    def uploads(self) -> list[tuple[Report, Upload]]:
        return [(report, upload) for report in self.reports for upload in Upload.each(report)]

    def close(self, reports: list[Report]) -> ClosedRound:
        population, store = self.run.task.population, self.run.store
        return close_round(self.run.algorithm, self.state, self.orders, reports, population, rows=store)

    def without(self, client: int) -> ClosedRound:
        """The round of a client who never answered."""
        return self._without[client]

    @cached_property
    def _without(self) -> dict[int, ClosedRound]:
        return {
            gone: self.close([_without(report, gone) for report in self.reports])
            for gone in (upload.client for _, upload in self.uploads)
        }

    def with_bad(self, report: Report, client: int, bad: Bad) -> ClosedRound:
        """The round with something else in the client's place."""
        reports = [_without(each, client) if each is report else each for each in self.reports]
        return self.close([*reports, as_report(report.cohort, *bad.uploads)])


def _without(report: Report, client: int) -> Report:
    return report.part([place for place, other in enumerate(report.clients) if other != client], clients_only=False)


@cache
def scene(name: str) -> Scene:
    """The last round of a short run, before it is closed."""
    make, dtype = SCENES[name]
    seen: list[Upload] = []

    class Recording(Serial):
        def run(self, orders: Any, recall: Any = unchanged) -> Iterator[Report]:
            seen.clear()
            for report in super().run(orders, recall):
                seen.extend(Upload.each(report))
                yield report

    run = Run(make(), task(name), dtype=dtype, engine=Recording).advance(ROUNDS)
    earlier = tuple(seen)
    opened = open_round(run.algorithm, run.state, run.task.population, run.id, run.key)
    orders = tuple(replace(order, memory={c: run.store.read(c) for c in order.reporters}) for order in opened.orders)
    answered = Serial(run.algorithm, run.task, dtype, run.device).run(orders)
    reports: list[Report] = []
    for report in answered:
        alone = [report.part([place]) for place in range(len(report.clients))] if report.cohort is None else [report]
        reports += alone
    return Scene(run, opened.state, orders, tuple(reports), earlier, sha(opened.state.tree()))


def one(draw: np.random.Generator, *choices: Any) -> Any:
    return choices[int(draw.integers(len(choices)))]


# --- the envelope -----------------------------------------------------------------------------------------------------


def wrong_sender(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    mine = next(order for order in scene.orders if upload.client in order.reporters)
    strangers = [client for client in range(CLIENTS) if client not in mine.reporters]
    named = (-1, CLIENTS, 10**9, 1 << 63, 10**5000, True, float(upload.client), math.nan, str(upload.client), None, [0])
    return Bad((replace(upload, client=one(draw, *named, *strangers)),), {"sender"})


FIELDS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "run": lambda run: ("", run[:-1], run + " ", run.encode(), None, 0, "x" * 10**6, [run]),
    "round": lambda now: (
        now - 1, now + 1, -1, 10**5000, float(now), np.int64(now), math.nan, str(now), None, torch.tensor([now])
    ),
    "base": lambda base: (
        bytes(16), b"", base[:-1], base + b"\0", bytearray(base), base.hex(), None, torch.zeros(16)
    ),
    "loss": lambda _: (
        math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, "0.1", True, 1, 1j, [0.1], torch.tensor(0.1)
    ),
}  # fmt: skip
"""What a field of an upload may not be; it is refused for the field's name."""


def wrong(name: str, scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    return Bad((replace(upload, **{name: one(draw, *FIELDS[name](getattr(upload, name)))}),), {name})


def replayed(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """An upload of the round before, as it was or with its sender or its round brought up to date."""
    old = one(draw, *scene.earlier)
    if draw.random() < 0.5:
        return Bad((replace(old, client=upload.client, round=upload.round),), {"base"})
    return Bad((replace(old, client=upload.client),), {"round"})


def duplicated(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """Several answers of one client in a report, equal or not."""
    again = replace(upload, loss=0.5) if draw.random() < 0.5 else upload
    return Bad((upload, again, upload)[: int(draw.integers(2, 4))], {"duplicate"})


# --- the channels -----------------------------------------------------------------------------------------------------


def wrong_channels(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """A channel missing, misnamed or one too many; also one that claims a weight, for which there is no place."""
    name, packets = one(draw, *upload.packets), dict(upload.packets)
    claim = one(draw, "weight", "weights", "samples", "steps", "lambda", "control-variate", None, 7, (1, 2), math.nan)
    weight = Packet.of(torch.tensor([one(draw, -1.0, math.nan, 1e30, math.inf, 0.0)]))
    without = {other: packet for other, packet in packets.items() if other != name}
    named = (
        without,
        {**without, name.upper(): packets[name]},
        {**without, claim: packets[name]},
        {**packets, claim: weight},
        {},
    )
    return Bad((replace(upload, packets=one(draw, *named)),), {"channels"})


def no_packet(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    name = one(draw, *upload.packets)
    packet = upload.packets[name]
    released = memoryview(wire(packet))
    released.release()
    contents = (None, "", [1.0], 0, np.zeros(packet.dim), released, memoryview(wire(packet))[::2])
    named = (None, wire(packet), torch.zeros(packet.dim), [], "", 0, upload)
    wrong = replace(packet, content=one(draw, *contents)) if draw.random() < 0.5 else one(draw, *named)
    return with_packet(upload, name, wrong, "payload", "malformed")


# --- the vectors ------------------------------------------------------------------------------------------------------


def wrong_numbers(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """A NaN, an infinity or an enormous number, in one entry or in all, as a tensor or as bytes rightly sealed."""
    name = one(draw, *upload.packets)
    packet = upload.packets[name]
    largest = float(torch.finfo(packet.dtype).max)
    value = one(draw, math.nan, math.inf, -math.inf, 1e30, -1e30, largest, 1e13)
    if packet.kind != "identity":
        return with_packet(upload, name, forged_value(packet, value), *(("norm",) if abs(value) < 2e308 else ()))
    vector = Packet.of(packet.content).content.clone()
    vector[slice(None) if draw.random() < 0.5 else int(draw.integers(vector.numel()))] = value
    if draw.random() < 0.3:
        raw = vector.numpy().tobytes()
        wrong = Packet.parse(sealed("identity", packet.dtype, packet.dim, raw))
        return with_packet(upload, name, wrong, "norm" if math.isfinite(value) else "payload")
    return with_packet(upload, name, Packet.of(vector), "norm" if math.isfinite(value) else "non-finite")


def wrong_dtype(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    name = one(draw, *upload.packets)
    packet = upload.packets[name]
    other = F64 if packet.dtype == F32 else F32
    dtype = one(draw, other, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
    vector = torch.ones(packet.dim).to(dtype)
    if dtype == other and draw.random() < 0.5:
        raw = wire(packet)[HEADER.size :]
        return with_packet(upload, name, Packet.parse(sealed(packet.kind, other, packet.dim, raw)), "payload")
    return with_packet(upload, name, Packet("identity", packet.dim, packet.dtype, packet.nbytes, vector), "payload")


def wrong_shape(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    name = one(draw, *upload.packets)
    packet = upload.packets[name]
    dim = packet.dim
    sizes = ((dim + 1,), (dim - 1,), (0,), (1,), (2 * dim,), (dim, 1), (1, dim), (3, 3), (), (10 * dim,))
    vector = torch.ones(one(draw, *sizes), dtype=packet.dtype)
    odd = (
        vector,
        vector,
        torch.ones(dim, dtype=packet.dtype).to_sparse(),
        torch.ones(dim, dtype=packet.dtype, device="meta"),
    )
    wrong = replace(packet, kind=one(draw, "identity", packet.kind), content=one(draw, *odd))
    return with_packet(upload, name, wrong, "payload", "shape")


def wrong_bytes(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """Truncated, extended, flipped, random; or a header that lies, with a checksum that is right."""
    name = one(draw, *upload.packets)
    packet = upload.packets[name]
    good = bytearray(wire(packet))
    payload = bytes(good[HEADER.size :])
    flipped = bytearray(good)
    flipped[int(draw.integers(len(good)))] ^= 1 << int(draw.integers(8))
    lies = one(draw, 0, 1, packet.dim - 1, packet.dim + 1, packet.dim + 8, 1 << 31, (1 << 64) - 1)
    kind = one(draw, *(other for other in KINDS if other != packet.kind))
    wrong = one(
        draw,
        good[: int(draw.integers(len(good)))],
        good + draw.bytes(int(draw.integers(1, 40))),
        flipped,
        flipped,
        draw.bytes(int(draw.integers(0, 200))),
        sealed(packet.kind, packet.dtype, lies, payload),
        sealed(kind, packet.dtype, packet.dim, payload),
        sealed(packet.kind, packet.dtype, packet.dim, payload[:-1]),
        sealed(packet.kind, packet.dtype, packet.dim, payload + b"\0"),
        sealed(packet.kind, packet.dtype, packet.dim, b""),
    )
    return with_packet(upload, name, replace(packet, content=bytes(wrong)), "payload")


def several(scene: Scene, upload: Upload, draw: np.random.Generator) -> Bad:
    """Two things wrong at once: the outer one is named."""
    inner = one(draw, partial(wrong, "loss"), wrong_numbers, wrong_shape, wrong_bytes)(scene, upload, draw)
    outer = one(draw, wrong_sender, *(partial(wrong, name) for name in ("run", "round", "base")))(
        scene, inner.uploads[0], draw
    )
    return outer


KINDS_OF_BAD = (
    wrong_sender, *(partial(wrong, name) for name in FIELDS), replayed, duplicated, wrong_channels,
    no_packet, wrong_numbers, wrong_numbers, wrong_dtype, wrong_shape, wrong_bytes, wrong_bytes, several,
)  # fmt: skip


def with_packet(upload: Upload, name: str, packet: object, *reasons: str) -> Bad:
    return Bad((replace(upload, packets={**upload.packets, name: packet}),), set(reasons) or {"payload"})


def wire(packet: Packet) -> bytes:
    """What travels."""
    return bytes(packet.bytes)


def sealed(kind: str, dtype: torch.dtype, dim: int, payload: bytes) -> bytes:
    """A header and its checksum around any payload, written from the description of the format."""
    head = struct.pack("<2sBBQQ", b"hP", 2, KINDS.index(kind) | (dtype == F64) << 7, dim, len(payload))
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head))) + payload


def forged_value(packet: Packet, value: float) -> Packet:
    """A compressed packet with a number of its payload replaced and the checksum made right: the scale of a sign
    packet, the norm of the only bucket, the last of the kept values, the exponent of 16-bit numbers."""
    payload = bytearray(wire(packet)[HEADER.size :])
    size = 4 if packet.dtype == F32 else 8
    number = struct.pack("<f" if size == 4 else "<d", value)
    if packet.kind == "cast":
        exponent = 0x7FFF if not math.isfinite(value) else min(math.frexp(value)[1] + 20, 1023)
        payload[1:3] = struct.pack("<h", exponent)
    elif packet.kind == "sign":
        payload[:size] = struct.pack("<f" if size == 4 else "<d", value if math.isnan(value) else abs(value))
    elif packet.kind == "quantize":
        payload[5 : 5 + size] = struct.pack("<f" if size == 4 else "<d", value if math.isnan(value) else abs(value))
    else:
        payload[-size:] = number
    return replace(packet, content=sealed(packet.kind, packet.dtype, packet.dim, bytes(payload)))


def check(name: str, trial: int, seed: int = 0) -> str:
    """One malformed upload in a scene; returns the reason of its refusal."""
    draw = Key(seed).child("malformed", name, trial).numpy()
    found = scene(name)
    report, upload = found.uploads[int(draw.integers(len(found.uploads)))]
    kind = KINDS_OF_BAD[int(draw.integers(len(KINDS_OF_BAD)))]
    bad = kind(found, upload, draw)
    told = f"{name}, trial {trial}: {kind}"
    closed, expected = found.with_bad(report, upload.client, bad), found.without(upload.client)
    refused = [lost.reason for lost in closed.outcome.dropped]
    assert len(refused) == len(bad.uploads), told
    assert set(refused) <= bad.reasons, f"{told}: refused for {refused}, expected {bad.reasons}"
    assert closed.outcome.admitted == expected.outcome.admitted, told
    assert sha(closed.state.tree()) == sha(expected.state.tree()), told
    assert sha(closed.memory) == sha(expected.memory), told
    assert sha(found.state.tree()) == found.before, f"{told}: the state before the round was changed"
    return refused[0]


def run(count: int, place: Path | None = None, seed: int = 0) -> Counter[str]:
    """``count`` malformed uploads, the scenes in turn; returns how often each reason was given."""
    torch.set_num_threads(1)
    names = list(SCENES)
    return Counter(check(names[trial % len(names)], trial, seed) for trial in range(count))
