"""FedAWARE's aggregator over momentum rows on disk, driven with synthetic updates.

    python aware_rows.py disk|naive CLIENTS DIM PARTICIPANTS ROUNDS FOLDER ANSWER.json

"disk" is `hansa.aggregate.aware` over a `DiskStore` with one row per client. "naive" holds all rows in one matrix,
recomputes the Gram matrix each round, and forms the direction from all rows.

Row i is sum_k c_ik b_k + e_i, with b_k dense and random and e_i on its own block of coordinates. So the Gram matrix of
all clients is known without reading rows, and a run can start with every client seen.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hansa.aggregate import aware, min_norm
from hansa.aggregate.aware import MOMENTUM
from hansa.core.keys import Key
from hansa.core.types import Population, RoundContext, Update
from hansa.runs.store import DiskStore

FACTORS = 16


class Rows:
    """The synthetic momenta."""

    def __init__(self, clients: int, dim: int) -> None:
        self.clients, self.dim = clients, dim
        draw = Key(0).child("rows").numpy()
        self.basis = torch.from_numpy(draw.standard_normal((FACTORS, dim), dtype="float32")) / dim**0.5
        # around a common direction, as the updates of clients that share a model are
        self.weights = torch.from_numpy(draw.standard_normal((clients, FACTORS)))
        self.weights[:, 0] += 3.0
        self.block, self.own = dim // clients, 2.0

    def row(self, client: int) -> torch.Tensor:
        found: torch.Tensor = self.weights[client].float() @ self.basis
        found[client * self.block : (client + 1) * self.block] += self.own / self.block**0.5
        return found

    def gram(self) -> torch.Tensor:
        """<m_i, m_j> of all, from the factors."""
        basis = self.basis.double()
        shared: torch.Tensor = self.weights @ (basis @ basis.T) @ self.weights.T
        blocks = basis[:, : self.clients * self.block].view(FACTORS, self.clients, self.block).sum(2)
        cross: torch.Tensor = self.weights @ blocks * (self.own / self.block**0.5)
        return shared + cross + cross.T + self.own**2 * torch.eye(self.clients, dtype=torch.float64)


def updates(rows: Rows, participants: int, round: int) -> list[Update]:
    """Fresh updates of some clients: their rows with noise."""
    draw = Key(1).child("updates", round).numpy()
    chosen = sorted(draw.choice(rows.clients, participants, replace=False).tolist())
    noise = torch.from_numpy(draw.standard_normal((participants, rows.dim), dtype="float32")) / rows.dim**0.5
    return [Update(c, i, rows.row(c) + noise[i], 100, 24.0) for i, c in enumerate(chosen)]


def on_disk(rows: Rows, participants: int, rounds: int, folder: Path) -> dict[str, Any]:
    part = aware(momentum_storage="disk")
    population = Population((100,) * rows.clients)
    with DiskStore(folder) as store:
        for turn, start in enumerate(range(0, rows.clients, 50)):
            some = range(start, min(start + 50, rows.clients))
            store.commit(turn, {client: {MOMENTUM: rows.row(client)} for client in some})
        state = {**part.init(rows.dim, rows.clients), "clients": list(range(rows.clients)), "gram": rows.gram()}
        seconds, processor = [], []
        for round in range(rounds + 1):  # the first warms up: rows are verified by SHA-256 when first met
            given = updates(rows, participants, round)
            began, used = time.perf_counter(), time.process_time()
            ctx = RoundContext(round, population, tuple(update.client for update in given), store)
            combined = part.combine(given, state, ctx)
            store.commit(store.generation, combined.rows)
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            state = combined.state
    return {"seconds": seconds[1:], "cpu": processor[1:]}


def naive(rows: Rows, participants: int, rounds: int) -> dict[str, Any]:
    held = torch.stack([rows.row(client) for client in range(rows.clients)])
    found = []
    for round in range(rounds + 1):
        given = updates(rows, participants, round)
        began = time.perf_counter()
        for update in given:
            held[update.client].mul_(0.5).add_(update.vector, alpha=0.5)
        weights = min_norm((held @ held.T).double()).weights
        _ = weights.float() @ held
        found.append(time.perf_counter() - began)
    return {"seconds": found[1:]}


def main() -> None:
    how, clients, dim, participants, rounds = sys.argv[1], *map(int, sys.argv[2:6])
    folder, answer = Path(sys.argv[6]), Path(sys.argv[7])
    torch.set_num_threads(1)
    rows = Rows(clients, dim)
    if how == "naive":
        answer.write_text(json.dumps(naive(rows, participants, rounds)))
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        answer.write_text(json.dumps(on_disk(rows, participants, rounds, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
