"""Two studies on images behind pages of the documentation, one run after the other, each kept as one JSON file.

    python benchmarks/studies/images.py two-way-fashion [--seed 1] [--only fedams fedcams-grid-both]
    python benchmarks/studies/images.py aware-authors [--only faithful-ids] [--rounds 500]
    python benchmarks/studies/images.py aware-authors --draw

``two-way-fashion``: two-way compression under partial participation, FedAMS and FedCAMS on the embedded Fashion-MNIST
subset, 100 clients, 10% a round; all settings are equal but for the links. Bytes are those of the packets, both ways.

``aware-authors``: FedAWARE on CIFAR-10 hybrid+ as its authors' public code runs it. ``faithful-ids`` is that code with
every update stored under its owner's id. ``permuted-ids`` stores the updates of a round under each other's ids, as the
code does: its clients train in sorted order, their updates are stored in the order in which the clients were drawn.
Beside them FedAvgM and FedYogi with |D_i| weights and the same sampling (everyone once before anybody again), and
Algorithm 1 as printed. The code also crops, flips and normalises images; here nobody does.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import Key, data, models, presets
from hansa.aggregate import Combined, aware
from hansa.compress import grid, sign, top_k
from hansa.core.types import RoundContext, State, Update, in_client_order
from hansa.local import hybrid_plus
from hansa.sample import explore

DOCS = Path(__file__).parents[2] / "docs"
KEPT = ("round", "train_loss", "test_loss", "test_accuracy", "diversity", "surrogate_diversity", "density")


@dataclass(frozen=True, slots=True)
class permuted:
    """FedAWARE that mixes up whose update is whose within a round. For this study only: it is a mistake."""

    inner: aware
    seed: int = 0
    cites: ClassVar[tuple[str, ...]] = ("zeng2024",)

    def init(self, dim: int, population: int) -> State:
        return self.inner.init(dim, population)

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        places = Key(self.seed).child("permuted", ctx.round).numpy().permutation(len(ordered)).tolist()
        mixed = [
            Update(ordered[place].client, update.cohort, update.vector, update.samples, update.steps)
            for place, update in zip(places, ordered, strict=True)
        ]
        return self.inner.combine(mixed, state, ctx)


def two_way_fashion(seed: int) -> tuple[hansa.Task, Mapping[str, hansa.Algorithm]]:
    common = {"local_lr": 0.1, "steps": 30, "batch_size": 20, "participation": 0.1, "server_lr": 0.05, "eps": 1e-3}
    federated = data.partition_dataset(data.load("fashion-mini"), data.iid(), 100, seed)
    return image_task(federated, "cnn_29k"), {
        "fedams": presets.fedams(**common),
        "fedcams-grid-both": presets.fedcams(compressor=grid(4.0), two_way=True, **common),
        "fedcams-sign": presets.fedcams(compressor=sign(), **common),
        "fedcams-sign-both": presets.fedcams(compressor=sign(), two_way=True, **common),
        "fedcams-sign-grid": presets.fedcams(compressor=sign(), two_way=grid(4.0), **common),
        "fedcams-topk64-both": presets.fedcams(compressor=top_k(1 / 64), two_way=True, **common),
    }


def aware_authors(seed: int) -> tuple[hansa.Task, Mapping[str, hansa.Algorithm]]:
    common: dict[str, Any] = {
        "local_lr": 0.01,
        "steps": hybrid_plus(epochs=(2, 5), min_batch=10),
        "sampler": explore(0.1, then="uniform"),
    }
    authors = presets.fedaware(
        alpha=0.5, normalize=True, explore=True, from_zero=True, min_norm="authors", weights="samples", **common
    )
    inner = authors.channels["model"].aggregate
    assert isinstance(inner, aware)
    federated = data.partition_dataset(data.load("cifar10"), data.dirichlet(0.1), 100, seed)
    return image_task(federated, "cifar_cnn"), {
        "permuted-ids": authors.on("model", aggregate=permuted(inner, seed)),
        "fedavgm-samples": presets.fedavgm(momentum=0.9, weights="samples", **common),
        "fedyogi-samples": presets.fedyogi(server_lr=0.01, eps=1e-4, weights="samples", **common),
        "faithful-ids": authors,
        "algorithm-1": presets.fedaware(alpha=0.5, **common),
    }


STUDIES = {"two-way-fashion": (two_way_fashion, 60), "aware-authors": (aware_authors, 500)}
"""The task and the methods of each study, and its rounds."""


def image_task(federated: data.FederatedData, model: str) -> hansa.Task:
    shape = tuple(federated.inputs.shape[1:])
    factory = functools.partial(models.build, model, classes=federated.classes, shape=shape)
    return hansa.Task(factory, cross_entropy, federated, name=f"{model} on {federated.name}")


def save(path: Path, algorithm: str, run: hansa.Run, record: dict[str, Any]) -> None:
    """Keep the history as it grows, so that a stopped study is not lost."""
    if "test_accuracy" not in record:
        return
    result = {
        "algorithm": algorithm,
        "machine": f"{platform.machine()}, torch {torch.__version__}, hansa {hansa.__version__}",
        "bytes": {"up": run.ledger.up_bytes, "down": run.ledger.down_bytes, "peer": run.ledger.peer_bytes},
        "history": [{name: entry[name] for name in KEPT if name in entry} for entry in run.history],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{path.stem} round {record['round']}: accuracy {record['test_accuracy']:.4f}", flush=True)


def draw(study: str, results: Path, target: Path) -> None:
    """Test accuracy and surrogate diversity (a mean over ten rounds) against rounds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12.8, 4.4), layout="constrained")
    for path in sorted(results.glob(f"{study}-*-seed0.json")):
        history = json.loads(path.read_text())["history"]
        for axis, measure, width in zip(axes, ("test_accuracy", "surrogate_diversity"), (1, 10), strict=True):
            entries = [entry for entry in history if measure in entry]
            values = np.convolve([entry[measure] for entry in entries], np.ones(width) / width, mode="valid")
            label = path.stem.removeprefix(f"{study}-").removesuffix("-seed0")
            axis.plot([entry["round"] for entry in entries][width - 1 :], values, label=label)
            axis.set(xlabel="round", ylabel=measure.replace("_", " "))
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of the runs to make")
    parser.add_argument("--draw", action="store_true", help="only draw the results")
    parser.add_argument("--out", type=Path, default=DOCS / "results")
    options = parser.parse_args()
    if options.draw:
        draw(options.study, options.out, DOCS / f"{options.study}.svg")
        return
    make, rounds = STUDIES[options.study]
    task, algorithms = make(options.seed)
    for name, algorithm in algorithms.items():
        if not options.only or name in options.only:
            path = options.out / f"{options.study}-{name}-seed{options.seed}.json"
            callback = functools.partial(save, path, repr(algorithm))
            words: dict[str, Any] = {"rounds": options.rounds or rounds, "seed": options.seed}
            hansa.run(algorithm, task, evaluate_every=5, callbacks=[callback], **words)


if __name__ == "__main__":
    main()
