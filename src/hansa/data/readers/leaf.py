"""LEAF's JSON: {users, num_samples, user_data: {user: {x, y}}}, one or many files, usually train/ beside test/."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hansa.data.errors import DataError, damaged, missing
from hansa.keys import Key

_SIDE = 28


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """Rows with their owners; the test rows' owners are not asked for."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    names: tuple[str, ...]
    test_inputs: npt.NDArray[Any]
    test_targets: npt.NDArray[np.int64]


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


def read_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user of a LEAF file with its x and y, the counts checked."""
    content = read_json(path)
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise damaged(path, "LEAF's keys users, num_samples, user_data", found)
    users, counts, held = content["users"], content["num_samples"], content["user_data"]
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise damaged(path, "as many num_samples as users", "lists of other lengths")
    for user, count in zip(users, counts, strict=True):
        rows = held.get(user) if isinstance(held, dict) else None
        if not isinstance(rows, dict) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
            raise damaged(path, f"x and y of user {user!r}", "none")
        if not len(rows["x"]) == len(rows["y"]) == count:
            found = f"{len(rows['x'])} x and {len(rows['y'])} y"
            raise damaged(path, f"{count} samples of user {user!r}", found)
        yield str(user), rows["x"], rows["y"]


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise damaged(path, "whole JSON", problem) from None


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
    for path in train:
        for user, x, y in read_users(path):
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
    for path in test:
        held.extend((*_writer(path, user, x, y), -1) for user, x, y in read_users(path))
    return Owned(
        inputs=np.concatenate([images for images, _, _ in kept]),
        targets=np.concatenate([labels for _, labels, _ in kept]),
        groups=np.concatenate([np.full(len(labels), place, np.int64) for _, labels, place in kept]),
        names=tuple(names),
        test_inputs=np.concatenate([images for images, _, _ in held]),
        test_targets=np.concatenate([labels for _, labels, _ in held]),
    )


def _writer(path: Path, user: str, x: list[Any], y: list[Any]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        pixels, labels = np.array(x, np.float64).reshape(len(y), -1), np.array(y)
    except (ValueError, TypeError):
        raise damaged(
            path, f"images of {_SIDE * _SIDE} numbers of user {user!r}", "rows of other kinds or lengths"
        ) from None
    if len(y) and pixels.shape[1] != _SIDE * _SIDE:
        raise damaged(path, f"images of {_SIDE * _SIDE} pixels of user {user!r}", pixels.shape[1])
    if len(y) and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise damaged(path, f"pixels of user {user!r} from 0 to 1", f"{pixels.min():g} to {pixels.max():g}")
    images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    return images, _labels(path, labels, len(y))


def _labels(path: Path, labels: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    if labels.shape != (count,) or (count and labels.dtype.kind not in "iu"):
        raise damaged(path, f"{count} class numbers", f"{labels.dtype} of shape {labels.shape}")
    if count and not (int(labels.min()) >= 0 and int(labels.max()) <= 61):
        raise damaged(path, "labels from 0 to 61", f"{labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _femnist_npz(path: Path) -> Owned:
    wanted = ("x_train", "y_train", "w_train", "x_test", "y_test", "w_test", "writers")
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            absent = [name for name in wanted if name not in file.files]
            if absent:
                raise damaged(path, f"arrays {', '.join(wanted)}", f"none named {', '.join(absent)}")
            arrays = {name: file[name] for name in wanted}
    except DataError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise damaged(path, "a whole .npz of plain arrays", str(problem).rstrip(".")) from None
    for part in ("train", "test"):
        x, w = arrays[f"x_{part}"], arrays[f"w_{part}"]
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _SIDE * _SIDE:
            raise damaged(path, f"x_{part} as bytes of shape (n, {_SIDE * _SIDE})", f"{x.dtype} of shape {x.shape}")
        arrays[f"y_{part}"] = _labels(path, arrays[f"y_{part}"], len(x))
        if w.shape != (len(x),) or w.dtype.kind not in "iu" or (len(w) and int(w.max()) >= len(arrays["writers"])):
            raise damaged(path, f"w_{part} as a writer's number a row", f"{w.dtype} of shape {w.shape}")
    return Owned(
        inputs=arrays["x_train"].reshape(-1, 1, _SIDE, _SIDE),
        targets=arrays["y_train"],
        groups=arrays["w_train"].astype(np.int64),
        names=tuple(map(str, arrays["writers"])),
        test_inputs=arrays["x_test"].reshape(-1, 1, _SIDE, _SIDE),
        test_targets=arrays["y_test"],
    )
