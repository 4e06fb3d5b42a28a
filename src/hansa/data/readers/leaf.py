"""LEAF's JSON: {users, num_samples, user_data: {user: {x, y}}}, one or many files, usually train/ beside test/."""

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
from hansa.data.errors import damaged, missing
from hansa.data.readers.npz import read_npz

_SIDE = 28
_EMPTY = "LEAF's preprocess.sh leaves out users of few samples with -k."


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """Rows with their owners; -1 owns the test rows of somebody who has none to train on."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    names: tuple[str, ...]
    test_inputs: npt.NDArray[Any]
    test_targets: npt.NDArray[np.int64]
    test_groups: npt.NDArray[np.int64]


def leaf_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """LEAF's files for training and for testing; the second is empty where LEAF did not split."""
    for base in (folder, folder / "data"):
        train, test = sorted(base.glob("train/*.json")), sorted(base.glob("test/*.json"))
        if train:
            return train, test
        whole = sorted(base.glob("all_data_*.json")) or sorted(base.glob("all_data/all_data*.json"))
        if whole:
            return whole, []
    return [], []


def read_users(path: Path, *, empty: bool = False) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user of a LEAF file with its x and y: each once, all that there are, the counts checked.

    ``empty`` admits users without samples, as a test file may have them.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        found = sorted(content)[:9] if isinstance(content, dict) else type(content).__name__
        raise damaged(path, "LEAF's keys users, num_samples, user_data", found)
    users, counts, held = content["users"], content["num_samples"], content["user_data"]
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise damaged(path, "as many num_samples as users", "lists of other lengths")
    if not users:
        raise damaged(path, "at least one user", "none")
    _every_user_once(path, users, held)
    for user, count in zip(users, counts, strict=True):
        if type(count) is not int or count < (0 if empty else 1):
            least = "a whole number" if empty else "at least 1"
            raise damaged(path, f"{least} as num_samples of user {_name(user)}", reprlib.repr(count), _EMPTY)
        rows = held[user]
        if not isinstance(rows, dict) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
            raise damaged(path, f"x and y of user {_name(user)}", "none")
        if not len(rows["x"]) == len(rows["y"]) == count:
            found = f"{len(rows['x'])} x and {len(rows['y'])} y"
            raise damaged(path, f"{count} samples of user {_name(user)}", found)
        yield user, rows["x"], rows["y"]


def _every_user_once(path: Path, users: list[Any], held: Any) -> None:
    """Refuse a user that is listed twice, listed without data, or has data and is not listed."""
    listed: set[str] = set()
    for user in users:
        if not isinstance(user, str) or not user.isprintable():
            raise damaged(path, "users with names", reprlib.repr(user))
        if user in listed:
            raise damaged(path, "every user once", f"user {_name(user)} twice")
        listed.add(user)
        if not isinstance(held, dict) or user not in held:
            raise damaged(path, f"x and y of user {_name(user)}", "none")
    unlisted = next((user for user in held if user not in listed), None)
    if unlisted is not None:
        raise damaged(path, "the data of listed users alone", f"that of {_name(unlisted)}, who is not in users")


def each_file_its_own(path: Path, user: str, homes: dict[str, Path]) -> None:
    """Note where a user's samples are; a second file with samples of the same user would double them."""
    if user in homes:
        raise damaged(path, f"users that are not in {homes[user].name}", f"user {_name(user)} again")
    homes[user] = path


def read_json(path: Path) -> Any:
    """The content of a JSON file, every key of which stands once."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as problem:  # also of a number with thousands of digits
        raise damaged(path, "whole JSON", str(problem).rstrip(".")) from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_name(twin)} stands twice in one object")
    return found


def _name(user: str) -> str:
    return f"{user!r:.80}"


def read_femnist(folder: Path, remedy: str = "") -> Owned:
    """FEMNIST by writer: LEAF's JSON, or one .npz of x_train, y_train, w_train, x_test, y_test, w_test, writers.

    Pixels are bytes [n, 1, 28, 28], 255 being paper. Where LEAF has not split, a tenth of each writer's samples, chosen
    by a fixed key, is for testing.
    """
    train, test = leaf_files(folder)
    if train:
        return _femnist_json(train, test)
    packed = sorted(folder.glob("*.npz"))
    if not packed:
        raise missing(folder / "train" / "all_data_*.json", remedy)
    return _femnist_npz(packed[0])


def _femnist_json(train: list[Path], test: list[Path]) -> Owned:
    names: dict[str, int] = {}
    kept: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]] = []
    held: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]] = []
    homes: dict[str, Path] = {}
    for path in train:
        for user, x, y in read_users(path):
            each_file_its_own(path, user, homes)
            images, labels = _writer(path, user, x, y)
            place = names.setdefault(user, len(names))
            if test:
                kept.append((images, labels, place))
                continue
            away = Key(0).child("femnist test", user).numpy().permutation(len(labels))[: len(labels) // 10]
            mask = np.zeros(len(labels), bool)
            mask[away] = True
            kept.append((images[~mask], labels[~mask], place))
            held.append((images[mask], labels[mask], place))
    homes = {}
    for path in test:
        for user, x, y in read_users(path, empty=True):
            each_file_its_own(path, user, homes)
            held.append((*_writer(path, user, x, y), names.get(user, -1)))
    return Owned(
        inputs=np.concatenate([images for images, _, _ in kept]),
        targets=np.concatenate([labels for _, labels, _ in kept]),
        groups=np.concatenate([np.full(len(labels), place, np.int64) for _, labels, place in kept]),
        names=tuple(names),
        test_inputs=np.concatenate([images for images, _, _ in held]),
        test_targets=np.concatenate([labels for _, labels, _ in held]),
        test_groups=np.concatenate([np.full(len(labels), place, np.int64) for _, labels, place in held]),
    )


def _writer(path: Path, user: str, x: list[Any], y: list[Any]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    if not y:
        return np.zeros((0, 1, _SIDE, _SIDE), np.uint8), np.zeros(0, np.int64)
    try:
        pixels, labels = np.array(x), np.array(y)
    except (ValueError, TypeError, OverflowError):
        pixels = labels = np.zeros(0, object)
    if pixels.dtype.kind not in "iuf" or pixels.ndim < 2:
        raise damaged(
            path, f"images of {_SIDE * _SIDE} numbers of user {_name(user)}", "rows of other kinds or lengths"
        )
    pixels = pixels.reshape(len(y), -1).astype(np.float64)
    if pixels.shape[1] != _SIDE * _SIDE:
        raise damaged(path, f"images of {_SIDE * _SIDE} pixels of user {_name(user)}", pixels.shape[1])
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise damaged(path, f"pixels of user {_name(user)} from 0 to 1", f"{pixels.min():g} to {pixels.max():g}")
    images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    return images, _labels(path, labels, len(y))


def _labels(path: Path, labels: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    if labels.shape != (count,) or (count and labels.dtype.kind not in "iu"):
        raise damaged(path, f"{count} class numbers", f"{labels.dtype} of shape {labels.shape}")
    if count and not (int(labels.min()) >= 0 and int(labels.max()) <= 61):
        raise damaged(path, "labels from 0 to 61", f"{labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _femnist_npz(path: Path) -> Owned:
    arrays = read_npz(path, ("x_train", "y_train", "w_train", "x_test", "y_test", "w_test", "writers"))
    writers = arrays["writers"]
    if writers.ndim != 1 or writers.dtype.kind not in "US":
        raise damaged(path, "writers as a list of names", f"{writers.dtype} of shape {writers.shape}")
    names, times = np.unique(writers, return_counts=True)
    if times.max(initial=1) > 1:
        raise damaged(path, "every writer once", f"{_name(str(names[times.argmax()]))} twice")
    for part in ("train", "test"):
        x, w = arrays[f"x_{part}"], arrays[f"w_{part}"]
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _SIDE * _SIDE:
            raise damaged(path, f"x_{part} as bytes of shape (n, {_SIDE * _SIDE})", f"{x.dtype} of shape {x.shape}")
        arrays[f"y_{part}"] = _labels(path, arrays[f"y_{part}"], len(x))
        if w.shape != (len(x),) or w.dtype.kind not in "iu":
            raise damaged(path, f"w_{part} as a writer's number a row", f"{w.dtype} of shape {w.shape}")
        if len(w) and not (int(w.min()) >= 0 and int(w.max()) < len(writers)):
            raise damaged(
                path, f"w_{part} as a writer's number a row, 0 to {len(writers) - 1}", f"{w.min()} to {w.max()}"
            )
    if not len(arrays["x_train"]):
        raise damaged(path, "at least one training row", "none")
    return Owned(
        inputs=arrays["x_train"].reshape(-1, 1, _SIDE, _SIDE),
        targets=arrays["y_train"],
        groups=arrays["w_train"].astype(np.int64),
        names=tuple(map(str, arrays["writers"])),
        test_inputs=arrays["x_test"].reshape(-1, 1, _SIDE, _SIDE),
        test_targets=arrays["y_test"],
        test_groups=arrays["w_test"].astype(np.int64),
    )
