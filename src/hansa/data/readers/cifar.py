"""The Python version of CIFAR-10 and CIFAR-100: pickled batches of 3 x 32 x 32 bytes, read without executing them.

A pickle is a program for a stack machine. Two of its instructions are dangerous: GLOBAL, which can name any callable,
and REDUCE, which calls it. This machine implements only the instructions of the official files. It builds dicts, lists,
tuples, strings and integers. Of GLOBAL it accepts the three names with which NumPy writes an array of bytes; it treats
them as strings and builds the array itself. Nothing is imported or called.

Values are as flat as in the files: a dict with string keys, lists of strings and numbers, tuples of tuples and no
deeper, and each array is filled once. Memory and time are therefore linear in the length of the file.
"""

from __future__ import annotations

import hashlib
import math
import pickletools
import reprlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.data.files import invalid_file, missing_file

_PIXELS = 3 * 32 * 32
_MAX_BYTES = 1 << 29  # three times the largest official file
_OPCODE_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


class _UnsupportedPickleError(Exception):
    """An instruction or a value that the official files do not have."""


class _Mark:
    """Begin of a list of arguments."""


class _Name(str):
    """A global of the pickle, as a string."""


class _Array:
    """A NumPy array under construction."""

    value: npt.NDArray[np.uint8] | None = None


class _Bytes:
    """The dtype of unsigned bytes."""


_MAX_TUPLE = 16  # the files have tuples of eight
_PLAIN = (str, int, type(None))
_RECONSTRUCT = frozenset({"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"})
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"


def read_cifar(path: Path, classes: int, remedy: str = "") -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], str]:
    """Return images [n, 3, 32, 32], (fine) labels [n], and the SHA-256 of the pixels and labels, a byte each."""
    if not path.is_file():
        raise missing_file(path, remedy)
    batch = read_pickled(path)
    key = "fine_labels" if "fine_labels" in batch else "labels"
    pixels, labels = batch.get("data"), batch.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        actual = f"shape {pixels.shape}" if isinstance(pixels, np.ndarray) else f"keys {sorted(batch)}"
        raise invalid_file(path, f"'data' of shape (n, {_PIXELS})", actual)
    if not isinstance(labels, list) or len(labels) != len(pixels):
        actual = f"{len(labels)}" if isinstance(labels, list) else f"keys {sorted(batch)}"
        raise invalid_file(path, f"{len(pixels)} labels in 'labels' or 'fine_labels'", actual)
    wrong = [label for label in labels if type(label) is not int or not 0 <= label < classes]
    if wrong:
        raise invalid_file(path, f"labels from 0 to {classes - 1}", repr(wrong[0])[:40])
    label_bytes = np.array(labels, np.uint8)
    digest = hashlib.sha256(pixels.tobytes())
    digest.update(label_bytes.tobytes())
    return pixels.reshape(-1, 3, 32, 32), label_bytes, digest.hexdigest()


def read_pickled(path: Path) -> dict[str, Any]:
    """Return the dict in a pickled CIFAR file, with strings read as Latin-1; raise for anything else."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise invalid_file(path, f"at most {_MAX_BYTES} bytes", f"{size}")
    try:
        content = _Machine(path.read_bytes()).run()
    except _UnsupportedPickleError as error:
        raise invalid_file(
            path, "only the dicts, lists, strings, numbers and byte arrays of a CIFAR batch", error
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise invalid_file(path, "a whole pickled CIFAR batch", f"one that is truncated or corrupt ({error})") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise invalid_file(path, "a dict with string keys", f"a {type(content).__name__}")
    return {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}


class _Machine:
    """The stack machine."""

    def __init__(self, program: bytes) -> None:
        self.program = program
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.unpacked = 0

    def run(self) -> Any:
        while (code := self.take(1)) != b".":
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                opcode = _OPCODE_NAMES.get(code.decode("latin-1"), repr(code))
                raise _UnsupportedPickleError(f"the instruction {opcode} at byte {self.position - 1}")
            instruction(self)
        if len(self.stack) != 1:
            raise _UnsupportedPickleError(f"{len(self.stack)} values at the end")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        taken = self.program[self.position : self.position + count]
        if count < 0 or len(taken) != count:
            raise ValueError(f"it ends at byte {len(self.program)}")
        self.position += count
        return taken

    def number(self, form: str) -> int:
        """Return the next number of the program, in a format of ``struct``."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def line(self) -> str:
        """Return the next line of the program."""
        end = self.program.find(b"\n", self.position)
        if end < 0:
            raise ValueError("a name without end")
        return self.take(end + 1 - self.position)[:-1].decode("latin-1")

    def since_mark(self) -> list[Any]:
        """Pop the values after the last mark."""
        for position in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[position], _Mark):
                values = self.stack[position + 1 :]
                del self.stack[position:]
                return values
        raise ValueError("no mark")

    def last(self, count: int) -> list[Any]:
        """Pop the last values."""
        if len(self.stack) < count:
            raise ValueError("an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def protocol(self) -> None:
        version = self.number("<B")
        if version != 2:
            raise _UnsupportedPickleError(f"pickle protocol {version}")

    def name(self) -> None:
        name = f"{self.line()} {self.line()}"
        if name not in _RECONSTRUCT and name not in (_NDARRAY, _DTYPE):
            raise _UnsupportedPickleError(f"the global {name.replace(' ', '.')}")
        self.stack.append(_Name(name))

    def call(self) -> None:
        function, arguments = self.last(2)
        if function in _RECONSTRUCT and isinstance(function, _Name) and arguments == (_NDARRAY, (0,), "b"):
            self.stack.append(_Array())
        elif function == _DTYPE and isinstance(function, _Name) and arguments[:1] in (("u1",), ("|u1",)):
            self.stack.append(_Bytes())
        else:
            raise _UnsupportedPickleError(f"a call of {_short(function)} with {_short(arguments)}")

    def build(self) -> None:
        target, state = self.last(2)
        self.stack.append(target)
        if isinstance(target, _Bytes):
            return
        if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _UnsupportedPickleError(f"a state for a {type(target).__name__}")
        _, shape, dtype, fortran, content = state
        if target.value is not None:
            raise _UnsupportedPickleError("an array that is filled twice")
        valid_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if (
            not valid_shape
            or not isinstance(dtype, _Bytes)
            or not isinstance(content, str)
            or type(fortran) is not bool
        ):
            raise _UnsupportedPickleError(f"an array of shape {_short(shape)} that does not consist of bytes")
        self.unpacked += len(content)
        if self.unpacked > len(self.program):
            raise _UnsupportedPickleError(f"arrays of {self.unpacked} bytes in a file of {len(self.program)}")
        data = np.frombuffer(content.encode("latin-1"), np.uint8)
        if data.size != math.prod(shape):
            raise _UnsupportedPickleError(f"an array of shape {_short(shape)} with {data.size} bytes")
        target.value = data.reshape(shape, order="F" if fortran else "C")

    def append(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not list:
            raise ValueError("no list to append to")
        for value in values:
            if not isinstance(value, _PLAIN):
                raise _UnsupportedPickleError(f"a {type(value).__name__} in a list")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not self.stack or type(self.stack[-1]) is not dict or len(values) % 2:
            raise ValueError("no dict to set items of")
        for name, value in zip(values[::2], values[1::2], strict=True):
            if type(name) is not str or not isinstance(value, (*_PLAIN, list, _Array)):
                raise _UnsupportedPickleError(f"an entry of {type(name).__name__} and {type(value).__name__}")
            self.stack[-1][name] = value

    def tuple_of(self, values: list[Any]) -> None:
        if len(values) > _MAX_TUPLE:
            raise _UnsupportedPickleError(f"a tuple of {len(values)} values")
        if any(type(inner) is tuple for value in values if type(value) is tuple for inner in value):
            raise _UnsupportedPickleError("a tuple of tuples of tuples")
        self.stack.append(tuple(values))

    def memoize(self, number: int) -> None:
        if not self.stack:
            raise ValueError("nothing to memoize")
        self.memo[number] = self.stack[-1]


def _short(value: object) -> str:
    return reprlib.repr(value)[:80]


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"c": _Machine.name,
    b"R": _Machine.call,
    b"b": _Machine.build,
    b"(": _push(lambda machine: _Mark()),
    b"}": _push(lambda machine: {}),
    b"]": _push(lambda machine: []),
    b")": _push(lambda machine: ()),
    b"N": _push(lambda machine: None),
    b"\x88": _push(lambda machine: True),
    b"\x89": _push(lambda machine: False),
    b"J": _push(lambda machine: machine.number("<i")),
    b"K": _push(lambda machine: machine.number("<B")),
    b"M": _push(lambda machine: machine.number("<H")),
    b"U": _push(lambda machine: machine.take(machine.number("<B")).decode("latin-1")),
    b"T": _push(lambda machine: machine.take(machine.number("<i")).decode("latin-1")),
    b"t": lambda machine: machine.tuple_of(machine.since_mark()),
    b"\x85": lambda machine: machine.tuple_of(machine.last(1)),
    b"\x86": lambda machine: machine.tuple_of(machine.last(2)),
    b"\x87": lambda machine: machine.tuple_of(machine.last(3)),
    b"a": lambda machine: machine.append(machine.last(1)),
    b"e": lambda machine: machine.append(machine.since_mark()),
    b"s": lambda machine: machine.set_items(machine.last(2)),
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"q": lambda machine: machine.memoize(machine.number("<B")),
    b"r": lambda machine: machine.memoize(machine.number("<I")),
    b"h": _push(lambda machine: machine.memo[machine.number("<B")]),
    b"j": _push(lambda machine: machine.memo[machine.number("<I")]),
}
