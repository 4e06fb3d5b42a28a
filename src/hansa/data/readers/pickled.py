"""Reads the pickles of the CIFAR files without executing them.

A pickle is a program for a small stack machine, and its power to harm lies in two instructions: GLOBAL, which may name
any callable, and REDUCE, which calls it. This machine knows the instructions that the official files use and no other.
It can build dicts, lists, tuples, strings and whole numbers; of GLOBAL it admits the three names by which NumPy writes
an array of bytes, which it recognises as words and rebuilds itself. Nothing is ever imported or called.

Values are as flat as those of the files: a dict of names, lists of strings and numbers, tuples of tuples and no deeper,
each array filled once. So no program takes more than memory and time in proportion to its length.
"""

from __future__ import annotations

import math
import pickletools
import reprlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.data.errors import damaged

_LARGEST = 1 << 29  # bytes of a file; the largest official one has a third of it
_WORDS = {opcode.code: opcode.name for opcode in pickletools.opcodes}


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


_LONGEST = 16  # values of a tuple; the files have eight
_PLAIN = (str, int, type(None))
_RECONSTRUCT = frozenset({"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"})
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"


def read_pickled(path: Path) -> dict[str, Any]:
    """The dict in a pickled CIFAR file; its strings are read as Latin-1. Anything else is refused by name."""
    size = path.stat().st_size
    if size > _LARGEST:
        raise damaged(path, f"at most {_LARGEST} bytes", f"{size}")
    try:
        found = _Machine(path.read_bytes()).run()
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

    def __init__(self, program: bytes) -> None:
        self.program = program
        self.place = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.unpacked = 0

    def run(self) -> Any:
        while (code := self.take(1)) != b".":
            step = _STEPS.get(code)
            if step is None:
                word = _WORDS.get(code.decode("latin-1"), repr(code))
                raise _Refused(f"the instruction {word} at byte {self.place - 1}")
            step(self)
        if len(self.stack) != 1:
            raise _Refused(f"{len(self.stack)} values at the end")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """The next bytes of the program."""
        found = self.program[self.place : self.place + count]
        if count < 0 or len(found) != count:
            raise ValueError(f"it ends at byte {len(self.program)}")
        self.place += count
        return found

    def number(self, form: str) -> int:
        """The next number of the program, in the words of ``struct``."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def line(self) -> str:
        """The next line of the program."""
        end = self.program.find(b"\n", self.place)
        if end < 0:
            raise ValueError("a name without end")
        return self.take(end + 1 - self.place)[:-1].decode("latin-1")

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

    def protocol(self) -> None:
        version = self.number("<B")
        if version != 2:
            raise _Refused(f"pickle protocol {version}")

    def name(self) -> None:
        words = f"{self.line()} {self.line()}"
        if words not in _RECONSTRUCT and words not in (_NDARRAY, _DTYPE):
            raise _Refused(f"the global {words.replace(' ', '.')}")
        self.stack.append(_Name(words))

    def call(self) -> None:
        function, arguments = self.last(2)
        if function in _RECONSTRUCT and isinstance(function, _Name) and arguments == (_NDARRAY, (0,), "b"):
            self.stack.append(_Array())
        elif function == _DTYPE and isinstance(function, _Name) and arguments[:1] in (("u1",), ("|u1",)):
            self.stack.append(_Bytes())
        else:
            raise _Refused(f"a call of {_shown(function)} with {_shown(arguments)}")

    def build(self) -> None:
        target, state = self.last(2)
        self.stack.append(target)
        if isinstance(target, _Bytes):
            return
        if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _Refused(f"a state for a {type(target).__name__}")
        _, shape, dtype, fortran, content = state
        if target.value is not None:
            raise _Refused("an array that is filled twice")
        whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not whole or not isinstance(dtype, _Bytes) or not isinstance(content, str) or type(fortran) is not bool:
            raise _Refused(f"an array of shape {_shown(shape)} that is not one of bytes")
        self.unpacked += len(content)
        if self.unpacked > len(self.program):
            raise _Refused(f"arrays of {self.unpacked} bytes in a file of {len(self.program)}")
        data = np.frombuffer(content.encode("latin-1"), np.uint8)
        if data.size != math.prod(shape):
            raise _Refused(f"an array of shape {_shown(shape)} with {data.size} bytes")
        target.value = data.reshape(shape, order="F" if fortran else "C")

    def append(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not list:
            raise ValueError("no list to append to")
        for value in values:
            if not isinstance(value, _PLAIN):
                raise _Refused(f"a {type(value).__name__} in a list")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not dict or len(values) % 2:
            raise ValueError("no dict to set items of")
        for name, value in zip(values[::2], values[1::2], strict=True):
            if type(name) is not str or not isinstance(value, (*_PLAIN, list, _Array)):
                raise _Refused(f"an entry of {type(name).__name__} and {type(value).__name__}")
            self.stack[-1][name] = value

    def tuple_of(self, values: list[Any]) -> None:
        if len(values) > _LONGEST:
            raise _Refused(f"a tuple of {len(values)} values")
        if any(type(inner) is tuple for value in values if type(value) is tuple for inner in value):
            raise _Refused("a tuple of tuples of tuples")
        self.stack.append(tuple(values))

    def remember(self, place: int) -> None:
        if not self.stack:
            raise ValueError("nothing to remember")
        self.memo[place] = self.stack[-1]


def _shown(value: object) -> str:
    return reprlib.repr(value)[:80]


def _pushing(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"c": _Machine.name,
    b"R": _Machine.call,
    b"b": _Machine.build,
    b"(": _pushing(lambda machine: _Mark()),
    b"}": _pushing(lambda machine: {}),
    b"]": _pushing(lambda machine: []),
    b")": _pushing(lambda machine: ()),
    b"N": _pushing(lambda machine: None),
    b"\x88": _pushing(lambda machine: True),
    b"\x89": _pushing(lambda machine: False),
    b"J": _pushing(lambda machine: machine.number("<i")),
    b"K": _pushing(lambda machine: machine.number("<B")),
    b"M": _pushing(lambda machine: machine.number("<H")),
    b"U": _pushing(lambda machine: machine.take(machine.number("<B")).decode("latin-1")),
    b"T": _pushing(lambda machine: machine.take(machine.number("<i")).decode("latin-1")),
    b"t": lambda machine: machine.tuple_of(machine.since_mark()),
    b"\x85": lambda machine: machine.tuple_of(machine.last(1)),
    b"\x86": lambda machine: machine.tuple_of(machine.last(2)),
    b"\x87": lambda machine: machine.tuple_of(machine.last(3)),
    b"a": lambda machine: machine.append(machine.last(1)),
    b"e": lambda machine: machine.append(machine.since_mark()),
    b"s": lambda machine: machine.set_items(machine.last(2)),
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"q": lambda machine: machine.remember(machine.number("<B")),
    b"r": lambda machine: machine.remember(machine.number("<I")),
    b"h": _pushing(lambda machine: machine.memo[machine.number("<B")]),
    b"j": _pushing(lambda machine: machine.memo[machine.number("<I")]),
}
