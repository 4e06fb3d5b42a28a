"""YAML that remembers where everything stands, so that an error can name the file and the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hansa.config import yaml_limits
from hansa.config.registry import Keys
from hansa.core.errors import HansaError, short_repr

_PLACE = re.compile("[0-9]{1,9}")  # in a list

SHORT = {"algorithm": "preset", "model": "name", "data": "name", "engine": "kind"}
"""What a bare word means in the sections that have a name; everywhere else it is the ``kind`` of a part."""


class Problem(NamedTuple):
    """One thing wrong with a configuration: where, at which key, and what to do."""

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
    """A configuration that cannot be run; ``problems`` lists all that was found wrong, each with its line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, reading ``1e-3`` as the number it is, where YAML 1.1 takes it for a word, and dates as the
    words that they are here."""


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if not tag.endswith((":float", ":timestamp"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


@dataclass(slots=True)
class Document:
    """A mapping read from YAML, the line of each of its keys, and the changes made to it since."""

    data: dict[str, Any]
    source: str = ""
    lines: dict[Keys, int] = field(default_factory=dict)
    text: Sequence[str] = ()
    changes: dict[Keys, str] = field(default_factory=dict)

    def problem(self, keys: Keys, message: str) -> Problem:
        """A problem at a key, placed where that key, or the nearest one above it, was written."""
        for length in range(len(keys), -1, -1):
            part = keys[:length]
            if part in self.changes:
                return Problem(self.changes[part], keys, message)
            if part in self.lines:
                line = self.lines[part]
                return Problem(f"{self.source}:{line}", keys, message, line, _excerpt(self.text, line))
        return Problem(self.source, keys, message)

    def change(self, assignment: str) -> None:
        """Apply ``local.lr=0.1``: dotted keys, and a value in YAML."""
        path, equals, value = assignment.partition("=")
        keys: Keys = tuple(int(key) if _PLACE.fullmatch(key) else key for key in path.strip().split("."))
        said = f"--set {assignment if assignment.isprintable() else ascii(assignment)[1:-1]}"[:200]
        if not equals or not all(key != "" and str(key).isprintable() for key in keys):
            raise ConfigError([Problem(said, (), "expected KEY=VALUE, such as local.lr=0.1.")])
        self.put(keys, read_value(value, said), said)

    def put(self, keys: Keys, value: Any, said: str) -> None:
        """Set one key; bare words and numbers on the way become the mappings they stand for."""
        inside: Any = self.data
        for depth, key in enumerate(keys[:-1]):
            below = inside[key] if holds(inside, key) else None
            if isinstance(below, str):
                below = {SHORT.get(str(key), "kind") if depth == 0 else "kind": below}
            elif not isinstance(below, (dict, list)):
                below = {}
            inside = self._store(inside, key, below, keys, said)
        self._store(inside, keys[-1], value, keys, said)
        self.changes[keys] = said

    def _store(self, inside: Any, key: str | int, value: Any, keys: Keys, said: str) -> Any:
        if isinstance(inside, list) and not holds(inside, key):
            message = f"there is no entry {short_repr(key)} in this list of {len(inside)}."
            raise ConfigError([Problem(said, keys, message)])
        inside[key] = value
        return value


def read(path: Path | str) -> Document:
    """A YAML file as a document."""
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(yaml_limits.LONGEST + 1)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), (), "no such file.")]) from None
    except (OSError, ValueError) as error:  # also a path that no file can have
        raise ConfigError([Problem(str(path), (), f"cannot be read as text: {error}.")]) from error
    return parse(text, str(path))


def parse(text: str, source: str = "config") -> Document:
    """YAML text as a document, within the bounds of `hansa.config.yaml_limits`.

    >>> parse("local: {lr: 1e-3}").data
    {'local': {'lr': 0.001}}
    """
    found = _parsed(text, source)  # a report asks a dozen times for the same text
    return replace(found, data=deepcopy(found.data), lines=dict(found.lines), changes={})


@lru_cache(maxsize=16)
def _parsed(text: str, source: str) -> Document:
    try:
        node, data = _construct(text, lambda node: _refuse_twins(node, source, text))
    except yaml.YAMLError as error:
        raise ConfigError([_broken(error, source, text)]) from error
    except yaml_limits.Unbounded as error:
        excerpt = _excerpt(text[: yaml_limits.LONGEST].splitlines(), error.line)
        raise ConfigError([Problem(f"{source}:{error.line}", (), error.problem, error.line, excerpt)]) from error
    if node is None:
        return Document({}, source)
    if not isinstance(data, dict):
        message = f"expected sections such as data and local, found {short_repr(data)}."
        raise ConfigError([Problem(f"{source}:1", (), message)])
    return Document(data, source, {keys: line for keys, line, _ in _walk(node)}, text.splitlines())


def read_value(text: str, said: str) -> Any:
    """A value as it would stand in the file: ``0.1``, ``true``, ``ring``, ``{kind: cosine, lr: 0.1, rounds: 50}``."""
    try:
        _, value = _construct(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(said, (), f"the value is not YAML: {_reason(error)}.")]) from error
    except yaml_limits.Unbounded as error:
        raise ConfigError([Problem(said, (), error.problem)]) from error
    return value


def _construct(text: str, look: Callable[[yaml.Node], None] | None = None) -> tuple[yaml.Node | None, Any]:
    """The node and the value of a text, after a look at the node; whatever is wrong with it is a `YAMLError`."""
    yaml_limits.check_text(text)
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            yaml_limits.check_nodes(node)
            if look is not None:
                look(node)
            return node, loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise yaml_limits.Unbounded(1, f"nested more than {yaml_limits.DEEPEST} levels deep.") from None
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:  # of a value that is not of its tag
        raise yaml.YAMLError(f"a value that is not what its tag says ({short_repr(str(error))})") from error
    except ValueError as error:
        if isinstance(error, HansaError):
            raise
        raise yaml.YAMLError(f"a value that is not what its tag says ({short_repr(str(error))})") from error


def dump(data: Mapping[str, Any]) -> str:
    """Plain data as YAML, in the order given, small mappings on one line.

    >>> print(dump({"seed": 0, "local": {"lr": 0.1, "max_grad_norm": None}}), end="")
    seed: 0
    local: {lr: 0.1, clip: null}
    """
    return "".join(_dump_entry(key, value) for key, value in data.items())


def _dump_entry(key: str, value: Any) -> str:
    if isinstance(value, dict):
        line = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
        short = line.strip()[1:-1]  # without the outer braces
        if len(short) <= 110:
            return short + "\n"
    return yaml.safe_dump({key: value}, default_flow_style=False, sort_keys=False, width=110, allow_unicode=True)


def holds(inside: Any, key: str | int) -> bool:
    """Whether a mapping has a key, or a list a place."""
    if isinstance(inside, dict):
        return key in inside
    return isinstance(inside, list) and isinstance(key, int) and 0 <= key < len(inside)


def _excerpt(text: Sequence[str], line: int) -> str:
    return text[line - 1][:200] if 0 < line <= len(text) else ""


def _broken(error: yaml.YAMLError, source: str, text: str) -> Problem:
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
    """Key, line and value of every entry of a node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield position, value.start_mark.line + 1, value


def _walk(node: yaml.Node) -> Iterator[tuple[Keys, int, yaml.Node]]:
    """Every entry with the keys that lead to it; what an alias repeats is visited once."""
    waiting: list[tuple[Keys, yaml.Node]] = [((), node)]
    seen: set[int] = set()
    while waiting:
        above, inside = waiting.pop()
        if id(inside) not in seen:
            seen.add(id(inside))
            for key, line, value in _children(inside):
                yield (*above, key), line, value
                waiting.append(((*above, key), value))


def _refuse_twins(node: yaml.Node, source: str, text: str) -> None:
    """YAML would quietly keep the last of two equal keys."""
    first: dict[Keys, int] = {}
    for keys, line, _ in _walk(node):
        if keys in first and keys[-1] != "<<":
            message = f"stands twice, first in line {first[keys]}. Keep one of them."
            excerpt = _excerpt(text.splitlines(), line)
            raise ConfigError([Problem(f"{source}:{line}", keys, message, line, excerpt)])
        first[keys] = line
