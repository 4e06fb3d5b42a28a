"""Asynchronous rounds over sites: no step waits for the slowest, and a replay has the same bits, also after kills."""

from __future__ import annotations

import pytest
import torch

from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
from command_line import CliRunner
from federation.local_sites import LocalSites, server
from hansa.core.errors import HansaError
from hansa.federation.messages import Reply
from hansa.federation.server import replay_run
from hansa.runs.folder import RunFolder

TEXT = """
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


def executed(path, sites, text=TEXT, *changes):
    experiment = server(sites, *changes, text=text).new(path)
    experiment.execute()
    return experiment.run


@pytest.mark.parametrize("preset", ["fadas", "ca2fl"])
def test_fast_sites_go_on_and_a_replay_has_the_same_bits(preset, tmp_path):
    text = TEXT.replace("preset: fedbuff", f"preset: {preset}")
    run = executed(tmp_path / "run", SlowSites(tmp_path / "sites", POLLS), text)
    history = RunFolder(tmp_path / "run").history
    arrived = [client for record in history for client, *_ in record["arrivals"]]
    assert len(arrived) == 24
    assert 1 <= arrived.count(5) <= 3, "the slow site is in few steps"
    assert max(record["staleness_max"] for record in history) >= 3
    times = [seconds for record in history for _, _, seconds, _ in record["arrivals"]]
    assert times == sorted(set(times))
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "12 server steps replayed, equal to the bit" in shown.output.replace("\n", " ")
    result = replay_run(tmp_path / "run")
    assert result.exact
    assert torch.equal(result.run.params, run.params)
    assert [r["clients"] for r in result.run.history] == [r["clients"] for r in history]
    assert [r["staleness"] for r in result.run.history] == [r["staleness"] for r in history]


def test_killed_sites_and_servers_leave_a_run_that_replays(tmp_path):
    sites = SlowSites(tmp_path / "sites", POLLS)
    sites.kills = {"north": 2, "south": 1}
    first = server(sites, text=TEXT).new(tmp_path / "run")
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
    second = server(sites, text=TEXT).resume(tmp_path / "run")
    assert second.run.state.pace["jobs"], "jobs were in flight"
    second.execute()
    assert second.run.state.round == 12
    assert replay_run(tmp_path / "run").exact


def test_a_silent_site_loses_its_job_and_the_others_go_on(tmp_path):
    sites = SlowSites(tmp_path / "sites", POLLS)
    experiment = server(sites, "engine.deadline=1e-3", text=TEXT)
    started = experiment.new(tmp_path / "run")
    sites.polls = {**POLLS, "west": 10**9}
    assert started.execute()["rounds"] == 12
    reasons = [record["reasons"] for record in RunFolder(tmp_path / "run").history]
    assert any("silent" in each for each in reasons)
    assert replay_run(tmp_path / "run").exact


def test_the_record_is_needed_and_bad_options_are_refused(tmp_path):
    plain = TEXT.replace("pace: {size: 2, concurrency: 3}\n", "").replace("preset: fedbuff", "preset: fedavg")
    executed(tmp_path / "plain", LocalSites(tmp_path / "sites", tuple(POLLS)), plain, "rounds=2")
    with pytest.raises(HansaError, match="no recorded arrivals"):
        replay_run(tmp_path / "plain")
    for change, message in {
        "pace={kind: deadline, seconds: 3.0}": "engine.deadline and engine.enough",
        "profile={step_seconds: 2.0}": "sites have their own speed",
        "evaluate.where=sites": "Use server",
    }.items():
        text = TEXT if "pace" not in change else TEXT.replace("preset: fedbuff", "preset: fedavg")
        with pytest.raises(HansaError, match=message):
            server(LocalSites(tmp_path / "sites"), change, text=text).check()
