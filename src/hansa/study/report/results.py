"""What came out, in Python: one method over its seeds, and methods side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hansa.core.citations import bibtex
from hansa.core.errors import HansaError, suggestion
from hansa.runs import metrics
from hansa.runs.driver import Run
from hansa.runs.folder import environment
from hansa.runs.seed_statistics import Spread, aligned, combined, over_seeds, spread
from hansa.study.report import figure, formats
from hansa.study.report.entries import Entry, Standing, common_target, rank
from hansa.study.report.page import write
from hansa.study.report.ranking import cell, columns, table_html

if TYPE_CHECKING:
    import pandas


MOST_HOLDINGS = 20_000
"""Of more clients than this the page does not say what each holds."""


def entry_of(run: Run, name: str) -> Entry:
    """A living run as an entry of a report."""
    clients = run.clients().by_client()
    return Entry(
        name,
        run.history,
        environment=environment(),
        seed=run.key.seed,
        made=repr(run.algorithm),
        clients=clients if clients.rows else None,
        holds=_holdings(getattr(run.task, "data", None)),
    )


def _holdings(held: Any) -> Sequence[Sequence[int]]:
    """How many samples of each label each client holds; nothing of data that has no labels, or of very many clients."""
    labelled = getattr(held, "classes", None) is not None and getattr(held.targets, "ndim", 0) == 1
    if not labelled or held.population > MOST_HOLDINGS:
        return ()
    found: list[list[int]] = held.label_counts().tolist()
    return found


class Runs(Sequence[Run]):
    """One method over several seeds: a sequence of runs, and their means.

    ``deviation`` is everywhere the sample standard deviation over seeds, 0 for a single one.

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
    def entry(self) -> Entry:
        """All seeds as one entry of a report."""
        return Entry.of_seeds(self.name, [entry_of(run, self.name) for run in self._runs])

    def curve(self, metric: str = metrics.ACCURACY) -> list[tuple[int, Spread]]:
        """(round, mean and spread over seeds) of a metric, where all seeds measured it."""
        found = over_seeds(self.histories, metric)
        if not found:
            _refuse_metric(metric, self.histories)
        return found

    def last(self, metric: str = metrics.ACCURACY, count: int = 5) -> Spread:
        """Over seeds, the mean of each one's last ``count`` measurements."""
        return self._over(metric, [metrics.last(history, metric, count) for history in self.histories])

    def best(self, metric: str = metrics.ACCURACY) -> Spread:
        """Over seeds, the best that each one reached."""
        return self._over(metric, [metrics.best(history, metric) for history in self.histories])

    def rounds_to(self, target: float, metric: str = metrics.ACCURACY) -> Spread | None:
        """Over seeds, the first round at whose end each had reached the target; None unless all did."""
        found = [metrics.rounds_to(history, target, metric) for history in self.histories]
        return None if None in found else spread([float(round) for round in found if round is not None])

    def summary(self, target: float | None = None) -> dict[str, Any]:
        """The numbers of `hansa.runs.metrics.summarize`, as means over seeds."""
        return combined(self.histories, target)[0]

    def frame(self) -> pandas.DataFrame:
        """A pandas frame: a row a round and seed, running totals included."""
        rows = [
            {"seed": run.key.seed, **record} for run in self._runs for record in metrics.running_totals(run.history)
        ]
        return _pandas().DataFrame(rows)

    def means(self) -> pandas.DataFrame:
        """A pandas frame: a row a round, of every number its mean over seeds and, as NAME_deviation, how far apart."""
        rows = []
        for records in aligned(self.histories):
            row: dict[str, Any] = {"round": records[0]["round"]}
            for name in records[0]:
                values = [record.get(name) for record in records]
                if name != "round" and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
                    found = spread([float(value) for value in values if value is not None])
                    row[name], row[f"{name}_deviation"] = found.mean, found.deviation
            rows.append(row)
        return _pandas().DataFrame(rows)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """The mean curve and its band; see `Comparison.plot`."""
        return figure.draw([self.entry], path, metric, x)

    def report(self, path: Path | str, title: str | None = None) -> Path:
        """Write a page of curves, numbers and citations: one HTML file that opens offline."""
        citations = bibtex([self._runs[0].algorithm])
        return write(path, [self.entry], title=self.name if title is None else title, citations=citations)

    def _over(self, metric: str, values: Sequence[float | None]) -> Spread:
        if None in values:
            _refuse_metric(metric, self.histories)
        return spread([value for value in values if value is not None])

    def __repr__(self) -> str:
        return f"Runs({self.name!r}, seeds {self.seeds}{_score(combined(self.histories))})"

    def _repr_html_(self) -> str:
        return table_html(rank([self.entry]), None)


class Comparison(Mapping[str, Runs]):
    """Methods side by side, each over its seeds: ``comparison["fedavg"]`` is one of them.

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
    def entries(self) -> list[Entry]:
        """The methods as entries of a report."""
        return [runs.entry for runs in self._methods.values()]

    @property
    def best(self) -> str:
        """The method that ranks first: by the mean over seeds, never by the luckiest of them."""
        return self.ranking()[0].entry.name

    def ranking(self, target: float | None = None) -> list[Standing]:
        """The methods from best to worst, with the numbers that say so."""
        return rank(self.entries, target)

    def frame(self) -> pandas.DataFrame:
        """A pandas frame: a row a method, round and seed, running totals included."""
        frames = [runs.frame().assign(method=name) for name, runs in self._methods.items()]
        found = _pandas().concat(frames, ignore_index=True)
        return found[["method", *(name for name in found.columns if name != "method")]]

    def table(self, target: float | None = None) -> pandas.DataFrame:
        """A pandas frame of the ranking: a row a method, means and NAME_deviation over seeds."""
        rows = []
        for standing in self.ranking(target):
            apart = {f"{name}_deviation": found.deviation for name, found in standing.spreads.items()}
            rows.append({"method": standing.entry.name, "seeds": len(standing.entry.runs), **standing.numbers, **apart})
        return _pandas().DataFrame(rows)

    def plot(self, path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
        """Mean curves with bands of one standard deviation: a matplotlib figure, written to ``path`` if one is given.

        ``x`` is round, server_bits, bits, wall_seconds or simulated_total_seconds. Needs ``hansa[plot]``.
        """
        return figure.draw(self.entries, path, metric, x)

    def report(self, path: Path | str, title: str = "Federated methods compared") -> Path:
        """Write a page of curves, numbers and citations: one HTML file that opens offline."""
        citations = bibtex(runs[0].algorithm for runs in self._methods.values())
        return write(path, self.entries, title=title, citations=citations)

    def __repr__(self) -> str:
        target = common_target(self.entries)
        standings = self.ranking(target)
        shown = columns(standings, target)[:4]
        rows = [["method", *(heading for heading, *_ in shown)]]
        rows += [[s.entry.name, *(cell(s, key, write) for _, key, write, _ in shown)] for s in standings]
        wide = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])])  # names to the left, numbers right
            for row in rows
        ]
        seeds = sorted({len(runs) for runs in self._methods.values()})
        return "\n".join([f"Comparison of {len(self)} methods, {'/'.join(map(str, seeds))} seeds each", *lines])

    def _repr_html_(self) -> str:
        target = common_target(self.entries)
        return table_html(self.ranking(target), target)


def run_html(run: Run) -> str:
    """A run for a notebook: its numbers in a small table."""
    found = metrics.summarize(run.history)
    rows = [("rounds", str(run.state.round)), ("seed", str(run.key.seed)), ("parameters", f"{run.params.numel():,}")]
    for key, write_number in (
        ("test_accuracy", formats.percent), ("test_loss", formats.number), ("train_loss", formats.number),
        ("up_bits", formats.bits), ("down_bits", formats.bits), ("peer_bits", formats.bits),
        ("wall_seconds", formats.duration),
    ):  # fmt: skip
        if found.get(key):
            rows.append((key.replace("_", " "), write_number(found[key])))
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(run.algorithm.name)} on {escape(run.task.name)}</caption>{cells}</table>"


def _score(found: tuple[Mapping[str, Any], Mapping[str, Spread]]) -> str:
    means, spreads = found
    for metric, write_number in ((metrics.ACCURACY, formats.percent), ("test_loss", formats.number)):
        key = f"last5_{metric}"
        if means.get(key) is not None:
            apart = spreads.get(key)
            told = formats.give_or_take(write_number, means[key], None if apart is None else apart.deviation)
            return f", {metric} {told}"
    return ""


def _refuse_metric(metric: str, histories: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    known = {name for history in histories for record in history for name in record}
    raise HansaError(f"not every seed has the metric {metric!r}. {suggestion(metric, known)}")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise HansaError("frames need pandas: pip install 'hansa[report]'.") from error
    return pandas
