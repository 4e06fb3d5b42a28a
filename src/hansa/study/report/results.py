"""The results of `hansa.run` with several seeds and of `hansa.compare`: summaries, data frames, figures and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, suggestion
from hansa.core.protocols import citations
from hansa.runs import metrics
from hansa.runs.client_columns import ClientColumns
from hansa.runs.columns import WINDOW, column_of, evaluated_metrics, main_metric, plain_name
from hansa.runs.driver import Run
from hansa.runs.folder import environment
from hansa.runs.metrics import SeedStatistics, curve_over_seeds, seed_statistics
from hansa.runs.provenance import data_digests
from hansa.study.report.entries import LabelCounts, ReportEntry
from hansa.study.report.page import ranking_table, write_page
from hansa.study.report.ranking import Ranking, common_target, draw_curves, latex_table, rank

if TYPE_CHECKING:
    import pandas


MAX_LABELLED_CLIENTS = 20_000
"""Maximum number of clients for which the page shows label counts."""


def entry_from_run(run: Run, name: str, digests: bool = False) -> ReportEntry:
    """Return a run in memory as an entry of a report, with the digests of its data if asked for."""
    data: Any = getattr(run.task, "data", None)

    def labels() -> LabelCounts | None:
        labelled = getattr(data, "classes", None) is not None and getattr(data.targets, "ndim", 0) == 1
        if not labelled or data.population > MAX_LABELLED_CLIENTS:
            return None
        return LabelCounts(data.label_counts().tolist(), list(map(str, range(data.classes))))

    facts = {"name": str(getattr(data, "name", "")), **data_digests(run.task)} if digests else {}
    return ReportEntry(
        name,
        run.history,
        environment=environment(),
        seed=run.key.seed,
        composition=repr(run.algorithm),
        clients=lambda: run.clients().by_client(),
        jobs=ClientColumns if run.clock is None else run.clients,
        labels=labels,
        data=facts,
        cites=citations(run.algorithm),
    )


class Runs(list[Run]):
    """One method with several seeds: a sequence of runs with their means.

    ``std`` is always the sample standard deviation over seeds, 0 for a single one.

    Args:
        name: The method's name.
        runs: One run for each seed.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> len(hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, seeds=3))
    3
    """

    def __init__(self, name: str, runs: Sequence[Run]) -> None:
        if not runs:
            raise HansaError(f"{name}: expected at least one run.")
        super().__init__(runs)
        self.name = name

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order of the runs."""
        return [run.key.seed for run in self]

    @property
    def histories(self) -> list[list[dict[str, Any]]]:
        """The history of every seed."""
        return [run.history for run in self]

    @property
    def entry(self) -> ReportEntry:
        """All seeds as one entry of a report."""
        return ReportEntry.from_seeds(self.name, [entry_from_run(run, self.name) for run in self])

    @property
    def metric(self) -> str:
        """The main metric: the default column to rank methods by."""
        history = self[0].history
        return main_metric(metrics.column_names(history), history.facts)

    def curve(self, metric: str | None = None) -> list[tuple[float, SeedStatistics]]:
        """Return (round, spread over seeds) of a metric, by default the main one, in rounds that all seeds measured."""
        if points := curve_over_seeds(self.histories, self.metric if metric is None else metric):
            return points
        raise self._not_measured(metric)

    def final(self, metric: str | None = None) -> SeedStatistics:
        """Return the spread over seeds of the final measurement."""
        return self.last(metric, 1)

    def last(self, metric: str | None = None, count: int = WINDOW) -> SeedStatistics:
        """Return the spread over seeds of the mean of the last ``count`` measurements."""
        return self._spread(metric, [metrics.last(history, metric, count) for history in self.histories])

    def best(self, metric: str | None = None) -> SeedStatistics:
        """Return the spread over seeds of the best measurement."""
        return self._spread(metric, [metrics.best(history, metric) for history in self.histories])

    def _spread(self, metric: str | None, values: Sequence[float | None]) -> SeedStatistics:
        if None in values:
            raise self._not_measured(metric)
        return seed_statistics([value for value in values if value is not None])

    def _not_measured(self, metric: str | None) -> HansaError:
        metric, measured = metric or self.metric, {name for h in self.histories for name in metrics.column_names(h)}
        return HansaError(f"not every seed has the metric {metric!r}. {suggestion(metric, measured)}")

    def rounds_to(self, target: float, metric: str | None = None) -> SeedStatistics | None:
        """Return the spread over seeds of the first round that reached the target; None unless all seeds did."""
        return self.cost_to(target, "round", metric)

    def bits_to(self, target: float, metric: str | None = None) -> SeedStatistics | None:
        """Return the spread over seeds of the bits sent, over all links, until the target was reached; None unless all
        seeds reached it."""
        return self.cost_to(target, "bits", metric)

    def cost_to(self, target: float, cost: str, metric: str | None = None) -> SeedStatistics | None:
        """Return the spread over seeds of a running total in the round that reached the target; None unless all did.

        Args:
            target: The target value of the metric.
            cost: A running total, such as bits, up_bits, wall_seconds or simulated_total_seconds.
            metric: The metric, by default the main one.
        """
        _, spent = metrics.cost_over_seeds(self.histories, target, metric)
        if spent and cost not in spent:
            raise HansaError(f"cost_to(cost={cost!r}): no such total. {suggestion(cost, spent)}")
        return spent.get(cost)

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with one row for each round and seed, running totals included.

        ``frame().groupby("round").mean(numeric_only=True)`` has the means over seeds.
        """
        import pandas

        rows = [{"seed": run.key.seed, **record} for run in self for record in metrics.with_totals(run.history)]
        return pandas.DataFrame(rows)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """Draw the mean curve with its band; see `Comparison.plot`."""
        return draw_curves([self.entry], path, metric, x)

    def report(self, path: Path | str = "report.html", title: str | None = None) -> Path:
        """Write a self-contained HTML page of curves, numbers and citations."""
        return Comparison({self.name: self}).report(path, self.name if title is None else title)

    def __repr__(self) -> str:
        ranking = rank([self.entry])
        text = f"{ranking.metric} {ranking[0].cell(ranking.score)} ({metrics.describe_score(ranking.score)})"
        return f"Runs({self.name!r}, seeds {self.seeds}, {text})"

    def _repr_html_(self) -> str:
        return ranking_table(rank([self.entry]))


class Comparison(dict[str, Runs]):
    """Several methods, each with its seeds: ``comparison["fedavg"]`` is one of them.

    Args:
        methods: The runs of each method, by name.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> methods = {"FedAvg": hansa.presets.fedavg(steps=2), "FedAMS": hansa.presets.fedams(steps=2)}
    >>> both = hansa.compare(methods, task, rounds=2)
    >>> len(both["FedAvg"][0].history)
    2
    """

    def __init__(self, methods: Mapping[str, Runs]) -> None:
        if not methods:
            raise HansaError("a comparison needs at least one method.")
        super().__init__(methods)

    def __missing__(self, name: str) -> Runs:
        raise KeyError(f"no method {name!r} was compared. {suggestion(name, self)}")

    @property
    def entries(self) -> list[ReportEntry]:
        """The methods as entries of a report; with different tasks, with digests of their data."""
        data = [getattr(runs[0].task, "data", None) for runs in self.values()]
        digests = any(each is not data[0] for each in data)
        return [
            ReportEntry.from_seeds(name, [entry_from_run(run, name, digests) for run in runs])
            for name, runs in self.items()
        ]

    @property
    def best(self) -> str:
        """The method that ranks first by its mean over seeds."""
        return self.ranking()[0].entry.name

    def ranking(self, target: float | None = None, *, metric: str | None = None, window: int = WINDOW) -> Ranking:
        """Return the methods from best to worst, with their numbers.

        Args:
            target: The target value of the metric.
            metric: Any column of the histories, or COLUMN:lower if its direction is unknown; by default the main metric
                of the task.
            window: Number of last measurements that a score averages; 1 ranks by the final value.
        """
        return rank(self.entries, target, metric=metric, window=window)

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with one row for each method, round and seed, running totals included."""
        import pandas

        frames = {name: runs.frame() for name, runs in self.items()}
        return pandas.concat(frames, names=["method"]).reset_index("method").reset_index(drop=True)

    def table(
        self, target: float | None = None, *, metric: str | None = None, window: int = WINDOW
    ) -> pandas.DataFrame:
        """Return a pandas frame of the ranking with one row for each method: means and NAME_std over seeds.

        ``final_NAME``, ``best_NAME`` and ``last5_NAME`` are the final, the best and the mean of the last five
        measurements of a metric, NaN if a seed diverged; ``diverged`` counts these seeds. ``attrs["ranked_by"]`` is the
        ranking column. The arguments are those of `ranking`.
        """
        import pandas

        ranking = self.ranking(target, metric=metric, window=window)
        rows = []
        for ranked in ranking:
            deviations = {f"{_with_statistic(name)}_std": spread.std for name, spread in ranked.spreads.items()}
            numbers = {_with_statistic(name): value for name, value in ranked.numbers.items()}
            counts = {"seeds": len(ranked.entry.runs), "diverged": len(ranked.diverged)}
            rows.append({"method": ranked.entry.name, **counts, **numbers, **deviations})
        frame = pandas.DataFrame(rows)
        frame.attrs["ranked_by"] = _with_statistic(ranking.score)
        return frame

    def latex(
        self,
        target: float | None = None,
        *,
        metric: str | None = None,
        window: int = WINDOW,
        **options: Any,
    ) -> str:
        """Return the ranking as a LaTeX table for booktabs.

        Args:
            target: The target value of the metric.
            metric: As in `ranking`.
            window: As in `ranking`.
            **options: ``confidence``, ``reference`` and ``correction``, as in `Ranking.latex`.
        """
        return self.ranking(target, metric=metric, window=window).latex(**options)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """Draw mean curves with bands of one standard deviation as a matplotlib figure. Needs ``hansa[plot]``.

        Args:
            path: Where to write the figure, if given; the suffix chooses the format.
            metric: Any column of the histories; by default the main metric of the task.
            x: The x axis: round, up_bits, server_bits, bits, wall_seconds or simulated_total_seconds.
        """
        return draw_curves(self.entries, path, metric, x)

    def report(
        self,
        path: Path | str = "report.html",
        title: str = "Federated methods compared",
        *,
        target: float | None = None,
        metric: str | None = None,
        window: int = WINDOW,
    ) -> Path:
        """Write a self-contained HTML page of curves, numbers and citations.

        Args:
            path: The HTML file.
            title: The heading of the page.
            target: The target value of the metric; by default an accuracy that about half of the methods reach.
            metric: As in `ranking`.
            window: As in `ranking`.
        """
        return write_page(path, self.entries, title=title, target=target, metric=metric, window=window)

    def __repr__(self) -> str:
        import pandas

        ranking = self.ranking(common_target(self.entries))
        columns = {column.title.replace("\n", " "): column.cells for column in ranking.columns()[:4]}
        table = pandas.DataFrame(columns, ranking.names).rename_axis(columns="method").to_string()
        seeds = sorted({len(runs) for runs in self.values()})
        title = f"Comparison of {len(self)} methods, {'/'.join(map(str, seeds))} seeds each, ranked {ranking.order}"
        return f"{title}\n{table}"

    def _repr_html_(self) -> str:
        return ranking_table(self.ranking(common_target(self.entries)))


def latex_by_data(comparisons: Mapping[str, Comparison], *, metric: str | None = None, window: int = WINDOW) -> str:
    r"""Return the scores of several comparisons side by side as a LaTeX table: methods by data sets.

    The best of each column is bold; a method that a comparison does not have is –.

    Args:
        comparisons: The comparison on each data set, by its heading.
        metric: As in `Comparison.ranking`.
        window: As in `Comparison.ranking`.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> both = hansa.compare({"FedAvg": hansa.presets.fedavg(steps=2)}, task, rounds=2)
    >>> print(latex_by_data({"first": both, "second": both}))
    \begin{tabular}{lrr}
    \toprule
    method & first, loss, final & second, loss, final \\
    \midrule
    FedAvg & \textbf{0.408} & \textbf{0.408} \\
    \bottomrule
    \end{tabular}
    """
    if not comparisons:
        raise HansaError("latex_by_data: expected at least one comparison.")
    methods = list(dict.fromkeys(name for comparison in comparisons.values() for name in comparison))
    columns: dict[str, list[str]] = {"method": methods}
    bold: dict[str, list[bool]] = {}
    for title, comparison in comparisons.items():
        ranking = comparison.ranking(metric=metric, window=window)
        scores = ranking.scores
        cells = dict(zip(ranking.names, zip(scores.cells, scores.best, strict=True), strict=True))
        shown = [cells.get(name, ("–", False)) for name in methods]
        heading = f"{title}, {scores.heading}"
        columns[heading], bold[heading] = [text for text, _ in shown], [best for _, best in shown]
    return latex_table(columns, bold)


def run_html(run: Run) -> str:
    """Return the numbers of a run as a small HTML table, for notebooks."""
    return ranking_table(rank([ReportEntry(run.algorithm.name, run.history)]))


def _with_statistic(name: str) -> str:
    """Return the name of a number with its statistic as prefix, adding ``final_`` for the final value of a metric."""
    measured = bool(evaluated_metrics([name])) or "outcome" in column_of(name).charts
    return f"final_{name}" if name == plain_name(name) and measured else name
