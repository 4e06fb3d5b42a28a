"""Client rows in memory, for runs that fit and need not outlive the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hansa.runs.store.base import (
    SERVER,
    Rows,
    blocks,
    check_commit,
    check_matrix,
    check_rows,
    combine_blocks,
    dot_blocks,
    dtype_name,
    missing_row_error,
    row_digest,
    store_digest,
)


class RamStore:
    """A `ClientStore` in memory. `tree` and `restore` save and load it in checkpoints.

    >>> store = RamStore()
    >>> store.commit(0, {3: {"uplink/model/residual": torch.ones(2)}})
    >>> store.generation, store.clients(), store.read(3), store.read(4)
    (1, [3], {'uplink/model/residual': tensor([1., 1.])}, {})
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._staged: dict[int, dict[str, Tensor]] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    def read(self, client: int) -> dict[str, Tensor]:
        mine = sorted(self._rows.get(client, {}).items())
        return {name: row.clone() for name, row in mine if not name.startswith(SERVER)}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        rows = [self._row(client, name) for client in clients]
        check_matrix(name, {(dtype_name(row.dtype), row.numel()) for row in rows})
        return torch.stack([row.reshape(-1) for row in rows])

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        return dot_blocks(self._stream(clients, name), len(clients), vectors)

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        return combine_blocks(self._stream(clients, name), weights)

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        self._staged.setdefault(client, {}).update(_copy_rows(rows))

    def discard(self) -> None:
        self._staged = {}

    def commit(self, round: int, rows: Rows) -> None:
        check_commit(round, self._generation, rows)
        for client, named in (*self._staged.items(), *((client, _copy_rows(rows[client])) for client in rows)):
            if named:
                self._rows[client] = {**self._rows.get(client, {}), **named}
        self._staged, self._generation = {}, round + 1

    def clients(self, name: str | None = None) -> list[int]:
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        ordered = ((c, n, row_digest(self._rows[c][n])) for c in sorted(self._rows) for n in sorted(self._rows[c]))
        return store_digest(ordered)

    def close(self) -> None:
        """Do nothing."""

    def tree(self) -> dict[str, Any]:
        """Return the store as a plain tree, for a checkpoint."""
        rows = {str(client): dict(named) for client, named in sorted(self._rows.items())}
        return {"generation": self._generation, "rows": rows}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> RamStore:
        """Return the store of a `tree`."""
        store = cls()
        store._rows = {int(client): dict(named) for client, named in tree["rows"].items()}
        store._generation = tree["generation"]
        return store

    def _row(self, client: int, name: str) -> Tensor:
        try:
            return self._rows[client][name]
        except KeyError:
            raise missing_row_error(client, name, self._rows.get(client, {})) from None

    def _stream(self, clients: Sequence[int], name: str) -> Iterator[Tensor]:
        for some in blocks(clients):
            yield self.read_many(some, name)


def _copy_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: row.detach().to("cpu", copy=True).contiguous() for name, row in rows.items()}
