"""The client record as columns, as a pandas frame, or with one row per client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hansa.core.errors import HansaError, suggestion
from hansa.data.files import spreadsheet_text
from hansa.runs.columns import CLIENT_COLUMNS

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas

Array: TypeAlias = "npt.NDArray[Any]"

DTYPES_BY_COLUMN = {name: column.dtype for name, column in CLIENT_COLUMNS.items()}
TOTALS_BY_COLUMN = {name: column.total for name, column in CLIENT_COLUMNS.items() if column.total}


class ClientColumns(dict[str, Array]):
    """The client record as NumPy arrays by name, one row per round and client.

    `hansa.runs.columns.CLIENT_COLUMNS` describes the columns. Evaluations add ``test_...``, and ``personal_...`` after
    steps on the client's own rows. Unmeasured values are NaN; unsent bytes are 0. ``client_names`` are the names of the
    clients by number, such as hospitals or files, if the data has any.
    """

    client_names: Sequence[str] = ()

    def named(self, names: Sequence[str]) -> ClientColumns:
        """Return the same columns with the names of clients by number."""
        self.client_names = names
        return self

    def name_of(self, client: int) -> str:
        """Return the name of a client, or "client 3" if it has none."""
        return self.client_names[client] if client < len(self.client_names) else f"client {client}"

    def with_name_column(self) -> dict[str, Array]:
        """Return the columns with one of names after that of numbers, if clients have names."""
        if not self.client_names or "client" not in self:
            return dict(self)
        names = {"name": np.array([self.name_of(client) for client in self["client"].tolist()], dtype=np.str_)}
        place = list(self).index("client") + 1
        columns = list(self.items())
        return dict([*columns[:place], *names.items(), *columns[place:]])

    def frame(self) -> pandas.DataFrame:
        """Return the columns as a pandas frame, with a column of names if clients have any."""
        import pandas

        return pandas.DataFrame(self.with_name_column())

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()), ()))

    @property
    def evaluated(self) -> list[str]:
        """The names of the columns that evaluations added."""
        return [name for name in self if name not in DTYPES_BY_COLUMN and name != "participations"]

    def at_round(self, round: int) -> ClientColumns:
        """Return the rows of one round."""
        first, last = np.searchsorted(self["round"], [round, round + 1])
        return ClientColumns({name: values[first:last] for name, values in self.items()}).named(self.client_names)

    def by_client(self) -> ClientColumns:
        """Return one row per client: sums of participations and bytes, and the last loss, norm and evaluation.

        >>> columns = {"round": [1, 1, 2], "client": [0, 2, 2], "asked": [1, 1, 1], "admitted": [1, 1, 1],
        ...         "loss": [0.5, 0.75, 0.25], "norm": [1.0, 1.0, 2.0], "up_bytes": [8, 8, 8]}
        >>> by_client = ClientColumns({name: np.array(values) for name, values in columns.items()}).by_client()
        >>> by_client["client"].tolist(), by_client["participations"].tolist(), by_client["loss"].tolist()
        ([0, 2], [1, 2], [0.5, 0.25])
        """
        totals = ClientTotals()
        totals.add(self)
        return totals.result().named(self.client_names)

    def write_csv(self, path: Path | str) -> Path:
        """Write the rows as CSV; unmeasured values are empty."""
        from hansa.runs.store import io

        path = Path(path)
        io.make_folder(path.parent.resolve())
        io.write_file(path, *(line.encode() for line in self._lines()))
        return path

    def write_npz(self, path: Path | str) -> Path:
        """Write the columns as arrays for ``numpy.load``, without pickle."""
        from io import BytesIO

        from hansa.runs.store import io

        path, content = Path(path), BytesIO()
        arrays: dict[str, Any] = self.with_name_column()
        np.savez_compressed(content, **arrays)
        io.make_folder(path.parent.resolve())
        io.write_file(path, content.getvalue())
        return path

    def _lines(self, some: int = 10_000) -> Iterator[str]:
        shown = self.with_name_column()
        yield ",".join(shown) + "\n"
        for start in range(0, self.rows, some):
            columns = [_format_values(values[start : start + some]) for values in shown.values()]
            yield "".join(",".join(row) + "\n" for row in zip(*columns, strict=True))

    def __repr__(self) -> str:
        return f"ClientColumns({self.rows} rows: {', '.join(self)})"


def join_rounds(
    blocks: Iterable[tuple[int, Mapping[str, Mapping[str, Array]]]], names: Sequence[str] = ()
) -> ClientColumns:
    """Join the tables of rounds: one row per client that trained or was evaluated."""
    pieces_of: dict[str, list[Array]] = {}
    lengths: dict[str, int] = {}
    total = 0
    for round, tables in blocks:
        clients = union_of_clients([table["client"] for table in tables.values()])
        for name, values in fill_columns(round, clients, tables).items():
            if name in names or not names:
                pieces_of.setdefault(name, []).extend([*_missing(total - lengths.get(name, 0)), values])
                lengths[name] = total + len(values)
        total += len(clients)
    known = [*DTYPES_BY_COLUMN, *(name for name in pieces_of if name not in DTYPES_BY_COLUMN)]
    columns = ClientColumns()
    for name in names or known:
        if name not in known:
            raise HansaError(f"clients: no column {name!r}. {suggestion(name, known)}")
        pieces = [*pieces_of.get(name, ()), *_missing(total - lengths.get(name, 0))]
        columns[name] = np.concatenate(pieces) if pieces else np.empty(0, DTYPES_BY_COLUMN.get(name, np.float32))
    return columns


def _missing(rows: int) -> list[Array]:
    """Return NaN for rounds without an evaluation."""
    return [np.full(rows, np.nan, np.float32)] if rows else []


def union_of_clients(clients: Sequence[Array]) -> Array:
    """Return the clients of all tables, in ascending order."""
    if not clients:
        return np.empty(0, np.int64)
    return clients[0] if len(clients) == 1 else np.unique(np.concatenate(clients))


def fill_columns(round: int, clients: Array, tables: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return the tables of a round as columns of these clients."""
    columns: dict[str, Array] = {"round": np.full(len(clients), round, np.int32), "client": clients.astype(np.int32)}
    for name, dtype in DTYPES_BY_COLUMN.items():
        if name not in columns:
            columns[name] = np.full(len(clients), np.nan if np.dtype(dtype).kind == "f" else 0, dtype)
    for table in tables.values():
        rows = np.searchsorted(clients, table["client"])
        for name, values in table.items():
            if name == "client":
                continue
            if name not in columns:
                columns[name] = np.full(len(clients), np.nan, np.float32)
            columns[name][rows] = values
    return columns


class ClientTotals:
    """Totals per client, accumulated round by round; memory grows with the number of clients only."""

    def __init__(self) -> None:
        self._present = np.zeros(0, np.bool_)
        self._sums: dict[str, Array] = {}
        self._last: dict[str, Array] = {}

    def add(self, columns: Mapping[str, Array]) -> None:
        """Add the rows of later rounds."""
        clients = columns["client"]
        if not len(clients):
            return
        if (count := int(clients.max()) + 1) > len(self._present):
            self._present = _extend(self._present, count, 0)
            self._sums = {name: _extend(values, count, 0) for name, values in self._sums.items()}
            self._last = {name: _extend(values, count, np.nan) for name, values in self._last.items()}
        self._present[clients] = True
        for name, values in columns.items():
            if name in TOTALS_BY_COLUMN:
                total = self._sums.setdefault(TOTALS_BY_COLUMN[name], np.zeros(len(self._present), np.int64))
                np.add.at(total, clients, values.astype(np.int64))  # exact where doubles would round
            elif name not in ("round", "client"):
                latest = self._last.setdefault(name, np.full(len(self._present), np.nan, np.float32))
                known = ~np.isnan(values)
                latest[clients[known]] = values[known]  # the last value of a repeated client wins

    def result(self) -> ClientColumns:
        """Return one row for each client seen."""
        order = [TOTALS_BY_COLUMN[name] for name in TOTALS_BY_COLUMN if TOTALS_BY_COLUMN[name] in self._sums]
        columns = ClientColumns(client=np.flatnonzero(self._present))
        columns.update({name: self._sums[name][self._present] for name in order})
        columns.update({name: values[self._present] for name, values in self._last.items()})
        return columns


def _extend(values: Array, length: int, fill: float) -> Array:
    return np.concatenate([values, np.full(length - len(values), fill, values.dtype)])


def _format_values(values: Array) -> list[str]:
    if values.dtype.kind == "U":
        return [_quoted(spreadsheet_text(str(value))) for value in values]
    if values.dtype.kind != "f":
        return [str(int(value)) for value in values]
    return ["" if value != value else str(value) for value in values]


def _quoted(text: str) -> str:
    """Return a field of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if any(letter in text for letter in ',"\n\r') else text


def summarize_clients(values: Sequence[float], lower_is_better: bool) -> tuple[float, float, float]:
    """Return mean, population standard deviation, and mean of the worst tenth (rounded up) over clients.

    Clients with NaN, such as the AUC of one class, are left out.

    >>> summarize_clients([0.75, 0.25, 0.5, math.nan], lower_is_better=False)
    (0.5, 0.2041241452319315, 0.25)
    """
    known = sorted((value for value in values if not math.isnan(value)), reverse=lower_is_better)
    if not known:
        return math.nan, math.nan, math.nan
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / len(known))
    worst = known[: -(-len(known) // 10)]
    return mean, deviation, math.fsum(worst) / len(worst)
