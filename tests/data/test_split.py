"""A partition kept in a file comes back exactly, or not at all."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hansa.core.keys import Key
from hansa.data import (
    DataError,
    Dataset,
    MissingFileError,
    dirichlet,
    load_split,
    partition_dataset,
    save_split,
    saved_split,
)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(5).repeat(40)


def test_a_saved_partition_comes_back_and_is_the_same_bytes(tmp_path: Path, labels: torch.Tensor) -> None:
    """safetensors orders metadata by chance: a run side by side would have another file than one alone."""
    split = dirichlet(0.2).split(labels, 8, Key(1))
    files = [tmp_path / str(number) for number in range(5)]
    for path in files:
        save_split(path, split, labels, 'Grüße \x01 "quoted"', [[1, 2], [3, 4]])
    assert len({path.read_bytes() for path in files}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    with safe_open(files[0], framework="pt") as file:
        assert json.loads(file.metadata()["hansa"])["made_by"] == 'Grüße \x01 "quoted"'
    back = load_split(files[0], labels)
    assert torch.equal(back.index, split.index)
    assert torch.equal(back.offsets, split.offsets)
    with pytest.raises(MissingFileError, match="nowhere: no such file"):
        load_split(tmp_path / "nowhere", labels)


def test_a_partition_of_other_labels_is_refused(tmp_path: Path, labels: torch.Tensor) -> None:
    save_split(tmp_path / "split", dirichlet(0.2).split(labels, 8, Key(1)), labels)
    other = labels.clone()
    other[3] = 0
    with pytest.raises(DataError, match=r"split: expected a partition of these 200 targets .* found one of 200 others"):
        load_split(tmp_path / "split", other)


def test_no_damage_gives_another_split(tmp_path: Path, labels: torch.Tensor) -> None:
    path, split = tmp_path / "split", dirichlet(0.2).split(labels, 8, Key(1))
    save_split(path, split, labels, "made by a test")
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        back = split  # a change may leave the meaning alone, but it may never give another split
        with contextlib.suppress(DataError):
            back = load_split(path, labels)
        assert torch.equal(back.index, split.index)
        assert torch.equal(back.offsets, split.offsets)
    for keep in (0, 5, 100, -1):
        path.write_bytes(good[:keep])
        with pytest.raises(DataError, match="split: expected a 'hansa partition 2' file"):
            load_split(path, labels)


def test_the_saved_part_repeats_a_run_whatever_its_seed(tmp_path: Path, labels: torch.Tensor) -> None:
    groups = torch.where(torch.arange(200) % 4 == 0, -1, 0)  # with rows that are nobody's
    data = Dataset("toy", torch.randn(200, 2), labels, classes=5, groups=groups)
    first = partition_dataset(data, dirichlet(0.2), 6, seed=3)
    save_split(tmp_path / "split", first.split, data.targets)
    again = partition_dataset(data, saved_split(str(tmp_path / "split")), 6, seed=99)
    assert torch.equal(first.index, again.index)
    with pytest.raises(DataError, match="among 7 clients, found one among 6"):
        partition_dataset(data, saved_split(str(tmp_path / "split")), 7)
