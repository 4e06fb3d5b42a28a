"""The ranking of a report: its columns, its HTML table, and what each method spent to reach a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from hansa.runs import metrics
from hansa.runs.columns import ACCURACY, AXES, column_of
from hansa.runs.metrics_log import HistoryColumns
from hansa.runs.seed_statistics import seed_statistics
from hansa.study.report import formats
from hansa.study.report.entries import COST_COLUMNS, RankedEntry, ReportEntry, has_column, ranking_metric

BY_ACCURACY = (
    "last5_test_accuracy", "best_test_accuracy", "rounds_to_target", "last5_test_loss", "last5_global_loss",
    "last5_client_accuracy", "last5_client_accuracy_worst", "last5_personal_accuracy",
)  # fmt: skip
BY_LOSS = (
    "last5_test_loss", "last5_global_loss", "last5_loss", "last5_train_loss", "last5_client_loss",
    "last5_client_loss_worst", "last5_personal_loss",
)  # fmt: skip
COSTS = ("up_bits", "down_bits", "peer_bits", "simulated_total_seconds", "wall_seconds", "lost")

SPREAD_SHOWN = ("accuracy", "loss", "rounds_to_target")
"""Suffixes of the numbers whose deviation over seeds is shown."""


class RankingColumn(NamedTuple):
    """A column of the ranking table: its heading, the number it shows, how, and which values are best."""

    heading: str
    key: str
    write: formats.Formatter
    lower_is_better: bool
    hide_zero: bool


def ranking_columns(ranking: Sequence[RankedEntry], target: float | None) -> list[RankingColumn]:
    """Return the columns of the ranking table that some entry has a value for."""
    by_accuracy = ranking_metric(ranking) == ACCURACY
    columns = []
    for key in (*(BY_ACCURACY if by_accuracy else BY_LOSS), *COSTS):
        values = [ranked.numbers.get(key) for ranked in ranking]
        column = column_of(key)
        if all(value is None for value in values) or (column.hide_zero and not any(values)):
            continue
        if key == "rounds_to_target":
            heading = f"rounds to {format_target(target)}" if target is not None else ""
            columns.append(RankingColumn(heading, key, formats.format_count, True, False))
        else:
            heading = "best" if key.startswith("best_") else column.label
            lower = column.better == "lower"
            columns.append(RankingColumn(heading, key, formats.formatter_of(key), lower, column.hide_zero))
    return columns


def best_values(ranking: Sequence[RankedEntry], columns: Sequence[RankingColumn]) -> dict[str, Any]:
    """Return the best value of each column in which the entries differ."""
    best: dict[str, Any] = {}
    for column in columns:
        values = [r.numbers[column.key] for r in ranking if r.numbers.get(column.key) is not None]
        if len(set(values)) > 1 and not column.hide_zero:
            best[column.key] = min(values) if column.lower_is_better else max(values)
    return best


def format_cell(ranked: RankedEntry, key: str, write: formats.Formatter) -> str:
    """Return one number of an entry as text: with several seeds mean and deviation; – if there is none."""
    value, runs = ranked.numbers.get(key), len(ranked.entry.runs)
    if key == "rounds_to_target" and value is None and runs > 1 and ranked.numbers.get("reached"):
        return f"{ranked.numbers['reached']} of {runs} runs"
    if value is None and key != "rounds_to_target":
        return "–"
    over_seeds = ranked.spreads.get(key) if key.endswith(SPREAD_SHOWN) else None
    return formats.format_mean_std(write, value, None if over_seeds is None else over_seeds.std)


def ranking_html(ranking: Sequence[RankedEntry], target: float | None, places: Sequence[int] = ()) -> str:
    """Return the ranking as an HTML table; ``places`` are the entries' places among the curves of the page."""
    columns = ranking_columns(ranking, target)
    best = best_values(ranking, columns)
    head = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    rows = []
    for position, (ranked, place) in enumerate(zip(ranking, places or range(len(ranking)), strict=True), start=1):
        cells = []
        for column in columns:
            mark = ' class="best"' if ranked.numbers.get(column.key) == best.get(column.key, ...) else ""
            cells.append(f"<td{mark}>{escape(format_cell(ranked, column.key, column.write))}</td>")
        rows.append(
            f'<tr data-run="{place}"><td class="rank">{position}</td><td class="left">{method_label(ranked)}'
            f"{_badges(ranked.entry)}</td>{''.join(cells)}</tr>"
        )
    return (
        f'<table id="ranking"><thead><tr><th></th><th scope="col" class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


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


def costs_to_targets(entry: ReportEntry, targets: Sequence[float]) -> list[CostToTarget]:
    """Return what a method had spent by the end of the round in which it first reached each target accuracy."""
    first_records: list[list[Mapping[str, Any]]] = [[] for _ in targets]
    for history in entry.histories:
        for place, record in _first_reaching(history, targets).items():
            first_records[place].append(record)
    return [
        CostToTarget(
            {axis: _mean([r[axis] for r in records]) for axis in AXES if records and all(axis in r for r in records)},
            seed_statistics([float(r["round"]) for r in records]).std if records else math.nan,
            len(records),
        )
        for records in first_records
    ]


def _first_reaching(history: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[int, dict[str, Any]]:
    """By target, the record with running totals of the first round that reached it."""
    if isinstance(history, HistoryColumns):
        history = history.select({"round", ACCURACY, *COST_COLUMNS})
    left = dict(enumerate(targets))
    reached: dict[int, dict[str, Any]] = {}
    for record in metrics.running_totals(history) if left else ():
        value = record.get(ACCURACY)
        if isinstance(value, (int, float)) and math.isfinite(value):
            for place in [place for place, target in left.items() if value >= target]:
                reached[place] = record
                del left[place]
        if not left:
            break
    return reached


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else fmean(values)


def target_ladder(entries: Sequence[ReportEntry], target: float | None) -> list[float]:
    """Return targets around the given one, each reached by some entry.

    >>> entry = ReportEntry("a", [{"round": 1, "test_accuracy": 0.3}, {"round": 2, "test_accuracy": 0.62}])
    >>> target_ladder([entry], 0.5)
    [0.4, 0.45, 0.5, 0.55, 0.6]
    """
    if target is None:
        return []
    histories = [h for entry in entries for h in entry.histories if has_column(h, ACCURACY)]
    most = max((metrics.best(history) or 0.0 for history in histories), default=0.0)
    steps = [round(target + 0.05 * step, 4) for step in range(-2, 3)]
    return [step for step in steps if 0 < step <= most + 1e-12]


def ladder_table(ranking: Sequence[RankedEntry], targets: Sequence[float]) -> str:
    """Return the rounds and the bits sent up to each target as an HTML table."""
    head = "".join(f'<th scope="col">{format_target(target)}</th>' for target in targets)
    costs = [costs_to_targets(ranked.entry, targets) for ranked in ranking]
    fewest = [
        min((cost.spent["round"] for cost in column if cost.runs), default=math.inf)
        for column in zip(*costs, strict=True)
    ]
    rows = []
    for ranked, row in zip(ranking, costs, strict=True):
        runs = len(ranked.entry.runs)
        cells = "".join(_ladder_cell(cost, runs, least) for cost, least in zip(row, fewest, strict=True))
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
    sent = f'<span class="sub">{escape(formats.format_bits(cost.spent["up_bits"]))} up{some}</span>'
    mark = ' class="best"' if rounds == fewest and not some else ""
    return f"<td><span{mark}>{escape(text)}</span>{sent}</td>"


def tiles(ranking: Sequence[RankedEntry], target: float | None) -> list[str]:
    """Return the headline numbers as HTML: the best metric, and the lowest costs to the target."""

    def tile(ranked: RankedEntry, title: str, value: str) -> str:
        return (
            f'<div class="tile" style="--c:{ranked.colour}"><div class="what">{escape(title)}</div>'
            f'<div class="value">{escape(value)}</div><div class="who">{escape(ranked.entry.name)}</div></div>'
        )

    metric = ranking_metric(ranking)
    key = f"last5_{metric}"
    best = format_cell(ranking[0], key, formats.formatter_of(key))
    parts = [] if ranking[0].numbers.get(key) is None else [tile(ranking[0], f"best {metric.replace('_', ' ')}", best)]
    if target is None or metric != ACCURACY:
        return parts
    costs = [(ranked, costs_to_targets(ranked.entry, [target])[0]) for ranked in ranking]
    reached = [(ranked, cost) for ranked, cost in costs if cost.runs == len(ranked.entry.runs)]
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("fewest rounds", "round", lambda n: f"{formats.format_count(n)} rounds"),
        ("fewest bits to and from the server", "server_bits", formats.format_bits),
        ("least simulated time", "simulated_total_seconds", formats.format_duration),
    )
    for title, axis, write in kinds:
        spent = [(ranked, cost.spent[axis]) for ranked, cost in reached if axis in cost.spent]
        if spent:
            ranked, least = min(spent, key=lambda pair: pair[1])
            parts.append(tile(ranked, f"{title} to {format_target(target)}", write(least)))
    return parts


def describe_order(ranking: Sequence[RankedEntry], metric: str) -> str:
    """Return a sentence on how the entries are ranked."""
    text = f"by the mean of the last five measurements of {metric.replace('_', ' ')}"
    if any(ranked.entry.members for ranked in ranking):
        text += "; with several seeds, mean ± one standard deviation"
    return text


def format_target(target: float) -> str:
    """
    >>> format_target(0.8), format_target(0.825)
    ('80%', '82.5%')
    """
    return formats.format_percent(target).replace(".0%", "%")
