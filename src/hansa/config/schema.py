"""JSON Schema of a configuration file, for editors: completion and checks while typing."""

from __future__ import annotations

import ast
import inspect
from typing import Any, cast

from hansa.config import sections
from hansa.config.arguments import own_words
from hansa.config.registry import KINDS
from hansa.config.registry.schema import PLACE, argument_schema, definitions, resolved
from hansa.config.sections import Config


def json_schema() -> dict[str, Any]:
    """The schema of `Config`, with the presets, their words and all parts written out."""
    schema = Config.model_json_schema()
    for section, told in described().items():
        within = schema if section == "Config" else schema["$defs"].get(section, {})
        for key, text in told.items():
            if key in within.get("properties", {}):
                within["properties"][key]["description"] = text
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A Hansa run"
    known = dict(KINDS["preset"].items())
    words: dict[str, Any] = {}
    for name, preset in known.items():
        for word in own_words(preset).values():
            entry = words.setdefault(word.name, {**argument_schema(word), "description": "Of"})
            entry["description"] += f"{',' if entry['description'] != 'Of' else ''} {name}"
    method = {"anyOf": [{"enum": list(known)}, {"type": "string", "pattern": PLACE}]}
    section = schema["$defs"]["AlgorithmSection"]
    section["properties"]["preset"] = {**section["properties"]["preset"], **method}
    section["properties"].update(words)
    section["additionalProperties"] = True  # a preset of one's own has words of its own
    bare: dict[str, Any] = {
        "algorithm": method,
        "model": {"type": "string"},
        "data": {"type": "string"},
        "engine": {"type": "string"},
    }
    for name, word_schema in bare.items():
        schema["properties"][name] = {"anyOf": [word_schema, schema["properties"][name]]}
    schema["$defs"].update(definitions())
    return cast(dict[str, Any], resolved(schema))


def described() -> dict[str, dict[str, str]]:
    """What stands under each key of each section, read from the source: pydantic would read it whenever any command
    looks at a file.

    >>> described()["DataSection"]["name"]
    'A data set: `hansa data list` shows them all.'
    """
    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(sections)).body:
        if isinstance(section, ast.ClassDef):
            told = found.setdefault(section.name, {})
            for key, text in zip(section.body, section.body[1:], strict=False):
                if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr):
                    told[key.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
