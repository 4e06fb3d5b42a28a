"""Read plain arrays from a .npz file. Claimed sizes are checked before memory is allocated."""

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

from hansa.data.files import DataError, invalid_file

MAX_BYTES = 1 << 31
"""Maximum size of the uncompressed arrays of one file."""

_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_READ_ERRORS = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    SyntaxError,
    RuntimeError,  # also from zipfile for an encrypted member
    OverflowError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the named arrays of a .npz file. Pickled objects and more than `MAX_BYTES` bytes are refused."""
    try:
        with open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
            members = _find_members(path, archive, wanted)
            return {name: _read_array(path, archive, name, members[name]) for name in wanted}
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise invalid_file(
            path, "a whole .npz of plain arrays", str(error).rstrip(".") or type(error).__name__
        ) from None


def _find_members(path: Path, archive: zipfile.ZipFile, wanted: Sequence[str]) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise invalid_file(path, "every array once", f"{name!r:.60} twice")
        members[name] = info
    absent = [name for name in wanted if name not in members]
    if absent:
        raise invalid_file(path, f"arrays {', '.join(wanted)}", f"none named {', '.join(absent)}")
    claimed = sum(members[name].file_size for name in wanted)
    if claimed > MAX_BYTES:
        raise invalid_file(path, f"at most {MAX_BYTES} bytes of arrays", f"{claimed}")
    return members


def _read_array(path: Path, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    with archive.open(info) as file:
        shape, fortran, dtype = _read_header(file)
        begin = file.tell()
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or any(side < 0 for side in shape):
            raise invalid_file(path, "a whole .npz of plain arrays", f"{name} as {dtype} of shape {shape}")
        if begin + size != info.file_size:
            raise invalid_file(path, f"{size} bytes of {name}, {dtype} of shape {shape}", f"{info.file_size - begin}")
        body = file.read(size)
        if len(body) != size or file.read(1):  # read to the end, where zipfile compares the checksum
            raise invalid_file(path, f"{size} bytes of {name}", f"{len(body)}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"an array of format {version[0]}.{version[1]}")
    shape, fortran, dtype = _HEADER_READERS[version](file)
    return tuple(map(int, shape)), bool(fortran), dtype
