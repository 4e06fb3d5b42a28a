"""Load and validate configurations: every problem at once, each with its line and the nearest known key."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hansa.algorithm import Algorithm
from hansa.config import compose
from hansa.config.registry import ConfigValueError, Keys
from hansa.config.registry.fields import BUILD_COMPONENTS
from hansa.config.registry.import_path import is_import_path, may_import, named_code
from hansa.config.sections import Config
from hansa.config.yaml_text import ConfigError, Document, Problem, dump, has_key, parse_document, read_document
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
        config = Config.model_validate(document.data, context={BUILD_COMPONENTS: building})
    except ValidationError as error:
        raise ConfigError(_problems(document, error)) from error
    if not building:
        return config
    errors: list[ConfigValueError] = []
    try:
        if may_import() or not is_import_path(config.algorithm.preset):
            errors = list(compose.invalid_settings(config))
        if not errors and config.python is None and (may_import() or not code_names(config)):
            compose.compose_algorithm(config)
    except ConfigValueError as error:
        errors = [error]
    if errors:
        raise ConfigError([document.problem(error.keys, error.message) for error in errors])
    return config


def code_names(config: Config) -> list[str]:
    """Return the user's code that a configuration names, as MODULE:NAME.

    >>> code_names(from_yaml("sample: {kind: 'mine:often', count: 3}\\nmodel: {factory: 'mine:Net', loss: mse}"))
    ['mine:Net', 'mine:often']
    """
    data, model = config.data, config.model
    metrics = model.model_dump(include={"metrics"})
    named = [data.factory, data.partition, data.augment, model.factory, model.loss, model.metric, metrics]
    sections = {"algorithm", "local", "server", "sample", "gossip", "compress", "uplink", "downlink", "aggregate",
                "channels", "faults", "links", "pace", "profile"}  # fmt: skip
    return list(dict.fromkeys([*named_code(named), *named_code(config.model_dump(include=sections))]))


def build_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that a configuration describes, or raise `ConfigError`."""
    try:
        return compose.compose_algorithm(config)
    except ConfigValueError as error:
        raise ConfigError([Problem("", error.keys, error.message)]) from error


def cited_works(config: Config) -> list[str]:
    """Return the citation keys of all components of a configuration."""
    return list(config.python.cites) if config.python is not None else citations(build_algorithm(config))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain data, without empty sections and unset keys."""
    unused = {"data", "model", "algorithm", "dtype", "quorum", "max_norm"}
    data = config.model_dump(exclude_none=True, exclude=None if config.python is None else unused)
    if config.data.factory is not None and config.python is None:
        del data["data"]["name"]
    trimmed = {key: _without_empty(value) for key, value in data.items()}
    return {key: value for key, value in trimmed.items() if value != {}}


def _without_empty(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner != {}} if isinstance(value, dict) else value


def to_yaml(config: Config, comments: Sequence[str] = ()) -> str:
    """Return the resolved configuration as YAML, with comments on top."""
    return "".join(f"# {line}\n" for line in comments) + dump(to_dict(config))


def _problems(document: Document, error: ValidationError) -> list[Problem]:
    messages: dict[Keys, list[str]] = {}
    inputs: dict[Keys, Any] = {}
    for item in error.errors():
        keys = _existing_keys(document.data, item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigValueError):
            keys = (*keys, *cause.keys)
        messages.setdefault(keys, []).append(_message(item, keys, cause))
        inputs[keys] = item.get("input")
    problems = []
    for keys, texts in messages.items():
        expectations = [text for text in texts if text.startswith("expected ") and not text.endswith(".")]
        expected = dict.fromkeys(text.removeprefix("expected ") for text in expectations)
        sentences = [text for text in dict.fromkeys(texts) if text not in expectations]
        if expected:
            remedy = quotes_hint(inputs[keys]) if any("number" in word for word in expected) else ""
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


def _message(item: Mapping[str, Any], keys: Keys, cause: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if isinstance(cause, ConfigValueError):
        return cause.message
    if cause is not None:
        return str(cause)
    if kind == "extra_forbidden":
        return f"no such key. {_suggest_key(keys)}"
    if kind in ("model_type", "model_attributes_type"):
        return f"expected keys such as {', '.join(list(_section_keys(keys))[:3])}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind].format(**context)}"
    return str(item["msg"])


def _section_keys(keys: Keys) -> Mapping[str, Any]:
    """Return the keys of a section."""
    model: Any = Config
    for key in keys:
        inside = typing.get_args(model)  # of sections by name
        model = inside[1] if inside else model.model_fields[str(key)].annotation
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else {}


def _suggest_key(keys: Keys) -> str:
    """Suggest a near match in the same section, else the same key in another, else all keys of this section."""
    here, word = _section_keys(keys[:-1]), str(keys[-1])
    if keys == ("server", "kind"):
        return "Did you mean optimizer? server: {optimizer: adam}, or server: adam."
    if difflib.get_close_matches(word, here, n=1, cutoff=0.6):
        return suggestion(word, here)
    dotted = {
        f"{section}.{key}": key
        for section in Config.model_fields
        for key in _section_keys((section,))
        if (section,) != keys[:-1]
    }
    same = [place for place, key in dotted.items() if key == word] or [
        place for place, key in dotted.items() if difflib.SequenceMatcher(None, key, word).ratio() > 0.8
    ]
    return f"Did you mean {' or '.join(same[:3])}?" if same else suggestion(word, here)
