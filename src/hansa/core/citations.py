"""Citations of exactly the parts in use: keys of the product's bibliography, or whole BibTeX entries of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from hansa.core.errors import HansaError, suggestion


class HasComponents(Protocol):
    """What is made of parts, as an algorithm is."""

    def components(self) -> Iterable[Any]: ...


@cache
def bibliography() -> dict[str, str]:
    """All BibTeX entries the product knows, by key."""
    text = files("hansa.core").joinpath("citations.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^@\w+\{.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    return dict(zip(entries, blocks, strict=True))


def citations_of(component: object) -> tuple[str, ...]:
    """What a part cites: keys, or BibTeX entries, which begin with an @; one of either need not be in a tuple."""
    cites = getattr(component, "cites", ())
    return (cites,) if isinstance(cites, str) else tuple(cites)


def check_citations(parts: Iterable[object]) -> None:
    """Refuse a citation that is neither a known key nor a BibTeX entry."""
    for part in parts:
        for citation in citations_of(part):
            if not isinstance(citation, str) or not (citation in bibliography() or _is_entry(citation)):
                raise HansaError(
                    f"{type(part).__name__} cites {citation!r}: expected a key of hansa.core.citations.bibliography() "
                    f"or a BibTeX entry, '@article{{key, ...}}'. {suggestion(str(citation), bibliography())}"
                )


def citations(algorithm: HasComponents) -> list[str]:
    """What the parts in use cite, each once, outermost part first: keys, and entries of one's own."""
    return list(dict.fromkeys(citation.strip() for part in algorithm.components() for citation in citations_of(part)))


def bibtex(algorithms: Iterable[HasComponents]) -> str:
    """The BibTeX of all parts that some algorithms use, each entry once."""
    return bibtex_entries(citation for algorithm in algorithms for citation in citations(algorithm))


def bibtex_entries(citations: Iterable[str]) -> str:
    """The BibTeX of some citations, each once."""
    return "\n\n".join(bibliography().get(citation, citation) for citation in dict.fromkeys(citations))


def cite(algorithm: HasComponents) -> str:
    """Print and return the BibTeX of exactly the parts an algorithm uses.

    Args:
        algorithm: Algorithm whose components are cited.

    >>> import contextlib, io
    >>> from hansa import presets
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     text = cite(presets.fedavg())
    >>> text.splitlines()[0]
    '@inproceedings{mcmahan2017,'
    """
    text = bibtex([algorithm])
    print(text)
    return text


def _is_entry(citation: str) -> bool:
    return re.match(r"\s*@\w+\s*\{\s*[^\s,{}]+\s*,", citation) is not None and citation.rstrip().endswith("}")
