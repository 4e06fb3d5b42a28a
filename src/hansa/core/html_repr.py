"""HTML representation of compositions in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from typing import Any


class HtmlRepr:
    """A mixin for dataclasses of components: in a notebook, a table of the non-default ones."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _table_rows(self))
        return f"<table>{rows}</table>"


def _table_rows(component: Any, above: str = "") -> Iterator[tuple[str, str]]:
    for field in fields(component):
        value = getattr(component, field.name)
        name = f"{above}{field.name}"
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from _table_rows(inner, f"{key}: ") if is_dataclass(inner) else [(f"{name}.{key}", repr(inner))]
        elif not above and is_dataclass(value) and len(fields(value)) > 4:
            yield from _table_rows(value, f"{field.name}.")
        elif not above or field.default is MISSING or value != field.default:
            yield name, repr(value)
