"""Citations of the components in use: keys of Hansa's bibliography, or whole BibTeX entries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from hansa.core.errors import HansaError, suggestion

_ENTRY = re.compile(r"\s*@\w+\s*\{\s*[^\s,{}]+\s*,.*\}\s*", re.DOTALL)


@cache
def bibliography() -> dict[str, str]:
    """Return Hansa's BibTeX entries by key."""
    text = files("hansa.core").joinpath("citations.bib").read_text(encoding="utf-8")
    entries = re.finditer(r"^@\w+\{(\w+),.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    return {entry[1]: entry[0] for entry in entries}


def citations_of(component: object) -> tuple[str, ...]:
    """Return the citations of a component: keys, or BibTeX entries, which begin with @. ``cites`` may be one string."""
    cites = getattr(component, "cites", ())
    return (cites,) if isinstance(cites, str) else tuple(cites)


def check_citations(parts: Iterable[object]) -> None:
    """Raise for a citation that is neither a known key nor a BibTeX entry."""
    for part in parts:
        for citation in citations_of(part):
            if not isinstance(citation, str) or not (citation in bibliography() or _ENTRY.fullmatch(citation)):
                raise HansaError(
                    f"{type(part).__name__} cites {citation!r}: expected a key of hansa.core.citations.bibliography() "
                    f"or a BibTeX entry, '@article{{key, ...}}'. {suggestion(str(citation), bibliography())}"
                )


def citations(algorithm: Any) -> list[str]:
    """Return the distinct citations (keys or BibTeX entries) of the components in use, outermost component first."""
    return list(dict.fromkeys(citation.strip() for part in algorithm.components() for citation in citations_of(part)))


def bibtex_entries(citations: Iterable[str]) -> str:
    """Return the BibTeX of some citations, each once."""
    return "\n\n".join(bibliography().get(citation, citation) for citation in dict.fromkeys(citations))


def cite(algorithm: Any) -> str:
    """Print and return the BibTeX of the components that an algorithm uses.

    Args:
        algorithm: The algorithm whose components are cited.

    >>> import contextlib, io
    >>> from hansa import presets
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     text = cite(presets.fedavg())
    >>> text.splitlines()[0]
    '@inproceedings{mcmahan2017,'
    """
    text = bibtex_entries(citations(algorithm))
    print(text)
    return text
