"""Metrics at sites that are not sums: pooled from sketches or averaged, by the sites' policies, and said which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hansa
from contracts.five import OWNERS, SIZES
from federation.faulty_transport import FaultyTransport
from federation.local_sites import LocalSites, server
from federation.problems import SITES, Federations
from hansa import presets
from hansa.core.vectors.arithmetic import fingerprint
from hansa.federation.messages import SiteEvaluationReply, SiteEvaluationRequest
from hansa.federation.policy import Policy
from hansa.federation.site import Site
from hansa.federation.site_metrics import check_reply
from hansa.rounds.messages import Broadcast
from hansa.runs.columns import MetricFacts, main_metric
from hansa.runs.driver import Run
from hansa.runs.metrics import combined_by, round_seconds
from hansa.runs.trackers import finite_numbers
from hansa.study.recipes.flamby import cox_loss
from hansa.study.report import ReportEntry
from hansa.study.report.page import render_page, site_table
from hansa.study.report.progress import LatestNumbers
from hansa.training.metrics import Bounded, c_index, roc_auc

ROWS = {"north": 80, "south": 130}
METHOD = presets.fedavg(steps=2, batch_size=3, local_lr=0.1)


class Risk(nn.Module):
    """One output, written the way users write it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)


def median_gap(output, target):
    """A metric of the user's own, which is neither a sum nor mergeable."""
    return (output[target == 1].median() - output[target == 0].median()).abs()


def task(rows=20, seed=0, metrics=None, share=0.5):
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(SIZES), 6, generator=draw), (torch.rand(sum(SIZES), generator=draw) < 0.5).float()
    own = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) < share * rows).float()
    test = torch.randn(rows, 6, generator=own) + labels[:, None] * torch.linspace(-1, 1, 6), labels
    held = hansa.data.from_arrays(inputs, targets, clients=OWNERS, test=test)
    metrics = {"auc": roc_auc, "gap": hansa.lower(median_gap)} if metrics is None else metrics
    return hansa.Task(Risk, nn.functional.binary_cross_entropy_with_logits, held, metrics=metrics, main_metric="auc")


TASKS = {"server": task(), "north": task(ROWS["north"], 2), "south": task(ROWS["south"], 3, share=0.3)}


def run(disclosure="sketch", tasks=TASKS, test_rows=10, rounds=2):
    bound = Run(METHOD, tasks["server"]).algorithm
    rules = {"north": disclosure, "south": disclosure} if isinstance(disclosure, str) else disclosure
    transport = FaultyTransport(
        lambda name: Site(
            bound, tasks[name], SITES[name], policy=Policy(test_rows=test_rows, metrics=rules[name], min_rows=1)
        )
    )
    engine = Federations(transport=transport, where="sites")
    found = Run(METHOD, tasks["server"], engine=engine).advance(rounds)
    assert not engine.last.refusals
    return found


def outputs(found, name, tasks=TASKS):
    data = tasks[name].data
    with torch.no_grad():
        return tasks[name].module(found.state.vectors)(data.test_inputs), data.test_targets


def evaluation_request(site):
    model = TASKS["server"].start(hansa.Key(0), torch.float32)["model"]
    return SiteEvaluationRequest("run", 0, {"model": Broadcast.whole(model, 1)}, fingerprint(model))


def test_an_auc_is_pooled_from_sketches_and_every_site_has_its_own():
    found = run()
    last = found.history[-1]
    by_site = {name: outputs(found, name) for name in ROWS}
    for name, rows in by_site.items():
        assert last[f"{name}/test_auc"] == pytest.approx(roc_auc(*rows))
        assert last[f"{name}/test_gap"] == pytest.approx(float(median_gap(*rows)), rel=1e-5)
    exact = roc_auc(*(torch.cat(parts) for parts in zip(*by_site.values(), strict=True)))
    assert last["sites_test_auc"] == pytest.approx(exact, abs=0.01)
    assert last["sites_test_auc_at_least"] <= exact <= last["sites_test_auc_at_most"]
    gaps = {name: last[f"{name}/test_gap"] for name in ROWS}
    mean = sum(gaps[name] * rows for name, rows in ROWS.items()) / sum(ROWS.values())
    assert last["sites_test_gap"] == pytest.approx(mean)
    assert last["sites_test_gap_worst"] == max(gaps.values())  # a metric that falls
    assert last["sites_test_auc_worst"] == min(last[f"{name}/test_auc"] for name in ROWS)
    assert last["combined_by"] == {
        "auc": "pooled from sketches of 2 sites", "gap": "mean of 2 sites by test rows"
    }  # fmt: skip


@pytest.mark.parametrize("disclosure", ["value", {"north": "sketch", "south": "value"}])
def test_without_all_sketches_the_auc_is_a_mean_of_sites(disclosure):
    last = run(disclosure).history[-1]
    mean = sum(last[f"{name}/test_auc"] * rows for name, rows in ROWS.items()) / sum(ROWS.values())
    assert last["sites_test_auc"] == pytest.approx(mean)
    assert last["combined_by"]["auc"] == "mean of 2 sites by test rows"
    assert "sites_test_auc_at_least" not in last


def test_a_policy_keeps_metrics_and_small_groups_at_the_site():
    none = run("none").history[-1]
    assert not any("auc" in name or "gap" in name for name in none)
    assert none["north/test_loss"] > 0
    bound = Run(METHOD, TASKS["server"]).algorithm
    site = Site(bound, task(130, 3, share=0.05), SITES["south"], policy=Policy())
    site._evaluate(evaluation_request(site))
    assert site.kept_back == {"auc": "7 rows in its smallest group, the policy has 10"}
    rare = {**TASKS, "south": task(130, 3, share=0.05)}  # 7 positive rows of 130
    last = run("sketch", rare).history[-1]
    assert "south/test_auc" not in last
    assert last["combined_by"]["auc"] == "pooled from sketches of 1 site (without south)"
    assert last["combined_by"]["gap"] == "mean of 2 sites by test rows"
    few = run("sketch", test_rows=100).history[-1]
    assert "north/test_loss" not in few
    assert "south/test_loss" in few
    assert "south/test_auc" not in few  # 39 positive rows


def test_a_metric_that_fails_at_a_site_is_left_out(caplog):
    def fails(output, target):
        raise RuntimeError("row 7 of patients.csv")

    tasks = {**TASKS, "server": task(metrics={"auc": roc_auc, "gap": hansa.lower(median_gap)})}
    tasks["north"] = task(80, 2, metrics={"auc": roc_auc, "gap": hansa.lower(fails)})
    last = run("sketch", tasks).history[-1]
    assert "north/test_gap" not in last
    assert "south/test_gap" in last
    assert last["combined_by"]["gap"] == "mean of 1 site by test rows (without north)"
    assert "row 7" in caplog.text  # of the site, whose log this is


def test_a_user_metric_with_values_per_row_is_the_accuracy_at_sites():
    def closeness(output, target):
        return 3.0 - (output - target).abs()  # more than one per row

    def own(rows, seed):
        held = TASKS["north"].data
        draw = torch.Generator().manual_seed(seed)
        test = torch.randn(rows, 6, generator=draw), torch.zeros(rows)
        data = hansa.data.from_arrays(held.inputs, held.targets, clients=OWNERS, test=test)
        return hansa.Task(Risk, nn.functional.mse_loss, data, metric=closeness)

    tasks = {"server": own(5, 1), "north": own(12, 2), "south": own(25, 3)}
    found = run("none", tasks)
    values = [closeness(*outputs(found, name, tasks)) for name in ("north", "south")]
    assert found.history[-1]["sites_test_accuracy"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-5)


class RootMeanSquare:
    """A metric of the user's own that can be pooled."""

    higher_is_better = False

    def __call__(self, output, target):
        return (output - target).square().mean().sqrt()

    def sketch(self, output, target, fewest):
        return {"sums": [[len(target), float((output - target).square().double().sum())]]}

    def combine(self, sketches):
        rows, total = (sum(sketch["sums"][0][place] for sketch in sketches) for place in (0, 1))
        return Bounded(*[(total / rows) ** 0.5] * 3)


def test_a_metric_of_ones_own_can_be_pooled():
    metrics = {"error": RootMeanSquare(), "auc": roc_auc}
    tasks = {"server": task(metrics=metrics), "north": task(80, 2, metrics), "south": task(130, 3, metrics, 0.3)}
    found = run("sketch", tasks)
    rows = [outputs(found, name, tasks) for name in ROWS]
    exact = RootMeanSquare()(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    assert found.history[-1]["sites_test_error"] == pytest.approx(float(exact), rel=1e-5)
    assert found.history[-1]["combined_by"]["error"] == "pooled from sketches of 2 sites"
    assert {"north/test_error", "sites_test_error_worst"} <= set(finite_numbers(found.history[-1]))  # of trackers


def test_survival_times_have_a_c_index_by_site():
    def survival(rows, seed):
        draw = torch.Generator().manual_seed(seed)

        def table(count):
            times = torch.stack(
                [(torch.rand(count, generator=draw) < 0.7).float(), torch.rand(count, generator=draw)], 1
            )
            return torch.randn(count, 6, generator=draw), times

        data = hansa.data.from_arrays(*table(sum(SIZES)), clients=OWNERS, test=table(rows))
        return hansa.Task(Risk, cox_loss, data, metrics={"c_index": c_index})

    tasks = {"server": survival(9, 1), "north": survival(40, 2), "south": survival(70, 3)}
    found = run("sketch", tasks)
    last = found.history[-1]
    for name in ("north", "south"):
        assert last[f"{name}/test_c_index"] == pytest.approx(c_index(*outputs(found, name, tasks)))
    assert last["combined_by"] == {"c_index": "mean of 2 sites by test rows"}
    assert main_metric(last, found.history.facts) == "sites_test_c_index"


GOOD = SiteEvaluationReply("run", 1, b"", 20, 5.0, 20.0, None, None, {"auc": 0.7, "gap": 0.1}, {})
GROUPS = {"positive": [[10, 0.6]], "negative": [[10, 0.4]]}


def changed(**changes):
    return SiteEvaluationReply(**{**{name: getattr(GOOD, name) for name in GOOD.__slots__}, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"other": 1.0}},
        {"sketches": {"gap": GROUPS}},
        {"sketches": {"auc": {"positive": [[-4, 0.5]], "negative": [[5, 0.5]]}}},
        {"metrics": {}, "sketches": {"auc": GROUPS}},
        {"rows": 0},
    ],
)
def test_impossible_or_unasked_metrics_are_refused(changes):
    check_reply("north", changed(sketches={"auc": GROUPS}), TASKS["server"])
    with pytest.raises(hansa.HansaError, match="marks"):
        check_reply("north", changed(**changes), TASKS["server"])


@pytest.mark.parametrize("value", ["nan", [0.5], True, "0.5", None, 10**400])
def test_a_metric_on_the_wire_is_a_finite_number(value):
    head = hansa.rounds.wire_format.unpack(changed().to_bytes(), "marks").head
    for part in ({"metrics": {"auc": value}}, {"sketches": {"auc": {"positive": [[value, 0.5]]}}}):
        frame = hansa.rounds.wire_format.pack("marks", {**head, **part})
        with pytest.raises(hansa.HansaError):
            SiteEvaluationReply.from_bytes(frame)
    again = SiteEvaluationReply.from_bytes(changed(sketches={"auc": GROUPS}).to_bytes())
    assert (again.metrics, again.sketches) == (GOOD.metrics, {"auc": GROUPS})


def test_the_headline_is_never_the_training_loss_where_sites_evaluate():
    known = ["train_loss", "sites_test_loss", "sites_test_accuracy", "sites_test_auc", "sites_test_auc_worst"]
    assert main_metric(known, MetricFacts("test_auc", {"auc": "higher"})) == "sites_test_auc"
    assert main_metric(known[:3], MetricFacts("test_accuracy")) == "sites_test_accuracy"
    assert main_metric(known[:2], MetricFacts("test_loss")) == "sites_test_loss"
    assert main_metric(known[:2]) == "sites_test_loss"
    assert main_metric([*known, "test_auc"], MetricFacts("test_auc", {"auc": "higher"})) == "test_auc"


def test_progress_page_and_table_name_the_sites():
    found = run()
    last = found.history[-1]
    main = main_metric(last, found.history.facts)
    assert main == "sites_test_auc"
    worst = min(ROWS, key=lambda name: last[f"{name}/test_auc"])
    assert f"worst site {worst} {last[f'{worst}/test_auc']:.3g}" in LatestNumbers().add(last, found.history.facts)
    numbers = {**last, "north/test_rows": 80}
    headings, sites, notes = site_table(found.history, numbers, main, found.history.facts.better)
    assert headings[:3] == ["site", "test rows", "test auc"]
    assert [row[0] for row in sites] == sorted(ROWS, key=lambda name: last[f"{name}/test_auc"])
    assert any("pooled from sketches of 2 sites; certainly between" in note for note in notes)
    page = render_page([ReportEntry("fedavg", found.history)])
    section = page[page.index('id="sites"') :][:4000]
    for name, rows in ROWS.items():
        assert f'<td class="left">{name}</td><td>{rows}</td>' in section
    assert "deviation over sites" in section
    assert "highest sites test auc" in page


def test_the_policy_of_a_site_reaches_its_answers(tmp_path):
    """Over the enrollment, as `hansa serve` and `hansa join` do it; the record says where the seconds went."""
    text = """
name: trial
rounds: 2
data: {name: heart-disease, options: {test: 0.25}}
model: {name: logistic, metrics: {auc: roc_auc}, main_metric: auc}
local: {steps: 3, batch_size: 8, lr: 0.1}
evaluate: {where: sites}
engine: {kind: flower, sites: {north: 2, south: 2}, deadline: 60}
"""
    found = {}
    for disclosure in ("none", "value", "sketch"):
        sites = LocalSites(tmp_path / disclosure, policy=Policy(metrics=disclosure, test_rows=2))
        experiment = server(sites, text=text).new(tmp_path / f"run {disclosure}")
        experiment.execute()
        found[disclosure] = experiment.run
        sent = b"".join(answer for _, _, answer in sites.seen)
        assert (b'"sketches":{"' in sent, b'"metrics":{"' in sent) == (disclosure == "sketch", disclosure != "none")
        page = sites.agent("north").exchange_log.page("north", {})
        assert ("kept back: auc: the policy has metrics: none" in page) == (disclosure == "none")
    assert not any("auc" in name for name in found["none"].history[-1])
    assert found["value"].history[-1]["combined_by"] == {"auc": "mean of 2 sites by test rows"}
    last = found["sketch"].history[-1]
    assert last["north/test_auc"] == found["value"].history[-1]["north/test_auc"]
    assert combined_by(found["sketch"].history)["auc"].startswith("pooled")
    assert set(last["sites"]["north"]) == {
        "down_bytes", "up_bytes", "peer_bytes", "seconds", "work_seconds"
    }  # fmt: skip
    parts = round_seconds(found["sketch"].history)
    assert parts["seconds"] >= parts["transport_seconds"] > 0
    summary = (tmp_path / "run sketch" / "summary.json").read_text()
    assert all(text in summary for text in ('"north/test_auc"', "pooled from sketches", '"round_seconds"'))
