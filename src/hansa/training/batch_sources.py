"""The samples of a task: what it asks of federated data, and how a worker makes batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key

Tree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of tensors, each with one entry a row."""


class ClientData(Protocol):
    """What a task asks of federated data: inputs, targets, and each client's rows of them.

    Data that is not there as a whole has ``fetch(client, rows)`` instead, which gives the inputs and targets of some
    rows of a client, and ``fetch_test(rows)`` with ``test_count`` where there is a test set; see `hansa.data.Fetched`.
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


class Batch(NamedTuple):
    """Inputs and targets of some rows."""

    inputs: Tree
    targets: Tree


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of a client's round, [steps, batch], with the address at which they are augmented.

    ``batches[t]`` is the batch of a step, ``batches[t : u]`` those of some.
    """

    client: int
    rows: torch.Tensor
    key: Key
    first: int = 0

    def __getitem__(self, which: int | slice) -> Batches:
        start = which.start or 0 if isinstance(which, slice) else which
        return replace(self, rows=self.rows[which], first=self.first + start)

    def __len__(self) -> int:
        return len(self.rows)

    def address(self, step: int = 0) -> Key:
        """Where the augmentation of a step draws."""
        return self.key.child(self.first + step)


class Store:
    """Inputs as a worker keeps them: images lie channels-last, so that a gathered batch is channels-last for free,
    unless the model cannot work with it. What is mapped from a file stays there and is converted batch by batch."""

    def __init__(self, inputs: Any, dtype: torch.dtype, device: torch.device, channels_last: bool = True) -> None:
        self.dtype, self.device = dtype if inputs.dtype.is_floating_point else inputs.dtype, device
        self.image = inputs.ndim == 4 and channels_last
        self.values: Any = inputs
        if not isinstance(inputs, torch.Tensor):
            return
        inputs = inputs.to(self.dtype)
        if self.image:
            inputs = inputs.permute(0, 2, 3, 1)
        self.values = inputs.contiguous().to(device)

    @property
    def logical(self) -> torch.Tensor:
        """All inputs in the shape the model knows, whatever their order in memory."""
        values: torch.Tensor = self.values
        return values.permute(0, 3, 1, 2) if self.image else values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self.values, torch.Tensor):
            batch = self.values.index_select(0, rows)
            return batch.permute(0, 3, 1, 2) if self.image else batch
        found: torch.Tensor = self.values.gather(rows)
        return placed(found, self.dtype, self.device, self.image)


class Held:
    """Samples that are there as a whole, by row."""

    def __init__(
        self, inputs: Tree, targets: Tree, dtype: torch.dtype, device: torch.device, channels_last: bool
    ) -> None:
        leaves, self._form = trees.tree_flatten(inputs)
        self._stores = [Store(leaf, dtype, device, channels_last) for leaf in leaves]
        marks, self._target_form = trees.tree_flatten(targets)
        self._targets = [Store(mark, dtype, device, False) for mark in marks]
        self.one = self._stores[0] if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor) else None
        """The inputs where they are one tensor in memory, which native code reads directly."""

    @property
    def labels(self) -> torch.Tensor:
        """All targets, where they are one tensor in memory."""
        found: torch.Tensor = self._targets[0].values
        return found

    def batch(self, client: int | None, rows: torch.Tensor) -> Batch:
        """Some rows."""
        if self.one is not None:
            return Batch(self.one[rows], self.labels.index_select(0, rows))
        inputs = trees.tree_unflatten([store[rows] for store in self._stores], self._form)
        return Batch(inputs, trees.tree_unflatten([store[rows] for store in self._targets], self._target_form))


class Asked:
    """Samples that the data hands out batch by batch."""

    one: Store | None = None

    def __init__(
        self, fetch: Callable[[Any, torch.Tensor], Any], dtype: torch.dtype, device: torch.device, channels_last: bool
    ) -> None:
        self._fetch, self._dtype, self._device, self._channels_last = fetch, dtype, device, channels_last

    def batch(self, client: int | None, rows: torch.Tensor) -> Batch:
        """Some rows of a client."""
        inputs, targets = self._fetch(client, rows)
        move = self._leaf
        return Batch(trees.tree_map(move, inputs), trees.tree_map(lambda leaf: move(leaf, False), targets))

    def _leaf(self, leaf: Any, is_input: bool = True) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        image = is_input and leaf.ndim == 4 and self._channels_last
        return placed(leaf, self._dtype if leaf.is_floating_point() else leaf.dtype, self._device, image)


class Through:
    """Samples of another source, changed on the way."""

    one: Store | None = None

    def __init__(self, source: Held | Asked, change: Callable[[Batch], Batch]) -> None:
        self._source, self._change = source, change

    def batch(self, client: int | None, rows: torch.Tensor) -> Batch:
        """Some rows, changed."""
        return self._change(self._source.batch(client, rows))


Source: TypeAlias = Held | Asked | Through


def placed(batch: torch.Tensor, dtype: torch.dtype, device: torch.device, image: bool) -> torch.Tensor:
    """A batch where and as it is needed."""
    batch = batch.to(device=device, dtype=dtype)
    return batch.contiguous(memory_format=torch.channels_last) if image else batch.contiguous()


def train_source(data: Any, dtype: torch.dtype, device: torch.device, channels_last: bool) -> Held | Asked:
    """Where batches to train on come from."""
    if hasattr(data, "fetch"):
        return Asked(data.fetch, dtype, device, channels_last)
    return Held(data.inputs, data.targets, dtype, device, channels_last)


def evaluation_source(data: Any, dtype: torch.dtype, device: torch.device, channels_last: bool) -> Held | Asked:
    """Where test rows come from."""
    if hasattr(data, "fetch_test"):
        return Asked(lambda _, rows: data.fetch_test(rows), dtype, device, channels_last)
    return Held(data.test_inputs, data.test_targets, dtype, device, channels_last)


def evaluation_rows(data: Any) -> int:
    """How many test rows there are."""
    if hasattr(data, "fetch_test"):
        return int(data.test_count)
    return 0 if data.test_inputs is None or data.test_targets is None else rows_of(data.test_targets)


def own_rows(data: Any, clients: Sequence[int]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """A contiguous index in int64, and where in it the row numbers of each client are: the data's own where it has one
    for all, otherwise one made for these clients."""
    index: Any = getattr(data, "index", None)
    offsets: Any = getattr(data, "offsets", None)
    plain = all(isinstance(one, torch.Tensor) and one.dtype == torch.int64 for one in (index, offsets))
    if plain and index.is_contiguous() and min(clients) >= 0 and max(clients) < len(offsets) - 1:
        chosen, ends = np.array(clients), offsets.numpy()
        return index, list(zip(ends[chosen].tolist(), ends[chosen + 1].tolist(), strict=True))
    owned = [data.rows(client).to(torch.int64) for client in clients]
    stops = list(accumulate(map(len, owned)))
    return torch.cat(owned).contiguous(), list(zip([0, *stops[:-1]], stops, strict=True))


def rows_of(tree: Tree) -> int:
    """How many rows a tensor, or a tuple or dict of tensors, has.

    >>> rows_of({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    return len(trees.tree_leaves(tree)[0])


def take_rows(tree: Tree, rows: torch.Tensor) -> Tree:
    """Some rows of every tensor."""

    def take(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) else leaf.gather(rows)

    return trees.tree_map(take, tree)


def some(data: Any, most: int) -> Batch:
    """A few rows from all over the data, to look at a model with; of data by function, rows of the first client."""
    if hasattr(data, "fetch"):
        own = data.rows(0)
        inputs, targets = data.fetch(0, own[_spread(len(own), most)])
        return Batch(inputs, targets)
    rows = _spread(rows_of(data.targets), most)
    return Batch(take_rows(data.inputs, rows), take_rows(data.targets, rows))


def _spread(count: int, most: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(most, count)).long()


def described(tree: Tree) -> str:
    """Shapes and kinds of numbers, in words.

    >>> described({"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.zeros(2, 3)})
    'ids: int64 [2, 3], mask: float32 [2, 3]'
    """
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"
    if isinstance(tree, dict):
        return ", ".join(f"{name}: {described(inner)}" for name, inner in tree.items())
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(described, tree))})"
    return type(tree).__name__


def whole_data(data: Any) -> Batch:
    """All rows that clients hold, client after client."""
    if hasattr(data, "fetch"):
        raise HansaError(f"{getattr(data, 'name', 'data')}: is never there as a whole, so nothing is measured over it.")
    rows = torch.cat([data.rows(client) for client in range(data.population)])
    return Batch(take_rows(data.inputs, rows), take_rows(data.targets, rows))
