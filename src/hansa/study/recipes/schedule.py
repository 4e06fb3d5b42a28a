"""Which runs a list of recipes needs, which of them are done, and how long the others will take.

Nothing here runs code that a recipe names, nor changes a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hansa.config import Config, from_yaml
from hansa.core.errors import HansaError
from hansa.runs.experiment import config_digest
from hansa.runs.folder import FAILED, FINISHED, RunFolder
from hansa.runs.seed_group import expand_seeds
from hansa.study.recipes.recipe import Recipe, RecipeCell
from hansa.study.report.formats import format_duration

STEP_COSTS = {"logistic": 1.0, "cnn_29k": 6.0, "lstm": 75.0, "resnet18": 375.0, "convmixer": 375.0}
"""The cost of one client's step relative to others: recipes of unknown time are ordered by it."""
OTHER_STEP_COST = 6.0
ROWS, CLIENTS = 50_000, 50
"""The training rows and clients of a data set, where a configuration does not say."""


class PlannedCell(NamedTuple):
    """One row in one column of a recipe, with its configuration."""

    cell: RecipeCell
    config: Config


class RecipePlan(NamedTuple):
    """A recipe at a scale with its configurations."""

    recipe: Recipe
    cells: Sequence[PlannedCell]

    def runs(self) -> Iterator[Config]:
        """Yield the configuration of every run: of each seed of each cell, each run once."""
        seen = set()
        for _, config in self.cells:
            for each in expand_seeds(config):
                if (key := run_key(each)) not in seen:
                    seen.add(key)
                    yield each


class RecipeProgress(NamedTuple):
    """How much of a recipe is done, and what is left."""

    plan: RecipePlan
    runs: int
    finished: int
    seconds_left: float
    """The estimated time of the runs that are not finished, one after the other, as far as it is known."""
    unknown: int = 0
    """The number of runs that are not finished and whose time is not known."""
    failed: int = 0
    """The number of runs that have failed."""
    shared_with: str = ""
    """The recipe before this one that runs the last of the runs that both need."""

    @property
    def left(self) -> str:
        """The time left, in words.

        >>> RecipeProgress(None, 9, 3, 4000.0).left, RecipeProgress(None, 9, 3, 0.0, unknown=6).left
        ('about 67 min', 'unknown')
        >>> RecipeProgress(None, 9, 3, 4000.0, unknown=2).left, RecipeProgress(None, 9, 3, 0.0, 0, 0, "open").left
        ('over 67 min', 'with open')
        >>> RecipeProgress(None, 9, 9, 0.0).left, RecipeProgress(None, 9, 8, 0.0, failed=1).left
        ('', '1 failed')
        """
        if self.finished == self.runs:
            return ""
        if self.failed:
            return f"{self.failed} failed"
        if self.shared_with and not self.seconds_left and not self.unknown:
            return f"with {self.shared_with}"
        return describe_time(self.seconds_left, self.unknown)


class RunRecord(NamedTuple):
    """What a run folder says about a run."""

    rounds: int
    seconds: float
    finished: bool
    failed: bool = False


def plan_recipe(recipe: Recipe, scale: str, overrides: Sequence[str] = (), *, building: bool = True) -> RecipePlan:
    """Return the configurations of a recipe.

    Args:
        recipe: The recipe.
        scale: One of its scales.
        overrides: Assignments such as ``workers=1``.
        building: Whether to check components by building them, as in `hansa.config.from_yaml`.

    >>> from hansa.study.recipes import library
    >>> plan = plan_recipe(library()["cams-table-2"], "smoke", building=False)
    >>> len(plan.cells) == len(list(library()["cams-table-2"].cells("smoke")))
    True
    """
    cells = [
        PlannedCell(
            cell,
            from_yaml(yaml.safe_dump(cell.document), overrides, f"{recipe.name}, {cell.label}", building=building),
        )
        for cell in recipe.cells(scale)
    ]
    seeds = [[each.seed for each in expand_seeds(config)] for _, config in cells]
    for planned, own in zip(cells, seeds, strict=True):
        if own != seeds[0]:
            raise HansaError(
                f"{recipe.name}, {planned.cell.label}: its seeds are {own}, those of {cells[0].cell.label} {seeds[0]}. "
                "Rows are compared within seeds: set the same ones for all, in the scale or with --seeds."
            )
    return RecipePlan(recipe, cells)


def run_key(config: Config) -> str:
    """Return what distinguishes a run from others: all that affects its results and its measurements."""
    watched = config.model_dump(mode="json", include={"rounds", "evaluate", "links"})
    return f"{config_digest(config)} {json.dumps(watched, sort_keys=True)}"


class RunRecords:
    """The runs below a folder, found or not, and the speeds that they show.

    Args:
        folder: The folder of the runs.
    """

    def __init__(self, folder: Path) -> None:
        self._runs: dict[str, RunRecord] = {}
        self._round_seconds: dict[str, list[float]] = {}
        self._kinds: dict[str, list[tuple[float, float]]] = {}  # steps and seconds of rounds, by model and data
        for path in sorted(folder.glob("*/seed-*")) + sorted(folder.glob("*")) if folder.is_dir() else []:
            if (run := RunFolder(path)).exists:
                self.add(run)

    def add(self, run: RunFolder) -> None:
        """Add a run, finished or not."""
        try:
            config, summary = run.config, run.summary
        except HansaError:  # damaged: it will be reported when it is needed
            return
        record = RunRecord(
            int(summary["rounds"]),
            float(summary.get("wall_seconds") or 0),
            summary["status"] == FINISHED,
            summary["status"] == FAILED,
        )
        known = self._runs.get(key := run_key(config))
        if known is None or (record.finished, record.rounds) > (known.finished, known.rounds):
            self._runs[key] = record
        if record.rounds and record.seconds:
            a_round = record.seconds / record.rounds
            self._round_seconds.setdefault(_without_seed(config), []).append(a_round)
            self._kinds.setdefault(_kind(config), []).append((client_steps(config), a_round))

    def find(self, config: Config) -> RunRecord | None:
        """Return the record of a run."""
        return self._runs.get(run_key(config))

    def seconds_left(self, config: Config) -> float | None:
        """Estimate the remaining time of a run from recorded ones; None if none is like it.

        The rounds of other seeds take as long. Otherwise those runs with the same model, data and batch size whose
        rounds have the most similar number of steps tell the time of a step: most estimates are then within 40%.
        """
        record = self.find(config)
        if record is not None and record.finished:
            return 0.0
        rounds = config.rounds - (0 if record is None else record.rounds)
        if (same := self._round_seconds.get(_without_seed(config))) is not None:
            return rounds * _median(same)
        if (like := self._kinds.get(_kind(config))) is None:
            return None
        steps = client_steps(config)
        distances = [abs(math.log(other / steps)) for other, _ in like]
        nearest = [
            seconds / other for (other, seconds), far in zip(like, distances, strict=True) if far == min(distances)
        ]
        return rounds * steps * _median(nearest)


def recipe_progress(plans: Iterable[RecipePlan], records: RunRecords) -> list[RecipeProgress]:
    """Return how much of each recipe is done, the one with the least work left first; last those of unknown time.

    A run that several recipes need counts for the first of them only, since it is run once.
    """
    plans = list(plans)
    counted = [_count_runs(plan, list(plan.runs()), records) for plan in plans]
    places = sorted(range(len(plans)), key=lambda place: (
        counted[place].unknown > 0, counted[place].seconds_left, _work_left(plans[place], records), place
    ))  # fmt: skip
    owners: dict[str, str] = {}
    ordered = []
    for place in places:
        plan, name = plans[place], plans[place].recipe.name
        new = []
        shared_with = ""
        for each in plan.runs():
            if (owner := owners.setdefault(run_key(each), name)) == name:
                new.append(each)
            elif records.seconds_left(each) != 0.0:
                shared_with = owner
        seconds, unknown = _count_runs(plan, new, records)[3:5]
        ordered.append(counted[place]._replace(seconds_left=seconds, unknown=unknown, shared_with=shared_with))
    return ordered


def _count_runs(plan: RecipePlan, runs: Sequence[Config], records: RunRecords) -> RecipeProgress:
    left = [records.seconds_left(each) for each in runs]
    known = [each for each in left if each is not None]
    recorded = [record for record in map(records.find, runs) if record is not None]
    finished, failed = sum(record.finished for record in recorded), sum(record.failed for record in recorded)
    return RecipeProgress(plan, len(runs), finished, sum(known), len(left) - len(known), failed)


def _work_left(plan: RecipePlan, records: RunRecords) -> float:
    """Return the work of the runs of unknown time, in no unit."""
    return sum(estimated_work(each) for each in plan.runs() if records.seconds_left(each) is None)


def describe_time(seconds: float, unknown: int) -> str:
    """Return an estimate in words, with two digits.

    >>> describe_time(2574.0, 0), describe_time(80_000.0, 3), describe_time(0.0, 1)
    ('about 43 min', 'over 22 h', 'unknown')
    """
    if not seconds and unknown:
        return "unknown"
    return f"{'over' if unknown else 'about'} {format_duration(seconds, digits=2)}"


def estimated_work(config: Config) -> float:
    """Estimate the work of a run from its configuration alone, in no unit: to order runs by it."""
    cost = STEP_COSTS.get(config.model.name or "cnn_29k", OTHER_STEP_COST)
    return config.rounds * client_steps(config) * cost


def client_steps(config: Config) -> float:
    """Estimate the gradient steps of all clients in one round.

    >>> client_steps(from_yaml("data: {clients: 20}\\nsample: {participation: 0.1}\\nlocal: {steps: 5}"))
    10.0
    >>> client_steps(from_yaml("data: {clients: 20}\\nsample: {participation: 1/10}\\nlocal: {steps: 5}"))
    10.0
    """
    clients = config.data.clients or CLIENTS
    sampler = config.sample if isinstance(config.sample, Mapping) else {}
    share = _number(sampler.get("count"), 0.0) / clients or _number(sampler.get("participation"), 1.0)
    if config.gossip.clusters is not None or config.gossip.topology is not None:
        share = 1.0  # all members of a cluster train
    batch = config.local.batch_size if isinstance(config.local.batch_size, int) else 32
    steps: Any = config.local.steps
    if not isinstance(steps, int):
        steps = (config.local.epochs or 1.0) * math.ceil(ROWS / clients / batch)
    return max(1.0, clients * share) * float(steps)


def _number(value: object, default: float) -> float:
    """Return a number, or a fraction in a text; the default for what a sampler of the user's own may take instead."""
    try:
        return float(Fraction(value)) if isinstance(value, str | int | float) else default
    except (ValueError, OverflowError, ZeroDivisionError):
        return default


def _without_seed(config: Config) -> str:
    return run_key(config.model_copy(update={"seed": 0, "seeds": None}))


def _kind(config: Config) -> str:
    model, data = config.model, config.data
    return f"{model.name or model.factory} {model.options} {data.name} {data.factory} {config.local.batch_size}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
