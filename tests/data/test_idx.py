"""The idx reader, on files that the test writes itself."""

from __future__ import annotations

import gzip
import hashlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.official_files import idx_bytes, write_idx
from hansa.data import DataError
from hansa.data.readers import read_idx

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_is_read_plain_or_gzipped(tmp_path: Path, packed: bool) -> None:
    digest = write_idx(tmp_path / "images", IMAGES, packed)
    found, sha = read_idx(tmp_path / "images", axes=3)
    np.testing.assert_array_equal(found, IMAGES)
    assert sha == digest == hashlib.sha256(idx_bytes(IMAGES)).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "magic 00000803.*found magic ''"),
        (b"\x00\x00\x08\x03\x00", "found magic '00000803' in 5 bytes"),
        (idx_bytes(IMAGES)[:-1], "60 bytes for 5 x 4 x 3, found 59"),
        (idx_bytes(IMAGES) + b"\x00", "60 bytes for 5 x 4 x 3, found 61"),
        (idx_bytes(IMAGES[:, 0]), "magic 00000803.*found magic '00000802'"),
        (b"\x00\x00\x0d\x03" + idx_bytes(IMAGES)[4:], "found magic '00000d03'"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "for 4294967295 x .*, found 0"),
        (b"<html>not found</html>", "found magic '3c68746d'"),
    ],
    ids=["empty", "short head", "truncated", "too long", "labels for images", "floats", "a bomb", "a web page"],
)
def test_a_damaged_file_is_refused_with_expected_and_found(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(tmp_path / "images", axes=3)
    assert str(tmp_path / "images") in str(caught.value)


def _flipped(content: bytes) -> bytes:
    return content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]  # in the checksum


@pytest.mark.parametrize("damage", [lambda c: c[:3], lambda c: c[:15], lambda c: c[:-9], lambda c: c[:-1], _flipped])
def test_a_damaged_gzip_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_idx(tmp_path / "images", IMAGES, packed=True)
    path = tmp_path / "images.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"images\.gz: expected a whole gzip file"):
        read_idx(tmp_path / "images", axes=3)


def test_a_short_file_that_claims_much_takes_little_memory(tmp_path: Path) -> None:
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, 512, 512, 512) + bytes(100)
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed"):
        tracemalloc.start()
        with pytest.raises(DataError, match="expected 134217728 bytes for 512 x 512 x 512, found 100"):
            read_idx(tmp_path / name, axes=3)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5_000_000
