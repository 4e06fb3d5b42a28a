"""JSON Schema of slots and kinds, for editors: completion and checks while typing."""

from __future__ import annotations

import math
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation

from hansa.config.registry.components import KINDS, Factory, Kind
from hansa.config.registry.fields import Slot, signature_of, slot_of
from hansa.config.registry.signatures import EMPTY, Argument, first_line

PLACE = "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
"""MODULE:NAME."""
TYPES = {int: "integer", float: "number", list: "array", str: "string", bool: "boolean", dict: "object"}


def definitions() -> dict[str, Any]:
    """All kinds of parts but the presets, by name, for the ``$defs`` of a schema."""
    return {kind.name: kind_schema(kind) for kind in KINDS.values() if kind.name != "preset"}


def slot_schema(slot: Slot) -> dict[str, Any]:
    """What an editor may offer in a slot; kinds are marked, for `resolved` to refer to their definitions."""
    found: list[dict[str, Any]] = [{"type": TYPES[each]} for each in slot.plain]
    if float in slot.plain:
        found.append({"type": "string", "pattern": "^[0-9]+/[0-9]+$"})
    if slot.words:
        found.append({"enum": list(slot.words)})
    found += [{"part": kind.name} for kind in slot.kinds]
    found += [_list_schema(kind) for kind in slot.kinds if kind.listed is not None]
    if slot.loose or not found:
        return {}
    return found[0] if len(found) == 1 else {"anyOf": found}


def _list_schema(kind: Kind) -> dict[str, Any]:
    """A list that stands for a part, by the first argument of what makes one of it."""
    assert kind.listed is not None
    each = slot_of(next(iter(signature_of(kind.listed).arguments.values()))).items
    inner = {"part": kind.name} if each is not None and kind in each.kinds else slot_schema(each or Slot())
    return {"type": "array", "items": inner}


def argument_schema(argument: Argument) -> dict[str, Any]:
    """What an editor may offer for an argument."""
    slot = slot_of(argument)
    found = slot_schema(slot) if slot.kinds or slot.items or float in slot.plain else type_schema(argument.hint)
    if isinstance(argument.default, (bool, int, float, str)) and argument.default != math.inf:
        return {**found, "default": argument.default}
    return found


def kind_schema(kind: Kind) -> dict[str, Any]:
    """All parts of a kind: the bare names of those that need no arguments, each with its arguments, and one's own."""
    parts = dict(kind.items())
    bare = [name for name, part in parts.items() if not _required(part)]
    own = {
        "type": "object",
        "title": f"a {kind.title} of yours",
        "properties": {"kind": _place()},
        "required": ["kind"],
    }
    known = [_part_schema(name, part, optional=kind.default == name) for name, part in parts.items()]
    return {"anyOf": [*([{"enum": bare}] if bare else []), *known, _place(), own]}


def resolved(value: Any) -> Any:
    """The marks that slots leave, turned into references."""
    if isinstance(value, dict):
        if isinstance(value.get("part"), str):
            rest = {key: inner for key, inner in value.items() if key != "part"}
            return {"$ref": f"#/$defs/{value['part']}", **rest}
        return {key: resolved(inner) for key, inner in value.items()}
    return [resolved(inner) for inner in value] if isinstance(value, list) else value


def type_schema(hint: Any) -> dict[str, Any]:
    """What an editor may offer for a type; anything where JSON has no word for it."""
    try:
        return {} if hint is EMPTY else TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation):
        return {}


def _place() -> dict[str, Any]:
    return {"type": "string", "pattern": PLACE, "description": "MODULE:NAME of yours; reading the file imports it."}


def _required(part: Factory) -> list[str]:
    return [argument.name for argument in signature_of(part).arguments.values() if argument.required]


def _part_schema(name: str, part: Factory, optional: bool) -> dict[str, Any]:
    known = signature_of(part)
    properties = {argument.name: argument_schema(argument) for argument in known.arguments.values()}
    return {
        "type": "object",
        "title": name,
        "description": first_line(part),
        "properties": {"kind": {"const": name}, **properties},
        "required": [*([] if optional else ["kind"]), *_required(part)],
        "additionalProperties": known.open,
    }
