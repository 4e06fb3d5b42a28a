"""Running recipes, and their results: tables, pages, and files with numbers, curves, figures and configurations."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from hansa.config import Config, from_yaml, to_yaml
from hansa.core.errors import HansaError
from hansa.runs.columns import CHARTED
from hansa.runs.experiment import config_digest
from hansa.runs.folder import FINISHED, RunFolder, expand_seeds, slug
from hansa.runs.metrics import is_finite, with_totals
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
    """One row in one column of a recipe, with its configuration and, if it was run, its runs."""

    cell: RecipeCell
    config: Config
    entry: ReportEntry | None = None

    @property
    def runs(self) -> Sequence[ReportEntry]:
        """The runs of its seeds."""
        return () if self.entry is None else self.entry.runs


class RecipeResult(NamedTuple):
    """A recipe at a scale with every number and claim, or the error that prevented the run."""

    recipe: Recipe
    scale: str
    cells: Sequence[CellComparison] = ()
    claims: Sequence[ClaimCheck] = ()
    error: str = ""
    failed: bool = False
    """Whether a run was started and failed."""
    runs: Sequence[PlannedCell] = ()

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
        parts += [f"{len(self.claims) - len(decided)} undecided"] * (len(decided) < len(self.claims))
        return ", ".join(parts) or "nothing to compare"

    @property
    def rules(self) -> list[str]:
        """The rules of agreement that were applied."""
        numbers = self.recipe.at(self.scale).compares == "numbers"
        measures = [self.recipe.measures[cell.measure] for cell in self.cells if cell.published is not None and numbers]
        return [*dict.fromkeys(map(agreement_rule, measures)), *[CLAIM_RULE] * bool(self.claims)]

    @property
    def record(self) -> dict[str, Any]:
        """The result as a JSON record."""
        return {
            "recipe": self.recipe.name,
            "paper": self.recipe.paper,
            "reference": self.recipe.reference,
            "scale": self.scale,
            "reduction": self.recipe.at(self.scale).reduction,
            "verdict": self.verdict,
            "error": self.error,
            "numbers": [
                {"row": number.cell.row, "column": number.cell.column}
                | {key: value._asdict() if hasattr(value, "_asdict") else value
                   for key, value in number._asdict().items() if key != "cell"}
                for number in self.cells
            ],
            "claims": [
                {"statement": check.claim.statement}
                | {key: value for key, value in check._asdict().items() if key != "claim"}
                for check in self.claims
            ],
            "rules": {name: agreement_rule(measure) for name, measure in self.recipe.measures.items()},
            "known_differences": list(self.recipe.known_differences),
        }  # fmt: skip


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


def recipe_status(plans: Mapping[str, Iterable[PlannedCell]], folder: Path) -> list[tuple[str, str, str]]:
    """Return each recipe's name, how many of its runs are finished and, if all are, its verdict.

    Args:
        plans: The planned cells of each recipe.
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
    for name, cells in plans.items():
        keys = {_run_key(config) for planned in cells for config in expand_seeds(planned.config)}
        verdict = ""
        with suppress(OSError, ValueError, KeyError, TypeError):  # no readable result
            record = json.loads((folder / f"{name}.json").read_bytes())
            verdict = str(record["verdict"]) if keys <= finished else ""
        rows.append((name, f"{len(keys & finished)} of {len(keys)}", verdict))
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
    runs = [planned._replace(entry=entries[planned.cell.label]) for planned in plan]
    histories = {(planned.cell.row, planned.cell.column): [run.history for run in planned.runs] for planned in runs}
    return RecipeResult(recipe, scale, *compare_with_paper(recipe, scale, histories), runs=runs)


def result_tables(result: RecipeResult) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return a table for each column and measure: its title, and its rows under `HEADINGS`."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    targets = result.recipe.at(result.scale).targets
    for cell in result.cells:
        measure = result.recipe.measures[cell.measure]
        title = cell.measure + (f" ({measure.unit})" if measure.unit else "")
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
    """Write NAME.md, .json, .csv, .yaml and, with ``hansa[plot]``, figures.

    The CSV file has one line for each round of each seed in which a metric of the recipe was measured; the YAML file
    has the full configuration of each row and column.
    """
    make_folder(folder.absolute())
    name = result.recipe.name
    configs = {run.cell.label: yaml.safe_load(to_yaml(run.config)) for run in result.runs}
    files = {
        ".md": result_markdown(result, _draw_figures(result, folder)),
        ".json": result_json(result),
        ".csv": curves_csv(result),
        ".yaml": yaml.safe_dump(configs, sort_keys=False, allow_unicode=True, width=120),
    }
    for suffix, content in files.items():
        write_file(folder / f"{name}{suffix}", content.encode())


def result_json(result: RecipeResult) -> str:
    """Return the record of a result as JSON."""
    return json.dumps(result.record, indent=1, ensure_ascii=False) + "\n"


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
    lines += ["", f"Made by `hansa reproduce {recipe.name} --scale {result.scale}`; {_environments(result)}"]
    links = {"yaml": "configurations", "csv": "curves", "json": "JSON"}
    lines += [f"Files: {', '.join(f'[{title}]({recipe.name}.{suffix})' for suffix, title in links.items())}."]
    return "\n".join(lines) + "\n"


def curves_csv(result: RecipeResult) -> str:
    """Return one line for each round of each run in which a metric of the recipe was measured."""
    metrics = list(dict.fromkeys(measure.metric for measure in result.recipe.measures.values()))
    lines: list[list[Any]] = [["row", "column", "seed", "round", *metrics]]
    for cell, run in ((planned.cell, run) for planned in result.runs for run in planned.runs):
        for record in with_totals(run.history):
            texts = [f"{record[name]:.6g}" if is_finite(record.get(name)) else "" for name in metrics]
            if any(texts):
                lines.append([cell.row, cell.column, run.seed, record["round"], *texts])
    csv.writer(text := StringIO(), lineterminator="\n").writerows(lines)
    return text.getvalue()


def _draw_figures(result: RecipeResult, folder: Path) -> list[str]:
    """Draw each charted metric, one figure per column; nothing without matplotlib."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        return []
    names = []
    metrics = dict.fromkeys(measure.metric for measure in result.recipe.measures.values())
    for metric in (name for name in metrics if name in CHARTED):
        for column in dict.fromkeys(run.cell.column for run in result.runs):
            entries = [replace(run.entry, name=run.cell.row) for run in result.runs
                       if run.cell.column == column and run.entry is not None]  # fmt: skip
            name = "-".join(slug(part) for part in (result.recipe.name, column, metric) if part) + ".svg"
            try:
                with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hansa"}):
                    draw_curves(entries, folder / name, metric)
            except HansaError:  # not measured in these runs
                continue
            names.append(name)
    return names


def _environments(result: RecipeResult) -> str:
    """Return the machines and versions of the runs."""
    texts = []
    for environment in (run.environment for planned in result.runs for run in planned.runs):
        packages = ", ".join(f"{name} {environment.get('packages', {}).get(name, '?')}" for name in ("hansa", "torch"))
        texts.append(f"{packages}, {environment.get('system', '?')}, kernels {environment.get('native kernels', '?')}")
    return "; ".join(dict.fromkeys(texts)) + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "
