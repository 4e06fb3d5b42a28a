"""Plain arrays out of a .npz, within bounds: what a file claims is held against what it has before memory is taken."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from hansa.data.errors import DataError, damaged

LARGEST = 1 << 31
"""Bytes that the arrays of one file may take together, unpacked."""

_HEADS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_BROKEN = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    SyntaxError,
    RuntimeError,  # also what zipfile says of an encrypted member
    OverflowError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of a .npz. No pickled objects, no more bytes than a member has, `LARGEST` bytes in all."""
    try:
        with open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
            members = _members(path, archive, wanted)
            return {name: _array(path, archive, name, members[name]) for name in wanted}
    except DataError:
        raise
    except _BROKEN as problem:
        raise damaged(
            path, "a whole .npz of plain arrays", str(problem).rstrip(".") or type(problem).__name__
        ) from None


def _members(path: Path, archive: zipfile.ZipFile, wanted: Sequence[str]) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise damaged(path, "every array once", f"{name!r:.60} twice")
        members[name] = info
    absent = [name for name in wanted if name not in members]
    if absent:
        raise damaged(path, f"arrays {', '.join(wanted)}", f"none named {', '.join(absent)}")
    claimed = sum(members[name].file_size for name in wanted)
    if claimed > LARGEST:
        raise damaged(path, f"at most {LARGEST} bytes of arrays", f"{claimed}")
    return members


def _array(path: Path, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    with archive.open(info) as file:
        shape, fortran, dtype = _head(file)
        begin = file.tell()
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or any(side < 0 for side in shape):
            raise damaged(path, "a whole .npz of plain arrays", f"{name} as {dtype} of shape {shape}")
        if begin + size != info.file_size:
            raise damaged(path, f"{size} bytes of {name}, {dtype} of shape {shape}", f"{info.file_size - begin}")
        body = file.read(size)
        if len(body) != size or file.read(1):  # to the end, where the checksum is compared
            raise damaged(path, f"{size} bytes of {name}", f"{len(body)}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")


def _head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in _HEADS:
        raise ValueError(f"an array of format {version[0]}.{version[1]}")
    shape, fortran, dtype = _HEADS[version](file)
    return tuple(map(int, shape)), bool(fortran), dtype
