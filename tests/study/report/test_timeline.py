"""The timeline: jobs of the client record as whole ticks, bounded, and drawn, zoomed and read in a browser."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import hansa
from browser import Browser
from hansa import pace, presets
from hansa.study.report.timeline import MAX_CLIENTS, MAX_JOBS, timeline_data


def table(jobs):
    names = ("round", "client", "admitted", "start_seconds", "download_seconds", "compute_seconds", "upload_seconds")
    columns = dict(zip(names, map(np.array, zip(*jobs, strict=True)), strict=True))
    return {**columns, "staleness": np.zeros(len(jobs), np.float32)}


def test_clients_stand_from_fast_to_slow_and_times_are_shares_of_the_whole():
    data = timeline_data(table([(1, 5, True, 0.0, 1.0, 5.0, 2.0), (1, 3, False, 2.0, 0.0, 4.0, 0.0)]))
    assert data["clients"] == [3, 5]
    assert data["seconds"] == 8.0
    assert data["jobs"] == [[1, 0, 125000, 625000, 250000, 0, 1, 0], [0, 250000, 0, 500000, 0, 1, 1, 0]]


def test_many_clients_and_jobs_are_thinned_and_said():
    jobs = [(r, c, True, float(r), 0.0, 1.0 + c, 0.0) for r in range(10) for c in range(3000)]
    data = timeline_data(table(jobs))
    assert len(data["clients"]) == MAX_CLIENTS
    assert data["clients"][0] == 0
    assert data["clients"][-1] == 2999, "the slowest is drawn too"
    assert len(data["jobs"]) == 10 * MAX_CLIENTS <= MAX_JOBS
    assert (data["all_clients"], data["all_jobs"]) == (3000, 30_000)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    task = hansa.training.quadratic(torch.eye(3).expand(9, 3, 3), torch.ones(9, 3))
    devices = pace.devices(step_seconds=hansa.local.lognormal(1.0, 1.0), latency=0.5, up_bandwidth=200.0)
    method = presets.fedbuff(size=2, concurrency=5, max_staleness=2, steps=2)
    run = hansa.run(method, task, rounds=12, profile=devices, workers=1)
    return run, run.report(tmp_path_factory.mktemp("page") / "page.html")


def test_the_page_has_every_job_of_the_run(page):
    run, path = page
    section = path.read_text(encoding="utf-8").split('id="timeline"')[1]
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', section)[1])
    rows = run.clients("client", "admitted", "start_seconds")
    assert len(data["jobs"]) == len(rows["client"]) == 24 + sum(record["lost"] for record in run.history)
    assert sum(job[5] for job in data["jobs"]) == sum(record["lost"] for record in run.history)
    assert data["seconds"] == pytest.approx(run.state.pace["now"], rel=1e-5)


def test_a_run_without_a_clock_has_no_timeline(tmp_path):
    task = hansa.training.quadratic(torch.eye(3).expand(4, 3, 3), torch.ones(4, 3))
    path = hansa.run(presets.fedavg(steps=1), task, rounds=2, workers=1).report(tmp_path / "page.html")
    assert 'id="timeline"' not in path.read_text(encoding="utf-8")


def test_it_draws_zooms_and_tells_in_a_browser(page):
    _, path = page
    browser = Browser()
    try:
        browser.open(path)
        browser.run("document.getElementById('timeline').scrollIntoView()")
        drawn = (
            "(() => { const c = document.querySelector('#timeline canvas');"
            "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v) => v).length })()"
        )
        assert browser.run(drawn) > 1000
        left, top, width = browser.run(
            "(() => { const r = document.querySelector('#timeline canvas').getBoundingClientRect();"
            "return [r.left, r.top, r.width] })()"
        )
        browser.drag((left + 200, top + 30), (left + 400, top + 40))
        shown = browser.run("(({from, to}) => to - from)(document.querySelector('#timeline details').timeline)")
        assert shown == pytest.approx(1e6 * 200 / (width - 64), rel=0.02)
        browser.mouse("mouseMoved", left + 300, top + 30)
        assert "client" in browser.run("document.querySelector('#timeline output').textContent")
        browser.run("document.querySelector('#timeline [data-rows=tier]').click()")
        assert browser.run("document.querySelector('#timeline details').timeline.rows") == "tier"
        assert not browser.console
    finally:
        browser.close()
