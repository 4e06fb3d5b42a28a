"""Comparison of measured with published numbers, by a rule of agreement that is printed with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from hansa.runs.metrics import MIN_SEEDS, SeedStatistics, seed_statistics
from hansa.study.recipes.claims import ClaimCheck, Histories, check_claims, difference
from hansa.study.recipes.reading import SeedValue, seed_values
from hansa.study.recipes.recipe import PublishedValue, Recipe, RecipeCell, RecipeMeasure

Verdict: TypeAlias = Literal["agrees", "same order", "undecided", "differs", "not comparable"]


class CellComparison(NamedTuple):
    """A measured number and the published one; no ``difference`` between numbers of two data sets."""

    cell: RecipeCell
    measure: str
    ours: SeedStatistics | None
    published: PublishedValue | None
    difference: float | None
    verdict: Verdict


def agreement_rule(measure: RecipeMeasure) -> str:
    """Return the rule of agreement as text.

    >>> agreement_rule(RecipeMeasure())
    'agrees: the means differ by at most 1 % + 2 sqrt(se^2 + se_published^2), se the standard error over seeds'
    """
    tolerance = f"{measure.tolerance:g} {measure.unit}".rstrip()
    if measure.relative:
        tolerance = f"{100 * measure.tolerance:g} % of it"
    if measure.counted:
        return f"agrees: the numbers differ by at most {tolerance}"
    return (
        f"agrees: the means differ by at most {tolerance} + 2 sqrt(se^2 + se_published^2), se the standard error over "
        "seeds"
    )


def compare_with_paper(
    recipe: Recipe, scale: str, histories: Histories
) -> tuple[list[CellComparison], list[ClaimCheck]]:
    """Compare every cell that was run with its published number, and check every claim.

    ``histories`` are those of a cell's seeds, by row and column; all cells have the same seeds in the same order. A
    number within the rule `agrees`. Otherwise it has the `same order` if every pair of its column that the paper
    separates by more than its spread is in that order here, by the paired differences over seeds; it `differs` if one
    is reversed, and is `undecided` otherwise. The scale determines what is compared.
    """
    compares, same_data = recipe.at(scale).compares, recipe.same_data(scale)
    comparisons: list[CellComparison] = []
    for name, measure in recipe.measured(scale).items():
        cells: list[_Measured] = []
        for cell in recipe.cells(scale):
            if (cell.row, cell.column) in histories:
                seeds = seed_values(histories[cell.row, cell.column], measure)
                cells.append(_Measured(cell, seeds, cell.published.get(name)))
        for one in cells:
            ours = one.ours
            shift = None
            if ours is not None and one.published is not None and not one.published.exceeded:
                shift = ours.mean - one.published.value if same_data or measure.counted else None
            column = [other for other in cells if other.cell.column == one.cell.column]
            verdict = _verdict(measure, compares, one, column)
            comparisons.append(CellComparison(one.cell, name, ours, one.published, shift, verdict))
    return comparisons, check_claims(recipe, scale, histories)


class _Measured(NamedTuple):
    cell: RecipeCell
    seeds: Sequence[SeedValue] | None
    published: PublishedValue | None

    @property
    def ours(self) -> SeedStatistics | None:
        if self.seeds is None or not all(one.reached for one in self.seeds):
            return None
        return seed_statistics([one.value for one in self.seeds])


def _allowed(measure: RecipeMeasure, ours: SeedStatistics, seeds: int, published: PublishedValue) -> float:
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    return tolerance + 2 * math.hypot(ours.std / math.sqrt(seeds), published.standard_error)


def _verdict(measure: RecipeMeasure, compares: str, one: _Measured, column: Sequence[_Measured]) -> Verdict:
    ours, published = one.ours, one.published
    if compares == "nothing" or published is None or one.seeds is None:
        return "not comparable"
    numbers = compares == "numbers"
    if numbers and published.exceeded:
        return _verdict_on_bound(one.seeds, published.value)
    if numbers and ours is not None:
        allowed = _allowed(measure, ours, len(one.seeds), published)
        if abs(ours.mean - published.value) <= allowed:
            return "agrees"
    signs = [sign for other in column if other is not one and (sign := _order(measure, one, other)) is not None]
    if -1 in signs:
        return "differs"
    if signs:
        return "same order" if all(sign == 1 for sign in signs) else "undecided"
    if not numbers:
        return "not comparable"
    if ours is None:
        return _verdict_without_target(measure, one.seeds, published)
    return "differs" if measure.counted or len(one.seeds) >= MIN_SEEDS else "undecided"


def _verdict_on_bound(seeds: Sequence[SeedValue], bound: float) -> Verdict:
    """Return the verdict on a target that the paper did not reach within ``bound``: agrees if no run did either."""
    within = [one.reached and one.value <= bound for one in seeds]
    if all(within):
        return "differs" if len(seeds) >= MIN_SEEDS else "undecided"
    if any(within):
        return "undecided"
    # a run that ended earlier without the target says nothing about the time until the bound
    return "agrees" if all(one.reached or one.value >= bound for one in seeds) else "not comparable"


def _verdict_without_target(measure: RecipeMeasure, seeds: Sequence[SeedValue], published: PublishedValue) -> Verdict:
    """Return the verdict if some runs ended without the target that the paper reached: differs if all took longer."""
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    longer = [one.value > published.value + tolerance + 2 * published.standard_error for one in seeds]
    if all(longer):
        return "differs" if len(seeds) >= MIN_SEEDS else "undecided"
    return "undecided" if any(one.reached for one in seeds) else "not comparable"


def _order(measure: RecipeMeasure, one: _Measured, other: _Measured) -> int | None:
    """Return 1 if a pair is in the published order, -1 if it is reversed, 0 if neither is clear.

    None if the paper does not separate it by more than twice its standard error.
    """
    first, second = one.published, other.published
    if first is None or second is None or first.exceeded or second.exceeded:
        return None
    gap = first.value - second.value
    if abs(gap) <= 2 * math.hypot(first.standard_error, second.standard_error):
        return None
    interval, _ = difference(one.seeds, other.seeds)
    if interval is None:
        return 0
    if measure.counted:
        interval = interval._replace(half=0.0)
    return interval.sign * (1 if gap > 0 else -1)
