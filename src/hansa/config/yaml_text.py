"""YAML documents with the line of every key, for errors that name file and line; their length, depth, expansion by
aliases and types of values are bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hansa.config.registry import Keys
from hansa.core.errors import HansaError, short_repr

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a file."""

MAX_DEPTH = 40
"""Maximum levels of nesting."""

MAX_VALUES = 100_000
"""Maximum number of values of a file; aliased ones count at each use."""

_DIGITS = 100
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


class _LimitExceeded(Exception):
    """A document that exceeds a limit: the line, and which limit."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def _check_text(text: str) -> None:
    """Refuse text that is too long."""
    if len(text) > MAX_CHARACTERS:
        raise _LimitExceeded(1, f"longer than {MAX_CHARACTERS} characters.")


def _check_nodes(root: yaml.Node) -> None:
    """Refuse recursive or huge aliases, deep nesting, numbers of over 100 digits, control characters and other tags."""
    sizes: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Return the number of values of a node, aliases expanded, and its depth."""
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in entered:
            raise _LimitExceeded(_line_of(node), "an alias that contains itself.")
        entered.add(id(node))
        _check_value(node)
        inner = [measure(child) for child in _inside(node)]
        size, depth = 1 + sum(count for count, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        if depth > MAX_DEPTH:
            raise _LimitExceeded(_line_of(node), f"nested more than {MAX_DEPTH} levels deep.")
        if size > MAX_VALUES:
            raise _LimitExceeded(_line_of(node), f"stands for more than {MAX_VALUES} values, by its aliases.")
        entered.discard(id(node))
        sizes[id(node)] = size, depth
        return size, depth

    measure(root)


def _inside(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _check_value(node: yaml.Node) -> None:
    if node.tag not in _TAGS:
        raise _LimitExceeded(
            _line_of(node), f"a value of type {node.tag[:80]!r}: expected strings, numbers, lists and mappings only."
        )
    if not isinstance(node, yaml.ScalarNode):
        return
    if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
        raise _LimitExceeded(_line_of(node), f"a number of {len(node.value)} digits: expected at most {_DIGITS}.")
    match = _CONTROL.search(node.value)
    if match is not None:
        raise _LimitExceeded(_line_of(node), f"a string with the control character {match.group()!r}.")


def _line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


_INDEX = re.compile("[0-9]{1,9}")  # of a list

BARE_WORD_KEYS = {"algorithm": "preset", "model": "name", "data": "name", "engine": "kind", "server": "optimizer"}
"""The key that a bare word sets in these sections; everywhere else it is the ``kind`` of a component."""


class Problem(NamedTuple):
    """One problem of a configuration: the file and line, the key, and what to do."""

    where: str
    keys: Keys
    message: str
    line: int = 0
    excerpt: str = ""

    def __str__(self) -> str:
        at = ".".join(str(key) if len(str(key)) <= 100 else f"{str(key)[:100]}..." for key in self.keys)
        place = f"{self.where}: " if self.where else ""
        return f"{place}{at}: {self.message}" if at else f"{place}{self.message}"


class ConfigError(HansaError):
    """An invalid configuration; ``problems`` lists everything that is wrong, each with its line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but ``1e-3`` is a number, which YAML 1.1 reads as a string, and dates are strings."""


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if not tag.endswith((":float", ":timestamp"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789")
)


@dataclass(slots=True)
class Document:
    """A mapping read from YAML, the line of each of its keys, and the changes applied to it since."""

    data: dict[str, Any]
    source: str = ""
    lines: dict[Keys, int] = field(default_factory=dict)
    text: Sequence[str] = ()
    changes: dict[Keys, str] = field(default_factory=dict)

    def problem(self, keys: Keys, message: str) -> Problem:
        """Return a problem at a key, with the line of that key or of the nearest one above it."""
        for length in range(len(keys), -1, -1):
            prefix = keys[:length]
            if prefix in self.changes:
                return Problem(self.changes[prefix], keys, message)
            if prefix in self.lines:
                line = self.lines[prefix]
                return Problem(f"{self.source}:{line}", keys, message, line, _excerpt(self.text, line))
        return Problem(self.source, keys, message)

    def apply(self, assignment: str) -> None:
        """Apply ``local.lr=0.1``: dotted keys, and a value in YAML."""
        path, equals, value = assignment.partition("=")
        keys: Keys = tuple(int(key) if _INDEX.fullmatch(key) else key for key in path.strip().split("."))
        source = f"--set {assignment if assignment.isprintable() else ascii(assignment)[1:-1]}"[:200]
        if not equals or not all(key != "" and str(key).isprintable() for key in keys):
            raise ConfigError([Problem(source, (), "expected KEY=VALUE, such as local.lr=0.1.")])
        self.set(keys, parse_value(value, source), source)

    def set(self, keys: Keys, value: Any, source: str) -> None:
        """Set one key; bare words along the path are expanded to mappings."""
        container: Any = self.data
        for depth, key in enumerate(keys[:-1]):
            inner = container[key] if has_key(container, key) else None
            if isinstance(inner, str) or (depth == 0 and key == "server" and isinstance(inner, list)):
                inner = {BARE_WORD_KEYS.get(str(key), "kind") if depth == 0 else "kind": inner}
            elif not isinstance(inner, (dict, list)):
                inner = {}
            container = self._store(container, key, inner, keys, source)
        self._store(container, keys[-1], value, keys, source)
        self.changes[keys] = source

    def _store(self, container: Any, key: str | int, value: Any, keys: Keys, source: str) -> Any:
        if isinstance(container, list) and not has_key(container, key):
            message = f"there is no entry {short_repr(key)} in this list of {len(container)}."
            raise ConfigError([Problem(source, keys, message)])
        container[key] = value
        return value


def read_document(path: Path | str) -> Document:
    """Read a YAML file as a document."""
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), (), "no such file.")]) from None
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        raise ConfigError([Problem(str(path), (), f"cannot be read as text: {error}.")]) from error
    return parse_document(text, str(path))


def parse_document(text: str, source: str = "config") -> Document:
    """Parse YAML text as a document, within the limits below.

    >>> parse_document("local: {lr: 1e-3}").data
    {'local': {'lr': 0.001}}
    """
    document = _parse_valid(text) or _parse(text, source)
    return replace(document, data=deepcopy(document.data), source=source, lines=dict(document.lines), changes={})


@lru_cache(maxsize=128)
def _parse_valid(text: str) -> Document | None:
    """Return the document of a text, None if it is invalid; a report reads the same text a dozen times."""
    try:
        return _parse(text, "")
    except ConfigError:
        return None


def _parse(text: str, source: str) -> Document:
    try:
        node, data = _construct(text, lambda node: _refuse_duplicate_keys(node, source, text))
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, source, text)]) from error
    except _LimitExceeded as error:
        excerpt = _excerpt(text[:MAX_CHARACTERS].splitlines(), error.line)
        raise ConfigError([Problem(f"{source}:{error.line}", (), error.problem, error.line, excerpt)]) from error
    if node is None:
        return Document({}, source)
    if not isinstance(data, dict):
        message = f"expected sections such as data and local, found {short_repr(data)}."
        raise ConfigError([Problem(f"{source}:1", (), message)])
    return Document(data, source, {keys: line for keys, line, _ in _walk(node)}, text.splitlines())


def parse_value(text: str, source: str) -> Any:
    """Parse a value as it stands in a file: ``0.1``, ``true``, ``ring``, ``{kind: cosine, lr: 0.1, rounds: 50}``."""
    try:
        _, value = _construct(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(source, (), f"the value is not YAML: {_reason(error)}.")]) from error
    except _LimitExceeded as error:
        raise ConfigError([Problem(source, (), error.problem)]) from error
    return value


def _construct(text: str, inspect_node: Callable[[yaml.Node], None] | None = None) -> tuple[yaml.Node | None, Any]:
    """Return the node and the value of a text; ``inspect_node`` sees the node first. Any failure is a `YAMLError`."""
    _check_text(text)
    try:
        loader = YamlLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _check_nodes(node)
            if inspect_node is not None:
                inspect_node(node)
            return node, loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise _LimitExceeded(1, f"nested more than {MAX_DEPTH} levels deep.") from None
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:  # a value that does not match its tag
        raise yaml.YAMLError(f"a value that does not match its tag ({short_repr(str(error))})") from error
    except ValueError as error:
        if isinstance(error, HansaError):
            raise
        raise yaml.YAMLError(f"a value that does not match its tag ({short_repr(str(error))})") from error


def dump(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML, in the given order, with small mappings on one line.

    >>> print(dump({"seed": 0, "local": {"lr": 0.1, "max_grad_norm": None}}), end="")
    seed: 0
    local: {lr: 0.1, max_grad_norm: null}
    """
    return "".join(_dump_entry(key, value) for key, value in data.items())


def _dump_entry(key: str, value: Any) -> str:
    if isinstance(value, dict):
        line = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
        short = line.strip()[1:-1]  # without the outer braces
        if len(short) <= 110:
            return short + "\n"
    return yaml.safe_dump({key: value}, default_flow_style=False, sort_keys=False, width=110, allow_unicode=True)


def has_key(container: Any, key: str | int) -> bool:
    """Return whether a mapping has a key, or a list an index."""
    if isinstance(container, dict):
        return key in container
    return isinstance(container, list) and isinstance(key, int) and 0 <= key < len(container)


def _excerpt(text: Sequence[str], line: int) -> str:
    return text[line - 1][:200] if 0 < line <= len(text) else ""


def _syntax_problem(error: yaml.YAMLError, source: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Problem(f"{source}:{line}", (), f"not YAML: {_reason(error)}.", line)
    if mark is None:
        return Problem(source, (), f"not YAML: {_reason(error)}.")
    line = mark.line + 1
    return Problem(f"{source}:{line}", (), f"not YAML: {_reason(error)}.", line, _excerpt(text.splitlines(), line))


def _reason(error: yaml.YAMLError) -> str:
    return (getattr(error, "problem", None) or str(error).splitlines()[0])[:300]


def _children(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """Yield the key, line and value of every entry of a node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield position, value.start_mark.line + 1, value


def _walk(node: yaml.Node) -> Iterator[tuple[Keys, int, yaml.Node]]:
    """Yield every entry with the keys that lead to it; aliased nodes are visited once."""
    waiting: list[tuple[Keys, yaml.Node]] = [((), node)]
    seen: set[int] = set()
    while waiting:
        above, inside = waiting.pop()
        if id(inside) not in seen:
            seen.add(id(inside))
            for key, line, value in _children(inside):
                yield (*above, key), line, value
                waiting.append(((*above, key), value))


def _refuse_duplicate_keys(node: yaml.Node, source: str, text: str) -> None:
    """Refuse duplicate keys, of which YAML would silently keep the last."""
    first: dict[Keys, int] = {}
    for keys, line, _ in _walk(node):
        if keys in first and keys[-1] != "<<":
            message = f"is set twice, first in line {first[keys]}. Keep one of them."
            excerpt = _excerpt(text.splitlines(), line)
            raise ConfigError([Problem(f"{source}:{line}", keys, message, line, excerpt)])
        first[keys] = line
