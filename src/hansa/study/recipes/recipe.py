"""A published table or figure as data: what to train, the reported numbers, the paper's claims, and the scales.

A file of the library is one paper: named ``settings`` (fragments of configurations), the ``scales`` that its recipes
share, and the ``recipes``. A cell is one row in one column. Its configuration merges the fragments of the recipe, the
column, the row and the scale; later fragments win key by key.
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
Statistic: TypeAlias = Literal["best", "last", "last5", "last10", "mean", "rounds_to", "hours_to", "per_round"]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class RecipeMeasure(StrictModel):
    """One number of a run: a statistic of a metric, with its unit and the tolerance of the comparison."""

    metric: str = "test_accuracy"
    statistic: Statistic = "best"
    """The best, last or mean value; rounds or hours to a target; or the increase in the last round."""
    target: float | None = None
    """The target of rounds_to and hours_to, in the unit of the run."""
    factor: float = 100.0
    """Converts the unit of the run to that of the paper."""
    unit: str = "%"
    tolerance: float = 1.0
    """The allowed difference from the published number, besides the spread over seeds."""
    relative: bool = False
    """Whether ``tolerance`` is a fraction of the published number."""
    smaller_is_better: bool = False

    @model_validator(mode="after")
    def _target(self) -> RecipeMeasure:
        if (self.target is not None) != (self.statistic in ("rounds_to", "hours_to")):
            raise ValueError("target: expected with rounds_to and hours_to only.")
        return self


class ConfigFragment(StrictModel):
    """A fragment of a configuration: named settings (``use``), then its own keys (``set``)."""

    title: str = ""
    use: tuple[str, ...] = ()
    set: dict[str, Any] = {}


class RecipeRow(ConfigFragment):
    """A method, or a value of a varied parameter, with its published numbers by column and measure.

    A published number is a number, a pair [number, standard deviation], or "500+" for a target not reached within 500.
    """

    published: dict[str, dict[str, Any]] = {}
    overrides: dict[str, dict[str, Any]] = {}
    """Additional keys in some columns."""


class PaperClaim(StrictModel):
    """A claim of the paper: the ``order`` of rows, best first, or that rows are ``similar`` within a ``tolerance``."""

    statement: str
    measure: str
    columns: tuple[str, ...] = ()
    """The columns it applies to; by default all."""
    order: tuple[str, ...] = ()
    similar: tuple[str, ...] = ()
    tolerance: float | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PaperClaim:
        if bool(self.order) == bool(self.similar) or len(self.order or self.similar) < 2:
            raise ValueError("order and similar: expected one of the two, with at least two rows.")
        if (self.tolerance is not None) != bool(self.similar):
            raise ValueError("tolerance: expected with similar only.")
        return self


class RecipeScale(ConfigFragment):
    """The size at which a recipe is run, and how that differs from the published setting."""

    reduction: str = ""
    seeds: int = Field(default=1, ge=1)
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    overrides: dict[str, dict[str, Any]] = {}
    """Additional keys of some rows at this scale."""
    compares: Literal["numbers", "order", "nothing"] = "order"
    """What is compared with the paper at this scale."""


class Recipe(ConfigFragment):
    """One published table or figure."""

    name: str
    paper: str
    """The key of its citation."""
    reference: str
    """The table or figure, such as "Table 1"."""
    summary: str
    """What it shows, in one sentence."""
    columns: dict[str, ConfigFragment] = {"": ConfigFragment()}
    rows: dict[str, RecipeRow]
    measures: dict[str, RecipeMeasure]
    claims: tuple[PaperClaim, ...] = ()
    known_differences: tuple[str, ...] = ()
    """Known differences between the paper, its code and this library."""
    scales: dict[str, RecipeScale]
    settings: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for row_name, row in self.rows.items():
            for column in row.overrides:
                _known(column, self.columns, f"rows.{row_name}.by")
            for column, numbers in row.published.items():
                _known(column, self.columns, f"rows.{row_name}.published")
                for measure, value in numbers.items():
                    _known(measure, self.measures, f"rows.{row_name}.published.{column}")
                    parse_published(value)
        for claim in self.claims:
            _known(claim.measure, self.measures, "claims")
            for named_row in (*claim.order, *claim.similar):
                _known(named_row, self.rows, "claims")
            for column in claim.columns:
                _known(column, self.columns, "claims")
        for name, scale in self.scales.items():
            _known(name, SCALES, "scales")
            for named_row in (*scale.rows, *scale.overrides):
                _known(named_row, self.rows, f"scales.{name}.rows")
            for column in scale.columns:
                _known(column, self.columns, f"scales.{name}.columns")
        fragments: list[ConfigFragment] = [*self.columns.values(), *self.rows.values(), *self.scales.values()]
        for setting in (*self.use, *(setting for fragment in fragments for setting in fragment.use)):
            _known(setting, self.settings, "use")
        return self

    def at(self, scale: str) -> RecipeScale:
        """Return one of its scales."""
        if scale not in self.scales:
            raise HansaError(f"{self.name}: has no scale {scale!r}. {suggestion(scale, self.scales)}")
        return self.scales[scale]

    def cells(self, scale: str) -> Iterator[RecipeCell]:
        """Yield what to train at a scale, column by column."""
        scaled = self.at(scale)
        for column, settings in self.columns.items():
            for row, method in self.rows.items():
                if (scaled.columns and column not in scaled.columns) or (scaled.rows and row not in scaled.rows):
                    continue
                document: dict[str, Any] = {}
                for fragment in (self, settings, method, ConfigFragment(set=method.overrides.get(column, {})), scaled):
                    for name in fragment.use:
                        merge_fragment(document, self.settings[name])
                    merge_fragment(document, fragment.set)
                merge_fragment(document, scaled.overrides.get(row, {}))
                document.setdefault("seeds", scaled.seeds)
                published = {name: parse_published(value) for name, value in method.published.get(column, {}).items()}
                yield RecipeCell(row, column, document, published)


class PublishedValue(NamedTuple):
    """A published number, its deviation over seeds if reported, and whether it is only a lower bound ("500+")."""

    value: float
    spread: float | None = None
    exceeded: bool = False


class RecipeCell(NamedTuple):
    """One row in one column: the configuration to run, and the published numbers by measure."""

    row: str
    column: str
    document: dict[str, Any]
    published: Mapping[str, PublishedValue]

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.row}, {self.column}" if self.column else self.row


def parse_published(value: Any) -> PublishedValue:
    """Parse a published number as a recipe writes it.

    >>> parse_published([88.79, 0.16])
    PublishedValue(value=88.79, spread=0.16, exceeded=False)
    >>> parse_published("500+")
    PublishedValue(value=500.0, spread=None, exceeded=True)
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]+\+", value):
        return PublishedValue(float(value[:-1]), exceeded=True)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return PublishedValue(float(value[0]), float(value[1]))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return PublishedValue(float(value))
    raise ValueError(f"{value!r}: expected a number, [number, spread] or a text like 500+.")


def merge_fragment(document: dict[str, Any], fragment: Mapping[str, Any]) -> None:
    """Merge a fragment into a configuration: sections key by key; other values are replaced.

    >>> document = {"local": {"lr": 0.1, "steps": 3}, "rounds": 5}
    >>> merge_fragment(document, {"local": {"steps": 7}, "sample": {"count": 2}})
    >>> document
    {'local': {'lr': 0.1, 'steps': 7}, 'rounds': 5, 'sample': {'count': 2}}
    """
    for key, value in fragment.items():
        if key in SECTIONS and isinstance(value, Mapping):
            document[key] = {**document.get(key, {}), **value}
        else:
            document[key] = value


SECTIONS = ("data", "model", "algorithm", "local", "server", "gossip", "compress", "evaluate", "checkpoint", "engine")
"""Sections that are merged key by key; a component, such as a sampler, is replaced."""


def read_recipes(path: Path) -> dict[str, Recipe]:
    """Read the recipes of a file, by name."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HansaError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("recipes"), dict):
        raise HansaError(f"{path}: expected settings, scales and recipes, each by name.")
    shared = {"paper": content.get("paper"), "settings": content.get("settings", {})}
    recipes = {}
    for name, body in content["recipes"].items():
        if not isinstance(body, dict):
            raise HansaError(f"{path}: recipes.{name}: expected a mapping.")
        scales = {**content.get("scales", {}), **body.get("scales", {})}
        try:
            recipes[name] = Recipe.model_validate({**shared, **body, "name": name, "scales": scales})
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise HansaError(f"{path}: recipes.{name}: {at}{': ' if at else ''}{first['msg']}") from error
    return recipes


@cache
def library() -> Mapping[str, Recipe]:
    """Return all recipes of the package, by name.

    >>> library()["hafed-table-1"].rows["HA-Fed"].published["Fashion-MNIST, CNN"]["accuracy"]
    [89.25, 0.22]
    """
    recipes: dict[str, Recipe] = {}
    for paper in ("cams", "hafed", "afga", "aware"):
        recipes.update(read_recipes(Path(str(files("hansa.study.recipes").joinpath("library", f"{paper}.yaml")))))
    return recipes


def find_recipes(name: str) -> list[Recipe]:
    """Return the recipes of that name, of a paper (``cams``), or of a YAML file."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return list(read_recipes(Path(name)).values())
    if name in library():
        return [library()[name]]
    if of_paper := [recipe for each, recipe in library().items() if each.startswith(f"{name}-")]:
        return of_paper
    raise HansaError(f"{name}: not a recipe, a paper or a file. {suggestion(name, library())}")


def _known(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: {name!r} is not known. {suggestion(name, known)}")
