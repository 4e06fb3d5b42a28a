"""Metrics have a direction, and one of them ranks runs: tasks state it, folders record it, everything follows it."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.runs import metrics
from hansa.runs.columns import MetricFacts, RunHistory
from hansa.runs.folder import RunFolder
from hansa.study.report import ReportEntry, common_target, rank
from hansa.study.report.ranking import choose_metric
from hansa.training.metric_direction import metric_directions

SIZES = (7, 30, 12, 21, 9, 16, 11, 25, 8, 14, 19)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(x).squeeze(1)


def rmse(output, target):
    return ((output - target) ** 2).mean().sqrt()


def margin(output, target):
    return 1.0 - (output - target).abs().mean()


def delay(output, target):
    return (output - target).abs().max()


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(5)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = draw.standard_normal((2 * len(owners), 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 0.3 * draw.standard_normal(len(x))).astype(np.float32)
    rows = len(owners)
    return hansa.data.from_arrays(x[:rows], y[:rows], clients=owners, test=(x[rows:], y[rows:]), test_clients=owners)


@pytest.fixture(scope="module")
def task(data):
    own = {"rmse": rmse, "margin": hansa.higher(margin), "delay": hansa.lower(delay)}
    return hansa.Task(Line, nn.functional.mse_loss, data, metrics=own)


@pytest.fixture(scope="module")
def compared(task, tmp_path_factory):
    methods = {
        name: hansa.presets.fedavg(local_lr=lr, steps=3, batch_size=5, participation=0.5)
        for name, lr in (("bad", 1e-4), ("good", 0.05))
    }
    folder = tmp_path_factory.mktemp("compared")
    return hansa.compare(methods, task, rounds=7, seeds=2, out=folder, workers=1), folder


def test_a_metric_states_its_direction_itself_or_by_its_functions_name():
    class OfTorchmetrics:
        higher_is_better = False

        def __call__(self, output, target):
            return 0.0

    stated = {"own": OfTorchmetrics(), "rmse": hansa.higher(rmse), "first": functools.partial(rmse)}
    directions = metric_directions({**stated, "second": hansa.lower(max)})
    assert directions == {"own": "lower", "rmse": "higher", "first": "lower", "second": "lower"}


def test_a_metric_without_a_direction_is_refused_with_the_remedy(data):
    with pytest.raises(hansa.HansaError, match=r"hansa.higher\(margin\) or hansa.lower\(margin\).*better: lower"):
        hansa.Task(Line, nn.functional.mse_loss, data, metrics={"margin": margin})
    with pytest.raises(hansa.HansaError, match=r"metric=lower\(delay\)"):
        hansa.Task(Line, nn.functional.mse_loss, data, metric=hansa.lower(delay))
    with pytest.raises(hansa.HansaError, match=r"main_metric='auc'.*margin, loss"):
        hansa.Task(Line, nn.functional.mse_loss, data, metrics={"margin": hansa.higher(margin)}, main_metric="auc")


def test_a_stated_metric_reaches_other_processes():
    copy = pickle.loads(pickle.dumps(hansa.lower(delay)))  # noqa: S301
    assert copy.higher_is_better is False
    assert float(copy(torch.tensor([1.0]), torch.tensor([4.0]))) == 3.0


def test_worst_tenth_best_and_targets_follow_the_direction(compared):
    run = compared[0]["good"][0]
    last = run.clients().at_round(7)
    tenth = -(-len(SIZES) // 10)
    for name, worst in (("rmse", "largest"), ("delay", "largest"), ("margin", "smallest")):
        ordered = np.sort(last[f"test_{name}"].astype(np.float64))
        expected = (ordered[-tenth:] if worst == "largest" else ordered[:tenth]).mean()
        assert run.history[-1][f"client_{name}_worst"] == pytest.approx(expected)
    values = {name: [record[f"test_{name}"] for record in run.history] for name in ("rmse", "delay", "margin")}
    assert metrics.best(run.history, "test_delay") == min(values["delay"])
    assert metrics.best(run.history, "test_margin") == max(values["margin"])
    assert metrics.rounds_to(run.history, values["rmse"][3], "test_rmse") == next(
        r for r, value in enumerate(values["rmse"], 1) if value <= values["rmse"][3]
    )
    spent = metrics.cost_to(run.history, values["rmse"][3], "test_rmse")
    sent = [r["up_bytes"] + r["down_bytes"] + r["peer_bytes"] for r in run.history[: spent["round"]]]
    assert spent["bits"] == 8 * sum(sent)


def test_the_first_own_metric_ranks_a_task_without_accuracy(compared, task):
    comparison, _ = compared
    assert task.main_metric == "test_rmse"
    assert comparison.best == "good"
    assert comparison["good"].metric == "test_rmse"
    assert [r.entry.name for r in comparison.ranking(metric="test_margin")] == ["good", "bad"]
    assert [r.entry.name for r in comparison.ranking(metric="test_delay")] == ["good", "bad"]
    table = comparison.table(target=2.0)
    assert table.attrs["ranked_by"] == "last5_test_rmse"
    assert list(table["method"]) == ["good", "bad"]
    assert table["bits_to_target"][0] == comparison["good"].bits_to(2.0).mean
    assert comparison["good"].rounds_to(2.0).mean == table["rounds_to_target"][0]
    assert "test rmse, mean of last 5" in repr(comparison)
    figure = comparison.plot(metric="test_delay")
    assert figure.axes[0].get_ylabel() == "test delay"


def test_folders_know_the_metrics_without_their_code(compared):
    folder = compared[1] / "good" / "seed-1"
    facts = RunFolder(folder).history.facts
    assert facts == MetricFacts("test_rmse", {"rmse": "lower", "margin": "higher", "delay": "lower"}, None)
    entries = [ReportEntry.from_folder(compared[1] / name) for name in ("bad", "good")]
    assert [ranked.entry.name for ranked in rank(entries)] == ["good", "bad"]
    assert choose_metric(entries)[0] == "test_rmse"
    summary = RunFolder(folder).summary
    history = RunFolder(folder).history
    assert summary["best_test_delay"] == min(record["test_delay"] for record in history)


def test_a_column_of_unknown_direction_is_asked_for():
    history = [{"round": r, "test_odd": float(r)} for r in range(1, 4)]
    assert "best_test_odd" not in metrics.summarize(history)
    with pytest.raises(hansa.HansaError, match="Write test_odd:lower or test_odd:higher"):
        metrics.best(history, "test_odd")
    assert metrics.best(history, "test_odd:lower") == 1.0
    with pytest.raises(hansa.HansaError, match="expected lower or higher"):
        metrics.best(history, "test_odd:down")
    entries = [ReportEntry(name, [{"round": 1, "test_odd": value}]) for name, value in (("a", 1.0), ("b", 2.0))]
    assert [r.entry.name for r in rank(entries, metric="test_odd:lower")] == ["a", "b"]
    with pytest.raises(hansa.HansaError, match="no run has it"):
        rank(entries, metric="test_od:lower")


def test_a_search_follows_the_direction_of_the_task(task):
    pytest.importorskip("optuna")
    axes = {"local_lr": [1e-4, 0.05]}
    found_search = hansa.search(
        functools.partial(hansa.presets.fedavg, steps=2, batch_size=5), task, axes, rounds=2, trials=4, workers=1
    )
    assert found_search.metric == "test_rmse"
    assert found_search.best.point == {"local_lr": 0.05}


def test_scores_name_what_they_are():
    long = [{"round": r, "test_accuracy": r / 10} for r in range(1, 8)]
    short = long[:5]
    assert "last5_test_accuracy" not in metrics.summarize(short)
    assert metrics.summarize(long)["last5_test_accuracy"] == pytest.approx(0.5)
    assert metrics.summarize(long, window=2)["last2_test_accuracy"] == pytest.approx(0.65)
    assert metrics.last(short, few_as_final=True) == 0.5
    ranking = rank([ReportEntry("long", long), ReportEntry("short", short)])
    assert ranking.score == "test_accuracy"  # one has no mean of five: all are ranked by the final value
    assert rank([ReportEntry("long", long)]).score == "last5_test_accuracy"
    assert rank([ReportEntry("long", long)], window=1).score == "last1_test_accuracy"


def test_automatic_targets_are_above_chance():
    def entry(best, chance):
        return ReportEntry("a", RunHistory([{"round": 1, "test_accuracy": best}], MetricFacts(chance=chance)))

    assert common_target([entry(0.42, 0.1)]) == 0.4
    assert common_target([entry(0.42, 0.4)]) is None
    assert common_target([entry(0.42, 0.7)]) is None
    assert common_target([ReportEntry("b", [{"round": 1, "test_auc": 0.9}])]) is None


def test_a_seed_beside_a_list_of_seeds_is_refused():
    task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    with pytest.raises(hansa.HansaError, match=r"run\(seed=3\): expected none beside a list of seeds"):
        hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, seeds=[42], seed=3)
    assert hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, seeds=2, seed=3).seeds == [3, 4]
