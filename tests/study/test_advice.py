"""What `hansa advise` predicts, against what runs really send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import hansa
from hansa.compress import replica, sign
from hansa.config import from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import Population
from hansa.gossip import complete, exponential
from hansa.gossip.theory import afga_theorem
from hansa.rounds.ledger import LinkModel
from hansa.runs.experiment import Experiment
from hansa.sample import per_cluster, uniform
from hansa.study.advice import NetworkProfile, list_options, packet_bytes, pareto_front, rank_options

LINKS = LinkModel(up_bandwidth=1e5, down_bandwidth=4e5, latency=0.5, peer_bandwidth=1e6, peer_latency=0.05)


def called(*arguments: str) -> Any:
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["advise", *arguments])


@pytest.mark.parametrize("name", ["none", "sign"])
@pytest.mark.parametrize("method", ["plain", "ha_fed", "cafga"])
def test_bytes_and_time_of_a_round_are_those_of_a_run(name: str, method: str, tmp_path: Path) -> None:
    network = NetworkProfile(parameters=610, clients=12, participants=4, links=LINKS)
    found = [option for option in list_options(network, steps=(3,)) if option.compressor == name and not option.two_way]
    option = next(one for one in found if one.method == method or (method == "plain" and not one.topology))
    base = {
        "data": {"name": "synthetic", "clients": 12, "options": {"largest": 60}},
        "model": "logistic",
        "rounds": 1,
        "workers": 1,
        "links": {field: getattr(LINKS, field) for field in ("up_bandwidth", "down_bandwidth", "latency")}
        | {"peer_bandwidth": 1e6, "peer_latency": 0.05},
        **option.document(),
    }
    made = Experiment.new(from_yaml(yaml.safe_dump(base)), tmp_path / "run")
    made.execute([])
    record = made.run.history[0]
    assert (record["up_bytes"], record["down_bytes"]) == (option.up_bytes, option.down_bytes)
    assert record["peer_bytes"] == option.peer_bytes
    assert record["simulated_seconds"] == pytest.approx(option.seconds)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(60, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(x)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fedams", "ha_fed"])
def test_bytes_include_the_statistics_of_batchnorm(method: str) -> None:
    network = NetworkProfile(parameters=60 * 4 + 4 * 2 + 4 * 10 + 10, clients=12, participants=4, buffers=4 * 2)
    options = list_options(network, steps=(2,), compressors=["none"])
    option = next(one for one in options if one.method == method)
    common: dict[str, Any] = {"local_lr": 0.1, "steps": 2}
    if method == "fedams":
        algorithm = hansa.presets.fedams(sampler=uniform(count=option.participants), **common)
    else:
        graphs = {"complete": hansa.gossip.complete(), "ring": hansa.gossip.ring(), "exponential": exponential()}
        topology = graphs[option.topology]
        algorithm = hansa.presets.ha_fed(
            clusters=option.clusters, reporters=option.reporters, topology=topology, **common
        )
    task = hansa.Task(Net, nn.CrossEntropyLoss(), hansa.data.synthetic(clients=12, largest=60))
    (record,) = hansa.run(algorithm, task, rounds=1, workers=1).history
    actual = record["up_bytes"], record["down_bytes"], record["peer_bytes"]
    assert actual == (option.up_bytes, option.down_bytes, option.peer_bytes)


@pytest.mark.parametrize("method", ["fedcams", "ha_fed"])
def test_two_way_bytes_are_the_expectation_over_missed_rounds(method: str) -> None:
    network = NetworkProfile(parameters=610, clients=12, participants=5)  # of which 4 in 4 clusters
    options = [one for one in list_options(network, steps=(2,), compressors=["sign"]) if one.two_way]
    option = max((one for one in options if one.method == method), key=lambda one: one.clusters)
    assert option.participants == (5 if method == "fedcams" else 4)
    link, x, key = replica(sign()), torch.zeros(610), Key(3)
    trios = tuple((first, first + 1, first + 2) for first in range(0, 12, 3))
    sampler = per_cluster(1, trios) if option.clusters else uniform(count=5)
    state, sent = link.init(x), []
    for number in range(400):
        chosen = sampler.select(number, Population((1,) * 12), key)
        x = x + torch.randn(610, generator=key.child(number).torch())
        broadcast, state = link.broadcast(x, state, chosen, number, key)
        sent.append(sum(broadcast.nbytes(client) for client in chosen))
        state = link.acknowledge(state, chosen, number)
    assert sum(sent[50:]) / 350 == pytest.approx(option.down_bytes, rel=0.03)


def test_what_is_advised_has_the_participants_of_its_theorem(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = called("--parameters", "1e5", "--clients", "64", "--participants", "16", "--peer", "1e7", "-q")
    assert result.exit_code == 0, result.output
    advised = from_yaml((tmp_path / "advice" / "advised.yaml").read_text())
    network = NetworkProfile(100_000, 64, 16, LinkModel(1e6, 4e6, 0.1, 1e7, 0.01), 0.05)
    first = rank_options(list_options(network), 500)[0]
    assert advised.gossip is not None
    assert advised.gossip.reporters == first.reporters
    assert first.participants == 16
    assert advised.gossip.clusters * first.reporters == 16
    assert "Theorem D.3" in first.why
    assert "holds, more local steps save rounds" in (tmp_path / "advice" / "advised.yaml").read_text().splitlines()[0]
    assert afga_theorem(complete(), [64 // first.clusters] * first.clusters, advised.gossip.reporters or 1).holds


def test_every_option_is_a_configuration_with_its_participants() -> None:
    for clients, participants in ((12, 4), (12, 5), (64, 16), (10, 10)):
        network = NetworkProfile(parameters=100, clients=clients, participants=participants)
        for option in list_options(network, steps=(1, 2)):
            document = option.document()
            sampled = document.get("sample", {}).get("count")
            assert (sampled or option.reporters * option.clusters) == option.participants, option.name
            assert option.participants <= participants


def test_compressors_multiply_the_rounds() -> None:
    network = NetworkProfile(parameters=2**20, clients=64, participants=64, peers=False)
    rounds = {(one.compressor, one.two_way): one.rounds for one in list_options(network, steps=(1,))}
    assert rounds["none", False] == 1.0
    assert rounds["sign", False] == pytest.approx(1 / (1 - (1 - 2 / 3.14159265) ** 0.5), rel=1e-6)
    assert rounds["top_k 1/256", False] == pytest.approx(511.5, rel=1e-3)
    assert rounds["sign", True] == pytest.approx(rounds["sign", False] ** 2)
    first = rank_options(list_options(network, steps=(1,)), 500)[0]
    assert (first.compressor, first.two_way) == ("sign", True)


def test_packets_of_large_models_are_scaled() -> None:
    assert packet_bytes(None, 3_000_000) == 3_000_000 * 4 + packet_bytes(None, 1) - 4


def test_orders_follow_the_theorems() -> None:
    part = list_options(NetworkProfile(parameters=100, clients=64, participants=8), steps=(1, 10))
    plain = {option.steps: option.rounds for option in part if option.method == "fedams"}
    assert plain == {1: 1.0, 10: 10.0}
    full = list_options(NetworkProfile(parameters=100, clients=64, participants=64), steps=(1, 10))
    assert {option.steps: option.rounds for option in full if option.method == "fedams"} == {1: 1.0, 10: 0.1}
    plain_links = [option for option in part if option.compressor == "none"]
    dense = [option for option in plain_links if option.method == "ha_fed" and option.topology == "complete"]
    assert all(option.rounds == 0.1 for option in dense if "does not" not in option.why)
    assert any("does not hold" in option.why for option in part if option.topology == "ring")


def test_without_peers_nobody_gossips() -> None:
    found = list_options(NetworkProfile(parameters=100, clients=16, participants=4, peers=False))
    assert {option.method for option in found} == {"fedams", "fedcams"}


def test_the_front_is_not_beaten() -> None:
    found = list_options(NetworkProfile(parameters=100_000, clients=40, participants=8, links=LINKS, step_seconds=0.01))
    kept = pareto_front(found, 100)
    for one in kept:
        beaten = [o for o in found if o.bytes(100) < one.bytes(100) and o.hours(100) < one.hours(100)]
        assert beaten == []
    assert rank_options(found, 100)[0] == kept[0]
    assert rank_options(found, 100, "hours")[0].hours(100) == kept[-1].hours(100)


def test_the_command_writes_a_configuration_that_runs_and_pilots(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "rounds: 5\nworkers: 1\ndata: {name: synthetic, clients: 12, options: {largest: 60}}\nmodel: logistic\n"
        "local: {lr: 0.05, epochs: 1, batch_size: 10}\nsample: {count: 4}\n"
    )
    result = called(
        "mine.yaml", "--participants", "4", "--peer", "1e6", "--steps", "1,5", "--pilot", "2", "--top", "3", "-q"
    )
    assert result.exit_code == 0, result.output
    advised = from_yaml((tmp_path / "advice" / "advised.yaml").read_text())
    assert advised.data.name == "synthetic"
    assert advised.links is not None
    assert len(list((tmp_path / "advice" / "pilots").glob("*/metrics.jsonl"))) == 3
    assert (tmp_path / "advice" / "pilots.html").is_file()
    assert (tmp_path / "advice" / "front.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e6"], "expected both, or a configuration"),
        (["--parameters", "1e6", "--clients", "10", "--bytes", "1", "--hours", "1"], "expected one of the two"),
        (["--parameters", "1e6", "--clients", "10", "--pilot", "3"], "needs a configuration"),
        (["--parameters", "1e6", "--clients", "10", "--steps", "a"], "expected integers"),
        (["--parameters", "1e6", "--clients", "10", "--participants", "11"], "at most clients=10"),
    ],
)
def test_bad_words(arguments: list[str], message: str) -> None:
    result = called(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_rank_by_something_else() -> None:
    with pytest.raises(HansaError, match="expected 'bytes' or 'hours'"):
        rank_options([], 1, "money")
