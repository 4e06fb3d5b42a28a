"""Reading a configuration: every problem at once, each with its line and the near match."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hansa.algorithm import Algorithm
from hansa.config import arguments, compose
from hansa.config.registry import Keys, Misfit
from hansa.config.registry.fields import BUILDING
from hansa.config.sections import Config
from hansa.config.yaml_text import ConfigError, Document, Problem, dump, holds, parse, read
from hansa.core.citations import citations
from hansa.core.errors import quotes_hint, short_repr, suggestion


def load(path: Path | str, changes: Iterable[str] = (), *, building: bool = True) -> Config:
    """The configuration in a file, with changes such as ``local.lr=0.1`` applied to it.

    With ``building=False`` its parts are taken as they are written: to look at a file without running the code that it
    names.
    """
    return check(read(path), changes, building=building)


def from_text(text: str, changes: Iterable[str] = (), source: str = "config", *, building: bool = True) -> Config:
    """The configuration in YAML text.

    >>> from_text("algorithm: fedams\\nlocal: {lr: 0.1}", ["local.steps=24"]).local.steps
    24
    """
    return check(parse(text, source), changes, building=building)


def from_preset(name: str, changes: Iterable[str] = ()) -> Config:
    """A preset on the embedded data, everything else by default."""
    return check(Document({"algorithm": {"preset": name}}, f"--preset {name}"), changes)


def check(document: Document, changes: Iterable[str] = (), *, building: bool = True) -> Config:
    """The checked configuration of a document, or `ConfigError` with all that is wrong with it."""
    for change in changes:
        document.change(change)
    try:
        config = Config.model_validate(document.data, context={BUILDING: building})
    except ValidationError as error:
        raise ConfigError(_problems(document, error)) from error
    if not building:
        return config
    try:
        wrong = list(arguments.misfits(config))
        if not wrong and config.python is None:
            compose.algorithm(config)
    except Misfit as misfit:
        wrong = [misfit]
    if wrong:
        raise ConfigError([document.problem(misfit.keys, misfit.message) for misfit in wrong])
    return config


def algorithm(config: Config) -> Algorithm:
    """The algorithm that a configuration describes."""
    try:
        return compose.algorithm(config)
    except Misfit as misfit:
        raise ConfigError([Problem("", misfit.keys, misfit.message)]) from misfit


def cited_by(config: Config) -> list[str]:
    """What the parts of a configuration cite."""
    return list(config.python.cites) if config.python is not None else citations(algorithm(config))


def to_data(config: Config) -> dict[str, Any]:
    """What was said or has a fixed default, as plain data; sections that say nothing are left out."""
    elsewhere = {"data", "model", "algorithm", "dtype", "quorum", "max_norm"}
    data = config.model_dump(exclude_none=True, exclude=None if config.python is None else elsewhere)
    if config.data.factory is not None and config.python is None:
        del data["data"]["name"]
    trimmed = {key: _without_empty(value) for key, value in data.items()}
    return {key: value for key, value in trimmed.items() if value != {}}


def _without_empty(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner != {}} if isinstance(value, dict) else value


def to_text(config: Config, remarks: Sequence[str] = ()) -> str:
    """The resolved configuration as YAML, with remarks on top."""
    return "".join(f"# {line}\n" for line in remarks) + dump(to_data(config))


def _problems(document: Document, error: ValidationError) -> list[Problem]:
    found: dict[Keys, list[str]] = {}
    inputs: dict[Keys, Any] = {}
    for item in error.errors():
        keys = _real(document.data, item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Misfit):
            keys = (*keys, *cause.keys)
        found.setdefault(keys, []).append(_said(item, keys, cause))
        inputs[keys] = item.get("input")
    problems = []
    for keys, texts in found.items():
        parts = [text for text in texts if text.startswith("expected ") and not text.endswith(".")]
        expected = dict.fromkeys(text.removeprefix("expected ") for text in parts)
        sentences = [text for text in dict.fromkeys(texts) if text not in parts]
        if expected:
            remedy = quotes_hint(inputs[keys]) if any("number" in word for word in expected) else ""
            sentences.append(f"expected {' or '.join(expected)}, found {short_repr(inputs[keys])}.{remedy}")
        problems.append(document.problem(keys, " ".join(sentences)))
    return sorted(problems, key=lambda problem: problem.line)


def _real(data: Any, location: Sequence[str | int]) -> Keys:
    """The part of pydantic's location that is in the file: the rest names members of unions."""
    kept: list[str | int] = []
    for key in location:
        if not holds(data, key):
            break
        data = data[key]
        kept.append(key)
    return tuple(kept)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a word",
    "list_type": "a list",
    "dict_type": "keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}


def _said(item: Mapping[str, Any], keys: Keys, cause: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if isinstance(cause, Misfit):
        return cause.message
    if cause is not None:
        return str(cause)
    if kind == "extra_forbidden":
        return f"no such key. {_suggest(keys)}"
    if kind in ("model_type", "model_attributes_type"):
        return f"expected keys such as {', '.join(list(_fields(keys))[:3])}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind].format(**context)}"
    return str(item["msg"])


def _fields(keys: Keys) -> Mapping[str, Any]:
    """The keys that a section knows."""
    model: Any = Config
    for key in keys:
        inside = typing.get_args(model)  # of sections by name
        model = inside[1] if inside else model.model_fields[str(key)].annotation
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else {}


def _suggest(keys: Keys) -> str:
    """A near match in the same section, else the same word in another, else all that is known here."""
    here, word = _fields(keys[:-1]), str(keys[-1])
    if difflib.get_close_matches(word, here, n=1, cutoff=0.6):
        return suggestion(word, here)
    dotted = {
        f"{section}.{key}": key
        for section in Config.model_fields
        for key in _fields((section,))
        if (section,) != keys[:-1]
    }
    same = [place for place, key in dotted.items() if key == word] or [
        place for place, key in dotted.items() if difflib.SequenceMatcher(None, key, word).ratio() > 0.8
    ]
    return f"Did you mean {' or '.join(same[:3])}?" if same else suggestion(word, here)
