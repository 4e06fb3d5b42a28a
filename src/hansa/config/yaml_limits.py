"""Limits on YAML files: length, depth, expansion by aliases, and types of values."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a file."""

MAX_DEPTH = 40
"""Maximum levels of nesting."""

MAX_VALUES = 100_000
"""Maximum number of values of a file; aliased ones count at each use."""

_DIGITS = 100
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_KINDS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


class LimitExceeded(Exception):
    """A document that exceeds a limit: the line, and which limit."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def check_text(text: str) -> None:
    """Refuse text that is too long."""
    if len(text) > MAX_CHARACTERS:
        raise LimitExceeded(1, f"longer than {MAX_CHARACTERS} characters.")


def check_nodes(root: yaml.Node) -> None:
    """Refuse recursive or huge aliases, deep nesting, numbers of over 100 digits, control characters and other tags."""
    sizes: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Return the number of values of a node, aliases expanded, and its depth."""
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in entered:
            raise LimitExceeded(_line(node), "an alias that contains itself.")
        entered.add(id(node))
        _check_value(node)
        inner = [measure(child) for child in _inner(node)]
        size, depth = 1 + sum(count for count, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        if depth > MAX_DEPTH:
            raise LimitExceeded(_line(node), f"nested more than {MAX_DEPTH} levels deep.")
        if size > MAX_VALUES:
            raise LimitExceeded(_line(node), f"stands for more than {MAX_VALUES} values, by its aliases.")
        entered.discard(id(node))
        sizes[id(node)] = size, depth
        return size, depth

    measure(root)


def _inner(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _check_value(node: yaml.Node) -> None:
    if node.tag not in _KINDS:
        raise LimitExceeded(
            _line(node), f"a value of type {node.tag[:80]!r}: expected strings, numbers, lists and mappings only."
        )
    if not isinstance(node, yaml.ScalarNode):
        return
    if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
        raise LimitExceeded(_line(node), f"a number of {len(node.value)} digits: expected at most {_DIGITS}.")
    match = _CONTROL.search(node.value)
    if match is not None:
        raise LimitExceeded(_line(node), f"a string with the control character {match.group()!r}.")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
