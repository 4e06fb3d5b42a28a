"""Shakespeare by role: from {role: text}, or from LEAF's JSON of windows.

x is a window of 80 characters and y the next one, over LEAF's alphabet of 80 (Caldas et al. 2018). Windows are
stored as bytes, an eighth of the memory of int64: a model begins with ``x.long()``.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import check_decay, check_integer
from hansa.data.files import invalid_file, missing_file
from hansa.data.readers.leaf import check_user_is_new, leaf_files, read_json, read_users

WINDOW = 80
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_UNKNOWN = 255
_CODES = np.full(128, _UNKNOWN, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


@dataclass(frozen=True, slots=True, eq=False)
class CharacterWindows:
    """Windows with their owners; -1 for windows that span the end of a role."""

    inputs: torch.Tensor
    targets: torch.Tensor
    groups: torch.Tensor
    names: tuple[str, ...]
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    test_groups: torch.Tensor


def encode(text: str, path: Path | str = "text", role: str = "") -> npt.NDArray[np.uint8]:
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
) -> CharacterWindows:
    """Read all roles. Training windows are the first 9/10 of a role's windows; test windows do not overlap them.

    Windows are ``stride`` characters apart, 1 in LEAF. Testing on 300,000 overlapping windows would take minutes, so
    only every ``test_stride``-th is used.
    """
    check_integer("shakespeare", "stride", stride)
    check_integer("shakespeare", "test_stride", test_stride)
    check_decay("shakespeare", "test_fraction", test_fraction)
    train, test = leaf_files(folder)
    if train:
        return _from_leaf(train, test)
    path = folder / "shakespeare.json"
    if not path.is_file():
        raise missing_file(path, remedy)
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise invalid_file(path, "an object {role: text}", f"{type(content).__name__} with other values")
    return _from_texts(path, content, stride, test_stride, test_fraction)


def _from_texts(
    path: Path, roles: dict[str, str], stride: int, test_stride: int, test_fraction: float
) -> CharacterWindows:
    names: list[str] = []
    texts, starts, owners, test_starts = [], [], [], []
    begin = 0
    for role, raw in roles.items():
        # as in LEAF: lines are joined by a space, runs of spaces become one
        codes = encode(re.sub(r" {2,}", " ", raw.replace("\n", " ")), path, role)
        windows = len(codes) - WINDOW
        if windows < 1:
            continue
        train_windows = max(1, int((1 - test_fraction) * windows))
        role_starts = np.arange(begin, begin + train_windows, stride)
        starts.append(role_starts)
        owners.append(np.full(len(role_starts), len(names), np.int64))
        test_starts.append(np.arange(begin + train_windows + WINDOW - 1, begin + windows, test_stride))
        names.append(role)
        texts.append(codes)
        begin += len(codes)
    if not names:
        raise invalid_file(path, f"a role of more than {WINDOW} characters", f"{len(roles)} roles, none as long")
    text = torch.from_numpy(np.concatenate(texts))
    # windows are views of the text: one byte per character, not eighty
    inputs = text.unfold(0, WINDOW, 1)[:-1]
    targets = text[WINDOW:].long()
    groups = torch.full((len(targets),), -1)
    groups[torch.from_numpy(np.concatenate(starts))] = torch.from_numpy(np.concatenate(owners))
    test_rows = torch.from_numpy(np.concatenate(test_starts))
    counts = torch.tensor([len(rows) for rows in test_starts])
    test_groups = torch.repeat_interleave(torch.arange(len(test_starts)), counts)
    return CharacterWindows(inputs, targets, groups, tuple(names), inputs[test_rows], targets[test_rows], test_groups)


def _from_leaf(train: list[Path], test: list[Path]) -> CharacterWindows:
    if not test:
        raise missing_file(train[0].parent.parent / "test" / "*.json", "LEAF's preprocess.sh writes it with -t sample.")
    names: dict[str, int] = {}
    parts: dict[bool, list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]]] = {True: [], False: []}
    for training, files in ((True, train), (False, test)):
        homes: dict[str, Path] = {}
        for path in files:
            for role, x, y in read_users(path, empty=not training):
                check_user_is_new(path, role, homes)
                number = names.setdefault(role, len(names)) if training else names.get(role, -1)
                parts[training].append((*_encode_windows(path, role, x, y), number))
    if not sum(len(y) for _, y, _ in parts[True]):
        raise invalid_file(train[0], "at least one window", "none")
    inputs, targets = (torch.from_numpy(np.concatenate([part[i] for part in parts[True]])) for i in (0, 1))
    test_inputs, test_targets = (torch.from_numpy(np.concatenate([part[i] for part in parts[False]])) for i in (0, 1))
    groups, test_groups = (
        torch.cat([torch.full((len(y),), number) for _, y, number in parts[t]]) for t in (True, False)
    )
    return CharacterWindows(inputs, targets, groups, tuple(names), test_inputs, test_targets, test_groups)


def _encode_windows(
    path: Path, role: str, x: list[Any], y: list[Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
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
