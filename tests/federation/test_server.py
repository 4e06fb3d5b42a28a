"""The protocol over a transport that misbehaves: equal to the serial engine, or honest about who was lost."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hansa
from contracts.five import Net
from contracts.small import NAMES, small
from federation.problems import (
    ONE_CLUSTER,
    SETTINGS,
    SITES,
    FaultyTransport,
    captured,
    expected,
    federated,
    method,
    same,
    serial,
    state_of,
    survive,
    task,
    transport_of,
)
from hansa import presets
from hansa.compress import top_k
from hansa.compress.packet import HEADER
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import MODEL
from hansa.federation.messages import MemoryVersion, RoundOrders, RoundReports, SiteEvaluationReply
from hansa.federation.policy import Policy
from hansa.federation.site import MemoryStore, Site
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, joined_reports
from hansa.rounds.wire_format import DIGEST, pack, unpack
from hansa.runs.driver import Run


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_over_sites_is_the_serial_run(name):
    sites = {"all": range(5)} if name in ONE_CLUSTER else SITES
    run, engine, _ = federated(method(name), sites=sites)
    same(run, serial(method(name)))
    assert not engine.refusals


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=4, deadline=None)
@given(
    faults=st.lists(st.sampled_from((*FaultyTransport.FAULTS, *FaultyTransport.SERVER_FAULTS)), max_size=16),
    rollbacks=st.lists(st.integers(0, 2), max_size=6),
)
def test_every_preset_survives_what_a_network_and_machines_do(setting, faults, rollbacks):
    run, _ = survive(setting, 4, faults, rollbacks)
    same(run, expected(setting, 4))


@pytest.mark.parametrize("fault", [*FaultyTransport.FAULTS, *FaultyTransport.SERVER_FAULTS])
def test_one_mishap_at_every_step_of_a_run_changes_nothing(fault):
    """Two sites and three rounds are six messages at least: each of them once."""
    for at in range(7):
        run, _ = survive("scaffold, compressed both ways", 3, ["deliver"] * at + [fault])
        same(run, expected("scaffold, compressed both ways", 3))


def test_a_site_keeps_as_many_versions_as_the_server_keeps_checkpoints_and_few_more():
    _, kept = survive("scaffold, compressed both ways", 12, [])
    assert max(len(store.versions(client)) for store in kept.values() for client in range(5)) <= 5
    _, kept = survive("scaffold, compressed both ways", 12, [], keep=12)
    assert max(len(store.versions(client)) for store in kept.values() for client in range(5)) >= 4


def test_a_silent_site_costs_its_reporters_the_round_and_nothing_else():
    dead = {"south"}

    class Deaf(FaultyTransport):
        def send(self, site, data):
            if site not in dead:
                super().send(site, data)

    algorithm = presets.scaffold(steps=2, batch_size=3)
    run, _, _ = federated(algorithm, rounds=2, transport=transport_of(algorithm, Deaf))
    assert [record["clients"] for record in run.history] == [[0, 2, 4]] * 2
    assert run.history[0]["reasons"] == {"silent": 2}
    dead.clear()
    run.advance(2)
    assert run.history[-1]["participants"] == 5


def test_a_memory_that_is_missing_is_reported_and_never_reset():
    algorithm = presets.scaffold(steps=2, batch_size=3)
    versions = {name: MemoryStore() for name in SITES}
    transport = transport_of(algorithm, stores=versions)
    run, _, _ = federated(algorithm, rounds=2, transport=transport)
    versions["north"], transport.sites = MemoryStore(), {}
    run.advance(1)
    assert run.history[-1]["clients"] == [1, 3]
    assert run.history[-1]["reasons"] == {"memory": 3}
    assert "site north: the site has lost the memory of a client" in run.dropped_clients[-1][1].detail


def version(round):
    return MemoryVersion(round, f"{round:032x}")


@pytest.mark.parametrize(
    ("named", "keep_from", "left"),
    [
        (5, 4, [2, 4, 5, 6]),  # a server that goes back to round 4 names 2; 3 was never admitted, 1 is older
        (5, 6, [5, 6]),
        (5, 1, [1, 2, 3, 4, 5, 6]),  # what was admitted before round 1 is not known
        (2, 4, [2, 4, 5, 6]),  # the server has gone back: what came after round 4 may come again
        (None, 4, [1, 2, 3, 4, 5, 6]),  # it was told to forget, and may go back to before that
    ],
)
def test_only_what_no_server_can_name_is_forgotten(named, keep_from, left, tmp_path):
    """Admitted in rounds 1, 2 and 5; made, and not admitted, in 3, 4 and 6."""
    store = MemoryStore(tmp_path)
    for round, parent in ((1, None), (2, 1), (3, 2), (4, 2), (5, 2), (6, 5)):
        rows = {"a": torch.tensor([float(round)])}
        store.put(7, version(round), rows, None if parent is None else version(parent))
    store.prune(7, None if named is None else version(named), keep_from)
    assert [round for round in range(1, 7) if store.get(7, version(round)) is not None] == left
    assert store.get(7, version(5)) is None or store.get(7, version(5))["a"].item() == 5.0
    assert store.get(8, version(5)) is None


def test_a_damaged_memory_is_an_error_that_names_its_file(tmp_path):
    store, version = MemoryStore(tmp_path), MemoryVersion(0, "0" * 32)
    store.put(3, version, {"a": torch.ones(4)})
    del store
    path = tmp_path / "run.db"
    path.write_bytes(path.read_bytes().replace(torch.ones(4).numpy().tobytes(), bytes(16)))
    store = MemoryStore(tmp_path)
    with pytest.raises(HansaError, match="the memory of client 3 is damaged"):
        store.get(3, version)


def test_memory_never_travels():
    seen = []
    algorithm = presets.scaffold(steps=2, batch_size=3, participation=0.6)
    federated(algorithm, rounds=3, transport=transport_of(algorithm, on_message=lambda *message: seen.append(message)))
    assert len(seen) > 3
    for _, sent, reply in seen:
        assert not any(order.memory or order.broadcasts for order in RoundOrders.from_bytes(sent).orders)
        assert not any(report.memory for report in RoundReports.from_bytes(reply).reports)


def test_clusters_that_span_sites_are_refused():
    with pytest.raises(HansaError, match="spans sites north, south"):
        federated(small("afga", batch_size=3))


def test_a_client_without_a_site_is_refused():
    with pytest.raises(HansaError, match=r"exactly one site; not \[3\]"):
        federated(presets.fedavg(), sites={"north": (0, 1, 2, 4)})


METHOD = presets.scaffold(steps=1, batch_size=3, compressor=top_k(0.5))


@pytest.fixture
def exchange():
    """A site after one honest round, the engine, and that round's frames."""
    return captured(METHOD)


def refused(site: Site, data: bytes, reason: str) -> None:
    before, counted = state_of(site), site.refusals[reason]
    assert site.handle(data) is None, reason
    assert site.refusals[reason] == counted + 1, site.refusals
    assert state_of(site) == before


def sealed(data: bytes) -> bytes:
    """Bytes with the digest that they should have: anybody can make it."""
    return data[:-DIGEST] + hashlib.blake2b(data[:-DIGEST], digest_size=DIGEST).digest()


def edited(data: bytes, change) -> bytes:
    """A frame whose head was changed by hand, with a right digest."""
    frame = unpack(data, wire_format.kind_of(data))
    head = json.loads(json.dumps(frame.head))
    change(head)
    return pack(wire_format.kind_of(data), head, frame.blobs)


def test_a_site_refuses_what_is_not_for_it(exchange):
    transport, _, seen = exchange
    site, orders = transport.sites["north"], RoundOrders.from_bytes(seen["north"][0])
    one, *others = orders.orders

    def with_orders(*changed):
        return replace(orders, orders=tuple(changed))

    wrong = {
        "orders of two rounds": ("round", with_orders(replace(one, round=7), *others)),
        "rounds to come let go of": ("round", replace(orders, keep_from=orders.round + 1)),
        "another site's orders": ("clients", RoundOrders.from_bytes(seen["south"][0])),
        "a client twice": ("clients", with_orders(one, *orders.orders)),
        "a reporter of nobody": ("clients", with_orders(replace(one, reporters=(4,)), *others)),
        "no reporter": ("clients", with_orders(replace(one, reporters=()), *others)),
        "other channels": ("channels", replace(orders, broadcasts={})),
        "no versions": ("stamps", replace(orders, versions={})),
        "no work": ("work", with_orders(with_steps(one, 0), *others)),
    }
    for what, (reason, message) in wrong.items():
        refused(site, message.to_bytes(), reason), what
    site.policy, site.rounds = Policy(steps=1, min_rows=1), 1
    refused(site, with_orders(with_steps(one, 2), *others).to_bytes(), "steps")
    later = replace(orders, round=1, orders=tuple(replace(order, round=1) for order in orders.orders))
    refused(site, later.to_bytes(), "rounds")
    assert site.handle(seen["north"][0]) == seen["north"][1], "and what is meant for it is answered as before"


def test_damaged_truncated_oversize_and_foreign_bytes_are_refused_at_either_end(exchange):
    transport, engine, seen = exchange
    site, (sent, reply) = transport.sites["north"], seen["north"]
    for data, at_server in ((sent, False), (reply, True)):
        middle = len(data) // 2
        cases = {
            "damaged": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "truncated": data[:-1],
            "malformed": b"nonsense",
            "version": data[:2] + b"\x63" + data[3:],
        }
        spoken = edited(data, lambda head: head.update(protocol=99))
        for reason, bad in [*cases.items(), ("version", spoken), ("oversize", data), ("truncated", data + b"\0")]:
            limit = 100 if reason == "oversize" else None
            engine.limit, site.policy = limit, Policy(min_rows=1).model_copy(update={"message": limit or 1 << 30})
            if at_server:
                refused_by_server(engine, seen, "north", bad, reason)
            else:
                refused(site, bad, reason)


def with_steps(order, steps):
    return replace(order, works=tuple(work._replace(steps=steps) for work in order.works))


def refused_by_server(engine, seen, site, data, reason):
    orders = {"north": RoundOrders.from_bytes(seen["north"][0])}
    asked, counted = dict(orders), engine.refusals[reason]
    assert engine._receive(site, data, orders, RoundReports) is None, reason
    assert engine.refusals[reason] == counted + 1, (reason, engine.refusals)
    assert orders == asked


def test_the_server_refuses_what_a_site_may_not_say(exchange):
    _, engine, seen = exchange
    north, south = (RoundReports.from_bytes(seen[name][1]) for name in ("north", "south"))
    first, *others = north.reports

    def with_first(report):
        return replace(north, reports=(report, *others))

    theirs = south.reports[0].part([0])
    wrong = [
        ("run", replace(north, run="another")),
        ("round", replace(north, round=7)),
        ("cohorts", replace(south, reports=south.reports[:1])),
        ("cohorts", replace(north, reports=north.reports * 2)),
        ("clients", with_first(theirs)),
        ("clients", with_first(joined_reports([first, theirs]))),
        ("clients", with_first(joined_reports([first, first]))),
        ("clients", with_first(replace(first, dropped=(DroppedClient(3, "lost"),)))),
        ("clients", with_first(replace(first, peer_bytes={3: 10}))),
        ("report", with_first(replace(first, info={"test_accuracy": 1.0}))),
        ("report", with_first(replace(first, trained=1000))),
        ("need", replace(north, need=("secrets",))),
        ("need", replace(north, need=(MODEL,))),  # which it was sent whole
        ("kept", replace(north, updated=frozenset({3}))),
    ]
    for reason, answer in wrong:
        refused_by_server(engine, seen, "north", answer.to_bytes(), reason)
    refused_by_server(engine, seen, "south", seen["south"][1], "unasked")
    marks = SiteEvaluationReply(north.run, north.round, b"\0" * 16, 5, 1.0, 5.0, 3.0, 5.0)
    refused_by_server(engine, seen, "north", marks.to_bytes(), "unasked")
    orders = {"north": RoundOrders.from_bytes(seen["north"][0])}
    assert engine._receive("north", seen["north"][1], orders, RoundReports) is not None
    assert not orders
    assert engine._receive("north", seen["north"][1], orders, RoundReports) is None, "replayed"


def test_a_site_that_answers_ill_is_lost_to_the_round_and_the_others_are_folded():
    """Over whole rounds: the run is that of a south that is silent, whatever south says."""

    def with_south(says):
        class Talking(FaultyTransport):
            def send(self, site, data):
                if site == "north":
                    super().send(site, data)
                elif says(data) is not None:
                    self.inbox.append((site, data, says(data)))

        return federated(METHOD, rounds=2, transport=transport_of(METHOD, Talking))

    silent, _, _ = with_south(lambda data: None)
    for says in (lambda data: data, lambda data: b"hF", lambda data: data[:-3], lambda data: sealed(data[:90])):
        run, engine, _ = with_south(says)
        same(run, silent)
        assert run.store.digest() == silent.store.digest()
        assert engine.refusals.total() == 2, engine.refusals


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)


@pytest.mark.parametrize("two_way", [False, True])
def test_a_site_with_another_model_is_refused_and_told_of(two_way, caplog):
    algorithm = presets.fedcams(steps=1, batch_size=3, two_way=two_way)
    held = task()
    other = hansa.Task(Wider, nn.functional.cross_entropy, held.data)
    bound = Run(algorithm, held).algorithm
    transport = FaultyTransport(lambda name: Site(bound, other if name == "south" else held, SITES[name]), attempts=2)
    run, _, _ = federated(algorithm, rounds=2, transport=transport)
    assert run.history[-1]["clients"] == [0, 2, 4]
    assert run.history[-1]["reasons"] == {"silent": 2}
    assert transport.sites["south"].refusals["model"] == 3 + 1, (
        "in the second round nobody waits for an unresponsive site"
    )
    assert "The site has another model" in caplog.text
    assert not any(map(transport.sites["south"].memory_store.versions, range(5)))


def test_a_broadcast_that_decodes_to_another_model_than_the_server_says_is_refused(exchange):
    transport, _, seen = exchange
    site, orders = transport.sites["north"], RoundOrders.from_bytes(seen["north"][0])
    moved = {
        name: Broadcast.whole(torch.ones(site._dims[name]), sent.version) for name, sent in orders.broadcasts.items()
    }
    refused(site, replace(orders, broadcasts=moved).to_bytes(), "model")


def test_packets_that_would_unpack_large_are_not_opened(exchange):
    """A sparse packet of 40 bytes may say that it is of 2^40 entries: it is held to the site's own model first."""
    transport, _, seen = exchange
    site, orders = transport.sites["north"], RoundOrders.from_bytes(seen["north"][0])
    small = bytearray(top_k(0.5).encode(torch.ones(4), Key(0)).bytes)
    small[4:12] = struct.pack("<Q", 1 << 40)
    assert len(small) < HEADER.size + 64
    huge = {name: Broadcast(1, 0, (hansa.compress.Packet.parse(bytes(small)),)) for name in orders.broadcasts}
    refused(site, replace(orders, broadcasts=huge).to_bytes(), "model")


@pytest.mark.parametrize(
    "head",
    [
        {"reports": [0] * 100_000},  # one blob, unpacked again and again
        {"reports": [0, 0]},
        {"need": [[]] * (1 << 20)},  # two bytes each here, 56 in memory
        {"kept": list(range(10)) * 500_000},
    ],
    ids=["many", "twice", "lists", "entries"],
)
def test_frames_that_would_unpack_large_are_refused_before_they_do(head, exchange):
    _, engine, seen = exchange
    frame = unpack(seen["north"][1], "reports")
    data = pack("reports", {**frame.head, **head}, [frame.blobs[0]])
    refused_by_server(engine, seen, "north", data, "inflated")


def raw(kind: str, head: bytes, blobs: list[bytes]) -> bytes:
    """A frame whose head is these bytes, whatever they are."""
    word = kind.encode()
    counts = struct.pack("<II", len(head), len(blobs)) + struct.pack(f"<{len(blobs)}Q", *map(len, blobs))
    return sealed(struct.pack("<2sBB", b"hF", 1, len(word)) + word + counts + head + b"".join(blobs) + bytes(DIGEST))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"exchanges":7', b'"exchanges":1e999'),  # no whole number, and none at all
        (b'"exchanges":7', b'"exchanges":NaN'),
        (b'"exchanges":7', b'"exchanges":' + b"9" * 5000),
        (b'"exchanges":7', b'"exchanges":"0"'),
        (b'"exchanges":7', b'"exchanges":-1'),
        (b'"trained":1', b'"trained":true'),
        (b'"consensus":0.5', b'"consensus":' + b"9" * 400),
        (b'"mean":["float32",[1],0]', b'"mean":["float32",[0,4611686018427387904,4611686018427387904],0]'),
        (b'"mean":["float32",[1],0]', b'"mean":["float32",[1],-1]'),
        (b'"peer_bytes":{"0":1}', b'"peer_bytes":{"00":1}'),
        (b'[[0,"a","b"]]', b'[[0,"a\\ud800","b"]]'),
        (b'[[0,"a","b"]]', b'[[0,"' + b"a" * 5000 + b'","b"]]'),
        (b'{"', b"[" * 100_000 + b'{"'),
    ],
)
def test_heads_that_no_writer_makes_are_refused_in_a_sentence(before, after):
    facts = {"dropped": (DroppedClient(0, "a", "b"),), "peer_bytes": {0: 1}, "exchanges": 7, "info": {"consensus": 0.5}}
    report = Report("run", 0, b"", 0, mean=torch.ones(1), trained=1, **facts)
    frame = unpack(report.to_bytes(), "report")
    head = json.dumps(frame.head, sort_keys=True, separators=(",", ":")).encode()
    blobs = [*map(bytes, frame.blobs)]
    assert Report.from_bytes(raw("report", head, blobs)).to_bytes() == report.to_bytes()
    assert before in head
    with pytest.raises(wire_format.FrameError) as refusal:
        Report.from_bytes(raw("report", head.replace(before, after, 1), blobs))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300


def test_memory_is_reset_by_the_operator_alone_and_once(tmp_path):
    algorithm = METHOD
    held = task()
    versions = {name: MemoryStore() for name in SITES}
    transport = transport_of(algorithm, stores=versions)
    run, _, _ = federated(algorithm, rounds=2, transport=transport)
    versions["north"], transport.sites = MemoryStore(), {}
    run.advance(1)
    assert run.history[-1]["reasons"] == {"memory": 3}
    run.forget(0, 4)
    tree, rows, history = run.checkpoint_state(), copy.deepcopy(run.store), list(run.history)
    again = Run(algorithm, held, engine=run._engine, evaluate_every=0, store=rows)
    again.restore(tree, history)  # it outlives the server
    again.advance(1)
    assert again.history[-1]["clients"] == [0, 1, 3, 4]
    assert again.history[-1]["reasons"] == {"memory": 1}
    assert not again.forgotten_clients
    again.advance(1)
    assert again.history[-1]["clients"] == [0, 1, 3, 4]
    with pytest.raises(HansaError, match=r"forget\(client=5\): expected one of the 5 clients, 0 to 4"):
        run.forget(5)


def test_a_client_that_is_forgotten_starts_as_in_the_first_round():
    """In simulation too: its order carries no memory, and what others remember stays."""
    algorithm = presets.scaffold(steps=1, batch_size=3)
    run = serial(algorithm, 2)
    before = run.store.read(2)
    run.forget(2)
    run.advance(1)
    lone = Run(algorithm, task(), evaluate_every=0)
    lone.state, lone.store.generation = serial(algorithm, 2).state, 2
    lone.advance(1)
    assert torch.equal(run.store.read(2)["solver/control"], lone.store.read(2)["solver/control"])
    assert not torch.equal(run.store.read(2)["solver/control"], before["solver/control"])
