"""hansa run: what it leaves, what it refuses, what it says."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from hansa import data
from hansa.runs.folder import RunFolder


def test_a_run_leaves_everything_behind(cli, folder):
    result = cli.ok("run", "small.yaml", "-o", "out", "--set", "local.lr=0.1")
    assert "out (finished)" in result.stdout
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {
        "config.yaml", "partition.safetensors", "environment.json", "metrics.jsonl", "summary.json",
        "model.safetensors", "run.db", "preprocessing.json", ".hansa-run", ".hansa-lock",
    }  # fmt: skip
    found = RunFolder(folder / "out")
    assert found.config.local.lr == 0.1
    assert [record["round"] for record in found.history] == [1, 2, 3]
    assert found.summary["status"] == "finished"
    assert found.environment["packages"]["torch"].startswith("2.")


def test_a_preset_runs_by_its_name_and_a_folder_is_found_for_it(cli, folder):
    tiny = ["-r", "1", "-q", "-w", "1", "-s", "local.steps=1", "-s", "sample.count=2", "-s", "model=logistic"]
    cli.ok("run", "--preset", "fedams", *tiny)
    cli.ok("run", "fedams", *tiny)
    assert {path.name for path in (folder / "runs").iterdir()} == {"fedams", "fedams-2"}


def test_without_a_terminal_progress_is_plain_lines_with_all_numbers(cli):
    result = cli("run", "small.yaml", "--rounds", "40", "-s", "checkpoint.every=0")
    lines = [line for line in result.stderr.splitlines() if line.startswith("small: round")]
    assert len(lines) == 20
    form = r"small: round 40/40  accuracy [\d.]+%  loss [\d.]+  sent [\d.]+ Mbit  0 ms left"
    assert re.fullmatch(form, lines[-1]), lines[-1]
    assert "\x1b" not in result.stderr


def test_metrics_hold_what_a_study_needs(cli, folder):
    links = "links={up_bandwidth: 1000.0, down_bandwidth: 2000.0, latency: 0.5}"
    cli.ok("run", "small.yaml", "-o", "out", "-q", "-s", links, "-s", "evaluate.train=true")
    (first, *_) = RunFolder(folder / "out").history
    for name in ("train_loss", "global_loss", "test_loss", "test_accuracy", "diversity", "update_norm", "participants"):
        assert isinstance(first[name], (int, float)), name
    one = first["up_bytes"] / 6
    assert first["simulated_seconds"] == pytest.approx(0.5 + one / 1000 + one / 2000)
    assert first["seconds"] > 0
    federated = data.synthetic(clients=6, largest=60)
    saved = load_file(folder / "out" / "model.safetensors")
    logits = federated.inputs.double() @ saved["1.weight"].double().T + saved["1.bias"].double()
    by_hand = -torch.log_softmax(logits, 1)[torch.arange(len(federated.targets)), federated.targets].mean()
    assert RunFolder(folder / "out").history[-1]["global_loss"] == pytest.approx(float(by_hand), rel=1e-5)


def test_faults_and_target_are_told_in_the_summary(cli, folder):
    result = cli("run", "small.yaml", "-o", "out", "-q", "-s", "faults.before=1.0", "-s", "evaluate.target=0.9")
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    assert summary["lost_by_reason"] == {"lost": 18}
    assert summary["unmoved_rounds"] == 3
    assert summary["rounds_to_target"] is None
    assert "dropped" in result.stdout


def test_a_folder_that_holds_a_run_is_refused_overwritten_or_gone_on_with_as_asked(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    refused = cli.refused("run", "small.yaml", "-o", "out", "-q")
    assert "already holds a run" in refused.stderr
    assert "hansa resume out" in refused.stderr
    cli.ok("run", "small.yaml", "-o", "out", "-q", "--resume", "-r", "5")
    assert RunFolder(folder / "out").summary["rounds"] == 5
    cli.ok("run", "small.yaml", "-o", "out", "-q", "--overwrite")
    assert RunFolder(folder / "out").summary["rounds"] == 3


def test_a_typo_in_the_file_ends_with_2_the_line_and_the_near_match(cli, folder):
    (folder / "bad.yaml").write_text("seed: 1\nlocal:\n  lerning_rate: 0.1\n")
    result = cli.refused("run", "bad.yaml")
    assert "bad.yaml:3: local.lerning_rate: no such key." in result.stderr
    assert "3 |   lerning_rate: 0.1" in result.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "expected a configuration file, or --preset"),
        (["run", "small.yaml", "--preset", "fedavg"], "expected a configuration file, or --preset"),
        (["run", "none.yaml"], "none.yaml: no such file"),
        (["run", "--preset", "fedavgg"], "Did you mean fedavg"),
        (
            ["run", "small.yaml", "-s", "data.name=fashion-minni"],
            "no data set 'fashion-minni'. Did you mean fashion-mini",
        ),
        (["run", "small.yaml", "-s", "model.name=cnn29k"], "no model 'cnn29k'. Did you mean cnn_29k?"),
        (["run", "small.yaml", "-s", "model.options={hiden: 3}"], "no option 'hiden'"),
        (["run", "small.yaml", "-s", "sample.count=7"], "uniform(count=7): expected a whole number >= 1 and <= 6"),
        (["run", "small.yaml", "-s", "data.options={alfa: 1}"], "alfa"),
        (["run", "--preset", "fedavg", "-s", "data={clients: 10001, partition: iid}"], "expected at most 10000"),
        (["run", "small.yaml", "-s", "data.partition=iid"], "has its own clients"),
        (["run", "small.yaml", "--track", "tensorbord"], "Did you mean tensorboard"),
        (["run", "--preset", "fedavg", "-s", "data.name=mnist", "-s", "data.folder=nowhere"], "no such file"),
        (["run", "--preset", "fedavg", "-s", "data={name: csv-folder, options: {target: y}}"], "(data.folder)"),
        (["run", "small.yaml", "--seeds", "1,1"], "listed twice"),
        (["run", "small.yaml", "--seed", "3", "--seeds", "1,2"], "--seed 3: not allowed with a list, --seeds 1,2"),
        *(
            ([command[0], "small.yaml", *command[1:], "--device", "cuda:9", "-o", "out"], "There is: cpu (CPU)")
            for command in (["run"], ["compare"], ["sweep", "local.lr=0.1,0.2"])
        ),
        *(([command, "nowhere"], "nowhere: not a run folder") for command in ("resume", "show")),
        (["compare", "fedavg", "fedadm"], "Did you mean fedadam"),
        (["data", "get", "mnist", "cifar11"], "no data set 'cifar11'"),
        (["sweep", "small.yaml", "local.lr=1e-3..1:log"], "Ranges need --search optuna"),
        (["sweep", "small.yaml", "local.lr=1e-3..1", "--search", "grid"], "expected optuna"),
        (["sweep", "small.yaml", "local.lr"], "expected KEY=V1,V2"),
        (["sweep", "small.yaml", "local.lr=0.1", "local.lr=0.2"], "is given twice"),
        (["sweep", "small.yaml", "local.lrr=0.1,0.2"], "Did you mean lr?"),
        (["sweep", "small.yaml", "seed=0,1"], "Use --seeds 0,1"),
        (
            ["sweep", "small.yaml", "local.lr=0.1", "--metric", "test_acuracy", "-o", "out"],
            "Did you mean test_accuracy",
        ),
        (["topology", "rin"], "Did you mean ring?"),
        (["topology", "erdos-renyi"], "needs p"),
        (["topology", "hypercube", "-n", "9"], "power of two"),
        (["topology", "ring", "--participation", "0.5", "-m", "2"], "one of the two"),
        (["topology", "ring", "-n", "4", "-m", "9"], "a whole number >= 1 and <= 4"),
        (["topology", "ring", "--figure", "g.txt"], "ends in .svg"),
        (["topology"], "or --target-rho"),
        (["topology", "--target-rho", "1.5"], "0 <= target < 1"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_to_do(cli, folder, arguments, message):
    result = cli.refused(*arguments)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ("aggregate={kind: krum, byzantine: 9}", ["failed in round 1", "krum"]),
        ("max_norm=1e-12", ["every update of all 3 rounds was refused"]),
    ],
)
def test_a_run_that_fails_ends_with_1_and_says_why(cli, folder, change, messages):
    result = cli("run", "small.yaml", "-o", "out", "-q", "-s", change)
    assert result.exit_code == 1
    assert all(message in result.stderr for message in messages)
    assert RunFolder(folder / "out").summary["status"] == "failed"


def test_a_device_is_said_in_a_file_or_on_the_command_line_and_changes_no_bit_of_a_cpu_run(cli, folder):
    cli.ok("run", "small.yaml", "--out", "plain", "-q")
    cli.ok("run", "small.yaml", "--device", "cpu:0,cpu", "--out", "two", "-q")
    assert RunFolder(folder / "two").config.device == ["cpu:0", "cpu"]
    cli.ok("resume", "two", "--device", "cpu", "--rounds", "4", "-q")
    assert RunFolder(folder / "two").config.device == "cpu"
    cli.ok("resume", "plain", "--rounds", "4", "-q")
    plain, two = (load_file(folder / name / "model.safetensors") for name in ("plain", "two"))
    assert all(torch.equal(plain[name], two[name]) for name in plain)
