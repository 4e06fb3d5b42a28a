"""Federated data as a task needs it, and the sources from which a worker takes batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from hansa.core import trees
from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError
from hansa.core.keys import Key

Tree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of tensors, each with one entry per row."""


class ClientData(Protocol):
    """Federated data: inputs, targets, and the rows of each client.

    Data that is loaded on demand has ``fetch(client, rows)`` instead, which returns inputs and targets of some rows of
    a client, and for a test set ``fetch_test(rows)`` with ``test_count``; see `hansa.data.CollatedData`.
    """

    @property
    def inputs(self) -> Tree: ...
    @property
    def targets(self) -> Tree: ...
    @property
    def test_inputs(self) -> Tree | None: ...
    @property
    def test_targets(self) -> Tree | None: ...
    @property
    def population(self) -> int: ...
    def rows(self, client: int) -> torch.Tensor: ...
    def samples(self, client: int) -> int: ...


Rows: TypeAlias = "torch.Tensor | list[torch.Tensor]"


class Batch(NamedTuple):
    """Inputs and targets of some rows."""

    inputs: Tree
    targets: Tree


@dataclass(frozen=True, slots=True, eq=False)
class KeyedBatches:
    """Row numbers of a client's batches, [steps, batch] or a list if sizes differ, with the key of their augmentation.

    ``batches[t]`` is the batch of one step, ``batches[t:u]`` those of several.
    """

    client: int
    rows: Rows
    key: Key
    first: int = 0

    def __getitem__(self, steps: int | slice) -> KeyedBatches:
        start = steps.start or 0 if isinstance(steps, slice) else steps
        return replace(self, rows=self.rows[steps], first=self.first + start)

    def __len__(self) -> int:
        return len(self.rows)

    def address(self) -> Key:
        """Return the key of the augmentation of the first step."""
        return self.key.child(self.first)


Batches: TypeAlias = "Rows | KeyedBatches"
"""The batches of a client, with a key where they are augmented."""


def row_numbers(batches: Batches) -> Rows:
    """Return the row numbers of batches."""
    return batches.rows if isinstance(batches, KeyedBatches) else batches


class SampleStore:
    """A tensor of samples on a worker's device.

    Images are stored channels-last if the model allows it, so that a gathered batch is channels-last at no cost. A
    memory-mapped file stays on disk and is converted batch by batch.
    """

    def __init__(self, inputs: Any, dtype: torch.dtype, device: torch.device, channels_last: bool = True) -> None:
        self.dtype, self.device = dtype if inputs.dtype.is_floating_point else inputs.dtype, device
        self.image = inputs.ndim == 4 and channels_last
        self.values: Any = inputs
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.to(self.dtype)
            self.values = (inputs.permute(0, 2, 3, 1) if self.image else inputs).contiguous().to(device)

    @property
    def logical(self) -> torch.Tensor:
        """All samples in logical shape, whatever their memory layout."""
        values: torch.Tensor = self.values
        return values.permute(0, 3, 1, 2) if self.image else values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self.values, torch.Tensor):
            batch = self.values.index_select(0, copy_to_device(rows, self.device))
            return batch.permute(0, 3, 1, 2) if self.image else batch
        batch = self.values.gather(rows)
        return to_device_layout(batch, self.dtype, self.device, self.image)


class BatchSource:
    """The samples of a worker: in memory, in mapped files, or loaded by the data batch by batch on the host.

    Args:
        data: The data.
        dtype: The dtype of real numbers.
        device: The device of batches.
        channels_last: Whether images are stored channels-last.
        test: Whether these are the test rows.
    """

    native_inputs: SampleStore | None = None
    """The inputs if inputs and targets are one tensor each, which native code reads directly."""

    def __init__(
        self, data: Any, dtype: torch.dtype, device: torch.device, channels_last: bool, *, test: bool = False
    ) -> None:
        self._fetch: Callable[..., Any] | None = getattr(data, "fetch_test" if test else "fetch", None)
        self._form = dtype, device, channels_last
        self.index_device = torch.device("cpu")  # from which row numbers are read without a copy
        if self._fetch is not None:
            return
        inputs, targets = (data.test_inputs, data.test_targets) if test else (data.inputs, data.targets)
        self._stores = Batch(
            trees.tree_map(lambda leaf: SampleStore(leaf, dtype, device, channels_last), inputs),
            trees.tree_map(lambda leaf: SampleStore(leaf, dtype, device, False), targets),
        )
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self.native_inputs = self._stores.inputs
        if all(isinstance(store.values, torch.Tensor) for store in trees.tree_leaves(self._stores)):
            self.index_device = device

    @property
    def labels(self) -> torch.Tensor:
        """All targets, if they are one tensor in memory."""
        targets: torch.Tensor = self._stores.targets.values
        return targets

    def batch(self, client: int | None, rows: torch.Tensor) -> Batch:
        """Return some rows of a client, or test rows, as a batch."""
        if self.native_inputs is not None:
            return Batch(self.native_inputs[rows], self.labels.index_select(0, rows))
        if self._fetch is not None:
            fetched = self._fetch(rows) if client is None else self._fetch(client, rows)
            return convert_batch(Batch(*fetched), *self._form)
        batch: Batch = trees.tree_map(lambda store: store[rows], self._stores)
        return batch


def to_device_layout(batch: torch.Tensor, dtype: torch.dtype, device: torch.device, image: bool) -> torch.Tensor:
    """Return a batch with the given dtype, device and memory layout."""
    batch = copy_to_device(batch, device, dtype)
    return batch.contiguous(memory_format=torch.channels_last) if image else batch.contiguous()


def convert_batch(batch: Batch, dtype: torch.dtype, device: torch.device, channels_last: bool) -> Batch:
    """Return a batch as a trainer takes it: real numbers with the given dtype, images channels-last if that is set."""

    def convert(leaf: Any, is_input: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        image = is_input and leaf.ndim == 4 and channels_last
        return to_device_layout(leaf, dtype if leaf.is_floating_point() else leaf.dtype, device, image)

    inputs = trees.tree_map(lambda leaf: convert(leaf, True), batch.inputs)
    return Batch(inputs, trees.tree_map(lambda leaf: convert(leaf, False), batch.targets))


def count_test_rows(data: Any) -> int:
    """Return the number of test rows."""
    if hasattr(data, "fetch_test"):
        return int(data.test_count)
    return 0 if data.test_inputs is None or data.test_targets is None else count_rows(data.test_targets)


def client_row_index(data: Any, clients: Sequence[int]) -> tuple[torch.Tensor, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return a contiguous int64 index and the range of each client's row numbers in it, [clients, 2].

    This is the data's own index if it has one, otherwise one built for these clients.
    """
    index: Any = getattr(data, "index", None)
    offsets: Any = getattr(data, "offsets", None)
    usable = all(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64 for tensor in (index, offsets))
    if usable and index.is_contiguous() and min(clients) >= 0 and max(clients) < len(offsets) - 1:
        ids, bounds = np.array(clients), offsets.numpy()
        return index, np.stack([bounds[ids], bounds[ids + 1]], axis=1)
    rows = [data.rows(client).to(torch.int64) for client in clients]
    stops = np.cumsum([len(numbers) for numbers in rows])
    return torch.cat(rows).contiguous(), np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)


def count_rows(tree: Tree) -> int:
    """Return the number of rows of a tensor, or of a tuple or dict of tensors.

    >>> count_rows({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    return len(trees.tree_leaves(tree)[0])


def take_rows(tree: Tree, rows: torch.Tensor) -> Tree:
    """Return some rows of every tensor."""

    def take(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) else leaf.gather(rows)

    return trees.tree_map(take, tree)


def has_rows(tree: Tree, count: int) -> bool:
    """Return whether a tree consists of tensors with one entry per row.

    >>> has_rows((torch.zeros(3), torch.zeros(3, 2)), 3), has_rows({"loss": torch.zeros(())}, 3)
    (True, False)
    """
    leaves = trees.tree_leaves(tree)
    return all(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count for leaf in leaves)


def example_batch(data: Any, max_rows: int) -> Batch:
    """Return a few rows spread over the data, or over the first client's rows if data is loaded on demand."""
    if hasattr(data, "fetch"):
        rows = data.rows(0)
        return Batch(*data.fetch(0, rows[_spread(len(rows), max_rows)]))
    return spread_rows(Batch(data.inputs, data.targets), max_rows)


def spread_rows(batch: Batch, max_rows: int) -> Batch:
    """Return a few rows, spread over all."""
    return Batch(*take_rows(tuple(batch), _spread(count_rows(batch.targets), max_rows)))


def _spread(count: int, max_rows: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(max_rows, count)).long()


def describe_shapes(tree: Tree) -> str:
    """Format dtypes and shapes for messages.

    >>> describe_shapes({"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.zeros(2, 3)})
    'ids: int64 [2, 3], mask: float32 [2, 3]'
    """
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"
    if isinstance(tree, dict):
        return ", ".join(f"{name}: {describe_shapes(subtree)}" for name, subtree in tree.items())
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(describe_shapes, tree))})"
    return type(tree).__name__


def all_client_rows(data: Any) -> Batch:
    """Return the rows of all clients, client after client."""
    if hasattr(data, "fetch"):
        raise HansaError(
            f"{getattr(data, 'name', 'data')}: is loaded on demand, so nothing can be measured over all of it."
        )
    rows = torch.cat([data.rows(client) for client in range(data.population)])
    return Batch(*take_rows((data.inputs, data.targets), rows))
