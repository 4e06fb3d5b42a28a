"""The record of clients as a user has it: columns, a frame, and one row a client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas

Array: TypeAlias = "npt.NDArray[Any]"

KINDS = {
    "round": "int32",
    "client": "int32",
    "asked": "bool",
    "admitted": "bool",
    "loss": "float32",
    "norm": "float32",
    "up_bytes": "int64",
    "down_bytes": "int64",
    "peer_bytes": "int64",
}
"""The columns of every record; those of tests come after them, each in single precision."""

SUMMED = {
    "asked": "asked", "admitted": "participations", "up_bytes": "up_bytes", "down_bytes": "down_bytes",
    "peer_bytes": "peer_bytes",
}  # fmt: skip
"""The columns that add up over rounds, and what their sums are called; of the others the last value counts."""


class ClientColumns(dict[str, Array]):
    """Columns by name, each a NumPy array: a row a round and client, by round and then by client.

    =============  ==========================================================================================
    asked          whether the server asked it to report
    admitted       whether its update took part
    loss           its mean training loss in the round; of clients that gossip, that of their cluster
    norm           the length of its update
    up_bytes       what it sent to the server; ``down_bytes`` what it was sent, ``peer_bytes`` what it sent to others
    test_...       where it was evaluated, how good the model is on its own test rows
    personal_...   the same after some steps on its own training rows
    =============  ==========================================================================================

    What was not measured is NaN, bytes that did not travel are 0. ``pandas.DataFrame(columns)`` or ``columns.frame()``
    is a frame of it.
    """

    def frame(self) -> pandas.DataFrame:
        """The columns as a pandas frame."""
        try:
            import pandas
        except ImportError as error:
            raise HansaError("a frame of clients needs pandas: pip install 'hansa[report]'.") from error
        return pandas.DataFrame(dict(self))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.values()), ()))

    @property
    def tests(self) -> list[str]:
        """The columns that evaluations made."""
        return [name for name in self if name not in KINDS and name != "participations"]

    def at(self, round: int) -> ClientColumns:
        """The rows of one round."""
        first, last = np.searchsorted(self["round"], [round, round + 1])
        return ClientColumns({name: values[first:last] for name, values in self.items()})

    def by_client(self) -> ClientColumns:
        """One row a client: how often it was asked and took part, its last loss and norm and those of its tests, and
        the sums of its bytes.

        >>> made = {"round": [1, 1, 2], "client": [0, 2, 2], "asked": [1, 1, 1], "admitted": [1, 1, 1],
        ...         "loss": [0.5, 0.75, 0.25], "norm": [1.0, 1.0, 2.0], "up_bytes": [8, 8, 8]}
        >>> found = ClientColumns({name: np.array(values) for name, values in made.items()}).by_client()
        >>> found["client"].tolist(), found["participations"].tolist(), found["loss"].tolist()
        ([0, 2], [1, 2], [0.5, 0.25])
        """
        tally = Tally()
        tally.take(self)
        return tally.found()

    def write_csv(self, path: Path | str) -> Path:
        """Write the rows as CSV; what was not measured is empty."""
        from hansa.runs.store import io

        path = Path(path)
        io.make_folder(path.parent.resolve())
        io.write_file(path, *(line.encode() for line in self._lines()))
        return path

    def write_npz(self, path: Path | str) -> Path:
        """Write the columns as arrays that ``numpy.load`` reads, without pickle."""
        from io import BytesIO

        from hansa.runs.store import io

        path, content = Path(path), BytesIO()
        arrays: dict[str, Any] = dict(self)
        np.savez_compressed(content, **arrays)
        io.make_folder(path.parent.resolve())
        io.write_file(path, content.getvalue())
        return path

    def _lines(self, some: int = 10_000) -> Iterator[str]:
        yield ",".join(self) + "\n"
        for start in range(0, self.rows, some):
            columns = [_words(values[start : start + some]) for values in self.values()]
            yield "".join(",".join(row) + "\n" for row in zip(*columns, strict=True))

    def __repr__(self) -> str:
        return f"ClientColumns({self.rows} rows: {', '.join(self)})"


def joined(blocks: Iterable[tuple[int, Mapping[str, Mapping[str, Array]]]], names: Sequence[str] = ()) -> ClientColumns:
    """The tables of rounds as one: a row a client that worked or was tested."""
    parts: dict[str, list[Array]] = {}
    held: dict[str, int] = {}
    total = 0
    for round, tables in blocks:
        clients = union([table["client"] for table in tables.values()])
        for name, values in filled(round, clients, tables).items():
            if name in names or not names:
                parts.setdefault(name, []).extend([*_missing(total - held.get(name, 0)), values])
                held[name] = total + len(values)
        total += len(clients)
    known = [*KINDS, *(name for name in parts if name not in KINDS)]
    found = ClientColumns()
    for name in names or known:
        if name not in known:
            raise HansaError(f"clients: no column {name!r}. {suggestion(name, known)}")
        pieces = [*parts.get(name, ()), *_missing(total - held.get(name, 0))]
        found[name] = np.concatenate(pieces) if pieces else np.empty(0, KINDS.get(name, np.float32))
    return found


def _missing(rows: int) -> list[Array]:
    """What rounds have in the column of a test that they did not make."""
    return [np.full(rows, np.nan, np.float32)] if rows else []


def union(clients: Sequence[Array]) -> Array:
    """All clients of some tables, in ascending order."""
    if not clients:
        return np.empty(0, np.int64)
    return clients[0] if len(clients) == 1 else np.unique(np.concatenate(clients))


def filled(round: int, clients: Array, tables: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """The tables of a round as columns of these clients."""
    found: dict[str, Array] = {"round": np.full(len(clients), round, np.int32), "client": clients.astype(np.int32)}
    for name, kind in KINDS.items():
        if name not in found:
            found[name] = np.full(len(clients), np.nan if np.dtype(kind).kind == "f" else 0, kind)
    for table in tables.values():
        rows = np.searchsorted(clients, table["client"])
        for name, values in table.items():
            if name == "client":
                continue
            if name not in found:
                found[name] = np.full(len(clients), np.nan, np.float32)
            found[name][rows] = values
    return found


class Tally:
    """One row a client, from columns that come one after the other: as much memory as there are clients."""

    def __init__(self) -> None:
        self._there = np.zeros(0, np.bool_)
        self._sums: dict[str, Array] = {}
        self._last: dict[str, Array] = {}

    def take(self, columns: Mapping[str, Array]) -> None:
        """Add rows, which are later than those before."""
        clients = columns["client"]
        if not len(clients):
            return
        if (most := int(clients.max()) + 1) > len(self._there):
            self._there = _longer(self._there, most, 0)
            self._sums = {name: _longer(values, most, 0) for name, values in self._sums.items()}
            self._last = {name: _longer(values, most, np.nan) for name, values in self._last.items()}
        self._there[clients] = True
        for name, values in columns.items():
            if name in SUMMED:
                total = self._sums.setdefault(SUMMED[name], np.zeros(len(self._there), np.int64))
                np.add.at(total, clients, values.astype(np.int64))  # exact where doubles would round
            elif name not in ("round", "client"):
                kept = self._last.setdefault(name, np.full(len(self._there), np.nan, np.float32))
                known = ~np.isnan(values)
                kept[clients[known]] = values[known]  # of equal places the last one stays

    def found(self) -> ClientColumns:
        """The rows of all clients that were there."""
        order = [SUMMED[name] for name in SUMMED if SUMMED[name] in self._sums]
        found = ClientColumns(client=np.flatnonzero(self._there))
        found.update({name: self._sums[name][self._there] for name in order})
        found.update({name: values[self._there] for name, values in self._last.items()})
        return found


def _longer(values: Array, length: int, fill: float) -> Array:
    return np.concatenate([values, np.full(length - len(values), fill, values.dtype)])


def _words(values: Array) -> list[str]:
    if values.dtype.kind != "f":
        return [str(int(value)) for value in values]
    return ["" if value != value else str(value) for value in values]


def spread(values: Sequence[float], smaller_is_better: bool) -> tuple[float, float, float]:
    """Over clients: the mean, the standard deviation (of all of them), and the mean of the worst tenth, rounded up.

    Clients whose value is not a number, such as an AUC of one class, are left out; of none at all it is NaN.

    >>> spread([0.75, 0.25, 0.5, math.nan], smaller_is_better=False)
    (0.5, 0.2041241452319315, 0.25)
    """
    known = sorted((value for value in values if not math.isnan(value)), reverse=smaller_is_better)
    if not known:
        return math.nan, math.nan, math.nan
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / len(known))
    worst = known[: -(-len(known) // 10)]
    return mean, deviation, math.fsum(worst) / len(worst)
