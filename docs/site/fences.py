"""Docstrings as Markdown: examples and tables, which are plain text in the source, stand in fences on the site, and
attributes and properties that have a docstring are listed with their class."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Fences(griffe.Extension):
    """Put doctests and tables in fences, keep brackets of the text from being taken for links, list attributes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        obj.docstring.value = fenced(obj.docstring.value)
        rows = [
            f"| `{name}` | {' '.join(fenced(member.docstring.value.partition('>>>')[0]).split())} |"
            for name, member in obj.members.items()
            if obj.is_class and not name.startswith("_") and member.is_attribute and member.docstring is not None
        ]
        if rows:
            obj.docstring.value += "\n\n| attribute | meaning |\n|---|---|\n" + "\n".join(rows)


def fenced(text: str) -> str:
    """The text of a docstring as Markdown."""
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
        place = next(number for number, line in enumerate(lines) if line.strip().startswith(">>>"))
        return _part("\n".join(lines[:place])) + "\n\n" + _part("\n".join(lines[place:]))
    return re.sub(r"(?<!`)\[([^\]`]*)\](?!\()", r"\\[\1\\]", part)
