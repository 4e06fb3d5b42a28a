"""The client record as columns, as a pandas frame, or with one row per client.

It is stored as one block of bytes per round. Integers, and the bits of single-precision floats, are stored as offsets
from their minimum in as few bytes as the range needs, none if all are equal: eight bytes per client and round if only
loss and norm differ. Pickle is not used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hansa.core.errors import HansaError, suggestion
from hansa.data.sources import spreadsheet_text
from hansa.runs.columns import CLIENT_COLUMNS
from hansa.runs.store import io

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas

Array: TypeAlias = "npt.NDArray[Any]"

DTYPES_BY_COLUMN = {name: column.dtype for name, column in CLIENT_COLUMNS.items()}
TOTALS_BY_COLUMN = {name: column.total for name, column in CLIENT_COLUMNS.items() if column.total}

_SIZE = struct.Struct("<I")
_MAX_CLIENTS = 10_000_000  # of one round


class ClientColumns(dict[str, Array]):
    """The client record as NumPy arrays by name, one row per round and client.

    `hansa.runs.columns.CLIENT_COLUMNS` describes the columns. Evaluations add ``test_...``, and ``personal_...`` after
    steps on the client's own rows. Unmeasured values are NaN; unsent bytes are 0. ``client_names`` are the names of the
    clients by number, such as hospitals or files, if they have names.
    """

    client_names: Sequence[str] = ()

    def named(self, names: Sequence[str]) -> ClientColumns:
        """Return the same columns with the names of clients by number."""
        self.client_names = names
        return self

    def name_of(self, client: int) -> str:
        """Return the name of a client, or "client 3" if it has none."""
        return self.client_names[client] if client < len(self.client_names) else f"client {client}"

    def frame(self) -> pandas.DataFrame:
        """Return the columns as a pandas frame, with the names of clients, if any, after their numbers."""
        import pandas

        frame = pandas.DataFrame(dict(self))
        if self.client_names and "client" in self:
            names = [self.name_of(client) for client in self["client"].tolist()]
            frame.insert(list(self).index("client") + 1, "name", names)
        return frame

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
        return self.take(slice(*np.searchsorted(self["round"], [round, round + 1])))

    def take(self, rows: Any) -> ClientColumns:
        """Return some rows, as they index an array."""
        return ClientColumns({name: values[rows] for name, values in self.items()}).named(self.client_names)

    def by_client(self) -> ClientColumns:
        """Return one row per client: sums of participations and bytes, and the last loss, norm and evaluation.

        >>> columns = {"round": [1, 1, 2], "client": [0, 2, 2], "asked": [1, 1, 1], "admitted": [1, 1, 1],
        ...         "loss": [0.5, 0.75, 0.25], "norm": [1.0, 1.0, 2.0], "up_bytes": [8, 8, 8]}
        >>> by_client = ClientColumns({name: np.array(values) for name, values in columns.items()}).by_client()
        >>> by_client["client"].tolist(), by_client["participations"].tolist(), by_client["loss"].tolist()
        ([0, 2], [1, 2], [0.5, 0.25])
        """
        return total_by_client([self]).named(self.client_names)

    def write(self, path: Path | str) -> Path:
        """Write the rows as CSV, unmeasured values empty, or to .npz as arrays for ``numpy.load``, without pickle."""
        path, content, frame = Path(path), BytesIO(), self.frame()
        if path.suffix == ".npz":
            arrays = {name: frame[name].to_numpy(str if name == "name" else None) for name in frame}
            np.savez_compressed(content, allow_pickle=False, **arrays)
        else:
            if "name" in frame:
                frame["name"] = frame["name"].map(spreadsheet_text)
            frame.rename(columns=spreadsheet_text).to_csv(content, index=False, lineterminator="\n")
        io.make_folder(path.parent.resolve())
        io.write_file(path, content.getvalue())
        return path

    def __repr__(self) -> str:
        return f"ClientColumns({self.rows} rows: {', '.join(self)})"


def merge_tables(*tables: Mapping[str, Array]) -> dict[str, Array]:
    """Return tables of one round as columns of all their clients, in ascending order; unmeasured values are NaN."""
    dtypes = {name: dtype for name, dtype in DTYPES_BY_COLUMN.items() if name != "round"}
    if tables and dtypes.keys() <= tables[0].keys() and not any(tables[1:]):
        return dict(tables[0])  # nothing to merge
    clients = np.unique(np.concatenate([np.empty(0, np.int64), *(table["client"] for table in tables if table)]))
    columns = {
        name: np.full(len(clients), np.nan if dtype == "float32" else 0, dtype) for name, dtype in dtypes.items()
    }
    columns["client"][:] = clients
    for table in tables:
        rows = np.searchsorted(clients, table["client"]) if table else clients
        for name, values in table.items():
            columns.setdefault(name, np.full(len(clients), np.nan, np.float32))[rows] = values
    return columns


def encode_clients(*tables: Mapping[str, Array]) -> bytes:
    """Return tables of one round as a block of bytes: a JSON header of the column formats, and the columns."""
    head: dict[str, Any] = {}
    body: list[bytes] = []
    columns = merge_tables(*tables)
    rows = len(columns["client"])
    for name, values in columns.items() if rows else ():
        single = values.dtype.kind == "f"
        numbers = (values.astype("<f4").view("<u4") if single else values).astype(np.int64)
        if name == "client":  # ascending, so offsets from the index are small
            numbers = numbers - np.arange(rows)
        least, greatest = int(numbers.min()), int(numbers.max())
        width = next((width for width in (0, 1, 2, 4) if greatest - least < 1 << 8 * width), 8)
        if width:
            body.append((numbers - least).astype(f"<u{width}").tobytes())
        head[name] = [single, least, width]
    text = json.dumps([rows, head], separators=(",", ":")).encode()
    return b"".join([_SIZE.pack(len(text)), text, *body])


def decode_clients(block: bytes) -> dict[str, Array]:
    """Return the columns of a block; raise `ValueError` and the like if it is not one."""
    offset = _SIZE.size + _SIZE.unpack_from(block)[0]
    rows, head = json.loads(block[_SIZE.size : offset])
    if not 0 <= rows <= _MAX_CLIENTS:
        raise ValueError(f"a table of {rows} rows")
    columns: dict[str, Array] = {}
    for name, (single, least, width) in head.items():
        numbers = np.full(rows, least, np.int64)
        if width:
            numbers += np.frombuffer(block, f"<u{width}", rows, offset).astype(np.int64)
            offset += rows * width
        if name == "client":
            numbers += np.arange(rows)
        columns[name] = numbers.astype(np.uint32).view(np.float32) if single else numbers
    if offset != len(block):
        raise ValueError(f"{len(block) - offset} bytes too many")
    return columns


def join_rounds(blocks: Iterable[tuple[int, bytes]], names: Sequence[str] = ()) -> ClientColumns:
    """Join the blocks of rounds: one row per client that trained or was evaluated, NaN for unmeasured values."""
    rounds: list[dict[str, Array]] = []
    names_seen = dict.fromkeys(DTYPES_BY_COLUMN)
    for round, block in blocks:
        if decoded := decode_clients(block):
            columns = {"round": np.full(len(decoded["client"]), round), **decoded}
            names_seen.update(dict.fromkeys(columns))
            rounds.append({name: columns[name] for name in columns if not names or name in ("client", *names)})
    joined = ClientColumns()
    for name in names or names_seen:
        if name not in names_seen:
            raise HansaError(f"clients: no column {name!r}. {suggestion(name, list(names_seen))}")
        arrays = [table.get(name, np.full(len(table["client"]), np.nan, np.float32)) for table in rounds]
        joined[name] = (np.concatenate(arrays) if arrays else np.empty(0)).astype(DTYPES_BY_COLUMN.get(name, "float32"))
    return joined


def total_by_client(tables: Iterable[Mapping[str, Array]]) -> ClientColumns:
    """Return one row per client from tables of consecutive rounds; memory grows with the number of clients only."""
    import pandas

    total, sums = pandas.DataFrame(), [*TOTALS_BY_COLUMN.values()]
    for columns in tables:
        rows = pandas.DataFrame(dict(columns)).drop(columns="round", errors="ignore").rename(columns=TOTALS_BY_COLUMN)
        present = [name for name in sums if name in rows]
        rows = pandas.concat([total, rows.astype(dict.fromkeys(present, np.int64))])
        rules = {name: "sum" if name in present else "last" for name in [*present, *rows] if name != "client"}
        total = rows.groupby("client", as_index=False).agg(rules)  # "last" skips NaN
    integers = {"client", *sums}
    return ClientColumns({name: total[name].to_numpy("int64" if name in integers else "float32") for name in total})


def summarize_clients(values: Sequence[float], lower_is_better: bool) -> tuple[float, float, float]:
    """Return mean, population standard deviation, and mean of the worst tenth (rounded up) over clients.

    Clients with NaN, such as the AUC of one class, are excluded.

    >>> summarize_clients([0.75, 0.25, 0.5, math.nan], lower_is_better=False)
    (0.5, 0.2041241452319315, 0.25)
    """
    measured = sorted((value for value in values if not math.isnan(value)), reverse=lower_is_better)
    if not measured:
        return math.nan, math.nan, math.nan
    mean = math.fsum(measured) / len(measured)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in measured) / len(measured))
    worst = measured[: -(-len(measured) // 10)]
    return mean, deviation, math.fsum(worst) / len(worst)
