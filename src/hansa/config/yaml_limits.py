"""What a YAML file may be at most: how long, how deep, how much its aliases stand for, and which values it may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

LONGEST = 1 << 20
"""Characters of a file."""

DEEPEST = 40
"""Levels of nesting."""

MOST = 100_000
"""Values of a file, those that aliases repeat counted each time."""

_DIGITS = 100
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_KINDS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


class Unbounded(Exception):
    """A document that goes beyond a bound: the line where, and in which way."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def check_text(text: str) -> None:
    """Refuse text that is too long to be read in a moment."""
    if len(text) > LONGEST:
        raise Unbounded(1, f"longer than {LONGEST} characters.")


def check_nodes(root: yaml.Node) -> None:
    """Refuse aliases that contain themselves or stand for very much, deep nesting, numbers of a hundred digits, words
    with control characters, and kinds of values that no key takes."""
    sizes: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """How many values a node stands for, and how deep."""
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in entered:
            raise Unbounded(_line(node), "an alias that contains itself.")
        entered.add(id(node))
        _check_value(node)
        inner = [measure(child) for child in _inner(node)]
        size, depth = 1 + sum(count for count, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        if depth > DEEPEST:
            raise Unbounded(_line(node), f"nested more than {DEEPEST} levels deep.")
        if size > MOST:
            raise Unbounded(_line(node), f"stands for more than {MOST} values, by its aliases.")
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
        raise Unbounded(
            _line(node), f"a value of kind {node.tag[:80]!r}: expected words, numbers, lists and keys alone."
        )
    if not isinstance(node, yaml.ScalarNode):
        return
    if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
        raise Unbounded(_line(node), f"a number of {len(node.value)} digits: expected at most {_DIGITS}.")
    found = _CONTROL.search(node.value)
    if found is not None:
        raise Unbounded(_line(node), f"a word that holds the control character {found.group()!r}.")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
