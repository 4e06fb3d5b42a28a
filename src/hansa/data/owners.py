"""Parse the clients of rows: numbers or names, in an array, a list, a tuple or a pandas Series."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import HansaError
from hansa.data.split import Split

_STRINGS = (str, bytes)
_NUMBERS = (int, np.integer)


def parse_clients(name: str, clients: Any, rows: int) -> Split:
    """Return the split that ``clients`` describes: the owner of every row, or the rows of each client.

    Numbers run from 0 without gaps (-1 for no client); names are numbered in sorted order. Ambiguous values are
    refused.

    >>> parse_clients("tiny", ["north", "south", "north"], 3).rows(0).tolist()
    [0, 2]
    >>> parse_clients("tiny", [[2], [0, 1]], 3).rows(1).tolist()
    [0, 1]
    """
    if _is_owner_per_row(name, clients):
        return _split_by_owners(name, clients, rows)
    return Split.of_rows([_row_numbers(name, client, part) for client, part in enumerate(clients)])


def _is_owner_per_row(name: str, clients: Any, argument: str = "clients") -> bool:
    """Return whether there is one value per row, not one sequence per client."""
    if hasattr(clients, "__array__") or hasattr(clients, "to_numpy"):  # NumPy, torch, pandas: a column of owners
        return True
    if isinstance(clients, (*_STRINGS, dict, set, frozenset)) or not isinstance(clients, Sequence):
        raise HansaError(
            f"{name}: {argument}={reprlib.repr(clients)}: expected a number of clients, the owner of every row, or one "
            "list of row numbers per client."
        )
    single = [isinstance(item, (*_STRINGS, *_NUMBERS, float, np.floating)) or item is None for item in clients]
    if any(single) and not all(single):
        position = single.index(not single[0])
        raise HansaError(
            f"{name}: clients contains {reprlib.repr(clients[0])} and, at {position}, {reprlib.repr(clients[position])}"
            ": expected owners of rows or lists of rows, not both."
        )
    return bool(single) and all(single)


def owner_column(name: str, clients: Any, argument: str) -> npt.NDArray[Any] | None:
    """Return one owner per row as a NumPy array of numbers or names; None for other forms of ``clients``."""
    if isinstance(clients, (int, Split)):
        return None
    if not _is_owner_per_row(name, clients, argument):
        return None
    if isinstance(clients, torch.Tensor):
        clients = clients.detach().cpu().numpy()
    return _as_column(clients.to_numpy() if hasattr(clients, "to_numpy") else clients)


def _split_by_owners(name: str, clients: Any, rows: int) -> Split:
    owners = owner_column(name, clients, "clients")
    assert owners is not None
    if owners.shape != (rows,) or owners.dtype.kind not in "iuU":
        raise HansaError(
            f"{name}: owners are {owners.dtype} of shape {owners.shape}: "
            f"expected one integer or name per row, ({rows},)."
        )
    if owners.dtype.kind == "U":
        names, numbers = np.unique(owners, return_inverse=True)
        return Split.of_owners(numbers.astype(np.int64), len(names))
    low, high = (int(owners.min()), int(owners.max())) if rows else (0, -1)
    if low < -1 or high < 0:
        raise HansaError(f"{name}: owners run from {low} to {high}: expected numbers from 0, or -1 for no client.")
    present = np.unique(owners[owners >= 0])
    if len(present) != high + 1:
        absent = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise HansaError(
            f"{name}: owners run up to {high}, but client {absent} has no row. Number clients from 0 without gaps, or "
            "use names (strings), which are numbered automatically."
        )
    return Split.of_owners(owners.astype(np.int64), high + 1)


def _as_column(values: Any) -> npt.NDArray[Any]:
    """Return a NumPy column; Python objects of one kind get the dtype of that kind."""
    column = np.asarray(values, dtype=object) if isinstance(values, (list, tuple)) else np.asarray(values)
    if column.dtype.kind == "S":
        return np.char.decode(column, "utf-8", "backslashreplace")
    if column.dtype.kind != "O" or not len(column):
        return column
    if all(isinstance(value, str) for value in column.flat):
        return column.astype(np.str_)
    if all(isinstance(value, _NUMBERS) and not isinstance(value, bool) for value in column.flat):
        return column.astype(np.int64)
    return column


def _row_numbers(name: str, client: int, part: Any) -> npt.NDArray[np.int64]:
    column = np.asarray(part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else part)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
        raise HansaError(
            f"{name}: client {client}'s rows are {reprlib.repr(part)}: expected a list of row numbers (whole, from 0)."
        )
    return column.astype(np.int64)
