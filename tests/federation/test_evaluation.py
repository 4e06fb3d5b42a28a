"""A model is evaluated on the server's rows, on those of the sites, or on both; bytes are counted by site."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hansa
from contracts.five import OWNERS, SIZES, Net
from federation.faulty_transport import FaultyTransport
from federation.problems import CLUSTERS, SITES, Federations
from hansa import presets
from hansa.core.errors import HansaError
from hansa.core.vectors.arithmetic import fingerprint
from hansa.federation.messages import SiteEvaluationReply, SiteEvaluationRequest
from hansa.federation.policy import Policy
from hansa.federation.site import MemoryStore, Site
from hansa.federation.site_metrics import combine_replies
from hansa.rounds.messages import Broadcast
from hansa.runs.driver import Run
from hansa.runs.experiment import open_run
from hansa.runs.metrics import site_totals, summarize
from hansa.study.report.progress import LatestNumbers

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


def run(algorithm, where, rounds=2, tasks=TASKS, plan=None):
    bound, kept = Run(algorithm, tasks["server"]).algorithm, {name: MemoryStore() for name in SITES}
    transport = FaultyTransport(lambda name: Site(bound, tasks[name], SITES[name], memory_store=kept[name]))
    if plan is not None:
        transport.plan = plan
    engine = Federations(transport=transport, where=where)
    found = Run(algorithm, tasks["server"], engine=engine, evaluate_every=1).advance(rounds)
    return found, engine.last, transport


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
