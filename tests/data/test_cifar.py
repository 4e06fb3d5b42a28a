"""The reader of pickled CIFAR batches executes nothing and refuses all that those files do not hold."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.official_files import cifar_bytes, write_cifar
from hansa.data import DataError, MissingFileError
from hansa.data.readers.cifar import read_cifar, read_pickled

PIXELS = np.random.default_rng(1).integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 3]


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


def test_a_batch_reads_as_pythons_own_unpickler_reads_it(tmp_path: Path) -> None:
    content = cifar_bytes(PIXELS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core has moved
        oracle = pickle.loads(content, encoding="latin1")  # noqa: S301 - written three lines above
    found = read_pickled(written(tmp_path, content))
    np.testing.assert_array_equal(found.pop("data"), oracle.pop("data"))
    assert found == oracle


def test_images_and_labels_of_both_kinds(tmp_path: Path) -> None:
    for key in ("labels", "fine_labels"):
        digest = write_cifar(tmp_path / key, PIXELS, LABELS, key)
        images, labels, sha = read_cifar(tmp_path / key, classes=10)
        assert images.shape == (4, 3, 32, 32)
        np.testing.assert_array_equal(images[2, 1], PIXELS[2, 1024:2048].reshape(32, 32))
        assert labels.tolist() == LABELS
        assert sha == digest


class Harmful:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_harmful_pickle_does_nothing_and_is_refused(tmp_path: Path, protocol: int) -> None:
    path = written(tmp_path, pickle.dumps({"data": Harmful(tmp_path / "witness")}, protocol))
    with pytest.raises(DataError, match="batch: expected only the dicts"):
        read_pickled(path)
    assert not (tmp_path / "witness").exists()


def test_the_refused_global_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, b"\x80\x02cposix\nsystem\nU\x04true\x85R.")
    with pytest.raises(DataError, match=r"found the global posix\.system"):
        read_pickled(path)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02cnumpy\nload\n.", r"the global numpy\.load"),
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", r"the global builtins\.eval"),
        (b"\x80\x02cnumpy\nndarray\nK\x05\x85R.", "a call of 'numpy ndarray'"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", r"a call of 'numpy dtype' with \('O8'"),
        (b"\x80\x02U\x0dnumpy ndarray)R.", "a call of 'numpy ndarray'"),
        (b"\x80\x02}}b.", "a state for a dict"),
        (b"(iposix\nsystem\n.", "the instruction INST"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"\x80\x02Pabc\n.", "the instruction PERSID"),
        (b"\x80\x04}.", "pickle protocol 4"),
        (b"\x80\x02]}.", "2 values at the end"),
        (b"\x80\x02].", "a dict with string keys, found a list"),
        (b"\x80\x02}K\x01K\x02s.", "an entry of int and int"),
    ],
)
def test_other_programs_are_refused_in_words(tmp_path: Path, program: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickled(written(tmp_path, program))


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80",
        b"\x80\x02}",
        b"\x80\x02e.",
        b"\x80\x02s.",
        b"\x80\x02R.",
        b"\x80\x02q\x01.",
        b"\x80\x02h\x01.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02" + b"(" * 50 + b"t" * 3,
        b"\x80\x02N" + b"\x85" * 5000 + b"R.",
        b"\x80\x02NN" + b"\x85" * 5000 + b"R.",
        cifar_bytes(PIXELS, LABELS)[:-1],
        cifar_bytes(PIXELS, LABELS)[:5000],
    ],
)
def test_garbled_and_truncated_pickles_are_refused(tmp_path: Path, program: bytes) -> None:
    with pytest.raises(DataError, match="batch"):
        read_pickled(written(tmp_path, program))


NESTED = b"\x80\x02N\x85q\x00" + b"h\x00h\x00\x86q\x00" * 43  # a tuple of 2^43 entries by memo, in 311 bytes


@pytest.mark.parametrize(
    "program",
    [
        NESTED + b"R.",
        NESTED + b"NR.",
        NESTED + b"h\x00R.",
        b"\x80\x02}" + NESTED[2:] + b"Ns.",  # as the key of a dict, which is hashed
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
        b"\x80\x02}q\x00U\x01ah\x00s.",  # a dict in itself
        b"\x80\x02(" + b"N" * 100_000 + b"tq\x00" + b"h\x00\x850" * 10_000,
    ],
)
def test_programs_that_would_take_for_ever_are_refused_at_once(tmp_path: Path, program: bytes) -> None:
    with pytest.raises(DataError, match="batch: expected only the dicts"):
        read_pickled(written(tmp_path, program))


def test_an_array_is_filled_once(tmp_path: Path) -> None:
    head, _, tail = cifar_bytes(PIXELS, LABELS).rpartition(b"tb")
    assert read_pickled(written(tmp_path, head + b"tq\xf0b" + tail))["data"].shape == PIXELS.shape
    with pytest.raises(DataError, match="an array that is filled twice"):
        read_pickled(written(tmp_path, head + b"tq\xf0bh\xf0b" + tail))


def test_one_string_does_not_become_many_arrays(tmp_path: Path) -> None:
    head, _, tail = cifar_bytes(PIXELS, LABELS).rpartition(b"tb")
    again = b"U\x01xh\x07h\x08K\x00\x85U\x01b\x87Rh\xf0b"  # another name, another array, the same state
    with pytest.raises(DataError, match="arrays of 24576 bytes in a file of 12"):
        read_pickled(written(tmp_path, head + b"tq\xf0b" + again + tail))


def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused(tmp_path: Path) -> None:
    content = cifar_bytes(PIXELS, LABELS).replace(b"(K\x04M\x00\x0ct", b"(K\x05M\x00\x0ct")
    with pytest.raises(DataError, match=r"an array of shape \(5, 3072\) with 12288 bytes"):
        read_pickled(written(tmp_path, content))


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_any_changed_byte_gives_an_array_or_a_named_refusal(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: int
) -> None:
    good = cifar_bytes(PIXELS[:1, :12], LABELS[:1])
    bad = bytearray(good)
    bad[place % len(good)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(bytes(bad[: max(1, len(bad) - cut)]) if cut % 3 == 0 else bytes(bad))
    found: dict[str, Any] = {}
    with contextlib.suppress(DataError):  # anything else that is raised fails the test
        found = read_pickled(path)
    assert all(isinstance(key, str) for key in found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cifar_bytes(PIXELS[:, :3000], LABELS), r"'data' of shape \(n, 3072\), found shape \(4, 3000\)"),
        (cifar_bytes(PIXELS, LABELS[:3]), "4 labels in 'labels' or 'fine_labels', found 3"),
        (cifar_bytes(PIXELS, [3, 0, 10, 3]), "labels from 0 to 9, found 10"),
        (cifar_bytes(PIXELS, LABELS, key="marks"), "4 labels in 'labels' or 'fine_labels', found keys"),
        (b"\x80\x02}U\x04dataK\x01s.", "'data' of shape"),
    ],
)
def test_a_batch_of_the_wrong_shape_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_cifar(written(tmp_path, content), classes=10)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"data_batch_1: no such file\. Get it\."):
        read_cifar(tmp_path / "data_batch_1", 10, "Get it.")
