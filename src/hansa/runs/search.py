"""Hyperparameter search: optuna proposes points, and trials that are worse than the median are pruned.

All trials are in one JSON file. A proposal is a function of the seed, its number and the previous trials. So an
interrupted search proposes the same point again, and its runs are resumed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hansa.core.errors import HansaError, check_integer, invalid_argument, short_repr
from hansa.core.keys import Key
from hansa.runs.columns import WINDOW, MetricFacts, lower_is_better, split_metric
from hansa.runs.driver import Record, Run
from hansa.runs.metrics import last, text_table
from hansa.runs.store import io

SEARCH = "search.json"
DONE, PRUNED, FAILED = "complete", "pruned", "failed"
_RANGE = re.compile(r"([^.,\s][^,\s]*?)\.\.([^,\s]+?)(:log)?")


@dataclass(frozen=True, slots=True)
class search_range:
    """A range of numbers for `hansa.search`.

    Args:
        low: The smallest value.
        high: The largest value; the range is of integers if both are.
        log: Whether to sample on a log scale.

    >>> search_range(1e-3, 1.0, log=True)
    search_range(low=0.001, high=1.0, log=True)
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise invalid_argument("search_range", name, value, "a finite number")
        if self.low >= self.high:
            raise invalid_argument("search_range", "high", self.high, f"more than low, which is {self.low}")
        if self.log and self.low <= 0:
            raise invalid_argument("search_range", "low", self.low, "more than 0 on a log scale")


Axis: TypeAlias = search_range | Sequence[Any]


def parse_range(text: str) -> search_range | None:
    """Parse LOW..HIGH or LOW..HIGH:log; return None for anything else.

    >>> parse_range("1e-3..1:log"), parse_range("1..20"), parse_range("0.1,0.2")
    (search_range(low=0.001, high=1.0, log=True), search_range(low=1, high=20, log=False), None)
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    try:
        low, high = (int(bound) if re.fullmatch(r"[+-]?\d+", bound) else float(bound) for bound in match.groups()[:2])
    except ValueError:
        return None
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
    return search_range(low, high, match[3] is not None)


def parse_axes(grid: Sequence[str]) -> dict[str, Axis]:
    """Parse the axes of a grid or a search: a list of values, or a range.

    >>> parse_axes(["local.lr=1e-3..1:log", "local.steps=5,10"])
    {'local.lr': search_range(low=0.001, high=1.0, log=True), 'local.steps': ['5', '10']}
    """
    axes: dict[str, Axis] = {}
    for axis in grid:
        key, equals, values = axis.partition("=")
        if not equals or not key or not values:
            raise HansaError(f"{axis}: expected KEY=V1,V2,..., such as local.lr=0.01,0.1.")
        if key in axes:
            raise HansaError(f"{axis}: {key} is given twice.")
        if key in ("seed", "seeds"):
            raise HansaError(f"{axis}: points are compared by their means over seeds. Use --seeds {values}.")
        axes[key] = parse_range(values) or split_values(values)
    return axes


def split_values(text: str) -> list[str]:
    """Split values at commas that are not inside brackets.

    >>> split_values("0.1,{kind: cosine, lr: 0.1, rounds: 5},[1,2]")
    ['0.1', '{kind: cosine, lr: 0.1, rounds: 5}', '[1,2]']
    """
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values if value.strip()]


def grid_points(axes: Mapping[str, Axis]) -> list[dict[str, Any]]:
    """Return every point of a grid as its values by key.

    >>> grid_points(parse_axes(["local.lr=0.1,0.2", "local.steps=5"]))
    [{'local.lr': '0.1', 'local.steps': '5'}, {'local.lr': '0.2', 'local.steps': '5'}]
    """
    values: list[Sequence[Any]] = []
    for key, axis in axes.items():
        if isinstance(axis, search_range):
            raise HansaError(f"{key}: a grid needs values, not a range. Ranges need --search optuna.")
        values.append(axis)
    return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*values)]


class Trial(NamedTuple):
    """An evaluated point; its value is the mean over seeds of `hansa.runs.metrics.last`."""

    number: int
    point: dict[str, Any]
    status: str
    value: float | None
    steps: dict[int, float]


class Search:
    """Proposes points and records the values of trials.

    Args:
        axes: For each name a list of values or a `search_range`.
        metric: The column to optimize, or COLUMN:lower if its direction is unknown; by default the task's main metric,
            on its validation rows if it has any.
        task: The task, which declares the directions of its metrics.
        seeds: The number of runs per trial.
        rounds: The number of rounds of each run.
        seed: The seed of the proposals.
        prune: Whether to stop trials that are worse than the median of earlier ones at the same step; never the first
            five trials, nor in the first fifth of a run.
        folder: Where the trials are stored, for resuming.
        facts: Further settings, which must not change when the search is resumed.
        window: How many of the last measurements a score averages.
    """

    def __init__(
        self,
        axes: Mapping[str, Axis],
        metric: str | None = None,
        *,
        task: object = None,
        seeds: int = 1,
        rounds: int = 1,
        seed: int = 0,
        prune: bool = True,
        folder: Path | str | None = None,
        facts: Mapping[str, Any] | None = None,
        window: int = WINDOW,
    ) -> None:
        if not axes:
            raise HansaError("search: expected at least one axis, such as local.lr=1e-3..1:log.")
        self._optuna = optuna = _import_optuna()
        self.axes, self.seeds, self.rounds, self.window, self.prune = dict(axes), seeds, rounds, window, prune
        metric_facts = MetricFacts.of_task(task)
        metric = metric or metric_facts.tuning or "loss"
        self.metric, directions = split_metric(metric, metric_facts.better)
        self._falls = lower_is_better(self.metric, directions)
        self._key = Key(seed)
        self._path = None if folder is None else Path(folder) / SEARCH
        self._settings: dict[str, Any] = {
            "axes": {name: repr(axis) for name, axis in self.axes.items()},
            "metric": metric,
            "seeds": seeds,
            "rounds": rounds,
            "seed": seed,
            "prune": prune,
            "window": window,
            **(facts or {}),
        }
        states = optuna.trial.TrialState
        self._states = {DONE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}
        distributions = optuna.distributions
        self._distributions = {name: _distribution(distributions, name, axis) for name, axis in self.axes.items()}
        pruner = optuna.pruners.MedianPruner(5, max(1, rounds // 5)) if prune else optuna.pruners.NopPruner()
        self._study = optuna.create_study(direction="minimize" if self._falls else "maximize", pruner=pruner)
        self._recorded: list[dict[str, Any]] = []
        if self._path is not None and self._path.exists():
            self._load(self._path)

    @property
    def trials(self) -> list[Trial]:
        """The finished trials."""
        return [
            Trial(number, self.point(each["drawn"]), each["status"], each["value"], dict(each["steps"]))
            for number, each in enumerate(self._recorded)
        ]

    def ask(self, trials: int) -> Iterator[RunningTrial]:
        """Yield new trials until there are ``trials``; finish each before the next."""
        check_integer("search", "trials", trials)
        for number in range(len(self._recorded), trials):
            seed = int.from_bytes(self._key.child("search", number).digest(4), "little")
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            yield RunningTrial(self, self._study.ask(self._distributions))
            if len(self._recorded) == number:
                raise HansaError("search: finish() every trial before the next one.")

    def point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of optuna's parameters; those of a range are rounded to six digits."""
        point: dict[str, Any] = {}
        for name, axis in self.axes.items():
            value = params[name]
            if not isinstance(axis, search_range):
                point[name] = axis[self._distributions[name].choices.index(value)]
            else:
                point[name] = value if isinstance(value, int) else min(max(float(f"{value:.6g}"), axis.low), axis.high)
        return point

    @property
    def best(self) -> Trial | None:
        """The best finished trial."""
        return next((trial for trial in self._ranked() if trial.value is not None), None)

    def _ranked(self) -> list[Trial]:
        sign = 1 if self._falls else -1
        return sorted(self.trials, key=lambda trial: (trial.value is None, sign * (trial.value or 0.0)))

    def table(self) -> str:
        """Return all trials as text, the best first."""
        rows = [{"trial": t.number, **t.point, self.metric: t.value, "status": t.status} for t in self._ranked()]
        return text_table(rows, ("trial", *self.axes, self.metric, "status"), len(rows) or 1)

    def __repr__(self) -> str:
        best = self.best
        best_text = "" if best is None else f", best {self.metric} {best.value:.4g} at {best.point}"
        return f"Search({self.counts()}{best_text})"

    def counts(self) -> str:
        """Return the number of trials by outcome, as text."""
        counts = Counter(trial.status for trial in self.trials)
        by_status = ", ".join(f"{counts[status]} {status}" for status in (DONE, PRUNED, FAILED) if counts[status])
        return f"{counts.total()} trials: {by_status or 'none'}"

    def record(self, optuna_trial: Any, status: str, value: float | None = None) -> None:
        """Record a finished trial."""
        told = self._study.tell(optuna_trial, value, state=self._states[status])
        steps = list(told.intermediate_values.items())
        self._recorded.append({"drawn": optuna_trial.params, "status": status, "value": value, "steps": steps})
        if self._path is not None:
            io.make_folder(self._path.parent.resolve())
            io.write_json(self._path, {"search": self._settings, "trials": self._recorded})

    def _load(self, path: Path) -> None:
        """Load the trials of an interrupted search."""
        try:
            content = io.read_json(path)
            changed = [name for name, value in self._settings.items() if content["search"].get(name) != value]
            for trial in [] if changed else content["trials"]:
                self.point(trial["drawn"])
                steps = {int(step): float(value) for step, value in trial["steps"]}
                state, params = self._states[trial["status"]], trial["drawn"]
                options = {"distributions": self._distributions, "intermediate_values": steps}
                restored = self._optuna.trial.create_trial(state=state, value=trial["value"], params=params, **options)
                self._study.add_trial(restored)
                self._recorded.append({**trial, "steps": list(steps.items())})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HansaError(f"{path}: not a search that can be resumed: {short_repr(str(error))}.") from error
        if changed:
            raise HansaError(f"{path}: holds a search with another {', '.join(changed)}. Choose another folder.")


class RunningTrial:
    """An active trial; as a callback of its runs it stops them when the trial is pruned."""

    def __init__(self, search: Search, optuna_trial: Any) -> None:
        self._search, self._optuna_trial = search, optuna_trial
        self.number, self.point = int(optuna_trial.number), search.point(optuna_trial.params)
        self.pruned = False
        self._values: list[float] = []
        self._reported = 0

    def next_seed(self) -> None:
        """Begin the next seed."""
        self._values.append(math.nan)
        self._reported = 0

    def __call__(self, run: Run, record: Record) -> bool:
        return self.report(run.history)

    def report(self, history: Sequence[Record]) -> bool:
        """Report the history of the current run so far; return whether the trial is pruned.

        The value at a step is the mean over the finished seeds and the current one. Rounds after the pruning are
        ignored, so that a run loaded from a folder counts like one that was stopped at that round.
        """
        search, metric = self._search, self._search.metric
        while self._reported < len(history) and not self.pruned:
            self._reported += 1
            so_far = history[: self._reported]
            value = so_far[-1].get(metric)
            if not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):  # if this is the last value, the run diverged and the trial fails
                self._values[-1] = math.nan
                continue
            value_now, running = (last(so_far, metric, search.window, few_as_final=final) for final in (True, False))
            self._values[-1] = math.nan if value_now is None else value_now
            # a running mean from the first round on, so that the values of one run are comparable for pruning
            mean = math.fsum([*self._values[:-1], math.nan if running is None else running]) / len(self._values)
            step = (len(self._values) - 1) * search.rounds + int(so_far[-1]["round"])
            self._optuna_trial.report(mean, step)
            self.pruned = bool(self._optuna_trial.should_prune())
        return self.pruned

    def finish(self, *, failed: bool = False) -> None:
        """End the trial: finished with all seeds, pruned, or failed."""
        finished = len(self._values) == self._search.seeds and all(map(math.isfinite, self._values))
        status = FAILED if failed or not (finished or self.pruned) else PRUNED if self.pruned else DONE
        value = math.fsum(self._values) / len(self._values) if status == DONE else None
        self._search.record(self._optuna_trial, status, value)


def _distribution(distributions: Any, name: str, axis: Axis) -> Any:
    """Return the optuna distribution of an axis."""
    if isinstance(axis, search_range):
        integers = isinstance(axis.low, int) and isinstance(axis.high, int)
        kind = distributions.IntDistribution if integers else distributions.FloatDistribution
        return kind(axis.low, axis.high, log=axis.log)
    if isinstance(axis, str) or not len(axis):
        raise invalid_argument("search", name, axis, "some values, or hansa.search_range(low, high)")
    return distributions.CategoricalDistribution([json.dumps(value, sort_keys=True, default=repr) for value in axis])


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise HansaError("a search needs optuna: pip install 'hansa[optuna]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
