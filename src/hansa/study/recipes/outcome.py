"""What came of a recipe, in words: rows of a table, a record to keep, and the one page of all that were reproduced."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from hansa.study.recipes.recipe import Measure, Recipe
from hansa.study.recipes.verdict import Compared, Held, rule

HEADINGS = ("", "published", "ours", "difference", "verdict")


class Result(NamedTuple):
    """A recipe at a scale: every number and claim; or why it could not be run."""

    recipe: Recipe
    scale: str
    compared: Sequence[Compared] = ()
    held: Sequence[Held] = ()
    why_not: str = ""
    page: str = ""

    @property
    def verdict(self) -> str:
        """The whole in a few words.

        >>> from hansa.study.recipes.recipe import library
        >>> Result(library()["cams-table-3"], "cpu", why_not="no data").verdict
        'not run'
        """
        if self.why_not:
            return "not run"
        verdicts = Counter(one.verdict for one in self.compared if one.published is not None)
        told = [f"{count} {word}" for word, count in verdicts.items()]
        if claims := [one.holds for one in self.held]:
            decided = [holds for holds in claims if holds is not None]
            told += [f"{sum(decided)} of {len(decided)} claims hold"] * bool(decided)
            told += [f"{len(claims) - len(decided)} undecided"] * (len(decided) < len(claims))
        return ", ".join(told) or "nothing to compare"

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as it is kept."""
        return {
            "recipe": self.recipe.name,
            "paper": self.recipe.paper,
            "where": self.recipe.where,
            "scale": self.scale,
            "reduces": self.recipe.at(self.scale).reduces,
            "why_not": self.why_not,
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
                for one in self.compared
            ],
            "claims": [
                {"says": one.claim.says, "column": one.column, "holds": one.holds, "because": one.because}
                for one in self.held
            ],
            "rules": {name: rule(measure) for name, measure in self.recipe.measures.items()},
            "knows": list(self.recipe.knows),
        }


def tables(result: Result) -> list[tuple[str, list[tuple[str, ...]]]]:
    """A table for each column and measure: its title, and rows as `HEADINGS` has them."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for one in result.compared:
        measure = result.recipe.measures[one.measure]
        unit = f" ({measure.unit})" if measure.unit else ""
        title = ", ".join(part for part in (one.cell.column, f"{one.measure}{unit}") if part)
        found.setdefault(title, []).append((one.cell.row, *_cells(one, measure)))
    return list(found.items())


def _cells(one: Compared, measure: Measure) -> tuple[str, str, str, str]:
    told = "–"
    if one.published is not None:
        told = f"over {one.published.value:g}" if one.published.beyond else _number(one.published.value)
        if one.published.spread is not None:
            told += f" ± {_apart(one.published.spread, one.published.value)}"
    ours = "–" if measure.target is None else "not reached"
    if one.ours is not None:
        spread = f" ± {_apart(one.ours.deviation, one.ours.mean)}" if one.ours.deviation else ""
        ours = _number(one.ours.mean) + spread
    apart = "–" if one.difference is None else f"{'+' if one.difference >= 0 else '−'}{_number(abs(one.difference))}"
    return told, ours, apart, one.verdict


def _number(value: float) -> str:
    """
    >>> _number(88.7912), _number(3.58e11), _number(0.0123), _number(302.0)
    ('88.79', '3.58e+11', '0.0123', '302')
    """
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2f}" if 1 <= abs(value) < 1e6 else f"{value:.3g}"


def _apart(deviation: float, mean: float) -> str:
    """A deviation to the places of its mean.

    >>> _apart(0.941, 85.67), _apart(0.00301, 0.298), _apart(4.16e-05, 0.0949), _apart(2.5, 302.0)
    ('0.94', '0.003', '4e-05', '2.5')
    """
    places = 2 if abs(mean) >= 1 or not mean else 2 - math.floor(math.log10(abs(mean)))
    told = f"{deviation:.{places}f}"
    return (
        f"{deviation:.2g}" if abs(mean) >= 1e6 else told.rstrip("0").rstrip(".") if float(told) else f"{deviation:.1g}"
    )


def claim_word(holds: bool | None) -> str:
    """
    >>> claim_word(True), claim_word(None)
    ('holds', 'undecided')
    """
    return "undecided" if holds is None else "holds" if holds else "does not hold"


def page(results: Sequence[Result], title: str = "Published, and here") -> str:
    """One self-contained page: every recipe with its tables, claims, rule, and what is known to differ."""
    style = files("hansa.study.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    body = "".join(_section(result) for result in results)
    rows = "".join(
        f'<tr><td class="left"><a href="#{_e(result.recipe.name)}">{_e(result.recipe.name)}</a></td>'
        f'<td class="left">{_e(result.recipe.where)}</td><td class="left">{_e(result.scale)}</td>'
        f'<td class="left">{_e(result.verdict)}</td></tr>'
        for result in results
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_e(title)}</title><style>{style}{_STYLE}</style></head><body>"
        f'<p class="brand">Hansa</p><h1>{_e(title)}</h1>'
        '<p class="lead">Every number beside the published one, with the rule by which they are said to agree, what '
        "the scale leaves out, and what is known to differ.</p>"
        '<section class="card"><div class="scroll"><table><thead><tr><th class="left">recipe</th>'
        f'<th class="left">where</th><th class="left">scale</th><th class="left">verdict</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>{body}</body></html>\n"
    )


_STYLE = """
tbody tr { cursor: auto; } section h3 { font-size: 14px; margin: 18px 0 4px; }
.agrees, .holds { color: var(--good); font-weight: 620; } .differs, .does { color: #c2410c; font-weight: 620; }
ul { margin: 6px 0 0; padding-left: 20px; } li { margin: 2px 0; } td.left { white-space: normal; }
"""


def _section(result: Result) -> str:
    recipe = result.recipe
    scale = recipe.at(result.scale)
    parts = [
        f'<section class="card" id="{_e(recipe.name)}"><div class="head"><h2>{_e(recipe.name)}</h2>',
        f'<span class="note">{_e(recipe.where)}, {_e(recipe.paper)}; scale {_e(result.scale)}</span></div>',
        f"<p>{_e(recipe.says)}</p>",
    ]
    if scale.reduces:
        parts.append(f'<p class="note">Reduced: {_e(scale.reduces)}</p>')
    if result.why_not:
        parts.append(f"<p><b>Not run:</b> {_e(result.why_not)}</p>")
    for title, rows in tables(result):
        head = "".join(f"<th{_left(place)}>{_e(word)}</th>" for place, word in enumerate(HEADINGS))
        parts.append(f'<h3>{_e(title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>')
        for row in rows:
            cells = "".join(
                f'<td class="{row[-1].split()[0]}">{_e(word)}</td>'
                if place == len(row) - 1
                else f"<td{_left(place)}>{_e(word)}</td>"
                for place, word in enumerate(row)
            )
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</tbody></table></div>")
    if result.held:
        lines = "".join(
            f'<li><span class="{claim_word(one.holds).split()[0]}">{claim_word(one.holds)}</span>: {_e(one.claim.says)}'
            f"{_e(f' ({one.column})' if one.column else '')} <span class='note'>{_e(one.because)}</span></li>"
            for one in result.held
        )
        parts.append(f"<h3>Claims</h3><ul>{lines}</ul>")
    rules = dict.fromkeys(rule(recipe.measures[one.measure]) for one in result.compared if one.published is not None)
    if rules:
        parts.append("<h3>Rule</h3><ul>" + "".join(f"<li>{_e(line)}</li>" for line in rules) + "</ul>")
    if recipe.knows:
        parts.append("<h3>Known</h3><ul>" + "".join(f"<li>{_e(line)}</li>" for line in recipe.knows) + "</ul>")
    if result.page:
        parts.append(f'<p class="note"><a href="{_e(result.page)}">curves and configurations</a></p>')
    return "".join([*parts, "</section>"])


def _left(place: int) -> str:
    return ' class="left"' if place == 0 else ""


def _e(text: str) -> str:
    return html.escape(text, quote=True)
