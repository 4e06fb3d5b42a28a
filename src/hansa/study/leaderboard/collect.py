"""Make an entry of the leaderboard from the run folders of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hansa.config import Config, to_dict
from hansa.core.errors import HansaError
from hansa.runs.experiment import config_digest
from hansa.runs.folder import FINISHED, RunFolder
from hansa.runs.seed_group import expand_seeds
from hansa.study.leaderboard.entry import FORMAT, recipe_digest
from hansa.study.recipes.reading import seed_values
from hansa.study.recipes.recipe import Recipe, library
from hansa.study.recipes.schedule import plan_recipe, run_key


def collect_entry(
    recipe: Recipe,
    scale: str,
    folder: Path,
    *,
    title: str,
    authors: Sequence[str],
    url: str = "",
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of an entry, without its seal, from finished runs.

    Args:
        recipe: The recipe that was run with `hansa reproduce`.
        scale: Its scale.
        folder: The folder of the runs.
        title: The title of the entry.
        authors: Who ran it.
        url: Where more is said about it.
        overrides: The assignments that it was run with, such as ``seeds=5``.
    """
    finished = _finished_runs(folder)
    known = library().get(recipe.name, recipe)  # a copy with further rows is judged by the original
    measures = known.measured(scale)
    rows: list[dict[str, Any]] = []
    first: RunFolder | None = None
    for cell, config in plan_recipe(recipe, scale, overrides, building=False).cells:
        results = []
        for each in expand_seeds(config):
            run = finished.get(run_key(each))
            if run is None:
                raise HansaError(
                    f"{folder}: {recipe.name}, {cell.label}, seed {each.seed}: there is no finished run. `hansa "
                    f"reproduce {recipe.name} --scale {scale}` runs it."
                )
            first = run if first is None else first
            values, not_reached = {}, []
            for name, measure in measures.items():
                if (numbers := seed_values([run.history], measure)) is None:
                    raise HansaError(
                        f"{run}: {name}: {measure.metric} has no finite value in the last round: it was not "
                        "measured, or the run diverged. Leave its row out of a copy of the recipe."
                    )
                values[name] = numbers[0].value
                not_reached += [name] * (not numbers[0].reached)
            results.append(_seed_result(run, values, not_reached))
        rows.append(
            {
                "row": cell.row,
                "column": cell.column,
                "config": to_dict(config),
                "config_sha256": config_digest(config),
                "seeds": results,
            }
        )
    assert first is not None
    environment = first.environment
    packages = environment.get("packages", {})
    return {
        "format": FORMAT,
        "title": title,
        "authors": list(authors),
        "url": url,
        "recipe": recipe.name,
        "recipe_sha256": recipe_digest(known, scale),
        "scale": scale,
        "rows": rows,
        "hardware": {
            "system": environment["system"],
            "processor": environment["processor"],
            "cores": environment["cores"],
        },
        "software": {**packages, "python": environment["python"], "native kernels": environment["native kernels"]},
    }


def _finished_runs(folder: Path) -> dict[str, RunFolder]:
    """Return the finished runs below a folder, by what distinguishes them."""
    runs = {}
    for path in sorted({*folder.glob("*/seed-*"), *folder.glob("*")}) if folder.is_dir() else []:
        run = RunFolder(path)
        if run.exists and run.summary["status"] == FINISHED:
            runs[run_key(_as_run(run.config))] = run
    return runs


def _as_run(config: Config) -> Config:
    return config.model_copy(update={"seeds": None})


def _seed_result(run: RunFolder, values: dict[str, float], not_reached: Sequence[str]) -> dict[str, Any]:
    summary, facts = run.summary, run.data_facts
    return {
        "seed": run.config.seed,
        "values": values,
        **({"not_reached": list(not_reached)} if not_reached else {}),
        "bits": int(summary["bits"]),
        "seconds": float(summary["wall_seconds"]),
        "data_sha256": facts["data"],
        "partition_sha256": facts["partition"],
        "model_sha256": str(summary["model_sha256"]),
    }
