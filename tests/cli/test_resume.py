"""Interrupting and resuming: Ctrl-C, SIGTERM, kill -9, damaged checkpoints; results stay bit-identical."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from cli.conftest import wait_for
from hansa import __version__
from hansa.core import native
from hansa.runs import provenance
from hansa.runs.folder import RunFolder

LONG = "rounds: 100000\ncheckpoint: {every: 7}\n"

SLOW = """\
import hansa
import time
from torch import nn


class Slow(nn.Linear):
    def forward(self, x):
        open("began", "w").close()
        time.sleep(0.2)
        return super().forward(x).sin()  # nothing that native code would do in its place


@hansa.component
def make():
    return Slow(60, 10)
"""


def rounds_done(path):
    file = path / "metrics.jsonl"
    return file.read_text("utf-8").count("\n") if file.exists() else 0


def wait_for_rounds(path, count, child):
    wait_for(lambda: rounds_done(path) >= count, child)


def damage(path, statement):
    with closing(sqlite3.connect(path / "run.db")) as other, other:
        other.execute(statement)


def same_model(first, second):
    one, other = (load_file(path / "model.safetensors") for path in (first, second))
    return all(torch.equal(one[name], other[name]) for name in one)


def without_time(history):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


@pytest.fixture
def small(folder):
    return (folder / "small.yaml").read_text("utf-8").replace("rounds: 3\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_after_the_round_with_everything_saved_and_the_run_goes_on_exactly(
    folder, small, process, cli, number, code
):
    (folder / "long.yaml").write_text(LONG + small)
    child = process("run", "long.yaml", "-o", "out")
    wait_for_rounds(folder / "out", 3, child)
    child.send_signal(number)
    _, message = child.communicate(timeout=60)
    assert child.returncode == code
    assert "interrupted and saved. To resume: hansa resume out" in message
    found = RunFolder(folder / "out")
    done = found.summary["rounds"]
    assert found.summary["status"] == "stopped"
    assert [record["round"] for record in found.history] == list(range(1, done + 1))

    cli.ok("resume", "out", "-q", "--rounds", done + 5)
    cli.ok("run", "long.yaml", "-o", "whole", "-q", "--rounds", done + 5)
    assert same_model(folder / "out", folder / "whole")
    assert without_time(found.history) == without_time(RunFolder(folder / "whole").history)


@pytest.mark.parametrize(
    ("was", "becomes"), [("lr: 0.05", "lr: 0.06"), ("hidden: 3", "hidden: 4"), ("largest: 60", "largest: 61")]
)
def test_a_configuration_changed_behind_the_checkpoint_is_refused(cli, folder, was, becomes):
    cli.ok("run", "small.yaml", "-o", "out", "-q", "-s", "model={name: mlp, options: {hidden: 3}}")
    path = folder / "out" / "config.yaml"
    assert was in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace(was, becomes))
    result = cli.refused("resume", "out", "-q", "-r", "5")
    assert "does not describe the run of the checkpoint" in result.stderr or "a partition of these" in result.stderr


def test_a_run_without_checkpoints_says_why_it_cannot_go_on(cli):
    cli.ok("run", "small.yaml", "-o", "out", "-q", "-s", "checkpoint.every=0")
    result = cli.refused("resume", "out")
    assert "no checkpoint" in result.stderr


def test_other_arithmetic_than_before_is_told(cli, monkeypatch):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    monkeypatch.setenv("HANSA_NATIVE", "off")
    result = cli("resume", "out", "-q", "-r", "4")
    output = "may differ in its last bits from that of an uninterrupted run" in " ".join(result.stderr.split())
    assert output == bool(native.instruction_sets())
    assert result.exit_code == 0


def test_a_second_interrupt_stops_at_once(folder, process):
    (folder / "slow.py").write_text(SLOW)
    child = process("run", "small.yaml", "-o", "out", "-s", "model={factory: 'slow:make'}", "-s", "local.steps=1000")
    for sign in ("out/config.yaml", "began"):  # the model is tried before the run begins: what counts is after
        (folder / "began").unlink(missing_ok=True)
        wait_for((folder / sign).exists, child)
    child.send_signal(signal.SIGINT)
    lines = iter(child.stderr.readline, "")
    assert any("stopping after this round" in line for line in lines)  # after the line about kernels
    child.send_signal(signal.SIGINT)
    _, message = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in message
    assert json.loads((folder / "out" / "summary.json").read_text("utf-8"))["rounds"] == 0


def test_a_finished_run_stays_and_says_how_to_go_on(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    before = (folder / "out" / "model.safetensors").read_bytes()
    result = cli.ok("resume", "out", "-q")
    assert "already finished at round 3. Pass --rounds 6 to continue" in result.stderr
    assert (folder / "out" / "model.safetensors").read_bytes() == before
    cli.ok("resume", "out", "-q", "-r", "5")
    assert RunFolder(folder / "out").config.rounds == 5
    refused = cli.refused("resume", "out", "-q", "-r", "4")
    assert "is already at round 5, past the requested 4" in refused.stderr


def test_resume_with_other_settings_is_refused_key_by_key(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    before = (folder / "out" / "metrics.jsonl").read_bytes()
    result = cli.refused(
        "run", "small.yaml", "-o", "out", "-q", "--resume", "-s", "local.lr=0.3", "--seed", "4", "-r", "9"
    )
    assert "local.lr is 0.05, requested 0.3; seed is 0, requested 4" in result.stderr
    assert (folder / "out" / "metrics.jsonl").read_bytes() == before
    cli.ok("run", "small.yaml", "-o", "out", "-q", "--resume", "-r", "5", "-w", "2")
    cli.ok("run", "-o", "out", "-q", "--resume", "-r", "6")
    assert RunFolder(folder / "out").summary["rounds"] == 6
    cli.refused("run", "small.yaml", "-o", "out", "--resume", "--overwrite")


DAMAGES = {
    "checkpoint": "UPDATE vectors SET content = zeroblob(length(content)) WHERE kind = 'checkpoint' AND client = 6",
    "state": "UPDATE checkpoints SET state = replace(state, 'round', 'tound') WHERE round = 6",
    "rows": "DELETE FROM vectors WHERE id = (SELECT max(id) FROM vectors WHERE kind = 'client' AND born = 6)",
    "rounds": "UPDATE rounds SET record = replace(record, '5', '4') WHERE round = 5",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_end_is_left_behind_by_falling_back(cli, folder, what):
    output = ["-s", "algorithm=scaffold", "-s", "checkpoint={every: 2, keep: 9}", "-r", "6", "-q"]
    cli.ok("run", "small.yaml", "-o", "whole", *output, "-r", "8")
    cli.ok("run", "small.yaml", "-o", "out", *output)
    damage(folder / "out", DAMAGES[what])
    refused = cli.refused("resume", "out", "-q", "-r", "8")
    assert "run.db" in refused.stderr
    assert "--fallback" in refused.stderr
    result = cli.ok("resume", "out", "--fallback", "-q", "-r", "8")
    assert "resumed after round 4; rounds 5 to 6 are lost and run again" in " ".join(result.stderr.split())
    one, other = (load_file(folder / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_changes_are_accepted_by_an_explicit_word(cli, folder, monkeypatch):

    cli.ok("run", "small.yaml", "-o", "out", "-q")
    monkeypatch.setattr(provenance, "__version__", "9.9")
    refused = cli.refused("resume", "out", "-q", "-r", "4")
    assert f"changed since the run was started: version (Hansa {__version__} then, 9.9 now)" in refused.stderr
    assert "--accept version" in refused.stderr
    cli.ok("resume", "out", "-q", "-r", "4", "--accept-changes", "version,data")
    cli.ok("resume", "out", "-q", "-r", "5")
    assert "version after round 3" in cli("show", "out").stdout
