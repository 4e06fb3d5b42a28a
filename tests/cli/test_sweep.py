"""``hansa sweep --search optuna``: ranges, seeds, a table, and a stop in the midst that nobody sees afterwards."""

from __future__ import annotations

import csv
import json

import pytest

pytest.importorskip("optuna")
GRID = ["local.lr=1e-3..1:log", "local.steps=1,3", "seed=0,1"]


def search(cli, folder, trials, *more):
    words = ["sweep", "small.yaml", *GRID, "--search", "optuna", "--trials", trials, "--out", folder, "-q", *more]
    return cli(*words)


def test_a_search_draws_from_ranges_averages_seeds_and_goes_on(cli, folder):
    whole = search(cli, "whole", 4)
    assert whole.exit_code == 0, whole.output
    assert "4 trials: 4 complete" in whole.output
    assert search(cli, "parts", 2).exit_code == 0
    assert search(cli, "parts", 4).exit_code == 0
    trials = [json.loads((folder / name / "search.json").read_text())["trials"] for name in ("whole", "parts")]
    assert trials[0] == trials[1]
    rows = list(csv.DictReader((folder / "whole" / "results.csv").read_text().splitlines()))
    values = [trial["value"] for trial in trials[0]]
    assert float(rows[0]["last5_test_accuracy"]) == pytest.approx(max(values))
    assert {row["seeds"] for row in rows} == {"2"}
    assert all(1e-3 <= float(row["local.lr"]) <= 1 for row in rows)
    assert (folder / "whole" / "report.html").exists()


def test_a_range_without_a_search_another_search_and_another_tool_are_refused(cli, folder):
    plain = cli("sweep", "small.yaml", "local.lr=1e-3..1:log")
    assert plain.exit_code == 2
    assert "--search optuna draws from it" in plain.output
    other = cli("sweep", "small.yaml", "local.lr=1e-3..1", "--search", "grid")
    assert other.exit_code == 2
    assert "expected optuna" in other.output


def test_a_point_that_fails_is_noted_and_the_search_goes_on(cli, folder):
    """A rate at which every client leaves the numbers: the run fails, the search does not."""
    found = cli(
        "sweep", "small.yaml", "local.lr=0.05,1e30", "--search", "optuna", "--trials", "5", "--out", "x", "-q",
        "--set", "local.steps=6",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    states = [trial["status"] for trial in json.loads((folder / "x" / "search.json").read_text())["trials"]]
    assert set(states) == {"complete", "failed"}
