"""A model is evaluated on the server's rows, on those of the sites, or on both; bytes are counted by site."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hansa
from contracts.five import OWNERS, SIZES, Net
from federation.problems import CLUSTERS, SITES, FaultyTransport, Federations, LocalSites, evaluated, server
from hansa import presets
from hansa.core.errors import HansaError
from hansa.core.vectors.arithmetic import fingerprint
from hansa.federation.messages import SiteEvaluationReply, SiteEvaluationRequest
from hansa.federation.policy import Policy
from hansa.federation.site import MemoryStore, Site
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.rounds.messages import Broadcast
from hansa.runs.columns import MetricFacts, main_metric
from hansa.runs.driver import Run
from hansa.runs.experiment import open_run
from hansa.runs.metrics import combined_by, round_seconds, site_totals, summarize
from hansa.runs.trackers import finite_numbers
from hansa.study.recipes.flamby import cox_loss
from hansa.study.report import ReportEntry
from hansa.study.report.page import render_page, site_table
from hansa.study.report.progress import LatestNumbers
from hansa.training.metrics import Bounded, c_index, roc_auc

ROWS = {"north": 7, "south": 13}


def task(test=None, seed=0):
    """The clients' rows, and test rows of one's own."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(SIZES), 6, generator=draw), torch.randint(3, (sum(SIZES),), generator=draw)
    own = torch.Generator().manual_seed(seed)
    pair = None if test is None else (torch.randn(test, 6, generator=own), torch.randint(3, (test,), generator=own))
    held = hansa.data.from_arrays(inputs, targets, clients=OWNERS, test=pair)
    return hansa.Task(Net, nn.functional.cross_entropy, held)


TASKS = {"server": task(20, 1), "north": task(ROWS["north"], 2), "south": task(ROWS["south"], 3)}


def run(algorithm, where, tasks=TASKS, **options):
    return evaluated(algorithm, tasks, where, **options)


METHOD = presets.fedcams(steps=2, batch_size=3, participation=0.6, two_way=True)


class Tagger(nn.Module):
    """A label for each of five positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 15)

    def forward(self, x):
        return self.layer(x).view(-1, 3, 5)


def test_the_accuracy_of_sequences_at_sites_is_by_labels():
    """Positions of -100 do not count, and a site may have more hits than rows."""
    draw = torch.Generator().manual_seed(5)
    inputs, words = torch.randn(sum(SIZES), 6, generator=draw), torch.randint(3, (sum(SIZES), 5), generator=draw)

    def tagging(rows):
        x, y = torch.randn(rows, 6, generator=draw), torch.randint(3, (rows, 5), generator=draw)
        y[::2, 3:] = -100
        held = hansa.data.from_arrays(inputs, words, clients=OWNERS, test=(x, y))
        return hansa.Task(Tagger, nn.functional.cross_entropy, held)

    tasks = {"server": tagging(4), "north": tagging(7), "south": tagging(13)}
    found, engine, _ = run(presets.fedavg(steps=1, batch_size=3, local_lr=0.1), "sites", rounds=1, tasks=tasks)
    hits = labels = 0
    for name in ("north", "south"):
        data = tasks[name].data
        with torch.no_grad():
            picks = tasks[name].module(found.state.vectors)(data.test_inputs).argmax(1)
        counted = data.test_targets >= 0
        hits, labels = hits + int((picks == data.test_targets)[counted].sum()), labels + int(counted.sum())
    assert found.history[-1]["sites_test_accuracy"] == pytest.approx(hits / labels)
    assert not engine.refusals


def test_both_has_both_and_the_run_is_the_same_wherever_it_is_evaluated():
    runs = {where: run(METHOD, where)[0] for where in ("server", "sites", "both")}
    both = runs["both"].history[-1]
    assert {**runs["server"].history[-1], **runs["sites"].history[-1]}.keys() == both.keys()
    for name in ("test_loss", "test_accuracy"):
        assert both[name] == runs["server"].history[-1][name]
        assert both[f"sites_{name}"] == runs["sites"].history[-1][f"sites_{name}"]
    for other in runs.values():
        assert torch.equal(other.params, runs["server"].params)


@pytest.mark.parametrize("fault", FaultyTransport.FAULTS)
def test_evaluation_replies_that_come_late_twice_or_damaged_count_once(fault):
    """The request is each round's last message: mishaps meet it, and late answers meet the next round."""
    expected, _, _ = run(METHOD, "both", rounds=3)
    faults = iter(["deliver", "deliver", fault, fault, "deliver", fault] + [fault, "deliver"] * 3)
    found, _, _ = run(METHOD, "both", rounds=3, plan=lambda: next(faults, "deliver"))
    for a, b in zip(found.history, expected.history, strict=True):
        assert {**a, "seconds": 0, "sites": 0} == {**b, "seconds": 0, "sites": 0}


def test_a_site_without_test_rows_adds_nothing_and_a_silent_one_is_told_of(caplog):
    found, _, _ = run(METHOD, "sites", tasks={**TASKS, "south": task()})
    assert found.history[-1]["sites_test_rows"] == ROWS["north"]
    none, _, _ = run(METHOD, "sites", tasks={**TASKS, "south": task(), "north": task()})
    assert "sites_test_rows" not in none.history[-1]
    assert "no site reports test rows" in caplog.text

    class Deaf(FaultyTransport):
        def send(self, site, data):
            if site == "north" or hansa.rounds.wire_format.kind_of(data) != "exam":
                super().send(site, data)

    bound = Run(METHOD, TASKS["server"]).algorithm
    transport = Deaf(lambda name: Site(bound, TASKS[name], SITES[name]))
    engine = Federations(transport=transport, where="sites")
    half = Run(METHOD, TASKS["server"], engine=engine).advance(1)
    assert half.history[-1]["sites_test_rows"] == ROWS["north"]
    assert "evaluated without site south" in caplog.text


def request_of(found, transport, **changes):
    names = [name for name in ("model", "buffers") if name in found.state.vectors]
    broadcasts = {name: Broadcast.whole(found.state.vectors[name], 3) for name in names}
    digest = fingerprint(found.params)
    return SiteEvaluationRequest(**{"run": found.id, "round": 2, "broadcasts": broadcasts, "digest": digest, **changes})


def test_evaluation_requests_for_others_are_refused():
    found, _, transport = run(METHOD, "sites")
    site = transport.sites["north"]
    good = request_of(found, transport)
    data = bytearray(good.broadcasts["model"].packets[0].bytes)
    data[-1] ^= 1
    damaged = hansa.compress.Packet.parse(bytes(data))
    wrong = [
        ("channels", request_of(found, transport, broadcasts={})),
        ("model", request_of(found, transport, digest=b"\0" * 16)),
        (
            "model",
            request_of(found, transport, broadcasts={**good.broadcasts, "model": Broadcast.whole(torch.ones(5))}),
        ),
        ("model", request_of(found, transport, broadcasts={**good.broadcasts, "model": Broadcast(1, None, ())})),
        (
            "model",
            request_of(found, transport, broadcasts={**good.broadcasts, "model": Broadcast(1, None, (damaged,))}),
        ),
    ]
    for reason, request in wrong:
        before = site.refusals[reason]
        assert site.handle(request.to_bytes()) is None
        assert site.refusals[reason] == before + 1
    marks = SiteEvaluationReply.from_bytes(site.handle(good.to_bytes()))
    assert (marks.rows, marks.weight) == (7, 7.0)


def test_each_site_has_its_numbers_and_the_sums_come_to_those_of_all_rows():
    found, engine, _ = run(METHOD, "both")
    assert not engine.refusals
    last = found.history[-1]
    for name, rows in ROWS.items():
        data, module = TASKS[name].data, TASKS[name].module(found.state.vectors).eval()
        with torch.no_grad():
            out = module(data.test_inputs)
        assert last[f"{name}/test_rows"] == rows
        assert last[f"{name}/test_accuracy"] == int((out.argmax(1) == data.test_targets).sum()) / rows
        expected = nn.functional.cross_entropy(out, data.test_targets).item()
        assert last[f"{name}/test_loss"] == pytest.approx(expected, rel=1e-6)
    accuracies = [last[f"{name}/test_accuracy"] for name in ROWS]
    losses = [last[f"{name}/test_loss"] for name in ROWS]
    assert last["sites_test_rows"] == 20
    for name in ("test_accuracy", "test_loss"):
        mean = sum(last[f"{site}/{name}"] * rows for site, rows in ROWS.items()) / 20
        assert last[f"sites_{name}"] == pytest.approx(mean, rel=1e-6)
    assert (last["sites_test_accuracy_worst"], last["sites_test_loss_worst"]) == (min(accuracies), max(losses))
    assert last["sites_test_accuracy_std"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
    worst = min(ROWS, key=lambda name: last[f"{name}/test_accuracy"])
    assert f"worst site {worst}" in LatestNumbers().add(last)
    summary = summarize(found.history)
    assert summary["north/test_accuracy"] == last["north/test_accuracy"]


def test_sums_over_few_test_rows_stay_at_the_site():
    found, _, transport = run(METHOD, "sites")
    request = request_of(found, transport)
    for fewest, rows in ((7, 7), (8, 0)):
        site = Site(
            Run(METHOD, TASKS["server"]).algorithm, TASKS["north"], SITES["north"], policy=Policy(test_rows=fewest)
        )
        reply = SiteEvaluationReply.from_bytes(site.handle(request.to_bytes()))
        assert (reply.rows, reply.hits is None, reply.loss == 0) == (rows, not rows, not rows)
    assert combine_replies({"north": reply}).metrics == {}


def test_where_is_one_of_three():
    with pytest.raises(HansaError, match=r"where='moon'\): expected 'server', 'sites' or 'both'"):
        run(METHOD, "moon")


@pytest.mark.parametrize("name", ["ha_fed", "cafga"])
def test_gossip_stays_inside_its_site_and_the_ledger_shows_it(name):
    """A cluster a site, of which one client reports: what neighbours say to each other never crosses the wide link."""
    options = {"clusters": CLUSTERS, "reporters": 1, "steps": 3, "batch_size": 3}
    carried = []

    class Weighing(FaultyTransport):
        def send(self, site, data):
            carried.append((site, "down_bytes", len(data)))
            super().send(site, data)

        def receive(self):
            arrived = super().receive()
            carried.extend((site, "up_bytes", len(data)) for site, data in arrived)
            return arrived

    algorithm = getattr(presets, name)(**options)
    bound = Run(algorithm, TASKS["server"]).algorithm
    transport = Weighing(lambda site: Site(bound, TASKS["server"], SITES[site], memory_store=MemoryStore()))
    found = Run(algorithm, TASKS["server"], engine=Federations(transport=transport), evaluate_every=0).advance(3)
    sites = site_totals(found.history)
    for site in SITES:
        for way in ("down_bytes", "up_bytes"):
            assert sites[site][way] == sum(size for place, kind, size in carried if (place, kind) == (site, way))
        assert sites[site]["peer_bytes"] > 0
    assert sum(counts["peer_bytes"] for counts in sites.values()) == found.ledger.peer_bytes
    # frames are the uploads of one reporter a site and little else: neighbours' bytes are not among them
    packets = found.ledger.up_bytes
    assert packets <= sum(counts["up_bytes"] for counts in sites.values()) <= packets + 3 * 2 * 700


def test_checkpoints_say_how_far_back_sites_must_remember(tmp_path):
    config = hansa.config.from_yaml(
        "algorithm: fedavg\nrounds: 7\ndata: {clients: 5}\nmodel: logistic\ncheckpoint: {every: 2, keep: 2}"
    )
    experiment = open_run(config, tmp_path / "run")
    seen = []
    experiment.execute([lambda run, record: seen.append(run.oldest_resumable_round)])
    assert seen == [0, 0, 0, 2, 2, 4, 4]
    again = open_run(None, tmp_path / "run", rounds=8)
    assert again.run.oldest_resumable_round == 6  # of the checkpoints of rounds 6 and 7
    again.execute()
    without = config.checkpoint.model_copy(update={"every": 0})
    never = open_run(config.model_copy(update={"checkpoint": without}), tmp_path / "no")
    never.execute()
    assert never.run.oldest_resumable_round == 7


def test_sites_are_evaluated_where_there_are_sites(tmp_path):
    config = hansa.config.from_yaml("algorithm: fedavg\nrounds: 1\nevaluate: {where: sites}")
    with pytest.raises(HansaError, match=r"evaluate\.where: sites: engine pool has no sites"):
        open_run(config, tmp_path / "run")


MANY = {"north": 80, "south": 130}
RISK_METHOD = presets.fedavg(steps=2, batch_size=3, local_lr=0.1)


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


def risks(rows=20, seed=0, metrics=None, share=0.5):
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(SIZES), 6, generator=draw), (torch.rand(sum(SIZES), generator=draw) < 0.5).float()
    own = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) < share * rows).float()
    test = torch.randn(rows, 6, generator=own) + labels[:, None] * torch.linspace(-1, 1, 6), labels
    held = hansa.data.from_arrays(inputs, targets, clients=OWNERS, test=test)
    metrics = {"auc": roc_auc, "gap": hansa.lower(median_gap)} if metrics is None else metrics
    return hansa.Task(Risk, nn.functional.binary_cross_entropy_with_logits, held, metrics=metrics, main_metric="auc")


RISKS = {
    "server": risks(),
    "north": risks(MANY["north"], 2),
    "south": risks(MANY["south"], 3, share=0.3),
}


def run_risks(disclosure="sketch", tasks=RISKS, test_rows=10, rounds=2):
    rules = {"north": disclosure, "south": disclosure} if isinstance(disclosure, str) else disclosure
    policies = {name: Policy(test_rows=test_rows, metrics=rule, min_rows=1) for name, rule in rules.items()}
    found, engine, _ = evaluated(RISK_METHOD, tasks, rounds=rounds, policies=policies)
    assert not engine.refusals
    return found


def outputs(found, name, tasks=RISKS):
    data = tasks[name].data
    with torch.no_grad():
        return tasks[name].module(found.state.vectors)(data.test_inputs), data.test_targets


def evaluation_request(site):
    model = RISKS["server"].start(hansa.Key(0), torch.float32)["model"]
    return SiteEvaluationRequest("run", 0, {"model": Broadcast.whole(model, 1)}, fingerprint(model))


def test_an_auc_is_pooled_from_sketches_and_every_site_has_its_own():
    found = run_risks()
    last = found.history[-1]
    by_site = {name: outputs(found, name) for name in MANY}
    for name, rows in by_site.items():
        assert last[f"{name}/test_auc"] == pytest.approx(roc_auc(*rows))
        assert last[f"{name}/test_gap"] == pytest.approx(float(median_gap(*rows)), rel=1e-5)
    exact = roc_auc(*(torch.cat(parts) for parts in zip(*by_site.values(), strict=True)))
    assert last["sites_test_auc"] == pytest.approx(exact, abs=0.01)
    assert last["sites_test_auc_at_least"] <= exact <= last["sites_test_auc_at_most"]
    gaps = {name: last[f"{name}/test_gap"] for name in MANY}
    mean = sum(gaps[name] * rows for name, rows in MANY.items()) / sum(MANY.values())
    assert last["sites_test_gap"] == pytest.approx(mean)
    assert last["sites_test_gap_worst"] == max(gaps.values())  # a metric that falls
    assert last["sites_test_auc_worst"] == min(last[f"{name}/test_auc"] for name in MANY)
    assert last["combined_by"] == {
        "auc": "pooled from sketches of 2 sites", "gap": "mean of 2 sites by test rows"
    }  # fmt: skip


@pytest.mark.parametrize("disclosure", ["value", {"north": "sketch", "south": "value"}])
def test_without_all_sketches_the_auc_is_a_mean_of_sites(disclosure):
    last = run_risks(disclosure).history[-1]
    mean = sum(last[f"{name}/test_auc"] * rows for name, rows in MANY.items()) / sum(MANY.values())
    assert last["sites_test_auc"] == pytest.approx(mean)
    assert last["combined_by"]["auc"] == "mean of 2 sites by test rows"
    assert "sites_test_auc_at_least" not in last


def test_a_policy_keeps_metrics_and_small_groups_at_the_site():
    none = run_risks("none").history[-1]
    assert not any("auc" in name or "gap" in name for name in none)
    assert none["north/test_loss"] > 0
    bound = Run(RISK_METHOD, RISKS["server"]).algorithm
    site = Site(bound, risks(130, 3, share=0.05), SITES["south"], policy=Policy())
    site._evaluate(evaluation_request(site))
    assert site.kept_back == {"auc": "7 rows in its smallest group, the policy has 10"}
    rare = {**RISKS, "south": risks(130, 3, share=0.05)}  # 7 positive rows of 130
    last = run_risks("sketch", rare).history[-1]
    assert "south/test_auc" not in last
    assert last["combined_by"]["auc"] == "pooled from sketches of 1 site (without south)"
    assert last["combined_by"]["gap"] == "mean of 2 sites by test rows"
    few = run_risks("sketch", test_rows=100).history[-1]
    assert "north/test_loss" not in few
    assert "south/test_loss" in few
    assert "south/test_auc" not in few  # 39 positive rows


def test_a_metric_that_fails_at_a_site_is_left_out(caplog):
    def fails(output, target):
        raise RuntimeError("row 7 of patients.csv")

    tasks = {**RISKS, "server": risks(metrics={"auc": roc_auc, "gap": hansa.lower(median_gap)})}
    tasks["north"] = risks(80, 2, metrics={"auc": roc_auc, "gap": hansa.lower(fails)})
    last = run_risks("sketch", tasks).history[-1]
    assert "north/test_gap" not in last
    assert "south/test_gap" in last
    assert last["combined_by"]["gap"] == "mean of 1 site by test rows (without north)"
    assert "row 7" in caplog.text  # of the site, whose log this is


def test_a_user_metric_with_values_per_row_is_the_accuracy_at_sites():
    def closeness(output, target):
        return 3.0 - (output - target).abs()  # more than one per row

    def own(rows, seed):
        held = RISKS["north"].data
        draw = torch.Generator().manual_seed(seed)
        test = torch.randn(rows, 6, generator=draw), torch.zeros(rows)
        data = hansa.data.from_arrays(held.inputs, held.targets, clients=OWNERS, test=test)
        return hansa.Task(Risk, nn.functional.mse_loss, data, metric=closeness)

    tasks = {"server": own(5, 1), "north": own(12, 2), "south": own(25, 3)}
    found = run_risks("none", tasks)
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
    tasks = {
        "server": risks(metrics=metrics),
        "north": risks(80, 2, metrics),
        "south": risks(130, 3, metrics, 0.3),
    }
    found = run_risks("sketch", tasks)
    rows = [outputs(found, name, tasks) for name in MANY]
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
    found = run_risks("sketch", tasks)
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
    check_reply("north", changed(sketches={"auc": GROUPS}), RISKS["server"])
    with pytest.raises(hansa.HansaError, match="marks"):
        check_reply("north", changed(**changes), RISKS["server"])


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
    found = run_risks()
    last = found.history[-1]
    main = main_metric(last, found.history.facts)
    assert main == "sites_test_auc"
    worst = min(MANY, key=lambda name: last[f"{name}/test_auc"])
    assert f"worst site {worst} {last[f'{worst}/test_auc']:.3g}" in LatestNumbers().add(last, found.history.facts)
    numbers = {**last, "north/test_rows": 80}
    headings, sites, notes = site_table(found.history, numbers, main, found.history.facts.better)
    assert headings[:3] == ["site", "test rows", "test auc"]
    assert [row[0] for row in sites] == sorted(MANY, key=lambda name: last[f"{name}/test_auc"])
    assert any("pooled from sketches of 2 sites; certainly between" in note for note in notes)
    page = render_page([ReportEntry("fedavg", found.history)])
    section = page[page.index('id="sites"') :][:4000]
    for name, rows in MANY.items():
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
