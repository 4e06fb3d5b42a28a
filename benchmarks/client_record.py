"""The cost of the client record: bytes on disk, and its share of a run's CPU time.

    python benchmarks/client_record.py [--clients 10000] [--rounds 1000]

The size is the worst case: all clients in all rounds, each with its own loss and norm, evaluated every tenth round. The
share is measured on short real runs at the minimum cost of a round, one step on eight rows per client: CPU seconds
spent in the record over those of the run, record included, in one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.nn.functional import cross_entropy

import hansa
from hansa.runs import driver
from hansa.runs.client_record import ClientRecord


def size(clients: int, rounds: int, path: Path) -> int:
    """Bytes of the record of everybody in every round."""
    draw, record = np.random.default_rng(0), ClientRecord(path)
    everybody, ones = np.arange(clients), np.ones(clients, np.int64)
    for round in range(1, rounds + 1):
        loss, norm, tested, hits = draw.random((4, clients), np.float32)
        work = {"client": everybody, "asked": ones, "admitted": ones, "loss": loss, "norm": norm,
                "up_bytes": 4000 * ones, "down_bytes": 4000 * ones, "peer_bytes": 0 * ones}  # fmt: skip
        marks = {"client": everybody, "test_loss": tested, "test_accuracy": hits} if round % 10 == 0 else {}
        record.add(round, work=work, test=marks)
    return path.stat().st_size


class Metered(ClientRecord):
    """A record that counts the CPU time of its own."""

    spent = 0.0

    def add(self, round: int, **tables: object) -> None:
        began = time.process_time()
        super().add(round, **tables)  # type: ignore[arg-type]
        Metered.spent += time.process_time() - began


def share(clients: int, participants: int, rounds: int, path: Path) -> float:
    """CPU seconds of the record over those of the run."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((8 * clients, 20)).astype(np.float32)
    held = hansa.data.from_arrays(x, (x[:, 0] > 0).astype(np.int64), clients=np.repeat(np.arange(clients), 8))
    task = hansa.Task(lambda: hansa.models.build("logistic", classes=2, shape=(20,)), cross_entropy, held)
    made = hansa.presets.fedavg(steps=1, batch_size=8, local_lr=0.1).exchange(
        sampler=hansa.sample.uniform(count=participants)
    )
    living = driver.Run(made, task, seed=0)
    living.client_record = Metered(path)
    gather = driver.participation_columns

    def counted(*words: object) -> object:
        began = time.process_time()
        found = gather(*words)  # type: ignore[arg-type]
        Metered.spent += time.process_time() - began
        return found

    Metered.spent = 0.0
    driver.participation_columns = counted  # type: ignore[assignment]
    try:
        began = time.process_time()
        living.advance(rounds)
        whole = time.process_time() - began
    finally:
        driver.participation_columns = gather
    return Metered.spent / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = size(asked.clients, asked.rounds, Path(folder) / "size")
        print(f"{asked.clients} clients, {asked.rounds} rounds, all of them in each: {found / 1e6:.1f} MB")
        for number in (asked.clients // 100, asked.clients // 10, asked.clients):
            took = share(asked.clients, number, max(2, 20_000 // number), Path(folder) / str(number))
            print(f"{number} participants of {asked.clients}: {100 * took:.2f}% of the run's CPU time")


if __name__ == "__main__":
    main()
