"""How commands end: on closed pipes, full disks, poor and lost terminals, and with names that look like markup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from hansa.runs import provenance
from hansa.runs.folder import RunFolder

from .test_resume import LONG, wait_for_rounds


def start(folder, *words, **options):
    command = [sys.executable, "-c", "from hansa.cli import main; main()", *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [["presets"], ["config", "schema"]])
def test_output_that_does_not_fit_is_told_in_one_sentence(folder, words):
    with open("/dev/full", "w") as full:
        child = start(folder, *words, stdout=full)
        said = child.communicate()[1].decode()
    assert child.returncode == 1
    assert said.count("\n") == 1
    assert "No space left on device" in said


def test_a_reader_that_leaves_is_no_error(folder):
    child = start(folder, "config", "schema", stdout=subprocess.PIPE)
    child.stdout.close()
    assert child.communicate()[1] == b""
    assert child.returncode == 1


def test_a_terminal_without_letters_gets_other_ones(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    child = start(folder, "show", "out", stdout=subprocess.PIPE, env=environment)
    shown, said = child.communicate()
    assert (child.returncode, said) == (0, b"")
    assert b"test accuracy _" in shown
    assert shown.isascii()


@pytest.mark.parametrize("name", ["x[/0.1]", "[/]"])
def test_names_that_look_like_markup_are_names(cli, folder, name):
    result = cli("run", "small.yaml", "-o", name.replace("/", "|") if "/]" in name else name, "-s", f"name='{name}'")
    assert result.exit_code == 0, result.output
    assert f"{name}: round 3/3" in result.stderr
    failed = cli(
        "run", "small.yaml", "-o", "f", "-q", "-s", "aggregate={kind: krum, byzantine: 9}", "-s", f"name='{name}'"
    )
    assert failed.exit_code == 1
    assert cli("resume", f"no{name}").exit_code == 2
    shown = cli("show", "f")
    assert shown.exit_code == 0, shown.output


def test_a_hangup_saves_like_a_polite_end(folder, process):
    (folder / "long.yaml").write_text(LONG + (folder / "small.yaml").read_text().replace("rounds: 3\n", ""))
    child = process("run", "long.yaml", "-o", "out", "-q")
    wait_for_rounds(folder / "out", 2, child)
    child.send_signal(signal.SIGHUP)
    child.communicate(timeout=60)
    assert child.returncode == 129
    assert RunFolder(folder / "out").summary["status"] == "stopped"


def test_ctrl_c_while_the_command_starts_is_quiet(folder):
    command = [sys.executable, "-c", "import hansa_command; print('up', flush=True); hansa_command.main()", "presets"]
    for pause in (0.0, 0.1, 0.2, 0.3, 0.4):
        child = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        child.stdout.readline()
        time.sleep(pause + 0.1)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
        assert b"Traceback" not in said
        assert child.returncode in (0, 130, -signal.SIGINT)  # the last while the interpreter ends


def test_a_run_is_opened_by_a_file_in_it(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    assert cli("show", "out/config.yaml").stdout == cli("show", "out").stdout
    assert cli("report", "out/config.yaml").exit_code == 0
    assert cli("resume", "out/config.yaml", "-q", "-r", "4").exit_code == 0
    assert RunFolder(folder / "out").summary["rounds"] == 4


def test_a_finished_run_says_how_to_go_on(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    result = cli("resume", "out", "-q")
    assert result.exit_code == 0
    assert "has finished its 3 rounds; --rounds 6 goes on" in result.stderr


@pytest.mark.parametrize("word", ["fedavgg", "scafold"])
def test_a_preset_misspelt_is_suggested(cli, word):
    result = cli("run", word)
    assert result.exit_code == 2
    assert f"Did you mean {'fedavg' if 'avg' in word else 'scaffold'}" in result.stderr


def test_resume_with_other_settings_is_refused_key_by_key(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    before = (folder / "out" / "metrics.jsonl").read_bytes()
    result = cli("run", "small.yaml", "-o", "out", "-q", "--resume", "-s", "local.lr=0.3", "--seed", "4", "-r", "9")
    assert result.exit_code == 2
    assert "local.lr: 0.05 there, 0.3 asked for; seed: 0 there, 4 asked for" in result.stderr
    assert (folder / "out" / "metrics.jsonl").read_bytes() == before
    assert cli("run", "small.yaml", "-o", "out", "-q", "--resume", "-r", "5", "-w", "2").exit_code == 0
    assert cli("run", "-o", "out", "-q", "--resume", "-r", "6").exit_code == 0
    assert RunFolder(folder / "out").summary["rounds"] == 6
    assert cli("run", "small.yaml", "-o", "out", "--resume", "--overwrite").exit_code == 2


@pytest.mark.parametrize("what", ["checkpoint", "rows", "metrics"])
def test_a_damaged_end_is_left_behind_by_falling_back(cli, folder, what):
    told = ["-s", "algorithm=scaffold", "-s", "checkpoint={every: 2, keep: 9}", "-r", "6", "-q"]
    assert cli("run", "small.yaml", "-o", "whole", *told, "-r", "8").exit_code == 0
    assert cli("run", "small.yaml", "-o", "out", *told).exit_code == 0
    if what == "checkpoint":
        path = sorted((folder / "out" / "checkpoint").iterdir())[-1] / "tensors.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    elif what == "metrics":
        path = folder / "out" / "metrics.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"round": 5', b'"round": 6'))
    else:
        path = sorted((folder / "out" / "clients" / "index").glob("round-*6.json"))[-1]
        path.write_bytes(path.read_bytes()[:-9])
    refused = cli("resume", "out", "-q", "-r", "8")
    assert refused.exit_code == 2
    assert path.name in refused.stderr
    assert what == "rows" or "--fallback" in refused.stderr or what == "metrics"
    result = cli("resume", "out", "--fallback", "-q", "-r", "8")
    assert result.exit_code == 0, result.output
    assert "taken up after round 4; the work of rounds 5 to 6 is lost" in " ".join(result.stderr.split())
    one, other = (load_file(folder / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_changes_are_accepted_by_an_explicit_word(cli, folder, monkeypatch):

    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    monkeypatch.setattr(provenance, "hansa_version", lambda: "9.9")
    refused = cli("resume", "out", "-q", "-r", "4")
    assert refused.exit_code == 2
    assert "changed since the run was started: version (hansa 0.2.0 then, 9.9 now)" in refused.stderr
    assert "--accept-changes version" in refused.stderr
    assert cli("resume", "out", "-q", "-r", "4", "--accept-changes", "version,data").exit_code == 0
    assert cli("resume", "out", "-q", "-r", "5").exit_code == 0
    assert "version after round 3" in cli("show", "out").stdout


def test_a_sweep_never_loses_a_finished_run(cli, folder):
    words = ["sweep", "small.yaml", "local.lr=0.1,0.10,0.2", "-q", "-o", "grid"]
    asked = [[], ["--seed", "1"], ["-r", "5"], ["-r", "2"], ["-w", "2"], []]
    kept = {}
    for more in asked:
        assert cli(*words, *more).exit_code == 0
        now = {path.parent: path.read_text().count("\n") for path in (folder / "grid").glob("*/metrics.jsonl")}
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
    result = cli("sweep", "small.yaml", *grid, "-q", "-o", "grid", "-r", "1")
    assert result.exit_code == 0, result.output
    names = [path.name for path in (folder / "grid").iterdir() if path.is_dir()]
    assert len(names) == 3
    assert max(map(len, names)) < 120
