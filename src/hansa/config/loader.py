"""Load and validate configurations: every problem at once, each with its line and the nearest known key."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hansa.algorithm import Algorithm
from hansa.config.compose import compose
from hansa.config.import_path import may_import
from hansa.config.sections import Config
from hansa.config.yaml_text import ConfigError, Document, Keys, Problem, dump, has_key, parse_document, read_document
from hansa.core.citations import citations
from hansa.core.errors import quotes_hint, short_repr, suggestion


def load(path: Path | str, changes: Iterable[str] = (), *, building: bool = True) -> Config:
    """Load the configuration in a file.

    Args:
        path: The YAML file.
        changes: Assignments such as ``local.lr=0.1``, applied to it.
        building: Whether to build its components, to check them. Code that the file names is imported for it only
            within `allow_code`; otherwise such components are not checked.
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
    except ValidationError as error:
        raise ConfigError(_problems(document, error)) from error
    if building and config.python is None:
        _, errors = compose(config, checking=not may_import())
        if errors:
            problems = [document.problem(error.keys, error.message) for error in errors]
            raise ConfigError(sorted(problems, key=lambda problem: problem.line))
    return config


def build_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that a configuration describes, or raise `ConfigError`."""
    algorithm, errors = compose(config)
    if algorithm is None:
        raise ConfigError([Problem("", error.keys, error.message) for error in errors])
    return algorithm


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
    return "".join(f"# {line}\n" for line in comments) + dump(to_dict(config))


def _problems(document: Document, error: ValidationError) -> list[Problem]:
    """Return a problem for each key; what the members of a union expect is joined."""
    messages: dict[Keys, list[str]] = {}
    inputs: dict[Keys, Any] = {}
    for item in error.errors():
        keys = _existing_keys(document.data, item["loc"])
        messages.setdefault(keys, []).append(_message(item, keys))
        inputs[keys] = item.get("input")
    problems = []
    for keys, texts in messages.items():
        expected = dict.fromkeys(text.removeprefix("expected ") for text in texts if text.startswith("expected "))
        sentences = [text for text in dict.fromkeys(texts) if not text.startswith("expected ")]
        if expected:
            remedy = quotes_hint(inputs[keys]) if "number" in " ".join(expected) else ""
            sentences.append(f"expected {' or '.join(expected)}, found {short_repr(inputs[keys])}.{remedy}")
        problems.append(document.problem(keys, " ".join(sentences)))
    return sorted(problems, key=lambda problem: problem.line)


def _existing_keys(data: Any, location: Sequence[str | int]) -> Keys:
    """Return the part of pydantic's location that is in the file; the rest names members of unions."""
    keys: list[str | int] = []
    for key in location:
        if not has_key(data, key):
            break
        data = data[key]
        keys.append(key)
    return tuple(keys)


def _message(item: Mapping[str, Any], keys: Keys) -> str:
    """Return pydantic's message in the words of a file."""
    if item["type"] == "extra_forbidden":
        return f"no such key. {_suggest_key(keys)}"
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"expected keys such as {', '.join(list(_section_keys(keys))[:3])}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return (
        str(item["msg"])
        .replace("Input should be", "expected")
        .replace("valid integer", "whole number")
        .replace("valid ", "")
    )


def _section_keys(keys: Keys) -> Mapping[str, Any]:
    """Return the keys of a section."""
    model: Any = Config
    for key in keys:
        inside = typing.get_args(model)  # of sections by name
        model = inside[1] if inside else model.model_fields[str(key)].annotation
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else {}


def _suggest_key(keys: Keys) -> str:
    """Suggest a near match in the same section, else the same key in others, else all keys of this section."""
    here, word = _section_keys(keys[:-1]), str(keys[-1])
    elsewhere = [f"{section}.{word}" for section in Config.model_fields if word in _section_keys((section,))]
    if elsewhere and word != "kind" and not difflib.get_close_matches(word, here, n=1, cutoff=0.6):
        return f"Did you mean {' or '.join(elsewhere[:3])}?"
    return suggestion(word, here)
