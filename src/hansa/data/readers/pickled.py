"""Reads the pickles of the CIFAR files without executing them.

A pickle is a program for a small stack machine, and its power to harm lies in two instructions: GLOBAL, which may name
any callable, and REDUCE, which calls it. This machine knows the instructions that the official files use and no other.
It can build dicts, lists, tuples, strings and whole numbers; of GLOBAL it admits the three names by which NumPy writes
an array of bytes, which it recognises as words and rebuilds itself. Nothing is ever imported or called.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.data.problems import damaged

_LARGEST = 1 << 30


class _Refused(Exception):
    """An instruction or a value that these files do not hold."""


class _Mark:
    """Where a list of arguments begins."""


class _Name(str):
    """A global of the pickle: a word, not the thing it names."""


class _Array:
    """A NumPy array under construction."""

    value: npt.NDArray[np.uint8] | None = None


class _Bytes:
    """The dtype of unsigned bytes, whose remaining state says nothing."""


_RECONSTRUCT = frozenset({"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"})
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"


def read_pickled(path: Path) -> dict[str, Any]:
    """The dict in a pickled CIFAR file; its strings are read as Latin-1. Anything else is refused by name."""
    size = path.stat().st_size
    if size > _LARGEST:
        raise damaged(path, f"at most {_LARGEST} bytes", f"{size}")
    try:
        found = _Machine().run(path.read_bytes())
    except _Refused as problem:
        raise damaged(
            path, "only the dicts, lists, strings, numbers and byte arrays of a CIFAR batch", problem
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as problem:
        raise damaged(path, "a whole pickled CIFAR batch", f"one that breaks off or is garbled ({problem})") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise damaged(path, "a dict with names", f"a {type(found).__name__}")
    return {key: value.value if isinstance(value, _Array) else value for key, value in found.items()}


class _Machine:
    """The stack machine."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, position in pickletools.genops(program):
            if opcode.name == "STOP":
                if len(self.stack) != 1:
                    raise _Refused(f"{len(self.stack)} values at the end")
                return self.stack[0]
            step = _STEPS.get(opcode.name)
            if step is None:
                raise _Refused(f"the instruction {opcode.name} at byte {position}")
            step(self, argument)
        raise ValueError("no end")

    def since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("no mark")

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def protocol(self, version: int) -> None:
        if version != 2:
            raise _Refused(f"pickle protocol {version}")

    def name(self, words: str) -> None:
        if words not in _RECONSTRUCT and words not in (_NDARRAY, _DTYPE):
            raise _Refused(f"the global {words.replace(' ', '.')}")
        self.stack.append(_Name(words))

    def call(self, _: None) -> None:
        function, arguments = self.last(2)
        if function in _RECONSTRUCT and isinstance(function, _Name) and arguments == (_NDARRAY, (0,), "b"):
            self.stack.append(_Array())
        elif function == _DTYPE and isinstance(function, _Name) and arguments[:1] in (("u1",), ("|u1",)):
            self.stack.append(_Bytes())
        else:
            raise _Refused(f"a call of {_shown(function)} with {_shown(arguments)}")

    def build(self, _: None) -> None:
        target, state = self.last(2)
        self.stack.append(target)
        if isinstance(target, _Bytes):
            return
        if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _Refused(f"a state for a {type(target).__name__}")
        _, shape, dtype, fortran, content = state
        whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not whole or not isinstance(dtype, _Bytes) or not isinstance(content, str) or fortran not in (False, True):
            raise _Refused(f"an array of shape {_shown(shape)} that is not one of bytes")
        data = np.frombuffer(content.encode("latin-1"), np.uint8)
        if data.size != math.prod(shape):
            raise _Refused(f"an array of shape {shape} with {data.size} bytes")
        target.value = data.reshape(shape, order="F" if fortran else "C")

    def append(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not list:
            raise ValueError("no list to append to")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not dict or len(values) % 2:
            raise ValueError("no dict to set items of")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _shown(value: object) -> str:
    return repr(value)[:80]


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "MARK": lambda machine, _: _push(machine, _Mark()),
    "EMPTY_DICT": lambda machine, _: _push(machine, {}),
    "EMPTY_LIST": lambda machine, _: _push(machine, []),
    "EMPTY_TUPLE": lambda machine, _: _push(machine, ()),
    "NONE": lambda machine, _: _push(machine, None),
    "NEWFALSE": lambda machine, _: _push(machine, False),
    "NEWTRUE": lambda machine, _: _push(machine, True),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING", "BININT", "BININT1", "BININT2"), _push),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: _push(machine, tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: _push(machine, tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: _push(machine, tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.append(machine.last(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "BINGET": lambda machine, place: _push(machine, machine.memo[place]),
    "LONG_BINGET": lambda machine, place: _push(machine, machine.memo[place]),
}
