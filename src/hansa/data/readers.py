"""Readers of the official files of data sets: idx (MNIST), CIFAR, .npz, LEAF's JSON (FEMNIST, Shakespeare).

Files may come from anybody. Nothing in them is executed, memory is allocated for bytes that exist and not for sizes
that a header claims, and a file that is not what it should be is refused by one `DataError`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import re
import reprlib
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from hansa.core.errors import check_decay, check_integer
from hansa.core.keys import Key
from hansa.data.files import DataError, invalid_file, missing_file

Bytes = npt.NDArray[np.uint8]

# ---- idx: a magic number, big-endian sizes, bytes

_UNSIGNED_BYTE = 0x08
_BLOCK = 1 << 20
_MAX_IDX_BYTES = 1 << 28  # five times the largest file: a small .gz must not fill the memory


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def find_idx(path: Path, remedy: str = "") -> Path:
    """Return the file, or the same name with .gz."""
    compressed = path.with_name(path.name + ".gz")
    if path.is_file():
        return path
    if compressed.is_file():
        return compressed
    raise missing_file(path, remedy or "Neither it nor its .gz exists.")


def read_idx(path: Path, axes: int, remedy: str = "") -> tuple[Bytes, str]:
    """Return the array of an idx file of unsigned bytes, and the SHA-256 of its uncompressed bytes."""
    path = find_idx(path, remedy)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return _parse(path, file, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise invalid_file(path, "a whole gzip file", str(error).rstrip(".")) from error


def _read(file: _Stream, count: int) -> bytes:
    """Read at most ``count`` bytes in blocks, so that memory is allocated only for bytes that exist."""
    blocks, remaining = [], count
    while remaining and (block := file.read(min(remaining, _BLOCK))):
        blocks.append(block)
        remaining -= len(block)
    return b"".join(blocks)


def _parse(path: Path, file: _Stream, axes: int) -> tuple[Bytes, str]:
    size = 4 + 4 * axes
    header = file.read(size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if header[:4] != magic:
        raise invalid_file(
            path, f"an idx file of bytes with {axes} axes (magic {magic.hex()})", f"magic {header[:4].hex()!r}"
        )
    if len(header) < size:
        raise invalid_file(path, f"a header of {size} bytes", f"{len(header)}")
    shape = struct.unpack(f">{axes}I", header[4:])
    count = int(np.prod(shape, dtype=object))
    if count > _MAX_IDX_BYTES:
        raise invalid_file(
            path, f"at most {_MAX_IDX_BYTES} bytes", f"a header that claims {' x '.join(map(str, shape))}"
        )
    # one byte more than claimed, to detect a longer file
    body = _read(file, count + 1)
    if len(body) != count:
        actual = "more" if len(body) > count else str(len(body))
        raise invalid_file(path, f"{count} bytes for {' x '.join(map(str, shape))}", actual)
    digest = hashlib.sha256(header)
    digest.update(body)
    return np.frombuffer(body, np.uint8).reshape(shape), digest.hexdigest()


# ---- CIFAR: batches of 3 x 32 x 32 bytes

_CIFAR_PIXELS = 3 * 32 * 32
_MAX_CIFAR_BYTES = 1 << 29  # three times the largest official file
_MEMO = rb"(?:q.|r....)?"
_CIFAR_LABELS = re.compile(rb"(?:U\x06|U\x0bfine_)labels" + _MEMO + rb"\]" + _MEMO + rb"((?:\((?:K.)+e)+)", re.DOTALL)
_CIFAR_DATA = re.compile(rb"U\x04data" + _MEMO + rb"cnumpy.{0,200}?([\x88\x89])T(....)", re.DOTALL)


def read_cifar(path: Path, classes: int, remedy: str = "") -> tuple[Bytes, Bytes, str]:
    """Return images [n, 3, 32, 32] and labels of a batch of CIFAR's Python version, and the SHA-256 of both.

    A batch is a pickle, and it is never unpickled: the two fields are found by the instructions that write them, the
    bytes of ``data`` in one piece and the numbers of ``labels`` or ``fine_labels``. The caller compares the SHA-256 of
    the pixels and then the labels, a byte each, with the published one: what was found is used only if it is the data
    set.

    Args:
        path: The file, such as ``cifar-10-batches-py/data_batch_1``.
        classes: Number of classes.
        remedy: How to get the file, for messages.
    """
    if not path.is_file():
        raise missing_file(path, remedy)
    size = path.stat().st_size
    if size > _MAX_CIFAR_BYTES:
        raise invalid_file(path, f"at most {_MAX_CIFAR_BYTES} bytes", f"{size}")
    content = path.read_bytes()
    marks, data = _CIFAR_LABELS.search(content), _CIFAR_DATA.search(content)
    if marks is None or data is None:
        absent = "'data'" if data is None else "'labels' or 'fine_labels'"
        raise invalid_file(path, "a CIFAR batch of the Python version, pickled by Python 2", f"no {absent}", remedy)
    count = struct.unpack("<i", data.group(2))[0]
    if not 0 < count <= size - data.end() or count % _CIFAR_PIXELS:
        raise invalid_file(path, f"'data' of rows of {_CIFAR_PIXELS} bytes", f"{count} bytes of {size - data.end()}")
    pixels = np.frombuffer(content, np.uint8, count, data.end())
    pixels = pixels.reshape((-1, _CIFAR_PIXELS), order="F" if data.group(1) == b"\x88" else "C")
    labels = np.frombuffer(re.sub(rb"\(((?:K.)+)e", rb"\1", marks.group(1), flags=re.DOTALL), np.uint8)[1::2]
    if len(labels) != len(pixels):
        raise invalid_file(path, f"{len(pixels)} labels in 'labels' or 'fine_labels'", f"{len(labels)}")
    if labels.max() >= classes:
        raise invalid_file(path, f"labels from 0 to {classes - 1}", f"{labels.max()}")
    digest = hashlib.sha256(pixels.tobytes())
    digest.update(labels.tobytes())
    return pixels.reshape(-1, 3, 32, 32), labels, digest.hexdigest()


# ---- .npz of plain arrays

MAX_NPZ_BYTES = 1 << 31
"""Maximum size of the uncompressed arrays of one .npz file."""

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
    """Return the named arrays of a .npz file. Pickled objects and more than `MAX_NPZ_BYTES` bytes are refused."""
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
    if claimed > MAX_NPZ_BYTES:
        raise invalid_file(path, f"at most {MAX_NPZ_BYTES} bytes of arrays", f"{claimed}")
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


# ---- LEAF's JSON: {users, num_samples, user_data: {user: {x, y}}}, usually in train/ and test/

_SIDE = 28
_EMPTY = "The option -k of LEAF's preprocess.sh leaves out users with few samples."
_Parse = Callable[[Path, str, list[Any], list[Any]], tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
_Part = tuple[npt.NDArray[Any], npt.NDArray[np.int64], int]


class OwnedSamples(NamedTuple):
    """Rows with their owners; -1 is the owner of test rows of a user without training rows, and of rows of nobody."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    names: tuple[str, ...]
    test_inputs: npt.NDArray[Any]
    test_targets: npt.NDArray[np.int64]
    test_groups: npt.NDArray[np.int64]

    @classmethod
    def joined(cls, names: Iterable[str], train: Sequence[_Part], test: Sequence[_Part]) -> OwnedSamples:
        """Return the rows of all users, one after the other."""
        fields = []
        for parts in (train, test):
            owners = np.repeat([owner for _, _, owner in parts], [len(y) for _, y, _ in parts]).astype(np.int64)
            fields.append((np.concatenate([x for x, _, _ in parts]), np.concatenate([y for _, y, _ in parts]), owners))
        return cls(*fields[0], tuple(names), *fields[1])


def leaf_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return LEAF's training and test files; there are no test files if LEAF did not split."""
    for base in (folder, folder / "data"):
        train, test = sorted(base.glob("train/*.json")), sorted(base.glob("test/*.json"))
        if train:
            return train, test
        whole = sorted(base.glob("all_data_*.json")) or sorted(base.glob("all_data/all_data*.json"))
        if whole:
            return whole, []
    return [], []


def read_users(path: Path, *, empty: bool = False) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield every user of a LEAF file with its x and y, after checks of users and counts.

    ``empty`` allows users without samples, as in test files.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        actual = sorted(content)[:9] if isinstance(content, dict) else type(content).__name__
        raise invalid_file(path, "LEAF's keys users, num_samples, user_data", actual)
    users, counts, user_data = content["users"], content["num_samples"], content["user_data"]
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise invalid_file(path, "as many num_samples as users", "lists of different lengths")
    if not users:
        raise invalid_file(path, "at least one user", "none")
    _check_users(path, users, user_data)
    for user, count in zip(users, counts, strict=True):
        if type(count) is not int or count < (0 if empty else 1):
            minimum = "at least 0" if empty else "at least 1"
            raise invalid_file(path, f"{minimum} as num_samples of user {_name(user)}", reprlib.repr(count), _EMPTY)
        rows = user_data[user]
        if not isinstance(rows, dict) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
            raise invalid_file(path, f"x and y of user {_name(user)}", "none")
        if not len(rows["x"]) == len(rows["y"]) == count:
            actual = f"{len(rows['x'])} x and {len(rows['y'])} y"
            raise invalid_file(path, f"{count} samples of user {_name(user)}", actual)
        yield user, rows["x"], rows["y"]


def _check_users(path: Path, users: list[Any], user_data: Any) -> None:
    """Raise for a user that is listed twice, listed without data, or has data and is not listed."""
    listed: set[str] = set()
    for user in users:
        if not isinstance(user, str) or not user.isprintable():
            raise invalid_file(path, "users with names", reprlib.repr(user))
        if user in listed:
            raise invalid_file(path, "every user once", f"user {_name(user)} twice")
        listed.add(user)
        if not isinstance(user_data, dict) or user not in user_data:
            raise invalid_file(path, f"x and y of user {_name(user)}", "none")
    unlisted = next((user for user in user_data if user not in listed), None)
    if unlisted is not None:
        raise invalid_file(path, "data of listed users only", f"data of {_name(unlisted)}, who is not in users")


def _read_parts(files: Sequence[Path], parse: _Parse, names: dict[str, int], *, test: bool) -> list[_Part]:
    """Return the rows of every user of several files. Training users are numbered as they come."""
    parts: list[_Part] = []
    homes: dict[str, Path] = {}
    for path in files:
        for user, x, y in read_users(path, empty=test):
            if user in homes:
                raise invalid_file(path, f"users that are not in {homes[user].name}", f"user {_name(user)} again")
            homes[user] = path
            owner = names.get(user, -1) if test else names.setdefault(user, len(names))
            parts.append((*parse(path, user, x, y), owner))
    return parts


def read_json(path: Path) -> Any:
    """Return the content of a JSON file without duplicate keys."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_check_unique_keys)
    except (ValueError, RecursionError) as error:  # also for a number with thousands of digits
        raise invalid_file(path, "whole JSON", str(error).rstrip(".")) from None


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        duplicate, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_name(duplicate)} appears twice in one object")
    return content


def _name(user: str) -> str:
    return f"{user!r:.80}"


def read_femnist(folder: Path, remedy: str = "") -> OwnedSamples:
    """Read FEMNIST by writer from LEAF's JSON or from one .npz of x_train, y_train, w_train, x_test, y_test, w_test,
    writers.

    Pixels are bytes [n, 1, 28, 28], white paper is 255. If LEAF did not split, a tenth of each writer's samples, chosen
    with a fixed key, is for testing.
    """
    train, test = leaf_files(folder)
    if not train:
        packed = sorted(folder.glob("*.npz"))
        if not packed:
            raise missing_file(folder / "train" / "all_data_*.json", remedy)
        return _read_femnist_npz(packed[0])
    names: dict[str, int] = {}
    train_parts = _read_parts(train, _parse_writer, names, test=False)
    if test:
        return OwnedSamples.joined(names, train_parts, _read_parts(test, _parse_writer, names, test=True))
    divided: dict[bool, list[_Part]] = {False: [], True: []}
    for user, (images, labels, owner) in zip(names, train_parts, strict=True):
        is_test = np.zeros(len(labels), bool)
        is_test[Key(0).child("femnist test", user).numpy().permutation(len(labels))[: len(labels) // 10]] = True
        for side, rows in ((False, ~is_test), (True, is_test)):
            divided[side].append((images[rows], labels[rows], owner))
    return OwnedSamples.joined(names, divided[False], divided[True])


def _parse_writer(path: Path, user: str, x: list[Any], y: list[Any]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    if not y:
        return np.zeros((0, 1, _SIDE, _SIDE), np.uint8), np.zeros(0, np.int64)
    try:
        pixels, labels = np.array(x), np.array(y)
    except (ValueError, TypeError, OverflowError):
        pixels = labels = np.zeros(0, object)
    if pixels.dtype.kind not in "iuf" or pixels.ndim < 2:
        raise invalid_file(
            path, f"images of {_SIDE * _SIDE} numbers of user {_name(user)}", "rows of other types or lengths"
        )
    pixels = pixels.reshape(len(y), -1).astype(np.float64)
    if pixels.shape[1] != _SIDE * _SIDE:
        raise invalid_file(path, f"images of {_SIDE * _SIDE} pixels of user {_name(user)}", pixels.shape[1])
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise invalid_file(path, f"pixels of user {_name(user)} from 0 to 1", f"{pixels.min():g} to {pixels.max():g}")
    images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    return images, _check_labels(path, labels, len(y))


def _check_labels(path: Path, labels: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    if labels.shape != (count,) or (count and labels.dtype.kind not in "iu"):
        raise invalid_file(path, f"{count} class numbers", f"{labels.dtype} of shape {labels.shape}")
    if count and not (int(labels.min()) >= 0 and int(labels.max()) <= 61):
        raise invalid_file(path, "labels from 0 to 61", f"{labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _read_femnist_npz(path: Path) -> OwnedSamples:
    parts = ("train", "test")
    arrays = read_npz(path, [*(f"{field}_{part}" for part in parts for field in "xyw"), "writers"])
    writers = arrays["writers"]
    if writers.ndim != 1 or writers.dtype.kind not in "US":
        raise invalid_file(path, "writers as a list of names", f"{writers.dtype} of shape {writers.shape}")
    names, counts = np.unique(writers, return_counts=True)
    if counts.max(initial=1) > 1:
        raise invalid_file(path, "every writer once", f"{_name(str(names[counts.argmax()]))} twice")
    fields = []
    for part in parts:
        x, w = arrays[f"x_{part}"], arrays[f"w_{part}"]
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _SIDE * _SIDE:
            expected = f"x_{part} as bytes of shape (n, {_SIDE * _SIDE})"
            raise invalid_file(path, expected, f"{x.dtype} of shape {x.shape}")
        y = _check_labels(path, arrays[f"y_{part}"], len(x))
        expected = f"w_{part} as a writer's number a row"
        if w.shape != (len(x),) or w.dtype.kind not in "iu":
            raise invalid_file(path, expected, f"{w.dtype} of shape {w.shape}")
        if len(w) and not (int(w.min()) >= 0 and int(w.max()) < len(writers)):
            raise invalid_file(path, f"{expected}, 0 to {len(writers) - 1}", f"{w.min()} to {w.max()}")
        fields.append((x.reshape(-1, 1, _SIDE, _SIDE), y, w.astype(np.int64)))
    if not len(fields[0][0]):
        raise invalid_file(path, "at least one training row", "none")
    return OwnedSamples(*fields[0], tuple(map(str, writers)), *fields[1])


# ---- Shakespeare by role: from {role: text}, or from LEAF's JSON of windows

WINDOW = 80
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters (Caldas et al. 2018)."""
_UNKNOWN = 255
_CODES = np.full(128, _UNKNOWN, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


def encode(text: str, path: Path | str = "text", role: str = "") -> Bytes:
    """Return the positions of characters in LEAF's alphabet.

    >>> encode("To be").tolist()
    [44, 67, 1, 54, 57]
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = np.where(points < 128, _CODES[np.minimum(points, 127)], _UNKNOWN)
    wrong = np.flatnonzero(codes == _UNKNOWN)
    if len(wrong):
        position = int(wrong[0])
        raise invalid_file(
            path, "only the characters of LEAF's alphabet", f"{text[position]!r} at {position} of role {role!r:.80}"
        )
    return codes.astype(np.uint8)


def read_shakespeare(
    folder: Path, remedy: str = "", *, stride: int = 1, test_stride: int = 40, test_fraction: float = 0.1
) -> OwnedSamples:
    """Read all roles: x is a window of 80 characters and y the next one.

    Windows are bytes, an eighth of the memory of int64: a model begins with ``x.long()``. Training windows are the
    first 9/10 of a role's windows, ``stride`` characters apart (1 in LEAF); test windows do not overlap them. Testing
    on 300,000 overlapping windows would take minutes, so only every ``test_stride``-th is used.
    """
    check_integer("shakespeare", "stride", stride)
    check_integer("shakespeare", "test_stride", test_stride)
    check_decay("shakespeare", "test_fraction", test_fraction)
    train, test = leaf_files(folder)
    if train:
        if not test:
            folder = train[0].parent.parent / "test"
            raise missing_file(folder / "*.json", "LEAF's preprocess.sh writes it with -t sample.")
        names: dict[str, int] = {}
        parts = _read_parts(train, _encode_windows, names, test=False)
        return OwnedSamples.joined(names, parts, _read_parts(test, _encode_windows, names, test=True))
    path = folder / "shakespeare.json"
    if not path.is_file():
        raise missing_file(path, remedy)
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise invalid_file(path, "an object {role: text}", f"{type(content).__name__} with other values")
    return _windows_of_texts(path, content, stride, test_stride, test_fraction)


def _windows_of_texts(
    path: Path, roles: dict[str, str], stride: int, test_stride: int, test_fraction: float
) -> OwnedSamples:
    names: list[str] = []
    texts, starts, test_starts = [], [], []
    begin = 0
    for role, raw in roles.items():
        # as in LEAF: lines are joined by a space, runs of spaces become one
        codes = encode(re.sub(r" {2,}", " ", raw.replace("\n", " ")), path, role)
        windows = len(codes) - WINDOW
        if windows < 1:
            continue
        train_windows = max(1, int((1 - test_fraction) * windows))
        starts.append(np.arange(begin, begin + train_windows, stride))
        test_starts.append(np.arange(begin + train_windows + WINDOW - 1, begin + windows, test_stride))
        names.append(role)
        texts.append(codes)
        begin += len(codes)
    if not names:
        raise invalid_file(path, f"a role of more than {WINDOW} characters", f"{len(roles)} roles, none as long")
    text = np.concatenate(texts)
    # windows are views of the text: one byte per character, not eighty
    inputs = np.lib.stride_tricks.sliding_window_view(text, WINDOW, writeable=True)[:-1]
    targets = text[WINDOW:].astype(np.int64)
    groups = np.full(len(targets), -1)
    owners, test_owners = (
        np.repeat(np.arange(len(names)), [len(rows) for rows in each]) for each in (starts, test_starts)
    )
    groups[np.concatenate(starts)] = owners
    rows = np.concatenate(test_starts)
    return OwnedSamples(inputs, targets, groups, tuple(names), inputs[rows], targets[rows], test_owners)


def _encode_windows(path: Path, role: str, x: list[Any], y: list[Any]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    for window, following in zip(x, y, strict=True):
        if (
            not isinstance(window, str)
            or len(window) != WINDOW
            or not isinstance(following, str)
            or len(following) != 1
        ):
            raise invalid_file(
                path,
                f"windows of {WINDOW} characters and one next character of role {role!r:.80}",
                f"{reprlib.repr(window)} and {reprlib.repr(following)}",
            )
    following = encode("".join(y), path, role).astype(np.int64)
    return encode("".join(x), path, role).reshape(-1, WINDOW), following
