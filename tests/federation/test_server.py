"""The protocol over a transport that misbehaves: equal to the serial engine, or honest about who was lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.small import NAMES, small
from federation.crash_recovery import SETTINGS, expected, survive
from federation.faulty_transport import FaultyTransport
from federation.problems import (
    ONE_CLUSTER,
    SITES,
    federated,
    method,
    same,
    serial,
    transport_of,
)
from hansa import presets
from hansa.core.errors import HansaError
from hansa.federation.messages import MemoryVersion, RoundOrders, RoundReports
from hansa.federation.site import MemoryStore


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
