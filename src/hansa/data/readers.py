"""Readers of the official files of data sets: idx (MNIST), CIFAR, LEAF's JSON (FEMNIST, Shakespeare), one .npz.

Files may come from anybody. Nothing in them is executed, memory is allocated for bytes that exist and not for sizes
that a header claims, and a file that is not what it should be is refused by one `DataError`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import re
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hansa.data.sources import DataError, invalid_file, missing_file

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Labels = npt.NDArray[np.int64]

# ---- idx: a magic number, big-endian sizes, bytes

_BLOCK = 1 << 20
_MAX_IDX_BLOCKS = 1 << 8  # five times the largest file: a small .gz must not fill the memory


def read_idx(path: Path, axes: int, remedy: str = "") -> tuple[Bytes, str]:
    """Return the array of an idx file of unsigned bytes, plain or as .gz, and the SHA-256 of its uncompressed bytes."""
    if not path.is_file():
        packed = path.with_name(path.name + ".gz")
        if not packed.is_file():
            raise missing_file(path, remedy or "Neither it nor its .gz exists.")
        path = packed
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = b"".join(islice(iter(partial(file.read, _BLOCK), b""), _MAX_IDX_BLOCKS))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise invalid_file(path, "a whole gzip file", str(error).rstrip(".")) from error
    magic, start = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if content[:4] != magic or len(content) < start:
        actual = f"magic {content[:4].hex()!r} in {len(content)} bytes"
        raise invalid_file(path, f"an idx file of bytes with {axes} axes (magic {magic.hex()})", actual)
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        sides = " x ".join(map(str, shape))
        raise invalid_file(path, f"{math.prod(shape)} bytes for {sides}", str(len(content) - start))
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape), hashlib.sha256(content).hexdigest()


# ---- CIFAR: batches of 3 x 32 x 32 bytes

_CIFAR_PIXELS = 3 * 32 * 32
_MAX_CIFAR_BYTES = 1 << 29  # three times the largest official file
_MEMO = rb"(?:q.|r....)?"
_CIFAR_LABELS = re.compile(rb"(?:U\x06|U\x0bfine_)labels" + _MEMO + rb"\]" + _MEMO + rb"((?:\((?:K.)+e)+)", re.DOTALL)
_CIFAR_DATA = re.compile(rb"U\x04data" + _MEMO + rb"cnumpy.{0,200}?([\x88\x89])T(....)", re.DOTALL)


def read_cifar(path: Path, remedy: str = "") -> tuple[Bytes, Bytes, str]:
    """Return images [n, 3, 32, 32] and labels of a batch of CIFAR's Python version, and the SHA-256 of both.

    A batch is a pickle, and it is never unpickled: the two fields are found by the instructions that write them, the
    bytes of ``data`` in one piece and the numbers of ``labels`` or ``fine_labels``. The caller compares the SHA-256 of
    the pixels and then the labels, a byte each, with the published one: what was found is used only if it is the data
    set.

    Args:
        path: The file, such as ``cifar-10-batches-py/data_batch_1``.
        remedy: How to get the file, for messages.
    """
    if not path.is_file():
        raise missing_file(path, remedy)
    size = path.stat().st_size
    content = path.read_bytes() if size <= _MAX_CIFAR_BYTES else b""
    marks, data = _CIFAR_LABELS.search(content), _CIFAR_DATA.search(content)
    if marks is None or data is None:
        absent = f"no {'data' if data is None else 'labels or fine_labels'!r} in {size} bytes"
        raise invalid_file(path, "a CIFAR batch of the Python version, pickled by Python 2", absent, remedy)
    count = struct.unpack("<i", data.group(2))[0]
    if not 0 < count <= size - data.end() or count % _CIFAR_PIXELS:
        raise invalid_file(path, f"'data' of rows of {_CIFAR_PIXELS} bytes", f"{count} bytes of {size - data.end()}")
    pixels = np.frombuffer(content, np.uint8, count, data.end())
    pixels = pixels.reshape((-1, _CIFAR_PIXELS), order="F" if data.group(1) == b"\x88" else "C")
    labels = np.frombuffer(re.sub(rb"\(((?:K.)+)e", rb"\1", marks.group(1), flags=re.DOTALL), np.uint8)[1::2]
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return pixels.reshape(-1, 3, 32, 32), labels, digest


# ---- rows with owners


class OwnedSamples(NamedTuple):
    """Rows with their owners; -1 is the owner of test rows of a user without training rows, and of rows of nobody."""

    inputs: npt.NDArray[Any]
    targets: Labels
    groups: Labels
    names: tuple[str, ...]
    test_inputs: npt.NDArray[Any]
    test_targets: Labels
    test_groups: Labels


# ---- LEAF's JSON: {users, num_samples, user_data: {user: {x, y}}}, in train/ and test/

_Parse: TypeAlias = "Callable[[Path, str, list[Any], list[Any]], tuple[npt.NDArray[Any], Labels]]"


def _read_leaf(folder: Path, parse: _Parse) -> OwnedSamples | None:
    """Return the rows of LEAF's training and test files; None if there are none."""
    train, test = (sorted(folder.glob(f"{part}/*.json")) for part in ("train", "test"))
    if not train:
        return None
    names: dict[str, int] = {}
    rows = _read_files(train, parse, names, test=False)
    if not test:
        raise missing_file(folder / "test" / "*.json", "LEAF's preprocess.sh writes it with -t sample.")
    return OwnedSamples(*rows, tuple(names), *_read_files(test, parse, names, test=True))


def read_users(path: Path, *, empty: bool = False) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield every user of a LEAF file with its x and y. ``empty`` allows users without samples, as in test files."""
    content = read_json(path)
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        actual = sorted(content)[:9] if isinstance(content, dict) else type(content).__name__
        raise invalid_file(path, "LEAF's keys users and user_data", actual)
    users, user_data = content["users"], content["user_data"]
    has_names = isinstance(users, list) and all(isinstance(user, str) and user.isprintable() for user in users)
    if not has_names or not users or not isinstance(user_data, dict) or sorted(users) != sorted(user_data):
        raise invalid_file(path, "users with names, each once, and user_data of each", reprlib.repr(users))
    for user in users:
        x, y = (user_data[user].get(key) for key in "xy") if isinstance(user_data[user], dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not (x or empty):
            remedy = "The option -k of LEAF's preprocess.sh leaves out users with few samples."
            actual = f"{reprlib.repr(x)} and {reprlib.repr(y)}"
            raise invalid_file(path, f"x and y of user {user!r:.80}, equally many", actual, remedy)
        yield user, x, y


def _read_files(
    files: Sequence[Path], parse: _Parse, names: dict[str, int], *, test: bool
) -> tuple[npt.NDArray[Any], Labels, Labels]:
    """Return inputs, targets and owners of the rows of several files. Training users are numbered as they come."""
    inputs, targets, owners = [], [], []
    homes: dict[str, Path] = {}
    for path in files:
        for user, x, y in read_users(path, empty=test):
            if user in homes:
                raise invalid_file(path, f"users that are not in {homes[user].name}", f"user {user!r:.80} again")
            homes[user] = path
            owner = names.get(user, -1) if test else names.setdefault(user, len(names))
            rows, labels = parse(path, user, x, y)
            inputs.append(rows)
            targets.append(labels)
            owners.append(np.full(len(labels), owner))
    return np.concatenate(inputs), np.concatenate(targets), np.concatenate(owners)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # also for a number with thousands of digits
        raise invalid_file(path, "whole JSON", str(error).rstrip(".")) from None


# ---- FEMNIST by writer: from LEAF's JSON, or one .npz

_SIDE = 28
MAX_NPZ_BYTES = 1 << 31
"""Maximum size of the uncompressed arrays of one .npz file."""


def read_femnist(folder: Path, remedy: str = "") -> OwnedSamples:
    """Read FEMNIST by writer from LEAF's JSON or from one .npz of x_train, y_train, w_train, x_test, y_test, w_test,
    writers.

    Pixels are bytes [n, 1, 28, 28], white paper is 255.
    """
    if (samples := _read_leaf(folder, _parse_writer)) is not None:
        return samples
    packed = sorted(folder.glob("*.npz"))
    if not packed:
        raise missing_file(folder / "train" / "all_data_*.json", remedy)
    return _read_femnist_npz(packed[0])


def _parse_writer(path: Path, user: str, x: list[Any], y: list[Any]) -> tuple[Bytes, Labels]:
    try:
        pixels, labels = np.array(x or np.zeros((0, _SIDE * _SIDE))), np.array(y)
    except (ValueError, TypeError, OverflowError):
        pixels = labels = np.zeros(0, object)
    if pixels.dtype.kind not in "iuf" or pixels.size != len(y) * _SIDE * _SIDE or pixels.ndim < 2:
        expected = f"images of {_SIDE * _SIDE} numbers of user {user!r:.80}"
        raise invalid_file(path, expected, f"{pixels.dtype} of shape {pixels.shape}, or rows of other lengths")
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise invalid_file(path, f"pixels of user {user!r:.80} from 0 to 1", f"{pixels.min():g} to {pixels.max():g}")
    images = np.rint(pixels.astype(np.float64) * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    return images, _check_numbers(path, "labels", labels, len(y), 62)


def _check_numbers(path: Path, name: str, numbers: npt.NDArray[Any], count: int, bound: int) -> Labels:
    """Return ``count`` whole numbers from 0 to below a bound."""
    if numbers.shape != (count,) or (count and numbers.dtype.kind not in "iu"):
        raise invalid_file(path, f"{count} {name}, whole numbers", f"{numbers.dtype} of shape {numbers.shape}")
    if count and not (int(numbers.min()) >= 0 and int(numbers.max()) < bound):
        raise invalid_file(path, f"{name} from 0 to {bound - 1}", f"{numbers.min()} to {numbers.max()}")
    return numbers.astype(np.int64)


def _read_femnist_npz(path: Path) -> OwnedSamples:
    subsets = ("train", "test")
    arrays = read_npz(path, [*(f"{field}_{subset}" for subset in subsets for field in "xyw"), "writers"])
    writers = arrays["writers"]
    if writers.ndim != 1 or writers.dtype.kind not in "US" or len(np.unique(writers)) < len(writers):
        raise invalid_file(path, "writers as a list of names, each once", f"{writers.dtype} of shape {writers.shape}")
    fields = []
    for subset in subsets:
        x = arrays[f"x_{subset}"]
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _SIDE * _SIDE or not (len(x) or subset == "test"):
            expected = f"x_{subset} as bytes of shape (n, {_SIDE * _SIDE})"
            raise invalid_file(path, expected, f"{x.dtype} of shape {x.shape}")
        y = _check_numbers(path, f"y_{subset}", arrays[f"y_{subset}"], len(x), 62)
        owners = _check_numbers(path, f"w_{subset}", arrays[f"w_{subset}"], len(x), len(writers))
        fields.append((x.reshape(-1, 1, _SIDE, _SIDE), y, owners))
    return OwnedSamples(*fields[0], tuple(map(str, writers)), *fields[1])


def read_npz(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the named arrays of a .npz file. Pickled objects and more than `MAX_NPZ_BYTES` bytes are refused."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = [archive.getinfo(f"{name}.npy") for name in names]
            if (claimed := sum(member.file_size for member in members)) > MAX_NPZ_BYTES:
                raise invalid_file(path, f"at most {MAX_NPZ_BYTES} bytes of arrays", f"{claimed}")
            for name, member in zip(names, members, strict=True):
                content = io.BytesIO(archive.read(member))
                np.lib.format.read_magic(content)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)
                body = content.read()
                if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(body) or min(shape, default=0) < 0:
                    raise ValueError(f"{len(body)} bytes for {name}, {dtype} of shape {shape}")
                arrays[name] = np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except DataError:
        raise
    except Exception as error:  # of the parsers of zip files, compression and headers
        expected = f"a whole .npz of the plain arrays {', '.join(names)}"
        raise invalid_file(path, expected, str(error).rstrip(".") or type(error).__name__) from None
    return arrays


# ---- Shakespeare by role: from {role: text}, or from LEAF's JSON of windows

WINDOW = 80
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters (Caldas et al. 2018)."""
_UNKNOWN, _TEST_STRIDE = 255, 40
_CODES = bytes(ALPHABET.index(chr(code)) if chr(code) in ALPHABET else _UNKNOWN for code in range(128))


def encode(text: str, path: Path | str = "text", role: str = "") -> Bytes:
    """Return the positions of characters in LEAF's alphabet.

    >>> encode("To be").tolist()
    [44, 67, 1, 54, 57]
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = np.where(points < 128, np.frombuffer(_CODES, np.uint8)[np.minimum(points, 127)], _UNKNOWN)
    unknown = np.flatnonzero(codes == _UNKNOWN)
    if len(unknown):
        found = f"{text[unknown[0]]!r} at {unknown[0]} of role {role!r:.80}"
        raise invalid_file(path, "only the characters of LEAF's alphabet", found)
    return codes.astype(np.uint8)


def read_shakespeare(folder: Path, remedy: str = "") -> OwnedSamples:
    """Read all roles: x is a window of 80 characters and y the next one.

    Windows are bytes, an eighth of the memory of int64: a model begins with ``x.long()``. Training windows are the
    first 9/10 of a role's windows; test windows do not overlap them. Testing on 300,000 overlapping windows would take
    minutes, so only every 40th is used.
    """
    if (samples := _read_leaf(folder, _encode_windows)) is not None:
        return samples
    path = folder / "shakespeare.json"
    if not path.is_file():
        raise missing_file(path, remedy)
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise invalid_file(path, "an object {role: text}", f"{type(content).__name__} with other values")
    return _windows_of_texts(path, content)


def _windows_of_texts(path: Path, roles: dict[str, str]) -> OwnedSamples:
    # as in LEAF: lines are joined by a space, runs of spaces become one
    codes = {role: encode(re.sub(" {2,}", " ", lines.replace("\n", " ")), path, role) for role, lines in roles.items()}
    texts = {role: text for role, text in codes.items() if len(text) > WINDOW}
    if not texts:
        raise invalid_file(path, f"a role of more than {WINDOW} characters", f"{len(roles)} roles, none as long")
    text = np.concatenate(list(texts.values()))
    # windows are views of the text: one byte per character, not eighty
    inputs = np.lib.stride_tricks.sliding_window_view(text, WINDOW, writeable=True)[:-1]
    targets = text[WINDOW:].astype(np.int64)
    groups, test_groups, begin = np.full(len(targets), -1), np.full(len(targets), -1), 0
    for owner, windows in enumerate(len(text) - WINDOW for text in texts.values()):
        end = begin + max(1, int(0.9 * windows))
        groups[begin:end] = owner
        test_groups[end + WINDOW - 1 : begin + windows : _TEST_STRIDE] = owner
        begin += windows + WINDOW
    tests = test_groups >= 0
    return OwnedSamples(inputs, targets, groups, tuple(texts), inputs[tests], targets[tests], test_groups[tests])


def _encode_windows(path: Path, role: str, x: list[Any], y: list[Any]) -> tuple[Bytes, Labels]:
    for texts, length in ((x, WINDOW), (y, 1)):
        if any(not isinstance(text, str) or len(text) != length for text in texts):
            actual = reprlib.repr([*x[:2], *y[:2]])
            raise invalid_file(path, f"windows of {WINDOW} characters and the next one of role {role!r:.80}", actual)
    return encode("".join(x), path, role).reshape(-1, WINDOW), encode("".join(y), path, role).astype(np.int64)
