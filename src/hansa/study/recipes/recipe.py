"""A published table or figure as data: what was trained, what was reported, what is claimed, and at which scales.

A file of the library is one paper: named ``settings`` (pieces of configurations), the ``scales`` its recipes share, and
the ``recipes``. A cell of a table is one row in one column; its configuration is put together from the recipe's own
pieces, the column's, the row's and the scale's, the later ones winning key by key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hansa.core.errors import HansaError, suggestion

SCALES = ("smoke", "cpu", "paper")
Read: TypeAlias = Literal["best", "last", "last5", "last10", "mean", "rounds_to", "hours_to", "per_round"]


class Form(BaseModel):
    """No unknown keys, no changes after the fact."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Measure(Form):
    """One number of a run: which metric, how it is read off the rounds, in which unit, how near is near."""

    metric: str = "test_accuracy"
    read: Read = "best"
    """Of the rounds that were evaluated the best, the last, a mean; rounds or hours to a target; what a round adds."""
    target: float | None = None
    """Of rounds_to and hours_to, as the run reports the metric."""
    times: float = 100.0
    """From the run's unit to the paper's."""
    unit: str = "%"
    within: float = 1.0
    """How far a mean may lie from the published number, beside what seeds explain."""
    relative: bool = False
    """`within` is a share of the published number."""
    smaller: bool = False
    """Whether less is better."""

    @model_validator(mode="after")
    def _target(self) -> Measure:
        if (self.target is not None) != (self.read in ("rounds_to", "hours_to")):
            raise ValueError("target: expected with rounds_to and hours_to, and with nothing else.")
        return self


class Piece(Form):
    """A part of a configuration: named settings, then keys of its own."""

    title: str = ""
    use: tuple[str, ...] = ()
    set: dict[str, Any] = {}


class Row(Piece):
    """A method, or a value of what is varied; with what the paper reports of it, by column and measure.

    A number; a pair of it and its spread; or a word like 500+, not reached within 500 rounds.
    """

    published: dict[str, dict[str, Any]] = {}
    by: dict[str, dict[str, Any]] = {}
    """Keys of its own in some columns."""


class Claim(Form):
    """What the paper says of an order: ``order`` names rows, best first; or of ``near`` ones."""

    says: str
    measure: str
    columns: tuple[str, ...] = ()
    """Where it is claimed; everywhere, if not said."""
    order: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    within: float | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Claim:
        if bool(self.order) == bool(self.near) or len(self.order or self.near) < 2:
            raise ValueError("order and near: expected one of the two, with at least two rows.")
        if (self.within is not None) != bool(self.near):
            raise ValueError("within: expected with near, and with nothing else.")
        return self


class Scale(Piece):
    """How large a recipe is run, and what that leaves out of the published setting."""

    reduces: str = ""
    seeds: int = Field(default=1, ge=1)
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    by: dict[str, dict[str, Any]] = {}
    """Keys of some rows at this scale."""
    judged: Literal["numbers", "order", "nothing"] = "order"
    """What can be compared with the paper at this scale."""


class Recipe(Piece):
    """One table or figure."""

    name: str
    paper: str
    """The key of its citation."""
    where: str
    """Table 1, Figure 2(b), ..."""
    says: str
    """What it shows, in a sentence."""
    columns: dict[str, Piece] = {"": Piece()}
    rows: dict[str, Row]
    measures: dict[str, Measure]
    claims: tuple[Claim, ...] = ()
    knows: tuple[str, ...] = ()
    """Deviations that are known: of the paper from its code, of ours from either."""
    scales: dict[str, Scale]
    settings: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for row_name, row in self.rows.items():
            for column in row.by:
                _known(column, self.columns, f"rows.{row_name}.by")
            for column, numbers in row.published.items():
                _known(column, self.columns, f"rows.{row_name}.published")
                for measure, value in numbers.items():
                    _known(measure, self.measures, f"rows.{row_name}.published.{column}")
                    published(value)
        for claim in self.claims:
            _known(claim.measure, self.measures, "claims")
            for named_row in (*claim.order, *claim.near):
                _known(named_row, self.rows, "claims")
            for column in claim.columns:
                _known(column, self.columns, "claims")
        for name, scale in self.scales.items():
            _known(name, SCALES, "scales")
            for named_row in (*scale.rows, *scale.by):
                _known(named_row, self.rows, f"scales.{name}.rows")
            for column in scale.columns:
                _known(column, self.columns, f"scales.{name}.columns")
        pieces: list[Piece] = [*self.columns.values(), *self.rows.values(), *self.scales.values()]
        for setting in (*self.use, *(setting for piece in pieces for setting in piece.use)):
            _known(setting, self.settings, "use")
        return self

    def at(self, scale: str) -> Scale:
        """One of its scales."""
        if scale not in self.scales:
            raise HansaError(f"{self.name}: has no scale {scale!r}. {suggestion(scale, self.scales)}")
        return self.scales[scale]

    def cells(self, scale: str) -> Iterator[Cell]:
        """What is to be trained at a scale, column by column."""
        asked = self.at(scale)
        for column, beside in self.columns.items():
            for row, method in self.rows.items():
                if (asked.columns and column not in asked.columns) or (asked.rows and row not in asked.rows):
                    continue
                document: dict[str, Any] = {}
                for piece in (self, beside, method, Piece(set=method.by.get(column, {})), asked):
                    for name in piece.use:
                        put(document, self.settings[name])
                    put(document, piece.set)
                put(document, asked.by.get(row, {}))
                document.setdefault("seeds", asked.seeds)
                told = method.published.get(column, {})
                yield Cell(row, column, document, {name: published(value) for name, value in told.items()})


class Published(NamedTuple):
    """A reported number; its spread over seeds, where that was reported; whether it was not reached in so many."""

    value: float
    spread: float | None = None
    beyond: bool = False


class Cell(NamedTuple):
    """One row in one column: what to run, and what was reported of it by measure."""

    row: str
    column: str
    document: dict[str, Any]
    published: Mapping[str, Published]

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return f"{self.row}, {self.column}" if self.column else self.row


def published(value: Any) -> Published:
    """A number as a recipe writes it.

    >>> published(88.79), published([88.79, 0.16]), published("500+")
    (Published(value=88.79, spread=None, beyond=False), Published(value=88.79, spread=0.16, beyond=False), \
Published(value=500.0, spread=None, beyond=True))
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]+\+", value):
        return Published(float(value[:-1]), beyond=True)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return Published(float(value[0]), float(value[1]))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Published(float(value))
    raise ValueError(f"{value!r}: expected a number, [number, spread] or a word like 500+.")


def put(document: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Lay a piece over a configuration: sections key by key, everything else whole.

    >>> document = {"local": {"lr": 0.1, "steps": 3}, "rounds": 5}
    >>> put(document, {"local": {"steps": 7}, "sample": {"count": 2}})
    >>> document
    {'local': {'lr': 0.1, 'steps': 7}, 'rounds': 5, 'sample': {'count': 2}}
    """
    for key, value in piece.items():
        if key in SECTIONS and isinstance(value, Mapping):
            document[key] = {**document.get(key, {}), **value}
        else:
            document[key] = value


SECTIONS = ("data", "model", "algorithm", "local", "server", "gossip", "compress", "evaluate", "checkpoint", "engine")
"""What is laid over key by key; a part, such as a sampler, is replaced whole."""


def read(path: Path) -> dict[str, Recipe]:
    """The recipes of a file, by name."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HansaError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(found, dict) or not isinstance(found.get("recipes"), dict):
        raise HansaError(f"{path}: expected settings, scales and recipes by their names.")
    shared = {"paper": found.get("paper"), "settings": found.get("settings", {})}
    recipes = {}
    for name, body in found["recipes"].items():
        if not isinstance(body, dict):
            raise HansaError(f"{path}: recipes.{name}: expected a mapping.")
        scales = {**found.get("scales", {}), **body.get("scales", {})}
        try:
            recipes[name] = Recipe.model_validate({**shared, **body, "name": name, "scales": scales})
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise HansaError(f"{path}: recipes.{name}: {at}{': ' if at else ''}{first['msg']}") from error
    return recipes


@cache
def library() -> Mapping[str, Recipe]:
    """Every recipe that comes with the package, by name.

    >>> library()["hafed-table-1"].rows["HA-Fed"].published["Fashion-MNIST, CNN"]["accuracy"]
    [89.25, 0.22]
    """
    found: dict[str, Recipe] = {}
    for paper in ("cams", "hafed", "afga", "aware"):
        found.update(read(Path(str(files("hansa.study.recipes").joinpath("library", f"{paper}.yaml")))))
    return found


def named(word: str) -> list[Recipe]:
    """The recipes that a word means: one by name, all of a paper, or those of a file."""
    if word.endswith((".yaml", ".yml")) or Path(word).is_file():
        return list(read(Path(word)).values())
    if word in library():
        return [library()[word]]
    if found := [recipe for name, recipe in library().items() if name.startswith(f"{word}-")]:
        return found
    raise HansaError(f"{word}: neither a recipe, nor a paper's, nor a file. {suggestion(word, library())}")


def _known(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: {name!r} is not known. {suggestion(name, known)}")
