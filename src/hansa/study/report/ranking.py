"""The ranking of a report: its columns, its HTML table, and what each method spent to reach a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from hansa.runs import metrics
from hansa.runs.columns import ACCURACY, AXES, COLUMNS, base_metric, column_of, evaluated_metrics, plain_name
from hansa.runs.metrics import seed_statistics, site_names
from hansa.study.report import formats
from hansa.study.report.entries import RankedEntry, ReportEntry, chance_level, has_column

TO_TARGET = ("rounds_to_target", "bits_to_target")
LOSSES = ("test_loss", "sites_test_loss", "global_loss", "loss", "train_loss")
COSTS = ("up_bits", "down_bits", "peer_bits", "simulated_total_seconds", "wall_seconds", "lost")


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
    if isinstance(value, float) and math.isnan(value):
        return f"diverged, {len(ranked.diverged)} of {runs} seeds" if runs > 1 and ranked.diverged else "diverged"
    over_seeds = ranked.spreads.get(key) if shows_spread(key) else None
    return formats.format_mean_std(write, value, None if over_seeds is None else over_seeds.std)


def ranking_html(ranking: Sequence[RankedEntry], target: float | None, places: Sequence[int] = ()) -> str:
    """Return the ranking as an HTML table; ``places`` are the entries' places among the curves of the page."""
    columns = ranking_columns(ranking, target)
    best = best_values(ranking, columns)
    head = "".join(f'<th scope="col">{_heading_html(column)}</th>' for column in columns)
    rows = []
    for position, (ranked, place) in enumerate(zip(ranking, places or range(len(ranking)), strict=True), start=1):
        cells = []
        for column in columns:
            mark = ' class="best"' if is_best(ranked, column.key, best) else ""
            cells.append(f"<td{mark}>{escape(format_cell(ranked, column.key, column.write))}</td>")
        rows.append(
            f'<tr data-run="{place}"><td class="rank">{position}</td><td class="left">{method_label(ranked)}'
            f"{_badges(ranked.entry)}</td>{''.join(cells)}</tr>"
        )
    return (
        f'<table id="ranking"><thead><tr><th></th><th scope="col" class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _heading_html(column: RankingColumn) -> str:
    statistic = f'<span class="sub">{escape(column.statistic)}</span>' if column.statistic else ""
    return f"{escape(column.heading)}{statistic}"


def method_label(ranked: RankedEntry) -> str:
    """Return the name of a method with its colour, as HTML."""
    return f'<i class="swatch" style="--c:{ranked.colour}"></i><b>{escape(ranked.entry.name)}</b>'


def _badges(entry: ReportEntry) -> str:
    """The number of seeds, and the progress of an unfinished run."""
    badges = f' <span class="seeds">{len(entry.members)} seeds</span>' if entry.members else ""
    if entry.progress:
        badges += f' <span class="badge">{escape(entry.progress)}</span>'
    return badges


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
    first_records: list[list[Mapping[str, Any]]] = [[] for _ in targets]
    for history in entry.histories:
        for place, record in _first_reaching(history, targets, metric, falls).items():
            first_records[place].append(record)
    return [
        CostToTarget(
            {axis: _mean([r[axis] for r in records]) for axis in AXES if records and all(axis in r for r in records)},
            seed_statistics([float(r["round"]) for r in records]).std if records else math.nan,
            len(records),
        )
        for records in first_records
    ]


def _first_reaching(
    history: Sequence[Mapping[str, Any]], targets: Sequence[float], metric: str, falls: bool
) -> dict[int, dict[str, Any]]:
    """By target, the record with running totals of the first round that reached it."""
    left = dict(enumerate(targets))
    reached: dict[int, dict[str, Any]] = {}
    for record in metrics.running_totals(history) if left else ():
        value = record.get(metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            for place in [place for place, target in left.items() if (value <= target if falls else value >= target)]:
                reached[place] = record
                del left[place]
        if not left:
            break
    return reached


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


def ladder_table(ranking: Sequence[RankedEntry], targets: Sequence[float]) -> str:
    """Return the rounds, and the bits over all links, to each target as an HTML table."""
    metric, falls = ranking[0].metric, ranking[0].falls
    head = "".join(f'<th scope="col">{escape(format_target(target, metric))}</th>' for target in targets)
    costs = [costs_to_targets(ranked.entry, targets, metric, falls) for ranked in ranking]
    fewest = [
        min(
            (
                cost.spent["round"]
                for ranked, cost in zip(ranking, column, strict=True)
                if cost.runs and ranked.shows(1)
            ),
            default=math.inf,
        )
        for column in zip(*costs, strict=True)
    ]
    rows = []
    for ranked, row in zip(ranking, costs, strict=True):
        runs = len(ranked.entry.runs)
        cells = "".join(
            _ladder_cell(cost, runs, least if ranked.shows(1) else math.nan)
            for cost, least in zip(row, fewest, strict=True)
        )
        rows.append(f'<tr><td class="left">{method_label(ranked)}</td>{cells}</tr>')
    return (
        f'<table id="targets"><thead><tr><th scope="col" class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _ladder_cell(cost: CostToTarget, runs: int, fewest: float) -> str:
    if not cost.runs:
        return '<td class="never">never</td>'
    rounds = cost.spent["round"]
    text = formats.format_mean_std(formats.format_count, rounds, cost.std if cost.runs > 1 else None)
    some = f" in {cost.runs} of {runs}" if cost.runs < runs else ""
    sent = f'<span class="sub">{escape(formats.format_bits(cost.spent["bits"]))}{some}</span>'
    mark = ' class="best"' if rounds == fewest and not some else ""
    return f"<td><span{mark}>{escape(text)}</span>{sent}</td>"


def tiles(ranking: Sequence[RankedEntry], target: float | None) -> list[str]:
    """Return the headline numbers as HTML: the best metric, and the lowest costs to the target."""

    def tile(ranked: RankedEntry, title: str, value: str) -> str:
        return (
            f'<div class="tile" style="--c:{ranked.colour}"><div class="what">{escape(title)}</div>'
            f'<div class="value">{escape(value)}</div><div class="who">{escape(ranked.entry.name)}</div></div>'
        )

    first = ranking[0]
    metric, key = first.metric, first.score
    what = f"{'lowest' if first.falls else 'highest'} {column_of(metric).label}, {metrics.describe_score(key)}"
    best = format_cell(first, key, formats.formatter_of(key))
    parts = [] if not first.shows(first.numbers.get(key)) else [tile(first, what, best)]
    if target is None:
        return parts
    costs = [(ranked, costs_to_targets(ranked.entry, [target], metric, first.falls)[0]) for ranked in ranking]
    reached = [(ranked, cost) for ranked, cost in costs if cost.runs == len(ranked.entry.runs) and ranked.shows(cost)]
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("fewest rounds", "round", lambda n: f"{formats.format_count(n)} rounds"),
        ("fewest bits, peers included,", "bits", formats.format_bits),
        ("least simulated time", "simulated_total_seconds", formats.format_duration),
    )
    for title, axis, write in kinds:
        spent = [(ranked, cost.spent[axis]) for ranked, cost in reached if axis in cost.spent]
        if spent:
            ranked, least = min(spent, key=lambda pair: pair[1])
            parts.append(tile(ranked, f"{title} to {format_target(target, metric)}", write(least)))
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
