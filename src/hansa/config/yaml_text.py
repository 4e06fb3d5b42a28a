"""YAML documents with the line of every key, for error messages. Length, depth, expansion of aliases and value types
are bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from hansa.core.errors import HansaError, short_repr

Keys: TypeAlias = tuple[str | int, ...]
MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a file."""
MAX_DEPTH = 40
"""Maximum levels of nesting."""
MAX_VALUES = 100_000
"""Maximum number of values of a file; aliased ones count at each use."""
MAX_DIGITS = 100
"""Maximum number of digits of a number."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
_INDEX = re.compile("[0-9]{1,9}")  # a list index

BARE_WORD_KEYS = {"algorithm": "preset", "model": "name", "data": "name", "engine": "kind", "server": "optimizer"}
"""The key that a bare word sets in these sections; elsewhere it sets the ``kind`` of a component."""


class Problem(NamedTuple):
    """A problem of a configuration: file and line, key, message with remedy."""

    where: str
    keys: Keys
    message: str
    line: int = 0
    excerpt: str = ""

    def __str__(self) -> str:
        key_path = ".".join(str(key) if len(str(key)) <= 100 else f"{str(key)[:100]}..." for key in self.keys)
        return ": ".join(part for part in (self.where, key_path, self.message) if part)


class ConfigError(HansaError):
    """An invalid configuration; ``problems`` has all problems with their lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(slots=True)
class Document:
    """A mapping read from YAML, the lines of its keys, and the changes applied to it."""

    data: dict[str, Any]
    source: str = ""
    lines: Mapping[Keys, int] = field(default_factory=dict)
    text: Sequence[str] = ()
    changes: dict[Keys, str] = field(default_factory=dict)

    def problem(self, keys: Keys, message: str) -> Problem:
        """Return a problem at a key, with the line of that key or of its nearest parent with a line."""
        for above in (keys[:length] for length in range(len(keys), -1, -1)):
            if above in self.changes:
                return Problem(self.changes[above], keys, message)
            if above in self.lines:
                line = self.lines[above]
                return Problem(f"{self.source}:{line}", keys, message, line, "".join(self.text[line - 1 : line])[:200])
        return Problem(self.source, keys, message)

    def apply(self, assignment: str) -> None:
        """Apply an assignment such as ``local.lr=0.1``: dotted keys and a YAML value."""
        path, equals, value = assignment.partition("=")
        keys: Keys = tuple(int(key) if _INDEX.fullmatch(key) else key for key in path.strip().split("."))
        source = f"--set {assignment if assignment.isprintable() else ascii(assignment)[1:-1]}"[:200]
        if not equals or not all(key != "" and str(key).isprintable() for key in keys):
            raise ConfigError([Problem(source, (), "expected KEY=VALUE, such as local.lr=0.1.")])
        self.set(keys, parse_value(value, source), source)

    def set(self, keys: Keys, value: Any, source: str) -> None:
        """Set one key; bare words along the path are expanded to mappings."""
        container: Any = self.data
        for depth, key in enumerate(keys):
            if isinstance(container, list) and not has_key(container, key):
                message = f"there is no entry {short_repr(key)} in this list of {len(container)}."
                raise ConfigError([Problem(source, keys, message)])
            inner = value
            if depth < len(keys) - 1:
                inner = container[key] if has_key(container, key) else None
                if isinstance(inner, str) or (depth == 0 and key == "server" and isinstance(inner, list)):
                    inner = {BARE_WORD_KEYS.get(str(key), "kind") if depth == 0 else "kind": inner}
                elif not isinstance(inner, (dict, list)):
                    inner = {}
            container[key] = inner
            container = inner
        self.changes[keys] = source


def read_document(path: Path | str) -> Document:
    """Read a YAML file as a document."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), (), "no such file.")]) from None
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        raise ConfigError([Problem(str(path), (), f"cannot be read as text: {error}.")]) from error
    return parse_document(text, str(path))


def parse_document(text: str, source: str = "config") -> Document:
    """Parse YAML text as a document, within the limits of this module.

    >>> parse_document("local: {lr: 1e-3}").data
    {'local': {'lr': 0.001}}
    """
    data, lines = _parse(text, source)
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise _refused(text, source, 1, f"expected sections such as data and local, found {short_repr(data)}.")
    return Document(deepcopy(data), source, lines, text.splitlines())


def parse_value(text: str, source: str) -> Any:
    """Parse a YAML value: ``0.1``, ``true``, ``ring``, ``{kind: cosine, lr: 0.1, rounds: 50}``."""
    try:
        return deepcopy(_parse(text, source)[0])
    except ConfigError as error:
        raise ConfigError([Problem(source, problem.keys, problem.message) for problem in error.problems]) from error


def _refused(text: str, source: str, line: int, message: str, keys: Keys = ()) -> ConfigError:
    """Return the error for a line of a text."""
    document = Document({}, source, {keys: line}, text[:MAX_CHARACTERS].splitlines())
    return ConfigError([document.problem(keys, message)])


@lru_cache(maxsize=128)
def _parse(text: str, source: str) -> tuple[Any, dict[Keys, int]]:
    """Return the value of a text and the line of each key; cached, since reports parse each text several times."""
    if len(text) > MAX_CHARACTERS:
        raise _refused(text, source, 1, f"longer than {MAX_CHARACTERS} characters.")
    try:
        reader = _Reader(text, source)
        node = reader.get_single_node()
        return (None if node is None else reader.read(node)), reader.lines
    except RecursionError:
        raise _refused(text, source, 1, f"nested more than {MAX_DEPTH} levels deep.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
        reason = (getattr(error, "problem", None) or str(error).splitlines()[0])[:300]
        raise _refused(text, source, line, f"not YAML: {reason}.") from error


class _Reader(yaml.SafeLoader):
    """PyYAML's safe loader with limits. Unlike in YAML 1.1, ``1e-3`` is a number and dates are strings; duplicate keys,
    of which PyYAML would silently keep the last, are refused."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.lines: dict[Keys, int] = {}
        self.values = 0
        self.refused = partial(_refused, text, source)

    def read(self, node: yaml.Node, keys: Keys = (), depth: int = 1) -> Any:
        """Return the value of a node, and record the lines of its keys."""
        line = node.start_mark.line + 1
        self.values += 1
        if depth > MAX_DEPTH:
            raise self.refused(line, f"nested more than {MAX_DEPTH} levels deep.")
        if self.values > MAX_VALUES:
            raise self.refused(line, f"expands to more than {MAX_VALUES} values by its aliases.")
        if node.tag not in _TAGS:
            expected = "expected strings, numbers, lists and mappings."
            raise self.refused(line, f"a value of type {node.tag[:80]!r}: {expected}")
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, line)
        if isinstance(node, yaml.SequenceNode):
            self.lines.update({(*keys, index): item.start_mark.line + 1 for index, item in enumerate(node.value)})
            return [self.read(item, (*keys, index), depth + 1) for index, item in enumerate(node.value)]
        mapping: dict[Any, Any] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.refused(line, "not YAML: a key that is a list or a mapping.")
            key = self.read(key_node, keys, depth + 1)
            inner, line = (*keys, key), key_node.start_mark.line + 1
            if key in mapping:
                message = f"is set twice, first in line {self.lines[inner]}. Keep one of them."
                raise self.refused(line, message, inner)
            self.lines[inner] = line
            mapping[key] = self.read(value, inner, depth + 1)
        return mapping

    def _read_scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise self.refused(line, f"a number of {len(node.value)} digits: expected at most {MAX_DIGITS}.")
        if (control := _CONTROL.search(node.value)) is not None:
            raise self.refused(line, f"a string with the control character {control.group()!r}.")
        try:
            return self.construct_object(node)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise self.refused(line, f"a value that does not match its tag ({short_repr(str(error))}).") from error


_FLOAT = re.compile(r"^(?:[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_Reader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if not tag.endswith((":float", ":timestamp"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Reader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def has_key(container: Any, key: Any) -> bool:
    """Return whether a mapping has a key, or a list an index."""
    if isinstance(container, dict):
        return key in container
    return isinstance(container, list) and isinstance(key, int) and 0 <= key < len(container)
