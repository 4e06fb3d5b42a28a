"""The ranking of methods: its columns and cells, what each method spent to reach a target, its LaTeX table, and
figures of curves for papers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    direction_of,
    evaluated_metrics,
    facts_of,
    lower_is_better,
    main_metric,
    plain_name,
    split_metric,
)
from hansa.runs.metrics import MIN_SEEDS, SeedStatistics, excludes_zero, paired_interval
from hansa.runs.store import io
from hansa.study.report import formats
from hansa.study.report.entries import ReportEntry
from hansa.training.metric_direction import Direction

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#45a5db", "#7a4fbf", "#8a5a2b", "#767d86", "#93a01a",
)  # fmt: skip
"""Colours that colour-blind readers can tell apart on white and on dark, after Okabe and Ito."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
"""Line styles, for readers who cannot tell the colours apart."""
TO_TARGET = ("rounds_to_target", "bits_to_target")


class RankedEntry(NamedTuple):
    """An entry with the numbers that it is ranked and shown by.

    Args:
        entry: The method.
        numbers: Its summary; means over seeds if there are several.
        spreads: The spread over seeds of each number.
        diverged: The seeds whose ranking metric is not finite at its last measurement, and since which round.
        colour: Its colour in charts.
    """

    entry: ReportEntry
    numbers: Mapping[str, Any]
    spreads: Mapping[str, SeedStatistics]
    diverged: Mapping[int | None, int]
    colour: str

    def cell(self, key: str, write: formats.Formatter) -> str:
        """Return one number as text: with several seeds mean and deviation; – if there is none."""
        value, runs = self.numbers.get(key), len(self.entry.runs)
        if value is None:
            return "–" if key not in TO_TARGET else self.reached(self.numbers.get("reached"))
        if math.isnan(value):  # the only non-finite numbers of a summary
            return f"diverged, {len(self.diverged)} of {runs} seeds" if runs > 1 and self.diverged else "diverged"
        spread = None if key in COSTS or key == "rounds" else self.spreads.get(key)
        return write(value) if spread is None else formats.format_spread(write, value, spread.std)

    def reached(self, runs: int | None) -> str:
        """Return how many of several seeds reached a target."""
        return f"{runs} of {len(self.entry.runs)} runs" if runs and self.entry.members else "never"


class RankingColumn(NamedTuple):
    """A column of the ranking table: heading, statistic, key of the number, format, and the best value, if any."""

    heading: str
    statistic: str
    key: str
    write: formats.Formatter
    best: float | None

    @property
    def title(self) -> str:
        """The heading with the statistic on a second line."""
        return f"{self.heading}\n{self.statistic}" if self.statistic else self.heading

    def is_best(self, ranked: RankedEntry) -> bool:
        """Return whether an entry has the best value and did not diverge."""
        return self.best is not None and ranked.numbers.get(self.key) == self.best and not ranked.diverged


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
    def order(self) -> str:
        """How the entries are ranked, in words."""
        text = f"by {column_of(self.metric).label}, {metrics.describe_score(self.score)}"
        text += f", the {'lowest' if self.falls else 'highest'} first"
        several = any(ranked.entry.members for ranked in self)
        return f"{text}; with several seeds, mean ± one standard deviation" if several else text

    def columns(self, final: bool = False) -> list[RankingColumn]:
        """Return the columns of the table for which some entry has a value, starting with the ranking metric.

        Args:
            final: Whether to return final values of all metrics besides the scores.
        """
        columns = []
        for key in dict.fromkeys([*self._metric_keys(final), *COSTS]):
            values = [ranked.numbers.get(key) for ranked in self]
            column = column_of(key, self.better)
            target = self.target if key in TO_TARGET else None
            if (not {*values} - {None} and (target is None or not final)) or (column.hide_zero and not any(values)):
                continue
            heading, statistic, write = column.label, metrics.describe_score(key), formats.formatter_of(key)
            if target is not None:
                heading, statistic = f"{key.partition('_')[0]} to {format_target(target, self.metric)}", ""
                write = formats.format_count if key == "rounds_to_target" else formats.format_bits
            better = column.better if target is None else "lower"
            differ = len({ranked.numbers.get(key) for ranked in self if not ranked.diverged} - {None}) > 1
            best = self._best(key, better) if better and differ and not column.hide_zero else None
            columns.append(RankingColumn(heading, "" if key in COSTS else statistic, key, write, best))
        return columns

    def _best(self, key: str, better: Direction) -> float | None:
        values = [r.numbers[key] for r in self if r.numbers.get(key) is not None and not r.diverged]
        return min(values, default=None) if better == "lower" else max(values, default=None)

    def _metric_keys(self, final: bool) -> list[str]:
        """The numbers of the table before the costs: score, best value, costs to the target, further metrics."""
        numbers = [ranked.numbers for ranked in self]
        base = base_metric(self.metric)
        measured = evaluated_metrics({plain_name(name) for entry_numbers in numbers for name in entry_numbers})
        task_metrics = [name for name in measured if name.startswith("test_") and name not in COLUMNS]
        sites = {site for ranked in self for history in ranked.entry.histories for site in metrics.site_names(history)}
        sets = [name for name in measured if name.endswith(f"/test_{base}") and name.partition("/")[0] not in sites]
        losses = LOSSES if self.metric in LOSSES else ("test_loss", "global_loss")
        clients = (f"client_{base}", f"client_{base}_worst", f"personal_{base}")
        names = (f"test_{base}", *sets, f"sites_test_{base}_worst", ACCURACY, *task_metrics, *losses, *clients)
        further = [name for name in dict.fromkeys(names) if name != self.metric]
        if final:
            return [self.score, self.metric, f"best_{self.metric}", *TO_TARGET, *further, f"client_{base}_std", *LOSSES]
        scores = [metrics.score_key(numbers, name, self.window) for name in further]
        return [self.score, f"best_{self.metric}", *TO_TARGET, *scores]

    def targets(self) -> list[float]:
        """Return targets around the ranking's, above chance and reached by some entry; only the ranking's for metrics
        other than an accuracy.

        >>> history = [{"round": 1, "test_accuracy": 0.3}, {"round": 2, "test_accuracy": 0.62}]
        >>> rank([ReportEntry("a", history)], 0.5).targets()
        [0.4, 0.45, 0.5, 0.55, 0.6]
        """
        histories = [h for ranked in self for h in ranked.entry.histories if has_column(h, self.metric)]
        values = [value for h in histories if (value := metrics.best(h, self.directed_metric)) is not None]
        if self.target is None or not values:
            return []
        if self.falls or column_of(self.metric).unit != "fraction":
            reached = min(values) <= self.target if self.falls else self.target <= max(values)
            return [self.target] if reached else []
        steps = [round(self.target + 0.05 * step, 4) for step in range(-2, 3)]
        chance = chance_level([ranked.entry for ranked in self])
        return [s for s in steps if 0 < s <= max(values) + 1e-12 and (s > chance or s == self.target)]

    def _costs(self, target: float) -> list[tuple[RankedEntry, int, dict[str, SeedStatistics]]]:
        """Return of each entry how many seeds reached a target, and if all did, their totals then."""
        return [(r, *metrics.cost_over_seeds(r.entry.histories, target, self.directed_metric)) for r in self]

    def target_rows(self, targets: Sequence[float]) -> list[list[tuple[str, str, bool]]]:
        """Return for each method and target: its rounds, or how many seeds reached it if not all did; the bits over all
        links; and whether it has the fewest rounds."""
        columns = []
        for target in targets:
            costs = self._costs(target)
            fewest = min((spent["round"].mean for r, _, spent in costs if spent and not r.diverged), default=0.0)
            cells = []
            for ranked, reached, spent in costs:
                if not spent:
                    cells.append((ranked.reached(reached), "", False))
                    continue
                mean, deviation, *_ = spent["round"]
                over_seeds = formats.format_spread(formats.format_count, mean, deviation)
                rounds = over_seeds if ranked.entry.members else formats.format_count(mean)
                best = mean == fewest and not ranked.diverged
                cells.append((rounds, formats.format_bits(spent["bits"].mean), best))
            columns.append(cells)
        return [list(row) for row in zip(*columns, strict=True)]

    def tiles(self) -> list[tuple[str, str, RankedEntry]]:
        """Return the headline numbers, each with its title and the method that has it: the best metric, and the lowest
        costs to the target."""
        leader, tiles = self[0], []
        if leader.numbers.get(self.score) is not None and not leader.diverged:
            best = f"{'lowest' if self.falls else 'highest'} {column_of(self.metric).label}"
            value = leader.cell(self.score, formats.formatter_of(self.score))
            tiles.append((f"{best}, {metrics.describe_score(self.score)}", value, leader))
        if self.target is None:
            return tiles
        costs_of: dict[str, tuple[str, formats.Formatter]] = {
            "round": ("fewest rounds", lambda rounds: f"{formats.format_count(rounds)} rounds"),
            "bits": ("fewest bits, peers included,", formats.format_bits),
            "simulated_total_seconds": ("least simulated time", formats.format_duration),
        }
        costs = self._costs(self.target)
        for cost, (title, write) in costs_of.items():
            spent = [(ranked, of[cost].mean) for ranked, _, of in costs if cost in of and not ranked.diverged]
            if spent:
                ranked, least = min(spent, key=lambda pair: pair[1])
                tiles.append((f"{title} to {format_target(self.target, self.metric)}", write(least), ranked))
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
        by_name = {ranked.entry.name: ranked for ranked in self}
        if correction not in (None, "holm"):
            raise invalid_argument("latex", "correction", correction, '"holm" or None')
        if reference is not None and reference not in by_name:
            raise HansaError(f"latex(reference={reference!r}): no such method. {suggestion(reference, by_name)}")
        base = self[0] if reference is None else by_name[reference]
        write = formats.formatter_of(self.metric)
        columns, bold = {"method": [ranked.entry.name for ranked in self]}, set()
        for column in self.columns(final=True):
            if column.key in (self.score, *TO_TARGET):
                texts = [ranked.cell(column.key, column.write).replace("%", "") for ranked in self]
                falls = self.falls or column.key in TO_TARGET
                bold |= {
                    (row, len(columns)) for row in self.bold_rows(texts, column.key, "lower" if falls else "higher")
                }
                columns[self.label if column.key == self.score else column.heading] = texts
        intervals = {r.entry.name: each for r in self if (each := self._difference(r, base, confidence)) is not None}
        if intervals:
            stars = dict(zip(intervals, excludes_zero([*intervals.values()], confidence, correction), strict=True))
            origin = "" if reference is None else f" from {reference}"
            star = "without 0" if correction is None else "after Holm's correction"
            texts = ["" if r is base else "–" for r in self]
            for row, name in enumerate(columns["method"]):
                if name in intervals:
                    mean, low, high = (f"${write(end).removesuffix('%')}$" for end in intervals[name].ends)
                    texts[row] = f"{mean} [{low}, {high}]{'$^*$' * stars[name]}"
            columns[f"difference{origin}, {100 * confidence:g}% interval ($^*$: {star})"] = texts
        return latex_table(list(columns), list(zip(*columns.values(), strict=True)), bold)

    @property
    def label(self) -> str:
        """The heading of the score in a LaTeX table."""
        column = column_of(self.metric)
        return f"{column.label}, {metrics.describe_score(self.score)}" + " (%)" * (column.unit == "fraction")

    @property
    def scores(self) -> list[str]:
        """The score of each entry, without the sign of percent."""
        return [ranked.cell(self.score, formats.formatter_of(self.metric)).replace("%", "") for ranked in self]

    def bold_rows(self, texts: Sequence[str], key: str, better: Direction) -> list[int]:
        """Return the rows whose text, of one number, is printed like that of the best and did not diverge."""
        best = self._best(key, better)
        rows = list(enumerate(zip(self, texts, strict=True)))
        printed = {text for _, (ranked, text) in rows if best is not None and ranked.numbers.get(key) == best}
        return [row for row, (ranked, text) in rows if text in printed and not ranked.diverged]

    def _difference(self, ranked: RankedEntry, base: RankedEntry, confidence: float) -> metrics.MeanInterval | None:
        """The mean of a method's paired differences from the reference, with its interval; None with fewer than three
        seeds in common, or if one of the two diverged."""
        if ranked is base or ranked.diverged or base.diverged:
            return None
        scores: list[dict[int | None, float]] = []
        for runs in (ranked.entry.runs, base.entry.runs):
            options: dict[str, Any] = {"metric": self.directed_metric, "window": self.window}
            numbers = {run.seed: metrics.summarize(run.history, **options).get(self.score) for run in runs}
            scores.append({seed: float(number) for seed, number in numbers.items() if number is not None})
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
    directed_metric = f"{column}:{direction_of(column, better)}"
    ranked = []
    for index, entry in enumerate(entries):
        numbers, spreads = metrics.summarize_seeds(entry.histories, target, metric=directed_metric, window=window)
        rounds = {run.seed: metrics.diverged_at(run.history, column) for run in entry.runs}
        diverged = {seed: round for seed, round in rounds.items() if round is not None}
        ranked.append(RankedEntry(entry, numbers, spreads, diverged, PALETTE[index % len(PALETTE)]))
    score = metrics.score_key([row.numbers for row in ranked], column, window)
    sign = 1.0 if lower_is_better(column, better) else -1.0

    def order(ranked: RankedEntry) -> tuple[bool, bool, float]:
        value = None if ranked.diverged else ranked.numbers.get(score)
        return bool(ranked.diverged), value is None, sign * (value or 0.0)

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
    name, better = choose_metric(entries, metric)
    if column_of(name).unit != "fraction" or direction_of(name, better) != "higher":
        return None
    best = []
    for entry in entries:
        values = [metrics.best(h, f"{name}:higher") for h in entry.histories if has_column(h, name)]
        measured = [value for value in values if value is not None]
        if len(measured) == len(entry.histories):
            best.append(min(measured))
    best.sort(reverse=True)
    if not best:
        return None
    target = round(math.floor(min(best[(len(best) - 1) // 2], 1.0) * 20 + 1e-9) / 20, 2)
    return target if target > chance_level(entries) else None


def chance_level(entries: Sequence[ReportEntry]) -> float:
    """Return the accuracy of always predicting the most frequent test label, of the task where it is largest."""
    return max(facts_of(history).chance or 0.0 for entry in entries for history in entry.histories)


def has_column(history: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column was ever measured."""
    return any(name in record for record in history)


def format_target(target: float, metric: str = ACCURACY) -> str:
    """
    >>> format_target(0.8), format_target(0.825), format_target(3.5, "test_rmse")
    ('80%', '82.5%', '3.5 test rmse')
    """
    column = column_of(metric)
    if column.unit == "fraction":
        return formats.format_percent(target).replace(".0%", "%")
    return f"{formats.formatter_of(metric)(target)} {column.label}"


def latex_table(headings: Sequence[str], rows: Sequence[Sequence[str]], bold: Collection[tuple[int, int]] = ()) -> str:
    r"""Return rows of text as a LaTeX table for the package booktabs.

    Args:
        headings: One heading per column.
        rows: The rows; text between dollars is mathematics, except in the first column.
        bold: The row and column of each bold cell.

    >>> print(latex_table(["CIFAR-10, accuracy (%)", "ours"], [["FedAvg", "50.0 ± 1.2"]]))
    \begin{tabular}{lr}
    \toprule
    CIFAR-10, accuracy (\%) & ours \\
    \midrule
    FedAvg & 50.0 $\pm$ 1.2 \\
    \bottomrule
    \end{tabular}
    """
    from pandas import DataFrame

    signs = str.maketrans({"±": r"$\pm$", "−": "$-$"})
    table = DataFrame([[row[0], *(cell.translate(signs) for cell in row[1:])] for row in rows], columns=list(headings))
    marks = DataFrame("", index=table.index, columns=table.columns)
    for row_and_column in bold:
        marks.iloc[row_and_column] = "textbf:--rwrap"
    style = table.style.hide(axis="index").format(escape="latex-math").format(escape="latex", subset=[headings[0]])
    style = style.format_index(escape="latex-math", axis="columns").apply(lambda _: marks, axis=None)
    layout = "l" + "r" * (len(headings) - 1)
    return str(style.to_latex(hrules=True, column_format=layout)).strip()


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
