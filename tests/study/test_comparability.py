"""What makes runs comparable: one meaning of seeds, the same data, validation rows, and code that means the same."""

from __future__ import annotations

import linecache
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa.config import build, from_yaml
from hansa.runs.experiment import build_run
from hansa.runs.folder import RunFolder
from hansa.runs.provenance import code_without_comments
from hansa.study.report import ReportEntry, rank
from hansa.study.report.page import comparability_warnings

METHOD = hansa.presets.fedavg(local_lr=0.05, steps=2, batch_size=4)


class Net(nn.Module):
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
    return hansa.Task(Net, cross_entropy, data)


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
        return Net()

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
