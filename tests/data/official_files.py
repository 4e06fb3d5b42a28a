"""Writers of tiny files in the official formats, made from the formats' descriptions and not from the readers."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.data import DatasetInfo, dataset_info


def idx_bytes(array: npt.NDArray[np.uint8]) -> bytes:
    """The idx format: 0, 0, type 8 (unsigned byte), axes, big-endian sizes, row-major bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, array: npt.NDArray[np.uint8], packed: bool = False) -> str:
    """Write an idx file, gzipped on request; returns the SHA-256 of the uncompressed bytes."""
    content = idx_bytes(array)
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin-1")


def _number(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def _list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def _array(array: npt.NDArray[np.uint8]) -> bytes:
    """A NumPy array of bytes as Python 2's cPickle wrote it, memo marks included."""
    head = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t(K\x01"
    shape = b"(" + b"".join(map(_number, array.shape)) + b"t"
    dtype = b"cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return head + shape + dtype + b"\x89T" + struct.pack("<i", array.size) + array.tobytes() + b"tb"


def cifar_bytes(pixels: npt.NDArray[np.uint8], labels: list[int], key: str = "labels") -> bytes:
    """A CIFAR batch as Python 2 pickled it (protocol 2)."""
    entries = [
        ("batch_label", _string("training batch 1 of 5")),
        (key, _list([_number(label) for label in labels])),
        ("data", _array(pixels)),
        ("filenames", _list([_string(f"image_{i:03d}.png") for i in range(len(labels))])),
    ]
    return b"\x80\x02}q\x01(" + b"".join(_string(name) + value for name, value in entries) + b"u."


def write_cifar(path: Path, pixels: npt.NDArray[np.uint8], labels: list[int], key: str = "labels") -> str:
    """Write a batch; returns the SHA-256 of its pixels and then its labels, a byte each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cifar_bytes(pixels, labels, key))
    return hashlib.sha256(pixels.tobytes() + bytes(labels)).hexdigest()


def tiny_idx(root: Path, packed: bool = False) -> DatasetInfo:
    """MNIST of three training and two test images, with its registry entry."""
    draw, members = np.random.default_rng(0), []
    for member, rows in zip(dataset_info("mnist").files, (3, 3, 2, 2), strict=True):
        shape = (rows, 28, 28) if "images" in member.path else (rows,)
        array = draw.integers(0, 10, shape, dtype=np.uint8)
        members.append(replace(member, sha256=write_idx(root / member.path, array, packed)))
    return replace(dataset_info("mnist"), files=tuple(members))


def tiny_cifar(root: Path, pixels: npt.NDArray[np.uint8], labels: list[int]) -> DatasetInfo:
    """CIFAR-10 with the same few rows in every batch, with its registry entry."""
    files = dataset_info("cifar10").files
    members = [replace(member, sha256=write_cifar(root / member.path, pixels, labels)) for member in files]
    return replace(dataset_info("cifar10"), files=tuple(members))


def write_leaf(path: Path, held: dict[str, tuple[list[Any], list[Any]]], **changes: Any) -> None:
    """Write a LEAF file of {user: (x, y)}; ``changes`` replace top-level entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(held),
        "num_samples": [len(y) for _, y in held.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in held.items()},
    }
    path.write_text(json.dumps({**content, **changes}))
