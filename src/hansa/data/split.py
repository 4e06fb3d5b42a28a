"""The rows of each client as one index and its offsets: of owners or lists, in memory and in a file."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hansa.core import trees
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data.files import DataError, invalid_file, missing_file
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
