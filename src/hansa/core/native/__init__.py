"""Optional native kernels for small models, servers and compressors.

A plain install builds them if there is a C compiler. They are loaded through ctypes, so calls release the GIL. Each
call runs on one thread in a fixed order of operations: equal inputs give equal bits on one instruction set.
``HANSA_NATIVE=off`` disables them; ``HANSA_NATIVE=avx2`` (or ``avx512``, ``neon``, ``base``) selects the instruction
set.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.core.native import abi

__all__ = [
    "available", "describe", "instruction_set", "instruction_sets", "load", "remedy", "unavailable_reason",
    "warn_if_missing",
]  # fmt: skip

log = logging.getLogger("hansa")

_ARM = platform.machine().lower() in ("aarch64", "arm64")
NAMES = ("neon", "base") if _ARM else ("avx512", "avx2", "base")
"""The instruction sets of this kind of processor, best first."""
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
"""The dict below ``os.environ``, if there is one: it takes a tenth of the time to read, and every kernel call does."""
_VARIABLE = getattr(os.environ, "encodekey", str)("HANSA_NATIVE")
TITLES = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "base": "base (plain C)"}


def available() -> bool:
    """Return whether the kernels can be used here; see `unavailable_reason`."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Return why the native kernels cannot be used here, or None."""
    return _reason(__file__, _requested_set())


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that the library was built for and this machine runs, best first."""
    library = _load_library(__file__)
    return () if isinstance(library, str) else tuple(name for name in NAMES if library.hansa_kernels_for(name.encode()))


def instruction_set() -> str | None:
    """Return the instruction set in use, or None if the kernels are not available."""
    return None if unavailable_reason() else str(load().name.decode())


def describe() -> str:
    """Return the kernels in use as text: AVX-512, AVX2, NEON, base, or none and why.

    >>> describe().split()[0] in ("AVX-512", "AVX2", "NEON", "base", "none:")
    True
    """
    used = instruction_set()
    return f"none: {unavailable_reason()}" if used is None else TITLES.get(used, used)


def remedy() -> str:
    """Return what to do if the native kernels cannot be used here, or an empty string."""
    reason = unavailable_reason()
    if reason is None:
        return ""
    if _requested_set() == "off":
        return "Unset HANSA_NATIVE."
    if reason.startswith("HANSA_NATIVE="):
        return "Unset HANSA_NATIVE, or choose one that this machine runs."
    if reason.startswith("they were not built"):
        compilers = "LLVM (clang-cl)" if os.name == "nt" else "gcc or clang"
        return f"Install a wheel (pip install --only-binary hansa hansa), or {compilers} and install again."
    return "Install Hansa again."


@cache
def warn_if_missing() -> None:
    """Log a warning, once per process, if this installation has no native kernels and they are not disabled."""
    if unavailable_reason() is not None and not _requested_set():
        log.warning(
            "native kernels: %s. Small models train several times slower without them. %s", describe(), remedy()
        )


def load() -> Any:
    """Return the kernels (``hansa.core.native.abi.Kernels``) of the requested instruction set, or the best."""
    requested = _requested_set()
    reason = _reason(__file__, requested)
    if reason is not None:
        raise HansaError(f"native kernels: {reason}.")
    return _load_table(__file__, requested)


def _requested_set() -> str:
    raw = _ENVIRONMENT.get(_VARIABLE, "")
    return raw if isinstance(raw, str) else os.fsdecode(raw)


@cache
def _reason(file: str, requested: str) -> str | None:
    if requested == "off":
        return "HANSA_NATIVE=off hides the native kernels"
    library = _load_library(file)
    if isinstance(library, str):
        return library
    if requested and requested not in instruction_sets():
        return f"HANSA_NATIVE={requested}: this machine runs {', '.join(instruction_sets())}"
    return None


@cache
def _load_table(file: str, isa: str) -> Any:
    return _load_library(file).hansa_kernels_for(isa.encode()).contents


def _size_mismatches(library: Any) -> str:
    """Describe the structures whose sizes differ between the library and `abi`; calls would read out of bounds."""
    try:
        library.hansa_size.argtypes, library.hansa_size.restype = [ctypes.c_int64], ctypes.c_int64
    except AttributeError:
        return "it does not report the sizes of its structures"
    expected = {kind.__name__: ctypes.sizeof(kind) for kind in abi.STRUCTURES}
    reported = [library.hansa_size(index) for index in range(len(expected) + 1)]
    if reported[-1] != -1 or -1 in reported[:-1]:
        return f"it does not have the {len(expected)} structures {', '.join(expected)}"
    pairs = zip(expected.items(), reported[:-1], strict=True)
    return ", ".join(f"{name} takes {size} bytes, not {local}" for (name, local), size in pairs if size != local)


@cache
def _load_library(file: str) -> Any:
    """Load the library next to a file; return the reason if there is none."""
    built = [Path(file).parent / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in built if path.exists()), None)
    if path is None:
        return "they were not built"
    try:
        library = ctypes.CDLL(str(path))
        library.hansa_abi.restype = ctypes.c_int64
        version = library.hansa_abi()
    except (OSError, AttributeError) as error:
        return f"{path.name} does not load: {error}"
    if version != abi.ABI:
        return f"{path.name} is of another version ({version}, expected {abi.ABI}): install again"
    if mismatches := _size_mismatches(library):
        return f"{path.name} was built from other sources: {mismatches}. Install again"
    library.hansa_kernels_for.argtypes = [ctypes.c_char_p]
    library.hansa_kernels_for.restype = ctypes.POINTER(abi.Kernels)
    return library
