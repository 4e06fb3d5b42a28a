"""The report page: complete, offline, safe, and true to the histories it is made of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import hansa
from hansa.study import report
from hansa.study.report import ReportEntry, ranking
from hansa.study.report.page import MAX_POINTS, curves


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


def test_the_table_ranks_by_the_mean_of_the_last_five():
    table = Reader(report.render_page([SLOW, FAST])).rows
    assert [row[1] for row in table[1:]] == ["fast", "slow"]
    assert table[1][2] == "73.0%"  # (0.70 + 0.72 + 0.74 + 0.74 + 0.75) / 5
    assert table[2][2] == "54.6%"  # (0.40 + 0.50 + 0.60 + 0.61 + 0.62) / 5


def test_the_table_says_what_was_sent_and_how_long_it_took():
    header, fast, slow = Reader(report.render_page([SLOW, FAST])).rows
    at = {name: place for place, name in enumerate(header)}
    assert (fast[at["sent up"]], slow[at["sent up"]]) == ("480 bit", "48 kbit")
    assert (fast[at["simulated time"]], slow[at["simulated time"]]) == ("6 s", "60 s")


def test_rounds_to_a_target_that_was_never_reached_says_never():
    header, fast, slow = Reader(report.render_page([SLOW, FAST], target=0.7)).rows
    place = header.index("rounds to 70%")
    assert (fast[place], slow[place]) == ("2", "never")


def test_the_chosen_target_is_the_highest_step_of_five_percent_that_half_of_them_reached():
    assert report.common_target([SLOW, FAST]) == 0.75
    assert report.common_target([SLOW]) == 0.6
    assert report.common_target([ReportEntry("x", [{"round": 1, "loss": 1.0}])]) is None


def test_the_curves_hold_the_history_with_running_totals():
    data = json.loads(Reader(report.render_page([SLOW, FAST])).data)
    slow = data["runs"][0]
    assert slow["name"] == "slow"
    (series,) = slow["series"]
    assert series["test_accuracy"] == [0.2, 0.4, 0.5, 0.6, 0.61, 0.62]
    assert series["bits"] == [16_000 * r for r in range(1, 7)]
    assert series["simulated_total_seconds"] == [10.0 * r for r in range(1, 7)]


def test_a_method_keeps_its_colour_whatever_its_rank():
    data = json.loads(Reader(report.render_page([SLOW, FAST])).data)
    assert [run["colour"] for run in data["runs"]] == list(ranking.PALETTE[:2])


def test_the_page_asks_the_network_for_nothing():
    text = report.render_page([SLOW, replace(FAST, cites=["@article{a, url = {https://example.org}}"])])
    assert "https://example.org" in text
    assert "default-src 'none'" in text
    assert not Reader(text).links
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", text)
    assert "fetch(" not in text


def test_names_and_texts_cannot_break_out_of_the_page():
    nasty = "</script><script>alert(1)</script>&<b>"
    page = Reader(
        report.render_page([ReportEntry(nasty, history([0.5]), nasty)], title=nasty, lead=nasty, facts=[nasty])
    )
    assert page.tags.count("script") == 3
    assert json.loads(page.data)["runs"][0]["name"] == nasty
    assert page.rows[1][1] == nasty


def test_long_histories_are_thinned_and_keep_their_last_round():
    (series,) = curves(ReportEntry("long", history([0.5] * 10_000)))
    assert len(series["round"]) <= MAX_POINTS
    assert series["round"][-1] == 10_000


def test_a_run_without_accuracy_is_ranked_by_its_loss():
    low = ReportEntry("low", [{"round": 1, "loss": 0.1}])
    high = ReportEntry("high", [{"round": 1, "loss": 0.9}])
    assert [row[1] for row in Reader(report.render_page([high, low])).rows[1:]] == ["low", "high"]


def test_what_diverged_is_drawn_as_far_as_it_is_finite_and_ranks_last():
    gone = ReportEntry(
        "gone", [{"round": 1, "test_accuracy": float("nan")}, {"round": 2, "test_accuracy": float("inf")}]
    )
    page = Reader(report.render_page([gone, SLOW]))
    json.loads(page.data)
    assert [row[1] for row in page.rows[1:]] == ["slow", "gone"]


def test_the_heat_map_has_the_samples_of_every_label():
    counts = report.LabelCounts([[5, 0, 1], [0, 0, 9]], ["a", "b", "</script>"], "two clients")
    page = Reader(report.render_page([SLOW], partition=counts))
    assert json.loads(page.data)["partitions"] == [
        {"labels": ["a", "b", "</script>"], "counts": [[5, 0, 1], [0, 0, 9]], "clients": 2}
    ]


def test_no_runs_and_equal_names_are_refused():
    with pytest.raises(hansa.HansaError, match="at least one run"):
        report.render_page([])
    with pytest.raises(hansa.HansaError, match="two runs are called 'slow'"):
        report.render_page([SLOW, SLOW])


def test_it_is_written_as_one_file(tmp_path):
    path = report.write_page(tmp_path / "deep" / "report.html", [SLOW, FAST], title="A title")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert "<title>A title</title>" in path.read_text()


def seeds(name, *curves, **options):
    members = [ReportEntry(name, history(curve, **options), seed=seed) for seed, curve in enumerate(curves)]
    return ReportEntry.from_seeds(name, members)


def test_methods_are_ranked_by_the_mean_over_seeds_not_by_the_luckiest():
    lucky = seeds("lucky", [0.9], [0.3], [0.3])
    steady = seeds("steady", [0.6], [0.6], [0.6])
    rows = Reader(report.render_page([lucky, steady], target=0.6)).rows
    assert [row[1] for row in rows[1:]] == ["steady 3 seeds", "lucky 3 seeds"]
    assert rows[2][2] == "50.0 ± 34.6%"  # the mean and the sample deviation of 0.9, 0.3, 0.3
    place = rows[0].index("rounds to 60%")
    assert (rows[1][place], rows[2][place]) == ("1 ± 0", "1 of 3 runs")


def test_the_page_gets_every_seed_on_the_rounds_all_have():
    group = seeds("group", [0.2, 0.4, 0.6], [0.4, 0.6])
    (run,) = json.loads(Reader(report.render_page([group])).data)["runs"]
    assert run["seeds"] == [0, 1]
    assert [table["round"] for table in run["series"]] == [[1, 2], [1, 2]]
    assert [table["test_accuracy"] for table in run["series"]] == [[0.2, 0.4], [0.4, 0.6]]


def test_the_target_is_one_that_every_seed_of_half_the_methods_reached():
    assert report.common_target([seeds("one", [0.9], [0.42])]) == 0.4


def test_what_could_not_be_read_is_named_on_the_page():
    text = report.render_page([SLOW], problems=["runs/<broken>: cut short"])
    assert "<li>runs/&lt;broken&gt;: cut short</li>" in text


def test_mixed_data_and_metrics_are_said():
    one = ReportEntry("one", history([0.5]), "data: {name: mnist}")
    other = ReportEntry("other", [{"round": 1, "test_loss": 0.5}], "data: {name: cifar10}")
    text = report.render_page([one, other])
    assert "different data (mnist: one; cifar10: other)" in text
    assert "other measured no test accuracy: it is ranked after those that did." in text
    assert "different data" not in report.render_page([SLOW, FAST])


def test_seeds_that_did_not_measure_the_same_are_not_averaged():
    members = [
        ReportEntry("x", history([0.5]), seed=0),
        ReportEntry("x", [{"round": 1, "test_loss": 2.0}], seed=1),
    ]
    page = Reader(text := report.render_page([ReportEntry.from_seeds("x", members)]))
    assert "only common ones are averaged" in text
    assert "0.5" not in page.rows[1]


def test_rounds_to_several_targets_stand_with_what_was_sent():
    page = Reader(report.render_page([SLOW, FAST], target=0.6))
    header, *rows = page.tables["targets"]
    assert header == ["method", "50%", "55%", "60%", "65%", "70%"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["slow"] == ["348 kbit", "464 kbit", "464 kbit", "never", "never"]
    assert cells["fast"][0] == "18.08 kbit"


def test_configurations_that_differ_stand_side_by_side():
    page = Reader(report.render_page([SLOW, FAST]))
    assert page.tables["differences"] == [["key", "fast", "slow"], ["algorithm", "fedams", "fedavg"]]
    assert "differences" not in Reader(report.render_page([SLOW])).tables


def test_published_numbers_come_as_data():
    table = report.ReportTable(
        "Published numbers", ["", "ours", "verdict"], [["a<b", "1", "agrees"], ["c", None, "differs"]]
    )
    text = report.render_page([SLOW], published=[table])
    assert "a&lt;b" in text
    assert '<span class="verdict good">agrees</span>' in text
    assert '<span class="verdict bad">differs</span>' in text


def test_twenty_runs_of_many_rounds_stay_below_a_megabyte_and_a_half():
    def record(round, run):
        noise = (7919 * round + 104_729 * run) % 10_007 / 10_007
        drawn = (
            "test_loss",
            "train_loss",
            "diversity",
            "surrogate_diversity",
            "gamma",
            "q",
            "consensus",
            "update_norm",
        )
        numbers = {name: noise * (place + 1) for place, name in enumerate((*drawn, "aggregate_norm", "seconds"))}
        return {"round": round, "test_accuracy": noise, "up_bytes": 1000, "down_bytes": 10, "lost": 0, **numbers}

    for rounds, thinned in ((250, False), (1600, True)):
        entries = [ReportEntry(f"run {run}", [record(r, run) for r in range(1, rounds + 1)]) for run in range(20)]
        text = report.render_page(entries)
        assert len(text.encode()) < 1_500_000
        data = json.loads(Reader(text).data)
        assert (data["stride"] > 1) is thinned
        assert thinned or len(data["runs"][0]["series"][0]["test_loss"]) == rounds
