"""Partitions of rows over clients. Each assigns every row at most once, and equally for equal keys.

The rows of each client as one index and its offsets: of owners or lists, in memory and in a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from hansa.core.bounds import Checked, bound, floor_share
from hansa.core.errors import (
    HansaError,
    check_fraction,
    check_integer,
    check_non_negative,
    check_positive,
    invalid_argument,
)
from hansa.core.keys import Key

if TYPE_CHECKING:
    import numpy.typing as npt


import hashlib
import json
import os
import reprlib
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hansa.core import trees
from hansa.data.sources import DataError, invalid_file, missing_file
from hansa.training.batch_sources import count_rows

if TYPE_CHECKING:
    import numpy.typing as npt


_FORMAT = "hansa partition 2"
_MAX_HEADER = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The rows of each client: client i has ``index[offsets[i]:offsets[i + 1]]``.

    Args:
        index: Row numbers, int64.
        offsets: Where each client begins in ``index``, int64 [clients + 1].

    >>> Split.of_rows([[4, 2], [], [0]]).rows(0).tolist()
    [4, 2]
    """

    index: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("index", self.index), ("offsets", self.offsets)):
            if tensor.dtype != torch.int64 or tensor.ndim != 1:
                raise HansaError(f"Split({name}): expected int64 with one axis, found {tensor.dtype}, {tensor.ndim}.")
        stops, rows = self.offsets, len(self.index)
        if len(stops) < 2 or int(stops[0]) != 0 or int(stops[-1]) != rows or bool((stops[1:] < stops[:-1]).any()):
            found = reprlib.repr(stops.tolist())
            raise HansaError(f"Split(offsets): expected increasing values to {rows}, found {found}.")

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> torch.Tensor:
        """Number of rows of each client, [population]."""
        return self.offsets.diff()

    def rows(self, client: int) -> torch.Tensor:
        """Return the row numbers of one client, as a view."""
        if not 0 <= client < self.population:
            raise HansaError(f"client {client}: there are {self.population}, numbered from 0.")
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def owners(self) -> torch.Tensor:
        """Return the client of each entry of ``index``."""
        return torch.repeat_interleave(torch.arange(self.population), self.sizes)

    @classmethod
    def of_rows(cls, rows: Sequence[Any]) -> Split:
        """Build a split from one sequence of row numbers per client, in the given order."""
        client_rows = [torch.as_tensor(numbers, dtype=torch.int64).reshape(-1) for numbers in rows]
        if not client_rows:
            raise HansaError("Split.of_rows: expected at least one client.")
        sizes = torch.tensor([0, *(len(rows) for rows in client_rows)])
        return cls(torch.cat(client_rows), sizes.cumsum(0))

    @classmethod
    def of_owners(cls, owners: npt.NDArray[np.int64], clients: int) -> Split:
        """Build a split from the client of every row, -1 for none; a client's rows are in increasing order.

        >>> split = Split.of_owners(np.array([1, 0, -1, 1]), 2)
        >>> split.rows(0).tolist(), split.rows(1).tolist()
        ([1], [0, 3])
        """
        if len(owners) and not (int(owners.min()) >= -1 and int(owners.max()) < clients):
            raise HansaError(f"owners run from {owners.min()} to {owners.max()}: expected 0 to {clients - 1}, or -1.")
        unowned = int((owners < 0).sum())
        order = np.argsort(owners, kind="stable")[unowned:]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owners[owners >= 0], minlength=clients))])
        return cls(torch.from_numpy(order.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64)))


def targets_fingerprint(targets: Any) -> str:
    """Return the SHA-256 of a data set's targets, to which a saved split belongs."""
    if not isinstance(targets, torch.Tensor):
        leaves, structure = trees.tree_flatten(targets)
        digests = [leaf.identity() if hasattr(leaf, "identity") else targets_fingerprint(leaf) for leaf in leaves]
        return hashlib.sha256(f"{structure} {digests}".encode()).hexdigest()
    state = hashlib.sha256(f"{targets.dtype} {tuple(targets.shape)}".encode())
    state.update(targets.detach().cpu().contiguous().view(torch.uint8).numpy().data if targets.numel() else b"")
    return state.hexdigest()


def save_split(
    path: Path | str,
    split: Split,
    targets: Any,
    made_by: str = "",
    counts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write a split to one safetensors file, atomically, with the fingerprint of the targets it belongs to.

    Args:
        path: The file.
        split: The split.
        targets: The targets of the data set.
        made_by: A description of the partition.
        counts: Label counts for figures, one row per client or per leading client.

    >>> import tempfile, torch
    >>> split, labels = Split.of_owners(np.array([0, 1, 1]), 2), torch.tensor([0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_split(f"{folder}/split.safetensors", split, labels)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['split.safetensors']
    """
    from safetensors.torch import save  # loads torch, which commands that only look do without

    path = Path(path)
    facts = {
        "format": _FORMAT,
        "targets_sha256": targets_fingerprint(targets),
        "split_sha256": _digest(split),
        "rows": count_rows(targets),
        "made_by": made_by,
        "label_counts": None if counts is None else [list(map(int, row)) for row in counts],
    }
    # one entry: safetensors writes several in another order in every process
    payload = save({"index": split.index.contiguous(), "offsets": split.offsets.contiguous()},
                   {"hansa": json.dumps(facts)})  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_label_counts(path: Path | str) -> tuple[int, list[list[int]]] | None:
    """Return the number of clients of a saved split and its label counts, or None without counts.

    Only the header of the file is read.
    """
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)))
        clients = int(header["offsets"]["shape"][0]) - 1
        rows = [[int(count) for count in row] for row in json.loads(header["__metadata__"]["hansa"])["label_counts"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    if clients < len(rows) or len({len(row) for row in rows}) != 1 or min(map(min, rows), default=0) < 0:
        return None
    return clients, rows


def load_split(path: Path | str, targets: Any | None) -> Split:
    """Read a split from a file; raise if the file was changed or belongs to other targets.

    Args:
        path: The file.
        targets: The targets of the data set, or None to skip the comparison.

    >>> import tempfile, torch
    >>> split, labels = Split.of_owners(np.array([0, 1, 1]), 2), torch.tensor([0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_split(f"{folder}/split.safetensors", split, labels)
    ...     load_split(f"{folder}/split.safetensors", labels).population
    2
    """
    path = Path(path)
    if not path.is_file():
        raise missing_file(path, "A partition file is written by save_split, and in every run folder.")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("hansa", "{}"))
            if facts["format"] != _FORMAT:
                raise invalid_file(path, f"a {_FORMAT!r} file", f"format {facts['format']!r:.80}")
            split = Split(file.get_tensor("index"), file.get_tensor("offsets"))
    except DataError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise invalid_file(path, f"a {_FORMAT!r} file", str(error).rstrip(".")) from error
    if _digest(split) != facts.get("split_sha256"):
        raise invalid_file(path, f"rows of SHA-256 {facts.get('split_sha256')}", _digest(split))
    if targets is not None and targets_fingerprint(targets) != facts.get("targets_sha256"):
        rows = count_rows(targets)
        raise invalid_file(
            path,
            f"a partition of these {rows} targets (SHA-256 {targets_fingerprint(targets)})",
            f"one of {facts.get('rows')} others (SHA-256 {facts.get('targets_sha256')})",
            "Load the data set it was made for, or partition again.",
        )
    return split


@dataclass(frozen=True, slots=True)
class saved_split:
    """The split of an earlier run, read from a file, for any seed.

    Args:
        path: A file written by `save_split`.

    >>> saved_split("runs/first/partition.safetensors").path
    'runs/first/partition.safetensors'
    """

    path: str

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        split = load_split(self.path, labels)
        if clients is not None and clients != split.population:
            raise invalid_file(self.path, f"a partition among {clients} clients", f"one among {split.population}")
        return split


def _digest(split: Split) -> str:
    return hashlib.sha256(split.index.numpy().tobytes() + split.offsets.numpy().tobytes()).hexdigest()


# ---- who owns which row: numbers or names, in an array, a list, a tuple or a pandas Series


def parse_clients(name: str, clients: Any, rows: int) -> tuple[Split, tuple[str, ...]]:
    """Return the split that ``clients`` describes, by the owner of every row or the rows of each client, and the names
    of the clients, if they have any.

    Numbers run from 0 without gaps (-1 for no client); names are numbered in sorted order. Ambiguous values are
    refused.

    >>> split, names = parse_clients("tiny", ["north", "south", "north"], 3)
    >>> split.rows(0).tolist(), names
    ([0, 2], ('north', 'south'))
    """
    owners = owner_column(name, clients, "clients")
    if owners is None:
        return Split.of_rows([_row_numbers(name, client, part) for client, part in enumerate(clients)]), ()
    if owners.shape != (rows,) or owners.dtype.kind not in "iuU" or not rows:
        raise HansaError(f"{name}: owners are {owners.dtype} of shape {owners.shape}: expected one for each row.")
    if owners.dtype.kind == "U":
        names, numbers = np.unique(owners, return_inverse=True)
        return Split.of_owners(numbers.astype(np.int64), len(names)), tuple(map(str, names))
    low, high, known = int(owners.min()), int(owners.max()), len(np.unique(owners[owners >= 0]))
    if low < -1 or high < 0 or known != high + 1:
        raise HansaError(f"{name}: owners run from {low} to {high}, {known} have rows: expected 0, 1, ... or names.")
    return Split.of_owners(owners.astype(np.int64), high + 1), ()


def owner_column(name: str, clients: Any, argument: str) -> npt.NDArray[Any] | None:
    """Return one owner per row as a NumPy array of numbers or names; None for other forms of ``clients``."""
    if isinstance(clients, torch.Tensor):
        clients = clients.detach().cpu()
    if not hasattr(clients, "__array__") and not hasattr(clients, "to_numpy"):  # neither NumPy, torch nor pandas
        if isinstance(clients, (str, bytes)) or not isinstance(clients, Sequence):
            found = f"{argument}={reprlib.repr(clients)}"
            raise HansaError(f"{name}: {found}: expected a number, owners of rows, or lists of rows.")
        single = [np.isscalar(item) or item is None for item in clients]
        if not any(single):
            return None
        if not all(single):
            odd = reprlib.repr(clients[single.index(False)])
            raise HansaError(f"{name}: clients contains {odd}: expected owners of rows or lists of rows, not both.")
        clients = np.asarray(clients, dtype=object)
    column = np.asarray(clients.to_numpy() if hasattr(clients, "to_numpy") else clients)
    if column.dtype.kind == "S":
        return np.char.decode(column, "utf-8", "backslashreplace")
    kinds = {type(item) for item in column.flat} if column.dtype.kind == "O" else {bool}
    for kind, dtype in ((str, np.str_), (Integral, np.int64)):  # Python objects of one kind get its dtype
        if bool not in kinds and all(issubclass(each, kind) for each in kinds):
            return column.astype(dtype)
    return column


def _row_numbers(name: str, client: int, rows: Any) -> npt.NDArray[np.int64]:
    column = np.asarray(rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else rows)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
        raise HansaError(f"{name}: client {client}'s rows are {reprlib.repr(rows)}: expected a list of row numbers.")
    return column.astype(np.int64)


Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"


class Partition(Protocol):
    """Assigns rows to clients, given the targets of the rows and their natural owners (``groups``).

    >>> dirichlet(0.5).split(torch.arange(100) % 10, clients=4, key=Key(0)).population
    4
    """

    def split(
        self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None
    ) -> Split: ...


@dataclass(frozen=True, slots=True)
class iid:
    """Assign every row at random; sizes differ by at most one.

    >>> iid().split(torch.zeros(7), 3, Key(0)).sizes.tolist()
    [3, 2, 2]
    """

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, rows = _check_clients("iid", clients, len(labels)), len(labels)
        owners = np.empty(rows, np.int64)
        owners[key.numpy().permutation(rows)] = np.arange(rows) % number
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class shards(Checked):
    """Sort rows by label, cut them into equal shards, and give each client some at random (McMahan et al. 2017).

    [AWARE]: ``shards(200, 2)`` with 100 clients. [HAFED], with 32: ``shards(200, 6)`` for CIFAR-10 and Fashion-MNIST,
    ``shards(2000, 60)`` for CIFAR-100. Shards beyond ``clients * per_client`` are not used, as in the papers.

    Args:
        shards: Number of shards.
        per_client: Shards per client.

    >>> labels = torch.arange(10).repeat(30)
    >>> shards(20, 2).split(labels, 10, Key(0)).sizes.tolist()
    [30, 30, 30, 30, 30, 30, 30, 30, 30, 30]
    """

    shards: int = field(default=200, metadata=bound(check_integer))
    per_client: int = field(default=2, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("shards", labels)
        if self.shards > len(classes):
            raise invalid_argument("shards", "shards", self.shards, f"at most one per sample, {len(classes)}")
        number = _check_clients("shards", clients, self.shards, self.per_client, "shards")
        order = np.argsort(classes, kind="stable")
        # the first len % shards shards are one row longer, as in numpy.array_split
        shard_of = np.repeat(np.arange(self.shards), _equal_sizes(len(classes), self.shards))
        shard_owner = np.full(self.shards, -1, np.int64)
        shard_owner[key.numpy().permutation(self.shards)[: number * self.per_client]] = np.repeat(
            np.arange(number), self.per_client
        )
        owners = np.empty(len(classes), np.int64)
        owners[order] = shard_owner[shard_of]
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class dirichlet(Checked):
    """Divide each label's rows over the clients by p ~ Dirichlet(alpha) (Yurochkin et al. 2019, Hsu et al. 2019).

    Clients below ``min_size`` receive rows of as few labels as possible from the largest clients. Nothing is drawn
    again, so the partition succeeds for any alpha. Every row is assigned. [AFGA] uses 0.6 and 0.3, [AWARE] 0.1.

    Args:
        alpha: Concentration; a small alpha gives few labels per client.
        min_size: Minimum number of rows of a client.

    >>> labels = torch.arange(10).repeat(100)
    >>> int(dirichlet(0.1).split(labels, 20, Key(0)).sizes.min()) >= 10
    True
    """

    alpha: float = field(metadata=bound(check_positive, "0.1 is very uneven, 100 nearly iid."))
    min_size: int = field(default=10, metadata=bound(check_integer, minimum=0))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("dirichlet", labels)
        number = _check_clients("dirichlet", clients, len(classes), self.min_size)
        draw = key.numpy()
        owners = np.empty(len(classes), np.int64)
        for label in np.unique(classes):
            rows = draw.permutation(np.flatnonzero(classes == label))
            owners[rows] = divide(len(rows), np.cumsum(_simplex(self.alpha, number, draw)), draw)
        _top_up(owners, classes, number, self.min_size, draw)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class quantity_skew(Checked):
    """Uneven sizes with iid labels. Every row is assigned. Give either ``alpha`` or ``power``.

    Args:
        alpha: Sizes are proportional to a draw of Dirichlet(alpha).
        power: Sizes are proportional to rank^(-power).
        min_size: Minimum number of rows of a client.

    >>> quantity_skew(power=1.0, min_size=0).split(torch.zeros(110), 3, Key(0)).sizes.sort().values.tolist()
    [20, 30, 60]
    """

    alpha: float | None = field(default=None, metadata=bound(check_positive))
    power: float | None = field(default=None, metadata=bound(check_non_negative))
    min_size: int = field(default=1, metadata=bound(check_integer, minimum=0))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if (self.alpha is None) == (self.power is None):
            raise HansaError(f"quantity_skew(alpha={self.alpha!r}, power={self.power!r}): expected one of the two.")

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        rows = len(labels)
        number = _check_clients("quantity_skew", clients, rows, self.min_size)
        draw = key.numpy()
        if self.alpha is not None:
            fractions = _simplex(self.alpha, number, draw)
        else:
            fractions = np.arange(1, number + 1, dtype=np.float64) ** -float(self.power or 0.0)
            fractions = draw.permutation(fractions / fractions.sum())
        sizes = self.min_size + _round_to_total(fractions, rows - number * self.min_size)
        owners = np.empty(rows, np.int64)
        owners[draw.permutation(rows)] = np.repeat(np.arange(number), sizes)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class labels_per_client(Checked):
    """Give each client rows of a fixed number of labels (the quantity-based label imbalance of Li et al. 2022).

    Client i has the i-th label, counted round, and others at random. The rows of a label are divided equally among its
    clients. Rows of a label that no client has are not used, which happens with fewer clients than labels only.

    Args:
        labels: Labels per client.

    >>> targets = torch.arange(10).repeat(30)
    >>> split = labels_per_client(2).split(targets, 10, Key(0))
    >>> [len(targets[split.rows(client)].unique()) for client in range(10)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    labels: int = field(default=2, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("labels_per_client", labels)
        number = _check_clients("labels_per_client", clients, len(classes))
        present = np.unique(classes)
        if self.labels > len(present):
            raise invalid_argument("labels_per_client", "labels", self.labels, f"at most the labels, {len(present)}")
        draw = key.numpy()
        assigned = np.zeros((number, len(present)), bool)
        for client in range(number):
            first_label = client % len(present)
            other_labels = np.delete(np.arange(len(present)), first_label)
            assigned[client, [first_label, *draw.permutation(other_labels)[: self.labels - 1]]] = True
        owners = np.full(len(classes), -1, np.int64)
        for position, label in enumerate(present):
            rows = draw.permutation(np.flatnonzero(classes == label))
            if len(sharing := np.flatnonzero(assigned[:, position])):
                owners[rows] = np.repeat(sharing, _equal_sizes(len(rows), len(sharing)))
        empty = np.flatnonzero(np.bincount(owners[owners >= 0], minlength=number) == 0)
        if len(empty):
            expected = f"fewer: client {empty[0]} would have no rows of its labels"
            raise invalid_argument("labels_per_client", "clients", number, expected)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class subsample(Checked):
    """Keep a random fraction of each client's rows of another partition, at least one.

    [CAMS]'s code trains on 80% of a client's rows: ``subsample(iid(), 0.8)``.

    Args:
        partition: The partition to draw from.
        fraction: Fraction of each client's rows.

    >>> subsample(iid(), 0.8).split(torch.zeros(50), 5, Key(0)).sizes.tolist()
    [8, 8, 8, 8, 8]
    """

    partition: Partition
    fraction: float = field(default=0.8, metadata=bound(check_fraction, "0.8 keeps four rows of five."))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        split = self.partition.split(labels, clients, key, groups)
        rows = []
        for client in range(split.population):
            available = split.rows(client)
            count = min(len(available), max(1, floor_share(self.fraction, len(available))))
            positions = key.child("kept", client).numpy().permutation(len(available))[:count]
            rows.append(available[torch.from_numpy(np.sort(positions))])
        return Split.of_rows(rows)


@dataclass(frozen=True, slots=True)
class natural(Checked):
    """One client per natural owner of the rows, such as a writer or a user; fewer clients are chosen at random.

    Args:
        min_size: Owners with fewer rows are left out.

    >>> natural(min_size=10).min_size
    10
    """

    min_size: int = field(default=1, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        if groups is None:
            raise HansaError("natural: the data has no natural owners. Use iid, shards, dirichlet or quantity_skew.")
        owners = groups.numpy()
        sizes = np.bincount(owners[owners >= 0])
        eligible = np.flatnonzero(sizes >= self.min_size)
        if not len(eligible):
            largest = f"at most {sizes.max(initial=0)}, the largest owner"
            raise invalid_argument("natural", "min_size", self.min_size, largest)
        number = len(eligible) if clients is None else clients
        _check_clients("natural", number, len(eligible), unit=f"natural owners of {self.min_size} samples or more")
        selected = np.sort(key.numpy().permutation(eligible)[:number])
        client_of = np.full(len(sizes) + 1, -1, np.int64)  # the last entry is for owner -1
        client_of[selected] = np.arange(number)
        return Split.of_owners(client_of[owners], number)


def _check_clients(part: str, clients: int | None, available: int, per_client: int = 1, unit: str = "samples") -> int:
    """Return the number of clients, for each of which so many units must be available."""
    if clients is None:
        raise HansaError(f"{part}: expected a number of clients. Only natural() has its own.")
    check_integer(part, "clients", clients)
    if clients > (feasible := available // max(1, per_client)):
        needed = f"{available} {unit}, {per_client} per client" if per_client > 1 else f"{available} {unit}"
        raise invalid_argument(part, "clients", clients, f"at most {feasible}: there are {needed}")
    return clients


def _classes(part: str, labels: torch.Tensor) -> Integers:
    if labels.ndim != 1 or labels.is_floating_point():
        found = f"{labels.dtype} {tuple(labels.shape)}"
        raise HansaError(f"{part}: expected a label per row, found {found}. Use iid or natural.")
    return np.asarray(labels.numpy(), np.int64)


def divide(rows: int, ends: Floats, draw: np.random.Generator) -> Integers:
    """Return the client of each of some rows, by cumulative fractions.

    Rounding is systematic: a client's count is its expectation rounded up or down, and unbiased.
    """
    ends = np.append(ends[:-1], 1.0)
    bounds = np.minimum(np.floor(ends * rows + draw.random()), rows).astype(np.int64)
    return np.repeat(np.arange(len(ends)), np.diff(bounds, prepend=0))


def _equal_sizes(rows: int, count: int) -> Integers:
    return np.full(count, rows // count, np.int64) + (np.arange(count) < rows % count)


def _simplex(alpha: float, size: int, draw: np.random.Generator) -> Floats:
    """Draw from a symmetric Dirichlet.

    For alpha < 1 this uses logarithms, Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha): a plain draw underflows to 0/0.
    """
    if alpha >= 1:
        weights = draw.standard_gamma(alpha, size)
        weights /= weights.max()
    else:
        logs = alpha * np.log(draw.standard_gamma(alpha + 1, size)) + np.log1p(-draw.random(size))
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logs - logs.max()) / alpha)
    return np.asarray(weights / weights.sum(), np.float64)


def _round_to_total(shares: Floats, total: int) -> Integers:
    """Round shares of a total to integers with that sum, by the largest remainders."""
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes


def _top_up(owners: Integers, classes: Integers, clients: int, minimum: int, draw: np.random.Generator) -> None:
    """Move rows, in place, from the largest clients to those with fewer than ``minimum``."""
    sizes = np.bincount(owners, minlength=clients)
    deficits = np.maximum(minimum - sizes, 0)
    total_deficit = int(deficits.sum())
    if total_deficit == 0:
        return
    # the highest size to which the largest clients can be cut to free enough rows
    low, high = minimum, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= total_deficit else (low, middle - 1)
    surpluses = np.maximum(sizes - low, 0)
    spare = np.flatnonzero(surpluses)[: int(surpluses.sum()) - total_deficit]
    surpluses[spare] -= 1
    order = np.lexsort((draw.random(len(owners)), owners))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    freed = order[np.arange(len(owners)) - starts[owners[order]] < surpluses[owners[order]]]
    freed = freed[np.lexsort((draw.random(len(freed)), classes[freed]))]
    receivers = draw.permutation(np.flatnonzero(deficits))
    owners[freed] = np.repeat(receivers, deficits[receivers])
