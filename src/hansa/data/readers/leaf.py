"""LEAF's JSON files: {users, num_samples, user_data: {user: {x, y}}}, usually in train/ and test/."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.core.keys import Key
from hansa.data.files import invalid_file, missing_file
from hansa.data.readers.npz import read_npz

_SIDE = 28
_EMPTY = "The option -k of LEAF's preprocess.sh leaves out users with few samples."


@dataclass(frozen=True, slots=True, eq=False)
class LeafSamples:
    """Rows with their owners; -1 is the owner of test rows of a user without training rows."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    names: tuple[str, ...]
    test_inputs: npt.NDArray[Any]
    test_targets: npt.NDArray[np.int64]
    test_groups: npt.NDArray[np.int64]


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


def check_user_is_new(path: Path, user: str, homes: dict[str, Path]) -> None:
    """Raise if an earlier file has samples of the same user; otherwise record this file."""
    if user in homes:
        raise invalid_file(path, f"users that are not in {homes[user].name}", f"user {_name(user)} again")
    homes[user] = path


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


def read_femnist(folder: Path, remedy: str = "") -> LeafSamples:
    """Read FEMNIST by writer from LEAF's JSON or from one .npz of x_train, y_train, w_train, x_test, y_test, w_test,
    writers.

    Pixels are bytes [n, 1, 28, 28], white paper is 255. If LEAF did not split, a tenth of each writer's samples, chosen
    with a fixed key, is for testing.
    """
    train, test = leaf_files(folder)
    if train:
        return _read_femnist_json(train, test)
    packed = sorted(folder.glob("*.npz"))
    if not packed:
        raise missing_file(folder / "train" / "all_data_*.json", remedy)
    return _read_femnist_npz(packed[0])


def _read_femnist_json(train: list[Path], test: list[Path]) -> LeafSamples:
    names: dict[str, int] = {}
    train_parts: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]] = []
    test_parts: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]] = []
    homes: dict[str, Path] = {}
    for path in train:
        for user, x, y in read_users(path):
            check_user_is_new(path, user, homes)
            images, labels = _parse_writer(path, user, x, y)
            number = names.setdefault(user, len(names))
            if test:
                train_parts.append((images, labels, number))
                continue
            test_rows = Key(0).child("femnist test", user).numpy().permutation(len(labels))[: len(labels) // 10]
            mask = np.zeros(len(labels), bool)
            mask[test_rows] = True
            train_parts.append((images[~mask], labels[~mask], number))
            test_parts.append((images[mask], labels[mask], number))
    homes = {}
    for path in test:
        for user, x, y in read_users(path, empty=True):
            check_user_is_new(path, user, homes)
            test_parts.append((*_parse_writer(path, user, x, y), names.get(user, -1)))
    return LeafSamples(
        inputs=np.concatenate([images for images, _, _ in train_parts]),
        targets=np.concatenate([labels for _, labels, _ in train_parts]),
        groups=np.concatenate([np.full(len(labels), number, np.int64) for _, labels, number in train_parts]),
        names=tuple(names),
        test_inputs=np.concatenate([images for images, _, _ in test_parts]),
        test_targets=np.concatenate([labels for _, labels, _ in test_parts]),
        test_groups=np.concatenate([np.full(len(labels), number, np.int64) for _, labels, number in test_parts]),
    )


def _parse_writer(
    path: Path, user: str, x: list[Any], y: list[Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
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


def _read_femnist_npz(path: Path) -> LeafSamples:
    arrays = read_npz(path, ("x_train", "y_train", "w_train", "x_test", "y_test", "w_test", "writers"))
    writers = arrays["writers"]
    if writers.ndim != 1 or writers.dtype.kind not in "US":
        raise invalid_file(path, "writers as a list of names", f"{writers.dtype} of shape {writers.shape}")
    names, counts = np.unique(writers, return_counts=True)
    if counts.max(initial=1) > 1:
        raise invalid_file(path, "every writer once", f"{_name(str(names[counts.argmax()]))} twice")
    for part in ("train", "test"):
        x, w = arrays[f"x_{part}"], arrays[f"w_{part}"]
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _SIDE * _SIDE:
            raise invalid_file(
                path, f"x_{part} as bytes of shape (n, {_SIDE * _SIDE})", f"{x.dtype} of shape {x.shape}"
            )
        arrays[f"y_{part}"] = _check_labels(path, arrays[f"y_{part}"], len(x))
        if w.shape != (len(x),) or w.dtype.kind not in "iu":
            raise invalid_file(path, f"w_{part} as a writer's number a row", f"{w.dtype} of shape {w.shape}")
        if len(w) and not (int(w.min()) >= 0 and int(w.max()) < len(writers)):
            raise invalid_file(
                path, f"w_{part} as a writer's number a row, 0 to {len(writers) - 1}", f"{w.min()} to {w.max()}"
            )
    if not len(arrays["x_train"]):
        raise invalid_file(path, "at least one training row", "none")
    return LeafSamples(
        inputs=arrays["x_train"].reshape(-1, 1, _SIDE, _SIDE),
        targets=arrays["y_train"],
        groups=arrays["w_train"].astype(np.int64),
        names=tuple(map(str, arrays["writers"])),
        test_inputs=arrays["x_test"].reshape(-1, 1, _SIDE, _SIDE),
        test_targets=arrays["y_test"],
        test_groups=arrays["w_test"].astype(np.int64),
    )
