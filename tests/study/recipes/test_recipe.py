"""Published tables and figures: every recipe runs, is read right, and is never run twice."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shutil
import sys
from functools import cache, partial
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import hansa
from command_line import run_command, run_well
from hansa.config import allow_code, build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data.sources import DataError
from hansa.study.recipes import SCALES, find_recipes, flamby, library, read_recipes
from hansa.study.recipes.outcome import load_result
from hansa.study.recipes.recipe import Recipe, RecipeMeasure
from hansa.study.recipes.verdict import compare_with_paper, read_measure

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


DIGESTS: dict[str, str] = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))
"""SHA-256 of the settings, published numbers, measures and claims of each recipe, as they were when they were compared
with the paper, cell by cell and rate by rate."""


@pytest.mark.parametrize("name", RECIPES)
def test_settings_numbers_and_claims_are_those_that_were_compared_with_the_paper(name: str) -> None:
    """Whoever changes a recipe compares it with its paper again, and then records the digest that the failure tells."""
    recipe = library()[name]
    cells = [[scale, cell.row, cell.column, cell.document] for scale in SCALES for cell in recipe.cells(scale)]
    seeds = [recipe.at(scale).seeds for scale in SCALES]
    published = [[cell.row, cell.column, cell.published] for cell in recipe.cells("paper")]
    measures = {name: measure.model_dump() for name, measure in recipe.measures.items()}
    claims = [claim.model_dump() for claim in recipe.claims]
    told = json.dumps([cells, seeds, published, measures, claims], sort_keys=True)
    assert hashlib.sha256(told.encode()).hexdigest() == DIGESTS[name]


def test_numbers_of_other_data_have_no_difference_and_no_target_of_the_paper() -> None:
    history = [{"round": r, "test_accuracy": 0.5 + r / 100, "simulated_seconds": 60.0} for r in range(1, 41)]
    checked = 0
    for name, recipe in library().items():
        measures = recipe.measured("cpu")
        if recipe.same_data("cpu"):
            assert measures == recipe.measures, name
            continue
        for measure in measures.values():
            if measure.target is not None:
                assert measure.target in recipe.at("cpu").targets.values(), name
        if not {measure.metric for measure in measures.values()} <= {"test_accuracy"}:
            continue
        cells = [(cell.row, cell.column) for cell in recipe.cells("cpu")]
        comparisons, _ = compare_with_paper(recipe, "cpu", dict.fromkeys(cells, [history] * 3))
        assert comparisons
        assert {one.difference for one in comparisons} == {None}, name
        checked += 1
    assert checked >= 5
    assert library()["afga-table-3"].same_data("cpu")  # Shakespeare, with a smaller network
    assert not library()["afga-table-1"].same_data("cpu")
    assert library()["cams-table-2"].measures["bits"].counted  # the same on any data


def test_scaffold_of_niid_bench_is_its_recursion() -> None:
    beta, lr, steps, parties, rounds = 0.9, 0.02, 5, 6, 7
    draw = np.random.default_rng(0)
    sizes = [3, 9, 4, 7, 5, 8]
    inputs = [draw.normal(size=(size, 3)).astype(np.float32).astype(np.float64) for size in sizes]  # as they are kept
    targets = [draw.normal(size=(size, 1)).astype(np.float32).astype(np.float64) for size in sizes]
    owners = np.repeat(np.arange(parties), sizes)
    data = hansa.data.from_arrays(np.concatenate(inputs), np.concatenate(targets), clients=owners)
    task = hansa.Task(lambda: torch.nn.Linear(3, 1, bias=False), torch.nn.functional.mse_loss, data)
    cells = library()["niid-cifar-10-parties"].cells("paper")
    document = next(cell.document for cell in cells if cell.row.startswith("SCAFFOLD, NIID"))
    settings = {"lr": lr, "epochs": steps, "batch_size": 9, "weight_decay": 0.0}
    with allow_code():
        words = [*(f"local.{key}={value}" for key, value in settings.items()), "sample.participation=0.5"]
        method = build_algorithm(from_yaml(yaml.safe_dump(document), words))
    run = hansa.Run(method, task, seed=0, dtype=torch.float64)
    x = run.state.vectors["model"].numpy().copy()
    run.advance(rounds)
    c, own = np.zeros(3), np.zeros((parties, 3))
    for record in run.history:
        chosen, models, changes = record["clients"], [], []
        for i in chosen:
            y, velocity = x.copy(), np.zeros(3)
            for _ in range(steps):
                residual = inputs[i] @ y - targets[i][:, 0]
                gradient = 2 * inputs[i].T @ residual / sizes[i]
                velocity = beta * velocity + gradient + (1 - beta) * (c - own[i])
                y = y - lr * velocity
            changes.append((x - y) / (steps * lr) - c)
            models.append(y)
        for i, change in zip(chosen, changes, strict=True):
            own[i] = own[i] + change
        c = c + np.mean(changes, axis=0)
        x = np.average(models, axis=0, weights=[sizes[i] for i in chosen])
    assert {client for record in run.history for client in record["clients"]} == set(range(parties))
    np.testing.assert_allclose(run.state.vectors["model"].numpy(), x, rtol=1e-10)
    np.testing.assert_allclose(run.state.vectors["control"].numpy(), c, rtol=1e-10)


ROOT = Path(__file__).parents[3]


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("flamby_example", ROOT / "examples" / "flamby.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_published_numbers_come_out_exactly() -> None:
    module = example()  # of SCAFFOLD, the one with most state; `python examples/flamby.py` runs all six
    ours = module.train("fed-heart-disease", "Scaffold", 42, flamby.read_heart_disease())
    assert ours == module.read_published()["fed-heart-disease", "Scaffold", 42]


@pytest.mark.parametrize("workers", [0, 1])
def test_orders_are_those_of_torch_loaders(workers: int) -> None:
    sizes, batch_size, steps, rounds = (11, 5, 7), 4, 3, 4
    order = example().flamby_order(sizes, batch_size, steps, rounds, 42, workers=bool(workers), inputs=6)
    torch.manual_seed(42)
    torch.nn.Linear(6, 1)
    loaders = [
        DataLoader(TensorDataset(torch.arange(size)), batch_size, shuffle=True, num_workers=workers) for size in sizes
    ]
    iterators = [iter(loader) for loader in loaders]
    torch.manual_seed(42)
    drawn: list[list[int]] = [[] for _ in sizes]
    for _ in range(rounds):
        for client, loader in enumerate(loaders):
            for _ in range(steps):
                try:
                    (batch,) = next(iterators[client])
                except StopIteration:
                    iterators[client] = iter(loader)
                    (batch,) = next(iterators[client])
                drawn[client] += batch.tolist()
    for client, size in enumerate(sizes):
        passes = math.ceil(len(drawn[client]) / size)
        ours = [row for number in range(passes) for row in order.permutation(client, size, number, Key(0))]
        assert ours[: len(drawn[client])] == drawn[client], client


def test_orders_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    example().flamby_order((4, 3), 2, 2, 2, seed=1, workers=True, before="all").permutation(0, 4, 0, Key(0))
    assert torch.equal(torch.rand(3), expected)


def test_cox_loss_by_hand() -> None:
    generator = torch.Generator()
    generator.manual_seed(0)
    scores = torch.randn(9, generator=generator).double()
    times = torch.tensor([5.0, 2.0, 8.0, 2.0, 1.0, 9.0, 3.0, 3.0, 7.0]).double()
    events = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]).double()
    rows = sorted(range(9), key=lambda row: -times[row])  # stable: of equal times the first row comes first
    expected = 0.0
    for place, row in enumerate(rows):
        if events[row]:
            expected += math.log(sum(math.exp(scores[other] - scores[row]) for other in rows[: place + 1]))
    target = torch.stack([events, times], dim=1)
    assert float(flamby.cox_loss(scores[:, None], target)) == pytest.approx(expected / 9)


def test_files_of_other_contents_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"github\.com/owkin/FLamby"):
        flamby.read_tcga_brca(tmp_path)
    (tmp_path / "flamby").mkdir()
    (tmp_path / "flamby" / "brca.csv").write_text("pid\n")
    with pytest.raises(DataError, match="SHA-256"):
        flamby.read_tcga_brca(tmp_path)


def history(*accuracies: float) -> list[dict[str, Any]]:
    return [
        {"round": place, "test_accuracy": value, "up_bytes": 10, "down_bytes": 30, "simulated_seconds": 360.0}
        for place, value in enumerate(accuracies, start=1)
    ]


def recipe(published: dict[str, Any], compares: str = "numbers", **more: Any) -> Recipe:
    rows = {name: {"published": {"": {"accuracy": value}}} for name, value in published.items()}
    body = {"name": "x", "paper": "p", "reference": "Table 1", "summary": "s", "rows": rows, "settings": {}}
    measures = {"accuracy": {"statistic": "last", "tolerance": 1.0}}
    return Recipe.model_validate({**body, "measures": measures, "scales": {"cpu": {"compares": compares}}, **more})


def runs(ours: dict[str, list[float]]) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    return {(row, ""): [history(value) for value in seeds] for row, seeds in ours.items()}


def verdicts(requested: Recipe, ours: dict[str, list[float]]) -> dict[str, str]:
    comparisons, _ = compare_with_paper(requested, "cpu", runs(ours))
    return {one.cell.row: one.verdict for one in comparisons}


def around(middle: float, spread: float = 0.001) -> list[float]:
    return [middle - spread, middle, middle + spread]


def test_numbers_within_the_rule_agree_and_others_keep_their_order_or_not() -> None:
    requested = recipe({"a": 80.0, "b": 70.0, "c": 60.0})
    assert verdicts(requested, {"a": [0.809], "b": [0.691], "c": [0.60]}) == dict.fromkeys("abc", "agrees")
    ours = {"a": around(0.5), "b": around(0.4), "c": around(0.3)}
    assert verdicts(requested, ours) == dict.fromkeys("abc", "same order")
    assert verdicts(requested, ours | {"b": around(0.55)}) == {"a": "differs", "b": "differs", "c": "same order"}


def test_one_or_two_seeds_decide_no_order_except_of_what_is_counted() -> None:
    counted = {"measures": {"accuracy": {"statistic": "last", "counted": True}}}
    for more, same, reversed in (({}, "undecided", "undecided"), (counted, "same order", "differs")):
        requested = recipe({"a": 80.0, "b": 70.0}, **more)
        assert verdicts(requested, {"a": [0.50], "b": [0.40]}) == dict.fromkeys("ab", same)
        assert verdicts(requested, {"a": [0.40, 0.41], "b": [0.50, 0.51]}) == dict.fromkeys("ab", reversed)


def test_spread_widens_the_rule() -> None:
    # 1 + 2 sqrt(1/3 + 1.5^2/9): 2.528; the means are 2.5 apart, then 2.6
    requested = recipe({"a": [80.0, 1.5]}, published_seeds=9)
    assert verdicts(requested, {"a": [0.765, 0.775, 0.785]}) == {"a": "agrees"}
    assert verdicts(requested, {"a": [0.764, 0.774, 0.784]}) == {"a": "differs"}


def test_a_published_standard_error_is_not_divided_again() -> None:
    ours = {"a": [0.758, 0.76, 0.762]}  # 1 + 2 sqrt(0.2^2/3 + 1.5^2): 4.01, with 1.5/3 in place of 1.5: 2.03
    assert verdicts(recipe({"a": [80.0, 1.5]}, published_seeds=9, spread="standard error"), ours) == {"a": "agrees"}
    assert verdicts(recipe({"a": [80.0, 1.5]}, published_seeds=9), ours) == {"a": "differs"}
    hafed = next(library()["hafed-table-1"].cells("cpu")).published["accuracy"]
    assert (hafed.spread, hafed.standard_error) == (0.16, 0.16)
    afga = next(library()["afga-table-1"].cells("cpu")).published["accuracy"]
    assert (afga.spread, afga.standard_error) == (1.69, 1.69 / math.sqrt(3))


def test_an_order_within_the_spread_is_undecided() -> None:
    requested = recipe({"a": 80.0, "b": 70.0})
    assert verdicts(requested, {"a": [0.49, 0.51, 0.53], "b": [0.50, 0.52, 0.48]}) == dict.fromkeys("ab", "undecided")
    assert verdicts(requested, {"a": [0.52, 0.51, 0.53], "b": [0.50, 0.52, 0.48]}) == dict.fromkeys("ab", "undecided")
    close = recipe({"a": [80.0, 6.0], "b": [79.0, 6.0]}, compares="order")
    assert verdicts(close, {"a": around(0.3), "b": around(0.4)}) == dict.fromkeys("ab", "not comparable")
    ours = {"a": around(0.8), "b": around(0.7)}
    for compares, verdict in (("nothing", "not comparable"), ("order", "same order")):
        assert verdicts(recipe({"a": 80.0, "b": 70.0}, compares), ours) == dict.fromkeys("ab", verdict)


ROUNDS = {"statistic": "rounds_to", "target": 0.5, "factor": 1, "tolerance": 0.2, "relative": True}


@pytest.mark.parametrize(
    ("published", "reached", "rounds", "expected"),
    [
        ("50+", [None, None, None], 50, "agrees"),
        ("50+", [None, None, None], 49, "not comparable"),  # nobody knows what the fiftieth would have been
        ("50+", [55, None, 60], 60, "agrees"),
        ("50+", [40, 41, 42], 60, "differs"),
        ("50+", [40], 60, "undecided"),
        ("50+", [40, None, 42], 60, "undecided"),
        (30, [None, None, None], 50, "differs"),
        (30, [None], 50, "undecided"),
        (30, [None, None, None], 36, "not comparable"),  # 30 + 20% had not passed
        (30, [30, None, 30], 50, "undecided"),
        (30, [29, 30, 31], 50, "agrees"),
    ],
)
def test_targets_that_somebody_did_not_reach(
    published: Any, reached: list[int | None], rounds: int, expected: str
) -> None:
    requested = recipe({"a": published}, measures={"accuracy": ROUNDS})
    ours = [history(*([0.1] * rounds if at is None else [0.1] * (at - 1) + [0.6])) for at in reached]
    (comparison,), _ = compare_with_paper(requested, "cpu", {("a", ""): ours})
    assert comparison.verdict == expected


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ({"statistic": "best"}, 40.0),
        ({"statistic": "last"}, 30.0),
        ({"statistic": "last5"}, 25.0),
        ({"statistic": "max", "smaller_is_better": True}, 40.0),
        ({"statistic": "jitter"}, 10.0),
        ({"statistic": "growth", "factor": 1}, 7 / 3),
        ({"statistic": "mean", "factor": 1}, 0.25),
        ({"statistic": "best", "smaller_is_better": True}, 10.0),
        ({"statistic": "rounds_to", "target": 0.2, "factor": 1}, 2.0),
        ({"statistic": "rounds_to", "target": 0.9, "factor": 1}, 4.0),
        ({"statistic": "hours_to", "target": 0.4, "factor": 1}, 0.3),
        ({"statistic": "per_round", "metric": "server_bits", "factor": 500}, 500 * 320.0),
    ],
)
def test_readings(measure: dict[str, Any], expected: float) -> None:
    assert read(history(0.1, 0.2, 0.4, 0.3), **measure) == (pytest.approx(expected), measure.get("target") != 0.9)


def read(rounds: list[dict[str, Any]], **measure: Any) -> tuple[float, bool] | None:
    return read_measure(rounds, RecipeMeasure(**measure))


def test_a_round_is_told_by_the_last_since_the_first_may_send_less() -> None:
    rounds = [{"round": 1, "up_bytes": 10, "down_bytes": 0}, {"round": 2, "up_bytes": 10, "down_bytes": 10}]
    measure = {"statistic": "per_round", "metric": "server_bits", "factor": 500}
    assert [read(rounds, **measure), read(rounds[:1], **measure)] == [(500 * 160, True), (500 * 80, True)]
    assert read([], **measure) is None


def claimed(ours: dict[str, list[float]], claim: dict[str, Any], **more: Any) -> bool | None:
    """Whether one claim about the accuracy holds."""
    claims = [{"statement": "s", "measure": "accuracy", **claim}]
    _, checks = compare_with_paper(recipe(dict.fromkeys(ours, 1), claims=claims, **more), "cpu", runs(ours))
    (check,) = checks
    return check.holds


APART = {"a": [0.80, 0.81, 0.82], "b": [0.50, 0.60, 0.55], "c": [0.49, 0.59, 0.541]}


CLOSE = {"a": [0.80, 0.81, 0.82], "b": [0.79, 0.83, 0.80]}  # differences 1, -2, 2 points
LEVEL = APART | {"d": [0.81, 0.80, 0.82]}
BOUNDED = {"a": [0.50, 0.51, 0.52], "b": [0.53, 0.55, 0.54]}
EQUAL = {"a": [0.1 + 0.2] * 3, "b": [0.3] * 3}  # up to rounding


@pytest.mark.parametrize(
    ("ours", "claim", "holds"),
    [
        (APART, {"order": ["a", "b"]}, True),
        (APART, {"order": ["b", "a"]}, False),
        # b and c are 5 points apart over the seeds, and always 1 point apart within a seed
        (APART, {"order": ["b", "c"]}, True),
        (APART, {"order": ["c", "b"]}, False),
        (APART, {"similar": ["b", "c"], "tolerance": 2.0}, True),
        (APART, {"similar": ["b", "c"], "tolerance": 0.5}, False),
        (APART, {"similar": ["b", "c"], "tolerance": 1.0}, None),
        (CLOSE, {"order": ["a", "b"]}, None),
        (CLOSE, {"order": ["b", "a"]}, None),
        ({row: values[:1] for row, values in APART.items()}, {"order": ["a", "b"]}, None),
        ({row: values[:2] for row, values in APART.items()}, {"order": ["b", "a"]}, None),
        # 0.1 ± 4.303 * 0.04 / sqrt(3): just clear of zero; with a little more spread it is not
        ({"a": [0.06, 0.10, 0.14], "b": [0.0, 0.0, 0.0]}, {"order": ["a", "b"]}, True),
        ({"a": [0.05, 0.10, 0.15], "b": [0.0, 0.0, 0.0]}, {"order": ["a", "b"]}, None),
        (APART, {"better": ["a"]}, True),
        (APART, {"better": ["b"]}, False),  # above c, below a
        (APART, {"better": ["a", "c"], "than": ["b"]}, False),
        (APART, {"better": ["a", "b"], "than": ["c"]}, True),
        (LEVEL, {"better": ["a"]}, None),
        (LEVEL, {"better": ["b"]}, False),
        (BOUNDED, {"at_most": 60.0}, True),
        (BOUNDED, {"at_most": 40.0}, False),
        (BOUNDED, {"at_most": 54.0}, None),
        (BOUNDED, {"at_most": 54.0, "rows": ["a"]}, True),
        ({"a": [0.5]}, {"at_most": 90.0}, None),
        (EQUAL, {"order": ["a", "b"]}, None),
        (EQUAL, {"order": ["b", "a"]}, None),
        (EQUAL, {"similar": ["a", "b"], "tolerance": 0.0}, True),
    ],
)
def test_claims_hold_fail_or_are_undecided(ours: dict[str, list[float]], claim: dict[str, Any], holds: Any) -> None:
    assert claimed(ours, claim) is holds


def test_a_claim_at_a_scale_that_compares_nothing_is_not_compared() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "better": ["a"]}]
    _, checks = compare_with_paper(recipe(dict.fromkeys(APART, 1), "nothing", claims=claims), "cpu", runs(APART))
    assert [(one.holds, one.evidence) for one in checks] == [(None, "not compared at this scale")]


def test_what_was_not_run_leaves_a_claim_undecided_unless_the_rest_contradicts_it() -> None:
    only = {"cpu": {"compares": "order", "rows": ["a", "b", "c"]}}
    ours = APART | {"d": [0.1, 0.1, 0.1]}
    claims = [{"statement": "s", "measure": "accuracy", "better": [row]} for row in "ab"]
    _, checks = compare_with_paper(recipe(dict.fromkeys(ours, 1), claims=claims, scales=only), "cpu", runs(APART))
    assert [one.holds for one in checks] == [None, False]
    assert "no run of d" in checks[0].evidence


def test_claims_over_columns() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "across": "columns", "order": ["easy", "hard"]}]
    requested = recipe({}, claims=claims, rows={"a": {}, "b": {}}, columns={"easy": {}, "hard": {}, "odd": {}})
    values = {("a", "easy"): 0.8, ("a", "hard"): 0.6, ("b", "easy"): 0.5, ("b", "hard"): 0.7, ("a", "odd"): 0.1}
    ours = {cell: [history(value) for value in around(middle)] for cell, middle in values.items()}
    _, checks = compare_with_paper(requested, "cpu", ours)
    assert [(one.row, one.holds) for one in checks] == [("a", True), ("b", False)]


def test_claims_over_curves() -> None:
    measures = {
        "accuracy": {"statistic": "jitter", "smaller_is_better": True},
        "growth": {"statistic": "growth", "factor": 1},
    }
    claims = [
        {"statement": "a is steadier", "measure": "accuracy", "order": ["a", "b"]},
        {"statement": "bounded", "measure": "growth", "at_most": 1.5},
    ]
    requested = recipe({"a": 1, "b": 1}, measures=measures, claims=claims)
    steady, wild = [0.5, 0.6, 0.7, 0.71, 0.72], [0.3, 0.4, 0.8, 0.5, 0.9]
    ours = {("a", ""): [history(*steady)] * 3, ("b", ""): [history(*wild[:4], last) for last in (0.8, 0.9, 0.85)]}
    comparisons, checks = compare_with_paper(requested, "cpu", ours)
    # the second half of five values are the last three
    assert comparisons[0].ours is not None
    assert comparisons[0].ours.mean == pytest.approx(1.0)
    assert [one.holds for one in checks] == [True, False]
    assert read(history(*wild), statistic="max") == (pytest.approx(90.0), True)


def test_rounds_to_a_target_that_some_do_not_reach() -> None:
    measures = {"accuracy": {"statistic": "rounds_to", "target": 0.5, "factor": 1, "smaller_is_better": True}}
    claims = [
        {"statement": "s", "measure": "accuracy", "order": ["a", "b"]},
        {"statement": "s", "measure": "accuracy", "order": ["b", "c"]},
    ]
    requested = recipe({"a": 1, "b": 1, "c": 1}, measures=measures, claims=claims)
    never = [history(*[0.1] * 30)] * 3
    ours = {("a", ""): [history(*[0.1] * late, 0.6) for late in (4, 5, 6)], ("b", ""): never, ("c", ""): never}
    comparisons, checks = compare_with_paper(requested, "cpu", ours)
    assert [one.holds for one in checks] == [True, None]
    assert "b over 30" in checks[0].evidence
    assert [None if one.ours is None else one.ours.mean for one in comparisons] == [6.0, None, None]


def test_a_run_that_ended_early_without_the_target_is_not_the_faster_one() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    requested = recipe({"a": 1, "b": 1}, measures={"accuracy": {**ROUNDS, "smaller_is_better": True}}, claims=claims)
    ours = {("a", ""): [history(*[0.1] * late, 0.6) for late in (4, 5, 6)], ("b", ""): [history(0.1, 0.1)] * 3}
    _, (check,) = compare_with_paper(requested, "cpu", ours)
    assert check.holds is None
    assert "ended without the target" in check.evidence


@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
@pytest.mark.parametrize("statistic", ["last", "last5", "mean", "max", "jitter", "growth"])
def test_a_run_that_diverges_is_not_judged_by_what_it_was_before(lost: float | None, statistic: str) -> None:
    measure = {"metric": "loss", "statistic": statistic, "factor": 1, "smaller_is_better": True}
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    requested = recipe({"a": 1, "b": 1}, measures={"accuracy": measure}, claims=claims)
    good = [[{"round": place, "loss": each} for place, each in enumerate((0.9, 0.8, 0.7, 0.6), 1)]] * 3
    bad = [{"round": place, "loss": each} for place, each in enumerate((0.3, 0.2, 0.1, lost), 1)]
    ours = {("a", ""): [*good[:2], bad], ("b", ""): good}
    comparisons, (check,) = compare_with_paper(requested, "cpu", ours)
    assert (comparisons[0].ours, check.holds) == (None, None)
    assert "a: run 3 of 3 has no finite loss in its last round" in check.evidence
    curve = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": lost}]
    assert read(curve, metric="loss", statistic="best", factor=1, smaller_is_better=True) == (0.5, True)


def test_rows_with_different_numbers_of_seeds_are_not_paired() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    ours = {"a": around(0.9), "b": [0.1, 0.2]}
    _, (check,) = compare_with_paper(recipe({"a": 1, "b": 1}, claims=claims), "cpu", runs(ours))
    assert (check.holds, "3 and 2 seeds" in check.evidence) == (None, True)


def test_a_bound_needs_every_row_and_every_target() -> None:
    only = {"cpu": {"compares": "order", "rows": ["a"]}}
    claims = [{"statement": "s", "measure": "accuracy", "at_most": 90.0}]
    _, (check,) = compare_with_paper(
        recipe({"a": 1, "b": 1}, claims=claims, scales=only), "cpu", runs({"a": [0.5] * 3})
    )
    assert check.holds is None
    assert "no run of b" in check.evidence
    never = {("a", ""): [history(*[0.1] * 30)] * 3}
    for claim, holds in (({"at_most": 40}, None), ({"at_most": 20}, False)):
        claims = [{"statement": "s", "measure": "accuracy", **claim}]
        _, (check,) = compare_with_paper(recipe({"a": 1}, measures={"accuracy": ROUNDS}, claims=claims), "cpu", never)
        assert check.holds is holds, claim
    counted = {"accuracy": {"statistic": "last", "counted": True}}
    assert claimed({"a": [0.5]}, {"at_most": 90.0}, measures=counted) is True


def test_a_target_of_other_data_is_left_out_and_its_claims_are_undecided() -> None:
    measures = {"accuracy": {"statistic": "last"}, "rounds": ROUNDS}
    claims = [{"statement": "s", "measure": "rounds", "order": ["a", "b"]}]
    paper = {"compares": "numbers", "set": {"data": {"name": "cifar10"}}}
    requested = recipe({"a": 50.0, "b": 40.0}, measures=measures, claims=claims)
    for name, targets, measured in (
        ("fashion-mnist", {}, ["accuracy"]),
        ("fashion-mnist", {"rounds": 0.8}, ["accuracy", "rounds"]),
        ("cifar10", {}, ["accuracy", "rounds"]),
    ):
        cpu = {"compares": "order", "set": {"data": {"name": name}}, "targets": targets}
        scaled = Recipe.model_validate({**requested.model_dump(), "scales": {"paper": paper, "cpu": cpu}})
        assert list(scaled.measured("cpu")) == measured
        comparisons, (check,) = compare_with_paper(scaled, "cpu", runs({"a": around(0.9), "b": around(0.7)}))
        assert {one.measure for one in comparisons} == set(measured)
        if "rounds" not in measured:
            assert (check.holds, check.evidence) == (None, "the target is for other data")
        same = name == "cifar10"
        assert [one.difference is not None for one in comparisons if one.measure == "accuracy"] == [same, same]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({}, "expected exactly one"),
        ({"at_most": 1.0, "across": "columns"}, "with claims across rows only"),
        ({"order": ["a"]}, "at least two names"),
        ({"order": ["a", "b"], "than": ["a"]}, "with better only"),
        ({"better": ["a"], "than": ["a", "b"]}, "a name is in both"),
        ({"order": ["a", "b"], "rows": ["a"]}, "claims across columns and with bounds only"),
        ({"across": "columns", "order": ["", "b"]}, "'b' is not known"),
        ({"across": "columns", "columns": [""], "order": ["x", "y"]}, "with claims across rows only"),
    ],
)
def test_a_claim_that_says_too_much_or_too_little(claim: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe({"a": 1, "b": 1}, claims=[{"statement": "s", "measure": "accuracy", **claim}])
