"""Runs, seeds and comparisons from Python: in memory, in folders, as results, and what makes them comparable."""

from __future__ import annotations

import linecache
import os
import signal
import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from command_line import run_well
from hansa.config import build, from_yaml
from hansa.runs.experiment import build_run
from hansa.runs.folder import RunFolder, SeedGroupFolder
from hansa.runs.provenance import code_without_comments
from hansa.study.report import ReportEntry, rank
from hansa.study.report.page import comparability_warnings

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


METHOD = hansa.presets.fedavg(local_lr=0.05, steps=2, batch_size=4)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x)


def arrays(seed=0, rows=90):
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, 4)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def task_of(data):
    return hansa.Task(Flat, cross_entropy, data)


def drawn(seed=None, **options):
    x, y = arrays()
    partition = hansa.data.dirichlet(0.5, min_size=2)
    return hansa.data.from_arrays(x, y, clients=5, partition=partition, seed=seed, test=(x[:30], y[:30]), **options)


def test_the_partition_follows_the_seed_of_the_run_unless_it_has_its_own():
    follows, fixed = task_of(drawn()), task_of(drawn(seed=0))
    one, two = (hansa.run(METHOD, follows, rounds=1, seeds=2, workers=1)[seed].task for seed in (0, 1))
    assert one.data.index.equal(drawn(seed=0).index)
    assert two.data.index.equal(drawn(seed=1).index)
    assert not two.data.index.equal(one.data.index)
    assert tuple(two.data.sizes.tolist()) == two.population.samples
    fixed_runs = hansa.run(METHOD, fixed, rounds=1, seeds=2, workers=1)
    assert fixed_runs[1].task is fixed
    both = hansa.compare({"a": METHOD, "b": METHOD}, follows, rounds=1, seeds=[3], workers=1)
    assert both["a"][0].task is both["b"][0].task  # methods share the clients of a seed
    assert torch.equal(both["a"][0].params, both["b"][0].params)


def test_python_and_the_command_line_give_the_same_run_for_every_seed():
    for seed in (0, 2):
        local = "{steps: 2, batch_size: 4, lr: 0.05}"
        config = from_yaml(f"seed: {seed}\nworkers: 1\ndata: {{clients: 6}}\nmodel: logistic\nlocal: {local}")
        file = build_run(config, build.load_data(config)).advance(1)
        data = hansa.data.federate("fashion-mini", clients=6)
        task = hansa.Task(
            lambda: hansa.models.build("logistic", classes=10, shape=(1, 28, 28)), cross_entropy, data,
            name="logistic on fashion-mini",
        )  # fmt: skip
        python = hansa.run(METHOD, task, rounds=1, seed=seed, workers=1)
        assert python.task.data.index.equal(file.task.data.index)
        assert torch.equal(python.params, file.params)


def test_held_out_and_validation_rows_follow_the_seed_too():
    x, y = arrays()
    owners = np.repeat(np.arange(5), 18)
    data = hansa.data.with_validation(
        hansa.data.with_test_clients(hansa.data.from_arrays(x, y, clients=owners), 0.2), 0.25
    )
    other = data.for_seed(4)
    assert len(data.validation_targets) == len(other.validation_targets) == 5 * 4  # round(0.25 * 14) rows of each
    assert not torch.equal(data.validation_inputs, other.validation_inputs)
    for each in (data, other):
        parts = [each.inputs[each.index], each.validation_inputs, each.test_inputs]
        rows = torch.cat(parts)
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, each.inputs.tolist()))  # every row once
    changed = replace(data, inputs=data.inputs + 1)  # no longer what was drawn: its clients stay
    assert changed.for_seed(3) is changed
    with pytest.raises(hansa.HansaError, match=r"with_validation\(fraction=2\)"):
        hansa.data.with_validation(data, 2)


def test_tuning_scores_validation_rows_and_says_when_it_scores_test_rows(caplog):
    pytest.importorskip("optuna")
    axes, words = {"local_lr": [0.01, 0.1]}, {"rounds": 1, "trials": 2, "workers": 1}
    with_rows = task_of(hansa.data.with_validation(drawn(seed=0), 0.2))
    study = hansa.search(lambda local_lr: hansa.presets.fedavg(local_lr=local_lr, steps=2), with_rows, axes, **words)
    assert study.metric == "validation/test_accuracy"
    best = hansa.presets.fedavg(local_lr=study.best.point["local_lr"], steps=2)
    run = hansa.run(best, with_rows, rounds=1, workers=1)
    with torch.no_grad():
        right = run.model(with_rows.data.validation_inputs).argmax(1) == with_rows.data.validation_targets
    assert study.best.value == pytest.approx(float(right.double().mean()))
    assert "test rows" not in caplog.text
    plain = hansa.search(lambda local_lr: METHOD, task_of(drawn(seed=0)), axes, **words)
    assert plain.metric == "test_accuracy"
    assert "scored by test_accuracy, on test rows" in caplog.text


def test_runs_on_different_data_are_not_ranked_without_a_word(tmp_path):
    tasks = {name: task_of(hansa.data.from_arrays(*arrays(seed), clients=5, seed=0, test=arrays(9, 30)))
             for name, seed in (("first", 0), ("second", 1))}  # fmt: skip
    for name, task in tasks.items():
        hansa.run(METHOD, task, rounds=1, out=tmp_path / name, workers=1)
    hansa.run(METHOD, tasks["first"], rounds=1, out=tmp_path / "third", name="third", workers=1)
    entries = [replace(ReportEntry.from_folder(tmp_path / name), name=name) for name in ("first", "second", "third")]
    (warning,) = comparability_warnings(entries)
    assert "different data" in warning
    assert "first, third" in warning
    assert comparability_warnings([entries[0], entries[2]]) == []
    x, y = arrays()
    moved = task_of(hansa.data.from_arrays(x, y, clients=5, seed=7, test=arrays(9, 30)))
    hansa.run(METHOD, moved, rounds=1, out=tmp_path / "moved", workers=1)
    (warning,) = comparability_warnings([entries[0], ReportEntry.from_folder(tmp_path / "moved")])
    assert "divide the data differently" in warning
    mixed = hansa.Comparison({
        name: hansa.Runs(name, [hansa.run(METHOD, task, rounds=1, workers=1)]) for name, task in tasks.items()
    })  # fmt: skip
    assert "different data" in comparability_warnings(mixed.entries)[0]


MINE = """
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
    def forward(self, x):
        return self.out(x)
"""


def test_a_comment_changes_no_run_and_a_change_is_accepted_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def compare(source, **options):
        (tmp_path / "mine_compared.py").write_text(source)
        sys.modules.pop("mine_compared", None)
        linecache.clearcache()
        from mine_compared import Own

        task = hansa.Task(Own, cross_entropy, drawn(seed=0))
        return hansa.compare({"a": METHOD, "b": METHOD}, task, rounds=1, out=tmp_path / "out", workers=1, **options)

    compare(MINE)
    compare(
        MINE.replace("    def forward", "    # what the layer says\n    def forward").replace("(self, x)", "( self,x )")
    )
    changed = MINE.replace("return self.out(x)", "return 1.0 * self.out(x)")
    with pytest.raises(hansa.HansaError, match=r"changed .*: model.*accept=\['model'\]"):
        compare(changed)
    compare(changed, accept=["model"])
    before = (tmp_path / "out" / "b" / "seed-0" / "environment.json").stat().st_mtime_ns
    compare(MINE.replace("return", "return 2.0 *"), overwrite=["a"], accept=["model"])
    assert (tmp_path / "out" / "b" / "seed-0" / "environment.json").stat().st_mtime_ns == before
    with pytest.raises(hansa.HansaError, match=r"compare\(overwrite='c'\): expected names among a, b"):
        compare(MINE, overwrite=["c"])
    assert code_without_comments("lambda: (") == "lambda: ("  # what getsource returns of some lambdas
    sys.modules.pop("mine_compared", None)


def test_the_seed_reaches_a_model_that_asks_for_it():
    seeds = []

    def make(seed):
        seeds.append(seed)
        return Flat()

    hansa.run(METHOD, hansa.Task(make, cross_entropy, drawn(seed=0)), rounds=1, seed=7, workers=1)
    assert 7 in seeds


def test_client_names_survive_into_tables_pages_and_records(tmp_path):
    x, y = arrays()
    owners = np.repeat(["north, upper", "south", "west"], 30)
    data = hansa.data.from_arrays(x, y, clients=owners, test=(x, y), test_clients=owners)
    run = hansa.run(METHOD, task_of(data), rounds=1, out=tmp_path / "run", workers=1)
    assert list(run.clients().frame()["name"]) == ["north, upper", "south", "west"]
    by_client = RunFolder(tmp_path / "run").by_client()
    assert by_client.name_of(1) == "south"
    lines = RunFolder(tmp_path / "run").clients().write(tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0].startswith("round,client,name,")
    assert '"north, upper"' in lines[1]
    page = hansa.Comparison({"a": hansa.Runs("a", [run])}).report(tmp_path / "page.html").read_text()
    assert '<td class="left">south' in page


def test_latex_has_deviations_costs_and_paired_intervals():
    def entry(name, curves, peer=0):
        members = [
            ReportEntry(name, [
                {"round": r, "test_accuracy": a, "up_bytes": 10, "peer_bytes": peer} for r, a in enumerate(curve, 1)
            ], seed=seed)
            for seed, curve in enumerate(curves)
        ]  # fmt: skip
        return ReportEntry.from_seeds(name, members)

    slow, fast = (
        entry("slow_1", [[0.2, 0.5], [0.3, 0.6], [0.1, 0.7]]),
        entry("fast", [[0.6, 0.7], [0.5, 0.8], [0.6, 0.9]], 90),
    )
    ranking = rank([slow, fast], 0.5)
    text = ranking.latex()
    assert r"fast & \textbf{80.0 $\pm$ 10.0} & \textbf{1 $\pm$ 0} & 800 bit $\pm$ 0 bit" in text
    assert (
        r"slow\_1 & 60.0 $\pm$ 10.0 & 2 $\pm$ 0 & \textbf{160 bit $\pm$ 0 bit} & $-20.0$ [$-20.0$, $-20.0$]$^*$" in text
    )
    unsure = entry("unsure", [[0.2, 0.6], [0.3, 0.9], [0.1, 0.8]])
    assert r"$-3.3$ [$-32.0$, $25.4$] \\" in rank([unsure, fast]).latex()  # no star: the interval contains 0
    assert "never" in rank([slow, fast], 0.75).latex()
    assert "difference from fast" in ranking.latex(reference="fast")
    from_slow = ranking.latex(reference="slow_1")
    assert r"$20.0$ [$20.0$, $20.0$]$^*$" in from_slow
    with pytest.raises(hansa.HansaError, match=r"no such method\. Did you mean fast"):
        ranking.latex(reference="fas")
    alike = entry("alike", [[0.5, 0.7], [0.5, 0.8], [0.5, 0.9]])
    assert rank([fast, alike]).latex().count(r"\textbf{80.0") == 2  # ties are all bold
    value, ranked = next(tile[1:] for tile in ranking.tiles() if "bits" in tile[0])
    assert (ranked.entry.name, value) == ("slow_1", "160 bit")  # the traffic between peers counts
    assert "highest accuracy, final" in ranking.tiles()[0][0]


def test_unweighted_fedavg_says_so():
    task = task_of(drawn(seed=0))
    assert "count equally" in hansa.Run(METHOD, task).weights_note
    assert hansa.Run(hansa.presets.fedavg(weights="samples"), task).weights_note == ""


def paired(name, differences):
    members = [
        ReportEntry(name, [{"round": 1, "test_accuracy": 0.5 + difference}], seed=seed)
        for seed, difference in enumerate(differences)
    ]
    return ReportEntry.from_seeds(name, members)


def test_holms_correction_takes_stars_that_several_differences_do_not_carry():
    base, clear, barely = (
        paired("base", [0.4, 0.4, 0.4]),
        paired("clear", [0.1, 0.101, 0.1]),
        paired("barely", [0.2, 0.25, 0.3]),
    )
    one_sample = [ttest_1samp(np.array(values) - 0.4, 0).pvalue for values in ([0.1, 0.101, 0.1], [0.2, 0.25, 0.3])]
    assert one_sample[0] < 0.05 / 3 < one_sample[1] < 0.05

    def stars(entries, **options):
        lines = rank(entries).latex(**options).splitlines()
        return [line.split(" & ")[0] for line in lines if line.endswith(r"$^*$ \\")]

    also = replace(barely, name="also")
    assert stars([base, clear, barely, also]) == ["barely", "also", "clear"]
    assert stars([base, clear, barely, also], correction="holm") == ["clear"]
    assert stars([base, barely], correction="holm") == ["barely"]
    assert "after Holm's correction" in rank([base, clear]).latex(correction="holm")
    with pytest.raises(hansa.HansaError, match="'bonferroni'"):
        rank([base, clear]).latex(correction="bonferroni")


def test_methods_by_data_sets_have_a_column_each_with_its_best_in_bold():
    task, slow = task_of(drawn()), hansa.presets.fedavg(local_lr=1e-6, steps=1, batch_size=4)
    good = hansa.presets.fedavg(local_lr=0.5, steps=20, batch_size=4)
    first = hansa.compare({"a": slow, "b": good}, task, rounds=1, workers=1)
    second = hansa.compare({"b": good, "c": slow}, task, rounds=1, workers=1)
    better, worse = first.ranking().scores.cells
    assert float(better) > float(worse)
    lines = hansa.latex_by_data({"MNIST": first, "50% CIFAR": second}).splitlines()
    assert lines[2] == r"method & MNIST, accuracy, final (\%) & 50\% CIFAR, accuracy, final (\%) \\"
    best = rf"\textbf{{{better}}}"
    assert lines[4:7] == [rf"a & {worse} & – \\", rf"b & {best} & {best} \\", rf"c & – & {worse} \\"]
    with pytest.raises(hansa.HansaError, match="at least one comparison"):
        hansa.latex_by_data({})


def test_a_report_without_a_path_is_written_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = hansa.run(METHOD, task_of(drawn()), rounds=1, workers=1)
    assert run.report().read_text("utf-8").startswith("<!doctype html>")
    assert (tmp_path / "report.html").is_file()
