"""The results of `hansa.run` with several seeds and of `hansa.compare`: summaries, data frames, figures and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

from hansa.core.citations import bibtex
from hansa.core.errors import HansaError, suggestion
from hansa.runs import metrics
from hansa.runs.columns import ACCURACY
from hansa.runs.driver import Run
from hansa.runs.folder import environment
from hansa.runs.seed_statistics import (
    SeedStatistics,
    aligned_rounds,
    metric_over_seeds,
    seed_statistics,
    summarize_seeds,
)
from hansa.study.report import figure, formats
from hansa.study.report.entries import RankedEntry, ReportEntry, common_target, rank
from hansa.study.report.page import write_page
from hansa.study.report.ranking import format_cell, ranking_columns, ranking_html

if TYPE_CHECKING:
    import pandas


MAX_LABELLED_CLIENTS = 20_000
"""With more clients the page does not show which labels each holds."""


def entry_from_run(run: Run, name: str) -> ReportEntry:
    """Return a run in memory as an entry of a report."""
    clients = run.clients().by_client()
    data: Any = getattr(run.task, "data", None)
    labelled = getattr(data, "classes", None) is not None and getattr(data.targets, "ndim", 0) == 1
    return ReportEntry(
        name,
        run.history,
        environment=environment(),
        seed=run.key.seed,
        composition=repr(run.algorithm),
        clients=clients if clients.rows else None,
        label_counts=data.label_counts().tolist() if labelled and data.population <= MAX_LABELLED_CLIENTS else (),
    )


class Runs(Sequence[Run]):
    """One method with several seeds: a sequence of runs with their means.

    ``deviation`` is always the sample standard deviation over seeds, 0 for a single one.

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
        self.name, self._runs = name, list(runs)

    @overload
    def __getitem__(self, place: int) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> list[Run]: ...
    def __getitem__(self, place: int | slice) -> Run | list[Run]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order of the runs."""
        return [run.key.seed for run in self._runs]

    @property
    def histories(self) -> list[list[dict[str, Any]]]:
        """The history of every seed."""
        return [run.history for run in self._runs]

    @property
    def entry(self) -> ReportEntry:
        """All seeds as one entry of a report."""
        return ReportEntry.from_seeds(self.name, [entry_from_run(run, self.name) for run in self._runs])

    def curve(self, metric: str = ACCURACY) -> list[tuple[int, SeedStatistics]]:
        """Return (round, spread over seeds) of a metric for the rounds in which all seeds measured it."""
        points = metric_over_seeds(self.histories, metric)
        if not points:
            self._refuse_metric(metric)
        return points

    def last(self, metric: str = ACCURACY, count: int = 5) -> SeedStatistics:
        """Return the spread over seeds of the mean of the last ``count`` measurements."""
        return self._spread(metric, [metrics.last(history, metric, count) for history in self.histories])

    def best(self, metric: str = ACCURACY) -> SeedStatistics:
        """Return the spread over seeds of the best measurement."""
        return self._spread(metric, [metrics.best(history, metric) for history in self.histories])

    def rounds_to(self, target: float, metric: str = ACCURACY) -> SeedStatistics | None:
        """Return the spread over seeds of the first round that reached the target; None unless all seeds did."""
        rounds = [metrics.rounds_to(history, target, metric) for history in self.histories]
        return None if None in rounds else seed_statistics([float(each) for each in rounds if each is not None])

    def summary(self, target: float | None = None) -> dict[str, Any]:
        """Return the numbers of `hansa.runs.metrics.summarize`, averaged over seeds."""
        return summarize_seeds(self.histories, target)[0]

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with one row for each round and seed, running totals included."""
        rows = [
            {"seed": run.key.seed, **record} for run in self._runs for record in metrics.running_totals(run.history)
        ]
        return _pandas().DataFrame(rows)

    def means(self) -> pandas.DataFrame:
        """Return a pandas frame with one row for each round: means over seeds, and NAME_std beside them."""
        rows = []
        for records in aligned_rounds(self.histories):
            row: dict[str, Any] = {"round": records[0]["round"]}
            for name in records[0]:
                values = [record.get(name) for record in records]
                if name != "round" and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
                    over = seed_statistics([float(value) for value in values if value is not None])
                    row[name], row[f"{name}_std"] = over.mean, over.std
            rows.append(row)
        return _pandas().DataFrame(rows)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """Draw the mean curve with its band; see `Comparison.plot`."""
        return figure.draw_curves([self.entry], path, metric, x)

    def report(self, path: Path | str, title: str | None = None) -> Path:
        """Write a self-contained HTML page of curves, numbers and citations."""
        citations = bibtex([self._runs[0].algorithm])
        return write_page(path, [self.entry], title=self.name if title is None else title, citations=citations)

    def _spread(self, metric: str, values: Sequence[float | None]) -> SeedStatistics:
        if None in values:
            self._refuse_metric(metric)
        return seed_statistics([value for value in values if value is not None])

    def _refuse_metric(self, metric: str) -> NoReturn:
        known = {name for history in self.histories for record in history for name in record}
        raise HansaError(f"not every seed has the metric {metric!r}. {suggestion(metric, known)}")

    def __repr__(self) -> str:
        means, spreads = summarize_seeds(self.histories)
        score = ""
        for metric in (ACCURACY, "test_loss"):
            key = f"last5_{metric}"
            if means.get(key) is not None:
                deviation = spreads[key].std if key in spreads else None
                score = formats.format_mean_std(formats.formatter_of(metric), means[key], deviation)
                score = f", {metric} {score}"
                break
        return f"Runs({self.name!r}, seeds {self.seeds}{score})"

    def _repr_html_(self) -> str:
        return ranking_html(rank([self.entry]), None)


class Comparison(Mapping[str, Runs]):
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
        self._methods = dict(methods)

    def __getitem__(self, name: str) -> Runs:
        if name not in self._methods:
            raise KeyError(f"no method {name!r} was compared. {suggestion(name, self._methods)}")
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    @property
    def entries(self) -> list[ReportEntry]:
        """The methods as entries of a report."""
        return [runs.entry for runs in self._methods.values()]

    @property
    def best(self) -> str:
        """The method that ranks first by its mean over seeds."""
        return self.ranking()[0].entry.name

    def ranking(self, target: float | None = None) -> list[RankedEntry]:
        """Return the methods from best to worst, with their numbers."""
        return rank(self.entries, target)

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with one row for each method, round and seed, running totals included."""
        frames = [runs.frame().assign(method=name) for name, runs in self._methods.items()]
        joined = _pandas().concat(frames, ignore_index=True)
        return joined[["method", *(name for name in joined.columns if name != "method")]]

    def table(self, target: float | None = None) -> pandas.DataFrame:
        """Return a pandas frame of the ranking with one row for each method: means and NAME_std over seeds."""
        rows = []
        for ranked in self.ranking(target):
            deviations = {f"{name}_std": over.std for name, over in ranked.spreads.items()}
            first = {"method": ranked.entry.name, "seeds": len(ranked.entry.runs)}
            rows.append({**first, **ranked.numbers, **deviations})
        return _pandas().DataFrame(rows)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """Draw mean curves with bands of one standard deviation as a matplotlib figure. Needs ``hansa[plot]``.

        Args:
            path: Where to write the figure, if given; the suffix chooses the format.
            metric: The column to draw; by default the accuracy, or else the loss.
            x: The x axis: round, up_bits, server_bits, bits, wall_seconds or simulated_total_seconds.
        """
        return figure.draw_curves(self.entries, path, metric, x)

    def report(self, path: Path | str, title: str = "Federated methods compared") -> Path:
        """Write a self-contained HTML page of curves, numbers and citations."""
        citations = bibtex(runs[0].algorithm for runs in self._methods.values())
        return write_page(path, self.entries, title=title, citations=citations)

    def __repr__(self) -> str:
        target = common_target(self.entries)
        ranking = self.ranking(target)
        columns = ranking_columns(ranking, target)[:4]
        rows = [["method", *(column.heading for column in columns)]]
        rows += [[r.entry.name, *(format_cell(r, column.key, column.write) for column in columns)] for r in ranking]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        seeds = sorted({len(runs) for runs in self._methods.values()})
        return "\n".join([f"Comparison of {len(self)} methods, {'/'.join(map(str, seeds))} seeds each", *lines])

    def _repr_html_(self) -> str:
        target = common_target(self.entries)
        return ranking_html(self.ranking(target), target)


def run_html(run: Run) -> str:
    """Return the numbers of a run as a small HTML table, for notebooks."""
    summary = metrics.summarize(run.history)
    rows = [("rounds", str(run.state.round)), ("seed", str(run.key.seed)), ("parameters", f"{run.params.numel():,}")]
    for key in (ACCURACY, "test_loss", "train_loss", "up_bits", "down_bits", "peer_bits", "wall_seconds"):
        if summary.get(key):
            rows.append((key.replace("_", " "), formats.formatter_of(key)(summary[key])))
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(run.algorithm.name)} on {escape(run.task.name)}</caption>{cells}</table>"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise HansaError("frames need pandas: pip install 'hansa[report]'.") from error
    return pandas
