"""Data that is never there as a whole: batches put together as they are needed, clients made by a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, check_integer, short_repr
from hansa.core.keys import Key
from hansa.data.arrays import Clients, as_inputs, as_targets
from hansa.data.owners import split_of
from hansa.data.partitions import Partition, iid, natural, quantity_skew
from hansa.data.split import Split

Make: TypeAlias = Callable[[int], tuple[Any, Any]]
Collate: TypeAlias = Callable[[list[Any]], tuple[Any, Any]]


class Made:
    """Clients whose rows a function of their number makes, when they take part and not before; `by_function` gives it.

    >>> Made(lambda client: (np.ones((2, 3)), np.zeros(2)), torch.full((9,), 2), None, "tiny").rows(8).tolist()
    [0, 1]
    """

    def __init__(self, make: Make, sizes: torch.Tensor, test: tuple[Any, Any] | None, name: str) -> None:
        self.make, self.sizes, self.name = make, sizes, name
        self.population, self.classes = len(sizes), None
        self.test_inputs = None if test is None else as_inputs(name, "test x", test[0])
        self.test_targets = None if test is None else as_targets(name, "test y", test[1])
        self._last = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._last = threading.local()

    def __repr__(self) -> str:
        return f"{self.name}: {self.population} clients, made by {getattr(self.make, '__name__', 'a function')}"

    def samples(self, client: int) -> int:
        """How many rows one client holds."""
        if not 0 <= client < self.population:
            raise HansaError(f"{self.name}: client {client}: there are {self.population}, numbered from 0.")
        return int(self.sizes[client])

    def rows(self, client: int) -> torch.Tensor:
        """The row numbers of one client, its own from 0."""
        return torch.arange(self.samples(client))

    def fetch(self, client: int, rows: torch.Tensor) -> tuple[Any, Any]:
        """Some rows of a client. The client that was asked for last is remembered, in each thread."""
        if getattr(self._last, "client", None) != client:
            self._last.client, self._last.data = None, self.of(client)
            self._last.client = client
        return trees.tree_map(lambda leaf: leaf.index_select(0, rows.cpu()), self._last.data)  # type: ignore[no-any-return]

    def of(self, client: int) -> tuple[Any, Any]:
        """All inputs and targets of a client, made anew."""
        made = self.make(client)
        if not isinstance(made, tuple) or len(made) != 2:
            raise HansaError(f"{self.name}: make({client}) gave {short_repr(made)}: expected a pair (inputs, targets).")
        title = f"{self.name}, client {client}"
        inputs, targets = as_inputs(title, "x", made[0]), as_targets(title, "y", made[1])
        for leaf in trees.tree_leaves((inputs, targets)):
            if len(leaf) != self.samples(client):
                raise HansaError(f"{title}: make gave {len(leaf)} rows, samples says {self.samples(client)}.")
        return inputs, targets

    def identity(self) -> list[Any]:
        """What a run on it depends on."""
        return [self.make, self.sizes, self.test_inputs, self.test_targets]


def by_function(
    make: Make,
    *,
    clients: int,
    samples: int | Sequence[int] | torch.Tensor,
    test: tuple[Any, Any] | None = None,
    name: str = "clients",
) -> Made:
    """Federated data of which ``make(client)`` gives the inputs and targets of one client, as arrays or tensors.

    ``samples`` is how many rows a client has, for all or for each. Nothing is made before a client takes part, so a
    million clients cost eight megabytes. ``make`` must be a function of the number alone: one that draws does so from
    ``numpy.random.default_rng(client)`` or the like. It is called twice for client 0 to see that it is.

    >>> data = by_function(lambda client: (np.full((3, 2), client), np.zeros(3, int)), clients=1_000_000, samples=3)
    >>> data.population, data.fetch(7, torch.tensor([1]))[0].tolist()
    (1000000, [[7, 7]])
    """
    check_integer("by_function", "clients", clients)
    if isinstance(samples, int):
        check_integer("by_function", "samples", samples)
        sizes = torch.full((clients,), samples)
    else:
        sizes = torch.as_tensor(samples, dtype=torch.int64)
    if sizes.shape != (clients,) or int(sizes.min()) < 1:
        raise HansaError(
            f"by_function(samples): expected {clients} numbers of at least 1, found {short_repr(samples)}."
        )
    made = Made(make, sizes, test, name)
    first, again = (trees.tree_leaves(made.of(0)) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
        raise HansaError(
            f"{name}: make(0) gave other rows when it was asked again: it must be a function of the client's number. "
            "Draw from numpy.random.default_rng(client)."
        )
    return made


class Collated:
    """The items of a map-style dataset, put together to batches by a function; `collated` gives it.

    >>> pairs = [(1.0, 0), (2.0, 1), (3.0, 0)]
    >>> collated(pairs, lambda some: tuple(map(torch.tensor, zip(*some))), clients=[0, 0, 1]).samples(0)
    2
    """

    def __init__(self, items: Any, collate: Collate, split: Split, test: Any, name: str) -> None:
        self.items, self.collate, self.split, self.test, self.name = items, collate, split, test, name
        self.population, self.classes, self.sizes = split.population, None, split.sizes
        self.test_count = 0 if test is None else len(test)

    def __repr__(self) -> str:
        return f"{self.name}: {self.population} clients, {len(self.split.index)} items, {self.test_count} to test with"

    def samples(self, client: int) -> int:
        """How many items one client holds."""
        return len(self.rows(client))

    def rows(self, client: int) -> torch.Tensor:
        """The numbers of one client's items."""
        return self.split.rows(client)

    def fetch(self, client: int | None, rows: torch.Tensor) -> tuple[Any, Any]:
        """Some items as one batch."""
        return self._batch(self.items, rows)

    def fetch_test(self, rows: torch.Tensor) -> tuple[Any, Any]:
        """Some test items as one batch."""
        return self._batch(self.test, rows)

    def _batch(self, items: Any, rows: torch.Tensor) -> tuple[Any, Any]:
        numbers = rows.tolist()
        listed = items.__getitems__(numbers) if hasattr(items, "__getitems__") else [items[i] for i in numbers]
        made = self.collate(listed)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise HansaError(f"{self.name}: collate gave {short_repr(made)}: expected a pair (inputs, targets).")
        return made[0], made[1]

    def identity(self) -> list[Any]:
        """What a run on it depends on. Items are not looked through: how many there are, a few, and their cache."""
        few = [str(self.items[i]) for i in range(0, len(self.items), max(1, len(self.items) // 8))]
        print_ = getattr(self.items, "_fingerprint", None)  # of a Hugging Face dataset
        return [len(self.items), few, print_, self.test_count, self.collate, self.split.index, self.split.offsets]


def collated(
    items: Any,
    collate: Collate,
    *,
    clients: Clients,
    how: Partition | None = None,
    seed: int = 0,
    labels: Any = None,
    test: Any = None,
    name: str | None = None,
) -> Collated:
    """Federated data from a map-style dataset whose items are read when a batch needs them: sequences of any length, a
    Hugging Face dataset in its Arrow files, anything larger than memory.

    ``collate(items)`` makes a batch (inputs, targets) of a list of items: it pads, tokenizes, stacks. ``clients`` and
    ``how`` are as in `from_arrays`; a partition by labels needs them as ``labels``.

    >>> words = [[1, 2], [3], [4, 5, 6]]
    >>> pad = torch.nn.utils.rnn.pad_sequence
    >>> data = collated(words, lambda some: (pad([torch.tensor(w) for w in some], True), torch.zeros(len(some))),
    ...                 clients=[0, 1, 0])
    >>> data.fetch(0, torch.tensor([0, 2]))[0].tolist()
    [[1, 2, 0], [4, 5, 6]]
    """
    title = name if name is not None else type(items).__name__
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or not len(items):
        raise HansaError(f"{title}: expected items with a length that can be asked for by number, and at least one.")
    if isinstance(clients, (int, np.integer)):
        how = iid() if how is None else how
        if labels is None and not isinstance(how, (iid, natural, quantity_skew)):
            raise HansaError(f"{title}: {how!r} deals by labels: give labels=, one a row.")
        marks = torch.zeros(len(items)) if labels is None else torch.as_tensor(np.asarray(labels))
        split = how.split(marks, int(clients), Key(seed).child("partition"), None)
    elif how is not None:
        raise HansaError(f"{title}: clients already say who holds what; give their number to deal by {how!r}.")
    else:
        split = split_of(title, clients, len(items))
    return Collated(items, collate, split, test, title)
