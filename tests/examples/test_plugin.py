"""The example of a plug-in package: installed, its names work everywhere, and its runs are equal to the bit."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import run_well
from hansa.config import build, build_algorithm, from_yaml, json_schema, load
from hansa.config.import_path import installed_plugins
from hansa.engine import auto_engine
from hansa.runs.driver import Run

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin"
NAMES = {
    "compressor": "ternary",
    "server": "lion",
    "aggregate": "geometric_median",
    "sampler": "round_robin",
    "topology": "chordal_ring",
    "preset": "server_lion",
}
SETTING = """
rounds: 3
workers: 1
data: {name: synthetic, clients: 6, options: {largest: 60}}
model: {name: mlp, options: {hidden: 5}}
algorithm: {preset: server_lion, lr: 0.02}
local: {lr: 0.05, steps: 3, batch_size: 10}
aggregate: {kind: geometric_median, iterations: 4}
uplink: {kind: error_feedback, compressor: {kind: ternary, threshold: 0.5}}
"""
ROUND_ROBIN = SETTING + "sample: {kind: round_robin, count: 3}\n"
ALL = (
    SETTING
    + """
gossip:
  topology: {kind: chordal_ring, chord: 2}
  clusters: [[0, 1, 2, 3], [4, 5]]
  reporters: {kind: round_robin, count: 3}
"""
)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Where the package is installed: the environment of the tests stays as it is."""
    place = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, place / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    arguments = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *arguments, "--target", place / "site", place / "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / "site"


@pytest.fixture
def plugged(home, tmp_path, monkeypatch):
    """The package installed, in a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "small.yaml").write_text(ROUND_ROBIN)
    installed_plugins.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    installed_plugins.cache_clear()


@pytest.fixture
def cli(plugged):
    return run_well


def trained(config, workers, kind=None):
    run = Run(
        build_algorithm(config), build.build_task(config, build.load_data(config)), seed=config.seed,
        engine=auto_engine(workers, config.rounds, kind),
    )  # fmt: skip
    run.advance(config.rounds)
    return run


def test_one_worker_two_threads_and_two_processes_are_equal_to_the_bit(plugged, caplog):
    caplog.set_level(logging.WARNING, logger="hansa")
    config = from_yaml(ALL)
    alone = trained(config, 1)
    for kind in ("thread", "process"):
        pooled = trained(config, 2, kind)
        assert torch.equal(alone.params, pooled.params), kind
        assert [record["spread"] for record in alone.history] == [record["spread"] for record in pooled.history]
    assert not caplog.records  # a pool that fell back to one worker would have said so
    started = Run(build_algorithm(config), build.build_task(config, build.load_data(config)), seed=config.seed)
    assert not torch.equal(alone.params, started.params)


def test_its_parts_are_in_what_a_file_composes(plugged):
    import hansa_plugin_example as example

    made = build_algorithm(from_yaml(ALL))
    assert made.channels["model"].uplink.compressor == example.ternary(0.5)  # type: ignore[attr-defined]
    assert made.channels["model"].server == example.lion(0.02)
    assert made.channels["model"].aggregate == example.geometric_median(4)
    assert made.local.mixing.topology == example.chordal_ring(2)
    assert made.sampler == build_algorithm(from_yaml(ROUND_ROBIN)).sampler == example.round_robin(3)


def test_its_names_are_listed(cli):
    listed = cli("parts").stdout
    for kind, name in NAMES.items():
        if kind != "preset":
            assert re.search(rf"\b{name} .*", listed), name
    assert "(hansa-plugin-example 0.1.0)" in " ".join(listed.split())
    assert "Server Lion: FedAvg's clients, Lion at the server." in cli("presets").stdout
    assert "server_lion" in json.loads(cli("presets", "--json").stdout)
    schema = json_schema()
    assert "server_lion" in schema["$defs"]["AlgorithmSection"]["properties"]["preset"]["anyOf"][0]["enum"]
    for kind, name in NAMES.items():
        if kind != "preset":
            assert name in [part.get("title") for part in schema["$defs"][kind]["anyOf"]]


def test_it_runs_compares_sweeps_and_is_reported(cli, plugged):
    cli("run", "small.yaml", "-o", "out", "-q")
    assert load(plugged / "out" / "config.yaml") == from_yaml(ROUND_ROBIN)
    cli("resume", "out", "--rounds", "4", "-q")
    cli("compare", "fedavg", "server_lion", "-c", "small.yaml", "-q", "-r", "1", "-s", "sample.count=2")
    assert "server_lion" in (plugged / "report.html").read_text()
    cli("sweep", "small.yaml", "algorithm=fedavg,server_lion", "aggregate=mean,geometric_median", "-q", "-o", "grid")
    with open(plugged / "grid" / "results.csv") as file:
        rows = {(row["algorithm"], row["aggregate"]) for row in csv.DictReader(file)}
    assert rows == {(a, b) for a in ("fedavg", "server_lion") for b in ("mean", "geometric_median")}
    cli("report", "out", "-o", "page.html")
    assert "geometric_median" in (plugged / "page.html").read_text()
    assert "0.6" in cli("topology", "chordal_ring", "-n", "8").stdout


def test_without_the_package_its_names_are_not_known():
    with pytest.raises(ValueError, match="no preset 'server_lion'"):
        from_yaml("algorithm: server_lion")


def test_the_commands_of_its_readme_are_commands(cli):
    text = (PACKAGE / "README.md").read_text()
    quick = ["--set", "model=logistic", "--set", "local.steps=1", "--set", "workers=1", "--rounds", "1", "--quiet"]
    for line in re.findall(r"^hansa (.*)$", text, flags=re.MULTILINE):
        arguments = shlex.split(line)
        cli(*arguments, *(quick if arguments[0] in ("compare", "sweep") else []))
