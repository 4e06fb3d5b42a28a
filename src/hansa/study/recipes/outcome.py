"""The result of a recipe: table rows, a JSON record, and one page of all recipes that were reproduced."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from hansa.study.recipes.claims import CLAIM_RULE, ClaimCheck
from hansa.study.recipes.recipe import Recipe, RecipeMeasure
from hansa.study.recipes.verdict import CellComparison, agreement_rule
from hansa.study.report.page import PageSection, table_html, verdict_cell

HEADINGS = ("", "published", "ours", "difference", "verdict")


class RecipeResult(NamedTuple):
    """A recipe at a scale with every number and claim, or the error that prevented the run."""

    recipe: Recipe
    scale: str
    cells: Sequence[CellComparison] = ()
    claims: Sequence[ClaimCheck] = ()
    error: str = ""
    page: str = ""
    failed: bool = False
    """Whether a run was started and failed."""

    @property
    def verdict(self) -> str:
        """A summary of all verdicts.

        >>> from hansa.study.recipes.recipe import library
        >>> RecipeResult(library()["cams-table-3"], "cpu", error="no data").verdict
        'not run'
        """
        if self.error:
            return "not run"
        verdicts = [one.verdict for one in self.cells if one.published is not None]
        return summarize_verdicts(verdicts, [one.holds for one in self.claims])

    @property
    def rules(self) -> list[str]:
        """The rules of agreement that were applied."""
        measures = [self.recipe.measures[one.measure] for one in self.cells if one.published is not None]
        rules = list(dict.fromkeys(map(agreement_rule, measures))) if self._numbers else []
        return rules + [CLAIM_RULE] * bool(self.claims)

    @property
    def _numbers(self) -> bool:
        return self.recipe.at(self.scale).compares == "numbers"

    @property
    def record(self) -> dict[str, Any]:
        """The result as a JSON record."""
        return {
            "recipe": self.recipe.name,
            "paper": self.recipe.paper,
            "reference": self.recipe.reference,
            "scale": self.scale,
            "reduction": self.recipe.at(self.scale).reduction,
            "error": self.error,
            "numbers": [
                {
                    "row": one.cell.row,
                    "column": one.cell.column,
                    "measure": one.measure,
                    "published": None if one.published is None else one.published._asdict(),
                    "ours": None if one.ours is None else one.ours._asdict(),
                    "difference": one.difference,
                    "verdict": one.verdict,
                }
                for one in self.cells
            ],
            "claims": [
                {
                    "statement": one.claim.statement,
                    "column": one.column,
                    "row": one.row,
                    "holds": one.holds,
                    "evidence": one.evidence,
                }
                for one in self.claims
            ],
            "rules": {name: agreement_rule(measure) for name, measure in self.recipe.measures.items()},
            "known_differences": list(self.recipe.known_differences),
        }


def summarize_verdicts(verdicts: Sequence[str], claims: Sequence[bool | None]) -> str:
    """Return the verdicts on the numbers and claims of a recipe in a line.

    Args:
        verdicts: The verdict on each published number.
        claims: Whether each claim holds; None if that is undecided.

    >>> summarize_verdicts(["agrees", "differs", "agrees"], [True, None])
    '2 agrees, 1 differs, 1 of 1 claims hold, 1 undecided'
    """
    parts = [f"{count} {verdict}" for verdict, count in Counter(verdicts).items()]
    decided = [holds for holds in claims if holds is not None]
    parts += [f"{sum(decided)} of {len(decided)} claims hold"] * bool(decided)
    parts += [f"{len(claims) - len(decided)} undecided"] * (len(decided) < len(claims))
    return ", ".join(parts) or "nothing to compare"


def read_verdict(path: Path) -> str:
    """Return the verdicts that the file of a result holds (`RecipeResult.record`); "" without a readable file.

    Args:
        path: The file.
    """
    try:
        record = json.loads(path.read_bytes())
        verdicts = [str(one["verdict"]) for one in record["numbers"] if one["published"] is not None]
        return summarize_verdicts(verdicts, [one["holds"] for one in record["claims"]])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def result_tables(result: RecipeResult) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return a table for each column and measure: its title, and its rows under `HEADINGS`."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    targets = result.recipe.at(result.scale).targets
    for one in result.cells:
        measure = result.recipe.measures[one.measure]
        unit = f" ({measure.unit})" if measure.unit else ""
        target = targets.get(one.measure)
        to = (
            "" if target is None else f" to {100 * target:g}% at this scale, {100 * (measure.target or 0):g}% published"
        )
        title = ", ".join(part for part in (one.cell.column, f"{one.measure}{unit}{to}") if part)
        tables.setdefault(title, []).append((one.cell.row, *_cells(one, measure)))
    return list(tables.items())


def _cells(one: CellComparison, measure: RecipeMeasure) -> tuple[str, str, str, str]:
    published = "–"
    if one.published is not None:
        value, spread, exceeded, _ = one.published
        published = f"over {value:g}" if exceeded else _number(value)
        published += "" if spread is None else f" ± {_deviation(spread, value)}"
    ours = "–" if measure.target is None else "not reached by all"
    if one.ours is not None:
        ours = _number(one.ours.mean) + (f" ± {_deviation(one.ours.std, one.ours.mean)}" if one.ours.std else "")
    difference = "–"
    if one.difference is not None:
        difference = f"{'+' if one.difference >= 0 else '−'}{_number(abs(one.difference))}"
    return published, ours, difference, one.verdict


def _number(value: float) -> str:
    """
    >>> _number(88.7912), _number(3.58e11), _number(0.0123), _number(302.0)
    ('88.79', '3.58e+11', '0.0123', '302')
    """
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2f}" if 1 <= abs(value) < 1e6 else f"{value:.3g}"


def _deviation(deviation: float, mean: float) -> str:
    """Format a deviation with the decimal places of its mean.

    >>> _deviation(0.941, 85.67), _deviation(0.00301, 0.298), _deviation(4.16e-05, 0.0949), _deviation(2.5, 302.0)
    ('0.94', '0.003', '4e-05', '2.5')
    """
    if abs(mean) >= 1e6:
        return f"{deviation:.2g}"
    places = 2 if abs(mean) >= 1 or not mean else 2 - math.floor(math.log10(abs(mean)))
    text = f"{deviation:.{places}f}"
    return text.rstrip("0").rstrip(".") if float(text) else f"{deviation:.1g}"


def claim_status(holds: bool | None) -> str:
    """
    >>> claim_status(True), claim_status(None)
    ('holds', 'undecided')
    """
    return "undecided" if holds is None else "holds" if holds else "does not hold"


def results_page(results: Sequence[RecipeResult], title: str = "Published and reproduced numbers") -> str:
    """Return a self-contained page of all results: tables, claims, rules and known differences."""
    style = files("hansa.study.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    rows = "".join(
        f'<tr><td class="left"><a href="#{escape(result.recipe.name)}">{escape(result.recipe.name)}</a></td>'
        f'<td class="left">{escape(result.recipe.reference)}</td><td class="left">{escape(result.scale)}</td>'
        f'<td class="left">{escape(result.verdict)}</td></tr>'
        for result in results
    )
    headings = "".join(f'<th class="left">{heading}</th>' for heading in ("recipe", "reference", "scale", "verdict"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}{_STYLE}</style></head><body>"
        f'<p class="brand">Hansa</p><h1>{escape(title)}</h1>'
        '<p class="lead">Every number is shown beside the published one, with the rule of agreement, what the scale '
        "leaves out, and known differences.</p>"
        f'<section class="card"><div class="scroll"><table><thead><tr>{headings}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>{''.join(map(_section, results))}</body></html>\n"
    )


_STYLE = """
tbody tr { cursor: auto; } section h3 { font-size: 14px; margin: 18px 0 4px; }
ul { margin: 6px 0 0; padding-left: 20px; } li { margin: 2px 0; } td.left { white-space: normal; }
"""


def _section(result: RecipeResult) -> str:
    recipe = result.recipe
    parts = [f"<p>{escape(recipe.summary)}</p>"]
    if reduction := recipe.at(result.scale).reduction:
        parts.append(f'<p class="note">Reduced: {escape(reduction)}</p>')
    if result.error:
        parts.append(f"<p><b>Not run:</b> {escape(result.error)}</p>")
    for title, rows in result_tables(result):
        parts.append(f"<h3>{escape(title)}</h3>{table_html(HEADINGS, [list(map(verdict_cell, row)) for row in rows])}")
    claims = [
        f"{verdict_cell(claim_status(one.holds))}: {escape(one.claim.statement)}"
        f"{escape(f' ({one.setting})' if one.setting else '')} <span class='note'>{escape(one.evidence)}</span>"
        for one in result.claims
    ]
    lists = (
        ("Claims", claims),
        ("Rules", list(map(escape, result.rules))),
        ("Known differences", list(map(escape, recipe.known_differences))),
    )
    for title, lines in lists:
        if lines:
            parts.append(f"<h3>{title}</h3><ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>")
    if result.page:
        parts.append(f'<p class="note"><a href="{escape(result.page)}">curves and configurations</a></p>')
    note = f"{recipe.reference}, {recipe.paper}; scale {result.scale}"
    return str(PageSection(recipe.name, "".join(parts), note, recipe.name))
