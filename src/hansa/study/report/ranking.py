"""The tables of a report: who ranks where, and what it took each to reach a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from hansa.runs import metrics
from hansa.runs.metrics_log import Columns
from hansa.runs.seed_statistics import spread
from hansa.study.report import formats
from hansa.study.report.entries import Entry, Standing, ranking_metric

Column: TypeAlias = tuple[str, str, Callable[[float | None], str], bool]

QUIET = ("peer_bits", "lost")
"""Columns that are left out where they are all zero, and in which having none is no merit."""

SPREAD = ("accuracy", "loss", "rounds_to_target")
"""How the names of numbers end whose deviation over seeds is shown beside their mean."""

COSTS = ("round", "up_bits", "server_bits", "bits", "simulated_total_seconds", "wall_seconds")
"""What reaching a target may be counted in."""


def columns(standings: Sequence[Standing], target: float | None) -> list[Column]:
    """(heading, number, how it is written, smaller is better) of each column that some run has."""
    reach = f"rounds to {short(target)}" if target is not None else ""
    accuracy: list[Column] = [
        ("accuracy", "last5_test_accuracy", formats.percent, False),
        ("best", "best_test_accuracy", formats.percent, False),
        (reach, "rounds_to_target", formats.count, True),
        ("test loss", "last5_test_loss", formats.number, True),
        ("global loss", "last5_global_loss", formats.number, True),
        ("over clients", "last5_client_accuracy", formats.percent, False),
        ("worst tenth", "last5_client_accuracy_worst", formats.percent, False),
        ("personal", "last5_personal_accuracy", formats.percent, False),
    ]
    loss: list[Column] = [
        ("test loss", "last5_test_loss", formats.number, True),
        ("global loss", "last5_global_loss", formats.number, True),
        ("loss", "last5_loss", formats.number, True),
        ("local loss", "last5_train_loss", formats.number, True),
        ("over clients", "last5_client_loss", formats.number, True),
        ("worst tenth", "last5_client_loss_worst", formats.number, True),
        ("personal", "last5_personal_loss", formats.number, True),
    ]
    costs: list[Column] = [
        ("sent up", "up_bits", formats.bits, True),
        ("sent down", "down_bits", formats.bits, True),
        ("to peers", "peer_bits", formats.bits, True),
        ("simulated time", "simulated_total_seconds", formats.duration, True),
        ("wall time", "wall_seconds", formats.duration, True),
        ("lost", "lost", formats.count, True),
    ]
    known = (accuracy if ranking_metric(standings) == metrics.ACCURACY else loss) + costs
    found = []
    for column in known:
        values = [standing.numbers.get(column[1]) for standing in standings]
        quiet = column[1] in QUIET and not any(values)
        if any(value is not None for value in values) and not quiet:
            found.append(column)
    return found


def cell(standing: Standing, key: str, write: Callable[[float | None], str]) -> str:
    """One number of a method as text: over seeds the mean and the deviation; – where there is none."""
    value, runs = standing.numbers.get(key), len(standing.entry.runs)
    if key == "rounds_to_target" and value is None and runs > 1 and standing.numbers.get("reached"):
        return f"{standing.numbers['reached']} of {runs} runs"
    if value is None and key != "rounds_to_target":
        return "–"
    apart = standing.spreads.get(key) if key.endswith(SPREAD) else None
    return formats.give_or_take(write, value, None if apart is None else apart.deviation)


def table(standings: Sequence[Standing], places: Sequence[int], target: float | None) -> str:
    """The ranking as HTML; ``places`` are those of the entries among the curves."""
    shown = columns(standings, target)
    best: dict[str, Any] = {}
    for _, key, _, smaller in shown:
        values = [s.numbers[key] for s in standings if s.numbers.get(key) is not None]
        if len(set(values)) > 1 and key not in QUIET:
            best[key] = min(values) if smaller else max(values)
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading, *_ in shown)
    rows = []
    for position, (standing, place) in enumerate(zip(standings, places, strict=True), start=1):
        cells = []
        for _, key, write_number, _ in shown:
            mark = ' class="best"' if key in best and standing.numbers.get(key) == best[key] else ""
            cells.append(f"<td{mark}>{escape(cell(standing, key, write_number))}</td>")
        rows.append(
            f'<tr data-run="{place}"><td class="rank">{position}</td><td class="left">{named(standing)}'
            f"{_aside(standing.entry)}</td>{''.join(cells)}</tr>"
        )
    return (
        f'<table id="ranking"><thead><tr><th></th><th scope="col" class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def named(standing: Standing) -> str:
    """A method's name behind its colour."""
    return f'<i class="swatch" style="--c:{standing.colour}"></i><b>{escape(standing.entry.name)}</b>'


def _aside(entry: Entry) -> str:
    """What is said of a method beside its name: how many seeds, and how far it is if it has not finished."""
    told = f' <span class="seeds">{len(entry.members)} seeds</span>' if entry.members else ""
    if entry.standing not in ("", "finished"):
        told += f' <span class="badge">{escape(entry.standing)}</span>'
    return told


def table_html(standings: Sequence[Standing], target: float | None) -> str:
    """The ranking alone, for a notebook."""
    return table(standings, range(len(standings)), target)


class Reached(NamedTuple):
    """What a method had spent, over its seeds, when it first reached a target; how many of them reached it."""

    spent: Mapping[str, float]
    deviation: float
    runs: int


def reached(entry: Entry, targets: Sequence[float]) -> list[Reached]:
    """For each target accuracy what a method had spent by the end of the round in which it first got there: means over
    the seeds that reached it, and the deviation of their rounds."""
    found: list[list[Mapping[str, Any]]] = [[] for _ in targets]
    for history in entry.histories:
        for place, record in _first(history, targets).items():
            found[place].append(record)
    return [
        Reached(
            {cost: _mean([r[cost] for r in each]) for cost in COSTS if each and all(cost in r for r in each)},
            spread([float(r["round"]) for r in each]).deviation if each else math.nan,
            len(each),
        )
        for each in found
    ]


def _first(history: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[int, dict[str, Any]]:
    """By target the record, running totals included, of the first round that reached it."""
    if isinstance(history, Columns):
        history = history.only({"round", metrics.ACCURACY, *metrics.COSTS.values(), "seconds", "simulated_seconds"})
    left = dict(enumerate(targets))
    found: dict[int, dict[str, Any]] = {}
    for record in metrics.running_totals(history) if left else ():
        value = record.get(metrics.ACCURACY)
        if isinstance(value, (int, float)) and math.isfinite(value):
            for place in [place for place, target in left.items() if value >= target]:
                found[place] = record
                del left[place]
        if not left:
            break
    return found


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else fmean(values)


def target_ladder(entries: Sequence[Entry], target: float | None) -> list[float]:
    """Some targets around one, each reached by somebody.

    >>> made = Entry("a", [{"round": 1, "test_accuracy": 0.3}, {"round": 2, "test_accuracy": 0.62}])
    >>> target_ladder([made], 0.5)
    [0.4, 0.45, 0.5, 0.55, 0.6]
    """
    if target is None:
        return []
    most = max((metrics.best(h) or 0.0 for entry in entries for h in entry.histories if has_accuracy(h)), default=0.0)
    steps = [round(target + 0.05 * step, 4) for step in range(-2, 3)]
    return [step for step in steps if 0 < step <= most + 1e-12]


def has_accuracy(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an accuracy was ever measured."""
    if isinstance(history, Columns):
        return metrics.ACCURACY in history.names
    return any(metrics.ACCURACY in record for record in history)


def ladder_table(standings: Sequence[Standing], targets: Sequence[float]) -> str:
    """Rounds, and bits up, to each of several targets."""
    head = "".join(f'<th scope="col">{short(target)}</th>' for target in targets)
    spent = [reached(standing.entry, targets) for standing in standings]
    rows = []
    least = [
        min((s[place].spent["round"] for s in spent if s[place].runs), default=math.inf)
        for place in range(len(targets))
    ]
    for standing, found in zip(standings, spent, strict=True):
        cells = "".join(
            _reach_cell(each, len(standing.entry.runs), fewest) for each, fewest in zip(found, least, strict=True)
        )
        rows.append(f'<tr><td class="left">{named(standing)}</td>{cells}</tr>')
    return (
        f'<table id="targets"><thead><tr><th scope="col" class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _reach_cell(found: Reached, runs: int, fewest: float) -> str:
    if not found.runs:
        return '<td class="never">never</td>'
    rounds = found.spent["round"]
    told = formats.give_or_take(formats.count, rounds, found.deviation if found.runs > 1 else None)
    some = f" in {found.runs} of {runs}" if found.runs < runs else ""
    sent = f'<span class="sub">{escape(formats.bits(found.spent["up_bits"]))} up{some}</span>'
    mark = ' class="best"' if rounds == fewest and not some else ""
    return f"<td><span{mark}>{escape(told)}</span>{sent}</td>"


def tiles(standings: Sequence[Standing], target: float | None) -> list[str]:
    """The best in a few words."""

    def tile(standing: Standing, what: str, value: str) -> str:
        return (
            f'<div class="tile" style="--c:{standing.colour}"><div class="what">{escape(what)}</div>'
            f'<div class="value">{escape(value)}</div><div class="who">{escape(standing.entry.name)}</div></div>'
        )

    metric = ranking_metric(standings)
    write_number = formats.percent if metric == metrics.ACCURACY else formats.number
    first = standings[0].numbers.get(f"last5_{metric}")
    told = cell(standings[0], f"last5_{metric}", write_number)
    found = [] if first is None else [tile(standings[0], f"best {metric.replace('_', ' ')}", told)]
    if target is None or metric != metrics.ACCURACY:
        return found
    spent = [(standing, reached(standing.entry, [target])[0]) for standing in standings]
    able = [(standing, each) for standing, each in spent if each.runs == len(standing.entry.runs)]
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("fewest rounds", "round", lambda n: f"{formats.count(n)} rounds"),
        ("fewest bits with the server", "server_bits", formats.bits),
        ("least simulated time", "simulated_total_seconds", formats.duration),
    )
    for what, cost, written in kinds:
        costs = [(standing, each.spent[cost]) for standing, each in able if cost in each.spent]
        if costs:
            standing, least = min(costs, key=lambda pair: pair[1])
            found.append(tile(standing, f"{what} to {short(target)}", written(least)))
    return found


def ranked_by(standings: Sequence[Standing], metric: str) -> str:
    """What the order means, in words."""
    told = f"by the mean of the last five measurements of {metric.replace('_', ' ')}"
    if any(standing.entry.members for standing in standings):
        told += "; over seeds the mean ± one standard deviation"
    return told


def short(target: float) -> str:
    """A target as people say it.

    >>> short(0.8), short(0.825)
    ('80%', '82.5%')
    """
    return formats.percent(target).replace(".0%", "%")
