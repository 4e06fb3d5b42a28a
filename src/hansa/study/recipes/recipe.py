"""A published table or figure as data: what to train, the reported numbers, the paper's claims, and the scales.

A file of the library is one paper: named ``settings`` (fragments of configurations), the ``scales`` that its recipes
share, and the ``recipes``. A cell is one row in one column. Its configuration merges the fragments of the recipe, the
column, the row and the scale; later fragments win key by key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hansa.core.errors import HansaError, suggestion
from hansa.runs.columns import COLUMNS

SCALES = ("smoke", "cpu", "paper")
Statistic: TypeAlias = Literal[
    "best", "last", "last5", "last10", "mean", "max", "jitter", "growth", "rounds_to", "hours_to", "per_round"
]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class RecipeMeasure(StrictModel):
    """One number of a run: a statistic of a metric, with its unit and the tolerance of the comparison."""

    metric: str = "test_accuracy"
    statistic: Statistic = "best"
    """The best, last, mean or largest value; rounds or hours to a target; the increase in the last round; ``jitter``,
    the mean absolute change between evaluations in the second half of the curve; or ``growth``, the mean of the second
    half divided by that of the first."""
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
    counted: bool = False
    """Whether it is a count that depends on neither data nor seed, such as bits."""

    @property
    def recorded(self) -> tuple[str, ...]:
        """The recorded columns from which it follows.

        >>> RecipeMeasure(metric="server_bits").recorded
        ('up_bytes', 'down_bytes')
        """
        column = COLUMNS.get(self.metric)
        sums = () if column is None else column.sum_of
        return (*(sums or (self.metric,)), *["simulated_seconds"] * (self.statistic == "hours_to"))

    @model_validator(mode="after")
    def _target(self) -> RecipeMeasure:
        if (self.target is not None) != (self.statistic in ("rounds_to", "hours_to")):
            raise ValueError("target: expected with rounds_to and hours_to only.")
        return self


class ConfigFragment(StrictModel):
    """A fragment of a configuration: named settings (``use``), then its own keys (``set``)."""

    use: tuple[str, ...] = ()
    set: dict[str, Any] = {}


class RecipeRow(ConfigFragment):
    """A method, or a value of a varied parameter, with its published numbers by column and measure.

    A published number is a number, a pair [number, standard deviation], or "500+" for a target not reached within 500.
    """

    columns: tuple[str, ...] = ()
    """The columns that have the row; by default all."""
    published: dict[str, dict[str, Any]] = {}
    overrides: dict[str, dict[str, Any]] = {}
    """Additional keys in some columns."""


class PaperClaim(StrictModel):
    """A claim of the paper about one measure: exactly one of ``order``, ``better``, ``similar`` and ``at_most``.

    It compares rows within each column or, with ``across: columns``, columns within each row.
    """

    statement: str
    measure: str
    across: Literal["rows", "columns"] = "rows"
    columns: tuple[str, ...] = ()
    """The columns it applies to, if it compares rows; by default all."""
    rows: tuple[str, ...] = ()
    """The rows it applies to, if it compares columns or states a bound; by default all."""
    order: tuple[str, ...] = ()
    """Best first: each is better than the next."""
    better: tuple[str, ...] = ()
    """Each of these is better than each of ``than``."""
    than: tuple[str, ...] = ()
    """By default all others."""
    similar: tuple[str, ...] = ()
    """Any two of these differ by at most ``tolerance``."""
    tolerance: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_form(self) -> PaperClaim:
        bounded, across_rows = self.at_most is not None, self.across == "rows"
        forms = [self.order, self.better, self.similar, bounded]
        problems = {
            "order, better, similar and at_most: expected exactly one of them": sum(map(bool, forms)) != 1,
            "order and similar: expected at least two names": 1 in (len(self.order), len(self.similar)),
            "better and than: a name is in both": set(self.better) & set(self.than),
            "than: expected with better only": self.than and not self.better,
            "tolerance: expected with similar only": (self.tolerance is not None) != bool(self.similar),
            "columns and at_most: expected with claims across rows only": not across_rows and (self.columns or bounded),
            "rows: expected with claims across columns and with bounds only": self.rows and across_rows and not bounded,
        }
        for message in (message for message, wrong in problems.items() if wrong):
            raise ValueError(f"{message}.")
        return self

    @property
    def named(self) -> tuple[str, ...]:
        """The rows (or columns) that it compares."""
        return self.order or self.similar or (*self.better, *self.than)

    def pairs(self, names: Iterable[str]) -> Iterable[tuple[str, str]]:
        """Return the pairs to compare; ``names`` are the candidates that ``better`` may be better than."""
        if self.better:
            return product(self.better, self.than or [name for name in names if name not in self.better])
        return pairwise(self.order) if self.order else combinations(self.similar, 2)


class RecipeScale(ConfigFragment):
    """The size of a recipe's runs, and how it differs from the published setting."""

    reduction: str = ""
    seeds: int = Field(default=1, ge=1)
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    overrides: dict[str, dict[str, Any]] = {}
    """Additional keys of some rows at this scale."""
    compares: Literal["numbers", "order", "nothing"] = "order"
    """What is compared with the paper at this scale."""
    targets: dict[str, float] = {}
    """Targets of some measures at this scale, if its data are not the paper's."""


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
    spread: Literal["deviation", "standard error"] = "deviation"
    """The meaning of the paper's ±."""
    published_seeds: int = Field(default=1, ge=1)
    """The number of seeds behind a published mean; 1 if the paper does not say."""
    scales: dict[str, RecipeScale]
    settings: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name, row in self.rows.items():
            columns = row.columns or self.columns
            _check_names(row.columns, self.columns, f"rows.{name}.columns")
            _check_names(row.overrides, columns, f"rows.{name}.overrides")
            _check_names(row.published, columns, f"rows.{name}.published")
            for column, numbers in row.published.items():
                _check_names(numbers, self.measures, f"rows.{name}.published.{column}")
                for value in numbers.values():
                    parse_published(value)
        for claim in self.claims:
            _check_names([claim.measure], self.measures, "claims")
            _check_names(claim.named, self.rows if claim.across == "rows" else self.columns, "claims")
            _check_names(claim.rows, self.rows, "claims")
            _check_names(claim.columns, self.columns, "claims")
        to_target = [name for name, measure in self.measures.items() if measure.target is not None]
        _check_names(self.scales, SCALES, "scales")
        for name, scale in self.scales.items():
            _check_names([*scale.rows, *scale.overrides], self.rows, f"scales.{name}.rows")
            _check_names(scale.columns, self.columns, f"scales.{name}.columns")
            _check_names(scale.targets, to_target, f"scales.{name}.targets")
        fragments: list[ConfigFragment] = [self, *self.columns.values(), *self.rows.values(), *self.scales.values()]
        for fragment in fragments:
            _check_names(fragment.use, self.settings, "use")
        return self

    def at(self, scale: str) -> RecipeScale:
        """Return one of its scales."""
        if scale not in self.scales:
            raise HansaError(f"{self.name}: has no scale {scale!r}. {suggestion(scale, self.scales)}")
        return self.scales[scale]

    def cells(self, scale: str) -> Iterator[RecipeCell]:
        """Yield the cells to train at a scale, column by column."""
        scaled = self.at(scale)
        for column, settings in self.columns.items():
            for row, method in self.rows.items():
                if (scaled.columns and column not in scaled.columns) or (scaled.rows and row not in scaled.rows):
                    continue
                if method.columns and column not in method.columns:
                    continue
                document: dict[str, Any] = {}
                for fragment in (self, settings, method, ConfigFragment(set=method.overrides.get(column, {})), scaled):
                    for name in fragment.use:
                        merge_fragment(document, self.settings[name])
                    merge_fragment(document, fragment.set)
                merge_fragment(document, scaled.overrides.get(row, {}))
                document.setdefault("seeds", scaled.seeds)
                published = {
                    name: parse_published(value, self.spread, self.published_seeds)
                    for name, value in method.published.get(column, {}).items()
                }
                yield RecipeCell(row, column, document, published)

    def same_data(self, scale: str) -> bool:
        """Return whether a scale trains on the data sets of the paper; true for recipes without the scale ``paper``.

        >>> [library()[name].same_data("cpu") for name in ("hafed-table-1", "afga-table-1", "aware-table-1")]
        [True, False, False]
        """
        if "paper" not in self.scales:
            return True
        papers = {(cell.row, cell.column): _data_of(cell) for cell in self.cells("paper")}
        return all(papers.get((cell.row, cell.column)) == _data_of(cell) for cell in self.cells(scale))

    def measured(self, scale: str) -> dict[str, RecipeMeasure]:
        """Return the measures of a scale, with its targets.

        A target accuracy of the paper is meaningless on other data: such a measure is omitted unless the scale sets its
        own target or compares nothing.

        >>> list(library()["afga-table-5"].measured("paper")), list(library()["afga-figure-2"].measured("cpu"))
        (['accuracy', 'rounds'], ['accuracy', 'accuracy over the run', 'loss', 'loss over the run'])
        """
        targets = self.at(scale).targets
        comparable = self.at(scale).compares == "nothing" or self.same_data(scale)
        return {
            name: measure.model_copy(update={"target": targets[name]}) if name in targets else measure
            for name, measure in self.measures.items()
            if name in targets or comparable or measure.target is None
        }


class PublishedValue(NamedTuple):
    """A published number, its ± if reported, whether it is only a lower bound ("500+"), and its standard error."""

    value: float
    spread: float | None = None
    exceeded: bool = False
    standard_error: float = 0.0


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


def parse_published(value: Any, spread: str = "deviation", seeds: int = 1) -> PublishedValue:
    """Parse a published number of a recipe.

    Args:
        value: A number, [number, ±] or a text like 500+.
        spread: The meaning of ±: ``deviation`` (the standard error is ± / sqrt(seeds)) or ``standard error``.
        seeds: The number of seeds behind the mean.

    >>> parse_published([88.79, 0.16], "standard error", seeds=3)
    PublishedValue(value=88.79, spread=0.16, exceeded=False, standard_error=0.16)
    >>> parse_published([80.0, 2.0], seeds=4)
    PublishedValue(value=80.0, spread=2.0, exceeded=False, standard_error=1.0)
    >>> parse_published("500+").exceeded
    True
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]+\+", value):
        return PublishedValue(float(value[:-1]), exceeded=True)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        deviation = float(value[1])
        error = deviation if spread == "standard error" else deviation / math.sqrt(seeds)
        return PublishedValue(float(value[0]), deviation, standard_error=error)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return PublishedValue(float(value))
    raise ValueError(f"{value!r}: expected a number, [number, spread] or a text like 500+.")


def _data_of(cell: RecipeCell) -> tuple[str, int]:
    """Return the data set of a cell and the downsampling of its images, which must match to compare accuracies."""
    data = cell.document.get("data", {})
    if not isinstance(data, Mapping):
        return str(data), 1
    return str(data.get("factory") or data.get("name", "")), (data.get("options") or {}).get("downsample", 1)


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
    shared |= {name: content[name] for name in ("spread", "published_seeds") if name in content}
    recipes = {}
    for name, body in content["recipes"].items():
        if not isinstance(body, dict):
            raise HansaError(f"{path}: recipes.{name}: expected a mapping.")
        scales = {**content.get("scales", {}), **body.get("scales", {})}
        try:
            recipes[name] = Recipe.model_validate({**shared, **body, "name": name, "scales": scales})
        except ValidationError as error:
            problem = error.errors()[0]
            location = ".".join(map(str, problem["loc"]))
            raise HansaError(f"{path}: recipes.{name}: {location}{': ' if location else ''}{problem['msg']}") from error
    return recipes


@cache
def library() -> Mapping[str, Recipe]:
    """Return all recipes of the package, by name.

    >>> library()["hafed-table-1"].rows["HA-Fed"].published["Fashion-MNIST, CNN"]["accuracy"]
    [89.25, 0.22]
    """
    recipes: dict[str, Recipe] = {}
    for paper in ("cams", "hafed", "afga", "aware", "flamby", "niid", "reddi", "open"):
        recipes.update(read_recipes(Path(str(files("hansa.study.recipes").joinpath("library", f"{paper}.yaml")))))
    return recipes


def find_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a name, a paper (``cams``) or a YAML file."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return list(read_recipes(Path(name)).values())
    if name in library():
        return [library()[name]]
    if recipes := [recipe for key, recipe in library().items() if key.startswith(f"{name}-")]:
        return recipes
    raise HansaError(f"{name}: not a recipe, a paper or a file. {suggestion(name, library())}")


def _check_names(names: Iterable[str], allowed: Collection[str], location: str) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{location}: {name!r} is not known. {suggestion(name, allowed)}")
