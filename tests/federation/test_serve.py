"""Server, sites and what is between them, without a network: equal to a simulation, or refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from command_line import run_well
from federation.problems import TEXT, LocalSites, same, server
from hansa import __version__
from hansa.config import build, from_yaml
from hansa.core.errors import HansaError
from hansa.engine import Serial
from hansa.federation import messages
from hansa.federation.messages import (
    PAUSE_SECONDS,
    EnrollingTransport,
    EnrollmentReply,
    EnrollmentRequest,
    Refusal,
    Reply,
    RoundOrders,
    SiteEvaluationRequest,
    pack_batch,
    unpack_batch,
)
from hansa.federation.policy import Policy
from hansa.federation.server import SITES, clients_by_site, replay_run
from hansa.rounds import wire_format
from hansa.runs.experiment import build_run
from hansa.runs.folder import RunFolder

METHODS = {
    "fedavg": [],
    "two-way fedcams": ["algorithm=fedcams", "compress.two_way=true"],
    "scaffold": ["algorithm=scaffold"],
    "cafga": ["algorithm=cafga", "gossip.clusters=[[0, 1, 2], [3, 4, 5]]", "sample=null"],
    "ha-fed": ["algorithm=ha_fed", "gossip.clusters=[[0, 1, 2], [3, 4, 5]]", "sample=null"],
    "fedaware": ["algorithm=fedaware"],
    "private": [
        "algorithm=fedcams",
        "compress.two_way=true",
        "local.private_blocks={kind: blocks, patterns: [1.bias]}",
    ],
}


def simulated(*changes):
    config = from_yaml(TEXT, [*changes, "engine=pool"])
    run = build_run(config, build.load_data(config), engine=Serial)
    return run.advance(config.rounds)


@pytest.mark.parametrize("name", METHODS)
def test_a_federation_is_its_simulation(name, tmp_path):
    experiment = server(LocalSites(tmp_path / "sites"), *METHODS[name]).new(tmp_path / "run")
    experiment.execute()
    same(experiment.run, simulated(*METHODS[name]))


@pytest.mark.parametrize("changes", [["evaluate.where=sites"], ["algorithm=fedbuff", "pace={kind: buffered, size: 2}"]])
def test_private_blocks_are_sent_neither_for_evaluation_nor_from_versions_in_flight(changes, tmp_path):
    sites = LocalSites(tmp_path / "sites")
    experiment = server(sites, METHODS["private"][-1], *changes).new(tmp_path / "run")
    experiment.execute()
    assert all(record["moved"] and not record["lost"] for record in experiment.run.history)
    assert experiment.run.history[-1].get("sites_test_rows") == (182 if "evaluate" in changes[0] else None)
    kinds = {kind.kind: kind for kind in (SiteEvaluationRequest, RoundOrders)}
    frames = [frame for _, data, _ in sites.seen for frame in unpack_batch(data)]
    sent = [kinds[name].from_bytes(frame) for frame in frames if (name := wire_format.kind_of(frame)) in kinds]
    assert {packet.dim for each in sent for packet in each.broadcasts["model"].packets} == {600}


@pytest.mark.parametrize("name", ["two-way fedcams", "scaffold", "cafga", "private"])
def test_sites_that_are_killed_and_answers_that_are_lost_change_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "RETRY_SECONDS", 0.0)
    sites = LocalSites(tmp_path / "sites")
    experiment = server(sites, *METHODS[name]).new(tmp_path / "run")

    def trouble(run, record):
        sites.kill("north")
        sites.failing += ["south", "north", "south"]

    experiment.execute([trouble])
    same(experiment.run, simulated(*METHODS[name]))


@pytest.mark.parametrize("name", ["two-way fedcams", "scaffold"])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(name, tmp_path):
    """It dies after a round that is not yet saved; the sites have gone further, and one was killed too."""
    sites = LocalSites(tmp_path / "sites")
    changes = [*METHODS[name], "checkpoint.every=2"]
    first = server(sites, *changes).new(tmp_path / "run")

    def killed(run, record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.execute([killed])
    sites.kill("south")
    again = server(sites, *changes).resume(tmp_path / "run")
    assert again.run.state.round == 2
    again.execute()
    same(again.run, simulated(*METHODS[name]))


def test_an_unresponsive_site_costs_one_deadline_and_returns(tmp_path, monkeypatch):
    sites = LocalSites(tmp_path / "sites")
    made = server(sites, "sample=null", "rounds=6")
    experiment = made.new(tmp_path / "run")
    now = [0.0]
    made.transport.clock = lambda: now[0]
    waited = []

    def idle():
        now[0] += 5.0
        waited.append(experiment.run.state.round)

    sites.idle = idle

    def watch(run, record):
        if record["round"] == 1:
            sites.away = {"south"}
        if record["round"] == 4:
            sites.away = set()

    experiment.execute([watch])
    assert [record["participants"] for record in experiment.run.history] == [6, 3, 3, 3, 6, 6]
    assert experiment.run.history[1]["reasons"] == {"silent": 3}
    assert set(waited) == {1}, "only the round in which it fell silent waits for it"
    lost = json.loads((tmp_path / "run" / "summary.json").read_text())["lost_updates"]
    assert lost == [{"site": "south", "client": client, "round": round, "reason": "silent"}
                    for round in (2, 3, 4) for client in (3, 4, 5)]  # fmt: skip


def test_enough_answers_close_a_round(tmp_path):
    sites = LocalSites(tmp_path / "sites")
    made = server(sites, "sample=null", "engine.enough=1", "rounds=2")
    experiment = made.new(tmp_path / "run")
    sites.receive = lambda timeout: [sites.inbox.pop(0)] if sites.inbox else []
    experiment.execute()
    assert [record["participants"] for record in experiment.run.history] == [3, 3]


def refused(sites, *changes, text=TEXT):
    with pytest.raises(HansaError) as error:
        server(sites, *changes, text=text).enroll_sites()
    return str(error.value)


def test_a_policy_is_kept(tmp_path):
    sites = LocalSites(tmp_path, policy=Policy(rounds=3, data=("fashion-mini",)))
    assert "rounds: the run has more rounds than the site's policy permits" in refused(sites)
    assert "data: the configuration names data that the site's policy does not list" in refused(sites, "rounds=2")
    said = [exchange.refusal for agent in sites.agents.values() for exchange in agent.exchange_log.exchanges]
    numbers = "rounds: a run of 4 rounds, the site's policy permits 3"
    assert numbers in said, "the site's own log has the numbers"
    assert not list(tmp_path.rglob("charge"))


def test_code_that_a_policy_does_not_list_is_not_imported(tmp_path):
    sites = LocalSites(tmp_path)
    text = EnrollmentRequest("north", __version__, "rounds: 1\nmodel: {factory: 'sites_trap:make'}", (0,), 1).to_bytes()
    answer = Refusal.from_bytes(sites.agent("north").handle(text))
    assert answer.reason == "code"
    assert "sites_trap:make" in sites.agent("north").exchange_log.exchanges[-1].refusal
    nested = "rounds: 1\nserver: {optimizer: [{kind: 'os:system'}]}"
    answer = sites.agent("north").handle(EnrollmentRequest("north", __version__, nested, (0,), 1).to_bytes())
    assert Refusal.from_bytes(answer).reason == "code"


def test_label_counts_leave_only_where_the_policy_says_so(tmp_path):
    closed = server(LocalSites(tmp_path / "a"))
    closed.enroll_sites()
    assert not any(reply.labels for reply in closed.enrolled.values())
    assert closed.facts["labels"] is None
    opened = server(LocalSites(tmp_path / "b", policy=Policy(label_counts=True)))
    opened.enroll_sites()
    assert list(map(sum, opened.facts["labels"])) == opened.facts["samples"]


def contents(folder):
    """The files of sites, except for their logs."""
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "exchanges.jsonl")


def test_a_site_refuses_what_is_not_for_it_and_counts_it(tmp_path):
    sites = LocalSites(tmp_path / "sites")
    experiment = server(sites).new(tmp_path / "run")
    experiment.execute()
    agent = sites.agent("north")
    orders = next(part for site, sent, _ in sites.seen for part in unpack_batch(sent)
                  if site == "north" and wire_format.kind_of(part) == "orders")  # fmt: skip
    enrollment = EnrollmentRequest.from_bytes(unpack_batch(sites.seen[0][1])[0])
    message = RoundOrders.from_bytes(orders)
    damaged = orders[:-30] + bytes([orders[-30] ^ 1]) + orders[-29:]
    files = contents(tmp_path / "sites")
    wrong = {
        "charge": replace(message, run="ab" * 8, orders=()).to_bytes(),
        "run": replace(message, run="../../etc", orders=()).to_bytes(),
        "site": replace(enrollment, site="south").to_bytes(),
        "version": replace(enrollment, version="0.0.1").to_bytes(),
        "damaged": damaged,
    }
    if enrollment.site == "south":
        wrong["site"] = enrollment.to_bytes()
        wrong["version"] = replace(enrollment, site="north", version="0.0.1").to_bytes()
    for reason, data in wrong.items():
        assert Refusal.from_bytes(agent.handle(data)).reason == reason
        assert agent.exchange_log.exchanges[-1].refusal.startswith(f"{reason}: ")
    other = wire_format.pack("orders", {"protocol": 99})
    for data, reason in ((b"", "truncated"), (pack_batch([b"x"]), "truncated"), (other, "version")):
        agent.handle(data)
        assert agent.exchange_log.exchanges[-1].refusal.startswith(f"{reason}: ")
    big = replace(enrollment, site="north", population=1 << 60).to_bytes()
    assert Refusal.from_bytes(agent.handle(big)).reason == "clients"
    assert files == contents(tmp_path / "sites")
    again = agent.handle(orders)
    assert wire_format.kind_of(again) == "reports", "it still answers what is right"


def test_the_server_refuses_a_site_that_is_not_what_it_was(tmp_path):
    sites = LocalSites(tmp_path / "sites")
    made = server(sites)
    made.enroll_sites()
    reply = made.enrolled["north"]
    wrong = {
        "has hansa 9": replace(reply, version="9"),
        "reports clients": replace(reply, samples={0: 5, 1: 5, 4: 5}),
        "other samples or another model": replace(reply, samples={0: 5, 1: 5, 2: 5}),
        "another model than when": replace(reply, model="00"),
        "do not add up to its samples": replace(reply, labels={0: (1,), 1: (1,), 2: (1,)}),
    }
    for text, answer in wrong.items():
        with pytest.raises(HansaError, match=text):
            made._on_enrolled("north", answer)
    assert made.enrolled["north"] is reply
    assert EnrollmentReply.from_bytes(reply.to_bytes()).samples == reply.samples


def test_clients_are_placed_once_each():
    config = from_yaml("engine: {kind: flower, sites: {a: [0, 3], b: [2, 1]}}")
    assert clients_by_site(config.engine) == {"a": (0, 3), "b": (1, 2)}
    for sites in ("{a: [0, 1], b: [1, 2]}", "{a: [0, 2]}", "{}"):
        with pytest.raises(HansaError, match="exactly one site"):
            clients_by_site(from_yaml(f"engine: {{kind: flower, sites: {sites}}}").engine)


def test_what_looks_into_clients_is_refused(tmp_path):
    for asked in ("train=true", "per_client=true", "per_client=2", "personalise.steps=3"):
        with pytest.raises(HansaError, match=rf"evaluate\.{asked.split('=')[0].split('.')[0]}: needs clients"):
            server(LocalSites(tmp_path), f"evaluate.{asked}")
    config = from_yaml(TEXT)
    with pytest.raises(HansaError, match="hansa serve"):
        build_run(config, build.load_data(config))


def test_a_policy_file_is_checked(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("factories: [mine:net]\nrounds: 20\nlabel_counts: true\nmessage: 5000000\n")
    assert Policy.load(path) == Policy(factories=("mine:net",), rounds=20, label_counts=True, message=5_000_000)
    path.write_text("rounds: 20\nfactory: [mine:net]\n")
    with pytest.raises(HansaError, match=r"policy.yaml:2: factory: .*Known: factories"):
        Policy.load(path)


class Sleeper:
    """Connections whose next check takes long once: the process was stopped. Then there is an answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.checks = seconds, 0.0, 0

    def send(self, *message) -> None: ...

    def receive(self, timeout):
        self.checks += 1
        self.now += self.seconds if self.checks == 2 else timeout
        return []

    def online(self):
        return frozenset({"north"})


@pytest.mark.parametrize(("seconds", "checks"), [(PAUSE_SECONDS - 1, 52), (1000.0, 61)])
def test_the_time_in_which_the_server_stood_still_does_not_count(seconds, checks):
    connections = Sleeper(seconds)
    transport = EnrollingTransport(
        connections, {"north": b""}, lambda *_: None, deadline=60.0, clock=lambda: connections.now
    )
    transport.send("north", b"frame")
    assert transport.receive() == []
    assert connections.checks == pytest.approx(checks, abs=1)


def test_a_server_that_died_before_round_one_starts_again(tmp_path):
    """It has written its configuration, but not yet what its sites have."""
    sites = LocalSites(tmp_path / "sites")
    first = server(sites).new(tmp_path / "run")
    first.folder.release()
    first.run.store.close()
    (first.folder / SITES).unlink()
    again = server(sites).resume(tmp_path / "run")
    again.execute()
    assert (again.folder / SITES).is_file()
    whole = server(LocalSites(tmp_path / "others")).new(tmp_path / "whole")
    whole.execute()
    assert again.folder.read_model() == whole.folder.read_model()


PACED = """
name: trial
rounds: 12
data: {name: synthetic, clients: 6}
algorithm: {preset: fedbuff}
local: {steps: 3, batch_size: 5}
sample: {participation: 0.7}
pace: {size: 2, concurrency: 3}
compress: {compressor: sign}
checkpoint: {every: 1}
engine: {kind: flower, sites: {north: 2, south: 3, west: 1}, deadline: 60}
"""


class SlowSites(LocalSites):
    """Sites that answer after so many polls each; a job that was lost on the way is sent again."""

    def __init__(self, folder, polls) -> None:
        super().__init__(folder, tuple(polls))
        self.polls, self.waiting, self.kills = polls, [], {}

    def send(self, site, ticket, data, ttl):
        self.waiting.append([self.polls[site], site, ticket, data])

    def receive(self, timeout):
        replies = []
        for entry in self.waiting:
            entry[0] -= 1
        due = [entry for entry in self.waiting if entry[0] <= 0]
        self.waiting = [entry for entry in self.waiting if entry[0] > 0]
        for _, site, ticket, data in due:
            if self.kills.get(site, 0):  # the site dies after its work: its answer is lost, its memory is on disk
                self.kills[site] -= 1
                self.agent(site).handle(data)
                self.kill(site)
                replies.append(Reply(site, ticket, b"", "5: the node is gone"))
            else:
                answer = self.agent(site).handle(data)
                self.seen.append((site, data, answer))
                replies.append(Reply(site, ticket, answer))
        return replies


POLLS = {"north": 1, "south": 2, "west": 7}


def executed(path, sites, text=PACED, *changes):
    experiment = server(sites, *changes, text=text).new(path)
    experiment.execute()
    return experiment.run


@pytest.mark.parametrize("preset", ["fadas", "ca2fl"])
def test_fast_sites_go_on_and_a_replay_has_the_same_bits(preset, tmp_path):
    text = PACED.replace("preset: fedbuff", f"preset: {preset}")
    run = executed(tmp_path / "run", SlowSites(tmp_path / "sites", POLLS), text)
    history = RunFolder(tmp_path / "run").history
    arrived = [client for record in history for client, *_ in record["arrivals"]]
    assert len(arrived) == 24
    assert 1 <= arrived.count(5) <= 3, "the slow site is in few steps"
    assert max(record["staleness_max"] for record in history) >= 3
    times = [seconds for record in history for _, _, seconds, _ in record["arrivals"]]
    assert times == sorted(set(times))
    shown = run_well("replay", tmp_path / "run")
    assert "12 server steps replayed, equal to the bit" in shown.output.replace("\n", " ")
    result = replay_run(tmp_path / "run")
    assert result.exact
    assert torch.equal(result.run.params, run.params)
    assert [r["clients"] for r in result.run.history] == [r["clients"] for r in history]
    assert [r["staleness"] for r in result.run.history] == [r["staleness"] for r in history]


def test_killed_sites_and_servers_leave_a_run_that_replays(tmp_path):
    sites = SlowSites(tmp_path / "sites", POLLS)
    sites.kills = {"north": 2, "south": 1}
    first = server(sites, text=PACED).new(tmp_path / "run")
    stops = iter([False] * 4 + [True])

    class Killed(Exception):
        pass

    def kill(run, record):
        if next(stops):
            raise Killed  # after the step's checkpoint, with jobs in flight

    with pytest.raises(Killed):
        first.execute([kill])
    for site in POLLS:
        sites.kill(site)
    sites.waiting.clear()
    second = server(sites, text=PACED).resume(tmp_path / "run")
    assert second.run.state.pace["jobs"], "jobs were in flight"
    second.execute()
    assert second.run.state.round == 12
    assert replay_run(tmp_path / "run").exact


def test_a_silent_site_loses_its_job_and_the_others_go_on(tmp_path):
    sites = SlowSites(tmp_path / "sites", POLLS)
    experiment = server(sites, "engine.deadline=1e-3", text=PACED)
    started = experiment.new(tmp_path / "run")
    sites.polls = {**POLLS, "west": 10**9}
    assert started.execute()["rounds"] == 12
    reasons = [record["reasons"] for record in RunFolder(tmp_path / "run").history]
    assert any("silent" in each for each in reasons)
    assert replay_run(tmp_path / "run").exact


def test_the_record_is_needed_and_bad_options_are_refused(tmp_path):
    plain = PACED.replace("pace: {size: 2, concurrency: 3}\n", "").replace("preset: fedbuff", "preset: fedavg")
    executed(tmp_path / "plain", LocalSites(tmp_path / "sites", tuple(POLLS)), plain, "rounds=2")
    with pytest.raises(HansaError, match="no recorded arrivals"):
        replay_run(tmp_path / "plain")
    for change, message in {
        "pace={kind: deadline, seconds: 3.0}": "engine.deadline and engine.enough",
        "profile={step_seconds: 2.0}": "sites have their own speed",
        "evaluate.where=sites": "Use server",
    }.items():
        text = PACED if "pace" not in change else PACED.replace("preset: fedbuff", "preset: fedavg")
        with pytest.raises(HansaError, match=message):
            server(LocalSites(tmp_path / "sites"), change, text=text).check()
