"""Sweeps of configurations: the points of a grid or a search, and the files of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError
from hansa.runs.search import Axis, Search, parse_range, search_range

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.study.report import Ranking
    from hansa.study.session import Job, Session


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


def grid_points(axes: Mapping[str, Axis]) -> list[dict[str, str]]:
    """Return every point of a grid as its values by key.

    >>> [point_name(point) for point in grid_points(parse_axes(["local.lr=0.1,0.2", "local.steps=1,5"]))][:2]
    ['local.lr=0.1 local.steps=1', 'local.lr=0.1 local.steps=5']
    """
    for key, values in axes.items():
        if isinstance(values, search_range):
            raise HansaError(f"{key}: a grid needs values, not a range. Ranges need --search optuna.")
    return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())]  # type: ignore[arg-type]


def point_changes(point: Mapping[str, Any]) -> list[str]:
    """Return a point as overrides of a configuration."""
    return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in point.items()]


def point_name(point: Mapping[str, Any]) -> str:
    """Return the name of a point: its overrides."""
    return " ".join(point_changes(point))


def run_search(
    session: Session,
    configure: Callable[[Mapping[str, Any]], Config],
    axes: Mapping[str, Axis],
    folder: Path,
    *,
    metric: str | None,
    window: int,
    trials: int,
    prune: bool,
    parallel: int | None = None,
) -> Search:
    """Search for the best point, or resume the search; its trials are runs below ``folder``.

    ``configure`` returns the configuration of a point, and for ``{}`` that of the base. The other arguments are those
    of `hansa.search`.
    """
    from hansa.config import build
    from hansa.runs.experiment import digest_name
    from hansa.runs.folder import expand_seeds
    from hansa.study.session import plan_reusable

    base = configure({})
    seed_configs = expand_seeds(base)
    search = Search(
        axes,
        metric,
        task=build.build_task(seed_configs[0], build.load_data(seed_configs[0])),
        window=window,
        seeds=len(seed_configs),
        rounds=base.rounds,
        seed=base.seed,
        prune=prune,
        folder=folder,
        facts={"config": digest_name("base", base), "seed_list": [config.seed for config in seed_configs]},
    )

    def plan(point: Mapping[str, Any]) -> list[Job]:
        name = point_name(point)
        return plan_reusable(configure(point).model_copy(update={"name": name}), folder, name)

    session.run_trials(search, trials, plan, parallel)
    return search


def write_results(folder: Path, ranking: Ranking, values_of: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``results.csv``, a row per point with its means over seeds, and ``runs.csv``, a row per run.

    ``values_of`` has the values of each point, by the name of its entry.
    """
    import pandas

    from hansa.runs.metrics import summarize
    from hansa.runs.store.io import write_file

    names = dict.fromkeys([ranking.score, f"best_{ranking.metric}", ranking.metric])
    columns = {f"final_{name}" if name == ranking.metric else name: name for name in names}
    score = next(iter(columns))
    columns |= {name: name for name in ("rounds", "bits", "wall_seconds")}
    points: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for ranked in ranking:
        values, spread = values_of[ranked.entry.name], ranked.spreads.get(ranking.score)
        points.append({
            **values,
            **{column: ranked.numbers.get(name, "") for column, name in columns.items()},
            **{f"{name}_{score}": "" if spread is None else getattr(spread, name) for name in ("std", "min", "max")},
            "seeds": len(ranked.entry.runs),
            "status": "/".join(dict.fromkeys(str(run.summary.get("status", "")) for run in ranked.entry.runs)),
        })  # fmt: skip
        for run in ranked.entry.runs:
            numbers = summarize(run.history, metric=ranking.directed_metric, window=ranking.window)
            run_columns = {column: numbers.get(name, "") for column, name in columns.items()}
            runs.append({**values, "seed": run.seed, **run_columns})
    for name, rows in (("results.csv", points), ("runs.csv", runs)):
        table = pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
        write_file(folder / name, table.encode())
