"""Federated data from Hugging Face: datasets by their columns, partitioners of flwr-datasets, collated items; FEMNIST
and Shakespeare by natural owner, from the hub (the extra ``datasets``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.counts import floor_share
from hansa.core.errors import HansaError, check_decay, check_integer, invalid_argument, short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.arrays import Clients, CollatedData, CollateFunction, assign_clients, dataset, from_items, stack_rows
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.files import DataError
from hansa.data.loading import normalize_images
from hansa.data.partitions import Partition, natural
from hansa.data.readers import WINDOW, encode
from hansa.data.sources import DATASETS

_ROW = "__row__"
_CHUNK = 20_000


@overload
def from_hf(
    data: Any,
    input_column: str | Sequence[str],
    label_column: str,
    *,
    clients: Clients | Any = ...,
    client_column: str | None = ...,
    partition: Partition | None = ...,
    seed: int | None = ...,
    test: Any = ...,
    classes: int | None = ...,
    dtype: torch.dtype = ...,
    name: str = ...,
) -> FederatedData: ...
@overload
def from_hf(
    data: Any,
    *,
    collate_fn: CollateFunction,
    label_column: str | None = ...,
    clients: Clients | Any = ...,
    client_column: str | None = ...,
    partition: Partition | None = ...,
    seed: int | None = ...,
    test: Any = ...,
    name: str = ...,
) -> CollatedData: ...
def from_hf(
    data: Any,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    *,
    clients: Clients | Any = None,
    client_column: str | None = None,
    partition: Partition | None = None,
    seed: int | None = None,
    test: Any = None,
    collate_fn: CollateFunction | None = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "hf",
) -> FederatedData | CollatedData:
    """Federated data from a Hugging Face dataset, or anything with named columns.

    Args:
        data: The dataset; a dict of splits with ``train`` and optionally ``test``; or a ``FederatedDataset`` of
            flwr-datasets, whose partitioner of the split ``train`` (or its only one) assigns the rows.
        input_column: Column of inputs: numbers, arrays or images of one shape. Several columns of single numbers become
            one table [rows, columns]; several columns of sequences, such as ``["input_ids", "attention_mask"]``, a dict
            by column, which ``forward()`` receives by name. Tokenize and pad text first, or use ``collate_fn``.
        label_column: Column of targets, numbers. With ``collate_fn`` only a partition by labels needs it.
        clients: As in `from_arrays`, or a partitioner of flwr-datasets: each of its partitions is a client, with the
            same rows in the same order. Not needed with ``client_column``.
        client_column: Column whose values are the clients; they own the test rows with the same value.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run (with ``collate_fn``: 0). A partitioner
            of flwr-datasets has a seed of its own.
        test: The test set, a dataset; by default the split ``test``.
        collate_fn: Keeps the dataset in its Arrow files and makes every batch (inputs, targets) of a list of rows,
            which are dicts by column; see `from_items`. It replaces ``input_column``.
        classes: Number of classes; by default from the features or the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> columns = {"x": [[0.0], [1.0], [2.0]], "y": [0, 1, 1], "who": ["a", "b", "b"]}
    >>> from_hf(columns, "x", "y", client_column="who").client_names
    ('a', 'b')
    """
    if (input_column is None) == (collate_fn is None) or (collate_fn is None and label_column is None):
        raise HansaError(
            f"{name}: expected input_column= and label_column=, or collate_fn=, which makes batches of rows."
        )
    if hasattr(data, "load_split") and hasattr(type(data), "partitioners"):
        data, test, clients = _open_federated(name, data, test, clients)
    elif hasattr(data, "keys") and "train" in data:
        test = data["test"] if test is None and "test" in data else test
        data = data["train"]
    client_names: tuple[str, ...] = ()
    if hasattr(type(clients), "load_partition"):
        if partition is not None or client_column is not None:
            raise HansaError(f"{name}: {type(clients).__name__} already assigns the rows: leave out partition= and "
                             "client_column=.")  # fmt: skip
        clients, client_names = _partition_rows(name, data, clients)
    groups, test_groups, owners = _owners(name, data, test, client_column)
    if groups is None and clients is None:
        raise HansaError("from_hf: expected clients=, or client_column=, the column of the clients.")
    if collate_fn is not None:
        labels = None if label_column is None else _labels(name, data, label_column)
        if groups is not None:
            if clients is not None:
                raise HansaError(f"{name}: clients= and client_column= with collate_fn=: expected one of the two.")
            clients = groups
        return from_items(
            data, collate_fn, clients=clients, partition=partition, seed=0 if seed is None else seed, labels=labels,
            test=test, test_clients=test_groups, name=name,
        )  # fmt: skip
    assert input_column is not None
    assert label_column is not None
    features = getattr(data, "features", None) or {}
    classes = classes if classes is not None else getattr(features.get(label_column), "num_classes", None)
    pairs = [
        (_inputs(name, each, input_column, dtype), _labels(name, each, label_column))
        for each in (data, test)
        if each is not None
    ]
    whole = dataset(
        *pairs[0], test=None if test is None else pairs[1], groups=groups, classes=classes, dtype=dtype, name=name
    )
    if test_groups is not None:
        whole = replace(whole, test_groups=torch.from_numpy(test_groups))
    if owners:
        whole = replace(whole, group_names=owners)
    if clients is None:
        return partition_dataset(whole, natural(), None, seed)
    if client_column is not None and partition is None:
        partition = natural()
    federated = assign_clients(whole, clients, partition, seed)
    return replace(federated, client_names=client_names) if client_names else federated


def _open_federated(name: str, data: Any, test: Any, clients: Any) -> tuple[Any, Any, Any]:
    """Return the training split, the test split and the partitioner of a ``FederatedDataset``."""
    if clients is not None:
        raise HansaError(f"{name}: a FederatedDataset has its partitioner: leave out clients=.")
    partitioners = data.partitioners  # loads the dataset
    split = "train" if "train" in partitioners else next(iter(partitioners))
    if len(partitioners) > 1 and split != "train":
        raise HansaError(f"{name}: partitioners of {', '.join(partitioners)}: expected one, or one of the split train.")
    if test is None and split != "test":
        try:
            test = data.load_split("test")
        except ValueError:  # there is none
            test = None
    return partitioners[split].dataset, test, partitioners[split]


def _partition_rows(
    name: str, data: Any, partitioner: Any
) -> tuple[list[np.ndarray[Any, np.dtype[np.int64]]], tuple[str, ...]]:
    """Return the rows of each partition, and the partitions' names if they have any.

    The partitions of a copy of the partitioner are loaded, with the rows' numbers as a further column.
    """
    kind = type(partitioner).__name__
    if not hasattr(data, "add_column"):
        raise HansaError(f"{name}: {kind} partitions a datasets.Dataset, found {type(data).__name__}.")
    copied = copy.copy(partitioner)
    if partitioner.is_dataset_assigned():
        if partitioner.dataset is not data and partitioner.dataset._fingerprint != data._fingerprint:
            raise HansaError(f"{name}: {kind} already partitions another dataset. Pass its .dataset, or a new one.")
        copied._dataset = None  # its setter takes one dataset only
    copied = copy.deepcopy(copied)
    copied.dataset = data.add_column(_ROW, np.arange(len(data)))
    rows = []
    for number in range(copied.num_partitions):
        part = copied.load_partition(number)
        if set(part.column_names) != set(copied.dataset.column_names):
            raise HansaError(f"{name}: {kind} divides columns, not rows: every client needs all columns.")
        rows.append(np.asarray(part[_ROW][:], dtype=np.int64))
    natural_ids = getattr(copied, "partition_id_to_natural_id", None) or {}
    names = tuple(str(natural_ids[number]) for number in range(len(rows))) if len(natural_ids) == len(rows) else ()
    return rows, names


def _owners(
    name: str, data: Any, test: Any, column: str | None
) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None, tuple[str, ...]]:
    """Return the number of each row's owner, that of each test row (-1 for none), and the owners' names."""
    if column is None:
        return None, None, ()
    owners, groups = np.unique(np.asarray(_column(name, data, column)), return_inverse=True)
    test_groups = None
    if test is not None and column in (getattr(test, "column_names", None) or ()):
        values = np.asarray(_column(name, test, column))
        position = np.minimum(np.searchsorted(owners, values), len(owners) - 1)
        test_groups = np.where(owners[position] == values, position, -1).astype(np.int64)
    return groups, test_groups, tuple(map(str, owners))


def _inputs(name: str, data: Any, columns: str | Sequence[str], dtype: torch.dtype) -> Any:
    if isinstance(columns, str):
        return stack_rows(name, _column(name, data, columns))
    inputs = {column: stack_rows(f"{name}, column {column!r}", _column(name, data, column)) for column in columns}
    if not inputs:
        raise HansaError(f"{name}: input_column={short_repr(columns)}: expected at least one column.")
    if all(values.ndim == 1 for values in inputs.values()):
        return torch.stack([values.to(dtype) for values in inputs.values()], dim=1)
    return inputs


def _labels(name: str, data: Any, column: str) -> np.ndarray[Any, Any]:
    labels = np.asarray(_column(name, data, column))
    if labels.dtype.kind in "UO":
        raise HansaError(
            f"{name}: column {column!r} contains {str(labels[0])!r}: expected numbers. Use class_encode_column first."
        )
    return labels


def _column(name: str, data: Any, column: str) -> Any:
    known = getattr(data, "column_names", None)
    if known is not None and column not in known:
        raise HansaError(f"{name}: no column {column!r}. {suggestion(column, known)}")
    try:
        values = data[column]
    except KeyError as error:
        raise HansaError(f"{name}: no column {column!r}.") from error
    return values if isinstance(values, (np.ndarray, torch.Tensor)) else list(values)


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
