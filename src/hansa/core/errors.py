"""Errors that name the component, the argument, the value and the remedy."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import reprlib
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    r"""Return text without control characters: escape sequences and marks of writing direction. Line ends and tabs
    stay. Text of others reaches the terminal through it, in errors, in the log and in what commands print.

    >>> printable("a\x1b[2Jb\x9b31m\u202ec\n")
    'a[2Jb31mc\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf"))


def _print_safely(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger("hansa").addFilter(_print_safely)


class HansaError(ValueError):
    """An error that the caller can fix: the message names the value and the remedy.

    ``component`` and ``argument`` say which argument of which component is wrong, and ``value`` what it was. They are
    empty for errors that are not about an argument.

    >>> error = HansaError("steps=0: expected at least 1.", argument="steps", value=0)
    >>> str(error), error.argument
    ('steps=0: expected at least 1.', 'steps')
    """

    def __init__(self, *args: object, component: str = "", argument: str = "", value: object = None) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))
        self.component, self.argument, self.value = component, argument, value

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {**vars(self), "value": None}  # a value may be large, or not picklable


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names most like an unknown one, or with all known names.

    >>> suggestion("scafold", ["fedadam", "fedavg", "scaffold"])
    'Did you mean scaffold?'
    >>> suggestion("zzz", ["b", "a"])
    'Known: a, b.'
    """
    options, name = sorted(known), name[:100]
    matches = difflib.get_close_matches(name, options, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(matches)}?" if matches else f"Known: {', '.join(options)}."


def invalid_argument(component: str, argument: str, value: object, expected: str, remedy: str = "") -> HansaError:
    """Return the error for one wrong argument of one component.

    >>> invalid_argument("top_k", "ratio", 2, "0 < ratio <= 1", "1/64 keeps one entry in 64.")
    HansaError('top_k(ratio=2): expected 0 < ratio <= 1. 1/64 keeps one entry in 64.')
    """
    return argument_error(component, argument, value, f"expected {expected}.{' ' + remedy if remedy else ''}")


def argument_error(component: str, argument: str, value: object, problem: str) -> HansaError:
    """Return the error for one wrong argument with a custom message.

    >>> argument_error("run", "device", "tpu", "there is no such device.")
    HansaError("run(device='tpu'): there is no such device.")
    """
    message = f"{component}({argument}={short_repr(value)}): {problem}"
    return HansaError(message, component=component, argument=argument, value=value)


def check_function(component: str, argument: str, value: object, *parameters: str) -> None:
    """Raise unless the value is a function that can be called with these arguments.

    >>> check_function("run", "callbacks", lambda run: None, "run", "record")
    Traceback (most recent call last):
    ...
    hansa.core.errors.HansaError: run(callbacks=<lambda>): expected a function of (run, record): too many positional...
    """
    try:
        if isinstance(value, type):
            raise TypeError(f"a class; {value.__name__}() makes one")
        if not callable(value):
            raise TypeError("not a function")
        inspect.signature(value).bind(*parameters)
    except ValueError:  # a built-in function without a signature
        return
    except TypeError as error:
        name = getattr(value, "__name__", None) or short_repr(value)
        message = f"{component}({argument}={name}): expected a function of ({', '.join(parameters)}): {error}."
        raise HansaError(message, component=component, argument=argument, value=value) from error


def short_repr(value: object) -> str:
    """Return a short repr for messages, however large or deep the value is and even if its repr fails.

    >>> short_repr("ab"), short_repr([0] * 1000), short_repr(10**5000)
    ("'ab'", '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...]', '<int instance ...>')
    """
    return _SHORT.repr(value)


def quotes_hint(value: object) -> str:
    """Return a remedy if a number was expected and the value is a number in quotes.

    >>> quotes_hint("0.1"), quotes_hint("fast"), quotes_hint(3)
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
            text = " ".join(repr(x).split())
        except Exception:  # raised by a user's own __repr__
            return f"<{type(x).__name__} instance>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."


_LARGE = 10**60
_SHORT = _Short()


def _check_number(
    component: str, argument: str, value: object, expected: str, remedy: str, accepts: Callable[[float], bool]
) -> None:
    """Raise unless the value is a finite number that is accepted."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (abs(number) <= sys.float_info.max and accepts(number)):  # or NaN, or without a float
        raise invalid_argument(component, argument, value, expected, remedy)


def check_positive(component: str, argument: str, value: object, remedy: str = "") -> None:
    """Raise unless the value is a finite number above zero."""
    _check_number(component, argument, value, f"{argument} > 0", remedy, lambda x: x > 0)


def check_non_negative(component: str, argument: str, value: object, remedy: str = "", *, minimum: float = 0) -> None:
    """Raise unless the value is a finite number of at least ``minimum``."""
    _check_number(component, argument, value, f"{argument} >= {minimum}", remedy, lambda x: x >= minimum)


def check_speed(component: str, argument: str, value: object, remedy: str = "math.inf is no limit.") -> None:
    """Raise unless the value is a number above zero; it may be infinite."""
    if value != math.inf:
        check_positive(component, argument, value, remedy)


def check_finite(component: str, argument: str, value: object) -> None:
    """Raise unless the value is a finite number."""
    _check_number(component, argument, value, "a finite number", "", lambda x: True)


def check_fraction(component: str, argument: str, value: object, remedy: str = "", *, above_zero: bool = True) -> None:
    """Raise unless the value is a number in (0, 1], or [0, 1] with ``above_zero=False``."""
    expected = f"0 {'<' if above_zero else '<='} {argument} <= 1"
    _check_number(component, argument, value, expected, remedy, lambda x: 0 <= x <= 1 and (x > 0 or not above_zero))


def check_decay(component: str, argument: str, value: object, remedy: str = "", *, below: float = 1) -> None:
    """Raise unless the value is a number in [0, below), as decay rates are."""
    _check_number(component, argument, value, f"0 <= {argument} < {below}", remedy, lambda x: 0 <= x < below)


def check_integer(
    component: str, argument: str, value: object, remedy: str = "", *, minimum: int = 1, maximum: float = math.inf
) -> None:
    """Raise unless the value is a whole number from ``minimum`` to ``maximum``."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        limit = f" and <= {maximum}" if maximum < math.inf else ""
        raise invalid_argument(component, argument, value, f"a whole number >= {minimum}{limit}", remedy)


def add_step(error: Exception, client: int, step: int | None = None) -> None:
    """Record on an error which client, and which of its local steps, raised it; the first record is kept.

    >>> error = ValueError("shape")
    >>> add_step(error, 3, 7)
    >>> failed_step(error)
    (3, 7)
    """
    if failed_step(error) is None:
        error.hansa_step = (client, step)  # type: ignore[attr-defined]


@contextmanager
def naming_client(client: int) -> Iterator[None]:
    """Record on an error which client raised it, as `add_step` does."""
    try:
        yield
    except Exception as error:
        add_step(error, client)
        raise


def failed_step(error: BaseException) -> tuple[int, int | None] | None:
    """Return the client and the local step that `add_step` recorded, or None."""
    return getattr(error, "hansa_step", None)
