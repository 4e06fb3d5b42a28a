"""Several seeds as one result: run, resume, show, compare."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from safetensors.torch import load_file

from hansa.config import from_yaml
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder, SeedGroupFolder, expand_seeds


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
