"""Server, sites and what is between them, without a network: equal to a simulation, or refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from federation.neighbours import TEXT, Village, server
from hansa.config import build, from_text
from hansa.core.errors import HansaError
from hansa.engine import Serial
from hansa.federation import Policy, flower_transport
from hansa.federation.enrollment import Charge, Hello, Refused, apart, several
from hansa.federation.messages import RoundOrders
from hansa.federation.serve import placed
from hansa.rounds import wire_format
from hansa.runs.experiment import living_run

METHODS = {
    "fedavg": [],
    "two-way fedcams": ["algorithm=fedcams", "compress.two_way=true"],
    "scaffold": ["algorithm=scaffold"],
    "cafga": ["algorithm=cafga", "gossip.clusters=[[0, 1, 2], [3, 4, 5]]", "sample=null"],
    "ha-fed": ["algorithm=ha_fed", "gossip.clusters=[[0, 1, 2], [3, 4, 5]]", "sample=null"],
    "fedaware": ["algorithm=fedaware"],
}


def simulated(*changes):
    config = from_text(TEXT, [*changes, "engine=pool"])
    run = living_run(config, build.federated(config), engine=Serial)
    return run.advance(config.rounds)


def same(run, expected):
    for name, vector in expected.state.vectors.items():
        assert torch.equal(run.state.vectors[name], vector), name
    for a, b in zip(run.history, expected.history, strict=True):
        mine = {name: value for name, value in {**a, "seconds": 0}.items() if name != "sites"}
        assert repr(mine) == repr({**b, "seconds": 0})


@pytest.mark.parametrize("name", METHODS)
def test_a_federation_is_its_simulation(name, tmp_path):
    experiment = server(Village(tmp_path / "sites"), *METHODS[name]).new(tmp_path / "run")
    experiment.go()
    same(experiment.run, simulated(*METHODS[name]))


@pytest.mark.parametrize("name", ["two-way fedcams", "scaffold", "cafga"])
def test_sites_that_are_killed_and_answers_that_are_lost_change_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(flower_transport, "AGAIN", 0.0)
    village = Village(tmp_path / "sites")
    experiment = server(village, *METHODS[name]).new(tmp_path / "run")

    def trouble(run, record):
        village.kill("north")
        village.failing += ["south", "north", "south"]

    experiment.go([trouble])
    same(experiment.run, simulated(*METHODS[name]))


@pytest.mark.parametrize("name", ["two-way fedcams", "scaffold"])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(name, tmp_path):
    """It dies after a round that is not yet saved; the sites have gone further, and one was killed too."""
    village = Village(tmp_path / "sites")
    words = [*METHODS[name], "checkpoint.every=2"]
    first = server(village, *words).new(tmp_path / "run")

    def killed(run, record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.go([killed])
    village.kill("south")
    again = server(village, *words).resumed(tmp_path / "run")
    assert again.run.state.round == 2
    again.go()
    same(again.run, simulated(*METHODS[name]))


def test_a_suspect_costs_one_deadline_and_returns(tmp_path, monkeypatch):
    village = Village(tmp_path / "sites")
    made = server(village, "sample=null", "rounds=6")
    experiment = made.new(tmp_path / "run")
    now = [0.0]
    made.transport.clock = lambda: now[0]
    waited = []

    def idle():
        now[0] += 30.0
        waited.append(experiment.run.state.round)

    village.idle = idle

    def watch(run, record):
        if record["round"] == 1:
            village.away = {"south"}
        if record["round"] == 4:
            village.away = set()

    experiment.go([watch])
    assert [record["participants"] for record in experiment.run.history] == [6, 3, 3, 3, 6, 6]
    assert experiment.run.history[1]["reasons"] == {"silent": 3}
    assert set(waited) == {1}, "only the round in which it fell silent waits for it"


def test_enough_answers_close_a_round(tmp_path):
    village = Village(tmp_path / "sites")
    made = server(village, "sample=null", "engine.enough=1", "rounds=2")
    experiment = made.new(tmp_path / "run")
    village.receive = lambda timeout: [village.inbox.pop(0)] if village.inbox else []
    experiment.go()
    assert [record["participants"] for record in experiment.run.history] == [3, 3]


def test_only_packets_of_reporters_cross_and_gossip_stays(tmp_path):
    village = Village(tmp_path / "sites")
    words = [*METHODS["cafga"], "gossip.reporters=1"]
    made = server(village, *words)
    experiment = made.new(tmp_path / "run")
    village.seen.clear()
    experiment.go()
    record = experiment.run.history[-1]
    assert record["participants"] == 2
    assert record["peer_bytes"] > 10 * record["up_bytes"] > 0
    last = [wire_format.unpack(apart(answer)[-1], "reports") for _, _, answer in village.seen[-2:]]
    assert [len(frame.blobs) for frame in last] == [1, 1]


def test_memory_and_data_never_travel(tmp_path):
    village = Village(tmp_path / "sites")
    server(village, *METHODS["scaffold"]).new(tmp_path / "run").go()
    for _, sent, _ in village.seen:
        for part in apart(sent):
            if wire_format.kind_of(part) == "orders":
                assert not any(order.memory for order in RoundOrders.from_bytes(part).orders)
    assert list((tmp_path / "sites" / "north").rglob("*.rows"))


def refused(village, *changes, text=TEXT):
    with pytest.raises(HansaError) as error:
        server(village, *changes, text=text).meet()
    return str(error.value)


def test_a_policy_is_kept(tmp_path):
    village = Village(tmp_path, policy=Policy(rounds=3, data=("fashion-mini",)))
    assert "rounds: a run of 4 rounds, this site's policy allows 3" in refused(village)
    assert "data: the configuration names data 'synthetic'" in refused(village, "rounds=2")
    assert not list(tmp_path.rglob("charge"))


def test_code_that_a_policy_does_not_list_is_not_imported(tmp_path):
    village = Village(tmp_path)
    text = Charge("north", _version(), "rounds: 1\nmodel: {factory: 'sites_trap:make'}", (0,), 1).to_bytes()
    answer = Refused.from_bytes(village.agent("north").handle(text))
    assert answer.reason == "code"
    assert "sites_trap:make" in answer.detail
    nested = "rounds: 1\nserver: {chain: [{kind: 'os:system'}]}"
    answer = village.agent("north").handle(Charge("north", _version(), nested, (0,), 1).to_bytes())
    assert Refused.from_bytes(answer).reason == "code"
    assert village.agent("north").refusals.counts["code"] == 2


def test_label_counts_leave_only_where_the_policy_says_so(tmp_path):
    closed = server(Village(tmp_path / "a"))
    closed.meet()
    assert all(hello.labels is None for hello in closed.hellos.values())
    assert closed._labels() is None
    opened = server(Village(tmp_path / "b", policy=Policy(label_counts=True)))
    opened.meet()
    assert opened._labels().sum(1).tolist() == opened._samples()


def _version():
    from hansa.runs.provenance import hansa_version

    return hansa_version()


def test_a_site_refuses_what_is_not_for_it_and_counts_it(tmp_path):
    village = Village(tmp_path / "sites")
    experiment = server(village).new(tmp_path / "run")
    experiment.go()
    agent = village.agent("north")
    orders = next(part for site, sent, _ in village.seen for part in apart(sent)
                  if site == "north" and wire_format.kind_of(part) == "orders")  # fmt: skip
    south = next(part for site, sent, _ in village.seen for part in apart(sent)
                 if site == "south" and wire_format.kind_of(part) == "orders")  # fmt: skip
    charge = Charge.from_bytes(apart(village.seen[0][1])[0])
    told = RoundOrders.from_bytes(orders)
    damaged = orders[:-30] + bytes([orders[-30] ^ 1]) + orders[-29:]
    files = sorted(path.read_bytes() for path in (tmp_path / "sites").rglob("*") if path.is_file())
    wrong = {
        "charge": replace(told, run="ab" * 8, orders=()).to_bytes(),
        "run": replace(told, run="../../etc", orders=()).to_bytes(),
        "round": replace(told, round=told.round + 1).to_bytes(),
        "rounds": replace(told, round=10_000, orders=()).to_bytes(),
        "clients": south,
        "site": replace(charge, site="south").to_bytes(),
        "version": replace(charge, version="0.0.1").to_bytes(),
        "damaged": damaged,
        "truncated": orders[: len(orders) // 2],
        "malformed": b"nonsense",
    }
    if charge.site == "south":
        wrong["site"] = charge.to_bytes()
        wrong["version"] = replace(charge, site="north", version="0.0.1").to_bytes()
    for reason, data in wrong.items():
        assert Refused.from_bytes(agent.handle(data)).reason == reason
        assert agent.refusals.counts[reason] == 1
    other = wire_format.pack("orders", {"protocol": 99})
    for data, reason in ((b"", "truncated"), (several([b"x"]), "truncated"), (other, "version")):
        agent.handle(data)
        assert agent.refusals.counts[reason] > 1
    big = replace(charge, site="north", population=1 << 60).to_bytes()
    assert Refused.from_bytes(agent.handle(big)).reason == "clients"
    assert files == sorted(path.read_bytes() for path in (tmp_path / "sites").rglob("*") if path.is_file())
    again = agent.handle(orders)
    assert wire_format.kind_of(again) == "reports", "it still answers what is right"


def test_a_frame_beyond_the_policy_is_not_parsed(tmp_path):
    village = Village(tmp_path, policy=Policy(message=1000))
    charge = Charge("north", _version(), "rounds: 1\nname: " + "x" * 2000, (0,), 1).to_bytes()
    answer = Refused.from_bytes(village.agent("north").handle(charge))
    assert (answer.reason, "at most 1000 are taken" in answer.detail) == ("oversize", True)


def test_the_server_refuses_a_site_that_is_not_what_it_was(tmp_path):
    village = Village(tmp_path / "sites")
    made = server(village)
    made.meet()
    hello = made.hellos["north"]
    wrong = {
        "has hansa 9": replace(hello, version="9"),
        "tells samples of clients": replace(hello, samples={0: 5, 1: 5, 4: 5}),
        "other samples or another model": replace(hello, samples={0: 5, 1: 5, 2: 5}),
        "another model than when": replace(hello, model="00"),
        "not those of its samples": replace(hello, labels={0: (1,), 1: (1,), 2: (1,)}),
    }
    for text, answer in wrong.items():
        with pytest.raises(HansaError, match=text):
            made._greeted("north", answer)
    assert made.hellos["north"] is hello
    assert Hello.from_bytes(hello.to_bytes()).samples == hello.samples


def test_clients_are_placed_once_each():
    config = from_text("engine: {kind: flower, sites: {a: [0, 3], b: [2, 1]}}")
    assert placed(config.engine) == {"a": (0, 3), "b": (1, 2)}
    for sites in ("{a: [0, 1], b: [1, 2]}", "{a: [0, 2]}", "{}"):
        with pytest.raises(HansaError, match="exactly one site"):
            placed(from_text(f"engine: {{kind: flower, sites: {sites}}}").engine)


def test_what_looks_into_clients_is_refused(tmp_path):
    for asked in ("train=true", "per_client=true", "per_client=2", "personalise.steps=3"):
        with pytest.raises(HansaError, match=rf"evaluate\.{asked.split('=')[0].split('.')[0]}: needs clients"):
            server(Village(tmp_path), f"evaluate.{asked}")
    config = from_text(TEXT)
    with pytest.raises(HansaError, match="hansa serve"):
        living_run(config, build.federated(config))


def test_a_policy_file_is_checked(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("factories: [mine:net]\nrounds: 20\nlabel_counts: true\nmessage: 5000000\n")
    assert Policy.load(path) == Policy(factories=("mine:net",), rounds=20, label_counts=True, message=5_000_000)
    path.write_text("rounds: 20\nfactory: [mine:net]\n")
    with pytest.raises(HansaError, match=r"policy.yaml:2: factory: .*Known: factories"):
        Policy.load(path)


def test_one_bit_an_entry_is_a_25th_of_the_uplink(tmp_path):
    """Whole frames, not packets alone, of a model of 29 thousand parameters; in one site of two clients."""
    words = ["data=fashion-mini", "data.clients=2", "model=cnn_29k", "sample=null", "rounds=1", "local.steps=1"]
    words += ["engine.sites={north: 2}", "evaluate.every=0"]
    up = {}
    for method in ("fedams", "fedcams"):
        compress = ["compress.compressor=sign"] if method == "fedcams" else []
        experiment = server(Village(tmp_path / method / "sites"), *words, f"algorithm={method}", *compress).new(
            tmp_path / method / "run"
        )
        experiment.go()
        up[method] = experiment.run.history[-1]["sites"]["north"]["up_bytes"]
    assert 25 * up["fedcams"] <= up["fedams"]
