"""A list of recipes, unattended: order, estimates, what is done, and what a failure stops."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hansa.config import Config, from_yaml
from hansa.runs.folder import RunFolder
from hansa.study.recipes import read_recipes
from hansa.study.recipes.schedule import RunRecords, client_steps, plan_recipe, recipe_progress

LIST = """
paper: mcmahan2017
settings:
  tiny:
    data: {name: synthetic, clients: 6, options: {largest: 60}}
    model: logistic
    local: {steps: 2, lr: 0.1, batch_size: 10}
recipes:
  long:
    reference: Table 1
    summary: The most work.
    use: [tiny]
    rows: {FedAvg: {set: {rounds: 9}}, shared: {set: {rounds: 2}}}
    measures: {accuracy: {}}
    scales: {smoke: {seeds: 2}}
  fails:
    reference: Table 2
    summary: A learning rate at which every update is refused.
    use: [tiny]
    rows: {wild: {set: {rounds: 3, local: {lr: 1.0e+30}}}}
    measures: {accuracy: {}}
    scales: {smoke: {}}
  short:
    reference: Table 3
    summary: The least work, which the first shares.
    use: [tiny]
    rows: {FedAvg: {set: {rounds: 2}}}
    measures: {accuracy: {}}
    scales: {smoke: {seeds: 2}}
"""


def called(*arguments: str) -> Any:
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["reproduce", *arguments])


def shown(output: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+) +(\d+ of \d+) ", output, flags=re.MULTILINE))


def test_a_list_is_run_cheapest_first_to_its_end_and_never_twice(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(LIST)
    words = [str(file), "--scale", "smoke", "--out", str(tmp_path / "out"), "--workers", "1"]
    before = called(*words, "--status")
    assert before.exit_code == 0, before.output
    assert list(shown(before.stdout)) == ["fails", "short", "long"]  # the shared runs count once
    assert set(shown(before.stdout).values()) == {"0 of 2", "0 of 1", "0 of 4"}
    assert len(re.findall(r" unknown\b", before.stdout)) == 4  # of each recipe, and of all
    assert not (tmp_path / "out").exists()
    result = called(*words)
    assert result.exit_code == 1, result.output
    started = re.findall(r"^(\w+): (?:The|A) ", result.stderr, flags=re.MULTILINE)
    assert started == ["fails", "short", "long"]
    place = tmp_path / "out" / "smoke"
    assert [json.loads((place / f"{name}.json").read_text())["error"] for name in ("long", "fails", "short")] == [
        "",
        "a run failed",
        "",
    ]
    page = (place / "reproduced.html").read_text()
    assert page.index('id="long"') < page.index('id="fails"') < page.index('id="short"')  # that of the list
    after = called(*words, "--status")
    assert shown(after.stdout) == {"short": "2 of 2", "fails": "0 of 1", "long": "4 of 4"}
    assert re.search(r"^long +4 of 4 +nothing to compare", after.stdout, flags=re.MULTILINE)
    assert re.search(r"^fails +0 of 1 +1 failed", after.stdout, flags=re.MULTILINE)
    assert len(re.findall(r"^FedAvg, seed \d: round 2/2 ", result.stderr, flags=re.MULTILINE)) == 2
    assert "shared, seed" not in result.stderr  # it has them from the recipe before it
    runs = sorted(place.glob("runs/*/seed-*/metrics.jsonl"))
    runs = [path for path in runs if RunFolder(path.parent).summary["status"] == "finished"]
    assert len(runs) == 4
    stamps = [path.stat().st_mtime_ns for path in runs]
    called(*words)
    assert [path.stat().st_mtime_ns for path in runs] == stamps
    assert (place / "reproduced.html").read_text() == page  # nothing in it depends on time


def test_time_is_estimated_from_recorded_runs(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(LIST)
    recipes = read_recipes(file)
    first, *_ = plan_recipe(recipes["short"], "smoke", building=False).runs()
    nothing = RunRecords(tmp_path / "runs")
    assert nothing.find(first) is None
    assert nothing.seconds_left(first) is None
    assert client_steps(first) == 12.0  # six clients take two steps
    called(str(file), "--scale", "smoke", "--out", str(tmp_path), "--workers", "1", "--quiet")
    records = RunRecords(tmp_path / "smoke" / "runs")
    assert records.seconds_left(first) == 0.0
    folder = RunFolder(next((tmp_path / "smoke" / "runs").glob("*/seed-0")))
    other = folder.config.model_copy(update={"seed": 7})
    rounds = [records.seconds_left(other.model_copy(update={"rounds": count})) for count in (10, 20)]
    assert 0 < rounds[0] < rounds[1]
    model = other.model.model_copy(update={"name": "cnn_29k"})
    assert records.seconds_left(other.model_copy(update={"model": model})) is None  # no run is like it
    plans = [plan_recipe(recipe, "smoke", building=False) for recipe in recipes.values()]
    progress = {each.plan.recipe.name: (each.finished, each.runs) for each in recipe_progress(plans, records)}
    assert progress == {"long": (4, 4), "fails": (0, 1), "short": (2, 2)}


def test_steps_of_a_round() -> None:
    text = "data: {clients: 40}\nlocal: {epochs: 2, batch_size: 50}\n"
    assert client_steps(from_yaml(text + "sample: {kind: uniform, count: 4}")) == 4 * 2 * 25
    gossip = "algorithm: cafga\ngossip: {clusters: 5, topology: ring}\ndata: {clients: 40}\nlocal: {steps: 3}"
    assert client_steps(from_yaml(gossip)) == 120


def test_the_most_similar_runs_tell_the_time_of_a_step(tmp_path: Path) -> None:
    """Rounds of few steps have costs of their own: the time of their steps says nothing about rounds of many."""
    base = from_yaml(
        "data: {name: synthetic, clients: 10}\nmodel: logistic\nlocal: {steps: 1, batch_size: 10}\nrounds: 4"
    )

    def of_steps(steps: int) -> Config:
        return base.model_copy(update={"local": base.local.model_copy(update={"steps": steps})})

    records = RunRecords(tmp_path)
    for steps, seconds in ((1, 8.0), (100, 40.0)):
        summary = {"status": "finished", "rounds": 4, "wall_seconds": seconds}
        records.add(SimpleNamespace(config=of_steps(steps), summary=summary))  # type: ignore[arg-type]
    assert records.seconds_left(of_steps(2)) == pytest.approx(16.0)
    assert records.seconds_left(of_steps(50)) == pytest.approx(20.0)


def test_runs_that_an_earlier_recipe_needs_are_counted_there(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(LIST.replace("rounds: 9", "rounds: 2"))  # now all runs of the first are those of the last
    plans = [plan_recipe(recipe, "smoke", building=False) for recipe in read_recipes(file).values()]
    progress = {each.plan.recipe.name: each for each in recipe_progress(plans, RunRecords(tmp_path / "runs"))}
    assert progress["long"].unknown == 2
    assert progress["short"].left == "with long"
