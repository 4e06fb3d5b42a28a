"""What a server may ask of a site, and what a site may say to a server: bounds that hold against a dishonest side."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from command_line import run_well
from federation.problems import LocalSites, server
from federation.test_serve import refused
from hansa import __version__
from hansa.compress import decode
from hansa.config import build
from hansa.core.errors import HansaError
from hansa.core.types import MODEL
from hansa.core.vectors.arithmetic import fingerprint
from hansa.federation.messages import (
    EnrollmentRequest,
    Refusal,
    RoundOrders,
    RoundReports,
    RunOver,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    unpack_batch,
)
from hansa.federation.policy import REDONE, Policy
from hansa.federation.site import Agent, DataSource
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast

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
