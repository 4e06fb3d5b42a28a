"""The terminal: text is printed without control characters, since it may come from untrusted files."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hansa.core.errors import printable


class Terminal(Console):
    """A console that prints all text through `printable`; only styles that the program asks for become codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
