"""Federated data from Hugging Face: datasets by their columns, partitioners of flwr-datasets, collated items."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hansa.core.errors import HansaError, suggestion
from hansa.data.arrays import Clients, CollateFunction, assign_clients, dataset, from_items, stack_rows
from hansa.data.federated import partition_dataset
from hansa.data.partitions import Partition, natural

_ROW = "__row__"


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
) -> Any:
    """Federated data from a Hugging Face dataset, or anything with named columns.

    FEMNIST by writer, for example: ``from_hf(datasets.load_dataset("flwrlabs/femnist"), "image", "character",
    client_column="writer_id")``.

    Args:
        data: The dataset, or a dict of splits with ``train`` and optionally ``test``.
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
            which are dicts by column; see `from_items`. It replaces ``input_column``, and the result is a
            `CollatedData`.
        classes: Number of classes; by default from the features or the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> columns = {"x": [[0.0], [1.0], [2.0]], "y": [0, 1, 1], "who": ["a", "b", "b"]}
    >>> from_hf(columns, "x", "y", client_column="who").client_names
    ('a', 'b')
    """
    if hasattr(data, "keys") and "train" in data:
        test = data["test"] if test is None and "test" in data else test
        data = data["train"]
    client_names: tuple[str, ...] = ()
    if hasattr(type(clients), "load_partition"):
        if partition is not None or client_column is not None:
            raise HansaError(
                f"{name}: {type(clients).__name__} assigns the rows: leave out partition= and client_column=."
            )
        clients, client_names = _partition_rows(name, data, clients)
    groups, test_groups, owners = _owners(name, data, test, client_column)
    if groups is None and clients is None:
        raise HansaError("from_hf: expected clients=, or client_column=, the column of the clients.")
    if collate_fn is not None:
        if input_column is not None or (groups is not None and clients is not None):
            raise HansaError(f"{name}: collate_fn= replaces input_column=, and takes clients= or client_column=.")
        labels = None if label_column is None else _labels(name, data, label_column)
        return from_items(
            data, collate_fn, clients=clients if groups is None else groups, partition=partition,
            seed=0 if seed is None else seed, labels=labels, test=test, test_clients=test_groups, name=name,
        )  # fmt: skip
    if not input_column or label_column is None:
        raise HansaError(f"{name}: expected input_column= and label_column=, or collate_fn=, which makes batches.")
    if classes is None:
        features = getattr(data, "features", None) or {}
        classes = getattr(features.get(label_column), "num_classes", None)
    train_pair, *test_pairs = (
        (_inputs(name, each, input_column, dtype), _labels(name, each, label_column))
        for each in (data, test)
        if each is not None
    )
    test_pair = test_pairs[0] if test_pairs else None
    whole = dataset(*train_pair, test=test_pair, groups=groups, classes=classes, dtype=dtype, name=name)
    test_owners = None if test_groups is None else torch.from_numpy(test_groups)
    whole = replace(whole, test_groups=test_owners, group_names=owners)
    if clients is None:
        return partition_dataset(whole, natural(), None, seed)
    if client_column is not None and partition is None:
        partition = natural()
    federated = assign_clients(whole, clients, partition, seed)
    return replace(federated, client_names=client_names) if client_names else federated


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
        partition = copied.load_partition(number)
        if set(partition.column_names) != set(copied.dataset.column_names):
            raise HansaError(f"{name}: {kind} divides columns, not rows: every client needs all columns.")
        rows.append(np.asarray(partition[_ROW][:], dtype=np.int64))
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
    if all(values.ndim == 1 for values in inputs.values()):
        return torch.stack([values.to(dtype) for values in inputs.values()], dim=1)
    return inputs


def _labels(name: str, data: Any, column: str) -> np.ndarray[Any, Any]:
    labels = np.asarray(_column(name, data, column))
    if labels.dtype.kind in "UO":
        raise HansaError(f"{name}: {column!r} has {str(labels[0])!r}: expected numbers. Use class_encode_column first.")
    return labels


def _column(name: str, data: Any, column: str) -> Any:
    names = getattr(data, "column_names", None) or list(data)
    if column not in names:
        raise HansaError(f"{name}: no column {column!r}. {suggestion(column, names)}")
    values = data[column]
    return values if isinstance(values, (np.ndarray, torch.Tensor)) else list(values)
