"""An entry of the leaderboard: what a recipe, or another method in its setting, gave on somebody's machine.

An entry is one JSON file. It has the configuration of every row, digests of data and partitions, and for every seed the
numbers, the bits sent, the time, and the digest of the trained model. A seal over all of it shows changes by mistake.
It does not show who made it: that is what repeating a run is for, since equal seeds give equal models.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from hansa.config import Config, from_yaml
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.runs.experiment import config_digest
from hansa.runs.seed_group import expand_seeds
from hansa.runs.store.io import make_folder, write_file
from hansa.study.recipes.recipe import Recipe, RecipeMeasure, StrictModel, library

FORMAT = 1
MAX_BYTES = 4_000_000
"""The largest file that is read as an entry."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^<>\x00-\x1f|]*$")]
SETTING = ("data", "model", "rounds", "dtype")
"""The parts of a configuration that a recipe fixes, besides how often it evaluates. Rates, methods and participation
are an entry's own."""
SHARES = ("accuracy", "c_index")
"""Metrics between 0 and 1, by the end of their names."""


class SeedResult(StrictModel):
    """One run of a row."""

    seed: Annotated[int, Field(ge=0)]
    values: dict[str, float]
    """The number of each measure of the recipe, in its unit."""
    not_reached: tuple[str, ...] = ()
    """The measures whose target the run did not reach: their number is what had passed by its end."""
    bits: Annotated[int, Field(ge=0)]
    """All bits sent: up, down and between clients."""
    seconds: Annotated[float, Field(gt=0)]
    """The wall time of all rounds."""
    data_sha256: Digest
    partition_sha256: Digest
    model_sha256: Digest
    """The digest of the trained model. Repeating the run on the same platform gives the same one."""


class EntryRow(StrictModel):
    """A method in one column of a recipe."""

    row: Text
    column: Annotated[str, Field(max_length=200)] = ""
    config: dict[str, Any]
    config_sha256: Digest
    """The digest of the settings that affect results, as `hansa.runs.experiment.config_digest` computes it."""
    seeds: Annotated[tuple[SeedResult, ...], Field(min_length=1)]


class Hardware(StrictModel):
    """The machine of an entry's runs."""

    system: Text
    processor: Text
    cores: Annotated[int, Field(ge=1)]


class Entry(StrictModel):
    """An entry of the leaderboard."""

    format: Literal[1]
    title: Text
    authors: Annotated[tuple[Text, ...], Field(min_length=1)]
    url: Annotated[str, Field(max_length=300, pattern=r"^(https://[^\s<>|\"')]+)?$")] = ""
    recipe: Text
    recipe_sha256: Digest
    scale: Literal["cpu", "paper"]
    rows: Annotated[tuple[EntryRow, ...], Field(min_length=1)]
    hardware: Hardware
    software: dict[str, Text]
    sha256: Digest
    """The seal: the digest of all other fields."""


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the seal of an entry's content.

    >>> seal_of({"a": 1, "sha256": "x"}) == seal_of({"a": 1})
    True
    """
    sealed = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def recipe_digest(recipe: Recipe, scale: str) -> str:
    """Return the digest of what a recipe asks for at a scale: its cells and measures, not its texts."""
    cells = [[cell.row, cell.column, cell.document] for cell in recipe.cells(scale)]
    measures = {name: measure.model_dump(mode="json") for name, measure in recipe.measured(scale).items()}
    return hashlib.sha256(json.dumps([cells, measures], sort_keys=True).encode()).hexdigest()


def write_entry(content: Mapping[str, Any], path: Path) -> Entry:
    """Seal the content of an entry, check it, and write it.

    Args:
        content: All fields but the seal.
        path: The file.
    """
    sealed = {**content, "sha256": seal_of(content)}
    entry = _parse(sealed, path)
    check_entry(entry, path)
    make_folder(path.parent.absolute())
    write_file(path, (json.dumps(sealed, indent=1, ensure_ascii=False) + "\n").encode())
    return entry


def read_entry(path: Path) -> Entry:
    """Read an entry and check it; no code that it names is imported.

    Args:
        path: The file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise HansaError(f"{path}: {path.stat().st_size} bytes: expected at most {MAX_BYTES}.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HansaError(f"{path}: not a JSON file: {short_repr(str(error))}.") from error
    if not isinstance(content, dict):
        raise HansaError(f"{path}: expected a JSON object, as `hansa leaderboard entry` writes it.")
    entry = _parse(content, path)
    if (seal := seal_of(content)) != entry.sha256:
        raise HansaError(
            f"{path}: sha256 is {entry.sha256[:12]}..., that of the content {seal[:12]}...: it was changed after "
            "it was written. Write it again from the runs with `hansa leaderboard entry`."
        )
    check_entry(entry, path)
    return entry


def _parse(content: Mapping[str, Any], path: Path) -> Entry:
    try:
        return Entry.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where, content_there = ".".join(map(str, first["loc"])), first["input"]
        value = "" if first["type"] == "missing" else f" is {short_repr(content_there)}"
        raise HansaError(
            f"{path}: {where}{value}: {first['msg']}. `hansa leaderboard entry` writes all fields."
        ) from error


def check_entry(entry: Entry, path: Path) -> None:
    """Refuse an entry that is not of a known recipe, or whose hashes, settings or seeds do not fit together.

    Args:
        entry: The entry.
        path: Its file, for messages.
    """
    recipes = library()
    if entry.recipe not in recipes:
        raise HansaError(f"{path}: recipe {entry.recipe!r}: no such recipe. {suggestion(entry.recipe, recipes)}")
    recipe = recipes[entry.recipe]
    if entry.scale not in recipe.scales:
        raise HansaError(f"{path}: scale {entry.scale!r}: {entry.recipe} has {', '.join(recipe.scales)}.")
    if (expected := recipe_digest(recipe, entry.scale)) != entry.recipe_sha256:
        raise HansaError(
            f"{path}: recipe_sha256 is {entry.recipe_sha256[:12]}..., that of {entry.recipe} is {expected[:12]}...: it "
            f"is a result of another version of the recipe. Run `hansa reproduce {entry.recipe}` again."
        )
    settings: dict[str, list[str]] = {}
    for cell in recipe.cells(entry.scale):
        fixed = from_yaml(yaml.safe_dump(cell.document), (), entry.recipe, building=False)
        settings.setdefault(cell.column, []).append(_setting(fixed))
    places = [(row.row, row.column) for row in entry.rows]
    if doubled := [place for place in places if places.count(place) > 1]:
        raise HansaError(f"{path}: the row {doubled[0]} is there twice. Give each method its own name.")
    for row in entry.rows:
        where = f"{path}: row {row.row!r}" + (f", column {row.column!r}" if row.column else "")
        if row.column not in settings:
            raise HansaError(f"{where}: no such column. {suggestion(row.column, settings)}")
        config = _config_of(row, where)
        if _setting(config) not in settings[row.column]:
            raise HansaError(
                f"{where}: {', '.join(SETTING)} and evaluate.every of the configuration are not those of "
                f"{entry.recipe} at scale {entry.scale}: such a result cannot be compared. Take them from the recipe."
            )
        _check_seeds(row, config, recipe, entry.scale, where)
        _check_values(row, config, recipe.measured(entry.scale), where)
    check_same_data([(path, entry)])


def check_same_data(entries: Sequence[tuple[Path, Entry]]) -> None:
    """Refuse entries in which equal data settings and seeds have different data or partitions.

    Args:
        entries: Files and what they hold.
    """
    facts: dict[tuple[str, int], tuple[str, str, str]] = {}
    for path, entry in entries:
        for row in entry.rows:
            where = f"{path}: row {row.row!r}" + (f", column {row.column!r}" if row.column else "")
            config = from_yaml(yaml.safe_dump(row.config), (), where, building=False)
            setting = config.model_dump_json(include={"data"}, exclude_defaults=True)
            for one in row.seeds:
                digests = one.data_sha256, one.partition_sha256, where
                known = facts.setdefault((setting, one.seed), digests)
                for name, mine, theirs in zip(("data", "partition"), digests, known, strict=False):
                    if mine != theirs:
                        raise HansaError(
                            f"{where}: seed {one.seed}: {name}_sha256 is {mine[:12]}..., for the same setting "
                            f"{theirs[:12]}... in {known[2]}: such rows cannot be compared. Run both again."
                        )


def _config_of(row: EntryRow, where: str) -> Config:
    config = from_yaml(yaml.safe_dump(row.config), (), where, building=False)
    digest = config_digest(config)
    if digest != row.config_sha256:
        raise HansaError(
            f"{where}: config_sha256 is {row.config_sha256[:12]}..., that of the configuration {digest[:12]}...: the "
            "configuration is not the one that was run. Write the entry again from the runs."
        )
    return config


def _check_seeds(row: EntryRow, config: Config, recipe: Recipe, scale: str, where: str) -> None:
    planned = [each.seed for each in expand_seeds(config)]
    present = [one.seed for one in row.seeds]
    if sorted(planned) != sorted(present):
        raise HansaError(
            f"{where}: it has the seeds {present}, its configuration {planned}: expected each of these once."
        )
    least = recipe.at(scale).seeds
    if len(present) < least:
        raise HansaError(f"{where}: {len(present)} seeds: the recipe has {least}. Run it with --seeds {least}.")
    if sorted(present) != list(range(len(present))):
        raise HansaError(
            f"{where}: it has the seeds {present}: chosen seeds cannot be compared. Run it with --seeds "
            f"{len(present)}, which are 0 to {len(present) - 1}."
        )
    models = [one.model_sha256 for one in row.seeds]
    if len(set(models)) < len(models):
        raise HansaError(f"{where}: two seeds have the same model, which no two runs give. Run it again.")


def _check_values(row: EntryRow, config: Config, measures: Mapping[str, RecipeMeasure], where: str) -> None:
    for one in row.seeds:
        if missing := [name for name in measures if name not in one.values]:
            raise HansaError(f"{where}: seed {one.seed}: {missing[0]!r} is missing. Expected {', '.join(measures)}.")
        if unknown := [name for name in one.values if name not in measures]:
            raise HansaError(f"{where}: seed {one.seed}: {unknown[0]!r}: {suggestion(unknown[0], measures)}")
        for name, value in one.values.items():
            low, high = _range(measures[name], config.rounds)
            if not low <= value <= high:
                raise HansaError(
                    f"{where}: seed {one.seed}: {name} is {value:g}: expected {low:g} to {high:g}. Write the entry "
                    "again from the runs."
                )
        if wrong := [name for name in one.not_reached if name not in measures or measures[name].target is None]:
            raise HansaError(
                f"{where}: seed {one.seed}: not_reached: {wrong[0]!r} has no target. Write the entry again."
            )


def _range(measure: RecipeMeasure, rounds: int) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a measure."""
    if measure.statistic == "rounds_to":
        return 1, rounds
    if measure.statistic in ("hours_to", "per_round", "jitter") and not measure.metric.endswith(SHARES):
        return 0, math.inf
    if measure.metric.endswith(SHARES) and measure.statistic not in ("growth", "hours_to", "per_round"):
        return 0, measure.factor
    return -math.inf, math.inf


def _setting(config: Config) -> str:
    dump = config.model_dump(mode="json", exclude_defaults=True, include=set(SETTING))
    return json.dumps([dump, config.evaluate.every], sort_keys=True)


def entries_in(paths: Sequence[Path]) -> list[Path]:
    """Return the files of entries: those given, and all below the folders given."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.rglob("*.json"))
        else:
            files.append(path)
    if not files:
        raise HansaError(f"{', '.join(map(str, paths))}: no entries here. Entries are .json files.")
    return files
