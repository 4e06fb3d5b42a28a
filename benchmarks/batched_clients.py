"""Clients trained together in one program, one after the other, and by native code if it has the stages.

    python batched_clients.py TURNS ANSWER.json [MODEL ...]

All run the same rounds of 32 clients in one process on one thread, in alternation. The results are microseconds of
processor time per client step and the ratio of the first two, medians of the turns after the first.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, silu

import hansa

CLIENTS, CLASSES, WORDS = 32, 10, 200


class Tabular(nn.Module):
    """A tabular network with LayerNorm and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)]), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = silu(self.norms[0](self.first(x)))
        x = x + silu(self.norms[1](self.second(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Tanh(nn.Module):
    """A multilayer perceptron with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Four residual blocks with LayerNorm and GELU, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(32, 64), nn.Linear(64, CLASSES), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Regressor(nn.Module):
    """One number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, 0]  # type: ignore[no-any-return]


class TextClassifier(nn.Module):
    """The mean of word embeddings, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.words(x).mean(1))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """One encoder layer on short sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, CLASSES)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(x)).mean(1))  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """An LSTM on short sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(WORDS, 8), nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


class GruCells(nn.Module):
    """A GRU written cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 16)
        for part in x.split(4, dim=1):
            state = self.cell(part, state)
        return self.head(state)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Two residual convolutions with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms, self.head = nn.ModuleList([nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)]), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = x + torch.relu(self.norms[1](self.second(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Wide(nn.Module):
    """A wide perceptron, whose parameters fill the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, the shape of an example, its kind of targets, and the work of a client."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (32,)
    words: bool = False
    regression: bool = False
    batch: int = 16
    steps: int = 5


CASES = {
    "tabular, LayerNorm and SiLU": Case(Tabular),
    "perceptron, tanh": Case(Tanh),
    "residual, LayerNorm, GELU, dropout": Case(Residual),
    "regression, GELU": Case(Regressor, regression=True),
    "text, mean of embeddings": Case(TextClassifier, (12,), words=True),
    "transformer, one layer of 32": Case(Transformer, (16,), words=True),
    "LSTM of 32, length 16": Case(Lstm, (16,), words=True),
    "GRU cells, length 8": Case(GruCells),
    "ResNet, GroupNorm, 14 x 14": Case(ResNet, (1, 14, 14)),
    "wide perceptron, 512": Case(Wide),
}


def build_task(case: Case, execution: Any) -> hansa.Task:
    """Noise of the model's shape, dealt to clients of unequal size."""
    draw = hansa.Key(0).child("rows").numpy()
    rows = [20 + client for client in range(CLIENTS)]
    if case.words:
        inputs = torch.from_numpy(draw.integers(0, WORDS, (sum(rows), *case.shape)))
    else:
        inputs = torch.from_numpy(draw.standard_normal((sum(rows), *case.shape), dtype="float32"))
    targets = draw.standard_normal(sum(rows), dtype="float32") if case.regression else draw.integers(0, 10, sum(rows))
    owners = torch.repeat_interleave(torch.arange(CLIENTS), torch.tensor(rows))
    data = hansa.data.from_arrays(inputs, torch.from_numpy(targets), clients=owners.numpy())
    loss = mse_loss if case.regression else cross_entropy
    return hansa.Task(case.model, loss, data, execution=execution)


def measure(case: Case, turns: int) -> dict[str, Any]:
    """The measured ratio where clients can be trained together, and the times."""
    method = hansa.presets.fedavg(local_lr=0.01, steps=case.steps, batch_size=case.batch)
    tasks = {"together": build_task(case, "vmap"), "one by one": build_task(case, "eager")}
    natively = build_task(case, "auto")
    if natively.network is not None:
        tasks["native"] = natively
    try:
        hansa.Run(method, tasks["together"]).advance(1)
    except hansa.HansaError as reason:
        return {"refused": str(reason).split("together: ")[-1]}
    runs = {name: hansa.Run(method, each) for name, each in tasks.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.process_time()
            run.advance(1)
            if turn:
                times[name].append((time.process_time() - start) / (CLIENTS * case.steps) * 1e6)
    spent = {name: statistics.median(values) for name, values in times.items()}
    ratio = spent["one by one"] / spent["together"]
    return {"ratio": ratio, "times": spent}


def main() -> None:
    turns, answer, *names = sys.argv[1:]
    logging.getLogger("hansa").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = {name: measure(case, int(turns)) for name, case in CASES.items() if not names or name in names}
    Path(answer).write_text(json.dumps(found))
    for name, row in found.items():
        if "refused" in row:
            print(f"{name:36} {row['refused']}")
            continue
        times = ", ".join(f"{name} {value:.0f}" for name, value in row["times"].items())
        print(f"{name:36} ratio {row['ratio']:.2f}; us a step: {times}")


if __name__ == "__main__":
    main()
