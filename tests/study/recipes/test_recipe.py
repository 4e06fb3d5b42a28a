"""Published tables and figures: every recipe runs, is read right, and is never run twice."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from functools import partial
from html import unescape
from pathlib import Path

import pytest
import yaml

from command_line import run_command, run_well
from hansa.config import from_yaml
from hansa.core.errors import HansaError
from hansa.study.recipes import SCALES, find_recipes, library, read_recipes
from hansa.study.recipes.outcome import load_result

RECIPES = sorted(library())


called = partial(run_command, "reproduce")


def reproduce(*arguments: str) -> str:
    return run_well("reproduce", *arguments).stdout


def result_tables_of(name: str) -> set[tuple[str, str]]:
    """A table for each column and measure of a recipe."""
    recipe = library()[name]
    return {(cell.column, measure) for cell in recipe.cells("smoke") for measure in recipe.measures}


@pytest.mark.parametrize("name", RECIPES)
def test_smoke(name: str, tmp_path: Path) -> None:
    output = reproduce(name, "--scale", "smoke", "--out", str(tmp_path), "--workers", "1", "--quiet")
    recipe = library()[name]
    result = load_result(recipe, tmp_path / "smoke" / f"{name}.json")
    cells = list(recipe.cells("smoke"))
    found = {(number.cell.row, number.cell.column, number.measure) for number in result.cells}
    assert found == {(cell.row, cell.column, measure) for cell in cells for measure in recipe.measures}
    for number in result.cells:
        assert number.ours is not None or recipe.measures[number.measure].target is not None, number
    for row in {cell.row for cell in cells}:
        assert row in output
    page = unescape((tmp_path / "smoke" / f"{name}.html").read_text())
    assert all(text in page for text in (recipe.reference, recipe.at("smoke").reduction, *recipe.known_differences))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_scale_is_a_configuration(name: str, scale: str) -> None:

    cells = list(library()[name].cells(scale))
    assert cells
    configs = [from_yaml(yaml.safe_dump(cell.document)) for cell in cells]
    output = [config.model_dump_json(exclude={"name"}) for config in configs]
    if name == "open-malicious-gossip":  # without an attack both columns are the same run
        assert len(set(output)) == len(output) - 1
    else:  # uncompressed one way is uncompressed both ways
        assert len(set(output)) == len(output) or name == "cams-table-2"


def test_nothing_is_run_twice(tmp_path: Path) -> None:
    arguments = ("--scale", "smoke", "--out", str(tmp_path), "--workers", "1", "--quiet")
    reproduce("afga-table-4", *arguments, "--latex", str(tmp_path / "afga.tex"))
    table = (tmp_path / "afga.tex").read_text()
    assert r"& published & ours & difference & verdict \\" in table
    assert table.count(r"\begin{tabular}{lrrrr}") == len(result_tables_of("afga-table-4"))
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "smoke" / "runs").glob("*/**/metrics.jsonl")}
    assert len(runs) == 4
    reproduce("afga-table-4", "afga-figure-1a", *arguments)
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "smoke" / "runs").glob("*/**/metrics.jsonl")}
    assert {path: again[path] for path in runs} == runs
    assert len(again) == 4 + 2  # AFGA on its ring is a cell of both
    moved = tmp_path / "moved"
    for path in runs:  # the small files of a finished run are enough, on another machine too
        place = moved / path.parent.relative_to(tmp_path)
        place.mkdir(parents=True)
        shutil.copy2(path.parents[1] / "group.yaml", place.parent / "group.yaml")
        for name in ("config.yaml", "summary.json", "metrics.jsonl", "run.db", "environment.json", ".hansa-run"):
            shutil.copy2(path.parent / name, place / name)
    reproduce("afga-table-4", "--scale", "smoke", "--out", str(moved), "--workers", "1", "--quiet")
    result = "smoke/afga-table-4.json"
    assert (moved / result).read_text() == (tmp_path / result).read_text()
    assert {moved / path.relative_to(tmp_path): stamp for path, stamp in runs.items()} == {
        path: path.stat().st_mtime_ns for path in (moved / "smoke" / "runs").glob("*/**/metrics.jsonl")
    }


def test_a_result_is_exported_with_tables_figures_and_the_numbers_behind_its_verdicts(tmp_path: Path) -> None:
    mine, kept = tmp_path / "mine.yaml", tmp_path / "kept"
    mine.write_text(OWN)
    arguments = ("--scale", "cpu", "--out", str(tmp_path / "out"), "--export", str(kept), "--quiet", "--workers", "1")
    reproduce(str(mine), *arguments)
    output = (kept / "runs.md").read_text()
    assert "hansa reproduce runs --scale cpu" in output
    content = json.loads((kept / "runs.json").read_text())
    (recipe,) = [recipe for recipe in find_recipes(str(mine)) if recipe.name == "runs"]
    result = load_result(recipe, kept / "runs.json")
    assert {run["row"] for run in content["runs"]} == {number.cell.row for number in result.cells}
    assert [run["seed"] for run in content["runs"]] == [0, 1, 2] * (len(content["runs"]) // 3)
    for number in result.cells:
        assert f"| {number.cell.row} |" in output
        curves = [run["test_accuracy"] for run in content["runs"] if run["row"] == number.cell.row]
        bests = [100 * max(value for value in values if value is not None) for _, _, values in curves]
        assert number.ours is not None
        assert sum(bests) / 3 == pytest.approx(number.ours.mean)
        assert f"**{result.verdict}**" in output
    assert not list(kept.glob("needs-data*"))
    if importlib.util.find_spec("matplotlib"):
        assert "![" in output
        assert (kept / "runs-test_accuracy.svg").read_text().startswith("<?xml")
    again = {path.name: path.read_bytes() for path in kept.iterdir()}
    reproduce(str(mine), *arguments)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == again


def test_a_recipe_that_cannot_be_run_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_DATA", str(tmp_path / "empty"))
    mine = tmp_path / "mine.yaml"
    mine.write_text(OWN)
    output = reproduce(str(mine), "--scale", "cpu", "--out", str(tmp_path / "out"), "--quiet", "--workers", "1")
    assert re.search(r"needs-data +Table 9 +not run", output)
    assert re.search(r"runs +Table 8 +1 agrees, 1 differs, 1 of 2 claims hold", output)
    page = (tmp_path / "out" / "cpu" / "runs.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "shy is better" in page


OWN = """
paper: mcmahan2017
settings:
  tiny: {data: {clients: 6, partition: iid}, model: logistic, rounds: 2, local: {steps: 3, lr: 0.1}}
recipes:
  needs-data:
    reference: Table 9
    summary: Needs data that is not here.
    rows: {FedAvg: {set: {data: {name: cifar10}}}}
    measures: {accuracy: {}}
    scales: {cpu: {compares: numbers}}
  runs:
    reference: Table 8
    summary: "<script>alert(1)</script>"
    use: [tiny]
    rows:
      bold: {set: {local: {lr: 0.1}}, published: {"": {accuracy: [60, 20]}}}
      shy: {set: {local: {lr: 0.0001}}, published: {"": {accuracy: [100, 0]}}}
    measures: {accuracy: {}}
    claims:
      - {statement: bold is better, measure: accuracy, order: [bold, shy]}
      - {statement: shy is better, measure: accuracy, order: [shy, bold]}
    scales: {cpu: {compares: numbers, seeds: 3}}
"""


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
    summary: Shares a run with the last.
    use: [tiny]
    rows: {FedAvg: {set: {rounds: 3}}, shared: {set: {rounds: 2}}}
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
    summary: All its runs are of the first.
    use: [tiny]
    rows: {FedAvg: {set: {rounds: 2}}}
    measures: {accuracy: {}}
    scales: {smoke: {seeds: 2}}
"""


def test_a_list_is_run_to_its_end_and_its_status_tells_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(LIST)
    words = [str(file), "--scale", "smoke", "--out", str(tmp_path / "out"), "--workers", "1"]

    def status() -> dict[str, tuple[str, str]]:
        lines = re.findall(r"^(\w+) +(\d of \d)(.*)$", reproduce(*words, "--status"), flags=re.MULTILINE)
        return {name: (done, verdict.strip()) for name, done, verdict in lines}

    assert status() == {"long": ("0 of 4", ""), "fails": ("0 of 1", ""), "short": ("0 of 2", "")}
    assert not (tmp_path / "out").exists()
    result = called(*words)
    assert result.exit_code == 1, result.output
    place = tmp_path / "out" / "smoke"
    errors = {name: json.loads((place / f"{name}.json").read_text())["error"] for name in ("long", "fails", "short")}
    assert errors == {"long": "", "fails": "a run failed", "short": ""}
    done = "nothing to compare"
    assert status() == {"long": ("4 of 4", done), "fails": ("0 of 1", ""), "short": ("2 of 2", done)}
    files = [place / "long.html", *place.glob("runs/FedAvg*/seed-*/metrics.jsonl")]
    before = [(path.read_bytes(), path.stat().st_mtime_ns * (path.suffix != ".html")) for path in files]
    called(*words)
    assert [(path.read_bytes(), path.stat().st_mtime_ns * (path.suffix != ".html")) for path in files] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("order: [bold, shy]", "order: [bold, sly]"), "'sly' is not known. Did you mean shy?"),
        (("accuracy: [60, 20]", "accurcy: 60"), "'accurcy' is not known. Did you mean accuracy?"),
        (("accuracy: [60, 20]", "accuracy: sixty"), "expected a number, [number, spread] or a text like 500+"),
        (("use: [tiny]", "use: [tny]"), "'tny' is not known. Did you mean tiny?"),
        (("bold: {set:", "bold: {columns: [x], set:"), "rows.bold.columns: 'x' is not known"),
        (("compares: numbers", "judgd: numbers"), "Extra inputs are not permitted"),
        (("recipes:", "recipe:"), "expected settings, scales and recipes"),
    ],
)
def test_a_wrong_recipe_is_told_exactly(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(HansaError) as caught:
        read_recipes(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cams-tabel-2"], "Did you mean cams-table-2 or"),
        (["cams-table-2", "--scale", "cpus"], "expected smoke, cpu or paper"),
        (["cams-table-2", "--all"], "expected one of the two"),
        (
            ["mine.yaml", "--scale", "cpu"],
            "runs, shy: its seeds are [3, 4, 5], those of bold [0, 1, 2]. Rows are compared",
        ),
    ],
)
def test_bad_commands_are_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    other = "shy: {set: {local: {lr: 0.0001}, seeds: [3, 4, 5]}"
    Path("mine.yaml").write_text(OWN.replace("shy: {set: {local: {lr: 0.0001}}", other))
    result = called(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not Path("runs").exists()


def test_a_paper_is_all_its_recipes() -> None:
    assert all(name in (output := reproduce()) for name in RECIPES), output
    assert {recipe.name for recipe in find_recipes("hafed")} == {name for name in RECIPES if name.startswith("hafed-")}
