"""The clients and the timeline on the page: in order, with the right numbers, small, and inert whatever their names."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

import hansa
from hansa import pace, presets
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.study import report
from hansa.study.report import ReportEntry
from hansa.study.report.page import MAX_BARS, MAX_JOBS, MAX_TIMED_CLIENTS, timeline_data
from runs.people import owned_task

from .test_page import Reader, embedded


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
    return ReportEntry("m", [{"round": 1, "test_accuracy": 0.5}], clients=columns(accuracy), **more)


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
    entries = [
        replace(entry(many, labels=report.LabelCounts([[5] * 10] * 10_000, list("abcdefghij"))), name=f"m{n}")
        for n in range(20)
    ]
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
