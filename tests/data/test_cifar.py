"""CIFAR's batches are never unpickled: two fields are found in their bytes, and used only if their digest is known."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.official_files import cifar_bytes, tiny_cifar, write_cifar
from hansa.core.errors import HansaError
from hansa.data import DataError, load
from hansa.data.readers import read_cifar

PIXELS = np.random.default_rng(1).integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 3]


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("key", ["labels", "fine_labels"])
def test_images_and_labels_of_both_kinds(tmp_path: Path, key: str) -> None:
    digest = write_cifar(tmp_path / key, PIXELS, LABELS, key)
    images, labels, found = read_cifar(tmp_path / key)
    assert images.shape == (4, 3, 32, 32)
    np.testing.assert_array_equal(images[2, 1], PIXELS[2, 1024:2048].reshape(32, 32))
    assert labels.tolist() == LABELS
    assert found == digest


def test_labels_in_the_batches_of_1000_that_pickle_writes(tmp_path: Path) -> None:
    pixels, labels = np.zeros((2500, 3072), np.uint8), [row % 97 for row in range(2500)]
    content = cifar_bytes(pixels, labels, "fine_labels")
    part = b"".join(b"K" + bytes([label]) for label in labels)
    several = b"e(".join(part[first : first + 2000] for first in (0, 2000, 4000))
    assert content.count(part) == 1
    path = written(tmp_path, content.replace(b"fine_labels](" + part, b"fine_labelsr\x01\x02\x03\x04]q\x07(" + several))
    assert read_cifar(path)[1].tolist() == labels


class Harmful:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_harmful_pickle_does_nothing_and_is_refused(tmp_path: Path, protocol: int) -> None:
    path = written(tmp_path, pickle.dumps({"data": Harmful(tmp_path / "witness")}, protocol))
    with pytest.raises(DataError, match="batch: expected a CIFAR batch"):
        read_cifar(path)
    assert not (tmp_path / "witness").exists()


def test_a_batch_whose_digest_is_not_known_is_refused_and_its_other_instructions_do_nothing(tmp_path: Path) -> None:
    tiny = tiny_cifar(tmp_path, PIXELS, LABELS)
    path = tmp_path / tiny.files[0].path
    harmful = pickle.dumps(Harmful(tmp_path / "witness"), 2)[2:-1]
    path.write_bytes(b"\x80\x02" + harmful + b"0" + cifar_bytes(PIXELS, LABELS)[2:])
    assert load(tiny, tmp_path).inputs.shape == (20, 3, 32, 32)  # the data set's pixels, whatever is around them
    assert not (tmp_path / "witness").exists()
    for pixels, labels in ((PIXELS[::-1], LABELS), (PIXELS, LABELS[:3]), (PIXELS, [3, 0, 10, 3])):
        write_cifar(path, pixels, labels)
        with pytest.raises(DataError, match=f"contents of SHA-256 {tiny.files[0].sha256}"):
            load(tiny, tmp_path)
    write_cifar(path, PIXELS[:3], [*PIXELS[3].tolist(), *LABELS])  # the same bytes, divided otherwise
    with pytest.raises(HansaError, match=r"SHA-256|one target per row"):
        load(tiny, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no 'data'"),
        (cifar_bytes(PIXELS[:, :3000], LABELS), "'data' of rows of 3072 bytes, found 12000"),
        (cifar_bytes(PIXELS, LABELS)[:5000], "'data' of rows of 3072 bytes, found 12288 bytes of"),
        (cifar_bytes(PIXELS, LABELS, key="marks"), "no 'labels or fine_labels'"),
        (b"\x80\x02}U\x04dataK\x01s.", "no 'data'"),
    ],
)
def test_a_batch_of_the_wrong_shape_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_cifar(written(tmp_path, content))
