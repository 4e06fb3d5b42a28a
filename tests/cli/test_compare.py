"""Comparisons, reports, the demo, and methods and components of one's own from a module in the current folder."""

from __future__ import annotations

import csv
import json
import re
import sys

import pytest

from hansa.cli.compare import METHODS
from hansa.runs.folder import RunFolder


def ranked(text):
    """Rank and name of each row of a printed table."""
    return re.findall(r"^ *(\d+) +(.+?)  +\d", text, flags=re.MULTILINE)


def compared(folder, name):
    """The configuration with which a method was compared."""
    (path,) = (folder / "runs" / "compare").glob(f"{name}-*")
    return RunFolder(path).config


def test_presets_take_the_setting_of_a_file_and_say_what_they_do_not_take(cli, folder):
    ams = "algorithm: fedams\nserver: {lr: 0.7, eps: 1e-4, weights: samples}\ncompress: {compressor: sign}\n"
    (folder / "ams.yaml").write_text((folder / "small.yaml").read_text("utf-8") + ams + "sample: {count: 3}\n")
    result = cli.ok("compare", "fedavg", "fedams", "cafga", "-c", "ams.yaml", "-q", "-r", "1", "-s", "local.steps=1")
    assert sorted(name for _, name in ranked(result.stdout)) == ["cafga", "fedams", "fedavg"]
    assert (folder / "report.html").read_text("utf-8").count('data-run="') == 3
    for name in ("fedavg", "fedams", "cafga"):
        config, own = compared(folder, name), name == "fedams"  # the file's own method is the file's
        assert config.algorithm.preset == name
        assert (config.sample is None) == (name == "cafga")  # whose reporters are those of its clusters
        assert (config.local.lr, config.local.steps, config.server.weights) == (0.05, 1, "samples")
        assert (config.server.lr, config.server.eps) == ((0.7, 1e-4) if own else (None, None)), name
        assert (config.compress.compressor is not None) == own
        left_out = "server, compress, sample" if name == "cafga" else "server, compress"
        assert (f"{name}: not taken from ams.yaml: {left_out}" in result.stderr) == (not own)


def test_files_and_finished_runs_compare_without_running_them_again(cli, folder):
    cli.ok("run", "small.yaml", "-o", "done", "-q")
    before = (folder / "done" / "summary.json").stat().st_mtime_ns
    (folder / "other.yaml").write_text((folder / "small.yaml").read_text("utf-8").replace("name: small", "name: other"))
    result = cli.ok("compare", "done", "other.yaml", "-q", "--report", "both.html")
    assert {name for _, name in ranked(result.stdout)} == {"small", "other"}
    assert (folder / "done" / "summary.json").stat().st_mtime_ns == before
    assert (folder / "both.html").exists()


def test_a_report_is_made_of_folders(cli, folder):
    for seed in (0, 1):
        cli.ok("run", "small.yaml", "-o", f"s{seed}", "-q", "--seed", seed)
    cli.ok("run", "small.yaml", "-o", "other", "-q", "-s", "local.lr=0.2")
    cli.ok("report", "s0", "other", "s1", "-o", "page.html", "--title", "Two seeds")
    page = (folder / "page.html").read_text("utf-8")
    assert "<title>Two seeds</title>" in page
    assert "mcmahan2017" in page
    first, second = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["runs"]
    assert (first["name"], first["seeds"]) == ("small", [0, 1])  # seeds are no methods
    assert (second["name"], second["seeds"]) == ("other", [None])


def test_the_demo_prints_a_ranked_table_of_all_its_methods_and_writes_the_report(cli, folder):
    result = cli.ok("demo", "--tiny", "--workers", "1")
    rows = ranked(result.stdout)
    assert [int(place) for place, _ in rows] == list(range(1, len(METHODS) + 1))
    assert {name for _, name in rows} == set(METHODS)
    page = (folder / "report.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    for run in data["runs"]:
        for axis in ("round", "bits", "simulated_total_seconds"):
            assert len(run["series"][0][axis]) == 2, (run["name"], axis)
    assert "Label distribution" in page
    (place,) = (folder / "runs" / "demo").glob("fedavg-*")
    assert RunFolder(place).config.data.name == "fashion-mini"
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout


MINE = '''
from dataclasses import dataclass
from typing import ClassVar
import hansa

@dataclass(frozen=True, slots=True)
class halved:
    """step = delta / by."""
    by: float = 2.0
    cites: ClassVar[tuple[str, ...]] = ("@misc{mine2026,\\n  title = {Halving}\\n}",)

    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta / self.by, state

@hansa.component
def careful(*, by=2.0, **common):
    """FedAvg with half a step."""
    return hansa.presets.fedavg(**common).with_server(halved(by))
'''


@pytest.fixture
def own(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "cli_of_mine.py").write_text(MINE)
    yield folder
    sys.modules.pop("cli_of_mine", None)


def test_a_sweep_goes_over_methods_and_their_words(cli, own):
    arguments = ["algorithm=fedavg,cli_of_mine:careful,{preset: 'cli_of_mine:careful', by: 8.0}"]
    cli.ok("sweep", "small.yaml", *arguments, "-q", "-o", "grid", "-r", "1")
    with open(own / "grid" / "results.csv") as file:
        rows = [row["algorithm"] for row in csv.DictReader(file)]
    assert sorted(rows) == ["cli_of_mine:careful", "fedavg", "{preset: 'cli_of_mine:careful', by: 8.0}"]
    cli.ok("sweep", "cli_of_mine:careful", "algorithm.by=2.0,4.0", "-q", "-o", "by", "-r", "1", "-s", "model=logistic")


def test_a_part_of_ones_own_is_set_shown_run_and_resumed(cli, own):
    part = ["-s", "server.optimizer={kind: 'cli_of_mine:halved', by: 4.0}"]
    assert "# own component, not loaded: cli_of_mine:halved" in cli("config", "show", "small.yaml", *part).stdout
    assert "halved(by=2.0)" in cli("config", "show", "cli_of_mine:careful").stdout
    cli.ok("run", "small.yaml", "-o", "out", "-q", "-r", "2", *part)
    cli.ok("resume", "out", "-r", "3", "-q")
    cli.ok("run", "small.yaml", "-o", "whole", "-q", "-r", "3", *part)
    assert (own / "out" / "model.safetensors").read_bytes() == (own / "whole" / "model.safetensors").read_bytes()


def test_it_is_looked_at_like_a_preset(cli, own):
    output = " ".join(cli("presets", "cli_of_mine:careful").stdout.split())
    assert "FedAvg with half a step." in output
    assert "by=2.0" in output
    assert "mine2026" in cli("cite", "cli_of_mine:careful").stdout
    cli.ok("run", "cli_of_mine:careful", "-r", "1", "-q", "-s", "model=logistic", "-s", "workers=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "cli_of_nobody:careful"], "the module cannot be imported"),
        (["run", "cli_broken:x"], "ZeroDivisionError: division by zero"),
        (["compare", "cli_of_mine:carefull"], "Did you mean careful?"),
        (["run", "small.yaml", "-s", "server.optimizer={kind: 'cli_of_mine:halved', bye: 1}"], "Did you mean by?"),
    ],
)
def test_what_is_not_there_ends_with_2_and_a_near_match(cli, own, arguments, message):
    (own / "cli_broken.py").write_text("import hansa\n\nx = 1 / 0\n")
    assert message in cli.refused(*arguments).stderr


def test_a_run_can_be_looked_at_when_its_code_is_gone(cli, own):
    cli.ok("run", "small.yaml", "-s", "algorithm=cli_of_mine:careful", "-o", "out", "-q", "-r", "1")
    (own / "cli_of_mine.py").unlink()
    sys.modules.pop("cli_of_mine")
    assert "out (finished)" in cli("show", "out").stdout
    cli.ok("report", "out", "-o", "page.html")
    assert "mine2026" in (own / "page.html").read_text("utf-8")
    assert "cli_of_mine:careful" in (own / "page.html").read_text("utf-8")
    assert "mine2026" in cli("cite", "out").stdout
    gone = cli.refused("resume", "out", "-r", "2", "-q")
    assert "cli_of_mine" in gone.stderr
