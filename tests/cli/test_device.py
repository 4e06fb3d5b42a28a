"""``--device`` and ``device:``: said in a file, on the command line and at a resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hansa.runs.folder import RunFolder


def test_a_device_is_said_in_a_file_or_on_the_command_line_and_changes_no_bit_of_a_cpu_run(cli, folder):
    assert cli("run", "small.yaml", "--out", "plain", "-q").exit_code == 0
    assert cli("run", "small.yaml", "--device", "cpu:0,cpu", "--out", "two", "-q").exit_code == 0
    assert RunFolder(folder / "two").config.device == ["cpu:0", "cpu"]
    resumed = cli("resume", "two", "--device", "cpu", "--rounds", "4", "-q")
    assert resumed.exit_code == 0, resumed.output
    assert RunFolder(folder / "two").config.device == "cpu"
    assert cli("resume", "plain", "--rounds", "4", "-q").exit_code == 0
    plain, two = (load_file(folder / name / "model.safetensors") for name in ("plain", "two"))
    assert all(torch.equal(plain[name], two[name]) for name in plain)


@pytest.mark.parametrize("command", [["run"], ["compare"], ["sweep", "local.lr=0.1,0.2"]])
def test_a_device_that_is_not_there_is_an_error_of_usage_that_lists_those_that_are(cli, folder, command):
    name, *rest = command
    found = cli(name, "small.yaml", *rest, "--device", "cuda:9", "--out", "gone")
    assert found.exit_code == 2
    assert "device='cuda:9'" in found.output
    assert "There is: cpu (CPU)" in found.output
    assert not (folder / "gone" / "config.yaml").exists()
