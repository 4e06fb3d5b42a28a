"""Several seeds of one method as one result: means, deviations, and the rounds that all of them have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hansa.config import Config
from hansa.errors import HansaError, refuse
from hansa.runs import metrics
from hansa.runs.metrics import History, Record

SEED = "seed-"
"""A group's runs lie in folders of this name and the seed's number below the group's own."""


class Spread(NamedTuple):
    """One number over seeds: its mean, its sample standard deviation (n - 1 below), the least and the most."""

    mean: float
    deviation: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """The mean of some numbers and how far they lie apart; the deviation of one number is 0.

    >>> spread([1.0, 2.0, 6.0])
    Spread(mean=3.0, deviation=2.6457513110645907, least=1.0, most=6.0)
    """
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, min(values), max(values))


def seed_list(seeds: object, first: int = 0, where: str = "run") -> list[int]:
    """The seeds that a number or a list of them means: 3 is three of them from ``first`` on.

    >>> seed_list(3), seed_list(2, first=7), seed_list([5, 1])
    ([0, 1, 2], [7, 8], [5, 1])
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 1:
        return list(range(first, first + seeds))
    if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes, Mapping)):
        found = list(seeds)
        plain = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in found)
        if found and plain and len(set(found)) == len(found):
            return found
    raise refuse(where, "seeds", seeds, "how many, or a list of different whole numbers", "3 stands for seeds 0, 1, 2.")


def per_seed(config: Config) -> list[Config]:
    """The configurations that one with ``seeds`` stands for, each with a seed of its own; else itself.

    >>> from hansa.config import from_text
    >>> [each.seed for each in per_seed(from_text("seeds: [4, 2]"))]
    [4, 2]
    """
    if config.seeds is None:
        return [config]
    seeds = seed_list(config.seeds, config.seed, "config")
    return [config.model_copy(update={"seed": seed, "seeds": None}) for seed in seeds]


def combined(histories: Sequence[History], target: float | None = None) -> tuple[dict[str, Any], dict[str, Spread]]:
    """The summaries of several runs as one: the mean of every number, and its spread where there are several runs.

    Numbers that not all runs have are left out, but for the rounds to a target: None unless all reached it, and
    ``reached`` says how many did.

    >>> curves = [[{"round": r, "test_accuracy": a * r} for r in (1, 2)] for a in (0.2, 0.4)]
    >>> means, spreads = combined(curves, target=0.4)
    >>> round(means["test_accuracy"], 3), means["rounds_to_target"], spreads["rounds_to_target"].deviation
    (0.6, 1.5, 0.7071067811865476)
    """
    found = [metrics.summarize(history, target) for history in histories]
    if len(found) == 1:
        return found[0], {}
    means: dict[str, Any] = {}
    spreads: dict[str, Spread] = {}
    for name in found[0]:
        values = [summary.get(name) for summary in found]
        if all(_number(value) for value in values):
            spreads[name] = spread([float(value) for value in values])  # type: ignore[arg-type]
            means[name] = values[0] if len(set(values)) == 1 else spreads[name].mean
    if target is not None:
        means.setdefault("rounds_to_target", None)
        means["reached"] = sum(summary.get("rounds_to_target") is not None for summary in found)
    return means, spreads


def aligned(histories: Sequence[History]) -> list[list[Record]]:
    """The records of the rounds that all runs have, with running totals: the curves of a group are drawn from these."""
    rows = [{int(record["round"]): record for record in metrics.running_totals(history)} for history in histories]
    common = set.intersection(*(set(table) for table in rows)) if rows else set()
    return [[table[round] for round in sorted(common)] for table in rows]


def over_seeds(histories: Sequence[History], metric: str) -> list[tuple[int, Spread]]:
    """(round, spread) of a metric where all runs measured it.

    >>> over_seeds([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[0][1].mean
    2.0
    """
    found = []
    for records in zip(*aligned(histories), strict=True):
        values = [record.get(metric) for record in records]
        if all(_number(value) for value in values):
            found.append((int(records[0]["round"]), spread([float(value) for value in values])))  # type: ignore[arg-type]
    return found


def grouped(items: Sequence[Any], config_of: Callable[[Any], Config | None]) -> list[list[Any]]:
    """Items apart by all that is in their configurations but the seed, in the order in which each first came.

    Two of equal seed are never of one group, and what has no configuration stands alone.
    """
    groups: list[tuple[str | None, set[int], list[Any]]] = []
    for item in items:
        config = config_of(item)
        label = None if config is None else same_but_for_seed(config)
        for known, seeds, members in groups:
            if config is not None and label == known and config.seed not in seeds:
                seeds.add(config.seed)
                members.append(item)
                break
        else:
            groups.append((label, set() if config is None else {config.seed}, [item]))
    return [members for *_, members in groups]


def same_but_for_seed(config: Config) -> str:
    """A text that configurations share when they differ in seed, name, workers and checkpoints at most."""
    left_out = {"seed", "seeds", "name", "workers", "checkpoint"}
    return json.dumps(config.model_dump(mode="json", exclude_defaults=True, exclude=left_out), sort_keys=True)


def refuse_several(config: Config, what: str) -> None:
    """For what is about one run alone."""
    if config.seeds is not None:
        raise HansaError(f"{what}: the configuration has several seeds; say one: --set seeds=null --seed 0.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
