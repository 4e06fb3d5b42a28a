"""Federated data of your own: arrays, datasets of torch and Hugging Face, mapped files, items, a function."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from hansa.core import trees
from hansa.core.errors import HansaError, check_integer, short_repr, suggestion
from hansa.data.federated import (
    Dataset,
    FederatedData,
    apply_split,
    partition_dataset,
    test_owner_numbers,
    with_test_clients,
)
from hansa.data.partitions import Partition, Split, iid, natural, parse_clients
from hansa.data.sources import DataError, invalid_file
from hansa.training.losses import WeightedTargets

log = logging.getLogger("hansa")

IGNORED = -100
"""The label that torch's losses ignore by default; allowed if a row has several targets."""

Clients: TypeAlias = "int | Split | Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor"


def from_arrays(
    x: Any,
    y: Any,
    *,
    clients: Clients,
    partition: Partition | None = None,
    seed: int | None = None,
    test: tuple[Any, ...] | None = None,
    test_clients: Any = None,
    weights: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "arrays",
) -> FederatedData:
    """Federated data from a pair of NumPy or torch arrays.

    Args:
        x: Inputs: an array, or a dict or tuple of arrays of equal length, as a tokenizer returns them. uint8 becomes
            ``dtype`` / 255, floats ``dtype``, other integers int64.
        y: Targets: class numbers, floats for regression, or several numbers per row for several labels or a sequence,
            of which -100 is ignored by losses. Also a dict or tuple of arrays.
        clients: The number of clients, the client of every row (numbers from 0 or names, as an array, a list, a tuple
            or a pandas Series), or one list of row numbers per client.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        test: The test set, (x, y) or (x, y, weights).
        test_clients: The client of every test row, as in ``clients`` (-1 for none), for per-client evaluation; or
            ``"labels"`` or a fraction, as in `with_test_clients`.
        weights: The weight of every row in the loss.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> from_arrays(np.zeros((6, 2)), np.array([0, 1, 0, 1, 0, 1]), clients=[[0, 1], [2, 3, 4]]).sizes.tolist()
    [2, 3]
    """
    data = dataset(x, y, test=test, weights=weights, classes=classes, dtype=dtype, name=name)
    federated = assign_clients(data, clients, partition, seed)
    if test_clients is None:
        return federated
    if isinstance(test_clients, (str, float, int)):
        return with_test_clients(federated, test_clients, seed)  # type: ignore[arg-type]
    return replace(federated, test_owners=test_owner_numbers(federated, test_clients))


def dataset(
    x: Any,
    y: Any,
    *,
    test: tuple[Any, ...] | None = None,
    weights: Any = None,
    groups: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "arrays",
) -> Dataset:
    """A data set from a pair of arrays; raises for unequal lengths, non-finite numbers and negative labels.

    Args:
        x: Inputs, as in `from_arrays`.
        y: Targets, as in `from_arrays`.
        test: The test set, (x, y) or (x, y, weights).
        weights: The weight of every row in the loss.
        groups: The natural owner of every row, a number.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> dataset([[0.0], [1.0]], [0, 1]).classes
    2
    """
    inputs, targets = as_tensors(name, "x", x, dtype), as_tensors(name, "y", y, dtype, targets=True)
    test = (None, None) if test is None else test
    if len(test) not in (2, 3):
        raise HansaError(f"{name}: test has {len(test)} entries: expected (x, y), or (x, y, weights).")
    test_inputs = None if test[0] is None else as_tensors(name, "test x", test[0], dtype)
    test_targets = None if test[1] is None else as_tensors(name, "test y", test[1], dtype, targets=True)
    classes = _count_classes(targets, test_targets) if classes is None else classes
    if weights is not None:
        targets = WeightedTargets(targets, _check_weights(name, weights, dtype))
    if len(test) == 3:
        test_targets = WeightedTargets(test_targets, _check_weights(name, test[2], dtype))
    elif weights is not None and test_targets is not None:
        test_targets = WeightedTargets(test_targets, torch.ones(len(test[1]), dtype=dtype))
    owners = None if groups is None else torch.as_tensor(np.asarray(groups), dtype=torch.int64)
    return Dataset(name, inputs, targets, test_inputs, test_targets, classes, owners)


def _count_classes(targets: Any, test_targets: Any) -> int | None:
    """Return the number of classes if targets are class numbers, one per row."""
    if not isinstance(targets, torch.Tensor) or targets.ndim != 1 or targets.is_floating_point() or not len(targets):
        return None
    return max(int(labels.max()) for labels in (targets, test_targets) if labels is not None) + 1


def from_dataset(
    data: Any,
    *,
    clients: Clients,
    partition: Partition | None = None,
    seed: int | None = None,
    test: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
) -> FederatedData:
    """Federated data from a ``torch.utils.data.Dataset`` of (input, target) pairs, read once into tensors.

    Transforms are applied once; random ones are frozen, with a warning. Images (PIL, or uint8 [H, W, C]) become
    [C, H, W] / 255.

    Args:
        data: The dataset.
        clients: As in `from_arrays`.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        test: The test set, a dataset of pairs.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages; by default the class of the dataset.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from_dataset(TensorDataset(torch.rand(6, 2), torch.arange(6) % 2), clients=3).population
    3
    """
    title = name if name is not None else type(data).__name__
    x, y = _read_pairs(title, data)
    test_pair = None if test is None else _read_pairs(f"{title} (test)", test)
    return from_arrays(
        x, y, clients=clients, partition=partition, seed=seed, test=test_pair, classes=classes, dtype=dtype, name=title
    )


def assign_clients(data: Dataset, clients: Clients, partition: Partition | None, seed: int | None) -> FederatedData:
    """Return the data set assigned to clients, in any form of `from_arrays`."""
    if isinstance(clients, (int, np.integer)) and not isinstance(clients, bool):
        clients = int(clients)
        return partition_dataset(data, iid() if partition is None else partition, clients, seed)
    if partition is not None:
        raise HansaError(f"{data.name}: clients already assign the rows: leave out {partition!r}.")
    split, names = (clients, ()) if isinstance(clients, Split) else parse_clients(data.name, clients, data.rows)
    federated = apply_split(data, split)
    return replace(federated, client_names=names) if names else federated


def _check_weights(name: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    weights = _check_finite(name, "weights", _tensor(name, "weights", values).to(dtype))
    if weights.ndim != 1 or bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise HansaError(f"{name}: weights: expected one non-negative number per row, some above 0.")
    return weights


def as_tensors(name: str, which: str, values: Any, dtype: torch.dtype = torch.float32, *, targets: bool = False) -> Any:
    """Convert arrays, or dicts and tuples of arrays, to tensors of inputs or of targets."""
    if isinstance(values, Mapping):
        return {str(key): as_tensors(name, f"{which}[{key!r}]", value, dtype, targets=targets)
                for key, value in values.items()}  # fmt: skip
    if isinstance(values, tuple) and values and all(hasattr(value, "shape") for value in values):
        return tuple(as_tensors(name, f"{which}[{index}]", value, dtype, targets=targets)
                     for index, value in enumerate(values))  # fmt: skip
    tensor = _tensor(name, which, values)
    if tensor.is_floating_point():
        return _check_finite(name, which, tensor.to(dtype))
    if not targets:
        pixels = tensor.dtype == torch.uint8
        return tensor.to(dtype).div_(255) if pixels else tensor.to(dtype if tensor.dtype == torch.bool else torch.int64)
    tensor = tensor.to(torch.int64)
    labels = tensor if tensor.ndim == 1 else tensor[tensor != IGNORED]
    if labels.numel() and int(labels.min()) < 0:
        raise HansaError(f"{name}: {which} contains the label {int(labels.min())}: expected labels from 0.")
    return tensor


def _tensor(name: str, which: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise HansaError(f"{name}: {which} has rows of different lengths: pad them to one length.") from error
    if array.dtype.kind not in "biuf":
        columns = values.dtypes.items() if array.ndim == 2 and hasattr(values, "columns") else ()
        text = next((f"column {column!r} of {which} is {kind}" for column, kind in columns
                     if not isinstance(kind, np.dtype) or kind.kind not in "iuf"),
                    f"{which} is an array of {array.dtype}")  # fmt: skip
        raise HansaError(f"{name}: {text}: expected numbers of NumPy's types, all rows of one shape.")
    return torch.from_numpy(np.require(array, requirements=("C", "W")))  # pandas' arrays cannot be written to


def _check_finite(name: str, which: str, values: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row = int(torch.nonzero(~(finite.flatten(1).all(1) if values.ndim > 1 else finite))[0])
        raise HansaError(f"{name}: {which}, row {row}, has a NaN or infinite number. Fix or drop the row.")
    return values


_REREAD = 64  # rows of a dataset that are read twice


def _read_pairs(name: str, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all items of a dataset of pairs as two tensors."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if isinstance(data, DataLoader):
        raise HansaError(f"{name}: expected a dataset, not what makes batches of one: pass loader.dataset.")
    if not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise HansaError(f"{name}: expected a dataset of pairs (input, target).")
    has_length = hasattr(data, "__len__")
    items = [data[row] for row in range(len(data))] if has_length else list(data)
    for position, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise HansaError(f"{name}: item {position} is a {type(item).__name__}: expected a pair (input, target).")
    if not items:
        raise HansaError(f"{name}: is empty.")
    inputs, targets = zip(*items, strict=True)
    rows = stack_rows(name, inputs)
    repeated = [data[row] for row in range(min(_REREAD, len(items)))] if has_length else []
    if not all(
        np.array_equal(a, b) for pairs in zip(items, repeated, strict=False) for a, b in zip(*pairs, strict=True)
    ):
        log.warning("%s: two reads of one row differ, and each row is read once: leave random transforms out of the "
                    "dataset and pass them as Task(augment=...)", name)  # fmt: skip
    try:
        return rows, torch.stack([torch.as_tensor(target) for target in targets])
    except (RuntimeError, TypeError, ValueError) as error:
        raise HansaError(f"{name}: targets are no numbers of one shape: {error}.") from error


def stack_rows(name: str, values: Iterable[Any]) -> torch.Tensor:
    """Stack rows of one shape; images become channels-first."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return _tensor(name, "x", values)
    values = list(values)
    if values and isinstance(values[0], (int, float)):
        return _tensor(name, "x", values)
    rows = [_row(name, position, value) for position, value in enumerate(values)]
    for position, row in enumerate(rows):
        if row.shape != rows[0].shape:
            shape, first_shape = tuple(row.shape), tuple(rows[0].shape)
            raise HansaError(f"{name}: input {position} has shape {shape}, the first {first_shape}: resize or pad.")
    return torch.stack(rows)


def _row(name: str, position: int, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    image = hasattr(value, "getbands")  # PIL, without importing it
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        raise HansaError(f"{name}: input {position} is {value!r}: expected numbers or an image. Tokenize text first.")
    if image and array.ndim == 2:
        array = array[None]
    elif array.dtype == np.uint8 and array.ndim == 3 and (image or array.shape[-1] in (1, 3)):
        array = np.ascontiguousarray(array.transpose(2, 0, 1))
    return torch.from_numpy(array)


# ---- arrays that stay in their files and are read row by row

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # of a file, for its identity


class MemmapArray:
    """An array in a .npy file whose rows are read when a batch needs them.

    Workers receive the path, not the data. Bytes become float32 / 255, as everywhere.

    Args:
        path: The file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(6.0).reshape(3, 2))
    ...     MemmapArray(f"{folder}/x.npy").gather(torch.tensor([2])).tolist()
    [[4.0, 5.0]]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        try:
            self.array: Any = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as problem:
            raise invalid_file(path, "a .npy file of numbers", problem) from problem
        if not isinstance(self.array, np.memmap) or self.array.dtype.kind not in "iuf" or self.array.ndim < 1:
            raise invalid_file(path, "numbers, one entry per row", f"{type(self.array).__name__} of other content")

    def __reduce__(self) -> tuple[Any, ...]:
        return MemmapArray, (self.path,)

    def __repr__(self) -> str:
        return f"MemmapArray({str(self.path)!r})"

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(self.array.ndim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows that `gather` returns."""
        if self.array.dtype == np.uint8 or self.array.dtype.kind == "f":
            return torch.float64 if self.array.dtype.itemsize == 8 else torch.float32
        return torch.int64

    def is_floating_point(self) -> bool:
        """Return whether rows are floating point."""
        return self.dtype.is_floating_point

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows as a tensor."""
        array = self.array[rows.cpu().numpy()]
        values = torch.from_numpy(array.astype(str(self.dtype).removeprefix("torch."), order="C"))
        return values.div_(255) if array.dtype == np.uint8 else values

    def identity(self) -> str:
        """Return a digest of size, type, shape and 64 blocks of the file, which identifies the data of a run."""
        state = hashlib.sha256(f"{self.path.name} {self.array.dtype} {self.array.shape}".encode())
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            state.update(str(size).encode())
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                state.update(file.read(_BLOCK_BYTES))
        return state.hexdigest()


def from_memmap(
    folder: Path | str,
    *,
    clients: Any = None,
    partition: Any = None,
    seed: int | None = None,
    classes: int | None = None,
) -> FederatedData:
    """Federated data from arrays that stay on disk.

    The files are ``inputs.npy`` and ``targets.npy``, and optionally ``owners.npy``, ``test_inputs.npy`` and
    ``test_targets.npy``. Files ``inputs.NAME.npy`` form a dict. Inputs, and targets of several numbers per row, are
    read batch by batch and not checked beforehand.

    Args:
        folder: A folder of .npy files.
        clients: As in `from_arrays`; by default the array ``owners``.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        classes: Number of classes; by default from the targets.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/inputs.npy", np.zeros((6, 2), np.float32))
    ...     np.save(f"{folder}/targets.npy", np.arange(6) % 2)
    ...     from_memmap(folder, clients=3).population
    3
    """
    arrays: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.npy")):
        group, _, entry = path.stem.partition(".")
        if entry:
            arrays.setdefault(group, {})[entry] = MemmapArray(path)
        else:
            arrays[group] = MemmapArray(path)
    for name in ("inputs", "targets"):
        if name not in arrays:
            found = ", ".join(arrays) or "nothing"
            raise DataError(f"{folder}: no {name}: expected inputs.npy and targets.npy, found {found}.")
    targets, test_targets = _load_small(arrays["targets"]), _load_small(arrays.get("test_targets"))
    classes = _count_classes(targets, test_targets) if classes is None else classes
    data = Dataset(Path(folder).name, arrays["inputs"], targets, arrays.get("test_inputs"), test_targets, classes)
    if clients is None:
        if "owners" not in arrays:
            raise HansaError(f"{folder}: expected clients=, or an array owners.")
        clients = arrays["owners"].array[:]
    return assign_clients(data, clients, partition, seed)


def _load_small(array: Any) -> Any:
    """Load class numbers and single values, which partitions need; all else stays on disk."""
    if isinstance(array, MemmapArray) and array.ndim == 1:
        return array.gather(torch.arange(len(array)))
    return array


# ---- data that is loaded on demand: items collated batch by batch, or clients generated by a function

MakeClient: TypeAlias = Callable[[int], tuple[Any, Any]]
CollateFunction: TypeAlias = Callable[[list[Any]], tuple[Any, Any]]
_LAST = threading.local()  # the client that each thread has generated last


def _check_pair(title: str, pair: Any) -> tuple[Any, Any]:
    """Return what a user's function returned, or raise."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise HansaError(f"{title}: your function returned {short_repr(pair)}: expected a pair (inputs, targets).")
    return pair[0], pair[1]


class GeneratedData:
    """Data that a function generates per participant; see `from_function`.

    >>> GeneratedData(lambda client: (np.ones((2, 3)), np.zeros(2)), torch.full((9,), 2), None, "tiny").rows(8).tolist()
    [0, 1]
    """

    def __init__(self, make_client: MakeClient, sizes: torch.Tensor, test: tuple[Any, Any] | None, name: str) -> None:
        self.make_client, self.sizes, self.name = make_client, sizes, name
        self.population, self.classes = len(sizes), None
        self.test_inputs = None if test is None else as_tensors(name, "test x", test[0])
        self.test_targets = None if test is None else as_tensors(name, "test y", test[1], targets=True)

    def __repr__(self) -> str:
        function = getattr(self.make_client, "__name__", "a function")
        return f"{self.name}: {self.population} clients, generated by {function}"

    def samples(self, client: int) -> int:
        """Return the number of rows of one client."""
        if not 0 <= client < self.population:
            raise HansaError(f"{self.name}: client {client}: there are {self.population}, numbered from 0.")
        return int(self.sizes[client])

    def rows(self, client: int) -> torch.Tensor:
        """Return the row numbers of one client, from 0."""
        return torch.arange(self.samples(client))

    def fetch(self, client: int, rows: torch.Tensor) -> tuple[Any, Any]:
        """Return some rows of a client. Each thread caches its last client."""
        cached = getattr(_LAST, "generated", None)
        if cached is None or cached[:2] != (self, client):
            _LAST.generated = None
            _LAST.generated = cached = self, client, self.generate(client)
        return trees.tree_map(lambda leaf: leaf.index_select(0, rows.cpu()), cached[2])  # type: ignore[no-any-return]

    def generate(self, client: int) -> tuple[Any, Any]:
        """Return all inputs and targets of a client."""
        title = f"{self.name}, client {client}"
        pair = _check_pair(title, self.make_client(client))
        inputs, targets = as_tensors(title, "x", pair[0]), as_tensors(title, "y", pair[1], targets=True)
        for leaf in trees.tree_leaves((inputs, targets)):
            if len(leaf) != self.samples(client):
                raise HansaError(f"{title}: {len(leaf)} rows, but samples is {self.samples(client)}.")
        return inputs, targets

    def identity(self) -> list[Any]:
        """Return the identity of the data, for the run's record."""
        return [self.make_client, self.sizes, self.test_inputs, self.test_targets]


def from_function(
    make_client: MakeClient,
    *,
    clients: int,
    samples: int | Sequence[int] | torch.Tensor,
    test: tuple[Any, Any] | None = None,
    name: str = "clients",
) -> GeneratedData:
    """Federated data that a function generates client by client.

    Only participants' data is generated, so a million clients need eight megabytes.

    Args:
        make_client: ``make_client(client)`` returns inputs and targets of one client, as arrays or tensors. It must
            depend on the client number only: draw from ``numpy.random.default_rng(client)``, for example. It is called
            twice for client 0 to check this.
        clients: Number of clients.
        samples: Number of rows of each client, one number for all or one each.
        test: The test set, (inputs, targets).
        name: Name for messages.

    >>> data = from_function(lambda client: (np.full((3, 2), client), np.zeros(3, int)), clients=1_000_000, samples=3)
    >>> data.population, data.fetch(7, torch.tensor([1]))[0].tolist()
    (1000000, [[7, 7]])
    """
    check_integer("from_function", "clients", clients)
    if isinstance(samples, int):
        check_integer("from_function", "samples", samples)
        sizes = torch.full((clients,), samples)
    else:
        sizes = torch.as_tensor(samples, dtype=torch.int64)
    if sizes.shape != (clients,) or int(sizes.min()) < 1:
        raise HansaError(f"from_function(samples): expected {clients} numbers >= 1, found {short_repr(samples)}.")
    data = GeneratedData(make_client, sizes, test, name)
    first_leaves, second_leaves = (trees.tree_leaves(data.generate(0)) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(first_leaves, second_leaves, strict=True)):
        problem = "make_client(0) returned different rows in a second call"
        raise HansaError(f"{name}: {problem}. Draw from numpy.random.default_rng(client).")
    return data


class CollatedData:
    """Items of a map-style dataset that a function collates to batches; see `from_items`.

    >>> pairs = [(1.0, 0), (2.0, 1), (3.0, 0)]
    >>> from_items(pairs, lambda some: tuple(map(torch.tensor, zip(*some))), clients=[0, 0, 1]).samples(0)
    2
    """

    def __init__(
        self,
        items: Any,
        collate_fn: CollateFunction,
        split: Split,
        test: Any,
        name: str,
        test_owners: torch.Tensor | None = None,
    ) -> None:
        self.test_owners = test_owners
        self.items, self.collate_fn, self.split, self.test, self.name = items, collate_fn, split, test, name
        self.population, self.classes, self.sizes = split.population, None, split.sizes
        self.test_count = 0 if test is None else len(test)

    def __repr__(self) -> str:
        return f"{self.name}: {self.population} clients, {len(self.split.index)} items, {self.test_count} test items"

    def samples(self, client: int) -> int:
        """Return the number of items of one client."""
        return len(self.rows(client))

    def rows(self, client: int) -> torch.Tensor:
        """Return the item numbers of one client."""
        return self.split.rows(client)

    def fetch(self, client: int | None, rows: torch.Tensor) -> tuple[Any, Any]:
        """Return some items as one batch."""
        return self._batch(self.items, rows)

    def fetch_test(self, rows: torch.Tensor) -> tuple[Any, Any]:
        """Return some test items as one batch."""
        return self._batch(self.test, rows)

    def _batch(self, items: Any, rows: torch.Tensor) -> tuple[Any, Any]:
        numbers = rows.tolist()
        selected = items.__getitems__(numbers) if hasattr(items, "__getitems__") else [items[i] for i in numbers]
        return _check_pair(self.name, self.collate_fn(selected))

    def identity(self) -> list[Any]:
        """Return the identity of the data: the number of items, a few of them, and their fingerprint."""
        examples = [str(self.items[i]) for i in range(0, len(self.items), max(1, len(self.items) // 8))]
        fingerprint = getattr(self.items, "_fingerprint", None)  # of a Hugging Face dataset
        facts = [len(self.items), examples, fingerprint, self.test_count, self.collate_fn]
        return [*facts, self.split.index, self.split.offsets]


def from_items(
    items: Any,
    collate_fn: CollateFunction,
    *,
    clients: Clients,
    partition: Partition | None = None,
    seed: int = 0,
    labels: Any = None,
    test: Any = None,
    test_clients: Any = None,
    name: str | None = None,
) -> CollatedData:
    """Federated data from a map-style dataset whose items are read when a batch needs them.

    Use it for sequences of any length, a Hugging Face dataset in its Arrow files, or anything larger than memory.

    Args:
        items: A sequence of items.
        collate_fn: Returns a batch (inputs, targets) for a list of items: it pads, tokenizes and stacks.
        clients: As in `from_arrays`.
        partition: How items are assigned to a number of clients; default iid.
        seed: Seed of the partition.
        labels: The label of every item, for a partition by labels.
        test: A sequence of test items.
        test_clients: The client of every test item, as in ``clients`` (-1 for none), for per-client evaluation.
        name: Name for messages; by default the class of ``items``.

    >>> words = [[1, 2], [3], [4, 5, 6]]
    >>> pad = torch.nn.utils.rnn.pad_sequence
    >>> data = from_items(words, lambda some: (pad([torch.tensor(w) for w in some], True), torch.zeros(len(some))),
    ...                 clients=[0, 1, 0])
    >>> data.fetch(0, torch.tensor([0, 2]))[0].tolist()
    [[1, 2, 0], [4, 5, 6]]
    """
    title = name if name is not None else type(items).__name__
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or not len(items):
        raise HansaError(f"{title}: expected a sequence with at least one item.")
    targets = torch.zeros(len(items)) if labels is None else torch.as_tensor(np.asarray(labels))
    tests = torch.zeros(len(test), 1) if test is not None and len(test) else None
    rows = Dataset(title, torch.zeros(len(items), 1), targets, tests, tests)
    federated = assign_clients(rows, clients, partition, seed)
    owners = None if test_clients is None else test_owner_numbers(federated, test_clients)
    return CollatedData(items, collate_fn, federated.split, test, title, owners)


# ---- Hugging Face: datasets by their columns, partitioners of flwr-datasets, collated items

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
            part = type(clients).__name__
            raise HansaError(f"{name}: {part} assigns the rows: leave out partition= and client_column=.")
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
    pairs = [(_inputs(name, each, input_column, dtype), _labels(name, each, label_column))
             for each in (data, test) if each is not None]  # fmt: skip
    tests = pairs[1] if test is not None else None
    whole = dataset(*pairs[0], test=tests, groups=groups, classes=classes, dtype=dtype, name=name)
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
