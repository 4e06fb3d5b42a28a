"""FEMNIST and Shakespeare by natural owner, from the Hugging Face hub (the extra ``datasets``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.counts import floor_share
from hansa.core.errors import HansaError, check_decay, check_integer, invalid_argument, short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.files import DataError
from hansa.data.loading import normalize_images
from hansa.data.partitions import natural
from hansa.data.readers import WINDOW, encode
from hansa.data.sources import DATASETS

_CHUNK = 20_000


@dataclass(frozen=True, slots=True)
class _HubDataset:
    """Location and columns of a data set on the hub."""

    path: str
    owner: str
    inputs: str
    targets: str
    read: Callable[[Any, _HubDataset], tuple[torch.Tensor, torch.Tensor]]


def from_hub(
    name: str,
    *,
    owners: int | None = None,
    test: float = 0.1,
    source: Any = None,
) -> FederatedData:
    """FEMNIST by writer or Shakespeare by role, from the Hugging Face hub.

    Args:
        name: "femnist" or "shakespeare".
        owners: Take the first owners only.
        test: Fraction of each owner's rows for testing: the last windows of a role, random images of a writer.
        source: Another source with the same columns: a dataset of the package ``datasets``, a folder written by its
            ``save_to_disk``, or a name on the hub.
    """
    if name not in HUB_DATASETS:
        raise HansaError(f"from_hub({short_repr(name)}): no such data set. {suggestion(str(name), HUB_DATASETS)}")
    check_decay("from_hub", "test", test)
    hub_dataset = HUB_DATASETS[name]
    rows = _open(hub_dataset, source)
    for column in (hub_dataset.owner, hub_dataset.inputs, hub_dataset.targets):
        if column not in rows.column_names:
            raise DataError(f"{name}: no column {column!r}. {suggestion(column, rows.column_names)}")
    owner_names = np.asarray(rows[hub_dataset.owner][:]).astype(str)
    names, first, numbers = np.unique(owner_names, return_index=True, return_inverse=True)
    order = np.argsort(first)  # owners in order of appearance
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    groups, names = position[numbers], names[order]
    if owners is not None:
        check_integer("from_hub", "owners", owners)
        if owners > len(names):
            raise invalid_argument("from_hub", "owners", owners, f"at most {len(names)}")
        selected = np.flatnonzero(groups < owners)
        rows, groups, names = rows.select(selected), groups[selected], names[:owners]
    x, y = hub_dataset.read(rows, hub_dataset)
    is_test = _choose_test_rows(name, groups, names, test)
    info, train_mask, test_mask = DATASETS[name], torch.from_numpy(~is_test), torch.from_numpy(is_test)
    data = Dataset(
        name=name,
        inputs=x[train_mask],
        targets=y[train_mask],
        test_inputs=x[test_mask] if is_test.any() else None,
        test_targets=y[test_mask] if is_test.any() else None,
        classes=info.classes,
        groups=torch.from_numpy(groups[~is_test]),
        test_groups=torch.from_numpy(groups[is_test]) if is_test.any() else None,
        group_names=tuple(map(str, names)),
        class_names=info.class_names,
    )
    return partition_dataset(data, natural(), None, 0)


def _open(hub_dataset: _HubDataset, source: Any) -> Any:
    if source is not None and not isinstance(source, (str, Path)):
        return _train_split(source)
    try:
        import datasets
    except ImportError as error:
        raise HansaError("data from the hub needs a package: pip install 'hansa[datasets]'.") from error
    try:
        if source is not None and Path(source).is_dir():
            return _train_split(datasets.load_from_disk(str(source)))
        return _train_split(datasets.load_dataset(hub_dataset.path if source is None else str(source)))
    except Exception as error:  # of the package, the network or the files
        path = hub_dataset.path if source is None else source
        raise DataError(f"{path}: cannot be opened ({type(error).__name__}: {str(error)[:300]}).") from error


def _train_split(data: Any) -> Any:
    return data["train"] if hasattr(data, "keys") and "train" in data else data


def _choose_test_rows(
    name: str, groups: npt.NDArray[np.int64], names: npt.NDArray[Any], fraction: float
) -> npt.NDArray[np.bool_]:
    """Return a mask of test rows: the fraction of each owner's rows, rounded down."""
    is_test = np.zeros(len(groups), bool)
    order = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[order], np.arange(len(names) + 1))
    for owner, user in enumerate(names):
        rows = order[bounds[owner] : bounds[owner + 1]]
        count = floor_share(fraction, len(rows))
        if name == "femnist":
            is_test[rows[Key(0).child("femnist test", str(user)).numpy().permutation(len(rows))[:count]]] = True
        else:
            is_test[rows[len(rows) - count :]] = True
    return is_test


def _read_images(rows: Any, hub_dataset: _HubDataset) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.empty((len(rows), 1, 28, 28), np.uint8)
    for i, image in enumerate(rows[hub_dataset.inputs]):
        array = np.asarray(image.convert("L") if hasattr(image, "convert") else image, dtype=np.uint8)
        if array.shape != (28, 28):
            raise DataError(f"femnist: image {i} has shape {array.shape}: expected (28, 28).")
        pixels[i, 0] = array
    info = DATASETS["femnist"]
    labels = torch.from_numpy(np.asarray(rows[hub_dataset.targets][:], dtype=np.int64))
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < info.classes:
        raise DataError(f"femnist: labels from {int(labels.min())} to {int(labels.max())}: expected 0 to 61.")
    return normalize_images(pixels, info.mean, info.std), labels


def _read_windows(rows: Any, hub_dataset: _HubDataset) -> tuple[torch.Tensor, torch.Tensor]:
    windows, following = [], []
    for first in range(0, len(rows), _CHUNK):
        chunk = rows[first : first + _CHUNK]
        x, y = chunk[hub_dataset.inputs], chunk[hub_dataset.targets]
        wrong = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if (len(a), len(b)) != (WINDOW, 1)), None)
        if wrong is not None:
            raise DataError(
                f"shakespeare: row {first + wrong} has {len(x[wrong])} characters and {len(y[wrong])} as target: "
                f"expected {WINDOW} and 1."
            )
        windows.append(encode("".join(x), "shakespeare").reshape(-1, WINDOW))
        following.append(encode("".join(y), "shakespeare").astype(np.int64))
    return torch.from_numpy(np.concatenate(windows)), torch.from_numpy(np.concatenate(following))


HUB_DATASETS = {
    "femnist": _HubDataset("flwrlabs/femnist", "writer_id", "image", "character", _read_images),
    "shakespeare": _HubDataset("flwrlabs/shakespeare", "character_id", "x", "y", _read_windows),
}
"""The data sets by name."""
