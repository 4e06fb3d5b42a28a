"""How near is near: our numbers beside published ones, by a rule that is stated and printed with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from hansa.runs import metrics
from hansa.runs.seed_statistics import Spread, spread
from hansa.study.recipes.recipe import Cell, Claim, Measure, Published, Recipe

Verdict: TypeAlias = Literal["agrees", "same order", "differs", "not comparable"]

History: TypeAlias = Sequence[Mapping[str, Any]]


class Compared(NamedTuple):
    """A cell's number beside the published one."""

    cell: Cell
    measure: str
    ours: Spread | None
    published: Published | None
    difference: float | None
    verdict: Verdict


class Held(NamedTuple):
    """A claim, and whether it holds here; of orders, which neighbours stand the other way round."""

    claim: Claim
    column: str
    holds: bool | None
    because: str


def rule(measure: Measure) -> str:
    """The rule of agreement in words.

    >>> rule(Measure())
    'agrees: the means differ by at most 1 % + 2 sqrt(s^2 + s_published^2), s over seeds'
    """
    much = f"{100 * measure.within:g} % of it" if measure.relative else f"{measure.within:g} {measure.unit}".rstrip()
    return f"agrees: the means differ by at most {much} + 2 sqrt(s^2 + s_published^2), s over seeds"


def reading(history: History, measure: Measure) -> float | None:
    """One run's number in the paper's unit; None where it was not measured or the target not reached.

    >>> rounds = [{"round": r, "test_accuracy": r / 10, "simulated_seconds": 1800.0} for r in (1, 2, 3)]
    >>> reading(rounds, Measure()), reading(rounds, Measure(read="hours_to", target=0.2, times=1))
    (30.0, 1.0)
    """
    if measure.read in ("rounds_to", "hours_to"):
        assert measure.target is not None
        reached = metrics.rounds_to(history, measure.target, measure.metric)
        if reached is None or measure.read == "rounds_to":
            return None if reached is None else float(reached)
        for record in metrics.running_totals(history):
            if record["round"] == reached:
                seconds = record.get("simulated_total_seconds")
                return None if seconds is None else float(seconds) / 3600
        return None
    if measure.read == "per_round":
        # of the last round: a first one may send less, since everybody has the model that it starts from
        totals = [float(record.get(measure.metric, math.nan)) for record in metrics.running_totals(history)]
        added = totals[-1] - totals[-2] if len(totals) > 1 else sum(totals, 0.0)
        return None if not totals or math.isnan(added) else added * measure.times
    values = [value for _, value in metrics.series(history, measure.metric)]
    if not values:
        return None
    if measure.read == "best":
        return measure.times * (min(values) if measure.smaller else max(values))
    newest = {"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.read]
    taken = values[-newest:]
    return measure.times * math.fsum(taken) / len(taken)


def compare(
    recipe: Recipe, scale: str, histories: Mapping[tuple[str, str], Sequence[History]]
) -> tuple[list[Compared], list[Held]]:
    """Every cell that was run beside its published number, and every claim beside what came out.

    ``histories`` are those of a cell's seeds, by row and column. A number within the rule `agrees`. Else it is of the
    `same order` where, of all pairs in its column that the paper holds apart by more than its spread, none with this
    row stands clearly the other way round here. A scale says what can be judged at all.
    """
    judged = recipe.at(scale).judged
    found: list[Compared] = []
    for name, measure in recipe.measures.items():
        rows: list[tuple[Cell, Spread | None, Published | None]] = []
        for cell in recipe.cells(scale):
            if (cell.row, cell.column) in histories:
                rows.append((cell, _over(histories[cell.row, cell.column], measure), cell.published.get(name)))
        for cell, ours, theirs in rows:
            apart = None if ours is None or theirs is None or theirs.beyond else ours.mean - theirs.value
            column = [(other, mine, told) for other, mine, told in rows if other.column == cell.column]
            found.append(Compared(cell, name, ours, theirs, apart, _verdict(measure, judged, cell, column)))
    held = [
        Held(claim, column, *_held(claim, recipe.measures[claim.measure], column, histories, judged))
        for claim in recipe.claims
        for column in (claim.columns or recipe.columns)
        if any((row, column) in histories for row in recipe.rows)
    ]
    return found, held


def _over(histories: Sequence[History], measure: Measure) -> Spread | None:
    values = [reading(history, measure) for history in histories]
    told = [value for value in values if value is not None]
    return spread(told) if told and len(told) == len(values) else None


def _allowed(measure: Measure, ours: Spread, theirs: Published) -> float:
    within = measure.within * abs(theirs.value) if measure.relative else measure.within
    return within + 2 * math.hypot(ours.deviation, theirs.spread or 0.0)


def _verdict(
    measure: Measure, judged: str, cell: Cell, column: Sequence[tuple[Cell, Spread | None, Published | None]]
) -> Verdict:
    mine, told = next((mine, told) for other, mine, told in column if other is cell)
    if judged == "nothing" or told is None:
        return "not comparable"
    if mine is None:
        return "agrees" if told.beyond and judged == "numbers" else "not comparable"
    if judged == "numbers" and not told.beyond and abs(mine.mean - told.value) <= _allowed(measure, mine, told):
        return "agrees"
    compared = 0
    for other, ours, theirs in column:
        if other is cell or ours is None or theirs is None or theirs.beyond or told.beyond:
            continue
        published_gap = told.value - theirs.value
        if abs(published_gap) <= 2 * math.hypot(told.spread or 0.0, theirs.spread or 0.0):
            continue
        compared += 1
        gap = mine.mean - ours.mean
        if gap * published_gap < 0 and abs(gap) > 2 * math.hypot(mine.deviation, ours.deviation):
            return "differs"
    return "same order" if compared else ("differs" if judged == "numbers" else "not comparable")


def _held(
    claim: Claim,
    measure: Measure,
    column: str,
    histories: Mapping[tuple[str, str], Sequence[History]],
    judged: str,
) -> tuple[bool | None, str]:
    rows = claim.order or claim.near
    values: dict[str, Spread] = {}
    for row in rows:
        over = _over(histories[row, column], measure) if (row, column) in histories else None
        if over is not None:
            values[row] = over
    if judged == "nothing" or len(values) < len(rows):
        missing = [row for row in rows if row not in values]
        return None, f"no number of {', '.join(missing)}" if missing else "not judged at this scale"
    told = ", ".join(f"{row} {value.mean:.4g}" for row, value in values.items())
    if claim.near:
        assert claim.within is not None
        means = [value.mean for value in values.values()]
        return max(means) - min(means) <= claim.within, told
    sign = -1.0 if measure.smaller else 1.0
    unclear = False
    for first, second in pairwise(rows):
        gap = sign * (values[first].mean - values[second].mean)
        noise = math.hypot(values[first].deviation, values[second].deviation)
        if gap < 0 and -gap > noise:
            return False, told
        unclear = unclear or (abs(gap) <= noise and gap < 0)
    return (None, f"{told}: within the spread over seeds") if unclear else (True, told)
