"""The paper's claims, tested by paired differences over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple, TypeAlias

from hansa.runs.metrics import MIN_SEEDS, MeanInterval, mean_interval, paired_interval
from hansa.study.recipes.reading import History, SeedValue, seed_values, why_not_measured
from hansa.study.recipes.recipe import PaperClaim, Recipe, RecipeMeasure

Histories: TypeAlias = Mapping[tuple[str, str], Sequence[History]]

CLAIM_RULE = (
    "a claim holds, or does not hold, if the interval mean ± t s/sqrt(n) of the paired differences over seeds (95%, at "
    f"least {MIN_SEEDS} seeds) says so for every pair that it names, or for one the contrary; otherwise it is undecided"
)


class ClaimCheck(NamedTuple):
    """A claim of the paper, whether it holds here (None: undecided), and the supporting numbers.

    ``column`` is that in which rows were compared, ``row`` that in which columns were.
    """

    claim: PaperClaim
    column: str
    row: str
    holds: bool | None
    evidence: str

    @property
    def setting(self) -> str:
        """The column or the row in which it was tested."""
        return self.row or self.column


def difference(
    first: Sequence[SeedValue] | None, second: Sequence[SeedValue] | None
) -> tuple[MeanInterval | None, str]:
    """Return the interval of the paired differences, or None and the reason why there is none.

    A run that ended without its target counts with what had passed by then, where that is more than the other run took.
    """
    if first is None or second is None:
        return None, "not measured"
    if len(first) != len(second):
        return None, f"{len(first)} and {len(second)} seeds"
    for one, other in zip(first, second, strict=True):
        if not one.reached and not other.reached:
            return None, "neither reaches the target"
        if (not one.reached and one.value < other.value) or (not other.reached and other.value < one.value):
            return None, "a run ended without the target before the other one reached it"
    return paired_interval([one.value for one in first], [other.value for other in second]), ""


def check_claims(recipe: Recipe, scale: str, histories: Histories) -> list[ClaimCheck]:
    """Test every claim in every column (or row) in which at least two of what it compares were run."""
    measures = recipe.measured(scale)
    checks = []
    for claim in recipe.claims:
        for setting in _settings(claim, recipe):
            cells = _cells(claim, recipe, setting, histories)
            bounded = claim.at_most is not None or claim.at_least is not None
            if len(cells) < (1 if bounded else 2):
                continue
            where = (setting, "") if claim.across == "rows" else ("", setting)
            if recipe.at(scale).compares == "nothing":
                verdict: tuple[bool | None, str] = None, "not compared at this scale"
            elif claim.measure not in measures:
                verdict = None, "the target is that of other data"
            else:
                verdict = _check(claim, recipe, measures[claim.measure], cells)
            checks.append(ClaimCheck(claim, *where, *verdict))
    return checks


def _settings(claim: PaperClaim, recipe: Recipe) -> Sequence[str]:
    if claim.across == "rows":
        return claim.columns or tuple(recipe.columns)
    return claim.rows or tuple(recipe.rows)


def _cells(claim: PaperClaim, recipe: Recipe, setting: str, histories: Histories) -> dict[str, Sequence[History]]:
    """Return the runs of what a claim compares, by its name."""
    rows = claim.across == "rows"
    names: Sequence[str] = claim.named
    if claim.better and not claim.than:
        names = tuple(recipe.rows if rows else recipe.columns)
    elif not names:
        names = claim.rows or tuple(recipe.rows)
    keys = {name: (name, setting) if rows else (setting, name) for name in names}
    return {name: histories[key] for name, key in keys.items() if key in histories}


def _pairs(claim: PaperClaim, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the pairs that a claim names: the first is claimed to be better, or both to be similar."""
    if claim.order:
        yield from pairwise(claim.order)
    elif claim.similar:
        yield from combinations(claim.similar, 2)
    else:
        everything = recipe.rows if claim.across == "rows" else recipe.columns
        others = claim.than or tuple(name for name in everything if name not in claim.better)
        yield from product(claim.better, others)


def _check(
    claim: PaperClaim, recipe: Recipe, measure: RecipeMeasure, cells: Mapping[str, Sequence[History]]
) -> tuple[bool | None, str]:
    values = {name: seed_values(histories, measure) for name, histories in cells.items()}
    if claim.at_most is not None or claim.at_least is not None:
        return _check_bound(claim, recipe, measure, cells)
    sign = -1.0 if measure.smaller_is_better else 1.0
    outcomes: list[int] = []
    evidence = []
    for first, second in _pairs(claim, recipe):
        if missing := [name for name in (first, second) if name not in values]:
            outcomes.append(0)
            evidence.append(f"no run of {missing[0]}")
            continue
        interval, reason = difference(values[first], values[second])
        if unmeasured := [name for name in (first, second) if values[name] is None]:
            reason = f"{unmeasured[0]}: {why_not_measured(cells[unmeasured[0]], measure)}"
        if interval is None:
            outcomes.append(0)
            evidence.append(f"{_mean(first, values[first])}, {_mean(second, values[second])}: {reason}")
            continue
        if measure.counted:
            interval = interval._replace(half=0.0)
        evidence.append(_describe(first, second, values, interval))
        if claim.tolerance is not None:
            outcomes.append(_equivalent(interval, claim.tolerance))
        else:
            outcomes.append(interval._replace(mean=sign * interval.mean).sign)
    holds = False if -1 in outcomes else True if all(one == 1 for one in outcomes) else None
    return holds, "; ".join(dict.fromkeys(evidence))


def _equivalent(interval: MeanInterval, tolerance: float) -> int:
    """Return 1 if the whole interval is within ± tolerance, -1 if it is outside, 0 if it is both."""
    if max(abs(interval.mean - interval.half), abs(interval.mean + interval.half)) <= tolerance:
        return 1
    return -1 if abs(interval.mean) - interval.half > tolerance else 0


def _check_bound(
    claim: PaperClaim, recipe: Recipe, measure: RecipeMeasure, cells: Mapping[str, Sequence[History]]
) -> tuple[bool | None, str]:
    bound, sign = (claim.at_most, -1.0) if claim.at_most is not None else (claim.at_least, 1.0)
    assert bound is not None
    outcomes: list[int] = []
    evidence = []
    for name in claim.rows or tuple(recipe.rows):
        each = seed_values(cells[name], measure) if name in cells else None
        if each is None:
            outcomes.append(0)
            missing = name not in cells
            evidence.append(f"no run of {name}" if missing else f"{name}: {why_not_measured(cells[name], measure)}")
            continue
        interval = mean_interval([one.value for one in each])
        if measure.counted:
            interval = interval._replace(half=0.0)
        outcome = interval._replace(mean=sign * (interval.mean - bound)).sign
        reached = all(one.reached for one in each)
        # what had passed at the end of a run without its target is a lower bound: it can only exceed a limit
        outcomes.append(outcome if reached or outcome == sign else 0)
        evidence.append(f"{name} {'' if reached else 'over '}{_interval(interval)}")
    holds = False if -1 in outcomes else True if all(one == 1 for one in outcomes) else None
    return holds, "; ".join(evidence)


def _mean(name: str, values: Sequence[SeedValue] | None) -> str:
    if values is None:
        return f"{name} –"
    mean = sum(one.value for one in values) / len(values)
    over = "" if all(one.reached for one in values) else "over "
    return f"{name} {over}{mean:.4g}"


def _interval(interval: MeanInterval) -> str:
    if interval.half == float("inf"):
        return f"{interval.mean:+.3g} ({interval.seeds} seed{'s' * (interval.seeds > 1)}: at least {MIN_SEEDS} decide)"
    return f"{interval.mean:+.3g} ± {interval.half:.2g}"


def _describe(first: str, second: str, values: Mapping[str, list[SeedValue] | None], interval: MeanInterval) -> str:
    return f"{_mean(first, values[first])}, {_mean(second, values[second])}: {_interval(interval)}"
