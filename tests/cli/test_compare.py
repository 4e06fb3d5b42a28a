"""``hansa compare``, ``hansa report`` and ``hansa demo``."""

from __future__ import annotations

import json
import re

import pytest

from hansa.cli.compare import _read_item
from hansa.cli.demo import METHODS, demo_configs
from hansa.config import build_algorithm
from hansa.core.errors import HansaError
from hansa.runs.folder import RunFolder


def ranked(text):
    """Rank and name of each row of a printed table."""
    return re.findall(r"^ *(\d+) +(.+?)  +\d", text, flags=re.MULTILINE)


def test_presets_on_a_shared_file_are_run_ranked_and_reported(cli, folder):
    result = cli("compare", "fedavg", "fedams", "-c", "small.yaml", "-s", "rounds=2", "-q")
    assert result.exit_code == 0, result.output
    assert sorted(name for _, name in ranked(result.stdout)) == ["fedams", "fedavg"]
    assert (folder / "report.html").read_text("utf-8").count('data-run="') == 2
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout
    presets = {RunFolder(path).config.algorithm.preset for path in (folder / "runs" / "compare").glob("fed*")}
    assert presets == {"fedavg", "fedams"}


def compared(folder, name):
    """The configuration with which a method was compared."""
    (path,) = (folder / "runs" / "compare").glob(f"{name}-*")
    return RunFolder(path).config


def test_presets_take_of_a_file_what_they_understand_and_say_what_they_do_not(cli, folder):
    (folder / "ams.yaml").write_text(
        (folder / "small.yaml").read_text("utf-8")
        + "algorithm: fedams\nserver: {lr: 0.7, eps: 1e-4}\ncompress: {compressor: sign}\naggregate: median\n"
    )
    result = cli("compare", "fedavg", "fedadam", "fedams", "-c", "ams.yaml", "-q", "-r", "1")
    assert result.exit_code == 0, result.output
    for name in ("fedavg", "fedadam", "fedams"):
        config = compared(folder, name)
        assert config.local.lr == 0.05
        assert config.compress.compressor == {"kind": "sign"}
        server = (
            (None, None) if name == "fedavg" else (0.7, 1e-4)
        )  # another kind of server: its rate is no rate for this
        assert (config.server.lr, config.server.eps) == server, name
        assert (config.aggregate is None) == (name != "fedams")  # the file's own method is the file's
    assert "fedavg: not taken from ams.yaml: server.lr, server.eps, aggregate" in result.stderr
    assert "fedadam: not taken from ams.yaml: aggregate" in result.stderr
    assert "fedams: not taken" not in result.stderr


def test_a_comparison_given_again_runs_nothing_and_one_of_more_rounds_goes_on(cli, folder):
    arguments = ["compare", "fedavg", "fedadam", "-c", "small.yaml", "-q"]
    assert cli(*arguments).exit_code == 0
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "runs" / "compare").glob("*/metrics.jsonl")}
    assert len(stamps) == 2
    assert cli(*arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    first = {path: path.read_text("utf-8") for path in stamps}
    assert cli(*arguments, "-r", "4").exit_code == 0
    assert all(path.read_text("utf-8").startswith(text) for path, text in first.items())
    assert {RunFolder(path.parent).summary["rounds"] for path in stamps} == {4}


def test_files_and_finished_runs_compare_without_running_them_again(cli, folder):
    assert cli("run", "small.yaml", "-o", "done", "-q").exit_code == 0
    before = (folder / "done" / "summary.json").stat().st_mtime_ns
    (folder / "other.yaml").write_text((folder / "small.yaml").read_text("utf-8").replace("name: small", "name: other"))
    result = cli("compare", "done", "other.yaml", "-q", "--report", "both.html")
    assert result.exit_code == 0
    assert {name for _, name in ranked(result.stdout)} == {"small", "other"}
    assert (folder / "done" / "summary.json").stat().st_mtime_ns == before
    assert (folder / "both.html").exists()


def test_what_is_neither_file_nor_run_nor_preset_is_refused_with_a_near_match(cli):
    result = cli("compare", "fedavg", "fedadm")
    assert result.exit_code == 2
    assert "not a file, a run folder or a preset. Did you mean fedadam" in result.stderr


def test_a_report_is_made_of_folders(cli, folder):
    for seed in (0, 1):
        assert cli("run", "small.yaml", "-o", f"s{seed}", "-q", "--seed", seed).exit_code == 0
    assert cli("run", "small.yaml", "-o", "other", "-q", "-s", "local.lr=0.2").exit_code == 0
    result = cli("report", "s0", "other", "s1", "-o", "page.html", "--title", "Two seeds")
    assert result.exit_code == 0
    page = (folder / "page.html").read_text("utf-8")
    assert "<title>Two seeds</title>" in page
    assert "mcmahan2017" in page
    first, second = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["runs"]
    assert (first["name"], first["seeds"]) == ("small", [0, 1])  # seeds are no methods
    assert (second["name"], second["seeds"]) == ("other", [None])


def test_the_demo_prints_a_ranked_table_of_all_its_methods_and_writes_the_report(cli, folder):
    assert cli("run", "small.yaml", "-o", "runs/demo/fedavg", "-q").exit_code == 0  # an older one is overwritten
    result = cli("demo", "--tiny", "--workers", "1")
    assert result.exit_code == 0, result.output
    rows = ranked(result.stdout)
    assert [int(place) for place, _ in rows] == list(range(1, len(METHODS) + 1))
    assert {name for _, name in rows} == set(METHODS)
    page = (folder / "report.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    for run in data["runs"]:
        for axis in ("round", "bits", "simulated_total_seconds"):
            assert len(run["series"][0][axis]) == 2, (run["name"], axis)
    assert "Label distribution" in page
    assert RunFolder(folder / "runs" / "demo" / "fedavg").config.data.name == "fashion-mini"
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout


def test_the_demo_compares_like_with_like():
    made = {name: (config, build_algorithm(config)) for name, config in demo_configs().items()}
    assert {"FedAvg", "FedAdam", "FedAMS"} <= set(made)
    for name, (config, composed) in made.items():
        assert config.data.clients == 50
        assert config.data.partition == {"kind": "dirichlet", "alpha": 0.3}
        first = made["FedAvg"][1].local
        assert (composed.local.lr, composed.local.steps) == (first.lr, first.steps), name
        assert config.links == made["FedAvg"][0].links


def test_an_option_that_a_preset_does_not_take_is_left_out_with_a_note(tmp_path, capsys):
    base = tmp_path / "base.yaml"
    server = "server: {lr: 0.1, eps: 1e-3}"
    base.write_text(f"rounds: 2\ndata: {{clients: 8}}\nalgorithm: fedams\n{server}\nsample: {{count: 3}}\n")
    assert _read_item("fedams", base, []).sample is not None
    capsys.readouterr()
    taken = _read_item("cafga", base, ["local.steps=3"])
    assert taken.sample is None
    assert taken.server.lr == 0.1
    assert taken.local.steps == 3
    assert "cafga: not taken from" in capsys.readouterr().err
    base.write_text("rounds: 2\nsample: {count: -3}\n")
    with pytest.raises(HansaError, match="sample"):  # the file's own preset: a mistake is reported
        _read_item("fedavg", base, [])
