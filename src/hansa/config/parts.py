"""Parts in a file: explicit tables from ``{kind: dirichlet, alpha: 0.3}`` to the part it names.

Nothing is imported by the words of a file: what is not in a table cannot be named.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation
from pydantic_core import CoreSchema, core_schema

from hansa import aggregate, compress, gossip, local, sample, schedule, server
from hansa.config.text import Keys
from hansa.data.partitions import dirichlet, iid, natural, quantity_skew, shards
from hansa.data.split import saved
from hansa.errors import HansaError, near, shown
from hansa.rounds.faults import faults
from hansa.runs import ledger

Table = Mapping[str, Callable[..., Any]]


class Misfit(ValueError):
    """A part that cannot be made as written; ``keys`` say where inside it."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(message)
        self.keys, self.message = keys, message


def _table(*parts: Callable[..., Any]) -> Table:
    return {part.__name__: part for part in parts}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a file where a part stands: ``{kind: NAME, ...}``, a bare ``NAME``, or a plain value as it is."""

    word: str
    table: Table
    default: str | None = None
    plain: tuple[type, ...] = ()

    def build(self, value: Any) -> Any:
        """The part, or `Misfit` naming the argument and the remedy."""
        if value is None or self._is_plain(value):
            return self._chained(value) if self is SERVER and isinstance(value, list) else value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping):
            raise Misfit((), f"expected {self._expected()}, found {shown(value)}.")
        kind, given = self._split(value)
        part = self.table[kind]
        known = inspect.signature(part).parameters
        for name in given:
            if name not in known:
                raise Misfit(
                    (name,), f"{kind} has no {shown(name)}. {near(name, known) if known else 'It takes none.'}"
                )
        for name, parameter in known.items():
            if parameter.default is inspect.Parameter.empty and name not in given:
                raise Misfit((), f"{kind} needs {name}.")
        return self._make(kind, {name: _nested(name, _number(inner)) for name, inner in given.items()})

    def normal(self, value: Any) -> Any:
        """The value as a saved file writes it: a bare word as ``{kind: word}``. Refuses what cannot be built."""
        self.build(value)
        if isinstance(value, str) and not self._is_plain(value):
            return {"kind": value}
        if isinstance(value, Mapping):
            kind, given = self._split(value)
            return {"kind": kind, **given}
        return value

    def _is_plain(self, value: Any) -> bool:
        return bool in self.plain if isinstance(value, bool) else isinstance(value, self.plain)

    def _split(self, value: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
        given = {str(name): inner for name, inner in value.items()}
        kind = given.pop("kind", self.default)
        if kind is None:
            raise Misfit((), f"which {self.word}? Add kind: one of {', '.join(self.table)}.")
        kind = str(kind).replace("-", "_")
        if kind not in self.table:
            raise Misfit(("kind",), f"no {self.word} {shown(kind)}. {near(kind, self.table)}")
        return kind, given

    def _make(self, kind: str, arguments: dict[str, Any]) -> Any:
        try:
            return self.table[kind](**arguments)
        except HansaError as error:
            found = re.search(r"\((\w+)", str(error))
            at = found.group(1) if found else ""
            raise Misfit((at,) if at in arguments else (), str(error)) from error
        except (TypeError, ValueError) as error:
            raise Misfit((), f"{kind}: {error}.") from error

    def _chained(self, parts: list[Any]) -> Any:
        """A list of server transforms is the chain of them."""
        found = []
        for place, part in enumerate(parts):
            try:
                found.append(self.build(part))
            except Misfit as misfit:
                raise Misfit((place, *misfit.keys), misfit.message) from misfit
        return server.chain(*found)

    def _expected(self) -> str:
        names = {int: "a whole number", float: "a number", list: "a list", str: "a word", bool: "true or false"}
        plain = [names[kind] for kind in dict.fromkeys(self.plain) if kind in names]
        return " or ".join([*plain, f"a {self.word} ({', '.join(self.table)})"])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.normal)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.reference

    @property
    def reference(self) -> dict[str, Any]:
        """Where `definition` stands in the schema, marked for `hansa.config.schema` to resolve."""
        return {"part": self.name}

    @property
    def name(self) -> str:
        """What the schema calls it."""
        return self.word.replace(" ", "_")

    def definition(self) -> dict[str, Any]:
        """What an editor may offer here."""
        types = {int: "integer", float: "number", list: "array", str: "string", bool: "boolean"}
        plain = [{"type": types[kind]} for kind in self.plain if kind in types]
        bare = [kind for kind, part in self.table.items() if not _required(part)]
        words = [{"enum": bare}] if bare and str not in self.plain else []
        parts = [_part_schema(kind, part, self.default == kind) for kind, part in self.table.items()]
        return {"anyOf": [*plain, *words, *parts]}


PARTITION = Slot("partition", _table(iid, shards, dirichlet, quantity_skew, natural, saved))
RATE = Slot(
    "schedule",
    _table(schedule.step_decay, schedule.inverse_sqrt, schedule.cosine, schedule.warmup, schedule.piecewise),
    plain=(int, float),
)
WORK = Slot(
    "kind of local work",
    _table(local.fixed, local.epochs, local.random_steps, local.hybrid_plus, local.drawn, local.deadline),
    plain=(int, list),
)
DRAWN = Slot("distribution", _table(local.between, local.one_of, local.lognormal), plain=(int, float, list))
SAMPLER = Slot(
    "sampler",
    _table(
        sample.uniform,
        sample.weighted,
        sample.explore,
        sample.startup,
        sample.availability,
        sample.replay,
        sample.per_cluster,
    ),
    default="uniform",
)
COMPRESSOR = Slot(
    "compressor",
    _table(
        compress.identity,
        compress.cast,
        compress.sign,
        compress.top_k,
        compress.random_k,
        compress.quantize,
        compress.grid,
    ),
)
UPLINK = Slot("uplink", _table(compress.direct, compress.error_feedback, compress.memoryless))
DOWNLINK = Slot("downlink", _table(compress.direct, compress.replica))
TWO_WAY = Slot("compressor or downlink", {**COMPRESSOR.table, **DOWNLINK.table}, plain=(bool,))
AGGREGATE = Slot(
    "aggregate",
    _table(
        aggregate.mean,
        aggregate.nova,
        aggregate.mgda,
        aggregate.median,
        aggregate.trimmed_mean,
        aggregate.krum,
        aggregate.clipped,
        aggregate.aware,
    ),
)
TOPOLOGY = Slot("topology", gossip.TOPOLOGIES)
CLUSTERS = Slot("clustering", gossip.CLUSTERINGS, plain=(int, list))
ACTIVE = Slot("activity", gossip.ACTIVITIES, plain=(int, float))
REPORTERS = Slot("choice of reporters", _table(sample.replay, sample.per_cluster), plain=(int, float))
SERVER = Slot(
    "server transform",
    _table(server.scale, server.momentum, server.adagrad, server.adam, server.yogi, server.amsgrad, server.ams),
    plain=(list,),
)
LINKS = Slot("link model", {"custom": ledger.LinkModel, "afga": ledger.afga}, default="custom")
FAULTS = Slot("fault plan", _table(faults), default="faults")
_VALUES = Slot("form of values", COMPRESSOR.table, plain=(str,))

NESTED: Mapping[str, Slot] = {
    "epochs": DRAWN,
    "batch": DRAWN,
    "speed": DRAWN,
    "compressor": COMPRESSOR,
    "inner": AGGREGATE,
    "lr": RATE,
    "project": SERVER,
    "sampler": SAMPLER,
    "values": _VALUES,
}
"""Arguments of parts that are parts themselves."""

WORDS: Mapping[str, Slot] = {
    "compressor": COMPRESSOR,
    "uplink": UPLINK,
    "downlink": DOWNLINK,
    "two_way": TWO_WAY,
    "topology": TOPOLOGY,
    "clusters": CLUSTERS,
    "active": ACTIVE,
    "reporters": REPORTERS,
    "project": SERVER,
    "yogi_lr": RATE,
}
"""Words of presets that are parts."""

SLOTS = (
    PARTITION, RATE, WORK, SAMPLER, COMPRESSOR, UPLINK, DOWNLINK, TWO_WAY, AGGREGATE, TOPOLOGY, CLUSTERS, ACTIVE,
    REPORTERS, SERVER, DRAWN, LINKS, FAULTS, _VALUES,
)  # fmt: skip


_FRACTION = re.compile("([0-9]{1,18})/([0-9]{1,18})")


def _number(value: Any) -> Any:
    """A fraction as the number it is: the papers keep 1/64 of the entries, not 0.015625."""
    found = _FRACTION.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) / int(found[2]) if found and int(found[2]) else value


def _nested(name: str, value: Any) -> Any:
    if name not in NESTED:
        return value
    try:
        return NESTED[name].build(value)
    except Misfit as misfit:
        raise Misfit((name, *misfit.keys), misfit.message) from misfit


def _required(part: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(part).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]


def _part_schema(kind: str, part: Callable[..., Any], optional: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"kind": {"const": kind}}
    hints = _hints(part)
    for name, parameter in inspect.signature(part).parameters.items():
        properties[name] = NESTED[name].reference if name in NESTED else type_schema(hints.get(name, Any))
        if isinstance(parameter.default, (bool, int, float, str)) and parameter.default != math.inf:
            properties[name] = {**properties[name], "default": parameter.default}
    return {
        "type": "object",
        "title": kind,
        "description": (inspect.getdoc(part) or "").split("\n\n")[0],
        "properties": properties,
        "required": [*([] if optional else ["kind"]), *_required(part)],
        "additionalProperties": False,
    }


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(part)
    except NameError:  # a name imported for type checkers only
        return {}


def type_schema(hint: Any) -> dict[str, Any]:
    """What an editor may offer for a type; anything where JSON has no word for it. A number may be a fraction, 1/64."""
    try:
        found = TypeAdapter(hint).json_schema()
        return {"type": ["number", "string"], "pattern": "^[0-9]+/[0-9]+$"} if found == {"type": "number"} else found
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation):
        return {}
