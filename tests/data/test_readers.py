"""Readers of official formats: idx, batches of CIFAR, and FEMNIST and Shakespeare as LEAF lays them out."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.official_files import cifar_bytes, idx_bytes, tiny_cifar, write_cifar, write_idx, write_leaf
from hansa.core.errors import HansaError
from hansa.data import DataError, MissingFileError, load, natural, partition_dataset
from hansa.data.readers import ALPHABET, encode, read_cifar, read_femnist, read_idx, read_shakespeare


def image(shade: int) -> list[float]:
    return [shade / 255] * 784


def femnist(folder: Path) -> None:
    write_leaf(
        folder / "train" / "all_data_0_niid_0_keep_0_train_9.json",
        {"f0001_41": ([image(0), image(255)], [0, 61]), "f0002_07": ([image(10)], [35])},
    )
    write_leaf(folder / "train" / "all_data_1_niid_0_keep_0_train_9.json", {"f0003_01": ([image(20)], [10])})
    write_leaf(folder / "test" / "all_data_0_niid_0_keep_0_test_9.json", {"f0001_41": ([image(30)], [5])})


def test_femnist_from_leafs_json_keeps_writers_apart(tmp_path: Path) -> None:
    femnist(tmp_path / "femnist")
    data = load("femnist", tmp_path)
    assert data.inputs.shape == (4, 1, 28, 28)
    assert data.targets.tolist() == [0, 61, 35, 10]
    assert data.group_names == ("f0001_41", "f0002_07", "f0003_01")
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1, 2]
    assert data.test_targets is not None
    assert data.test_targets.tolist() == [5]
    shades = read_femnist(tmp_path / "femnist").inputs[:, 0, 13, 13]
    assert shades.tolist() == [0, 255, 10, 20]
    clients = partition_dataset(data, natural())
    assert [clients.rows(i).tolist() for i in range(3)] == [[0, 1], [2], [3]]


def npz(path: Path, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "x_train": np.full((3, 784), 7, np.uint8),
        "y_train": np.array([0, 61, 3], np.uint8),
        "w_train": np.array([0, 1, 1], np.uint8),
        "x_test": np.zeros((1, 784), np.uint8),
        "y_test": np.array([4], np.uint8),
        "w_test": np.array([0], np.uint8),
        "writers": np.array(["f1", "f2"]),
    }
    np.savez_compressed(path, **{**arrays, **changes})


def test_every_shade_of_leafs_fractions_comes_back(tmp_path: Path) -> None:
    shades = [k % 256 for k in range(784)]
    for part in ("train", "test"):
        write_leaf(tmp_path / part / "a.json", {"a": ([[shade / 255 for shade in shades]], [3])})
    assert read_femnist(tmp_path).inputs.flatten().tolist() == shades


def test_femnist_from_one_npz(tmp_path: Path) -> None:
    npz(tmp_path / "femnist" / "some.npz")
    data = load("femnist", tmp_path)
    assert data.groups is not None
    assert (data.groups.tolist(), data.group_names) == ([0, 1, 1], ("f1", "f2"))
    # 7 / 255, by the constants of the registry
    assert float(data.inputs[0, 0, 0, 0]) == pytest.approx((7 / 255 - 0.9637) / 0.1597, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((3, 700), np.uint8)}, r"x_train as bytes of shape \(n, 784\), found uint8 of shape"),
        ({"x_train": np.zeros((3, 784))}, "x_train as bytes"),
        ({"y_train": np.array([0, 62, 3])}, "y_train from 0 to 61, found 0 to 62"),
        ({"y_test": np.array([4, 4])}, "1 y_test, whole numbers"),
        ({"w_train": np.array([0, -1, 1])}, "w_train from 0 to 1, found -1 to 1"),
        ({"w_train": np.array([0.0, 1.0, 1.0])}, "w_train, whole numbers, found float64"),
        ({"writers": np.array(["f1", "f1"])}, "writers as a list of names, each once"),
        ({"writers": np.array(3)}, "writers as a list of names"),
        ({f"{k}_train": np.zeros((0, 784) if k == "x" else 0, np.uint8) for k in "xyw"}, "x_train as bytes"),
        ({"writers": np.array([object()], object)}, "a whole .npz of the plain arrays"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    npz(tmp_path / "some.npz", **changes)
    with pytest.raises(DataError, match=message) as caught:
        read_femnist(tmp_path)
    assert str(tmp_path / "some.npz") in str(caught.value)


ONE = {"a": ([image(1)], [0])}
COUNTS = "x and y of user 'a', equally many, found "
NUMBERS = "images of 784 numbers of user 'a'"


@pytest.mark.parametrize(
    ("users", "changes", "message"),
    [
        ({"a": ([image(1)], [0, 1])}, {}, COUNTS),
        ({"a": ([], [])}, {}, COUNTS + r"\[\] and \[\]. The option -k of LEAF's preprocess"),
        (ONE, {"user_data": {"a": [1]}}, COUNTS + "None and None"),
        (ONE, {"users": ["a", "a"]}, "each once"),
        ({**ONE, "b": ([image(1)], [0])}, {"users": ["a"]}, "user_data of each"),
        ({}, {}, r"users with names, each once, and user_data of each, found \[\]"),
        (ONE, {"users": [["a"]]}, "users with names"),
        (ONE, {"user_data": [1]}, "user_data of each"),
        ({"a": ([image(1)[:-1]], [0])}, {}, NUMBERS),
        ({"a": ([image(1), [0.5]], [0, 1])}, {}, NUMBERS),
        ({"a": ([[10**400] * 784], [0])}, {}, NUMBERS),
        ({"a": ([[float("nan")] * 784], [0])}, {}, "pixels of user 'a' from 0 to 1, found nan"),
        ({"a": ([image(1)], [62])}, {}, "labels from 0 to 61, found 62"),
        ({"a": ([image(1)], [10**400])}, {}, "whole numbers"),
        ({"a" * 10_000: ([image(2)], [])}, {}, r"user 'aaaa.{75}, equally many"),
    ],
)
def test_wrong_leaf_files_are_refused(
    tmp_path: Path, users: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write_leaf(tmp_path / "train" / "a.json", users, **changes)
    with pytest.raises(DataError, match=message) as caught:
        read_femnist(tmp_path)
    assert str(tmp_path / "train" / "a.json") in str(caught.value)


def test_a_user_in_two_files_is_refused_not_doubled(tmp_path: Path) -> None:
    femnist(tmp_path)
    write_leaf(tmp_path / "train" / "copy.json", {"f0002_07": ([image(10)], [35])})
    with pytest.raises(DataError, match=r"copy\.json: expected users that are not in all_data_0.*'f0002_07' again"):
        read_femnist(tmp_path)
    text = spoken(81)
    for name in ("a", "b"):
        write_leaf(tmp_path / "roles" / "train" / f"{name}.json", {"HAMLET": ([text[:80]], [text[80]])})
    write_leaf(tmp_path / "roles" / "test" / "a.json", {"HAMLET": ([text[:80]], [text[80]])})
    with pytest.raises(DataError, match=r"b\.json: expected users that are not in a\.json, found user 'HAMLET' again"):
        read_shakespeare(tmp_path / "roles")


def test_a_test_file_may_have_users_without_samples(tmp_path: Path) -> None:
    femnist(tmp_path / "femnist")
    write_leaf(tmp_path / "femnist" / "test" / "more.json", {"f0002_07": ([], [])})
    assert load("femnist", tmp_path).test_targets is not None
    (tmp_path / "femnist" / "test" / "all_data_0_niid_0_keep_0_test_9.json").unlink()
    assert load("femnist", tmp_path).test_targets is None


def claiming(shape: tuple[int, ...]) -> bytes:
    """The .npy of an array whose header claims a shape that its bytes do not have."""
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def with_member(path: Path, name: str, content: bytes) -> None:
    """The .npz with one member exchanged."""
    npz(path)
    with zipfile.ZipFile(path) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member, value in {**members, f"{name}.npy": content}.items():
            new.writestr(member, value)


@pytest.mark.parametrize("shape", [(10**9, 784), (10**12,), (10**30, 10**30), (3, 785), (-3, 784)])
def test_an_npz_that_claims_what_it_has_not_takes_no_memory(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with_member(tmp_path / "some.npz", "x_train", claiming(shape) + bytes(3 * 784))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"some\.npz: expected a whole \.npz"):
        read_femnist(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_zip_bomb_is_refused_by_the_sizes_that_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.data.readers.MAX_NPZ_BYTES", 1 << 20)
    with_member(tmp_path / "some.npz", "x_train", claiming((1 << 21,)) + bytes(1 << 21))
    with pytest.raises(DataError, match=r"at most 1048576 bytes of arrays, found 2\d{6}"):
        read_femnist(tmp_path)


@pytest.mark.parametrize("content", ['{"users": [', "[]", "{}", "\xff", "[" * 5000, "1" * 5000])
def test_files_that_are_not_leafs_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(content, "latin-1")
    with pytest.raises(DataError, match=r"a\.json: expected (whole JSON|LEAF's keys)"):
        read_femnist(tmp_path)


def test_missing_folders_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"all_data_\*\.json: no such file\. It has no official download"):
        load("femnist", tmp_path)
    with pytest.raises(MissingFileError, match=r"shakespeare\.json: no such file\. It has no official"):
        load("shakespeare", tmp_path)
    write_leaf(tmp_path / "train" / "t.json", {"HAMLET": ([spoken(80)], ["a"])})
    with pytest.raises(MissingFileError, match=r"test/\*\.json: no such file"):
        read_shakespeare(tmp_path)


def test_the_alphabet_is_leafs_eighty_characters() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert ALPHABET[:5] == '\n !"&'
    assert [ALPHABET[i] for i in encode("Hello, World: 9 & (10)!").tolist()] == list("Hello, World: 9 & (10)!")


def roles(folder: Path, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shakespeare.json").write_text(json.dumps(content))


def spoken(length: int, first: int = 0) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[(first + i * i) % 26] for i in range(length))


def test_windows_are_eighty_characters_and_the_one_that_follows(tmp_path: Path) -> None:
    texts = {"HAMLET": spoken(300), "GHOST": spoken(50), "OPHELIA": spoken(95, 3)}
    roles(tmp_path / "shakespeare", texts)
    data = load("shakespeare", tmp_path)
    assert data.group_names == ("HAMLET", "OPHELIA")  # the ghost says too little for a window
    clients = partition_dataset(data, natural())
    for client, text in ((0, texts["HAMLET"]), (1, texts["OPHELIA"])):
        windows = len(text) - 80
        own = clients.rows(client)
        assert len(own) == int(0.9 * windows)
        for step, row in enumerate(own.tolist()):
            assert "".join(ALPHABET[i] for i in data.inputs[row].tolist()) == text[step : step + 80]
            assert ALPHABET[int(data.targets[row])] == text[step + 80]


def test_test_windows_never_overlap_a_training_window(tmp_path: Path) -> None:
    text = spoken(2000)
    roles(tmp_path, {"HAMLET": text})
    found = read_shakespeare(tmp_path)
    trained = int(0.9 * (2000 - 80))
    starts = range(trained + 79, 2000 - 80, 40)
    assert found.test_inputs.shape == (len(starts), 80)
    assert trained - 1 + 80 < starts[0] + 1  # the last training window and its target end before the first test window
    for row, start in enumerate(starts):
        assert found.test_inputs[row].tolist() == encode(text[start : start + 80]).tolist()
        assert int(found.test_targets[row]) == int(encode(text[start + 80])[0])


def test_windows_are_views_of_the_text_and_gather_right(tmp_path: Path) -> None:
    roles(tmp_path, {"HAMLET": spoken(500), "GHOST": "To be,\nor   not to be\n" + spoken(80)})
    found = read_shakespeare(tmp_path)
    ghost = found.inputs[found.groups == 1][0]  # lines are joined by a space, as LEAF does
    assert "".join(ALPHABET[i] for i in ghost.tolist()).startswith("To be, or not to be abejq")
    inputs = torch.from_numpy(found.inputs)
    assert inputs.untyped_storage().nbytes() == 499 + 100
    assert found.targets.dtype == np.int64
    rows = torch.tensor([7, 0, 100])
    assert torch.equal(inputs.index_select(0, rows), torch.stack([inputs[i] for i in rows.tolist()]))


@pytest.mark.parametrize("bad", ["é", "#", "\x00", "世", "\u2019", "\x7f"])
def test_a_character_outside_the_alphabet_is_named_with_its_role(tmp_path: Path, bad: str) -> None:
    roles(tmp_path, {"HAMLET": spoken(100), "GHOST": spoken(90) + bad})
    with pytest.raises(DataError, match=r"shakespeare\.json: .* at 90 of role 'GHOST'"):
        read_shakespeare(tmp_path)


@pytest.mark.parametrize("content", [[], {"HAMLET": 3}, {"HAMLET": "short"}])
def test_other_content_is_refused(tmp_path: Path, content: Any) -> None:
    roles(tmp_path, content)
    with pytest.raises(DataError, match=r"shakespeare\.json: expected"):
        read_shakespeare(tmp_path)


def test_leafs_ready_windows(tmp_path: Path) -> None:
    text = spoken(90)
    windows = [text[i : i + 80] for i in range(10)]
    write_leaf(tmp_path / "train" / "t.json", {"HAMLET": (windows[:8], list(text[80:88]))})
    write_leaf(tmp_path / "test" / "t.json", {"HAMLET": (windows[8:], list(text[88:90]))})
    found = read_shakespeare(tmp_path)
    assert found.inputs.shape == (8, 80)
    assert found.targets.tolist() == encode(text[80:88]).tolist()
    assert found.test_targets.tolist() == encode(text[88:90]).tolist()
    assert found.groups.tolist() == [0] * 8
    write_leaf(tmp_path / "train" / "t.json", {"HAMLET": ([windows[0][:-1]], ["a"])})
    with pytest.raises(DataError, match="windows of 80 characters and the next one of role 'HAMLET'"):
        read_shakespeare(tmp_path)


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
