"""The ranking of a report: its columns and cells, what each method spent to reach a target, and its LaTeX table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from hansa.core.errors import HansaError, suggestion
from hansa.runs import metrics
from hansa.runs.columns import (
    ACCURACY,
    AXES,
    COLUMNS,
    COSTS,
    LOSSES,
    base_metric,
    column_of,
    evaluated_metrics,
    plain_name,
)
from hansa.runs.metrics import MIN_SEEDS, paired_interval, seed_statistics, site_names
from hansa.study.report import formats
from hansa.study.report.entries import RankedEntry, ReportEntry, chance_level, has_column

TO_TARGET = ("rounds_to_target", "bits_to_target")
_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "−": "$-$",
}  # fmt: skip


class RankingColumn(NamedTuple):
    """A column of the ranking table: heading, statistic, key of the number, format, and which values are best."""

    heading: str
    statistic: str
    key: str
    write: formats.Formatter
    lower_is_better: bool | None
    hide_zero: bool

    @property
    def title(self) -> str:
        """The heading with the statistic on a second line."""
        return f"{self.heading}\n{self.statistic}" if self.statistic else self.heading


def ranking_columns(ranking: Sequence[RankedEntry], target: float | None) -> list[RankingColumn]:
    """Return the columns of the ranking table that some entry has a value for: the metric that ranks, first."""
    columns = []
    first = ranking[0]
    for key in (*_metric_keys(ranking), *COSTS):
        values = [ranked.numbers.get(key) for ranked in ranking]
        column = column_of(key, first.better)
        if all(value is None for value in values) or (column.hide_zero and not any(values)):
            continue
        if key in TO_TARGET:
            heading = f"{key.partition('_')[0]} to {format_target(target, first.metric)}" if target is not None else ""
            to_text = formats.format_count if key == "rounds_to_target" else formats.format_bits
            columns.append(RankingColumn(heading, "", key, to_text, True, False))
        else:
            better = None if not column.better else column.better == "lower"
            write = formats.formatter_of(key)
            statistic = "" if key in COSTS else metrics.describe_score(key)
            columns.append(RankingColumn(column.label, statistic, key, write, better, column.hide_zero))
    return columns


def _metric_keys(ranking: Sequence[RankedEntry]) -> list[str]:
    """The numbers of the ranking table before the costs: the score, the best, those of the target, further metrics."""
    metric, window = ranking[0].metric, ranking[0].window
    numbers = [ranked.numbers for ranked in ranking]
    base = base_metric(metric)
    measured = evaluated_metrics({plain_name(name) for each in numbers for name in each})
    own = [name for name in measured if name.startswith("test_") and name not in COLUMNS]
    sites = {site for ranked in ranking for history in ranked.entry.histories for site in site_names(history)}
    sets = [name for name in measured if name.endswith(f"/test_{base}") and name.partition("/")[0] not in sites]
    sets += [f"sites_test_{base}_worst"]
    losses = LOSSES if metric in LOSSES else ("test_loss", "global_loss")
    clients = (f"client_{base}", f"client_{base}_worst", f"personal_{base}")
    names = (f"test_{base}", *sets, ACCURACY, *own, *losses, *clients)
    others = dict.fromkeys(name for name in names if name != metric)
    scores = [metrics.score_key(numbers, name, window) for name in others]
    return [ranking[0].score, f"best_{metric}", *TO_TARGET, *scores]


def shows_spread(key: str) -> bool:
    """Return whether the deviation over seeds of a number is shown: of metrics, not of costs."""
    return key not in COSTS and key != "rounds"


def best_values(ranking: Sequence[RankedEntry], columns: Sequence[RankingColumn]) -> dict[str, Any]:
    """Return the best value of each column in which the entries differ."""
    best: dict[str, Any] = {}
    for column in columns:
        values = [r.numbers[column.key] for r in ranking if r.shows(r.numbers.get(column.key))]
        if len(set(values)) > 1 and not column.hide_zero and column.lower_is_better is not None:
            best[column.key] = min(values) if column.lower_is_better else max(values)
    return best


def is_best(ranked: RankedEntry, key: str, best: Mapping[str, Any]) -> bool:
    """Return whether an entry has the best value of a column; an entry that diverged has none."""
    return ranked.shows(ranked.numbers.get(key)) and ranked.numbers[key] == best.get(key)


def format_cell(ranked: RankedEntry, key: str, write: formats.Formatter) -> str:
    """Return one number of an entry as text: with several seeds mean and deviation; – if there is none."""
    value, runs = ranked.numbers.get(key), len(ranked.entry.runs)
    if key in TO_TARGET and value is None:
        return f"{ranked.numbers['reached']} of {runs} runs" if runs > 1 and ranked.numbers.get("reached") else "never"
    if value is None:
        return "–"
    if runs > 1 and isinstance(value, float) and math.isnan(value) and ranked.diverged:
        return f"diverged, {len(ranked.diverged)} of {runs} seeds"
    over_seeds = ranked.spreads.get(key) if shows_spread(key) else None
    return formats.format_mean_std(write, value, None if over_seeds is None else over_seeds.std)


class CostToTarget(NamedTuple):
    """The mean costs of the runs that reached a target, the deviation of their rounds, and the number of these runs."""

    spent: Mapping[str, float]
    std: float
    runs: int


def costs_to_targets(
    entry: ReportEntry, targets: Sequence[float], metric: str = ACCURACY, falls: bool = False
) -> list[CostToTarget]:
    """Return what a method had spent by the end of the round in which its metric first reached each target.

    Args:
        entry: The method.
        targets: The targets.
        metric: The column that is to reach them.
        falls: Whether it reaches a target from above.
    """
    stated = f"{metric}:{'lower' if falls else 'higher'}"
    histories = [history for history in entry.histories if has_column(history, metric)]
    costs = []
    for target in targets:
        records = [spent for h in histories if (spent := metrics.cost_to(h, target, stated)) is not None]
        spent = {
            axis: _mean([r[axis] for r in records]) for axis in AXES if records and all(axis in r for r in records)
        }
        deviation = seed_statistics([float(r["round"]) for r in records]).std if records else math.nan
        costs.append(CostToTarget(spent, deviation, len(records)))
    return costs


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else fmean(values)


def target_ladder(ranking: Sequence[RankedEntry], target: float | None) -> list[float]:
    """Return targets around the given one, each reached by some entry and none below chance; for metrics other than an
    accuracy the given one only.

    >>> from hansa.study.report import rank
    >>> entry = ReportEntry("a", [{"round": 1, "test_accuracy": 0.3}, {"round": 2, "test_accuracy": 0.62}])
    >>> target_ladder(rank([entry]), 0.5)
    [0.4, 0.45, 0.5, 0.55, 0.6]
    """
    if target is None:
        return []
    metric, falls = ranking[0].metric, ranking[0].falls
    histories = [h for ranked in ranking for h in ranked.entry.histories if has_column(h, metric)]
    reached = [metrics.best(history, f"{metric}:{'lower' if falls else 'higher'}") for history in histories]
    values = [value for value in reached if value is not None]
    if not values:
        return []
    most, least = max(values) + 1e-12, min(values) - 1e-12
    if falls or column_of(metric).unit != "fraction":
        return [target] if (least <= target if falls else target <= most) else []
    steps = [round(target + 0.05 * step, 4) for step in range(-2, 3)]
    chance = chance_level([ranked.entry for ranked in ranking])
    return [step for step in steps if step <= most and (step > chance or step == target) and step > 0]


class TargetCell(NamedTuple):
    """What a method spent to reach a target: rounds and bits as text; no rounds if it never reached it."""

    rounds: str
    sent: str = ""
    best: bool = False


def target_cells(ranking: Sequence[RankedEntry], targets: Sequence[float]) -> list[list[TargetCell]]:
    """Return the rounds, and the bits over all links, of each method to each target."""
    metric, falls = ranking[0].metric, ranking[0].falls
    costs = [costs_to_targets(ranked.entry, targets, metric, falls) for ranked in ranking]
    finite = [not ranked.diverged for ranked in ranking]
    fewest = [
        min(
            (cost.spent["round"] for cost, counts in zip(column, finite, strict=True) if cost.runs and counts),
            default=0,
        )
        for column in zip(*costs, strict=True)
    ]
    return [
        [
            _target_cell(cost, len(ranked.entry.runs), least if counts else 0)
            for cost, least in zip(row, fewest, strict=True)
        ]
        for ranked, row, counts in zip(ranking, costs, finite, strict=True)
    ]


def _target_cell(cost: CostToTarget, runs: int, fewest: float) -> TargetCell:
    if not cost.runs:
        return TargetCell("")
    rounds = cost.spent["round"]
    text = formats.format_mean_std(formats.format_count, rounds, cost.std if cost.runs > 1 else None)
    some = f" in {cost.runs} of {runs}" if cost.runs < runs else ""
    return TargetCell(text, formats.format_bits(cost.spent["bits"]) + some, rounds == fewest and not some)


class Tile(NamedTuple):
    """A headline number: what it is, its value, and the method that has it."""

    title: str
    value: str
    ranked: RankedEntry


def tiles(ranking: Sequence[RankedEntry], target: float | None) -> list[Tile]:
    """Return the headline numbers: the best metric, and the lowest costs to the target."""
    first = ranking[0]
    metric, key = first.metric, first.score
    title = f"{'lowest' if first.falls else 'highest'} {column_of(metric).label}, {metrics.describe_score(key)}"
    best = format_cell(first, key, formats.formatter_of(key))
    parts = [Tile(title, best, first)] if first.shows(first.numbers.get(key)) else []
    if target is None:
        return parts
    costs = [(ranked, costs_to_targets(ranked.entry, [target], metric, first.falls)[0]) for ranked in ranking]
    reached = [(ranked, cost) for ranked, cost in costs if cost.runs == len(ranked.entry.runs) and not ranked.diverged]
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("fewest rounds", "round", lambda n: f"{formats.format_count(n)} rounds"),
        ("fewest bits, peers included,", "bits", formats.format_bits),
        ("least simulated time", "simulated_total_seconds", formats.format_duration),
    )
    for title, axis, write in kinds:
        spent = [(ranked, cost.spent[axis]) for ranked, cost in reached if axis in cost.spent]
        if spent:
            ranked, least = min(spent, key=lambda pair: pair[1])
            parts.append(Tile(f"{title} to {format_target(target, metric)}", write(least), ranked))
    return parts


def describe_order(ranking: Sequence[RankedEntry]) -> str:
    """Return a sentence on how the entries are ranked."""
    first = ranking[0]
    text = f"by {column_of(first.metric).label}, {metrics.describe_score(first.score)}"
    text += ", " + ("the lowest first" if first.falls else "the highest first")
    if any(ranked.entry.members for ranked in ranking):
        text += "; with several seeds, mean ± one standard deviation"
    return text


def format_target(target: float, metric: str = ACCURACY) -> str:
    """
    >>> format_target(0.8), format_target(0.825), format_target(3.5, "test_rmse")
    ('80%', '82.5%', '3.5 test rmse')
    """
    column = column_of(metric)
    if column.unit == "fraction":
        return formats.format_percent(target).replace(".0%", "%")
    return f"{formats.formatter_of(metric)(target)} {column.label}"


def escape_latex(text: str) -> str:
    r"""Return text such that LaTeX prints it.

    >>> escape_latex("top_k, 50%")
    'top\\_k, 50\\%'
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def latex_table(
    ranking: Sequence[RankedEntry],
    target: float | None = None,
    *,
    confidence: float = 0.95,
    reference: str | None = None,
) -> str:
    r"""Return a ranking as a LaTeX table for the package booktabs, the best of each column in bold.

    The columns are the score, with its deviation over seeds; with a target, rounds and bits (over all links) to reach
    it, or how many seeds did; and with three or more seeds the difference from the reference: the mean over
    seeds of the paired differences, with its confidence interval, and a star if the interval does not contain 0.
    Methods whose cell is printed like that of the best are bold too. A method that diverged is last and never bold.

    Args:
        ranking: The methods, as `rank` returns them with this target.
        target: The value that the metric is to reach.
        confidence: The level of the intervals.
        reference: The method from which differences are taken; by default the first one.

    >>> from hansa.study.report import ReportEntry, rank
    >>> print(latex_table(rank([ReportEntry("FedAvg", [{"round": 1, "test_accuracy": 0.5}])])))
    \begin{tabular}{lr}
    \toprule
    method & accuracy, final (\%) \\
    \midrule
    FedAvg & \textbf{50.0} \\
    \bottomrule
    \end{tabular}
    """
    first = ranking[0]
    by_name = {ranked.entry.name: ranked for ranked in ranking}
    if reference is not None and reference not in by_name:
        raise HansaError(f"latex(reference={reference!r}): no such method. {suggestion(reference, by_name)}")
    base = first if reference is None else by_name[reference]
    percent = column_of(first.metric).unit == "fraction"
    label = escape_latex(f"{column_of(first.metric).label}, {metrics.describe_score(first.score)}")
    columns = {
        "method": [escape_latex(ranked.entry.name) for ranked in ranking],
        label + (r" (\%)" if percent else ""): _bold_best(
            ranking, [_latex_score(ranked, percent) for ranked in ranking], first.score, first.falls
        ),
    }
    if target is not None:
        shown = escape_latex(f"{100 * target:g}%" if percent else f"{target:g}")
        for key, what in (("rounds_to_target", "rounds"), ("bits_to_target", "bits")):
            columns[f"{what} to {shown}"] = _bold_best(ranking, [_latex_cost(r, key) for r in ranking], key, True)
    differences = [_difference(ranked, base, percent, confidence) for ranked in ranking]
    if any(differences):
        origin = "" if reference is None else f" from {escape_latex(reference)}"
        heading = rf"difference{origin}, {100 * confidence:g}\% interval ($^*$: without 0)"
        columns[heading] = ["" if r is base else text or "--" for r, text in zip(ranking, differences, strict=True)]
    return _tabular(list(columns), list(zip(*columns.values(), strict=True)))


def text_latex_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    r"""Return rows of text as a LaTeX table for the package booktabs.

    Args:
        headings: One heading per column.
        rows: The rows.
        title: The heading of the first column.

    >>> print(text_latex_table(["", "ours"], [["FedAvg", "50.0 ± 1.2"]], "CIFAR-10, accuracy (%)"))
    \begin{tabular}{lr}
    \toprule
    CIFAR-10, accuracy (\%) & ours \\
    \midrule
    FedAvg & 50.0 $\pm$ 1.2 \\
    \bottomrule
    \end{tabular}
    """
    escaped = [list(map(escape_latex, row)) for row in rows]
    return _tabular([escape_latex(title), *map(escape_latex, headings[1:])], escaped)


def _tabular(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from pandas import DataFrame

    layout = "l" + "r" * (len(headings) - 1)
    return str(DataFrame(rows, columns=headings).to_latex(index=False, escape=False, column_format=layout)).strip()


def _bold_best(ranking: Sequence[RankedEntry], texts: Sequence[str], key: str, lower: bool) -> list[str]:
    """Mark the best value of a column, and those that are printed like it."""
    values = {ranked.numbers[key]: text for ranked, text in zip(ranking, texts, strict=True)
              if ranked.shows(ranked.numbers.get(key))}  # fmt: skip
    best = values[min(values) if lower else max(values)] if values else None
    finite = [not ranked.diverged for ranked in ranking]
    return [rf"\textbf{{{t}}}" if t == best and counts else t for t, counts in zip(texts, finite, strict=True)]


def _latex_score(ranked: RankedEntry, percent: bool) -> str:
    value, over = ranked.numbers.get(ranked.score), ranked.spreads.get(ranked.score)
    if value is None:
        return "--"
    if ranked.diverged:
        return escape_latex(format_cell(ranked, ranked.score, formats.format_number))
    if percent or over is None:
        text = _latex_number(value, percent)
        return text if over is None else rf"{text} $\pm$ {_latex_number(over.std, percent)}"
    return escape_latex(formats.format_mean_std(formats.format_number, value, over.std))


def _latex_number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.3g}"


def _latex_cost(ranked: RankedEntry, key: str) -> str:
    value, over = ranked.numbers.get(key), ranked.spreads.get(key)
    if value is None:
        reached, runs = ranked.numbers.get("reached") or 0, len(ranked.entry.runs)
        return f"{reached} of {runs} seeds" if reached else "never"
    write = formats.format_count if key == "rounds_to_target" else formats.format_bits
    return escape_latex(formats.format_mean_std(write, value, None if over is None else over.std))


def seed_scores(ranked: RankedEntry) -> dict[int | None, float]:
    """Return the score of each seed of a method that did not diverge."""
    stated = f"{ranked.metric}:{'lower' if ranked.falls else 'higher'}"
    values = {
        run.seed: metrics.summarize(run.history, metric=stated, window=ranked.window).get(ranked.score)
        for run in ranked.entry.runs
    }
    return {seed: float(value) for seed, value in values.items() if metrics.is_finite(value)}  # type: ignore[arg-type]


def _difference(ranked: RankedEntry, base: RankedEntry, percent: bool, confidence: float) -> str:
    """The mean of a method's paired differences from the reference, with its interval; "" with fewer than three seeds
    in common, or if one of the two diverged."""
    scores, other = seed_scores(ranked), seed_scores(base)
    common = [seed for seed in scores if seed in other]
    if ranked is base or len(common) < MIN_SEEDS or ranked.diverged or base.diverged:
        return ""
    interval = paired_interval([scores[seed] for seed in common], [other[seed] for seed in common], confidence)
    low, high = (_latex_number(interval.mean + sign * interval.half, percent) for sign in (-1, 1))
    mark = "$^*$" if interval.sign else ""
    return f"${_latex_number(interval.mean, percent)}$ [${low}$, ${high}$]{mark}"
