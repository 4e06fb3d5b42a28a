"""The user's own code, named in a file or on the command line as MODULE:NAME.

Naming code runs it: the module is imported from the current folder or the environment, as ``python -m`` would. Treat a
configuration that names code as you would treat a program.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from hansa.core.errors import HansaError, suggestion


def is_import_path(value: object) -> bool:
    """Return whether a value is MODULE:NAME.

    >>> is_import_path("mine:lion"), is_import_path("fedavg")
    (True, False)
    """
    return isinstance(value, str) and ":" in value


def unknown_code(value: Any) -> list[str]:
    """Return the import paths in plain data, such as a configuration, whose modules have not been imported yet.

    >>> unknown_code({"server": {"optimizer": ["adam", {"kind": "not_here:lion"}]}, "data": {"factory": "math:tau"}})
    ['not_here:lion']
    """
    if isinstance(value, dict):
        return [path for inner in value.values() for path in unknown_code(inner)]
    if isinstance(value, list):
        return [path for inner in value for path in unknown_code(inner)]
    match = _IMPORT_PATH.fullmatch(value) if isinstance(value, str) else None
    return [value] if match and match[1] not in sys.modules else []


_IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def import_object(path: str) -> Any:
    """Import what MODULE:NAME names; NAME may have dots.

    >>> import_object("math:tau")
    6.283185307179586
    >>> import_object("math:tua")
    Traceback (most recent call last):
    hansa.core.errors.HansaError: 'math:tua': math has no 'tua'. Did you mean tau or tan?
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise HansaError(f"{path!r}: expected MODULE:NAME, such as mine:make.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise HansaError(f"{path!r}: the module cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(target, part):
            known = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            where = getattr(target, "__name__", module_name)
            raise HansaError(f"{path!r}: {where} has no {part!r}. {suggestion(part, known)}")
        target = getattr(target, part)
    return target
