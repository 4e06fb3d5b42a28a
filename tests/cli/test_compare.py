"""Several runs side by side: compare, report, sweep, demo."""

from __future__ import annotations

import csv
import json
import re

import pytest

from hansa.cli.demo import METHODS, configs
from hansa.config import algorithm
from hansa.runs.folder import RunFolder


def ranked(text):
    """Rank and name of each row of a printed table."""
    return re.findall(r"^ *(\d+) +(.+?)  +\d", text, flags=re.MULTILINE)


def test_presets_on_a_shared_file_are_run_ranked_and_reported(cli, folder):
    result = cli("compare", "fedavg", "fedams", "-c", "small.yaml", "-s", "rounds=2", "-q")
    assert result.exit_code == 0, result.output
    assert sorted(name for _, name in ranked(result.stdout)) == ["fedams", "fedavg"]
    assert (folder / "report.html").read_text().count('data-run="') == 2
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout
    presets = {RunFolder(path).config.algorithm.preset for path in (folder / "runs" / "compare").iterdir()}
    assert presets == {"fedavg", "fedams"}


def test_presets_share_the_setting_of_a_file_but_not_its_method(cli, folder):
    (folder / "ams.yaml").write_text(
        (folder / "small.yaml").read_text() + "algorithm: fedams\nserver: {lr: 0.7, eps: 1e-4}\n"
    )
    assert cli("compare", "fedavg", "fedadam", "-c", "ams.yaml", "-q", "-r", "1").exit_code == 0
    for name in ("fedavg", "fedadam"):
        config = RunFolder(folder / "runs" / "compare" / name).config
        assert config.local.lr == 0.05
        assert (config.server.lr, config.server.eps) == (None, None)


def test_files_and_finished_runs_compare_without_running_them_again(cli, folder):
    assert cli("run", "small.yaml", "-o", "done", "-q").exit_code == 0
    before = (folder / "done" / "summary.json").stat().st_mtime_ns
    (folder / "other.yaml").write_text((folder / "small.yaml").read_text().replace("name: small", "name: other"))
    result = cli("compare", "done", "other.yaml", "-q", "--report", "both.html")
    assert result.exit_code == 0
    assert {name for _, name in ranked(result.stdout)} == {"small", "other"}
    assert (folder / "done" / "summary.json").stat().st_mtime_ns == before
    assert (folder / "both.html").exists()


def test_what_is_neither_file_nor_run_nor_preset_is_refused_with_a_near_match(cli):
    result = cli("compare", "fedavg", "fedadm")
    assert result.exit_code == 2
    assert "neither a file, nor the folder of a run, nor a preset. Did you mean fedadam" in result.stderr


def test_a_report_is_made_of_folders(cli, folder):
    for seed in (0, 1):
        assert cli("run", "small.yaml", "-o", f"s{seed}", "-q", "--seed", seed).exit_code == 0
    result = cli("report", "s0", "s1", "-o", "page.html", "--title", "Two seeds")
    assert result.exit_code == 0
    page = (folder / "page.html").read_text()
    assert "<title>Two seeds</title>" in page
    assert "mcmahan2017" in page
    assert json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["runs"][1]["name"] == "s1"


def test_a_sweep_runs_the_grid_and_names_the_best(cli, folder):
    result = cli("sweep", "small.yaml", "local.lr=0.001,0.2", "seed=0,1", "-q", "-o", "grid")
    assert result.exit_code == 0, result.output
    with open(folder / "grid" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert {(row["local.lr"], row["seed"]) for row in rows} == {
        ("0.001", "0"),
        ("0.001", "1"),
        ("0.2", "0"),
        ("0.2", "1"),
    }
    scores = [float(row["last5_test_accuracy"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert rows[0]["local.lr"] == "0.2"
    assert f"best: --set local.lr=0.2  --set seed={rows[0]['seed']}" in result.stdout


def test_a_sweep_by_a_loss_ranks_the_smallest_first(cli, folder):
    assert cli("sweep", "small.yaml", "local.lr=0.001,0.2", "-q", "-o", "g", "--metric", "test_loss").exit_code == 0
    with open(folder / "g" / "results.csv") as file:
        losses = [float(row["last5_test_loss"]) for row in csv.DictReader(file)]
    assert losses == sorted(losses)


def test_a_sweep_done_before_is_not_run_again_but_a_changed_one_is(cli, folder):
    words = ["sweep", "small.yaml", "local.lr=0.1,0.2", "-q", "-o", "grid"]
    assert cli(*words).exit_code == 0
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "grid").glob("*/summary.json")}
    assert len(stamps) == 2
    assert cli(*words).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert cli(*words, "--rounds", "4").exit_code == 0
    assert all(path.stat().st_mtime_ns != stamp for path, stamp in stamps.items())


def test_a_sweep_that_was_stopped_goes_on_with_the_run_it_was_in(cli, folder):
    from hansa.config import from_text
    from hansa.runs.experiment import Experiment
    from hansa.runs.reuse import hashed_name

    config = from_text((folder / "small.yaml").read_text(), ["local.lr=0.1"])
    place = folder / "grid" / hashed_name("local.lr=0.1", config)
    half = Experiment.new(config.model_copy(update={"name": "local.lr=0.1"}), place)
    half.go([lambda run, record: record["round"] == 2])
    first = (place / "metrics.jsonl").read_text()
    assert cli("sweep", "small.yaml", "local.lr=0.1", "-q", "-o", "grid").exit_code == 0
    assert (place / "metrics.jsonl").read_text().startswith(first)
    assert RunFolder(place).summary["rounds"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["local.lr"], "expected KEY=V1,V2"),
        (["local.lr=0.1", "local.lr=0.2"], "stands twice"),
        (["local.lrr=0.1,0.2"], "Did you mean lr?"),
        (["local.lr=0.1", "--metric", "test_acuracy"], "Did you mean test_accuracy"),
    ],
)
def test_a_wrong_grid_is_refused(cli, words, said):
    result = cli("sweep", "small.yaml", *words, "-q", "--rounds", "1")
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_demo_prints_a_ranked_table_of_all_its_methods_and_writes_the_report(cli, folder):
    assert cli("run", "small.yaml", "-o", "runs/demo/fedavg", "-q").exit_code == 0  # an older one is overwritten
    result = cli("demo", "--tiny", "--workers", "1")
    assert result.exit_code == 0, result.output
    rows = ranked(result.stdout)
    assert [int(place) for place, _ in rows] == list(range(1, len(METHODS) + 1))
    assert {name for _, name in rows} == set(METHODS)
    page = (folder / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    for run in data["runs"]:
        for axis in ("round", "bits", "simulated_total_seconds"):
            assert len(run["series"][axis]) == 2, (run["name"], axis)
    assert "Who holds what" in page
    assert RunFolder(folder / "runs" / "demo" / "fedavg").config.data.name == "fashion-mini"
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout


def test_the_demo_compares_like_with_like():
    made = {name: (config, algorithm(config)) for name, config in configs(tiny=False, changes=[]).items()}
    assert {"FedAvg", "FedAdam", "FedAMS"} <= set(made)
    for name, (config, composed) in made.items():
        assert config.data.clients == 50
        assert config.data.partition == {"kind": "dirichlet", "alpha": 0.3}
        first = made["FedAvg"][1].local
        assert (composed.local.lr, composed.local.steps) == (first.lr, first.steps), name
        assert config.links == made["FedAvg"][0].links
