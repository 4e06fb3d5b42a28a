"""Code of the user's own, named in a file or on the command line as MODULE:NAME.

Naming code runs it: the module is imported, from the current folder or the environment, as ``python -m`` would. Treat a
configuration that names code as you would treat a program.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from hansa.core.errors import HansaError, suggestion


def is_place(word: object) -> bool:
    """Whether a word names code rather than something known by name.

    >>> is_place("mine:lion"), is_place("fedavg")
    (True, False)
    """
    return isinstance(word, str) and ":" in word


def unknown_code(said: Any) -> list[str]:
    """The places in plain data, such as a configuration's, whose modules this process has not imported yet.

    >>> unknown_code({"server": {"chain": ["adam", {"kind": "not_here:lion"}]}, "data": {"factory": "math:tau"}})
    ['not_here:lion']
    """
    if isinstance(said, dict):
        return [place for inner in said.values() for place in unknown_code(inner)]
    if isinstance(said, list):
        return [place for inner in said for place in unknown_code(inner)]
    named = _PLACE.fullmatch(said) if isinstance(said, str) else None
    return [said] if named and named[1] not in sys.modules else []


_PLACE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def find(place: str) -> Any:
    """What MODULE:NAME names; NAME may have dots.

    >>> find("math:tau")
    6.283185307179586
    >>> find("math:tua")
    Traceback (most recent call last):
    hansa.core.errors.HansaError: 'math:tua': math has no 'tua'. Did you mean tau or tan?
    """
    module_name, _, name = place.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise HansaError(f"{place!r}: expected MODULE:NAME, such as mine:make.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise HansaError(f"{place!r}: the module cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = [word for word in dir(found) if not word.startswith("_")]
            where = getattr(found, "__name__", module_name)
            raise HansaError(f"{place!r}: {where} has no {part!r}. {suggestion(part, known)}")
        found = getattr(found, part)
    return found
