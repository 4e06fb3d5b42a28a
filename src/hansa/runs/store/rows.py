"""Rows of clients: what every store has in common, and the store in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.vectors import arithmetic
from hansa.runs.store.io import sha256

Rows: TypeAlias = Mapping[int, Mapping[str, Tensor]]

SERVER = "server/"
"""Prefix of rows that the server keeps per client (FedAWARE's momentum); ``read`` leaves them out."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
BLOCK = 32  # rows in memory at a time when they are multiplied, the same in every store: sums agree to the last bit
FEW = 4  # rows in memory at a time when they are added one after another
SPAN = 1 << 14  # coordinates converted to float64 at a time, in a buffer that stays in cache


class ClientStore(ABC):
    """Rows of every client: transactional, one commit per closed round.

    ``generation`` counts the rounds closed: 0 when new, r + 1 after ``commit(r, ...)``, so it equals
    ``ServerState.round``. A commit adds and replaces the rows it names and leaves all others as they are.
    """

    generation = 0
    _rows: dict[int, dict[str, Any]]

    def read(self, client: int) -> dict[str, Tensor]:
        """Return copies of the client's rows; empty if none were written."""
        mine = sorted(self._rows.get(client, {}).items())
        return {name: self._load(row) for name, row in mine if not name.startswith(SERVER)}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        """Return one row of several clients as [k, d]; raise if a client has none."""
        return next(self._blocks(self._alike(clients, name), len(clients)))

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        """Return <row_i, vector_j> in float64, [k, v]; rows are streamed, never all in memory."""
        rows = self._alike(clients, name)
        length = self._layout(rows[0])[1]
        if vectors.ndim != 2 or vectors.shape[1] != length:
            raise invalid_argument(
                "dot", "vectors", tuple(vectors.shape), f"a matrix of vectors of {length} numbers, as the rows are"
            )
        return self._products(rows, vectors)

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        """Return sum w_i row_i in float64, added in the given order; rows are streamed."""
        rows = self._alike(clients, name)
        if len(weights) != len(rows):
            raise HansaError(f"combine: {len(weights)} weights given for {len(rows)} clients: expected one each.")
        total = torch.zeros(self._layout(rows[0])[1], dtype=torch.float64)
        streamed = (row for block in self._blocks(rows, FEW) for row in block)
        for row, weight in zip(streamed, weights, strict=True):
            for start in range(0, len(row), SPAN):
                total[start : start + SPAN].add_(row[start : start + SPAN].to(torch.float64), alpha=float(weight))
        return total

    def clients(self, name: str | None = None) -> list[int]:
        """Return the clients with any row, or with this one, in order."""
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        """Return one SHA-256 over every row of every client: equal for equal contents, in memory or on disk."""
        every = ((c, name, row) for c in self.clients() for name, row in sorted(self._rows[c].items()))
        return sha256(*(f"{c}:{len(name)}:{name}:{self._sha(row)}\n".encode() for c, name, row in every))

    @abstractmethod
    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows for the next commit; until then reads return the old ones."""

    @abstractmethod
    def discard(self) -> None:
        """Discard staged rows."""

    @abstractmethod
    def commit(self, round: int, rows: Rows) -> None:
        """Close a round: commit the staged rows and these atomically."""

    def close(self) -> None:
        """Release what the store holds."""
        return

    @abstractmethod
    def _load(self, row: Any) -> Tensor:
        """Return a copy of a row."""

    @abstractmethod
    def _layout(self, row: Any) -> tuple[str, int]:
        """Return the dtype and the length of a row."""

    @abstractmethod
    def _sha(self, row: Any) -> str:
        """Return the `row_digest` of a row."""

    @abstractmethod
    def _blocks(self, rows: Sequence[Any], size: int) -> Iterator[Tensor]:
        """Yield rows of one layout as matrices of at most ``size`` rows, each valid until the next."""

    def _products(self, rows: Sequence[Any], vectors: Tensor) -> Tensor:
        return torch.cat([arithmetic.inner_products(block, vectors) for block in self._blocks(rows, BLOCK)])

    def _alike(self, clients: Sequence[int], name: str) -> list[Any]:
        """Return the named row of each client; refuse rows that do not form a matrix."""
        rows = []
        for client in clients:
            known = self._rows.get(client, {})
            if name not in known:
                hint = suggestion(name, list(known)) if known else "It was never written."
                raise HansaError(f"client {client} has no row {name!r}. {hint}")
            rows.append(known[name])
        layouts = set(map(self._layout, rows))
        if len(layouts) != 1:
            what = f"differ in dtype or length, {sorted(layouts)}" if rows else "of no clients were asked for"
            raise HansaError(f"rows {name!r} {what}: they cannot be stacked.")
        return rows

    def _check_round(self, round: int, rows: Rows) -> None:
        """Refuse a commit of another round, or of something that is not a row."""
        if round != self.generation:
            raise HansaError(
                f"commit(round={round}): the store is at round {self.generation}. Rounds close one after another; "
                "open the store at the round of the checkpoint you resume from."
            )
        check_rows(rows)


class RamStore(ClientStore):
    """A `ClientStore` in memory. `tree` and `restore` save and load it in checkpoints.

    >>> store = RamStore()
    >>> store.commit(0, {3: {"uplink/model/residual": torch.ones(2)}})
    >>> store.generation, store.clients(), store.read(3), store.read(4)
    (1, [3], {'uplink/model/residual': tensor([1., 1.])}, {})
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._staged: list[tuple[int, dict[str, Tensor]]] = []

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        self._staged.append((client, _copy_rows(rows)))

    def discard(self) -> None:
        self._staged = []

    def commit(self, round: int, rows: Rows) -> None:
        self._check_round(round, rows)
        for client, named in (*self._staged, *((client, _copy_rows(rows[client])) for client in rows)):
            if named:
                self._rows.setdefault(client, {}).update(named)
        self._staged, self.generation = [], round + 1

    def tree(self) -> dict[str, Any]:
        """Return the store as a plain tree, for a checkpoint."""
        rows = {str(client): dict(named) for client, named in sorted(self._rows.items())}
        return {"generation": self.generation, "rows": rows}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> RamStore:
        """Return the store of a `tree`."""
        store = cls()
        store._rows = {int(client): dict(named) for client, named in tree["rows"].items()}
        store.generation = tree["generation"]
        return store

    def _load(self, row: Tensor) -> Tensor:
        return row.clone()

    def _layout(self, row: Tensor) -> tuple[str, int]:
        return dtype_name(row.dtype), row.numel()

    def _sha(self, row: Tensor) -> str:
        return row_digest(row)

    def _blocks(self, rows: Sequence[Tensor], size: int) -> Iterator[Tensor]:
        for start in range(0, len(rows), size):
            yield torch.stack([row.reshape(-1) for row in rows[start : start + size]])


def _copy_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: row.detach().to("cpu", copy=True).contiguous() for name, row in rows.items()}


def check_rows(rows: Rows) -> None:
    """Refuse values that are not rows."""
    for client, named in rows.items():
        if isinstance(client, bool) or not isinstance(client, int) or client < 0:
            raise invalid_argument("commit", "client", client, "a whole number >= 0")
        for name, row in named.items():
            if not isinstance(name, str) or not name:
                raise invalid_argument("commit", "name", name, "a string")
            if not isinstance(row, Tensor) or dtype_name(row.dtype) not in DTYPES:
                found = row.dtype if isinstance(row, Tensor) else type(row).__name__
                raise HansaError(
                    f"commit: client {client}, row {name!r}: expected a tensor of {', '.join(DTYPES)}, got {found}."
                )


def row_bytes(row: Tensor) -> memoryview:
    """Return the bytes of a row."""
    return row.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def row_digest(row: Tensor) -> str:
    """Return the SHA-256 of a row's dtype, shape and bytes."""
    return sha256(digest_header(dtype_name(row.dtype), row.shape), row_bytes(row))


def digest_header(dtype: str, shape: Iterable[int]) -> bytes:
    """Return what a row's SHA-256 covers before its bytes."""
    return f"{dtype}{list(shape)}".encode()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
