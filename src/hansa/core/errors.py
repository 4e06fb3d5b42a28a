"""Errors that name the thing, the value and the remedy."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable


class HansaError(ValueError):
    """Something the caller can mend: the message names the value and the remedy.

    >>> try:
    ...     raise HansaError("steps=0: expected at least 1.")
    ... except HansaError as error:
    ...     str(error)
    'steps=0: expected at least 1.'
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """A clause naming the near matches of an unknown name, or all that is known.

    >>> near("scafold", ["fedadam", "fedavg", "scaffold"])
    'Did you mean scaffold?'
    >>> near("zzz", ["b", "a"])
    'Known: a, b.'
    """
    options, name = sorted(known), name[:100]
    matches = difflib.get_close_matches(name, options, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(matches)}?" if matches else f"Known: {', '.join(options)}."


def invalid_argument(part: str, argument: str, value: object, expected: str, remedy: str = "") -> HansaError:
    """The error for one wrong argument of one part.

    >>> refuse("top_k", "ratio", 2, "0 < ratio <= 1", "1/64 keeps one entry in 64.")
    HansaError('top_k(ratio=2): expected 0 < ratio <= 1. 1/64 keeps one entry in 64.')
    """
    return HansaError(f"{part}({argument}={short_repr(value)}): expected {expected}.{' ' + remedy if remedy else ''}")


def short_repr(value: object) -> str:
    """A value in few words, however large, deep or odd it is: what messages are made of.

    >>> shown("ab"), shown([0] * 1000), shown(10**5000)
    ("'ab'", '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...]', '<int instance ...>')
    """
    return _SHORT.repr(value)


def quotes_hint(value: object) -> str:
    """A remedy where a number was expected and one stands in quotes.

    >>> unquoted("0.1"), unquoted("fast"), unquoted(3)
    (' Leave out the quotes.', '', '')
    """
    try:
        return " Leave out the quotes." if isinstance(value, str) and math.isfinite(float(value)) else ""
    except ValueError:
        return ""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 200, 400
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxarray = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if -_LARGE < x < _LARGE else "<int instance ...>"

    def repr_instance(self, x: object, level: int) -> str:
        try:
            text = repr(x)
        except Exception:  # of somebody's own class
            return f"<{type(x).__name__} instance>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."


_LARGE = 10**60
_SHORT = _Short()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond the floats
        return None


def check_positive(part: str, argument: str, value: object, remedy: str = "") -> None:
    """Refuse anything but a finite number above zero."""
    number = _number(value)
    if number is None or number <= 0:
        raise invalid_argument(part, argument, value, f"{argument} > 0", remedy)


def check_non_negative(part: str, argument: str, value: object, remedy: str = "") -> None:
    """Refuse anything but a finite number of at least zero."""
    number = _number(value)
    if number is None or number < 0:
        raise invalid_argument(part, argument, value, f"{argument} >= 0", remedy)


def check_finite(part: str, argument: str, value: object, remedy: str = "") -> None:
    """Refuse anything but a finite number."""
    if _number(value) is None:
        raise invalid_argument(part, argument, value, "a finite number", remedy)


def check_fraction(part: str, argument: str, value: object, remedy: str = "", *, above_zero: bool = True) -> None:
    """Refuse anything but a number in (0, 1], or [0, 1] with ``above_zero=False``."""
    number = _number(value)
    if number is None or number > 1 or number < 0 or (above_zero and number == 0):
        low = "0 <" if above_zero else "0 <="
        raise invalid_argument(part, argument, value, f"{low} {argument} <= 1", remedy)


def check_decay(part: str, argument: str, value: object, remedy: str = "") -> None:
    """Refuse anything but a number in [0, 1): a memory that forgets."""
    number = _number(value)
    if number is None or not 0 <= number < 1:
        raise invalid_argument(part, argument, value, f"0 <= {argument} < 1", remedy)


def check_integer(part: str, argument: str, value: object, remedy: str = "", *, minimum: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise invalid_argument(part, argument, value, f"a whole number >= {minimum}", remedy)
