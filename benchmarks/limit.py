"""The limit: the matrix products that a step consists of, bare, and the peak of large ones.

    python limit.py ANSWER.json

A convolution counts as the product of its unfolded input with its weights. Each of one and then two threads does the
steps of another client, as workers would.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

Shape = tuple[int, int, int]

SECONDS = 0.5


def layer(rows: int, inputs: int, outputs: int, first: bool = False) -> list[Shape]:
    """(m, k, n) of the products of a layer: forward, the gradient of its weights, and that of its input."""
    found = [(rows, inputs, outputs), (inputs, rows, outputs)]
    return found if first else [*found, (rows, outputs, inputs)]


def shapes(model: str, batch: int) -> list[Shape]:
    """The products of one step.

    >>> sum(2 * m * k * n for m, k, n in shapes("mlp", 20))
    12784000
    """
    if model == "mlp":
        return [*layer(batch, 784, 200, first=True), *layer(batch, 200, 10)]
    return [
        *layer(batch * 28 * 28, 25, 16, first=True),
        *layer(batch * 14 * 14, 400, 32),
        *layer(batch, 1568, 10),
    ]


def products(found: list[Shape]) -> Callable[[], None]:
    ready = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for m, k, n in found]

    def step() -> None:
        for a, b, out in ready:
            torch.mm(a, b, out=out)

    return step


def rate(make: Callable[[], Callable[[], None]], threads: int, seconds: float = SECONDS) -> float:
    """Steps a second of all threads together."""
    counts = [0] * threads
    steps = [make() for _ in range(threads)]
    for step in steps:
        step()
    stop = time.perf_counter() + seconds

    def work(which: int) -> None:
        while time.perf_counter() < stop:
            steps[which]()
            counts[which] += 1

    workers = [threading.Thread(target=work, args=(which,)) for which in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began)


def measure(threads: int) -> dict[str, dict[str, float]]:
    """Steps a second of each workload's products, and the peak in operations a second."""
    found = {}
    for name, model, batch in (("W1", "cnn_29k", 50), ("W2", "mlp", 20)):
        needed = shapes(model, batch)
        flops = sum(2 * m * k * n for m, k, n in needed)
        found[name] = {"steps": rate(partial(products, needed), threads), "flops": flops}
    found["peak"] = {"flops": 2 * 1024**3 * rate(partial(products, [(1024, 1024, 1024)]), threads)}
    return found


def main() -> None:
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps({threads: measure(threads) for threads in (1, 2)}))


if __name__ == "__main__":
    main()
