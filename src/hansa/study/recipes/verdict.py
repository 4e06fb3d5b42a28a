"""Comparison of measured with published numbers, by a rule of agreement that is printed with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from hansa.runs import metrics
from hansa.runs.seed_statistics import SeedStatistics, seed_statistics
from hansa.study.recipes.recipe import PaperClaim, PublishedValue, Recipe, RecipeCell, RecipeMeasure

Verdict: TypeAlias = Literal["agrees", "same order", "differs", "not comparable"]

History: TypeAlias = Sequence[Mapping[str, Any]]


class CellComparison(NamedTuple):
    """A measured number and the published one."""

    cell: RecipeCell
    measure: str
    ours: SeedStatistics | None
    published: PublishedValue | None
    difference: float | None
    verdict: Verdict


class ClaimCheck(NamedTuple):
    """A claim of the paper, whether it holds here (None: undecided), and the supporting numbers."""

    claim: PaperClaim
    column: str
    holds: bool | None
    evidence: str


def agreement_rule(measure: RecipeMeasure) -> str:
    """Return the rule of agreement as text.

    >>> agreement_rule(RecipeMeasure())
    'agrees: the means differ by at most 1 % + 2 sqrt(s^2 + s_published^2), s over seeds'
    """
    tolerance = f"{measure.tolerance:g} {measure.unit}".rstrip()
    if measure.relative:
        tolerance = f"{100 * measure.tolerance:g} % of it"
    return f"agrees: the means differ by at most {tolerance} + 2 sqrt(s^2 + s_published^2), s over seeds"


def read_measure(history: History, measure: RecipeMeasure) -> float | None:
    """Return one run's number in the unit of the paper; None if not measured, or if the target was not reached.

    >>> rounds = [{"round": r, "test_accuracy": r / 10, "simulated_seconds": 1800.0} for r in (1, 2, 3)]
    >>> read_measure(rounds, RecipeMeasure())
    30.0
    >>> read_measure(rounds, RecipeMeasure(statistic="hours_to", target=0.2, factor=1))
    1.0
    """
    if measure.statistic in ("rounds_to", "hours_to"):
        assert measure.target is not None
        reached = metrics.rounds_to(history, measure.target, measure.metric)
        if reached is None or measure.statistic == "rounds_to":
            return None if reached is None else float(reached)
        for record in metrics.running_totals(history):
            if record["round"] == reached:
                seconds = record.get("simulated_total_seconds")
                return None if seconds is None else float(seconds) / 3600
        return None
    if measure.statistic == "per_round":
        # the last round: the first one may send less, since all clients have the initial model
        totals = [float(record.get(measure.metric, math.nan)) for record in metrics.running_totals(history)]
        added = totals[-1] - totals[-2] if len(totals) > 1 else sum(totals, 0.0)
        return None if not totals or math.isnan(added) else added * measure.factor
    values = [value for _, value in metrics.series(history, measure.metric)]
    if not values:
        return None
    if measure.statistic == "best":
        return measure.factor * (min(values) if measure.smaller_is_better else max(values))
    count = {"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.statistic]
    return measure.factor * math.fsum(values[-count:]) / len(values[-count:])


def compare_with_paper(
    recipe: Recipe, scale: str, histories: Mapping[tuple[str, str], Sequence[History]]
) -> tuple[list[CellComparison], list[ClaimCheck]]:
    """Compare every cell that was run with its published number, and check every claim.

    ``histories`` are those of a cell's seeds, by row and column. A number within the rule `agrees`. Otherwise it has
    the `same order` if no pair of its column that the paper separates by more than its spread is clearly reversed
    here. The scale determines what is compared.
    """
    compares = recipe.at(scale).compares
    comparisons: list[CellComparison] = []
    for name, measure in recipe.measures.items():
        cells: list[_Measured] = []
        for cell in recipe.cells(scale):
            if (cell.row, cell.column) in histories:
                ours = _over_seeds(histories[cell.row, cell.column], measure)
                cells.append(_Measured(cell, ours, cell.published.get(name)))
        for one in cells:
            difference = None
            if one.ours is not None and one.published is not None and not one.published.exceeded:
                difference = one.ours.mean - one.published.value
            column = [other for other in cells if other.cell.column == one.cell.column]
            verdict = _verdict(measure, compares, one, column)
            comparisons.append(CellComparison(one.cell, name, one.ours, one.published, difference, verdict))
    checks = [
        ClaimCheck(claim, column, *_check_claim(claim, recipe.measures[claim.measure], column, histories, compares))
        for claim in recipe.claims
        for column in (claim.columns or recipe.columns)
        if any((row, column) in histories for row in recipe.rows)
    ]
    return comparisons, checks


class _Measured(NamedTuple):
    cell: RecipeCell
    ours: SeedStatistics | None
    published: PublishedValue | None


def _over_seeds(histories: Sequence[History], measure: RecipeMeasure) -> SeedStatistics | None:
    values = [read_measure(history, measure) for history in histories]
    known = [value for value in values if value is not None]
    return seed_statistics(known) if known and len(known) == len(values) else None


def _allowed(measure: RecipeMeasure, ours: SeedStatistics, published: PublishedValue) -> float:
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    return tolerance + 2 * math.hypot(ours.std, published.spread or 0.0)


def _verdict(measure: RecipeMeasure, compares: str, one: _Measured, column: Sequence[_Measured]) -> Verdict:
    ours, published = one.ours, one.published
    if compares == "nothing" or published is None:
        return "not comparable"
    if ours is None:
        return "agrees" if published.exceeded and compares == "numbers" else "not comparable"
    numbers = compares == "numbers"
    if numbers and not published.exceeded and abs(ours.mean - published.value) <= _allowed(measure, ours, published):
        return "agrees"
    compared = 0
    for other in column:
        if other is one or other.ours is None or other.published is None:
            continue
        if other.published.exceeded or published.exceeded:
            continue
        published_gap = published.value - other.published.value
        if abs(published_gap) <= 2 * math.hypot(published.spread or 0.0, other.published.spread or 0.0):
            continue
        compared += 1
        gap = ours.mean - other.ours.mean
        if gap * published_gap < 0 and abs(gap) > 2 * math.hypot(ours.std, other.ours.std):
            return "differs"
    return "same order" if compared else ("differs" if numbers else "not comparable")


def _check_claim(
    claim: PaperClaim,
    measure: RecipeMeasure,
    column: str,
    histories: Mapping[tuple[str, str], Sequence[History]],
    compares: str,
) -> tuple[bool | None, str]:
    rows = claim.order or claim.similar
    values: dict[str, SeedStatistics] = {}
    for row in rows:
        over = _over_seeds(histories[row, column], measure) if (row, column) in histories else None
        if over is not None:
            values[row] = over
    if compares == "nothing" or len(values) < len(rows):
        missing = [row for row in rows if row not in values]
        return None, f"no number for {', '.join(missing)}" if missing else "not compared at this scale"
    evidence = ", ".join(f"{row} {value.mean:.4g}" for row, value in values.items())
    if claim.similar:
        assert claim.tolerance is not None
        means = [value.mean for value in values.values()]
        return max(means) - min(means) <= claim.tolerance, evidence
    sign = -1.0 if measure.smaller_is_better else 1.0
    unclear = False
    for first, second in pairwise(rows):
        gap = sign * (values[first].mean - values[second].mean)
        noise = math.hypot(values[first].std, values[second].std)
        if gap < 0 and -gap > noise:
            return False, evidence
        unclear = unclear or (abs(gap) <= noise and gap < 0)
    return (None, f"{evidence}: within the spread over seeds") if unclear else (True, evidence)
