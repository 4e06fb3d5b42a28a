"""A recipe's result as files to keep and to cite: text with tables, numbers, curves, figures, configurations."""

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

from hansa.config import Config, to_text
from hansa.core.errors import HansaError
from hansa.runs.folder import slug
from hansa.runs.store.io import make_folder, write_file
from hansa.study.recipes.outcome import HEADINGS, Result, claim_word, tables
from hansa.study.recipes.recipe import Cell
from hansa.study.recipes.verdict import rule
from hansa.study.report import Entry
from hansa.study.report.entries import DRAWN
from hansa.study.report.figure import draw


class Trained(NamedTuple):
    """One row in one column, as it was run."""

    cell: Cell
    config: Config
    entry: Entry


def publish(result: Result, runs: Sequence[Trained], folder: Path) -> Path:
    """Write NAME.md, .json, .csv, .yaml and, with ``hansa[plot]``, figures into a folder; the first is returned.

    The CSV file has a line a round of every seed, as far as the recipe's metrics were measured in it; the YAML file has
    the whole configuration of every row and column.
    """
    make_folder(folder.absolute())
    name = result.recipe.name
    figures = _figures(result, runs, folder)
    files = {
        ".md": text(result, runs, figures),
        ".json": json.dumps(result.record, indent=1, ensure_ascii=False) + "\n",
        ".csv": curves(result, runs),
        ".yaml": _configs(runs),
    }
    for ending, content in files.items():
        write_file(folder / f"{name}{ending}", content.encode())
    return folder / f"{name}.md"


def text(result: Result, runs: Sequence[Trained], figures: Sequence[str] = ()) -> str:
    """The result in Markdown: what was asked, what was left out, every number beside the published one, every claim."""
    recipe = result.recipe
    lines = [f"# {recipe.name}", "", f"{recipe.where}. {recipe.says}", ""]
    lines += [f"Scale `{result.scale}`: {recipe.at(result.scale).reduces or 'nothing is reduced.'}", ""]
    lines += [f"**{result.verdict or 'nothing to compare'}**", ""]
    for title, rows in tables(result):
        lines += ["| " + " | ".join(map(_cell, (title, *HEADINGS[1:]))) + " |", "|---|---:|---:|---:|---|"]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        lines.append("")
    if result.held:
        lines += ["Claims:", ""]
        for one in result.held:
            where = f" ({one.column})" if one.column else ""
            lines.append(f"- **{claim_word(one.holds)}**: {one.claim.says}{where}; {one.because}")
        lines.append("")
    lines += [f"![{name}]({name})" for name in figures] + [""] * bool(figures)
    told = dict.fromkeys(rule(recipe.measures[one.measure]) for one in result.compared if one.published is not None)
    lines += [f"- {line}" for line in (*told, *recipe.knows)]
    lines += ["", f"Made by `hansa reproduce {recipe.name} --scale {result.scale}`; {_made_with(runs)}"]
    kept = ", ".join(
        f"[{what}]({recipe.name}.{ending})" for what, ending in (("configurations", "yaml"), ("curves", "csv"))
    )
    lines += [f"Beside this: {kept}, [the same as JSON]({recipe.name}.json)."]
    return "\n".join(lines) + "\n"


def curves(result: Result, runs: Sequence[Trained]) -> str:
    """A line a round of every run in which one of the recipe's metrics was measured."""
    wanted = list(dict.fromkeys(measure.metric for measure in result.recipe.measures.values()))
    held = StringIO()
    writer = csv.writer(held, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "round", *wanted])
    for cell, _, entry in runs:
        for member in entry.members or (entry,):
            for table in member.curves(most=sys.maxsize):
                for place, number in enumerate(table["round"]):
                    values = [table[name][place] if name in table else None for name in wanted]
                    if any(value is not None for value in values):
                        told = ["" if value is None else f"{value:.6g}" for value in values]
                        writer.writerow([cell.row, cell.column, member.seed, int(number or 0), *told])
    return held.getvalue()


def _figures(result: Result, runs: Sequence[Trained], folder: Path) -> list[str]:
    """Mean and band of each metric that can be drawn, a figure a column; without matplotlib none."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        return []
    made = []
    metrics = dict.fromkeys(measure.metric for measure in result.recipe.measures.values())
    for metric in (name for name in metrics if name in DRAWN):
        for column in dict.fromkeys(one.cell.column for one in runs):
            entries = [replace(one.entry, name=one.cell.row) for one in runs if one.cell.column == column]
            name = "-".join(slug(part) for part in (result.recipe.name, column, metric) if part) + ".svg"
            try:
                with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hansa"}):
                    draw(entries, folder / name, metric)
            except HansaError:  # not measured in these runs
                continue
            made.append(name)
    return made


def _configs(runs: Sequence[Trained]) -> str:
    return yaml.safe_dump(
        {one.cell.label: yaml.safe_load(to_text(one.config)) for one in runs}, sort_keys=False,
        allow_unicode=True, width=120,
    )  # fmt: skip


def _made_with(runs: Sequence[Trained]) -> str:
    """The machines and versions of the runs."""
    found: dict[str, None] = {}
    for one in runs:
        for member in one.entry.members or (one.entry,):
            packages = member.environment.get("packages", {})
            system = f"{member.environment.get('system', '?')}, kernels {member.environment.get('native kernels', '?')}"
            found[f"hansa {packages.get('hansa', '?')}, torch {packages.get('torch', '?')}, {system}"] = None
    return "; ".join(found) + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "
