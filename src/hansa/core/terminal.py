"""The terminal: text is printed without control characters, since it may come from untrusted files."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


def printable(text: str) -> str:
    r"""Return text without control characters: escape sequences and marks of writing direction. Line ends and tabs
    stay.

    >>> printable("a\x1b[2Jb\x9b31m\u202ec\n")
    'a[2Jb31mc\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf"))


class Terminal(Console):
    """A console that prints all text through `printable`; only styles that the program asks for become codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
