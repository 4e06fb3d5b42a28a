"""A search for the best point: optuna proposes, runs are made, those that lag behind the median are pruned.

What was tried stands in one JSON file. A proposal is a function of the seed, its number and the trials before it, so a
search that was stopped or killed goes on as if nothing had happened: it proposes the same point again, whose runs go
on where they were.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hansa.core.errors import HansaError, check_integer, invalid_argument, short_repr
from hansa.core.keys import Key
from hansa.runs.driver import Record, Run
from hansa.runs.metrics import last, smaller_is_better
from hansa.runs.store import io
from hansa.runs.text_table import text_table

SEARCH = "search.json"
DONE, PRUNED, FAILED = "complete", "pruned", "failed"
_RANGE = re.compile(r"([^.,\s][^,\s]*?)\.\.([^,\s]+?)(:log)?")


@dataclass(frozen=True, slots=True)
class between:
    """Every number from ``low`` to ``high``, whole ones where both are; with ``log`` equally likely on a log scale.

    >>> between(1e-3, 1.0, log=True)
    between(low=0.001, high=1.0, log=True)
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise invalid_argument("between", name, value, "a finite number")
        if self.low >= self.high:
            raise invalid_argument("between", "high", self.high, f"more than low, which is {self.low}")
        if self.log and self.low <= 0:
            raise invalid_argument("between", "low", self.low, "more than 0 on a log scale")


Axis: TypeAlias = between | Sequence[Any]


def read_range(text: str) -> between | None:
    """A range in the grammar of sweeps, LOW..HIGH or LOW..HIGH:log; None for anything else.

    >>> read_range("1e-3..1:log"), read_range("1..20"), read_range("0.1,0.2")
    (between(low=0.001, high=1.0, log=True), between(low=1, high=20, log=False), None)
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    try:
        low, high = (int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word) for word in found.groups()[:2])
    except ValueError:
        return None
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
    return between(low, high, found[3] is not None)


@dataclass(slots=True)
class Trial:
    """A point that was tried: the value is the mean over seeds of the metric's last five."""

    number: int
    point: dict[str, Any]
    drawn: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    value: float | None = None
    steps: dict[int, float] = field(default_factory=dict)


class Search:
    """Proposes points of ``axes`` and learns of their values; with a ``folder`` it remembers them.

    ``prune`` ends a trial whose value is worse than the median of those before it at the same point of their way; the
    first five trials, and the first fifth of a run, are left in peace.
    """

    def __init__(
        self,
        axes: Mapping[str, Axis],
        metric: str = "test_accuracy",
        *,
        seeds: int = 1,
        rounds: int = 1,
        seed: int = 0,
        prune: bool = True,
        folder: Path | str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if not axes:
            raise HansaError("search: expected at least one axis, such as local.lr=1e-3..1:log.")
        self._optuna = _optuna()
        self.axes, self.metric, self.seeds, self.rounds = dict(axes), metric, seeds, rounds
        self._key = Key(seed)
        self._path = None if folder is None else Path(folder) / SEARCH
        self._about: dict[str, Any] = {
            "axes": {name: repr(axis) for name, axis in self.axes.items()},
            "metric": metric,
            "seeds": seeds,
            "rounds": rounds,
            "seed": seed,
            "prune": prune,
            **(facts or {}),
        }
        self.trials: list[Trial] = []
        o = self._optuna
        pruner = o.pruners.MedianPruner(5, max(1, rounds // 5)) if prune else o.pruners.NopPruner()
        self._study = o.create_study(direction="minimize" if smaller_is_better(metric) else "maximize", pruner=pruner)
        self._kinds = {name: self._distribution(name, axis) for name, axis in self.axes.items()}
        for trial in self._remembered():
            self.trials.append(trial)
            self._study.add_trial(self._frozen(trial))

    def ask(self, trials: int) -> Iterator[Asked]:
        """Points until there are so many trials; each must be told its end before the next."""
        check_integer("search", "trials", trials)
        while len(self.trials) < trials:
            number = len(self.trials)
            seed = int.from_bytes(self._key.child("search", number).digest(4), "little")
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            asked = Asked(self, self._study.ask(self._kinds), number)
            yield asked
            if len(self.trials) == number:
                raise HansaError("search: a trial was given no end: tell() it its value, or None.")

    @property
    def best(self) -> Trial | None:
        """The best of those that were finished."""
        sign = 1 if smaller_is_better(self.metric) else -1
        done = [trial for trial in self.trials if trial.status == DONE and trial.value is not None]
        return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def table(self) -> str:
        """All trials as text, the best first."""
        sign = 1 if smaller_is_better(self.metric) else -1
        ranked = sorted(self.trials, key=lambda t: (t.value is None, sign * (t.value or 0.0)))
        rows = [{"trial": t.number, **t.point, self.metric: t.value, "status": t.status} for t in ranked]
        return text_table(rows, ("trial", *self.axes, self.metric, "status"), len(rows) or 1)

    def __repr__(self) -> str:
        best = self.best
        told = "" if best is None else f", best {self.metric} {best.value:.4g} at {best.point}"
        return f"Search({self.counts()}{told})"

    def counts(self) -> str:
        """How the trials ended, in words."""
        kinds = [trial.status for trial in self.trials]
        told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in (DONE, PRUNED, FAILED) if kind in kinds)
        return f"{len(kinds)} trials: {told or 'none'}"

    def note(self, trial: Trial, asked: Any) -> None:
        """A trial has ended."""
        states = self._optuna.trial.TrialState
        state = {DONE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}[trial.status]
        self._study.tell(asked, trial.value if trial.status == DONE else None, state=state)
        self.trials.append(trial)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        io.make_folder(self._path.parent.resolve())
        kept = ("drawn", "status", "value")
        told = [
            {**{name: getattr(trial, name) for name in kept}, "steps": list(trial.steps.items())}
            for trial in self.trials
        ]
        content = json.dumps({"search": self._about, "trials": told}, indent=1, allow_nan=False)
        io.write_file(self._path, content.encode())

    def _remembered(self) -> list[Trial]:
        if self._path is None or not self._path.exists():
            return []
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            about = found["search"]
            changed = [name for name in self._about if about.get(name) != self._about[name]]
            trials = [] if changed else [self._read(at, each) for at, each in enumerate(found["trials"])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HansaError(
                f"{self._path}: not a search that can be gone on with: {short_repr(str(error))}."
            ) from error
        if changed:
            raise HansaError(f"{self._path}: holds a search with other {', '.join(changed)}. Choose another folder.")
        return trials

    def _read(self, number: int, told: Mapping[str, Any]) -> Trial:
        steps = {int(step): float(value) for step, value in told["steps"]}
        if told["status"] not in (DONE, PRUNED, FAILED):
            raise ValueError(f"status {told['status']}")
        return Trial(number, self.point(told["drawn"]), told["drawn"], told["status"], told["value"], steps)

    def _distribution(self, name: str, axis: Axis) -> Any:
        kinds = self._optuna.distributions
        if not isinstance(axis, between):
            if isinstance(axis, str) or not len(axis):
                raise invalid_argument("search", name, axis, "some values, or hansa.between(low, high)")
            return kinds.CategoricalDistribution([json.dumps(value, sort_keys=True, default=repr) for value in axis])
        if isinstance(axis.low, int) and isinstance(axis.high, int):
            return kinds.IntDistribution(axis.low, axis.high, log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def point(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """The values that optuna's stand for; of a range as many digits as anybody reads."""
        found: dict[str, Any] = {}
        for name, axis in self.axes.items():
            value = drawn[name]
            if isinstance(axis, between):
                found[name] = value if isinstance(value, int) else min(max(float(f"{value:.6g}"), axis.low), axis.high)
            else:
                found[name] = axis[self._kinds[name].choices.index(value)]
        return found

    def _frozen(self, trial: Trial) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state={DONE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}[trial.status],
            value=trial.value if trial.status == DONE else None,
            params=trial.drawn,
            distributions=self._kinds,
            intermediate_values=trial.steps,
        )


class Asked:
    """A trial under way. Called after a round, as a callback, it stops a run whose trial is hopeless."""

    def __init__(self, search: Search, asked: Any, number: int) -> None:
        self._search, self._asked = search, asked
        self.trial = Trial(number, search.point(asked.params), dict(asked.params))
        self.hopeless = False
        self._values: list[float] = []
        self._seen: set[int] = set()

    @property
    def point(self) -> dict[str, Any]:
        """What to try."""
        return self.trial.point

    def next_seed(self) -> None:
        """A run begins, or one that was made earlier is taken."""
        self._values.append(math.nan)
        self._seen = set()

    def __call__(self, run: Run, record: Record) -> bool:
        return self.take(run.history)

    def take(self, history: Sequence[Record]) -> bool:
        """What a run has come to so far; true where the trial is hopeless.

        The value at a point of the way is the mean over the seeds that are done and the one under way.
        """
        search, metric = self._search, self._search.metric
        for at, record in enumerate(history):
            value = record.get(metric)
            if record["round"] in self._seen or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            self._seen.add(record["round"])
            now = last(history[: at + 1], metric)
            self._values[-1] = math.nan if now is None else now
            mean = math.fsum(self._values) / len(self._values)
            step = (len(self._values) - 1) * search.rounds + int(record["round"])
            self.trial.steps[step] = mean
            self._asked.report(mean, step)
            self.hopeless = self.hopeless or bool(self._asked.should_prune())
        return self.hopeless

    def tell(self, *, failed: bool = False) -> Trial:
        """The trial has ended: finished with all seeds, pruned, or failed."""
        finished = len(self._values) == self._search.seeds and all(map(math.isfinite, self._values))
        if failed or not (finished or self.hopeless):
            self.trial.status = FAILED
        elif self.hopeless:
            self.trial.status = PRUNED
        else:
            self.trial.status, self.trial.value = DONE, math.fsum(self._values) / len(self._values)
        self._search.note(self.trial, self._asked)
        return self.trial


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise HansaError("a search needs optuna: pip install 'hansa[optuna]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
