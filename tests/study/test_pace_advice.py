"""Paces ranked for a profile: what is predicted is what runs do, and `hansa advise` shows it."""

from __future__ import annotations

import pytest
import torch

import hansa
from hansa import pace, presets, sample
from hansa.study.pace_advice import rank_paces

HEAVY = pace.devices(step_seconds=hansa.local.zipf(1.7, unit=0.1), up_bandwidth=1e4)


def test_a_prediction_is_what_a_run_does():
    chosen = pace.buffered(2, 5)
    (predicted,) = rank_paces(
        HEAVY, clients=8, participants=5, steps=3, parameters=4, batch_size=6, seed=3, paces=[chosen]
    )
    task = hansa.training.quadratic(torch.randn(8, 6, 4), torch.randn(8, 6))
    method = presets.fedavg(steps=3, batch_size=6, sampler=sample.uniform(count=5)).with_pace(chosen)
    run = hansa.run(method, task, rounds=100, seed=3, profile=HEAVY, dtype=torch.float32, evaluate_every=0)
    seconds = run.state.pace["now"]
    assert predicted.updates_per_hour == pytest.approx(3600 * 200 / seconds, rel=1e-9)
    assert predicted.steps_per_hour == pytest.approx(3600 * 100 / seconds, rel=1e-9)
    assert predicted.staleness == pytest.approx(sum(r["staleness"] for r in run.history) / 100)
    assert predicted.staleness_max == max(r["staleness_max"] for r in run.history)


def test_slow_devices_favour_buffers_and_equal_ones_waste_nothing():
    heavy = rank_paces(HEAVY, clients=50, participants=10, steps=5, parameters=10)
    fastest = max(heavy, key=lambda option: option.updates_per_hour)
    assert fastest.pace.asynchronous
    assert fastest.reached == 1.0
    by_name = {repr(option.pace): option for option in heavy}
    plain = by_name["synchronous()"]
    assert fastest.updates_per_hour > 2 * plain.updates_per_hour
    assert plain.wasted == 0
    assert heavy[-1] is plain
    assert min(option.reached for option in heavy) < 1.0, "a deadline excludes clients for good"
    assert plain.staleness_max == 0
    assert by_name["overselect(factor=1.3)"].wasted > 0
    equal = rank_paces(pace.devices(), clients=50, participants=10, steps=5, parameters=10)
    rates = [o.updates_per_hour for o in equal if o.pace in (pace.synchronous(), pace.buffered(5, 10))]
    assert rates[0] == pytest.approx(rates[1])


def test_the_command_ranks_paces_where_the_file_has_a_profile(tmp_path, monkeypatch):
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {name: synthetic, clients: 12}\nprofile: {step_seconds: {kind: zipf}}\n")
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, ["advise", "run.yaml", "--participants", "5"])
    assert result.exit_code == 0, result.output
    assert "paces for the profile, 5 of 12 clients at work" in result.output
    assert "buffered(size=1, concurrency=5, max_staleness=None)" in result.output
    (tmp_path / "run.yaml").write_text("data: {name: synthetic, clients: 12}\n")
    assert "paces for" not in runner.invoke(app, ["advise", "run.yaml", "--participants", "5"]).output
