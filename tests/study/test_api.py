"""Runs, seeds and comparisons from Python: in memory, in folders, as results."""

from __future__ import annotations

import os
import signal
import statistics
import sys

import pytest
import torch
from torch import nn

import hansa
from command_line import run_well
from hansa.config import from_yaml
from hansa.runs.folder import RunFolder, SeedGroupFolder

pytestmark = pytest.mark.usefixtures("shared_workers")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def task():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(150, 5, generator=generator)
    targets = (inputs @ torch.randn(5, 3, generator=generator)).argmax(1)
    owners = torch.repeat_interleave(torch.arange(5), torch.tensor([10, 20, 25, 35, 60]))
    federated = hansa.data.from_arrays(inputs, targets, clients=owners, test=(inputs[:60], targets[:60]))
    return hansa.Task(Net, nn.functional.cross_entropy, federated)


def method(lr=0.3):
    return hansa.presets.scaffold(local_lr=lr, steps=3, batch_size=8, participation=0.6)


def test_a_run_in_a_folder_is_the_run_in_memory_and_goes_on_when_asked_again(task, tmp_path):
    plain = hansa.run(method(), task, rounds=6, seed=2, workers=1)
    first = hansa.run(method(), task, rounds=3, seed=2, out=tmp_path / "x", workers=1, checkpoint_every=2)
    assert first.state.round == 3
    again = hansa.run(method(), task, rounds=6, seed=2, out=tmp_path / "x", workers=1)
    assert torch.equal(again.params, plain.params)
    assert [record["test_loss"] for record in again.history] == [record["test_loss"] for record in plain.history]
    stamp = (tmp_path / "x" / "metrics.jsonl").read_text()
    finished = hansa.run(method(), task, rounds=6, seed=2, out=tmp_path / "x", workers=1)
    assert torch.equal(finished.params, plain.params)
    assert (tmp_path / "x" / "metrics.jsonl").read_text() == stamp
    assert RunFolder(tmp_path / "x").summary["status"] == "finished"


def test_another_run_is_not_taken_for_this_one(task, tmp_path):
    hansa.run(method(), task, rounds=1, out=tmp_path / "x", workers=1)
    with pytest.raises(hansa.HansaError, match="holds a different run"):
        hansa.run(method(0.2), task, rounds=1, out=tmp_path / "x", workers=1)
    with pytest.raises(hansa.HansaError, match="holds a different run"):
        hansa.run(method(), task, rounds=1, out=tmp_path / "x", workers=1, seed=1)
    with pytest.raises(hansa.HansaError, match="algorithm and a task that no file can hold"):
        hansa.resume(tmp_path / "x", rounds=2)
    other = hansa.run(method(0.2), task, rounds=1, out=tmp_path / "x", workers=1, overwrite=True)
    assert torch.equal(other.params, hansa.run(method(0.2), task, rounds=1, workers=1).params)


def test_resume_of_python_and_of_the_command_line(task, tmp_path):
    hansa.run(method(), task, rounds=2, out=tmp_path / "x", workers=1)
    resumed = hansa.resume(tmp_path / "x", method(), task, rounds=4, workers=1)
    assert torch.equal(resumed.params, hansa.run(method(), task, rounds=4, workers=1).params)
    changed = hansa.Task(Net, nn.functional.nll_loss, task.data)
    with pytest.raises(hansa.HansaError, match="loss"):
        hansa.resume(tmp_path / "x", method(), changed, rounds=5)
    text = "rounds: 2\nworkers: 1\ndata: {name: synthetic, clients: 4, options: {largest: 60}}\nlocal: {steps: 1}\n"
    config = hansa.config.from_yaml(text)
    hansa.runs.experiment.open_run(config, tmp_path / "y").execute()
    assert hansa.resume(tmp_path / "y", rounds=3).state.round == 3
    with pytest.raises(hansa.HansaError, match="quorum"):
        hansa.resume(tmp_path / "y", rounds=4, quorum=2)


def test_callbacks_add_to_what_is_written_down(task, tmp_path):
    def note(run, record):
        record["mine"] = record["round"] / 2

    hansa.run(method(), task, rounds=2, out=tmp_path / "x", workers=1, callbacks=[note])
    assert [record["mine"] for record in RunFolder(tmp_path / "x").history] == [0.5, 1.0]


def test_ctrl_c_saves_and_interrupts(task, tmp_path):
    def interrupt(run, record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="saved"):
        hansa.run(method(), task, rounds=5, out=tmp_path / "x", workers=1, callbacks=[interrupt])
    assert RunFolder(tmp_path / "x").summary["rounds"] == 2
    whole = hansa.run(method(), task, rounds=5, out=tmp_path / "x", workers=1)
    assert torch.equal(whole.params, hansa.run(method(), task, rounds=5, workers=1).params)


def test_seeds_are_one_result(task):
    runs = hansa.run(method(), task, rounds=3, seeds=3, workers=1)
    assert runs.seeds == [0, 1, 2]
    alone = hansa.run(method(), task, rounds=3, seed=1, workers=1)
    assert torch.equal(runs[1].params, alone.params)
    final = [run.history[-1]["test_accuracy"] for run in runs]
    mean = runs.curve()[-1][1]
    assert mean.mean == pytest.approx(statistics.fmean(final))
    assert mean.std == pytest.approx(statistics.stdev(final))
    assert runs.last(count=1).mean == pytest.approx(statistics.fmean(final))
    reached = [hansa.runs.metrics.rounds_to(run.history, 0.3) for run in runs]
    assert runs.rounds_to(0.3).mean == pytest.approx(statistics.fmean(reached))
    assert runs.rounds_to(1.01) is None
    assert len(runs.frame()) == 9
    with pytest.raises(hansa.HansaError, match="Did you mean test_accuracy"):
        runs.last("test_acuracy")


@pytest.mark.parametrize("seeds", [0, -1, [1, 1], [], "3", [0.5], True])
def test_seeds_that_are_none_are_refused(task, seeds):
    with pytest.raises(hansa.HansaError, match="seeds"):
        hansa.run(method(), task, rounds=1, seeds=seeds)


def test_methods_are_compared_in_folders_and_nothing_is_run_twice(task, tmp_path):
    methods = {"SCAFFOLD": method(), "slow": method(0.0001)}
    found = hansa.compare(methods, task, rounds=3, seeds=[4, 7], out=tmp_path, workers=1)
    assert found.best == "SCAFFOLD"
    assert list(found) == ["SCAFFOLD", "slow"]
    assert [run.config.seed for run in SeedGroupFolder(tmp_path / "scaffold").runs] == [4, 7]
    lines = (tmp_path / "slow" / "seed-7" / "metrics.jsonl").read_text()
    again = hansa.compare(methods, task, rounds=3, seeds=[4, 7, 9], out=tmp_path, workers=1)
    assert (tmp_path / "slow" / "seed-7" / "metrics.jsonl").read_text() == lines
    assert again["slow"].seeds == [4, 7, 9]
    table = again.table(target=0.3).set_index("method")
    final = again["SCAFFOLD"].final()
    assert table.loc["SCAFFOLD", "final_test_accuracy"] == pytest.approx(final.mean)
    assert table.loc["SCAFFOLD", "final_test_accuracy_std"] == pytest.approx(final.std)
    assert "last5_test_accuracy" not in table  # of three rounds there is no mean of the last five
    assert "Comparison of 2 methods, 3 seeds each" in repr(again)
    assert "SCAFFOLD" in again._repr_html_()
    before = (tmp_path / "slow" / "group.yaml").read_text()
    with pytest.raises(hansa.HansaError, match=r"holds a different run: python\.algorithm"):
        hansa.compare({"slow": method(0.1)}, task, rounds=3, seeds=2, out=tmp_path, workers=1)
    assert (tmp_path / "slow" / "group.yaml").read_text() == before
    more = hansa.resume(tmp_path / "slow", method(0.0001), task, rounds=4, workers=1)
    assert [run.state.round for run in more] == [4, 4, 4]


def test_figures_show_mean_and_band(task, tmp_path, monkeypatch):
    found = hansa.compare({"a": method(), "b": method(0.01)}, task, rounds=3, seeds=2, workers=1)
    figure = found.plot(tmp_path / "deep" / "figure.pdf")
    assert (tmp_path / "deep" / "figure.pdf").read_bytes().startswith(b"%PDF")
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["a"].get_ydata().tolist() == pytest.approx([y.mean for _, y in found["a"].curve()], rel=1e-5)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    last = found["a"].curve()[-1][1]
    assert max(abs(band - (last.mean + last.std)).min(), abs(band - (last.mean - last.std)).min()) < 1e-5
    assert lines["a"].get_linestyle() != lines["b"].get_linestyle()
    found["a"].plot(tmp_path / "one.svg", metric="test_loss", x="server_bits")
    with pytest.raises(hansa.HansaError, match="Did you mean test_loss"):
        found.plot(metric="test_los")
    with pytest.raises(hansa.HansaError, match="Did you mean bits"):
        found.plot(x="bitts")
    with pytest.raises(hansa.HansaError, match="xyz"):
        found.plot(tmp_path / "figure.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(hansa.HansaError, match=r"hansa\[plot\]"):
        found.plot()


def test_reports_and_short_forms(task, tmp_path, capsys):
    run = hansa.run(method(), task, rounds=2, workers=1, progress=True)
    assert "scaffold: round 2/2" in capsys.readouterr().err
    page = run.report(tmp_path / "page.html", title="One run").read_text()
    assert "<title>One run</title>" in page
    assert "karimireddy2020" in page
    assert "solver=scaffold" in page
    for thing in (run, task.data, run.algorithm):
        assert len(repr(thing)) < 1200
        assert "<" in thing._repr_html_()
    assert repr(task) == "Task(Net, 5 clients, 75 parameters)"
    assert repr(run).startswith("Run(scaffold on Net, seed 0, 2 rounds")
    assert repr(task.data).startswith("FederatedData('arrays', 5 clients, 150 samples of shape (5,), 3 classes")


def test_a_notebook_gets_a_bar_where_it_can_live_and_lines_otherwise(monkeypatch):
    from rich.console import Console

    from hansa.study.report import progress as shown

    console = Console(force_jupyter=True)
    monkeypatch.setattr(shown, "find_spec", lambda name: object())
    assert shown.progress_display(console, quiet=False).live
    monkeypatch.setattr(shown, "find_spec", lambda name: None)
    assert not shown.progress_display(console, quiet=False).live


SETTING = """
rounds: 3
workers: 1
data: {name: synthetic, clients: 5, options: {largest: 60}}
model: {name: mlp, options: {hidden: 5}}
local: {lr: 0.05, steps: 3, batch_size: 10}
"""


def test_it_runs_resumes_and_refuses_another(tmp_path, monkeypatch):
    config = from_yaml(SETTING)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SETTING)
    run_well("run", "run.yaml", "-o", "cli", "-q")
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
