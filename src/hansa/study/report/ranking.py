"""The ranking of methods: its columns and cells, what each method spent to reach a target, its LaTeX table, and
figures of curves for papers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.runs import metrics
from hansa.runs.columns import (
    ACCURACY,
    AXES,
    COLUMNS,
    COSTS,
    LOSSES,
    SITE_PREFIX,
    TOTALS,
    WINDOW,
    MetricFacts,
    base_metric,
    column_of,
    evaluated_metrics,
    facts_of,
    lower_is_better,
    main_metric,
    plain_name,
    split_metric,
)
from hansa.runs.metrics import MIN_SEEDS, SeedStatistics, excludes_zero, paired_interval
from hansa.runs.store import io
from hansa.study.report.entries import ReportEntry
from hansa.study.report.formats import format_number, format_spread, format_value
from hansa.training.metric_direction import Direction

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#45a5db", "#7a4fbf", "#8a5a2b", "#767d86", "#93a01a",
)  # fmt: skip
"""Colours that colour-blind readers can tell apart on white and on dark, after Okabe and Ito."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
"""Line styles, for readers who cannot tell the colours apart."""
TO_TARGET = ("rounds_to_target", "bits_to_target")
TILES = {
    "round": "fewest rounds",
    "bits": "fewest bits, peers included,",
    "simulated_total_seconds": "least simulated time",
}
"""The costs to the target in the headline numbers."""


class RankedEntry(NamedTuple):
    """An entry with the numbers that it is ranked and shown by.

    Args:
        entry: The method.
        summaries: The summary of each seed, in the order of ``entry.runs``.
        spreads: The spread of each number over several seeds.
        numbers: The summary of a single run; means over seeds if there are several.
        diverged: The seeds whose ranking metric is not finite at its last measurement, and since which round.
        place: Its place among the entries before they were ranked.
    """

    entry: ReportEntry
    summaries: Sequence[Mapping[str, Any]]
    spreads: Mapping[str, SeedStatistics]
    numbers: Mapping[str, Any]
    diverged: Mapping[int | None, int]
    place: int

    @property
    def colour(self) -> str:
        """Its colour in charts."""
        return PALETTE[self.place % len(PALETTE)]

    @property
    def seeds(self) -> list[tuple[ReportEntry, Mapping[str, Any]]]:
        """The run of each seed, and its summary."""
        return list(zip(self.entry.runs, self.summaries, strict=True))

    def cell(self, key: str) -> str:
        """Return one number as text: with several seeds mean and deviation; – if there is none."""
        value, unit, runs = self.numbers.get(key), column_of(key).unit, len(self.summaries)
        if value is None:
            return self.reached(self.numbers.get("reached", 0)) if key in TO_TARGET else "–"
        if math.isnan(value):  # the only non-finite numbers of a summary
            return f"diverged, {len(self.diverged)} of {runs} seeds" if runs > 1 and self.diverged else "diverged"
        spread = None if key in COSTS or key == "rounds" else self.spreads.get(key)
        return format_number(value, unit) if spread is None else format_spread(value, spread.std, unit)

    def reached(self, runs: int) -> str:
        """Return how many of several seeds reached a target."""
        return f"{runs} of {len(self.summaries)} runs" if runs and self.entry.members else "never"


class RankingColumn(NamedTuple):
    """A column of the ranking table.

    Args:
        key: The number of a summary that it shows.
        heading: Its heading.
        statistic: What is shown of a metric, such as "final"; "" for costs.
        cells: The text of each entry.
        best: Whether an entry is printed like the best one, and did not diverge.
    """

    key: str
    heading: str
    statistic: str
    cells: Sequence[str]
    best: Sequence[bool]

    @property
    def title(self) -> str:
        """The heading with the statistic on a second line."""
        return f"{self.heading}\n{self.statistic}" if self.statistic else self.heading


class Ranking(list[RankedEntry]):
    """Entries from best to worst, as `rank` orders them.

    Args:
        ranked: The entries.
        metric: The column that all entries are ranked by.
        better: The directions of the task's own metrics.
        score: The number that they are ranked by, such as ``last5_test_accuracy``; the final value has no prefix.
        window: Number of last measurements that a score averages.
        target: The target value of the metric.

    >>> ranking = rank([ReportEntry("a", [{"round": 1, "test_rmse": 0.5}])])
    >>> ranking.metric, ranking[0].numbers[ranking.score], ranking.falls
    ('test_rmse', 0.5, True)
    """

    def __init__(
        self,
        ranked: Iterable[RankedEntry],
        metric: str,
        better: Mapping[str, Direction],
        score: str,
        window: int,
        target: float | None,
    ) -> None:
        super().__init__(ranked)
        self.metric, self.better, self.score = metric, better, score
        self.window, self.target = window, target
        self.falls = lower_is_better(metric, self.better)
        self.directed_metric = f"{metric}:{'lower' if self.falls else 'higher'}"

    @property
    def names(self) -> list[str]:
        """The names of the entries."""
        return [ranked.entry.name for ranked in self]

    @property
    def order(self) -> str:
        """How the entries are ranked, in words."""
        text = f"by {column_of(self.metric).label}, {metrics.describe_score(self.score)}"
        text += f", the {'lowest' if self.falls else 'highest'} first"
        several = any(ranked.entry.members for ranked in self)
        return f"{text}; with several seeds, mean ± one standard deviation" if several else text

    @property
    def goal(self) -> str:
        """The target in words, such as "to 80%"."""
        return "to target" if self.target is None else f"to {format_target(self.target, self.metric)}"

    def columns(self, final: bool = False) -> list[RankingColumn]:
        """Return the columns of the table for which some entry has a value, starting with the ranking metric.

        Args:
            final: Whether to return final values of all metrics besides the scores. A cost to the target is then
                returned even if none reached it, and a value is best even if all are equal.
        """
        columns = []
        for key in dict.fromkeys([*self._metric_keys(final), *COSTS]):
            values = [ranked.numbers.get(key) for ranked in self]
            wanted = final and self.target is not None and key in TO_TARGET
            if (wanted or {*values} - {None}) and (any(values) or not column_of(key).hide_zero):
                columns.append(self.column(key, final))
        return columns

    def column(self, key: str, equal: bool = True) -> RankingColumn:
        """Return a column of the table.

        Args:
            key: The number of a summary.
            equal: Whether values are best if all are equal.
        """
        column = column_of(key, self.better)
        heading, statistic = column.label, "" if key in COSTS else metrics.describe_score(key)
        if key in TO_TARGET:
            heading, statistic = f"{key.partition('_')[0]} {self.goal}", ""
        cells = [ranked.cell(key) for ranked in self]
        values = [None if ranked.diverged else ranked.numbers.get(key) for ranked in self]
        measured = {value for value in values if value is not None and value == value}  # not NaN
        printed: set[str] = set()
        if column.better and not column.hide_zero and len(measured) > (not equal):
            best = min(measured) if column.better == "lower" else max(measured)
            printed = {cell for cell, value in zip(cells, values, strict=True) if value == best}
        marks = [cell in printed and not ranked.diverged for cell, ranked in zip(cells, self, strict=True)]
        return RankingColumn(key, heading, statistic, cells, marks)

    def _metric_keys(self, final: bool) -> list[str]:
        """The numbers of the table before the costs: score, best value, costs to the target, further metrics."""
        base = base_metric(self.metric)
        measured = evaluated_metrics({plain_name(name) for ranked in self for name in ranked.numbers})
        task_metrics = [name for name in measured if name.startswith("test_") and name not in COLUMNS]
        sites = {site for ranked in self for history in ranked.entry.histories for site in metrics.site_names(history)}
        sets = [name for name in measured if name.endswith(f"/test_{base}") and name.partition("/")[0] not in sites]
        losses = LOSSES if self.metric in LOSSES else ("test_loss", "global_loss")
        clients = (f"client_{base}", f"client_{base}_worst", f"personal_{base}")
        names = (f"test_{base}", *sets, f"sites_test_{base}_worst", ACCURACY, *task_metrics, *losses, *clients)
        further = [name for name in dict.fromkeys(names) if name != self.metric]
        if final:
            return [self.score, self.metric, f"best_{self.metric}", *TO_TARGET, *further, f"client_{base}_std", *LOSSES]
        scores = [metrics.score_key([ranked.numbers for ranked in self], name, self.window) for name in further]
        return [self.score, f"best_{self.metric}", *TO_TARGET, *scores]

    def targets(self) -> list[float]:
        """Return targets around the ranking's, above chance and reached by some entry; only the ranking's for metrics
        other than an accuracy.

        >>> history = [{"round": 1, "test_accuracy": 0.3}, {"round": 2, "test_accuracy": 0.62}]
        >>> rank([ReportEntry("a", history)], 0.5).targets()
        [0.4, 0.45, 0.5, 0.55, 0.6]
        """
        best = [summary.get(f"best_{self.metric}") for ranked in self for summary in ranked.summaries]
        values = [value for value in best if value is not None]
        if self.target is None or not values:
            return []
        if self.falls or column_of(self.metric).unit != "fraction":
            reached = min(values) <= self.target if self.falls else self.target <= max(values)
            return [self.target] if reached else []
        steps = [round(self.target + 0.05 * step, 4) for step in range(-2, 3)]
        chance = chance_level([ranked.entry for ranked in self])
        return [s for s in steps if 0 < s <= max(values) + 1e-12 and (s > chance or s == self.target)]

    def costs(self, target: float) -> list[tuple[RankedEntry, int, dict[str, SeedStatistics]]]:
        """Return of each entry how many seeds reached a target, and if all did, their totals then."""
        return [(r, *metrics.cost_over_seeds(r.entry.histories, target, self.directed_metric)) for r in self]

    def target_rows(self, targets: Sequence[float]) -> list[list[tuple[str, str, bool]]]:
        """Return for each method and target: its rounds, or how many seeds reached it if not all did; the bits over all
        links; and whether it has the fewest rounds."""
        columns = []
        for target in targets:
            costs = self.costs(target)
            fewest = min((spent["round"].mean for r, _, spent in costs if spent and not r.diverged), default=0.0)
            cells = []
            for ranked, reached, spent in costs:
                cell = ranked.reached(reached), "", False
                if spent:
                    mean, deviation, *_ = spent["round"]
                    several = format_spread(mean, deviation, "count") if ranked.entry.members else ""
                    bits = format_number(spent["bits"].mean, "bits")
                    cell = several or format_number(mean, "count"), bits, mean == fewest and not ranked.diverged
                cells.append(cell)
            columns.append(cells)
        return [list(row) for row in zip(*columns, strict=True)]

    def tiles(self) -> list[tuple[str, str, RankedEntry]]:
        """Return the headline numbers, each with its title and the method that has it: the best metric, and the lowest
        costs to the target."""
        leader, tiles = self[0], []
        if leader.numbers.get(self.score) is not None and not leader.diverged:
            best = f"{'lowest' if self.falls else 'highest'} {column_of(self.metric).label}"
            tiles.append((f"{best}, {metrics.describe_score(self.score)}", leader.cell(self.score), leader))
        costs = [] if self.target is None else self.costs(self.target)
        for cost, title in TILES.items():
            spent = [(ranked, of[cost].mean) for ranked, _, of in costs if cost in of and not ranked.diverged]
            if spent:
                ranked, least = min(spent, key=lambda pair: pair[1])
                text = format_value(cost, least) + " rounds" * (cost == "round")
                tiles.append((f"{title} {self.goal}", text, ranked))
        return tiles

    def latex(
        self, *, confidence: float = 0.95, reference: str | None = None, correction: Literal["holm"] | None = None
    ) -> str:
        r"""Return the ranking as a LaTeX table for the package booktabs, the best of each column in bold.

        The columns are the score, with its deviation over seeds; with a target, rounds and bits (over all links) to
        reach it, or how many seeds did; and with three or more seeds the difference from the reference: the mean over
        seeds of the paired differences, with its confidence interval, and a star if the interval does not contain 0.
        Cells printed like the best are bold too. A method that diverged is last and never bold.

        Args:
            confidence: The level of the intervals.
            reference: The method from which differences are taken; by default the first one.
            correction: ``"holm"`` sets the stars by Holm's test of all differences together, so that the chance of any
                wrong star is 1 - ``confidence`` at most; the intervals stay those of single differences.

        >>> print(rank([ReportEntry("FedAvg", [{"round": 1, "test_accuracy": 0.5}])]).latex())
        \begin{tabular}{lr}
        \toprule
        method & accuracy, final (\%) \\
        \midrule
        FedAvg & \textbf{50.0} \\
        \bottomrule
        \end{tabular}
        """
        if correction not in (None, "holm"):
            raise invalid_argument("latex", "correction", correction, '"holm" or None')
        if reference is not None and reference not in self.names:
            raise HansaError(f"latex(reference={reference!r}): no such method. {suggestion(reference, self.names)}")
        base = self[0 if reference is None else self.names.index(reference)]
        shown = [self.scores, *(column for column in self.columns(final=True) if column.key in TO_TARGET)]
        columns = {"method": self.names, **{column.heading: column.cells for column in shown}}
        intervals = [self._difference(ranked, base, confidence) for ranked in self]
        if measured := [interval for interval in intervals if interval is not None]:
            stars = iter(excludes_zero(measured, confidence, correction))
            texts = ["" if ranked is base else "–" for ranked in self]
            for row, interval in enumerate(intervals):
                if interval is not None:
                    mean, low, high = (f"${format_value(self.metric, end).removesuffix('%')}$" for end in interval.ends)
                    texts[row] = f"{mean} [{low}, {high}]{'$^*$' * next(stars)}"
            origin = "" if reference is None else f" from {reference}"
            star = "without 0" if correction is None else "after Holm's correction"
            columns[f"difference{origin}, {100 * confidence:g}% interval ($^*$: {star})"] = texts
        return latex_table(columns, {column.heading: column.best for column in shown})

    @property
    def scores(self) -> RankingColumn:
        """The score of each entry as a column of a LaTeX table, with percent in the heading."""
        score, column = self.column(self.score), column_of(self.metric)
        heading = f"{column.label}, {metrics.describe_score(self.score)}" + " (%)" * (column.unit == "fraction")
        return score._replace(heading=heading, cells=[text.replace("%", "") for text in score.cells])

    def _difference(self, ranked: RankedEntry, base: RankedEntry, confidence: float) -> metrics.MeanInterval | None:
        """The mean of a method's paired differences from the reference, with its interval; None with fewer than three
        seeds in common, or if one of the two diverged."""
        if ranked is base or ranked.diverged or base.diverged:
            return None
        scores = [
            {run.seed: summary[self.score] for run, summary in each.seeds if self.score in summary}
            for each in (ranked, base)
        ]
        common = [seed for seed in scores[0] if seed in scores[1]]
        if len(common) < MIN_SEEDS:
            return None
        values, base_values = ([of_method[seed] for seed in common] for of_method in scores)
        return paired_interval(values, base_values, confidence)


def rank(
    entries: Sequence[ReportEntry],
    target: float | None = None,
    *,
    metric: str | None = None,
    window: int = WINDOW,
) -> Ranking:
    """Rank entries from best to worst; those that diverged come last, after those that did not measure the metric.

    Entries are ordered by the mean of the last ``window`` measurements, or by the final one if a run has no more than
    these, averaged over seeds. Colours follow the order of ``entries``, so a method keeps its colour in each report.

    Args:
        entries: The entries, with distinct names.
        target: A target value of the metric; adds ``rounds_to_target`` and ``bits_to_target`` to the numbers.
        metric: Any column of the histories, or COLUMN:lower if its direction is unknown; by default the main metric of
            the tasks.
        window: Number of last measurements to average.

    >>> entries = [
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "test_accuracy": 0.7}]),
    ... ]
    >>> [ranked.entry.name for ranked in rank(entries)]
    ['b', 'a']
    """
    if not entries:
        raise HansaError("a report needs at least one run.")
    name, count = Counter(entry.name for entry in entries).most_common(1)[0]
    if count > 1:
        raise HansaError(f"two runs are called {name!r}: give each run its own name.")
    column, better = choose_metric(entries, metric)
    falls = lower_is_better(column, better)
    directed = f"{column}:{'lower' if falls else 'higher'}"
    ranked = []
    for place, entry in enumerate(entries):
        summaries = [metrics.summarize(h, target, metric=directed, window=window) for h in entry.histories]
        numbers, spreads = summaries[0], metrics.over_seeds(summaries) if entry.members else {}
        if entry.members:
            names = (name for name in numbers if name in spreads or name in TO_TARGET)
            numbers = {name: spreads[name].mean if name in spreads else None for name in names}
        if entry.members and target is not None:
            numbers["reached"] = sum(summary["rounds_to_target"] is not None for summary in summaries)
        rounds = {run.seed: metrics.diverged_at(run.history, column) for run in entry.runs}
        diverged = {seed: round for seed, round in rounds.items() if round is not None}
        ranked.append(RankedEntry(entry, summaries, spreads, numbers, diverged, place))
    score = metrics.score_key([row.numbers for row in ranked], column, window)

    def order(ranked: RankedEntry) -> tuple[bool, bool, float]:
        value = None if ranked.diverged else ranked.numbers.get(score)
        return bool(ranked.diverged), value is None, (value or 0.0) * (1 if falls else -1)

    return Ranking(sorted(ranked, key=order), column, better, score, window, target)


def choose_metric(entries: Sequence[ReportEntry], metric: str | None = None) -> tuple[str, dict[str, Direction]]:
    """Return the column that entries are ranked by, and the directions of their metrics.

    The column is the requested one; else the first main metric of a task that all entries measured; else that of the
    first task.

    >>> choose_metric([ReportEntry("a", [{"round": 1, "test_c_index": 0.5, "test_loss": 1.0}])])
    ('test_c_index', {})
    """
    all_facts = [facts_of(history) for entry in entries for history in entry.histories]
    better = {name: direction for facts in reversed(all_facts) for name, direction in facts.better.items()}
    columns = [{*metrics.column_names(history)} for entry in entries for history in entry.histories]
    measured = set().union(*columns)
    if metric is not None:
        name, better = split_metric(metric, better)
        if measured and name not in measured and name not in TOTALS:
            raise HansaError(f"metric {name!r}: no run has it. {suggestion(name, measured)}")
        lower_is_better(name, better)  # raises if the direction is unknown
        return name, better
    mains = [name for facts in all_facts for name in (facts.main, SITE_PREFIX + facts.main) if name in measured]
    shared = [main for main in mains if all(main in names for names in columns)]
    return main_metric(measured, MetricFacts((shared or mains or [""])[0], better)), better


def common_target(entries: Sequence[ReportEntry], metric: str | None = None) -> float | None:
    """Return the highest multiple of 5% accuracy that at least half of the entries reached with every seed.

    None for metrics other than an accuracy, or below the accuracy of always predicting the most frequent label.

    >>> entries = [
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "test_accuracy": 0.7}]),
    ... ]
    >>> common_target(entries)
    0.7
    """
    ranking = rank(entries, metric=metric)
    if column_of(ranking.metric).unit != "fraction" or ranking.falls:
        return None
    key = f"best_{ranking.metric}"
    values: list[list[Any]] = [[summary.get(key) for summary in ranked.summaries] for ranked in ranking]
    best = sorted((min(of_seeds) for of_seeds in values if None not in of_seeds), reverse=True)
    if not best:
        return None
    target = round(math.floor(min(best[(len(best) - 1) // 2], 1.0) * 20 + 1e-9) / 20, 2)
    return target if target > chance_level(entries) else None


def chance_level(entries: Sequence[ReportEntry]) -> float:
    """Return the accuracy of always predicting the most frequent test label, of the task where it is largest."""
    return max(facts_of(history).chance or 0.0 for entry in entries for history in entry.histories)


def format_target(target: float, metric: str = ACCURACY) -> str:
    """
    >>> format_target(0.8), format_target(0.825), format_target(3.5, "test_rmse")
    ('80%', '82.5%', '3.5 test rmse')
    """
    text, column = format_value(metric, target), column_of(metric)
    return text.replace(".0%", "%") if column.unit == "fraction" else f"{text} {column.label}"


def latex_table(columns: Mapping[str, Sequence[str]], bold: Mapping[str, Sequence[bool]] | None = None) -> str:
    r"""Return columns of text as a LaTeX table for the package booktabs.

    Args:
        columns: The texts by heading; text between dollars is mathematics, except in the first column.
        bold: Which cells of a column are bold, by heading.

    >>> print(latex_table({"CIFAR-10, accuracy (%)": ["FedAvg"], "ours": ["50.0 ± 1.2"]}))
    \begin{tabular}{lr}
    \toprule
    CIFAR-10, accuracy (\%) & ours \\
    \midrule
    FedAvg & 50.0 $\pm$ 1.2 \\
    \bottomrule
    \end{tabular}
    """
    from pandas import DataFrame

    first, *others = columns
    signs = str.maketrans({"±": r"$\pm$", "−": "$-$"})
    texts = {heading: [text.translate(signs) for text in columns[heading]] for heading in others}
    table = DataFrame({first: columns[first], **texts})
    marks = DataFrame(bold or {}, index=table.index, columns=table.columns).map({True: "textbf:--rwrap"}.get).fillna("")
    style = table.style.hide(axis="index").format(escape="latex-math").format(escape="latex", subset=[first])
    style = style.format_index(escape="latex-math", axis="columns").apply(lambda _: marks, axis=None)
    return str(style.to_latex(hrules=True, column_format="l" + "r" * len(others))).strip()


def draw_curves(
    entries: Sequence[ReportEntry], path: Path | str | None = None, metric: str | None = None, x: str = "round"
) -> Any:
    """Draw a metric against ``x`` as a matplotlib figure; bands are one standard deviation over seeds.

    Args:
        entries: The methods to draw.
        path: Where to write the figure, if given; the suffix chooses the format.
        metric: The column to draw, any of the histories; by default the main metric of the tasks.
        x: The column of the x axis.
    """
    if x not in AXES:
        raise HansaError(f"plot(x={x!r}): {suggestion(x, AXES)}")
    name = choose_metric(entries)[0] if metric is None else metric.partition(":")[0]
    measured = dict.fromkeys(column for entry in entries for h in entry.histories for column in metrics.column_names(h))
    if name not in measured:
        raise HansaError(f"plot(metric={metric!r}): {suggestion(str(metric), measured)}")
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise HansaError("plot() needs matplotlib: pip install 'hansa[plot]'.") from error

    class DisplayedFigure(figures.Figure):  # type: ignore[misc, name-defined]
        def _repr_png_(self) -> bytes:  # shown by notebooks without pyplot
            content = BytesIO()
            self.savefig(content, format="png", dpi=110)
            return content.getvalue()

    figure = DisplayedFigure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for index, entry in enumerate(entries):
        if not (points := metrics.curve_over_seeds(entry.histories, name, x)):
            continue
        colour, dash = PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]
        xs = [x_value for x_value, _ in points]
        axes.plot(xs, [y.mean for _, y in points], color=colour, linestyle=dash, linewidth=1.6, label=entry.name)
        if entry.members:
            low, high = ([y.mean + sign * y.std for _, y in points] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(column_of(name).label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    if path is not None:
        path = Path(path)
        io.make_folder(path.parent.resolve())
        try:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:  # an unknown format
            raise HansaError(f"plot({str(path)!r}): {error}.") from error
    return figure
