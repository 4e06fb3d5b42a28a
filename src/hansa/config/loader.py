"""Load, validate and write configurations; all problems are reported at once, with lines and near keys.

Their JSON Schema lets editors complete and check keys while typing.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from hansa.algorithm import Algorithm
from hansa.config import sections
from hansa.config.components import KINDS, Kind, signature_of, summary_line
from hansa.config.compose import compose, own_arguments
from hansa.config.fields import ComponentField, describe_error, explain
from hansa.config.import_path import may_import
from hansa.config.sections import Config
from hansa.config.yaml_text import ConfigError, Document, Keys, Problem, parse_document, read_document
from hansa.core.errors import suggestion
from hansa.core.protocols import citations


def load(path: Path | str, changes: Iterable[str] = (), *, building: bool = True) -> Config:
    """Load the configuration in a file.

    Args:
        path: The YAML file.
        changes: Assignments such as ``local.lr=0.1``, applied to it.
        building: Whether to check its components by building them. Components whose code the file names are checked
            only within `allow_code`, which imports it.
    """
    return validate(read_document(path), changes, building=building)


def from_yaml(text: str, changes: Iterable[str] = (), source: str = "config", *, building: bool = True) -> Config:
    """Read a configuration from YAML text; the arguments are those of `load`.

    >>> from_yaml("algorithm: fedams\\nlocal: {lr: 0.1}", ["local.steps=24"]).local.steps
    24
    """
    return validate(parse_document(text, source), changes, building=building)


def from_preset(name: str, changes: Iterable[str] = ()) -> Config:
    """Return the configuration of a preset on the embedded data, with all other defaults."""
    return validate(Document({"algorithm": {"preset": name}}, f"--preset {name}"), changes)


def validate(document: Document, changes: Iterable[str] = (), *, building: bool = True) -> Config:
    """Return the configuration of a document, or raise `ConfigError` with all its problems."""
    for change in changes:
        document.apply(change)
    try:
        config = Config.model_validate(document.data)
        if building and config.python is None:
            compose(config, checking=not may_import())
    except ValidationError as error:
        raise _refusal(document, explain(document.data, error, _describe)) from error
    except ConfigError as error:
        raise _refusal(document, error.problems) from error
    return config


def _refusal(document: Document, problems: Iterable[Problem]) -> ConfigError:
    """Return the error for problems of a document, ordered by line."""
    located = (document.problem(problem.keys, problem.message) for problem in problems)
    return ConfigError(sorted(located, key=lambda problem: problem.line))


def build_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that a configuration describes, or raise `ConfigError`."""
    return cast(Algorithm, compose(config))


def cited_works(config: Config) -> list[str]:
    """Return the citation keys of all components of a configuration."""
    return list(config.python.cites) if config.python is not None else citations(build_algorithm(config))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain data, without empty sections and unset keys."""
    unused = {"data", "model", "algorithm", "dtype", "quorum", "max_norm"}
    data = config.model_dump(exclude_none=True, exclude=None if config.python is None else unused)
    if config.data.factory is not None and config.python is None:
        del data["data"]["name"]
    for key, value in data.items():
        if isinstance(value, dict):
            data[key] = {name: inner for name, inner in value.items() if inner != {}}
    return {key: value for key, value in data.items() if value != {}}


def to_yaml(config: Config, comments: Sequence[str] = ()) -> str:
    """Return the resolved configuration as YAML, with comments on top."""
    text = yaml.safe_dump(to_dict(config), default_flow_style=None, sort_keys=False, width=110, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comments) + text


def _describe(item: Mapping[str, Any], keys: Keys) -> str:
    """Return the message of one of pydantic's errors, with the keys of its section."""
    if item["type"] == "extra_forbidden":
        return f"no such key. {_suggest_key(keys)}"
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"expected keys such as {', '.join(list(_section_keys(keys))[:3])}"
    return describe_error(item, keys)


def _section_keys(keys: Keys) -> Mapping[str, Any]:
    """Return the keys of a section."""
    model: Any = Config
    for key in keys:
        arguments = typing.get_args(model)  # of sections by name
        model = arguments[1] if arguments else model.model_fields[str(key)].annotation
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else {}


def _suggest_key(keys: Keys) -> str:
    """Suggest a near match in the section, else the same key in other sections, else all keys of the section."""
    section_keys, name = _section_keys(keys[:-1]), str(keys[-1])
    elsewhere = [f"{section}.{name}" for section in Config.model_fields if name in _section_keys((section,))]
    if elsewhere and name != "kind" and not difflib.get_close_matches(name, section_keys, n=1, cutoff=0.6):
        return f"Did you mean {' or '.join(elsewhere[:3])}?"
    return suggestion(name, section_keys)


# ---- JSON Schema of configuration files and components, for editors

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
