"""The report page: complete, offline, safe, and true to the histories it is made of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import hansa
from hansa.runs.client_columns import ClientColumns
from hansa.study import report
from hansa.study.report import ReportEntry, ranking


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
    entry = ReportEntry(nasty, history([0.5]), nasty, labels=counts, clients=clients)
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
    one = ReportEntry("one", history([0.5]), "data: {name: mnist}")
    other = ReportEntry("other", [{"round": 1, "test_loss": 0.5}], "data: {name: cifar10}")
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
