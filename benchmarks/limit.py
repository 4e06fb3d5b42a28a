"""The limit of the machine: the bare matrix products of a step, and the peak of large ones.

    python limit.py ANSWER.json

A convolution counts as the product of its unfolded input with its weights. Steps run first in one process and then in
two, each with its own clients and one thread, as workers do.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

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
    if model == "logistic":
        return layer(batch, 784, 10, first=True)
    if model == "pfl_cnn":
        return [
            *layer(batch * 30 * 30, 27, 32, first=True),
            *layer(batch * 28 * 28, 288, 64),
            *layer(batch, 12544, 128),
            *layer(batch, 128, 10),
        ]
    return [
        *layer(batch * 28 * 28, 25, 16, first=True),
        *layer(batch * 14 * 14, 400, 32),
        *layer(batch, 1568, 10),
    ]


def work(found: list[Shape], begin: Any, seconds: float, counts: Any) -> None:
    """Do steps for that long, on one thread, from the moment that all are ready; tell how many a second."""
    torch.set_num_threads(1)
    ready = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for m, k, n in found]
    for a, b, out in ready:
        torch.mm(a, b, out=out)
    begin.wait()
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        for a, b, out in ready:
            torch.mm(a, b, out=out)
        count += 1
    counts.put(count / taken)


def rate(found: list[Shape], workers: int, seconds: float = SECONDS) -> float:
    """Steps a second of that many processes together: threads would wait for one another's interpreter."""
    context = multiprocessing.get_context("fork")  # nothing of torch has run here yet
    begin, counts = context.Barrier(workers), context.SimpleQueue()
    processes = [context.Process(target=work, args=(found, begin, seconds, counts)) for _ in range(workers)]
    for process in processes:
        process.start()
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def measure(workers: int) -> dict[str, dict[str, float]]:
    """Steps a second of each workload's products, and the peak in operations a second."""
    found = {}
    for name, model, batch in (("W1", "cnn_29k", 50), ("W2", "mlp", 20), ("W3", "pfl_cnn", 10), ("W4", "logistic", 10)):
        needed = shapes(model, batch)
        flops = sum(2 * m * k * n for m, k, n in needed)
        found[name] = {"steps": rate(needed, workers), "flops": flops}
    found["peak"] = {"flops": 2 * 1024**3 * rate([(1024, 1024, 1024)], workers)}
    return found


def main() -> None:
    Path(sys.argv[1]).write_text(json.dumps({workers: measure(workers) for workers in (1, 2)}))


if __name__ == "__main__":
    main()
