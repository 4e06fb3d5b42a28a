"""Who owns a row, however it is said: numbers or names, in an array, a list, a tuple or a pandas Series."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import HansaError
from hansa.data.split import Split

_WORDS = (str, bytes)
_NUMBERS = (int, np.integer)


def split_of(name: str, clients: Any, rows: int) -> Split:
    """The split that ``clients`` describes, for data of so many rows: the owner of every row, or rows for each client.

    Numbers are the clients' own, from 0 without gaps (-1 for rows that are nobody's); names are numbered in their
    sorted order. What could be meant either way is refused.

    >>> split_of("tiny", ["north", "south", "north"], 3).rows(0).tolist()
    [0, 2]
    >>> split_of("tiny", [[2], [0, 1]], 3).rows(1).tolist()
    [0, 1]
    """
    if _flat(name, clients):
        return _of_owners(name, clients, rows)
    return Split.of_rows([_row_numbers(name, client, part) for client, part in enumerate(clients)])


def _flat(name: str, clients: Any, argument: str = "clients") -> bool:
    """Whether one value a row is given, not one sequence a client."""
    if hasattr(clients, "__array__") or hasattr(clients, "to_numpy"):  # NumPy, torch, pandas: a column of owners
        return True
    if isinstance(clients, (*_WORDS, dict, set, frozenset)) or not isinstance(clients, Sequence):
        raise HansaError(
            f"{name}: {argument}={reprlib.repr(clients)}: expected a number of clients, the owner of every row, or one "
            "list of row numbers a client."
        )
    single = [isinstance(item, (*_WORDS, *_NUMBERS, float, np.floating)) or item is None for item in clients]
    if any(single) and not all(single):
        place = single.index(not single[0])
        raise HansaError(
            f"{name}: clients holds {reprlib.repr(clients[0])} and, at {place}, {reprlib.repr(clients[place])}: "
            "expected owners of rows or lists of rows, not both."
        )
    return bool(single) and all(single)


def owners_of(name: str, clients: Any, argument: str) -> npt.NDArray[Any] | None:
    """One owner a row as NumPy has it, numbers or names; None where that is not what was given."""
    if isinstance(clients, (int, Split)):
        return None
    if not _flat(name, clients, argument):
        return None
    if isinstance(clients, torch.Tensor):
        clients = clients.detach().cpu().numpy()
    return _column(clients.to_numpy() if hasattr(clients, "to_numpy") else clients)


def _of_owners(name: str, clients: Any, rows: int) -> Split:
    owners = owners_of(name, clients, "clients")
    assert owners is not None
    if owners.shape != (rows,) or owners.dtype.kind not in "iuU":
        raise HansaError(
            f"{name}: owners are {owners.dtype} of shape {owners.shape}: "
            f"expected one whole number or name a row, ({rows},)."
        )
    if owners.dtype.kind == "U":
        named, numbers = np.unique(owners, return_inverse=True)
        return Split.of_owners(numbers.astype(np.int64), len(named))
    low, high = (int(owners.min()), int(owners.max())) if rows else (0, -1)
    if low < -1 or high < 0:
        raise HansaError(f"{name}: owners run from {low} to {high}: expected numbers from 0, -1 for nobody's rows.")
    there = np.unique(owners[owners >= 0])
    if len(there) != high + 1:
        absent = int(np.flatnonzero(there != np.arange(len(there)))[0])
        raise HansaError(
            f"{name}: owners run up to {high}, but client {absent} owns no row. Number them from 0 without gaps, or "
            "give names (strings), which are numbered by themselves."
        )
    return Split.of_owners(owners.astype(np.int64), high + 1)


def _column(values: Any) -> npt.NDArray[Any]:
    """A column as NumPy has it; one of Python objects as the one kind that they all are."""
    found = np.asarray(values, dtype=object) if isinstance(values, (list, tuple)) else np.asarray(values)
    if found.dtype.kind == "S":
        return np.char.decode(found, "utf-8", "backslashreplace")
    if found.dtype.kind != "O" or not len(found):
        return found
    if all(isinstance(value, str) for value in found.flat):
        return found.astype(np.str_)
    if all(isinstance(value, _NUMBERS) and not isinstance(value, bool) for value in found.flat):
        return found.astype(np.int64)
    return found


def _row_numbers(name: str, client: int, part: Any) -> npt.NDArray[np.int64]:
    found = np.asarray(part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else part)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise HansaError(
            f"{name}: client {client}'s rows are {reprlib.repr(part)}: expected a list of row numbers (whole, from 0)."
        )
    return found.astype(np.int64)
