"""Models without native training, in Hansa and in a plain PyTorch loop, in processor time.

    python eager.py TURNS ANSWER.json [MODEL ...]

Both take the same steps on the same batches in one process on one thread, in alternation: a full round of one client
with `hansa.run`, then as many steps of the plain loop, whose model has PyTorch's default layout. The result is
client-steps per second of processor time; medians of the turns after the first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import data
from hansa.training import models

CLASSES, ROWS, LR = 10, 240, 0.05


class Transformer(nn.Module):
    """A small transformer as people write it: embedding, two encoder layers, the mean over places, a linear head."""

    def __init__(self, characters: int = 80, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embedding(x) + self.places).mean(1))
        return logits


@dataclass(frozen=True)
class Case:
    """A model, the shape of an example (of characters where it has one dimension), and the work of a client."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int


def _catalogue(name: str, shape: tuple[int, ...], **words: Any) -> Callable[[], nn.Module]:
    return partial(models.build, name, classes=80 if name == "lstm" else CLASSES, shape=shape, **words)


IMAGE = (3, 32, 32)
CASES = {
    "ResNet-18, BatchNorm": Case(_catalogue("resnet18", IMAGE), IMAGE, 16, 6),
    "ResNet-18, GroupNorm": Case(_catalogue("resnet18", IMAGE, norm="group"), IMAGE, 16, 6),
    "ConvMixer-256-8": Case(_catalogue("convmixer", IMAGE), IMAGE, 16, 6),
    "LSTM 2x256, length 80": Case(_catalogue("lstm", (80,), dropout=0.0), (80,), 20, 6),
    "Transformer, 2 layers of 128": Case(Transformer, (64,), 20, 10),
}


def dealt(case: Case) -> data.FederatedData:
    """One client with rows of noise."""
    draw = hansa.Key(0).child("rows").numpy()
    if len(case.shape) == 1:
        inputs = torch.from_numpy(draw.integers(0, 80, (ROWS, *case.shape)))
    else:
        inputs = torch.from_numpy(draw.standard_normal((ROWS, *case.shape), dtype="float32"))
    targets = torch.from_numpy(draw.integers(0, CLASSES, ROWS))
    return data.FederatedData(inputs, targets, torch.arange(ROWS), torch.tensor([0, ROWS]), name="noise")


class Plain:
    """The loop without a framework."""

    def __init__(self, case: Case, held: data.FederatedData) -> None:
        self.case, self.held, self.model = case, held, case.model()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def round(self, seed: int) -> None:
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        for step in range(self.case.steps):
            rows = order[step * self.case.batch : (step + 1) * self.case.batch]
            optimizer.zero_grad()
            cross_entropy(self.model(self.held.inputs[rows]), self.held.targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        {name: value.clone() for name, value in self.model.state_dict().items()}


def measure(case: Case, turns: int, **task: Any) -> dict[str, float]:
    """Steps a second of processor time of both, and the ratio: medians over the turns."""
    torch.set_num_threads(1)
    held = dealt(case)
    plain = Plain(case, held)
    ours: list[float] = []
    theirs: list[float] = []
    mark = [0.0]

    def ended(run: hansa.Run, record: dict[str, Any]) -> None:
        now = time.process_time()
        ours.append(now - mark[0])
        plain.round(record["round"])
        theirs.append(time.process_time() - now)
        mark[0] = time.process_time()

    algorithm = hansa.presets.fedavg(local_lr=LR, steps=case.steps, batch_size=case.batch, participation=1.0)
    run = hansa.Task(case.model, cross_entropy, held, **task)
    mark[0] = time.process_time()
    hansa.run(algorithm, run, rounds=turns + 1, workers=1, evaluate_every=0, callbacks=[ended])
    rates = {
        name: [case.steps / seconds for seconds in taken[1:]] for name, taken in (("hansa", ours), ("plain", theirs))
    }
    ratios = [own / other for own, other in zip(rates["hansa"], rates["plain"], strict=True)]
    return {name: statistics.median(values) for name, values in {**rates, "ratio": ratios}.items()}


def main() -> None:
    turns, answer, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(CASES)
    found = {}
    for name in names:
        found[name] = measure(CASES[name], turns)
        print(f"{name}: {found[name]['ratio']:.2f}", flush=True)
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
