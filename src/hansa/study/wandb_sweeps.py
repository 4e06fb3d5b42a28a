"""Sweeps that Weights & Biases drives: the search space of `hansa.search` as its sweep configuration, and its trials.

``id = wandb.sweep(sweep_config(axes, "test_accuracy"), project="mine")``, then on any number of machines
``wandb.agent(id, sweep_trial(presets.fedams, task, axes, rounds=40), project="mine")``. Needs the extra ``wandb``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal, Unpack

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument, short_repr, suggestion
from hansa.engine import reuse_workers
from hansa.runs.columns import WINDOW, MetricFacts, lower_is_better, split_metric
from hansa.runs.driver import Run
from hansa.runs.metrics import score
from hansa.runs.options import Record, RunOptions, RunOptionsDict
from hansa.runs.search import Axis, search_range
from hansa.runs.seed_group import parse_seeds
from hansa.runs.trackers import finite_numbers
from hansa.study.jobs import RunJob
from hansa.training import TaskLike

log = logging.getLogger("hansa")


def sweep_config(
    axes: Mapping[str, Axis],
    metric: str = "test_accuracy",
    *,
    method: Literal["bayes", "random", "grid"] = "bayes",
    stop_after: int | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Return the search space of `hansa.search` as a sweep configuration of Weights & Biases, for ``wandb.sweep``.

    As YAML it is the file of ``wandb sweep``.

    Args:
        axes: For each name a list of values, or a `hansa.search_range`. Values that are not plain appear as their repr.
        metric: The column to optimize, or COLUMN:lower where its direction is not known.
        method: How points are proposed; a grid has lists only.
        stop_after: The first round in which Hyperband may end bad trials early; by default none are.
        name: The name of the sweep.

    >>> sweep_config({"local_lr": search_range(1e-3, 1.0, log=True), "steps": [5, 10]})["parameters"]
    {'local_lr': {'distribution': 'log_uniform_values', 'min': 0.001, 'max': 1.0}, 'steps': {'values': [5, 10]}}
    """
    if method not in ("bayes", "random", "grid"):
        hint = suggestion(str(method), ["bayes", "random", "grid"])
        raise invalid_argument("sweep_config", "method", method, "a method of W&B", hint)
    if not axes:
        raise HansaError("sweep_config: expected at least one axis, such as local_lr=search_range(1e-3, 1).")
    column, directions = split_metric(metric)
    goal = "minimize" if lower_is_better(column, directions) else "maximize"
    parameters = {axis: _parameter(axis, values, method) for axis, values in axes.items()}
    config: dict[str, Any] = {"method": method, "metric": {"name": column, "goal": goal}, "parameters": parameters}
    if stop_after is not None:
        check_integer("sweep_config", "stop_after", stop_after)
        config["early_terminate"] = {"type": "hyperband", "min_iter": stop_after}
    return config if name is None else {"name": name, **config}


def sweep_trial(
    factory: Callable[..., Algorithm],
    task: TaskLike,
    axes: Mapping[str, Axis],
    *,
    rounds: int,
    metric: str | None = None,
    window: int = WINDOW,
    seeds: int | Sequence[int] = 1,
    module: str = "wandb",
    init: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptionsDict],
) -> Callable[[], float | None]:
    """Return the function of one trial, for ``wandb.agent``: it trains at the point that the sweep proposes.

    Every round is logged. At the end the metric of the tracked run is the mean over seeds of its score, as in
    `hansa.search`; the sweep optimizes this number. A trial whose runs fail is marked as failed.

    Args:
        factory: A function that returns an algorithm, such as a preset.
        task: The model, the loss and the clients' data.
        axes: The axes of `sweep_config`: arguments of ``factory``.
        rounds: The number of communication rounds of every run.
        metric: The metric of `sweep_config`; by default the main one of the task, on its validation rows if it has any.
        window: How many of the last measurements a score averages.
        seeds: How many seeds from 0, or a list of them.
        module: A module with the interface of wandb.
        init: Arguments of its ``init``, such as ``{"mode": "offline"}``.
        options: Further options of every run, as in `hansa.run`.
    """
    check_integer("sweep_trial", "rounds", rounds)
    all_seeds, common, facts = parse_seeds(seeds, 0, "sweep_trial"), RunOptions(**options), MetricFacts.of_task(task)
    column = split_metric(metric or facts.tuning or "loss", facts.better)[0]

    def trial() -> float | None:
        tracked = _client(module).init(**(init or {}))
        point = {name: _value(name, axis, tracked.config) for name, axis in axes.items()}
        title, scores = ", ".join(f"{name}={value!r}" for name, value in point.items()), []
        try:
            with reuse_workers():
                for place, seed in enumerate(all_seeds):
                    watched = replace(common, callbacks=[*common.callbacks, _logger(tracked, place * rounds)])
                    run = RunJob(factory(**point), task, rounds, watched, title, None).run(seed, None)
                    scores.append(score(run.history, column, window))
        except HansaError as error:  # such as a learning rate at which every update is non-finite
            log.warning("trial %s: %s", title, error)
            tracked.finish(exit_code=1)
            return None
        known = [value for value in scores if value is not None]
        if len(known) < len(scores):
            tracked.finish(exit_code=1)
            raise HansaError(f"sweep_trial(metric={column!r}): not measured by every seed of {title}.")
        tracked.summary[column] = math.fsum(known) / len(known)
        value = float(tracked.summary[column])
        tracked.finish()
        return value

    return trial


def _logger(tracked: Any, first: int) -> Callable[[Run, Record], None]:
    def watch(run: Run, record: Record) -> None:
        tracked.log(finite_numbers(record), step=first + int(record["round"]))

    return watch


def _parameter(name: str, axis: Axis, method: str) -> dict[str, Any]:
    if not isinstance(axis, search_range):
        if isinstance(axis, str) or not len(axis):
            raise invalid_argument("sweep_config", name, axis, "some values, or hansa.search_range(low, high)")
        return {"values": [_label(value) for value in axis]}
    if method == "grid":
        raise invalid_argument("sweep_config", name, axis, "values for a grid", 'method="bayes" takes ranges.')
    bounds = {"min": axis.low, "max": axis.high}
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return (
            {"distribution": "q_log_uniform_values", **bounds, "q": 1}
            if axis.log
            else {"distribution": "int_uniform", **bounds}
        )
    return {"distribution": "log_uniform_values" if axis.log else "uniform", **bounds}


def _label(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _value(name: str, axis: Axis, proposed: Mapping[str, Any]) -> Any:
    """Return the value of an axis that the sweep proposes; those of ranges are rounded to six digits as in a search."""
    if name not in proposed:
        raise HansaError(
            f"sweep_trial: the sweep has no parameter {name!r}: make it of the same axes, by sweep_config."
        )
    value = proposed[name]
    if isinstance(axis, search_range):
        if isinstance(axis.low, int) and isinstance(axis.high, int):
            return round(value)
        return min(max(float(f"{value:.6g}"), axis.low), axis.high)
    for each in axis:
        if _label(each) == value and isinstance(_label(each), bool) == isinstance(value, bool):
            return each
    raise HansaError(f"sweep_trial: the sweep proposes {name}={short_repr(value)}: expected one of {list(axis)!r}.")


def _client(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise HansaError(f"sweeps of W&B need {module}: pip install 'hansa[wandb]'.") from error
