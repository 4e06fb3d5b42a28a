"""Sweeps and several seeds as one result: grids, searches, resuming, shown and compared."""

from __future__ import annotations

import csv
import json
import statistics

import pytest
import torch
from safetensors.torch import load_file

from hansa.config import from_yaml
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder, SeedGroupFolder, expand_seeds

GRID = ["local.lr=1e-3..1:log", "local.steps=1,3", "--seeds", "0,1"]


def search(cli, folder, trials, *more):
    pytest.importorskip("optuna")
    arguments = ["sweep", "small.yaml", *GRID, "--search", "optuna", "--trials", trials, "--out", folder, "-q", *more]
    return cli(*arguments)


def test_a_search_draws_from_ranges_averages_seeds_and_goes_on(cli, folder):
    whole = search(cli, "whole", 4)
    assert whole.exit_code == 0, whole.output
    assert "4 trials: 4 complete" in whole.output
    assert search(cli, "parts", 2).exit_code == 0
    assert search(cli, "parts", 4).exit_code == 0
    trials = [json.loads((folder / name / "search.json").read_text("utf-8"))["trials"] for name in ("whole", "parts")]
    assert trials[0] == trials[1]
    rows = list(csv.DictReader((folder / "whole" / "results.csv").read_text("utf-8").splitlines()))
    values = [trial["value"] for trial in trials[0]]
    assert float(rows[0]["final_test_accuracy"]) == pytest.approx(max(values))
    assert {row["seeds"] for row in rows} == {"2"}
    assert all(1e-3 <= float(row["local.lr"]) <= 1 for row in rows)
    assert (folder / "whole" / "report.html").exists()


def test_a_point_that_fails_is_noted_and_the_search_goes_on(cli, folder):
    """A learning rate at which all updates are non-finite: the run fails, the search does not."""
    pytest.importorskip("optuna")
    cli.ok(
        "sweep", "small.yaml", "local.lr=0.05,1e30", "--search", "optuna", "--trials", "5", "--out", "x", "-q",
        "--set", "local.steps=6",
    )  # fmt: skip
    states = [trial["status"] for trial in json.loads((folder / "x" / "search.json").read_text("utf-8"))["trials"]]
    assert set(states) == {"complete", "failed"}


def test_a_sweep_runs_the_grid_and_names_the_best(cli, folder):
    result = cli.ok("sweep", "small.yaml", "local.lr=0.001,0.2", "local.steps=1,2", "-q", "-o", "grid")
    rows = table(folder / "grid" / "results.csv")
    assert {(row["local.lr"], row["local.steps"]) for row in rows} == {
        ("0.001", "1"),
        ("0.001", "2"),
        ("0.2", "1"),
        ("0.2", "2"),
    }
    scores = [float(row["final_test_accuracy"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert rows[0]["local.lr"] == "0.2"
    assert f"best: --set local.lr=0.2  --set local.steps={rows[0]['local.steps']}" in result.stdout
    page = folder / "grid" / "report.html"
    assert f"report: {page.as_uri()}" in result.stdout
    assert page.read_text("utf-8").count('data-run="') == 4


@pytest.mark.parametrize("message", [["--seeds", "3"], ["--seeds", "0,1,2"]])
def test_seeds_in_a_sweep_are_averaged_not_chosen_among(cli, folder, message):
    result = cli.ok("sweep", "small.yaml", "local.lr=0.001,0.2", *message, "-q", "-o", "grid")
    rows, runs = table(folder / "grid" / "results.csv"), table(folder / "grid" / "runs.csv")
    assert [row["local.lr"] for row in rows] == ["0.2", "0.001"]
    assert {(run["local.lr"], run["seed"]) for run in runs} == {(lr, s) for lr in ("0.2", "0.001") for s in "012"}
    for row in rows:
        scores = [float(run["final_test_accuracy"]) for run in runs if run["local.lr"] == row["local.lr"]]
        assert len(set(scores)) == 3
        assert float(row["final_test_accuracy"]) == pytest.approx(sum(scores) / 3)
        assert float(row["std_final_test_accuracy"]) == pytest.approx(statistics.stdev(scores))
        assert float(row["max_final_test_accuracy"]) == max(scores)
        assert row["seeds"] == "3"
    assert "best: --set local.lr=0.2\n" in result.stdout


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_a_sweep_never_loses_a_finished_run(cli, folder):
    arguments = ["sweep", "small.yaml", "local.lr=0.1,0.10,0.2", "-q", "-o", "grid"]
    asked = [[], ["--seed", "1"], ["-r", "5"], ["-r", "2"], ["-w", "2"], []]
    kept = {}
    for more in asked:
        cli.ok(*arguments, *more)
        now = {path.parent: path.read_text("utf-8").count("\n") for path in (folder / "grid").glob("*/metrics.jsonl")}
        assert all(now[path] >= rounds for path, rounds in kept.items())
        kept = now
    # two rates (one spelt twice), two seeds; what had five rounds ran anew for two, and those went on to three
    assert sorted(kept.values()) == [3, 3, 3, 3, 5, 5]


def test_long_names_of_points_make_folders_that_file_systems_bear(cli, folder):
    zeros = "0" * 80
    grid = [
        f"local.lr=0.1{zeros},0.2{zeros},0.3{zeros}",
        f"local.momentum=0.1{zeros}",
        f"local.max_grad_norm=1.0{zeros}",
    ]
    cli.ok("sweep", "small.yaml", *grid, "-q", "-o", "grid", "-r", "1")
    names = [path.name for path in (folder / "grid").iterdir() if path.is_dir()]
    assert len(names) == 3
    assert max(map(len, names)) < 120


def test_latex_tables_of_a_sweep_of_its_runs_and_of_published_numbers(cli, folder):
    options = ["-o", "grid", "-q", "--latex", "tex/grid.tex", "--target", "0.2"]
    cli.ok("sweep", "small.yaml", "local.lr=1e-4,0.05", "--seeds", 3, *options)
    table = (folder / "tex" / "grid.tex").read_text("utf-8")
    assert r"rounds to 20\% & bits to 20\%" in table
    assert r"difference, 95\% interval" in table
    first, second = (line for line in table.splitlines() if line.startswith("local.lr"))
    assert first.startswith(r"local.lr=0.05 & \textbf{")
    assert second.startswith("local.lr=1e-4 & ")
    cli.ok("run", "small.yaml", "--seeds", "2", "-o", "runs/seeds", "-q")
    shown = cli("show", "runs/seeds", "--latex", "seeds.tex")
    assert "table: seeds.tex" in shown.output
    assert r" $\pm$ " in (folder / "seeds.tex").read_text("utf-8")
    cli.ok("show", "runs/seeds/seed-0", "--latex", "one.tex")
    assert r"small & \textbf{" in (folder / "one.tex").read_text("utf-8")


def scores(group):
    return [run.summary["test_accuracy"] for run in SeedGroupFolder(group).runs]


def test_a_run_with_seeds_is_a_folder_of_ordinary_runs_and_one_result(cli, folder):
    result = cli.ok("run", "small.yaml", "--seeds", "3", "-o", "g", "-q")
    assert [run.config.seed for run in SeedGroupFolder(folder / "g").runs] == [0, 1, 2]
    cli.ok("run", "small.yaml", "--seed", "1", "-o", "alone", "-q")
    mine, alone = (load_file(path / "model.safetensors") for path in (folder / "g" / "seed-1", folder / "alone"))
    assert all(torch.equal(mine[name], alone[name]) for name in alone)
    found = scores(folder / "g")
    mean, deviation = 100 * statistics.fmean(found), 100 * statistics.stdev(found)
    assert f"{mean:.1f} ± {deviation:.1f}%" in result.stdout


def test_seeds_may_stand_in_the_file_and_the_group_repeats_itself(cli, folder):
    (folder / "three.yaml").write_text((folder / "small.yaml").read_text("utf-8") + "seeds: [4, 2]\n")
    cli.ok("run", "three.yaml", "-q")
    group = SeedGroupFolder(folder / "runs" / "small")
    assert [each.seed for each in expand_seeds(group.config)] == [4, 2]
    cli.ok("run", group / "group.yaml", "-o", "again", "-q")
    assert scores(folder / "again") == scores(group.path)
    cli.ok("run", "three.yaml", "-q")
    assert SeedGroupFolder(folder / "runs" / "small-2").exists


def test_resume_goes_on_with_every_seed_and_begins_those_that_were_not(cli, folder):
    cli.ok("run", "small.yaml", "--seeds", "3", "-o", "whole", "-q", "-r", "4")
    config = from_yaml((folder / "small.yaml").read_text("utf-8"), ["seeds=3", "rounds=4"])
    half = SeedGroupFolder(folder / "half")
    half.write_config(config)
    first, second, _ = expand_seeds(config)
    open_run(first, half.run(0).path).execute()
    open_run(second, half.run(1).path).execute([lambda run, record: record["round"] == 2])
    stamp = (half.run(0) / "summary.json").stat().st_mtime_ns
    cli.ok("resume", "half", "-q")
    assert (half.run(0) / "summary.json").stat().st_mtime_ns == stamp
    for seed in range(3):
        there, here = (load_file(folder / name / f"seed-{seed}" / "model.safetensors") for name in ("whole", "half"))
        assert all(torch.equal(there[name], here[name]) for name in there)
    cli.ok("resume", "half", "-q", "--rounds", "5")
    assert {run.summary["rounds"] for run in half.runs} == {5}


def test_a_group_is_not_overwritten_unasked(cli, folder):
    arguments = ["run", "small.yaml", "--seeds", "2", "-o", "g", "-q"]
    cli.ok(*arguments)
    result = cli.refused(*arguments)
    assert "already holds a run" in result.stderr
    cli.ok(*arguments, "--overwrite")
    cli.ok("run", "small.yaml", "--seeds", "3", "-o", "g", "-q", "--resume")
    assert len(SeedGroupFolder(folder / "g").runs) == 3
    other = cli.refused("run", "small.yaml", "--seeds", "3", "-o", "g", "-q", "--resume", "-s", "local.lr=0.3")
    assert "local.lr" in other.stderr


def test_show_takes_a_group(cli, folder):
    cli.ok("run", "small.yaml", "--seeds", "2", "-o", "g", "-q")
    output = json.loads(cli("show", "g", "--json").stdout)
    assert output["over_seeds"]["test_accuracy"]["mean"] == pytest.approx(statistics.fmean(scores(folder / "g")))
    cli.ok("show", "g")


def test_code_that_changed_since_is_run_anew(cli, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    text = "import hansa\nfrom torch import nn\n\n@hansa.component\ndef net():\n"
    text += "    return nn.Sequential(nn.Linear(60, 10{}))\n"
    (folder / "mine_net.py").write_text(text.format(""))
    arguments = ["compare", "fedavg", "-c", "small.yaml", "-q", "--seeds", "2", "-s", "model={factory: 'mine_net:net'}"]
    cli.ok(*arguments)
    (folder / "mine_net.py").write_text(text.format(", bias=False"))
    import sys

    sys.modules.pop("mine_net", None)  # forked workers imported it, or this process
    cli.ok(*arguments)
    groups = sorted(path.name for path in (folder / "runs" / "compare").iterdir() if path.is_dir())
    assert len(groups) == 2
    assert groups[1] == groups[0] + "-2"
    assert all(RunFolder(folder / "runs" / "compare" / g / "seed-0").exists for g in groups)
