"""Which runs a list of recipes needs, which of them are done, and how long the others will take.

Nothing here runs code that a recipe names, nor changes a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hansa.config import Config, from_yaml
from hansa.core.errors import HansaError
from hansa.runs.experiment import config_digest
from hansa.runs.folder import FINISHED, RunFolder
from hansa.runs.seed_group import expand_seeds
from hansa.study.recipes.recipe import Recipe, RecipeCell

STEP_SECONDS = {"logistic": 4e-4, "cnn_29k": 2.5e-3, "lstm": 3e-2, "resnet18": 0.15, "convmixer": 0.15}
"""Processor seconds of one client's step, measured on one core; used until runs of the same model are recorded."""
OTHER_STEP_SECONDS = 2.5e-3
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
    """The estimated processor time of the runs that are not finished."""


class RunRecord(NamedTuple):
    """What a run folder says about a run."""

    rounds: int
    seconds: float
    finished: bool


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
        self._step_seconds: dict[str, list[float]] = {}
        for path in sorted(folder.glob("*/seed-*")) + sorted(folder.glob("*")) if folder.is_dir() else []:
            if (run := RunFolder(path)).exists:
                self._add(run)

    def _add(self, run: RunFolder) -> None:
        try:
            config, summary = run.config, run.summary
        except HansaError:  # damaged: it will be reported when it is needed
            return
        record = RunRecord(
            int(summary["rounds"]), float(summary.get("wall_seconds") or 0), summary["status"] == FINISHED
        )
        known = self._runs.get(key := run_key(config))
        if known is None or (record.finished, record.rounds) > (known.finished, known.rounds):
            self._runs[key] = record
        if record.rounds and record.seconds:
            a_round = record.seconds / record.rounds
            self._round_seconds.setdefault(_without_seed(config), []).append(a_round)
            self._step_seconds.setdefault(_kind(config), []).append(a_round / client_steps(config))

    def find(self, config: Config) -> RunRecord | None:
        """Return the record of a run."""
        return self._runs.get(run_key(config))

    def seconds_left(self, config: Config) -> float:
        """Estimate the remaining processor time of a run.

        By the rounds of other seeds, or the steps of other runs with the same model and data, or `STEP_SECONDS`.
        """
        record = self.find(config)
        if record is not None and record.finished:
            return 0.0
        rounds = config.rounds - (0 if record is None else record.rounds)
        if (same := self._round_seconds.get(_without_seed(config))) is not None:
            return rounds * _median(same)
        default = [STEP_SECONDS.get(config.model.name or "cnn_29k", OTHER_STEP_SECONDS)]
        return rounds * client_steps(config) * _median(self._step_seconds.get(_kind(config), default))


def recipe_progress(plans: Iterable[RecipePlan], records: RunRecords) -> list[RecipeProgress]:
    """Return how much of each recipe is done, the one with the least work left first.

    A run that several recipes need counts for the first of them only, since it is run once.
    """
    listed = []
    for plan in plans:
        runs = list(plan.runs())
        done = [record is not None and record.finished for record in map(records.find, runs)]
        listed.append(RecipeProgress(plan, len(runs), sum(done), sum(map(records.seconds_left, runs))))
    listed.sort(key=lambda progress: progress.seconds_left)  # stable: equal ones stay in the order of the list
    seen: set[str] = set()
    ordered = []
    for progress in listed:
        new = [each for each in progress.plan.runs() if run_key(each) not in seen]
        seen.update(map(run_key, new))
        ordered.append(progress._replace(seconds_left=sum(map(records.seconds_left, new))))
    return ordered


def client_steps(config: Config) -> float:
    """Estimate the gradient steps of all clients in one round.

    >>> client_steps(from_yaml("data: {clients: 20}\\nsample: {participation: 0.1}\\nlocal: {steps: 5}"))
    10.0
    """
    clients = config.data.clients or CLIENTS
    sampler = config.sample if isinstance(config.sample, Mapping) else {}
    share = float(sampler.get("count", 0)) / clients or float(sampler.get("participation", 1.0))
    if config.gossip.clusters is not None or config.gossip.topology is not None:
        share = 1.0  # all members of a cluster train
    batch = config.local.batch_size if isinstance(config.local.batch_size, int) else 32
    steps: Any = config.local.steps
    if not isinstance(steps, int):
        steps = (config.local.epochs or 1.0) * math.ceil(ROWS / clients / batch)
    return max(1.0, clients * share) * float(steps)


def _without_seed(config: Config) -> str:
    return run_key(config.model_copy(update={"seed": 0, "seeds": None}))


def _kind(config: Config) -> str:
    model, data = config.model, config.data
    return f"{model.name or model.factory} {model.options} {data.name} {data.factory} {config.local.batch_size}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
