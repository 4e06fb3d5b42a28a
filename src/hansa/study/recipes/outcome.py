"""Running recipes, and their results: tables, pages, and one file of numbers from which every verdict follows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from hansa.config import Config, from_yaml
from hansa.core.errors import HansaError
from hansa.runs.columns import CHARTED
from hansa.runs.experiment import config_digest
from hansa.runs.folder import FINISHED, RunFolder, expand_seeds, slug
from hansa.runs.metrics import is_finite
from hansa.runs.store.io import make_folder, write_file
from hansa.study.recipes.recipe import Recipe, RecipeCell
from hansa.study.recipes.verdict import CLAIM_RULE, CellComparison, ClaimCheck, agreement_rule, compare_with_paper
from hansa.study.report import ReportEntry, ReportTable
from hansa.study.report.ranking import draw_curves

if TYPE_CHECKING:
    from hansa.study.session import Session

HEADINGS = ("", "published", "ours", "difference", "verdict")
CLAIM_WORDS = {True: "holds", False: "does not hold", None: "undecided"}


class PlannedCell(NamedTuple):
    """One row in one column of a recipe, with its configuration."""

    cell: RecipeCell
    config: Config


class RecipeResult(NamedTuple):
    """A recipe at a scale with every number and claim, or the error that prevented the run."""

    recipe: Recipe
    scale: str
    cells: Sequence[CellComparison] = ()
    claims: Sequence[ClaimCheck] = ()
    error: str = ""
    failed: bool = False
    """Whether a run was started and failed."""
    runs: Mapping[tuple[str, str], ReportEntry] = {}
    """The runs of each row and column."""
    made_with: str = ""
    """The versions and machines of the runs."""

    @property
    def verdict(self) -> str:
        """The verdicts on its numbers and claims in one line.

        >>> from hansa.study.recipes.recipe import library
        >>> RecipeResult(library()["cams-table-3"], "cpu", error="no data").verdict
        'not run: no data'
        """
        if self.error:
            return f"not run: {self.error}"
        verdicts = Counter(cell.verdict for cell in self.cells if cell.published is not None)
        parts = [f"{count} {verdict}" for verdict, count in verdicts.items()]
        decided = [claim.holds for claim in self.claims if claim.holds is not None]
        parts += [f"{sum(decided)} of {len(decided)} claims hold"] * bool(decided)
        parts += [f"claims undecided: {len(self.claims) - len(decided)}"] * (len(decided) < len(self.claims))
        return ", ".join(parts) or "nothing to compare"

    @property
    def rules(self) -> list[str]:
        """The rules of agreement that were applied."""
        numbers = self.recipe.at(self.scale).compares == "numbers"
        measures = [self.recipe.measures[cell.measure] for cell in self.cells if cell.published is not None and numbers]
        return [*dict.fromkeys(map(agreement_rule, measures)), *[CLAIM_RULE] * bool(self.claims)]


def plan_recipe(
    recipe: Recipe, scale: str, overrides: Sequence[str] = (), *, building: bool = True
) -> list[PlannedCell]:
    """Return the configurations of a recipe.

    Args:
        recipe: The recipe.
        scale: One of its scales.
        overrides: Assignments such as ``workers=1``.
        building: Whether to check components by building them, as in `hansa.config.from_yaml`.

    >>> from hansa.study.recipes import library
    >>> len(plan_recipe(library()["cams-table-2"], "smoke", building=False))
    10
    """
    cells = []
    for cell in recipe.cells(scale):
        text, source = yaml.safe_dump(cell.document), f"{recipe.name}, {cell.label}"
        cells.append(PlannedCell(cell, from_yaml(text, overrides, source, building=building)))
        seeds, expected = ([run.seed for run in expand_seeds(planned.config)] for planned in (cells[-1], cells[0]))
        if seeds != expected:
            raise HansaError(
                f"{recipe.name}, {cell.label}: its seeds are {seeds}, those of {cells[0].cell.label} {expected}. Rows "
                "are compared within seeds: set the same seeds for all, in the scale or with --seeds."
            )
    return cells


def recipe_status(plans: Iterable[tuple[Recipe, Sequence[PlannedCell]]], folder: Path) -> list[tuple[str, str, str]]:
    """Return each recipe's name, how many of its runs are finished and, if all are, its verdict.

    Args:
        plans: Recipes with their planned cells.
        folder: The folder of results, with the folder of runs in it.
    """
    finished = set()
    for path in [*folder.glob("runs/*/seed-*"), *folder.glob("runs/*")]:
        try:
            if (run := RunFolder(path)).exists and run.summary["status"] == FINISHED:
                finished.add(_run_key(run.config))
        except HansaError:  # damaged, which the run reports when it is needed
            continue
    rows = []
    for recipe, cells in plans:
        keys = {_run_key(config) for planned in cells for config in expand_seeds(planned.config)}
        verdict = ""
        with suppress(OSError, ValueError, KeyError, TypeError):  # no readable result
            verdict = load_result(recipe, folder / f"{recipe.name}.json").verdict if keys <= finished else ""
        rows.append((recipe.name, f"{len(keys & finished)} of {len(keys)}", verdict))
    return rows


def _run_key(config: Config) -> str:
    """Return a key of all that affects the results and measurements of a run."""
    measurements = config.model_dump(mode="json", include={"rounds", "evaluate", "links"})
    return f"{config_digest(config)} {json.dumps(measurements, sort_keys=True)}"


def run_recipe(
    recipe: Recipe,
    scale: str,
    folder: Path,
    session: Session,
    overrides: Sequence[str] = (),
    parallel: int | None = None,
) -> RecipeResult:
    """Run all cells of a recipe that have not been run before, and compare them with the paper.

    Args:
        recipe: The recipe.
        scale: One of its scales.
        folder: The folder of all runs, which recipes share.
        session: Executes the runs.
        overrides: Assignments such as ``workers=1``.
        parallel: Number of runs at once; None chooses it.
    """
    plan = plan_recipe(recipe, scale, overrides)
    configs = {planned.cell.label: planned.config for planned in plan}
    # do not extend a run of fewer rounds: another recipe may need it
    entries = session.run_reusable(configs, folder, parallel, extend=False)
    runs = {(cell.row, cell.column): entries[cell.label] for cell, _ in plan}
    environments = (run.environment for entry in runs.values() for run in entry.runs)
    return _judged(recipe, scale, runs, "; ".join(dict.fromkeys(map(_describe_environment, environments))))


def _judged(recipe: Recipe, scale: str, runs: Mapping[tuple[str, str], ReportEntry], made_with: str) -> RecipeResult:
    histories = {key: entry.histories for key, entry in runs.items()}
    cells, claims = compare_with_paper(recipe, scale, histories)
    return RecipeResult(recipe, scale, cells, claims, runs=runs, made_with=made_with)


def _describe_environment(environment: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {environment.get('packages', {}).get(name, '?')}" for name in ("hansa", "torch"))
    return f"{packages}, {environment.get('system', '?')}, kernels {environment.get('native kernels', '?')}"


def save_result(result: RecipeResult, path: Path) -> None:
    """Write the numbers of a result from which its verdicts follow: the columns of its measures, a line for each run.

    A column is its first round, the rounds between two measurements, and the measured values, null where there is none.
    """
    columns = dict.fromkeys(name for measure in result.recipe.measures.values() for name in measure.recorded)
    head = {"recipe": result.recipe.name, "scale": result.scale, "error": result.error, "made_with": result.made_with}
    lines = [
        json.dumps(
            {"row": row, "column": column, "seed": run.seed}
            | {name: curve for name in columns if (curve := _pack_curve(run.history, name)) is not None},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for (row, column), entry in result.runs.items()
        for run in entry.runs
    ]
    text = json.dumps(head, ensure_ascii=False)[:-1]
    write_file(path, "".join([text, ', "runs": [\n', ",\n".join(lines), "\n]}\n"]).encode())


def _pack_curve(history: Sequence[Mapping[str, Any]], name: str) -> list[Any] | None:
    points = {int(record["round"]): float(record[name]) for record in history if is_finite(record.get(name))}
    if not points:
        return None
    first, last = min(points), max(points)
    step = math.gcd(*(number - first for number in points)) or 1
    values = [points.get(number) for number in range(first, last + 1, step)]
    return [first, step, [None if value is None else _short(value) for value in values]]


def _short(value: float) -> float:
    """Return a whole number as it is, and any other one with six digits.

    >>> _short(1024.0), _short(2 / 3)
    (1024, 0.666667)
    """
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def load_result(recipe: Recipe, path: Path) -> RecipeResult:
    """Read a result that `save_result` wrote; the verdicts are those of the present rules.

    Args:
        recipe: The recipe.
        path: The file of the result.
    """
    content = json.loads(path.read_bytes())
    if content["error"]:
        return RecipeResult(recipe, content["scale"], error=content["error"])
    seeds: dict[tuple[str, str], list[ReportEntry]] = {}
    for run in content["runs"]:
        records: dict[int, dict[str, Any]] = {}
        row, column, seed = (run.pop(key) for key in ("row", "column", "seed"))
        for name, (first, step, values) in run.items():
            for number, value in zip(count(first, step), values, strict=False):
                if value is not None:
                    records.setdefault(number, {"round": number})[name] = value
        history = [records[number] for number in sorted(records)]
        seeds.setdefault((row, column), []).append(ReportEntry(row, history, seed=seed))
    runs = {(row, column): ReportEntry.from_seeds(row, entries) for (row, column), entries in seeds.items()}
    return _judged(recipe, content["scale"], runs, content["made_with"])


def result_tables(result: RecipeResult) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return a table for each column and measure: its title, and its rows under `HEADINGS`."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    targets = result.recipe.at(result.scale).targets
    for cell in result.cells:
        measure = result.recipe.measures[cell.measure]
        title = cell.measure + (f" ({measure.unit})" if measure.unit not in ("", cell.measure) else "")
        if (target := targets.get(cell.measure)) is not None:
            title += f" to {100 * target:g}% at this scale, {100 * (measure.target or 0):g}% published"
        published = ours = difference = "–"
        if cell.published is not None:
            number = cell.published
            published = f"{'over ' * number.exceeded}{_with_spread(number.value, number.spread)}"
        if cell.ours is not None:
            ours = _with_spread(cell.ours.mean, cell.ours.std)
        elif measure.target is not None:
            ours = "not reached by all"
        if cell.difference is not None:
            difference = f"{cell.difference:+.4g}"
        title = f"{cell.cell.column}, {title}" if cell.cell.column else title
        tables.setdefault(title, []).append((cell.cell.row, published, ours, difference, cell.verdict))
    return list(tables.items())


def _with_spread(value: float, spread: float | None) -> str:
    """
    >>> _with_spread(88.7912, 0.941), _with_spread(3.58e11, 0.0), _with_spread(302.0, None)
    ('88.79 ± 0.94', '3.58e+11', '302')
    """
    return f"{value:.4g}{f' ± {spread:.2g}' if spread else ''}"


def claim_lines(result: RecipeResult) -> list[tuple[str, str]]:
    """Return the verdict on each claim, with its statement and evidence."""
    lines = []
    for check in result.claims:
        setting = check.row or check.column
        text = f"{check.claim.statement}{f' ({setting})' if setting else ''}; {check.evidence}"
        lines.append((CLAIM_WORDS[check.holds], text))
    return lines


def report_tables(result: RecipeResult) -> list[ReportTable]:
    """Return the sections of a recipe's page: numbers, claims, and the rules with known differences."""
    tables = [
        ReportTable(f"Published numbers: {title}", HEADINGS, rows, result.verdict)
        for title, rows in result_tables(result)
    ]
    remarks = [result.recipe.at(result.scale).reduction, *result.rules, *result.recipe.known_differences]
    if result.claims:
        tables.append(ReportTable("Claims", ("", "claim"), claim_lines(result)))
    return [*tables, ReportTable("Reduction, rules, known differences", ("",), [(text,) for text in remarks if text])]


def export_result(result: RecipeResult, folder: Path) -> None:
    """Write NAME.json as `save_result` does, NAME.md and, with ``hansa[plot]``, figures."""
    make_folder(folder.absolute())
    save_result(result, folder / f"{result.recipe.name}.json")
    write_file(folder / f"{result.recipe.name}.md", result_markdown(result, draw_figures(result, folder)).encode())


def result_markdown(result: RecipeResult, figures: Sequence[str] = ()) -> str:
    """Return the result as Markdown: the setting, its reduction, all numbers and claims."""
    recipe = result.recipe
    lines = [f"# {recipe.name}", "", f"{recipe.reference}. {recipe.summary}", ""]
    lines += [f"Scale `{result.scale}`: {recipe.at(result.scale).reduction or 'nothing is reduced.'}", ""]
    lines += [f"**{result.verdict}**", ""]
    for title, rows in result_tables(result):
        lines += ["| " + " | ".join(map(_cell, (title, *HEADINGS[1:]))) + " |", "|---|---:|---:|---:|---|"]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        lines.append("")
    if result.claims:
        lines += ["Claims:", "", *(f"- **{verdict}**: {text}" for verdict, text in claim_lines(result)), ""]
    lines += [f"![{name}]({name})" for name in figures] + [""] * bool(figures)
    lines += [f"- {line}" for line in (*result.rules, *recipe.known_differences)]
    lines += ["", f"Made by `hansa reproduce {recipe.name} --scale {result.scale}`; {result.made_with}."]
    lines += [f"Measured numbers: [{recipe.name}.json]({recipe.name}.json)."]
    return "\n".join(lines) + "\n"


def draw_figures(result: RecipeResult, folder: Path) -> list[str]:
    """Draw each charted metric, one figure per column; nothing without matplotlib."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        return []
    names = []
    metrics = dict.fromkeys(measure.metric for measure in result.recipe.measures.values())
    for metric in (name for name in metrics if name in CHARTED):
        for column in dict.fromkeys(column for _, column in result.runs):
            entries = [replace(run, name=row) for (row, of), run in result.runs.items() if of == column]
            name = "-".join(slug(part) for part in (result.recipe.name, column, metric) if part) + ".svg"
            try:
                with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hansa"}):
                    draw_curves(entries, folder / name, metric)
            except HansaError:  # not measured in these runs
                continue
            names.append(name)
    return names


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "
