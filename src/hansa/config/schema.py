"""JSON Schema of a configuration file, for editors: completion and checks while typing."""

from __future__ import annotations

from typing import Any, cast

from hansa import presets
from hansa.config import parts
from hansa.config.arguments import own_words
from hansa.config.parts import type_schema
from hansa.config.sections import Config


def json_schema() -> dict[str, Any]:
    """The schema of `Config`, with the presets, their words and all parts written out."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A Hansa run"
    known = presets.catalogue()
    words: dict[str, Any] = {}
    for name, preset in known.items():
        for word in own_words(preset).values():
            entry = words.setdefault(word.name, {**_word_schema(word.name, word.hint), "description": "Of"})
            entry["description"] += f"{',' if entry['description'] != 'Of' else ''} {name}"
    section = schema["$defs"]["AlgorithmSection"]
    section["properties"]["preset"]["enum"] = list(known)
    section["properties"].update(words)
    section["additionalProperties"] = False
    bare: dict[str, Any] = {"algorithm": {"enum": list(known)}, "model": {"type": "string"}, "data": {"type": "string"}}
    for name, word_schema in bare.items():
        schema["properties"][name] = {"anyOf": [word_schema, schema["properties"][name]]}
    schema["$defs"].update({slot.name: slot.definition() for slot in parts.SLOTS})
    return cast(dict[str, Any], _resolved(schema))


def _resolved(value: Any) -> Any:
    """The marks that slots leave, turned into references."""
    if isinstance(value, dict):
        if "part" in value and isinstance(value["part"], str):
            rest = {key: inner for key, inner in value.items() if key != "part"}
            return {"$ref": f"#/$defs/{value['part']}", **rest}
        return {key: _resolved(inner) for key, inner in value.items()}
    return [_resolved(inner) for inner in value] if isinstance(value, list) else value


def _word_schema(word: str, hint: Any) -> dict[str, Any]:
    return parts.WORDS[word].reference if word in parts.WORDS else type_schema(hint)
