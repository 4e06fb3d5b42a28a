"""What the studies share: run algorithms one after the other and keep each as one JSON file with its settings."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import data
from hansa.training import models

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def image_task(federated: data.FederatedData, model: str) -> hansa.Task:
    shape = tuple(federated.inputs.shape[1:])
    factory = functools.partial(models.build, model, classes=federated.classes, shape=shape)
    return hansa.Task(factory, cross_entropy, federated, name=f"{model} on {federated.name}")


def arguments(description: str, rounds: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=5, help="evaluate every so many rounds")
    parser.add_argument("--only", nargs="*", help="names of the runs to make")
    parser.add_argument("--workers", type=int, help="by default all cores; results do not depend on it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def keep(
    study: str,
    algorithms: Mapping[str, hansa.Algorithm],
    task: hansa.Task,
    setting: Mapping[str, Any],
    options: argparse.Namespace,
) -> None:
    """Run each algorithm and keep its history as it grows, so that a stopped study is not lost."""
    for name, algorithm in algorithms.items():
        if options.only and name not in options.only:
            continue
        target = options.out / f"{study}-{name}-seed{options.seed}.json"
        save = functools.partial(_save, target, name, repr(algorithm), setting, options, time.time())
        hansa.run(
            algorithm,
            task,
            rounds=options.rounds,
            seed=options.seed,
            evaluate_every=options.every,
            workers=options.workers,
            callbacks=[save],
        )


def _save(
    target: Path,
    name: str,
    algorithm: str,
    setting: Mapping[str, Any],
    options: argparse.Namespace,
    began: float,
    run: hansa.Run,
    record: dict[str, Any],
) -> None:
    if "test_accuracy" not in record:
        return
    kept = ("round", "train_loss", "test_loss", "test_accuracy", "diversity", "surrogate_diversity", "density")
    result = {
        "algorithm": algorithm,
        "setting": {**setting, "seed": options.seed, "rounds": options.rounds},
        "machine": f"{platform.machine()}, torch {torch.__version__}, hansa {hansa.__version__}",
        "seconds": round(time.time() - began, 1),
        "bytes": {"up": run.ledger.up_bytes, "down": run.ledger.down_bytes, "peer": run.ledger.peer_bytes},
        "lost": len(run.dropped_clients),
        "history": [{key: round_[key] for key in kept if key in round_} for round_ in run.history],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name} round {record['round']}: accuracy {record['test_accuracy']:.4f}", flush=True)
