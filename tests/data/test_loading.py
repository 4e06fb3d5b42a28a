"""Data sets by name: the embedded one as it is, the others from tiny files in the official layouts."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from data.official_files import tiny_cifar, tiny_idx, write_idx
from hansa.core.errors import HansaError
from hansa.data import (
    DataError,
    Dataset,
    MissingFileError,
    check_files,
    data_folder,
    dataset_info,
    dataset_names,
    dirichlet,
    federate,
    is_present,
    load,
)
from hansa.data.loading import ASSET, ImageScaling
from hansa.data.sources import DATASETS

DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def embedded() -> Dataset:
    return load("fashion-mini")


def test_the_embedded_set_is_the_stratified_start_of_fashion_mnist(embedded: Dataset) -> None:
    data = embedded
    assert data.test_inputs is not None
    assert data.test_targets is not None
    assert torch.bincount(data.targets).tolist() == [1000] * 10
    assert torch.bincount(data.test_targets).tolist() == [200] * 10
    # the first labels of the official training and test files
    assert data.targets[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.test_targets[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert data.inputs.dtype == torch.float32
    assert abs(float(data.inputs.double().mean())) < 0.02
    assert abs(float(data.inputs.double().std()) - 1) < 0.02
    assets = resources.files("hansa.data") / "assets"
    assert len((assets / ASSET).read_bytes()) < 6_000_000
    notice = (assets / "FASHION-MNIST-LICENSE.txt").read_text(encoding="utf-8")
    assert "Copyright © 2017 Zalando SE" in notice


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_set_is_loaded_and_normalised(tmp_path: Path, packed: bool) -> None:
    entry = tiny_idx(tmp_path, packed)
    data = load(entry, tmp_path)
    assert data.inputs.shape == (3, 1, 28, 28)
    assert data.test_inputs is not None
    assert data.test_inputs.shape == (2, 1, 28, 28)
    raw = np.round((data.inputs.double().numpy() * 0.3081 + 0.1307) * 255)
    assert set(np.unique(raw)) <= set(range(10))
    assert [state.state for state in check_files(entry, tmp_path)] == ["ok"] * 4
    assert is_present(entry, tmp_path)


def test_a_cifar_set_is_loaded_in_the_order_of_its_batches(tmp_path: Path) -> None:
    entry = tiny_cifar(tmp_path, DRAW.integers(0, 256, (2, 3072), dtype=np.uint8), [3, 8])
    data = load(entry, tmp_path)
    assert data.inputs.shape == (10, 3, 32, 32)
    assert data.targets.tolist() == [3, 8] * 5
    assert data.test_inputs is not None
    assert data.test_inputs.shape == (2, 3, 32, 32)
    assert data.inputs.is_contiguous(memory_format=torch.channels_last)


def test_normalising_is_the_formula_channel_by_channel() -> None:
    images = DRAW.integers(0, 256, (1234, 3, 4, 5), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images / 255 - np.reshape(mean, (1, 3, 1, 1))) / np.reshape(std, (1, 3, 1, 1))
    np.testing.assert_allclose(ImageScaling(mean, std).apply(images).numpy(), expected, rtol=2e-6, atol=2e-6)


def test_a_file_of_the_wrong_checksum_is_refused_with_both_sums(tmp_path: Path) -> None:
    entry = tiny_idx(tmp_path)
    path = tmp_path / entry.files[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{path.name}: expected contents of SHA-256 {entry.files[0].sha256}, found "):
        load(entry, tmp_path)
    assert [state.state for state in check_files(entry, tmp_path)] == ["damaged", "ok", "ok", "ok"]
    write_idx(path, np.zeros((3, 28, 27), np.uint8))
    with pytest.raises(DataError, match="expected contents of SHA-256"):
        load(entry, tmp_path)


def test_a_missing_file_names_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"train-images-idx3-ubyte: no such file\. Run `hansa data get mnist`"):
        load("mnist", tmp_path)
    assert {state.state for state in check_files("mnist", tmp_path)} == {"missing"}
    assert not is_present("mnist", tmp_path)
    assert is_present("fashion-mini", tmp_path)
    assert not is_present("femnist", tmp_path)
    assert {state.state for state in check_files("femnist", tmp_path)} == {"missing"}


def test_an_unknown_name_gets_near_matches() -> None:
    with pytest.raises(DataError, match="Did you mean cifar10"):
        dataset_info("cifar-10")
    with pytest.raises(DataError, match=r"no data set 'two-gausians'\. Did you mean two-gaussians"):
        federate("two-gausians")


def test_options_that_a_set_does_not_take_are_refused() -> None:
    with pytest.raises(HansaError, match=r"takes the options .'downsample', 'normalize'., found .'stride'."):
        load("fashion-mini", stride=2)
    with pytest.raises(HansaError, match=r"synthetic: .*gamma"):
        federate("synthetic", gamma=2)
    with pytest.raises(HansaError, match="has its own clients"):
        federate("two-gaussians", dirichlet(0.3))


def test_every_registered_set_is_described() -> None:
    for entry in DATASETS.values():
        assert entry.licence
        assert entry.homepage.startswith("http")
        assert entry.downloads or entry.instructions or entry.layout in ("embedded", "tables")
        assert len(entry.mean) == len(entry.std) == (entry.shape[0] if len(entry.shape) == 3 else 0)
        for sha in [member.sha256 for member in entry.files] + [remote.sha256 for remote in entry.downloads]:
            assert len(sha) == 64
            assert int(sha, 16) >= 0
    assert set(dataset_names()) == {*DATASETS, "two-gaussians", "synthetic", "csv-folder"}


def test_the_data_folder_is_the_given_then_the_environments_then_the_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.setenv("HANSA_DATA", "")
    assert data_folder().parts[-2:] == ("hansa", "data")


def test_blocks_of_pixels_are_averaged_where_that_is_asked_for() -> None:
    full, small = load("fashion-mini", normalize=False), load("fashion-mini", normalize=False, downsample=4)
    assert small.shape == (1, 7, 7)
    assert (float(full.inputs.min()), float(full.inputs.max())) == (0, 1)
    for whole, averaged in ((full.inputs, small.inputs), (full.test_inputs, small.test_inputs)):
        assert whole is not None
        assert averaged is not None
        assert len(averaged) == len(whole)
        assert float(averaged[3, 0, 2, 5]) == pytest.approx(float(whole[3, 0, 8:12, 20:24].mean()), abs=1e-6)
    assert torch.equal(small.targets, full.targets)
    normalised = load("fashion-mini", downsample=4)
    assert torch.allclose((small.inputs - 0.2860) / 0.3530, normalised.inputs, atol=1e-5)


@pytest.mark.parametrize("value", [0, -2, 3, 2.0, True, "2"])
def test_a_downsampling_that_does_not_divide_the_image_is_refused(value: object) -> None:
    with pytest.raises(HansaError, match=r"fashion-mini: downsample: .*: expected a number that divides 28 and 28"):
        load("fashion-mini", downsample=value)
