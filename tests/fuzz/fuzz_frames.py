"""Fuzzes the frames that a server and its sites exchange: each is read, or refused in a sentence; nothing else.

    PYTHONPATH=tests python tests/fuzz/fuzz_frames.py [--inputs 1000000] [--seed 0]

Every input is a function of the seed and its number: a real frame of every kind, with bytes damaged, cut, added or
overwritten; with another value somewhere in its head; with blobs exchanged, left out or named twice; with a head of
hundreds of thousands of entries; with packets that claim 2^40 entries. Two in three get a correct digest after the
damage, as any sender can make it. A frame that is read must survive another round of writing and reading; it is then
given to its receiver: the server accepts it or counts a reason, a site's checks pass or name one. Now and then a site
handles the whole frame: if it refuses, its state must not change. Time and memory are bounded throughout.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from federation.problems import CLUSTERS, SITES, FaultyTransport, Federations, state_of, task
from hansa import presets
from hansa.compress import sign, top_k
from hansa.core.errors import HansaError
from hansa.federation.messages import (
    EnrollmentReply,
    EnrollmentRequest,
    ProtocolError,
    Refusal,
    RoundOrders,
    RoundReports,
    SiteEvaluationReply,
    SiteEvaluationRequest,
)
from hansa.federation.policy import Policy
from hansa.federation.server import Federation
from hansa.federation.site import MemoryStore, Site
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.rounds import wire_format
from hansa.rounds.messages import Report, WorkOrder
from hansa.rounds.wire_format import DIGEST, FrameError, pack, unpack
from hansa.runs.driver import Run

SECONDS = 5.0
"""Of processor time that one input may take."""

MEMORY = 64 << 20
"""Bytes that one input may make Python take beyond itself."""

MESSAGE = 4000
LIMIT = 8 << 20
POLICY = Policy(message=LIMIT, min_rows=1, test_rows=1)
READERS: dict[str, Callable[..., Any]] = {
    "order": WorkOrder.from_bytes,
    "report": Report.from_bytes,
    "orders": RoundOrders.from_bytes,
    "reports": RoundReports.from_bytes,
    "exam": SiteEvaluationRequest.from_bytes,
    "marks": SiteEvaluationReply.from_bytes,
    "charge": EnrollmentRequest.from_bytes,
    "hello": EnrollmentReply.from_bytes,
    "refused": Refusal.from_bytes,
}
METHODS = (
    presets.scaffold(steps=1, batch_size=3, compressor=top_k(0.5)),
    presets.cafga(steps=2, batch_size=3, clusters=CLUSTERS, compressor=sign(), two_way=True),
)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**40, 10**400, 0.5, 3.0, -0.0, 1e308,
    "", "0", "1", "-1", "nan", "inf", "-inf", "model", "control", "a" * 200, "a" * 5000, "\ud800", "\x1b[31m", "\n",
    "00", "zz", [], {}, [[]], [0], [0, 0], [0] * 2000, {"0": 0}, {"model": []}, {"model": [0, None, [0]]},
    {"0": {"a": ["float32", [1], 0]}}, ["float32", [2**31, 2**31, 0], 0], ["bool", [3], 0], ["float64", [-1], 0],
    ["complex64", [1], 0], "0:" + "0" * 32, "9" * 30 + ":" + "0" * 32,
]  # fmt: skip


class Place(NamedTuple):
    """A server and a site in mid-round, and the frames that were carried."""

    engine: Federation
    orders: dict[str, RoundOrders]
    site: Site
    evaluation: SiteEvaluationRequest
    corpus: tuple[tuple[str, bytes], ...]


@functools.cache
def places() -> tuple[Place, ...]:
    """Real exchanges of every kind of frame, of methods with memory, two channels, replicas, gossip."""
    return tuple(_place(method) for method in METHODS)


def _place(method: Any) -> Place:
    problem: Any = task()
    seen: list[Any] = []
    bound = Run(method, problem).algorithm
    transport = FaultyTransport(
        lambda name: Site(bound, problem, SITES[name], memory_store=MemoryStore(), policy=POLICY)
    )
    transport.on_message = lambda *message: seen.append(message)
    engine = Federations(transport=transport, where="sites", limit=LIMIT)
    Run(method, problem, engine=engine, evaluate_every=2).advance(2)
    found: list[tuple[str, bytes]] = []
    for _, sent, reply in seen:
        for data in (sent, reply):
            kind = wire_format.kind_of(data)
            found.append((kind, data))
            if kind in ("orders", "reports"):
                inner = "order" if kind == "orders" else "report"
                found += [(inner, bytes(blob)) for blob in unpack(data, kind).blobs if blob[:2] == b"hF"]
    memory = {0: {"solver/control": torch.randn(7), "n": torch.arange(3), "b": torch.tensor([True, False])}}
    first = next(data for kind, data in found if kind == "report")
    report = Report.from_bytes(first)
    found.append(("report", replace(report, memory=memory, mean=torch.ones(4), trained=1).to_bytes()))
    found += [
        (
            "charge",
            EnrollmentRequest("north", "1.0", "rounds: 3\n", (0, 2, 4), 5, "run", ((0, 2, 4), (1, 3))).to_bytes(),
        ),
        ("hello", EnrollmentReply("0" * 32, "1.0", {0: 4, 2: 9}, "f" * 32, {0: (1, 3), 2: (9, 0)}).to_bytes()),
        ("refused", Refusal("run").to_bytes()),
    ]
    last = {site: sent for site, sent, _ in seen if wire_format.kind_of(sent) == "orders"}
    evaluation = SiteEvaluationRequest.from_bytes(
        next(sent for _, sent, _ in seen if wire_format.kind_of(sent) == "exam")
    )
    orders = {site: RoundOrders.from_bytes(sent) for site, sent in last.items()}
    return Place(engine.last, orders, transport.sites["north"], evaluation, tuple(dict.fromkeys(found)))


def sealed(data: bytes) -> bytes:
    """The bytes with the digest that they should have."""
    return data[:-DIGEST] + hashlib.blake2b(data[:-DIGEST], digest_size=DIGEST).digest()


def damage(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One to four kinds of damage to bytes."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(damaged)) if damaged else 0
        match draw.randrange(7):
            case 0 if damaged:
                damaged[place] ^= 1 << draw.randrange(8)
            case 1 if damaged:
                damaged[place] = draw.choice(
                    [0, 1, 0x22, 0x2C, 0x30, 0x5B, 0x5D, 0x7F, 0x80, 0xFF, draw.randrange(256)]
                )
            case 2:
                del damaged[place:]
            case 3:
                damaged += draw.randbytes(draw.randint(1, 40))
            case 4:
                damaged[place : place + draw.randint(1, 16)] = other[place : place + draw.randint(1, 16)]
            case 5:
                size = draw.choice([4, 8])
                number = draw.choice([0, 1, 2**16, 2**26, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) % 256**size
                at = draw.choice([place, 4 + draw.randrange(40)])
                damaged[at : at + size] = number.to_bytes(size, "little")
            case _:
                damaged[place:place] = draw.randbytes(draw.randint(1, 4))
    return bytes(damaged)


def overwrite(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Damage that leaves every length as it was, with a right digest: what is behind both is reached."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(damaged))
        size = draw.choice([1, 1, 1, 2, 4, 8, 16])
        letter = draw.choice([b"0", b"9", b",", b"[", b'"'])
        fresh = draw.choice([other[place : place + size], draw.randbytes(size), letter])
        damaged[place : place + len(fresh)] = fresh[: len(damaged) - place]
    return sealed(bytes(damaged))


def change(head: Any, draw: random.Random) -> Any:
    """The head with another value in some place of it: at any depth, by another name, once more or not at all."""
    if not isinstance(head, (dict, list)) or not head or draw.random() < 0.15:
        return draw.choice(VALUES)
    if isinstance(head, list):
        at = draw.randrange(len(head))
        match draw.randrange(8):
            case 0:
                return [*head, *head]
            case 1:
                return head[:at] + head[at + 1 :]
            case _:
                return [*head[:at], change(head[at], draw), *head[at + 1 :]]
    name = draw.choice(list(head))
    match draw.randrange(10):
        case 0:
            return {key: value for key, value in head.items() if key != name}
        case 1:
            return {**head, draw.choice(["0", "00", "-1", "x" * 300, "model", "9" * 30]): head[name]}
        case _:
            return {**head, name: change(head[name], draw)}


def rebuilt(kind: str, data: bytes, draw: random.Random) -> bytes:
    """A frame of right form with something else in it."""
    frame = unpack(data, kind)
    head, blobs = json.loads(json.dumps(frame.head)), [bytes(blob) for blob in frame.blobs]
    match draw.randrange(8):
        case 0 if blobs:
            at = draw.randrange(len(blobs))
            inner = blobs[at]
            blobs[at] = sealed(damage(inner, inner, draw)) if inner[:2] == b"hF" else damage(inner, inner, draw)
        case 1 if len(blobs) > 1:
            draw.shuffle(blobs)
        case 2 if blobs:
            blobs.pop(draw.randrange(len(blobs)))
        case 3 if blobs:
            at = draw.randrange(len(blobs))
            inner = bytearray(blobs[at])
            inner[4:12] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**40, 2**63]))  # how long a packet says it is
            blobs[at] = bytes(inner)
        case 4 if draw.random() < 0.004:
            large = draw.choice(
                [[0] * 300_000, [[]] * 100_000, ["a" * 50] * 60_000, {str(n): n for n in range(60_000)}]
            )
            head[draw.choice(list(head))] = large
        case _:
            for _ in range(draw.randint(1, 3)):
                head = change(head, draw)
                if not isinstance(head, dict):
                    break
    try:
        return pack(kind, head, blobs)
    except (ValueError, UnicodeEncodeError, TypeError):  # not every value has a form in JSON
        return data


def check(place: Place, kind: str, data: bytes, *, watched: bool = False, whole: bool = False) -> str:
    """Read it and show it to the place it is for; what became of it, in a word."""
    began = time.process_time()
    if watched:
        tracemalloc.start()
    try:
        outcome = _read(place, kind, data)
    finally:
        if watched:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    if watched:
        assert peak <= MEMORY + 40 * len(data), f"{peak} bytes taken for {len(data)}"
    if whole and kind in ("orders", "exam"):
        _handle(place.site, data)
    spent = time.process_time() - began
    assert spent <= SECONDS, f"{spent:.1f} seconds of processor time"
    return outcome


def _read(place: Place, kind: str, data: bytes) -> str:
    try:
        found = READERS[kind](data, limit=LIMIT)
    except HansaError as error:
        text = str(error)
        assert text.isprintable(), repr(text)
        assert len(text) <= MESSAGE, f"a message of {len(text)} characters"
        return f"refused: {error.reason}" if isinstance(error, FrameError) else "refused: malformed"
    again = READERS[kind](found.to_bytes()).to_bytes()  # names in the order of JSON, and blobs with them
    assert READERS[kind](again).to_bytes() == again, "what was read does not write itself again"
    if kind in ("orders", "exam"):
        try:
            place.site._check(found) if kind == "orders" else place.site._evaluate(found)
        except ProtocolError as refusal:
            return f"read, refused: {refusal.reason}"
    elif kind in ("reports", "marks"):
        before = place.engine.refusals.total()
        answer = _shown_to_server(place, kind, data)
        if answer is None and place.engine.refusals.total() > before:
            return "read, refused by the server"
    return "read"


def _shown_to_server(place: Place, kind: str, data: bytes) -> object:
    engine = place.engine
    if kind == "reports":
        reports = engine._receive("north", data, dict(place.orders), RoundReports)
        return reports and engine._accept("north", *reports)
    marks = engine._receive("north", data, {"north": place.evaluation}, SiteEvaluationReply)
    try:
        return marks and combine_replies({"north": checked(marks[1], engine.task)}, engine.task)
    except ProtocolError as error:
        return engine._refused(error.reason, error.detail)


def checked(reply: SiteEvaluationReply | Refusal, task: Any) -> SiteEvaluationReply:
    assert isinstance(reply, SiteEvaluationReply)
    check_reply("north", reply, task)
    return reply


def _handle(site: Site, data: bytes) -> None:
    before, counted = state_of(site), site.refusals.total()
    if site.handle(data) is None:
        assert state_of(site) == before, "a refused frame changed what a site remembers"
        assert site.refusals.total() == counted + 1, "a refusal was not counted"


def run(inputs: int, seed: int) -> Counter[str]:
    """The seeded fuzzer."""
    everything: Sequence[tuple[Place, str, bytes]] = [
        (place, kind, data) for place in places() for kind, data in place.corpus
    ]
    outcomes: Counter[str] = Counter()
    for number in range(inputs):
        draw = random.Random(f"{seed} {number}")
        place, kind, data = draw.choice(everything)
        if number % 3 == 0:
            damaged = damage(data, draw.choice(everything)[2], draw)
        elif number % 3 == 1:
            damaged = overwrite(data, draw.choice(everything)[2], draw)
        else:
            damaged = rebuilt(kind, data, draw)
        outcome = check(place, kind, damaged, watched=number % 97 == 1, whole=number % 101 == 2)
        if number % 3 == 0 and damaged != data:
            assert outcome.startswith("refused"), "damaged bytes were read"
        outcomes[outcome] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.process_time()
    outcomes = run(given.inputs, given.seed)
    print(f"{given.inputs} frames in {time.process_time() - began:.0f} s of processor time without a failure")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8d} {outcome}")


if __name__ == "__main__":
    main()
