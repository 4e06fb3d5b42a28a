"""A configuration run in Python is the run of ``hansa run``, found and resumed in its folder."""

from __future__ import annotations

import pytest
import torch

import hansa
from hansa.config import from_yaml

SETTING = """
rounds: 3
workers: 1
data: {name: synthetic, clients: 5, options: {largest: 60}}
model: {name: mlp, options: {hidden: 5}}
local: {lr: 0.05, steps: 3, batch_size: 10}
"""


def test_it_runs_resumes_and_refuses_another(tmp_path, monkeypatch):
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    config = from_yaml(SETTING)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SETTING)
    assert CliRunner().invoke(app, ["run", "run.yaml", "-o", "cli", "-q"]).exit_code == 0
    run = hansa.run_config(config, "mine")
    weights = hansa.load_model("cli").module.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in run.model.state_dict().items())

    stopped = hansa.run_config(config, "stopped", callbacks=[lambda run, record: record["round"] == 2])
    assert len(stopped.history) == 2
    resumed = hansa.run_config(config, "stopped")
    assert torch.equal(resumed.params, run.params)
    assert len(hansa.run_config(from_yaml(SETTING, ["rounds=4"]), "stopped").history) == 4
    with pytest.raises(hansa.HansaError, match=r"local\.lr is 0\.05, requested 0\.1"):
        hansa.run_config(from_yaml(SETTING, ["local.lr=0.1"]), "stopped")
    replaced = hansa.run_config(from_yaml(SETTING, ["local.lr=0.1"]), "stopped", overwrite=True)
    assert not torch.equal(replaced.params, run.params)
