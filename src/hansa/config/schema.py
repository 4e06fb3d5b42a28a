"""JSON Schema of configuration files and components, for editors: completion and checks while typing."""

from __future__ import annotations

import ast
import inspect
import json
import math
from typing import Any, cast

from hansa.config import sections
from hansa.config.components import KINDS, Kind, signature_of, summary_line
from hansa.config.compose import own_arguments
from hansa.config.fields import ComponentField
from hansa.config.sections import Config

IMPORT_PATH = {
    "type": "string",
    "pattern": "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$",
    "description": "Your MODULE:NAME; the commands that train import it.",
}


def json_schema() -> dict[str, Any]:
    """Return the schema of `Config`, with all presets, their arguments and all components."""
    schema = Config.model_json_schema()
    for section, descriptions in key_descriptions().items():
        definition = schema if section == "Config" else schema["$defs"].get(section, {})
        for key, text in descriptions.items():
            if key in definition.get("properties", {}):
                definition["properties"][key]["description"] = text
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A Hansa run"
    presets = dict(KINDS["preset"].items())
    arguments: dict[str, Any] = {}
    for name, preset in presets.items():
        for argument in own_arguments(preset).values():
            entry = arguments.setdefault(argument.name, {**argument_schema(argument), "description": "Of"})
            entry["description"] += f"{',' if entry['description'] != 'Of' else ''} {name}"
    preset_schema = {"anyOf": [{"enum": list(presets)}, IMPORT_PATH]}
    section = schema["$defs"]["AlgorithmSection"]
    section["properties"]["preset"] = {**section["properties"]["preset"], **preset_schema}
    section["properties"].update(arguments)
    section["additionalProperties"] = True  # user-defined presets have their own arguments
    short_forms = {name: {"type": "string"} for name in ("model", "data", "engine")}
    for name, short_form in {**short_forms, "algorithm": preset_schema, "server": {"$part": "#/$defs/server"}}.items():
        schema["properties"][name] = {"anyOf": [short_form, schema["properties"][name]]}
    schema["$defs"].update({kind.name: kind_schema(kind) for kind in KINDS.values() if kind.name != "preset"})
    return cast(dict[str, Any], json.loads(json.dumps(schema).replace('"$part"', '"$ref"')))


def key_descriptions() -> dict[str, dict[str, str]]:
    """Return the docstring of each key of each section, read from the source.

    pydantic would read it at every load of a file.

    >>> key_descriptions()["DataSection"]["name"]
    'A data set: `hansa data list` shows them all.'
    """
    descriptions: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(sections)).body:
        if isinstance(section, ast.ClassDef):
            keys = descriptions.setdefault(section.name, {})
            for key, text in zip(section.body, section.body[1:], strict=False):
                if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr):
                    keys[key.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return descriptions


def argument_schema(argument: inspect.Parameter) -> dict[str, Any]:
    """Return the schema of an argument."""
    schema = ComponentField(argument.annotation).adapter.json_schema()
    plain = isinstance(argument.default, (bool, int, float, str)) and argument.default != math.inf
    return {**schema, "default": argument.default} if plain else schema


def kind_schema(kind: Kind) -> dict[str, Any]:
    """Return the schema of a kind: bare names, components with arguments, and import paths."""
    bare, components = [], []
    for name, factory in kind.items():
        signature = signature_of(factory)
        arguments = {key: argument_schema(argument) for key, argument in signature.arguments.items()}
        bare += [] if signature.required else [name]
        components.append(
            {
                "type": "object",
                "title": name,
                "description": summary_line(factory),
                "properties": {"kind": {"const": name}, **arguments},
                "required": [*([] if kind.default == name else ["kind"]), *signature.required],
                "additionalProperties": signature.accepts_any,
            }
        )
    properties = {"type": "object", "properties": {"kind": IMPORT_PATH}, "required": ["kind"]}
    user = {"title": f"a {kind.title} of your own", **properties}
    return {"anyOf": [*([{"enum": bare}] if bare else []), *components, IMPORT_PATH, user]}
