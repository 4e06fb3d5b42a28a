"""Citations of exactly the parts in use."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from hansa.algorithm import Algorithm


@cache
def bibliography() -> dict[str, str]:
    """All BibTeX entries the product knows, by key."""
    text = files("hansa").joinpath("citations.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^@\w+\{.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    return dict(zip(entries, blocks, strict=True))


def citations(algorithm: Algorithm) -> list[str]:
    """The BibTeX keys of the parts in use, each once, outermost part first."""
    found: dict[str, None] = {}
    for part in algorithm.parts():
        found.update(dict.fromkeys(getattr(part, "cites", ())))
    return list(found)


def cite(algorithm: Algorithm) -> str:
    """Print and return the BibTeX of exactly the parts an algorithm uses."""
    text = "\n\n".join(bibliography()[key] for key in citations(algorithm))
    print(text)
    return text
