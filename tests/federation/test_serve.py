"""Server, sites and what is between them, without a network: equal to a simulation, bounded, or refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from command_line import run_well
from federation.problems import TEXT, LocalSites, same, server
from hansa import __version__
from hansa.compress import decode
from hansa.config import build, from_yaml
from hansa.core.errors import HansaError
from hansa.core.types import MODEL
from hansa.core.vectors.arithmetic import fingerprint
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
    RoundReports,
    RunOver,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    pack_batch,
    unpack_batch,
)
from hansa.federation.policy import REDONE, Policy
from hansa.federation.server import SITES, clients_by_site, replay_run
from hansa.federation.site import Agent, DataSource
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast
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


POLICY = Policy(rounds=2, steps=3, test_rows=10, trainings=5, evaluations=4)
CHANGES = ("rounds=2", "sample=null", "evaluate.where=sites")


@pytest.fixture
def asked(tmp_path):
    """The agent of a site after an honest run of two rounds, and the frames that it was sent."""
    sites = LocalSites(tmp_path / "sites", policy=POLICY)
    server(sites, *CHANGES).new(tmp_path / "run").execute()
    frames = [part for site, sent, _ in sites.seen if site == "north" for part in unpack_batch(sent)]
    agent = sites.agent("north")
    return agent, [part for part in frames if wire_format.kind_of(part) in ("orders", "exam")]


def of_kind(frames, kind):
    read: Any = {"orders": RoundOrders.from_bytes, "exam": SiteEvaluationRequest.from_bytes}[kind]
    return [read(part) for part in frames if wire_format.kind_of(part) == kind]


def other_model(message, number):
    """The same message about another model."""
    packet = message.broadcasts[MODEL].packets[0]
    vector = decode(packet, dim=packet.dim, dtype=torch.float32, kind="whole") * (1 + 0.01 * number)
    broadcasts = {**message.broadcasts, MODEL: Broadcast.whole(vector, message.broadcasts[MODEL].version)}
    if isinstance(message, RoundOrders):
        return replace(message, broadcasts=broadcasts, digests={**message.digests, MODEL: fingerprint(vector)})
    return replace(message, broadcasts=broadcasts, digest=fingerprint(vector))


def answer(agent, message):
    """Return the reply to a message, or the code of its refusal."""
    data = agent.handle(message.to_bytes())
    if wire_format.kind_of(data) == "refused":
        return Refusal.from_bytes(data).reason
    return (RoundReports if isinstance(message, RoundOrders) else SiteEvaluationReply).from_bytes(data)


def reasons(reports):
    return {dropped.reason for report in reports.reports for dropped in report.dropped}


def test_evaluations_are_bounded_by_rounds_and_by_a_budget_over_runs_and_restarts(asked, tmp_path):
    agent, frames = asked
    last = of_kind(frames, "exam")[-1]
    assert answer(agent, replace(last, round=100_000)) == "rounds"
    assert [answer(agent, other_model(last, number)) for number in range(1, 300)] == ["budget"] * 299
    for _ in range(3):
        assert isinstance(answer(agent, last), SiteEvaluationReply), "what was answered before is answered again"
    again = Agent("north", agent.source, agent.folder, POLICY.model_copy(update={"rounds": 9}))
    assert answer(again, other_model(last, 1)).rows, "a policy with more rounds"
    agent = Agent("north", agent.source, agent.folder, POLICY.model_copy(update={"rounds": 9}))
    assert answer(agent, other_model(last, 2)).rows
    assert answer(agent, other_model(of_kind(frames, "exam")[0], 3)) == "budget", "over all runs"


def test_trainings_of_a_client_are_bounded_and_a_repeated_order_costs_nothing(asked):
    agent, frames = asked
    first = of_kind(frames, "orders")[0]
    whole = other_model(first, 0)
    honest = agent.handle(whole.to_bytes())
    agent.handle(RunOver().to_bytes())
    assert agent.handle(whole.to_bytes()) == honest, "the same bytes, computed again"
    assert [reasons(answer(agent, other_model(first, number))) for number in range(1, 20)] == [{"budget"}] * 19


def test_rounds_that_are_asked_for_again_are_few(asked):
    agent, frames = asked
    agent = Agent("north", agent.source, agent.folder, Policy())
    first = of_kind(frames, "orders")[0]
    found = [reasons(answer(agent, other_model(first, number))) for number in range(1, 20)]
    assert found == [set()] * (REDONE - 1) + [{"budget"}] * (20 - REDONE)


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (3, 4), (2, 5)])
def test_work_is_that_of_the_configuration(steps, batch, asked):
    agent, frames = asked
    first = other_model(of_kind(frames, "orders")[0], 0)
    work = first.orders[0].works[0]._replace(steps=steps, batch_size=batch)
    changed = tuple(replace(order, works=(work,)) for order in first.orders)
    assert answer(agent, replace(first, orders=changed)) == "work"
    meaned = tuple(replace(order, mean=True) for order in first.orders)
    assert answer(agent, replace(first, orders=meaned)) == "work"
    other_key = tuple(replace(order, key=order.key.child("other")) for order in first.orders)
    assert answer(agent, replace(first, orders=other_key)) == "work"


def test_an_update_of_few_rows_never_leaves_a_site(tmp_path):
    plain = ("local={steps: 1, batch_size: 1}", "sample=null")
    text = refused(LocalSites(tmp_path / "a"), *plain)
    assert "min_rows" in text
    some = LocalSites(tmp_path / "b", policy=Policy(min_rows=60))
    changes = ("local={epochs: 1}", "sample=null", "rounds=1")
    made = server(some, *changes)
    experiment = made.new(tmp_path / "run")
    experiment.execute()
    few = [client for client, count in enumerate(made.facts["samples"]) if count < 60]
    assert few, "the data has small clients"
    assert experiment.run.history[-1]["reasons"] == {"rows": len(few)}
    assert set(experiment.run.history[-1]["clients"]).isdisjoint(few)


def enroll(agent, text, **changes):
    request = EnrollmentRequest("north", __version__, text, (0,), 1)
    return Refusal.from_bytes(agent.handle(replace(request, **changes).to_bytes())).reason


def test_a_site_opens_no_file_that_a_configuration_names(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    shared = Agent("north", DataSource(build.load_data, shared=True), tmp_path / "north")
    own = Agent("north", DataSource(lambda _: pytest.fail("loaded")), tmp_path / "own")
    for agent in (shared, own):
        text = f"rounds: 1\nprofile: {{kind: device_table, path: {tmp_path}/fifo}}"
        assert enroll(agent, text) == "config"
    for data in (
        f"{{name: csv-folder, folder: {tmp_path}, options: {{target: y}}}}",
        "{name: fashion-mini, folder: data}",
        f"{{name: fashion-mini, partition: {{kind: saved_split, path: {tmp_path}/fifo}}}}",
    ):
        assert enroll(shared, f"rounds: 1\ndata: {data}") == "paths", data


def test_a_model_is_counted_before_memory_is_allocated_for_it(tmp_path):
    agent = Agent("north", DataSource(build.load_data, shared=True), tmp_path / "north")
    text = "rounds: 1\ndata: {name: synthetic, clients: 1}\nmodel: {name: mlp, options: {hidden: [80000, 80000]}}"
    assert enroll(agent, text) == "parameters"
    assert "permits 1,000,000,000" in agent.exchange_log.exchanges[-1].refusal
    small = Agent("north", agent.source, tmp_path / "small", Policy(parameters=500))
    assert enroll(small, text.replace("80000, 80000", "20")) == "parameters"


@pytest.mark.parametrize(
    "said", [{"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}], ids=lambda said: str(said["loss"])
)
def test_a_loss_that_is_not_finite_is_recorded_and_ends_nothing(said):
    honest = SiteEvaluationReply("run", 0, b"", 10, 5.0, 10.0, 9.0, 10.0)
    check_reply("south", replace(honest, **said), None)
    metrics = combine_replies({"north": honest, "south": replace(honest, **said)}).metrics
    assert math.isnan(metrics["sites_test_loss"])
    assert math.isnan(metrics["sites_test_loss_std"])
    assert metrics["sites_test_accuracy"] == 0.9


def test_a_site_that_lies_about_its_sums_is_left_out_with_the_reason(tmp_path):
    honest = SiteEvaluationReply("run", 0, b"", 10, 5.0, 10.0, 9.0, 10.0)
    for name, values in {"weight": (math.inf, math.nan, 1e300, 0.0, -1.0), "labels": (math.inf, math.nan, 1e300),
                         "hits": (math.nan, 1e6, 11.0)}.items():  # fmt: skip
        for value in values:
            with pytest.raises(HansaError, match="impossible sums"):
                check_reply("south", replace(honest, **{name: value}), None)

    class Lying(LocalSites):
        def send(self, site, ticket, data, ttl):
            super().send(site, ticket, data, ttl)
            parts = unpack_batch(self.inbox[-1].data)
            if site == "south" and wire_format.kind_of(parts[-1]) == "marks":
                lie = replace(SiteEvaluationReply.from_bytes(parts[-1]), weight=math.inf).to_bytes()
                self.inbox[-1] = self.inbox[-1]._replace(data=lie)

    experiment = server(Lying(tmp_path / "sites"), *CHANGES).new(tmp_path / "run")
    experiment.execute()
    record = experiment.run.history[-1]
    assert "impossible sums" in record["left_out"]["south"]
    assert record["north/test_rows"] == record["sites_test_rows"]
    assert math.isfinite(record["sites_test_loss"])


def test_a_site_with_few_test_rows_and_every_refusing_site_is_named(tmp_path):
    policies = {"north": Policy(test_rows=10**6), "south": Policy(evaluations=1)}
    experiment = server(LocalSites(tmp_path / "sites", policy=policies), *CHANGES).new(tmp_path / "run")
    experiment.execute()
    left_out = experiment.run.history[-1]["left_out"]
    assert left_out["north"] == "fewer test rows than its policy permits to report"
    assert left_out["south"].startswith("budget:")
    shown = run_well("show", tmp_path / "run").output
    assert {line.split()[0] for line in shown.splitlines() if line} >= {"north", "south"}, "a row for each site"
    assert "without north: fewer test rows" in shown
    text = refused(LocalSites(tmp_path / "others", policy=Policy(rounds=1)), *CHANGES)
    assert text.count("does not take part: rounds:") == 2


@pytest.mark.parametrize(
    "said",
    [{"samples": 10**12}, {"samples": 1 << 70}, {"labels": (3, 4)}, {"version": "\x1b]0;title\a"}],
    ids=lambda said: next(iter(said)),
)
def test_what_a_site_says_of_itself_is_bounded(said, tmp_path):
    class Boasting(LocalSites):
        def send(self, site, ticket, data, ttl):
            super().send(site, ticket, data, ttl)
            parts = unpack_batch(self.inbox[-1].data)
            if site == "south" and wire_format.kind_of(parts[0]) == "hello":
                self.inbox[-1] = self.inbox[-1]._replace(data=_boast(parts[0], said))

    made = server(Boasting(tmp_path / "sites", policy=Policy(label_counts=True)), *CHANGES)
    if said == {"samples": 10**12}:
        made.new(tmp_path / "run").run.store.close()
        assert max(made.facts["samples"]) == 10**12, "a number is not memory"
        return
    with pytest.raises(HansaError, match="site south does not take part") as error:
        made.enroll_sites()
    assert str(error.value).isprintable()


def _boast(reply, said):
    frame = wire_format.unpack(reply, "hello")
    head = dict(frame.head)
    first = min(head["samples"])
    if "samples" in said:
        head["labels"] = {}
        head["samples"] = {**head["samples"], first: said["samples"]}
    if "labels" in said:
        count = head["samples"][first]
        head["labels"] = {**head["labels"], first: [count - 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]}
    if "version" in said:
        head["version"] = said["version"]
    return wire_format.pack("hello", head)


def test_a_resumed_run_keeps_its_settings_and_its_sites(tmp_path):
    sites = LocalSites(tmp_path / "sites")
    server(sites, *CHANGES).new(tmp_path / "run").execute()
    for change in (
        "engine.sites={north: 3, south: 3, west: 1}",
        "engine.sites={north: 3}",
        "engine.sites={a: 3, b: 3}",
    ):
        with pytest.raises(HansaError, match=r"engine\.sites: the run has \{'north'"):
            server(sites, *CHANGES, change).resume(tmp_path / "run")
    other = server(sites, *CHANGES, "local.lr=50")
    again = other.resume(tmp_path / "run", rounds=3)
    assert "lr: 50" not in EnrollmentRequest.from_bytes(other.transport.enrollments["north"]).config
    again.execute()


def test_damaged_counts_are_told_with_the_remedy(tmp_path):
    (tmp_path / "usage.sqlite").write_bytes(b"nonsense" * 100)
    with pytest.raises(HansaError, match=r"usage\.sqlite: the counts .* are damaged"):
        Agent("north", DataSource(build.load_data, shared=True), tmp_path)
