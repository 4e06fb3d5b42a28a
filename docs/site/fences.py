"""Docstrings as Markdown: doctests and tables, which are plain text in the source, are fenced; arguments are a table;
attributes and methods that have a docstring are listed with their class."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class Fences(griffe.Extension):
    """Makes Markdown of docstrings, and finds a name of a package before a module of the same name."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Let `hansa.compress.quantize` be what the package exports, not the module that defines it."""
        package, exported = mod.parent, mod.members.get(mod.name)
        if package is not None and exported and package.imports.get(mod.name) == exported.path:
            package.members[mod.name] = griffe.Alias(mod.name, exported, parent=package)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring."""
        if obj.docstring is None:
            return
        obj.docstring.value = fenced(obj.docstring.value)
        if not obj.is_class:
            return
        described = [
            member
            for name, member in obj.members.items()
            if not name.startswith("_") and not member.is_alias and member.docstring is not None
        ]
        attributes = [(f"`{member.name}`", _summary(member)) for member in described if member.is_attribute]
        methods = [(f"`{_call(member)}`", _summary(member)) for member in described if member.is_function]
        obj.docstring.value += _table("attribute", attributes) + _table("method", methods)


def fenced(text: str) -> str:
    """Return the text of a docstring as Markdown."""
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(_part(part) for part in parts)


def _part(part: str) -> str:
    lines = part.splitlines()
    first = lines[0].strip() if lines else ""
    if first.startswith(">>>"):
        return "```pycon\n" + part + "\n```"
    if set(first) <= set("= ") and "=" in first:
        return "```text\n" + part + "\n```"
    if lines[1:] and any(line.strip().startswith(">>>") for line in lines):
        start = next(number for number, line in enumerate(lines) if line.strip().startswith(">>>"))
        return _part("\n".join(lines[:start])) + "\n\n" + _part("\n".join(lines[start:]))
    if first == "Args:":
        return _table("argument", _arguments("\n".join(lines[1:]))).strip()
    return _without_links(part)


def _arguments(text: str) -> list[tuple[str, str]]:
    """Return the names and descriptions of arguments; a description goes on where lines are indented further."""
    entries = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
    parted = [entry.partition(":") for entry in entries]
    return [(f"`{name}`", _without_links(about)) for name, _, about in parted]


def _without_links(text: str) -> str:
    return re.sub(r"(?<!`)\[([^\]`]*)\](?!\()", r"\\[\1\\]", text)


def _summary(member: griffe.Object | griffe.Alias) -> str:
    assert member.docstring is not None
    return fenced(re.split(r"\n\s*\n|>>>|```", member.docstring.value)[0])


def _call(function: griffe.Object | griffe.Alias) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    names = [stars.get(each.kind, "") + each.name for each in function.parameters if each.name not in ("self", "cls")]
    return f"{function.name}({', '.join(names)})"


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    return f"\n\n| {head} | meaning |\n|---|---|\n" + "\n".join(f"| {row} |" for row in cells)
