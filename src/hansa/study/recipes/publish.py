"""The result of a recipe as files: text with tables, numbers, curves, figures, configurations."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import yaml

from hansa.config import Config, to_yaml
from hansa.core.errors import HansaError
from hansa.runs.columns import CHARTED
from hansa.runs.folder import slug
from hansa.runs.store.io import make_folder, write_file
from hansa.study.recipes.outcome import HEADINGS, RecipeResult, claim_status, result_tables
from hansa.study.recipes.recipe import RecipeCell
from hansa.study.report import ReportEntry
from hansa.study.report.figure import draw_curves


class CellRun(NamedTuple):
    """One row in one column, with its configuration and its runs."""

    cell: RecipeCell
    config: Config
    entry: ReportEntry


def export_result(result: RecipeResult, runs: Sequence[CellRun], folder: Path) -> Path:
    """Write NAME.md, .json, .csv, .yaml and, with ``hansa[plot]``, figures; return the path of NAME.md.

    The CSV file has one line for each round of every seed in which a metric of the recipe was measured. The YAML file
    has the full configuration of every row and column.
    """
    make_folder(folder.absolute())
    name = result.recipe.name
    configs = {run.cell.label: yaml.safe_load(to_yaml(run.config)) for run in runs}
    files = {
        ".md": result_markdown(result, runs, _draw_figures(result, runs, folder)),
        ".json": json.dumps(result.record, indent=1, ensure_ascii=False) + "\n",
        ".csv": curves_csv(result, runs),
        ".yaml": yaml.safe_dump(configs, sort_keys=False, allow_unicode=True, width=120),
    }
    for suffix, content in files.items():
        write_file(folder / f"{name}{suffix}", content.encode())
    return folder / f"{name}.md"


def result_markdown(result: RecipeResult, runs: Sequence[CellRun], figures: Sequence[str] = ()) -> str:
    """Return the result as Markdown: the setting, its reduction, every number, every claim."""
    recipe = result.recipe
    lines = [f"# {recipe.name}", "", f"{recipe.reference}. {recipe.summary}", ""]
    lines += [f"Scale `{result.scale}`: {recipe.at(result.scale).reduction or 'nothing is reduced.'}", ""]
    lines += [f"**{result.verdict}**", ""]
    for title, rows in result_tables(result):
        lines += ["| " + " | ".join(map(_cell, (title, *HEADINGS[1:]))) + " |", "|---|---:|---:|---:|---|"]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        lines.append("")
    if result.claims:
        lines += ["Claims:", ""]
        for one in result.claims:
            setting = f" ({one.setting})" if one.setting else ""
            lines.append(f"- **{claim_status(one.holds)}**: {one.claim.statement}{setting}; {one.evidence}")
        lines.append("")
    lines += [f"![{name}]({name})" for name in figures] + [""] * bool(figures)
    lines += [f"- {line}" for line in (*result.rules, *recipe.known_differences)]
    lines += ["", f"Made by `hansa reproduce {recipe.name} --scale {result.scale}`; {_environments(runs)}"]
    links = (
        (f"{recipe.name}.yaml", "configurations"),
        (f"{recipe.name}.csv", "curves"),
        (f"{recipe.name}.json", "JSON"),
    )
    lines += [f"Files: {', '.join(f'[{title}]({file})' for file, title in links)}."]
    return "\n".join(lines) + "\n"


def curves_csv(result: RecipeResult, runs: Sequence[CellRun]) -> str:
    """Return one line for each round of every run in which one of the recipe's metrics was measured."""
    metrics = list(dict.fromkeys(measure.metric for measure in result.recipe.measures.values()))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "round", *metrics])
    for cell, _, entry in runs:
        for member in entry.runs:
            for table in member.curves(most=sys.maxsize):
                for place, number in enumerate(table["round"]):
                    values = [table[name][place] if name in table else None for name in metrics]
                    if any(value is not None for value in values):
                        texts = ["" if value is None else f"{value:.6g}" for value in values]
                        writer.writerow([cell.row, cell.column, member.seed, int(number or 0), *texts])
    return text.getvalue()


def _draw_figures(result: RecipeResult, runs: Sequence[CellRun], folder: Path) -> list[str]:
    """Draw each charted metric, one figure for each column; nothing without matplotlib."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        return []
    names = []
    metrics = dict.fromkeys(measure.metric for measure in result.recipe.measures.values())
    for metric in (name for name in metrics if name in CHARTED):
        for column in dict.fromkeys(run.cell.column for run in runs):
            entries = [replace(run.entry, name=run.cell.row) for run in runs if run.cell.column == column]
            name = "-".join(slug(part) for part in (result.recipe.name, column, metric) if part) + ".svg"
            try:
                with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hansa"}):
                    draw_curves(entries, folder / name, metric)
            except HansaError:  # not measured in these runs
                continue
            names.append(name)
    return names


def _environments(runs: Sequence[CellRun]) -> str:
    """Return the machines and versions of the runs."""
    texts: dict[str, None] = {}
    for environment in (member.environment for run in runs for member in run.entry.runs):
        packages = environment.get("packages", {})
        system = f"{environment.get('system', '?')}, kernels {environment.get('native kernels', '?')}"
        texts[f"hansa {packages.get('hansa', '?')}, torch {packages.get('torch', '?')}, {system}"] = None
    return "; ".join(texts) + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "
