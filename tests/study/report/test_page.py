"""The report page: complete, offline, safe, and true to the histories it is made of."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import hansa
from hansa import pace, presets
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.study import report
from hansa.study.report import ReportEntry, ranking
from hansa.study.report.page import MAX_BARS, MAX_JOBS, MAX_TIMED_CLIENTS, timeline_data
from runs.people import owned_task


def history(curve, up=1000, seconds=1.0, simulated=None):
    records = []
    for round, accuracy in enumerate(curve, start=1):
        record = {"round": round, "test_accuracy": accuracy, "up_bytes": up, "down_bytes": 1000, "seconds": seconds}
        records.append(record if simulated is None else {**record, "simulated_seconds": simulated})
    return records


SLOW = ReportEntry("slow", history([0.2, 0.4, 0.5, 0.6, 0.61, 0.62], simulated=10.0), "algorithm: fedavg\n")
FAST = ReportEntry("fast", history([0.5, 0.7, 0.72, 0.74, 0.74, 0.75], up=10, simulated=1.0), "algorithm: fedams\n")


class Reader(HTMLParser):
    """Collects the tables by their id, all links and the embedded data."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.links, self.data, self._cell, self._in_data = {}, [], "", None, False
        self.tags, self._rows = [], []
        self.feed(text)

    @property
    def rows(self):
        return self.tables["ranking"]

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.links += [values[name] for name in ("src", "href") if name in values]
        if tag == "table":
            self._rows = self.tables[values.get("id", "")] = []
        if tag == "tr":
            self._rows.append([])
        self._cell = [] if tag in ("td", "th") else self._cell
        self._in_data = tag == "script" and values.get("type") == "application/json"

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._rows[-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)
        if self._in_data:
            self.data += data


def embedded(text):
    return json.loads(Reader(text).data)


def seeds(name, *curves):
    members = [ReportEntry(name, history(curve), seed=seed) for seed, curve in enumerate(curves)]
    return ReportEntry.from_seeds(name, members)


def test_the_table_ranks_by_the_mean_of_the_last_five_with_costs_and_rounds_to_the_target():
    header, fast, slow = Reader(report.render_page([SLOW, FAST], target=0.7)).rows
    at = {name: place for place, name in enumerate(header)}
    assert (fast[1:3], slow[1:3]) == (["fast", "73.0%"], ["slow", "54.6%"])  # (0.40 + 0.50 + 0.60 + 0.61 + 0.62) / 5
    for column, cells in {"sent up": ("480 bit", "48 kbit"), "simulated time": ("6 s", "60 s"),
                          "rounds to 70%": ("2", "never")}.items():  # fmt: skip
        assert (fast[at[column]], slow[at[column]]) == cells


def test_rounds_to_several_targets_stand_with_what_was_sent():
    header, *rows = Reader(report.render_page([SLOW, FAST], target=0.6)).tables["targets"]
    assert header == ["method", "50%", "55%", "60%", "65%", "70%"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["slow"] == ["348 kbit", "464 kbit", "464 kbit", "never", "never"]
    assert cells["fast"][0] == "18.08 kbit"


@pytest.mark.parametrize(
    ("entries", "target"),
    [
        ([SLOW, FAST], 0.75),
        ([SLOW], 0.6),
        ([seeds("one", [0.9], [0.42])], 0.4),
        ([ReportEntry("x", [{"round": 1, "loss": 1.0}])], None),
    ],
)
def test_the_chosen_target_is_the_highest_step_that_every_seed_of_half_the_methods_reached(entries, target):
    assert report.common_target(entries) == target


def test_the_curves_hold_the_history_with_running_totals_in_colours_that_do_not_follow_ranks():
    slow, fast = embedded(report.render_page([SLOW, FAST]))["runs"]
    assert (slow["name"], [slow["colour"], fast["colour"]]) == ("slow", list(ranking.PALETTE[:2]))
    (series,) = slow["series"]
    assert series["test_accuracy"] == [0.2, 0.4, 0.5, 0.6, 0.61, 0.62]
    assert series["bits"] == [16_000 * r for r in range(1, 7)]
    assert series["simulated_total_seconds"] == [10.0 * r for r in range(1, 7)]


def test_the_page_asks_the_network_for_nothing():
    text = report.render_page([SLOW, replace(FAST, cites=["@article{a, url = {https://example.org}}"])])
    assert "https://example.org" in text
    assert "default-src 'none'" in text
    assert not Reader(text).links
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//|fetch\(", text)


def test_names_and_texts_cannot_break_out_of_the_page():
    nasty = "</script><script>alert(1)</script>&<b>"
    counts = report.LabelCounts([[5, 0], [0, 9]], ["a", nasty])
    clients = ClientColumns(client=np.arange(2), loss=np.ones(2, np.float32)).named([nasty, nasty])
    entry = ReportEntry(nasty, history([0.5]), nasty, labels=lambda: counts, clients=lambda: clients)
    table = report.ReportTable(nasty, [nasty], [[nasty]], nasty)
    text = report.render_page([entry], title=nasty, lead=nasty, facts=[nasty], problems=[nasty], published=[table])
    page, data = Reader(text), embedded(text)
    assert page.tags.count("script") == 3
    assert data["runs"][0]["name"] == page.rows[1][1] == nasty
    assert data["partitions"] == [{"labels": ["a", nasty], "counts": [[5, 0], [0, 9]], "clients": 2}]
    assert "<li>&lt;/script&gt;" in text
    assert 'title="9 of &lt;/script&gt;' in text


def test_runs_without_accuracy_are_ranked_by_their_loss_and_diverged_ones_last():
    low, high, gone = (ReportEntry(str(loss), [{"round": 1, "loss": loss}]) for loss in (0.1, 0.9, float("nan")))
    text = report.render_page([gone, high, low])
    assert [row[1] for row in Reader(text).rows[1:]] == ["0.1", "0.9", "nan"]
    assert "loss" not in embedded(text)["runs"][0]["series"][0]


def test_no_runs_and_equal_names_are_refused():
    for entries, message in (([], "at least one run"), ([SLOW, SLOW], "two runs are called 'slow'")):
        with pytest.raises(hansa.HansaError, match=message):
            report.render_page(entries)


def test_methods_are_ranked_by_the_mean_over_seeds_not_by_the_luckiest():
    lucky, steady = seeds("lucky", [0.9], [0.3], [0.3]), seeds("steady", [0.6], [0.6], [0.6])
    rows = Reader(report.render_page([lucky, steady], target=0.6)).rows
    assert [row[1] for row in rows[1:]] == ["steady 3 seeds", "lucky 3 seeds"]
    assert rows[2][2] == "50.0 ± 34.6%"  # the mean and the sample deviation of 0.9, 0.3, 0.3
    place = rows[0].index("rounds to 60%")
    assert (rows[1][place], rows[2][place]) == ("1 ± 0", "1 of 3 runs")


def test_the_page_gets_every_seed_on_the_rounds_all_have():
    (run,) = embedded(report.render_page([seeds("group", [0.2, 0.4, 0.6], [0.4, 0.6])]))["runs"]
    assert run["seeds"] == [0, 1]
    assert [table["round"] for table in run["series"]] == [[1, 2], [1, 2]]
    assert [table["test_accuracy"] for table in run["series"]] == [[0.2, 0.4], [0.4, 0.6]]


def test_mixed_data_and_metrics_are_said():
    one = ReportEntry("one", history([0.5]), data={"name": "mnist"})
    other = ReportEntry("other", [{"round": 1, "test_loss": 0.5}], data={"name": "cifar10"})
    text = report.render_page([one, other])
    assert "different data (mnist: one; cifar10: other)" in text
    assert "other measured no test accuracy: it is ranked after those that did." in text
    assert "different data" not in report.render_page([SLOW, FAST])
    text = report.render_page([ReportEntry("mixed", [], members=(replace(one, seed=0), replace(other, seed=1)))])
    assert "only common ones are averaged" in text
    assert "50.0%" not in Reader(text).rows[1]


def test_configurations_that_differ_stand_side_by_side():
    page = Reader(report.render_page([SLOW, FAST]))
    assert page.tables["differences"] == [["key", "fast", "slow"], ["algorithm", "fedams", "fedavg"]]
    assert "differences" not in Reader(report.render_page([SLOW])).tables


def test_published_numbers_come_as_data():
    rows = [["a<b", "1", "agrees"], ["c", None, "differs"]]
    text = report.render_page([SLOW], published=[report.ReportTable("Published", ["", "ours", "verdict"], rows)])
    for part in ("a&lt;b", '<span class="verdict good">agrees</span>', '<span class="verdict bad">differs</span>'):
        assert part in text


@pytest.mark.parametrize(("rounds", "thinned"), [(250, False), (1600, True)])
def test_twenty_runs_of_many_rounds_stay_below_a_megabyte_and_a_half(rounds, thinned):
    drawn = ("test_loss", "train_loss", "diversity", "surrogate_diversity", "gamma", "q", "consensus", "update_norm",
             "aggregate_norm", "seconds")  # fmt: skip

    def record(round, run):
        noise = (7919 * round + 104_729 * run) % 10_007 / 10_007
        numbers = {name: noise * (place + 1) for place, name in enumerate(drawn)}
        return {"round": round, "test_accuracy": noise, "up_bytes": 1000, "down_bytes": 10, "lost": 0, **numbers}

    entries = [ReportEntry(f"run {run}", [record(r, run) for r in range(1, rounds + 1)]) for run in range(20)]
    text = report.render_page(entries)
    assert len(text.encode()) < 1_500_000
    data = embedded(text)
    assert (data["stride"] > 1) is thinned
    (series,) = data["runs"][0]["series"]
    assert series["round"][-1] == rounds
    assert len(series["test_loss"]) < rounds if thinned else len(series["test_loss"]) == rounds


def columns(accuracy: list[float]) -> ClientColumns:
    count = len(accuracy)
    return ClientColumns(
        client=np.arange(count),
        asked=np.full(count, 4),
        participations=np.arange(count),
        up_bytes=np.full(count, 1250),
        test_accuracy=np.array(accuracy, np.float32),
        loss=np.ones(count, np.float32),
    )


def entry(accuracy: list[float], **more) -> ReportEntry:
    return ReportEntry("m", [{"round": 1, "test_accuracy": 0.5}], clients=lambda: columns(accuracy), **more)


def rows_of(text: str) -> list[list[str]]:
    return next(table for table in Reader(text).tables.values() if table and table[0][0] == "worst clients")


def test_the_worst_come_first_with_their_own_numbers() -> None:
    rows = rows_of(report.render_page([entry([0.9, 0.2, float("nan"), 0.5, 0.7])]))
    assert [row[0] for row in rows[1:]] == ["client 1", "client 3", "client 4", "client 0"]
    assert rows[0][1:] == ["test accuracy", "loss", "participations", "up"]
    assert rows[1][1:] == ["20.0%", "1", "1", "10 kbit"]


def test_the_spread_and_the_bars_are_those_of_the_clients() -> None:
    accuracy = np.random.default_rng(0).random(37).astype(np.float32).tolist()
    mean, deviation, worst = summarize_clients(accuracy, lower_is_better=False)
    text = report.render_page([entry(accuracy)])
    assert f"mean {100 * mean:.1f}%, deviation {100 * deviation:.1f}%, worst tenth {100 * worst:.1f}%" in text
    (bars,) = embedded(text)["clients"]
    assert bars["values"] == pytest.approx(sorted(accuracy), rel=1e-3)


def test_ten_thousand_clients_stay_small() -> None:
    many = np.random.default_rng(1).random(10_000).tolist()
    counts = report.LabelCounts([[5] * 10] * 10_000, list("abcdefghij"))
    entries = [replace(entry(many, labels=lambda: counts), name=f"m{n}") for n in range(20)]
    text = report.render_page(entries)
    assert len(text) < 600_000
    assert len(embedded(text)["clients"][0]["values"]) == MAX_BARS


def test_a_run_a_folder_and_seeds_have_it_on_their_page(tmp_path) -> None:
    made = presets.fedavg(steps=2, batch_size=4, participation=0.5)
    run = hansa.run(made, owned_task(7), rounds=3, out=tmp_path / "x", name="one")
    living = run.report(tmp_path / "a.html").read_text()
    folder = report.render_page([report.ReportEntry.from_folder(tmp_path / "x")])
    worst = run.clients().at_round(3)
    lowest = int(worst["client"][np.nanargmin(worst["test_accuracy"])])
    for page in (living, folder):
        assert 'section class="card" id="clients"' in page
        assert f"client {lowest}</td>" in page
        assert "labels held" in page
    several = hansa.run(made, owned_task(7), rounds=2, seeds=2).report(tmp_path / "b.html").read_text()
    assert "seed 0, the first of 2" in several


def test_damaged_records_of_clients_and_a_summary_that_does_not_agree_are_named_on_the_page(tmp_path) -> None:
    run = hansa.run(presets.fedavg(steps=1), owned_task(5), rounds=2, out=tmp_path / "x", name="one")
    assert 'id="timeline"' not in run.report(tmp_path / "page.html").read_text("utf-8")  # no clock
    path = tmp_path / "x" / "summary.json"
    path.write_text(path.read_text().replace('"rounds": 2', '"rounds": 7'))
    with closing(sqlite3.connect(tmp_path / "x" / "run.db")) as other, other:
        other.execute("UPDATE rounds SET clients = x'00'")
    page = report.render_page([report.ReportEntry.from_folder(tmp_path / "x")])
    assert 'id="clients"' not in page
    assert "one: clients left out" in page
    assert re.search(r"<li>one: .*contradicts the record", page)


def jobs_table(jobs):
    names = ("round", "client", "admitted", "start_seconds", "download_seconds", "compute_seconds", "upload_seconds")
    return dict(zip(names, map(np.array, zip(*jobs, strict=True)), strict=True))


def test_clients_of_a_timeline_stand_from_fast_to_slow() -> None:
    data = timeline_data(jobs_table([(1, 5, True, 0.0, 1.0, 5.0, 2.0), (1, 3, False, 2.0, 0.0, 4.0, 0.0)]))
    assert (data["clients"], data["seconds"]) == ([3, 5], 8.0)
    assert data["jobs"] == [[1, 0.0, 1.0, 6.0, 8.0, 0, 1], [0, 2.0, 2.0, 6.0, 6.0, 1, 1]]


def test_many_clients_and_jobs_of_a_timeline_are_thinned() -> None:
    jobs = [(r, c, True, float(r), 0.0, 1.0 + c, 0.0) for r in range(10) for c in range(3000)]
    data = timeline_data(jobs_table(jobs))
    assert (len(data["clients"]), data["clients"][0], data["clients"][-1]) == (MAX_TIMED_CLIENTS, 0, 2999)
    assert len(data["jobs"]) == MAX_JOBS
    assert (data["all_clients"], data["all_jobs"]) == (3000, 30_000)


def asynchronous_run() -> hansa.Run:
    task = hansa.training.quadratic(torch.eye(3).expand(9, 3, 3), torch.ones(9, 3))
    devices = pace.devices(step_seconds=hansa.local.lognormal(1.0, 1.0), latency=0.5, up_bandwidth=200.0)
    method = presets.fedbuff(size=2, concurrency=5, max_staleness=2, steps=2)
    return hansa.run(method, task, rounds=12, profile=devices, workers=1)


def test_the_page_has_every_job_of_the_run(tmp_path) -> None:
    run = asynchronous_run()
    path = run.report(tmp_path / "page.html")
    (data,) = embedded(path.read_text(encoding="utf-8"))["timelines"]
    rows = run.clients("client", "admitted", "start_seconds")
    assert len(data["jobs"]) == len(rows["client"]) == 24 + sum(record["lost"] for record in run.history)
    assert sum(job[5] for job in data["jobs"]) == sum(record["lost"] for record in run.history)
    assert data["seconds"] == pytest.approx(run.state.pace["now"], rel=1e-5)
