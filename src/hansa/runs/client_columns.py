"""The client record as columns, as a pandas frame, or with one row per client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hansa.core.errors import HansaError, suggestion
from hansa.data.files import spreadsheet_text
from hansa.runs.columns import CLIENT_COLUMNS
from hansa.runs.store import io

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
        return total_by_client([self]).named(self.client_names)

    def write_csv(self, path: Path | str) -> Path:
        """Write the rows as CSV; unmeasured values are empty."""
        frame = self.frame()
        for name, values in self.items():
            if values.dtype.kind == "b":
                frame[name] = values.astype(np.int8)
        if "name" in frame:
            frame["name"] = frame["name"].map(spreadsheet_text)
        return _write(path, frame.to_csv(index=False, lineterminator="\n").encode())

    def write_npz(self, path: Path | str) -> Path:
        """Write the columns as arrays for ``numpy.load``, without pickle."""
        content, arrays = BytesIO(), dict[str, Any](self.with_name_column())
        np.savez_compressed(content, **arrays)
        return _write(path, content.getvalue())

    def __repr__(self) -> str:
        return f"ClientColumns({self.rows} rows: {', '.join(self)})"


def _write(path: Path | str, content: bytes) -> Path:
    io.make_folder(Path(path).parent.resolve())
    io.write_file(Path(path), content)
    return Path(path)


def join_rounds(
    blocks: Iterable[tuple[int, Mapping[str, Mapping[str, Array]]]], names: Sequence[str] = ()
) -> ClientColumns:
    """Join the tables of rounds: one row per client that trained or was evaluated, NaN for what was not measured."""
    rounds: list[dict[str, Array]] = []
    known = dict.fromkeys(DTYPES_BY_COLUMN)
    for round, tables in blocks:
        filled = _fill_columns(round, tables)
        known.update(dict.fromkeys(filled))
        rounds.append({name: filled[name] for name in filled if not names or name in ("client", *names)})
    columns = ClientColumns()
    for name in names or known:
        if name not in known:
            raise HansaError(f"clients: no column {name!r}. {suggestion(name, list(known))}")
        pieces = [each.get(name, np.full(len(each["client"]), np.nan, np.float32)) for each in rounds]
        columns[name] = np.concatenate(pieces) if pieces else np.empty(0, DTYPES_BY_COLUMN.get(name, np.float32))
    return columns


def _fill_columns(round: int, tables: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return the tables of a round as columns of all their clients, in ascending order."""
    clients = np.unique(np.concatenate([np.empty(0, np.int64), *(table["client"] for table in tables.values())]))
    columns: dict[str, Array] = {
        name: np.full(len(clients), np.nan if np.dtype(dtype).kind == "f" else 0, dtype)
        for name, dtype in DTYPES_BY_COLUMN.items()
    }
    columns["round"][:], columns["client"][:] = round, clients
    for table in tables.values():
        rows = np.searchsorted(clients, table["client"])
        for name, values in table.items():
            if name not in columns:
                columns[name] = np.full(len(clients), np.nan, np.float32)
            columns[name][rows] = values
    return columns


def total_by_client(pieces: Iterable[Mapping[str, Array]]) -> ClientColumns:
    """Return one row per client, from the rows of one round or of several after another; memory grows with the number
    of clients only."""
    present = np.zeros(0, np.bool_)
    sums: dict[str, Array] = {}
    last: dict[str, Array] = {}
    for columns in pieces:
        clients = columns["client"]
        size = max(len(present), int(clients.max(initial=-1)) + 1)
        present = _grown(present, size, False)
        present[clients] = True
        for name, values in columns.items():
            if name in TOTALS_BY_COLUMN:
                into = TOTALS_BY_COLUMN[name]
                sums[into] = _grown(sums.get(into, np.zeros(0, np.int64)), size, 0)
                np.add.at(sums[into], clients, values.astype(np.int64))  # exact where doubles would round
            elif name not in ("round", "client"):
                last[name] = _grown(last.get(name, np.zeros(0, np.float32)), size, np.nan)
                known = ~np.isnan(values)
                last[name][clients[known]] = values[known]  # the last value of a repeated client wins
    found = {"client": np.flatnonzero(present)}
    order = [name for name in TOTALS_BY_COLUMN.values() if name in sums]
    found |= {name: _grown(sums[name], len(present), 0)[present] for name in order}
    found |= {name: _grown(values, len(present), np.nan)[present] for name, values in last.items()}
    return ClientColumns(found)


def _grown(values: Array, length: int, fill: float) -> Array:
    if len(values) == length:
        return values
    return np.concatenate([values, np.full(length - len(values), fill, values.dtype)])


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
