"""The protocol of stores of client rows, and the arithmetic over rows that all stores share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.vectors import arithmetic
from hansa.runs.store.io import sha256

T = TypeVar("T")
Rows: TypeAlias = Mapping[int, Mapping[str, Tensor]]

SERVER = "server/"
"""Prefix of rows that the server keeps per client (FedAWARE's momentum); ``read`` leaves them out."""

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
BLOCK = 32  # rows in memory at a time when many are streamed
SPAN = 1 << 14  # coordinates converted to float64 at a time, in a buffer that stays in cache


class ClientStore(Protocol):
    """Rows of every client: transactional, one commit per closed round.

    ``generation`` counts the rounds closed: 0 when new, r + 1 after ``commit(r, ...)``, so it equals
    ``ServerState.round``. A commit adds and replaces the rows it names and leaves all others as they are.
    """

    @property
    def generation(self) -> int: ...

    def read(self, client: int) -> dict[str, Tensor]:
        """Return copies of the client's rows; empty if none were written."""
        ...

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        """Return one row of several clients as [k, d]; raise if a client has none."""
        ...

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        """Return <row_i, vector_j> in float64, [k, v]; rows are streamed, never all in memory."""
        ...

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        """Return sum w_i row_i in float64, added in the given order; rows are streamed."""
        ...

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows for the next commit; until then reads return the old ones."""
        ...

    def discard(self) -> None:
        """Discard staged rows."""
        ...

    def commit(self, round: int, rows: Rows) -> None:
        """Close a round: commit the staged rows and these atomically."""
        ...

    def clients(self, name: str | None = None) -> list[int]:
        """Return the clients with any row, or with this one, in order."""
        ...

    def digest(self) -> str:
        """Return one SHA-256 over every row of every client: equal for equal contents, in RAM or on disk."""
        ...

    def close(self) -> None: ...


def row_bytes(row: Tensor) -> memoryview:
    """Return the bytes of a row."""
    return row.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def row_digest(row: Tensor) -> str:
    """Return the SHA-256 of a row's dtype, shape and bytes."""
    return hash_row(dtype_name(row.dtype), tuple(row.shape), row_bytes(row))


def hash_row(dtype: str, shape: Sequence[int], data: memoryview) -> str:
    return sha256(hash_header(dtype, shape), data)


def hash_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return what a row's SHA-256 covers before its bytes."""
    return f"{dtype}{list(shape)}".encode()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def store_digest(rows: Iterable[tuple[int, str, str]]) -> str:
    """Return the digest of a store from (client, name, row digest) in order."""
    return sha256(*(f"{client}:{len(name)}:{name}:{row}\n".encode() for client, name, row in rows))


def check_commit(round: int, generation: int, rows: Rows) -> None:
    """Refuse a commit of another round, or of something that is not a row."""
    if round != generation:
        raise HansaError(
            f"commit(round={round}): the store is at round {generation}. Rounds close one after another; "
            "open the store at the round of the checkpoint you resume from."
        )
    check_rows(rows)


def check_rows(rows: Rows) -> None:
    """Refuse values that are not rows."""
    for client, named in rows.items():
        if isinstance(client, bool) or not isinstance(client, int) or client < 0:
            raise invalid_argument("commit", "client", client, "a whole number >= 0")
        for name, row in named.items():
            if not isinstance(name, str) or not name:
                raise invalid_argument("commit", "name", name, "a string")
            if not isinstance(row, Tensor):
                raise HansaError(f"commit: client {client}, row {name!r}: expected a tensor, got {type(row).__name__}.")
            if dtype_name(row.dtype) not in DTYPES:
                known = ", ".join(DTYPES)
                raise HansaError(f"commit: client {client}, row {name!r} has dtype {row.dtype}. Known: {known}.")


def missing_row_error(client: int, name: str, known: Iterable[str]) -> HansaError:
    names = list(known)
    return HansaError(
        f"client {client} has no row {name!r}. {suggestion(name, names) if names else 'It was never written.'}"
    )


def check_matrix(name: str, kinds: set[tuple[str, int]]) -> None:
    """Refuse to stack no rows, or rows of different dtypes or lengths."""
    if not kinds:
        raise HansaError(f"rows {name!r}: no clients given.")
    if len(kinds) > 1:
        raise HansaError(f"rows {name!r} differ in dtype or length, {sorted(kinds)}: they cannot be stacked.")


def check_vectors(vectors: Tensor, length: int | None = None) -> None:
    """Refuse vectors that are not a matrix, or not as long as the rows."""
    if vectors.ndim != 2:
        raise invalid_argument("dot", "vectors", tuple(vectors.shape), "a matrix, one vector a row")
    if length is not None and length != vectors.shape[1]:
        raise invalid_argument("dot", "vectors", tuple(vectors.shape), f"vectors of {length} numbers, as the rows are")


def blocks(many: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield blocks of rows, the same for every store so that sums agree to the last bit."""
    for start in range(0, len(many), BLOCK):
        yield many[start : start + BLOCK]


def dot_blocks(streamed: Iterable[Tensor], count: int, vectors: Tensor) -> Tensor:
    """Return <row_i, vector_j> over streamed blocks of rows, in float64."""
    check_vectors(vectors)
    total = torch.zeros(count, len(vectors), dtype=torch.float64)
    at = 0
    for rows in streamed:
        check_vectors(vectors, rows.shape[1])
        total[at : at + len(rows)] = arithmetic.inner_products(rows, vectors)
        at += len(rows)
    return total


def combine_blocks(streamed: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum w_i row_i over streamed blocks of rows."""
    total: Tensor | None = None
    at = 0
    for rows in streamed:
        if total is None:
            total = torch.zeros(rows.shape[1], dtype=torch.float64)
        for row in rows:
            if at == len(weights):
                break
            for start in range(0, len(row), SPAN):
                total[start : start + SPAN].add_(row[start : start + SPAN].to(torch.float64), alpha=float(weights[at]))
            at += 1
    if total is None or at != len(weights):
        raise HansaError(
            f"combine: {len(weights)} weights given for {at} clients: expected one each, and at least one."
        )
    return total
