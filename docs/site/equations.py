"""Equations as MathML: ``$x^2$`` in a line and ``$$ ... $$`` as a paragraph, converted when the site is built.

Browsers draw MathML themselves, so pages need no script and no font from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CODE = re.compile(r"(^```.*?^```[^\n]*$|^~~~.*?^~~~[^\n]*$|^(?: {4}|\t)[^\n]*$|`+[^`\n]*`+)", re.MULTILINE | re.DOTALL)
_DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<![\s\\])\$(?![\w$])")


def with_equations(markdown: str, convert: Callable[[str, str], str] | None = None) -> str:
    """Return Markdown with its equations as MathML; code is left alone.

    Args:
        markdown: The text of a page.
        convert: A function of LaTeX and "inline" or "block"; by default that of latex2mathml.
    """
    if convert is None:
        convert = _to_mathml
    pieces = _CODE.split(markdown)
    for place in range(0, len(pieces), 2):  # every second piece is code
        text = _DISPLAY.sub(lambda match: f"\n\n{convert(match[1].strip(), 'block')}\n\n", pieces[place])
        pieces[place] = _INLINE.sub(lambda match: convert(match[1], "inline"), text)
    return "".join(pieces)


def _to_mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    return str(convert(latex, display=display))
