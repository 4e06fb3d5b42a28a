"""FedAWARE on CIFAR-10 hybrid+ as its authors' public code runs it: what the published numbers rest on.

``faithful-ids`` is that code with every update stored under its owner's id. ``permuted-ids`` stores the updates of a
round under each other's ids, as the code does: its clients train in sorted order, their updates are stored in the order
in which the clients were drawn. Beside them FedAvgM and FedYogi with |D_i| weights and the same sampling (everyone once
before anybody again), and Algorithm 1 as printed. The code also crops, flips and normalises images; here nobody does.

Run: python benchmarks/studies/aware_authors.py [--only faithful-ids] [--rounds 500]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hansa import Key, data, presets
from hansa.aggregate import Combined, aware
from hansa.core.types import RoundContext, State, Update, in_client_order
from hansa.local import hybrid_plus
from hansa.sample import explore
from study import arguments, image_task, keep

SETTING = {
    "data": "cifar10",
    "partition": "dirichlet(0.1), 100 clients",
    "model": "cifar_cnn",
    "augmentation": "none (the authors' code crops and flips)",
    "published": {"fedavgm": 56.83, "fedyogi": 57.64, "fedaware": 61.28},
}


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


def main() -> None:
    options = arguments(__doc__ or "", rounds=500)
    federated = data.partition_dataset(data.load("cifar10"), data.dirichlet(0.1), 100, options.seed)
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
    algorithms = {
        "permuted-ids": authors.on("model", aggregate=permuted(inner, options.seed)),
        "fedavgm-samples": presets.fedavgm(momentum=0.9, weights="samples", **common),
        "fedyogi-samples": presets.fedyogi(server_lr=0.01, eps=1e-4, weights="samples", **common),
        "faithful-ids": authors,
        "algorithm-1": presets.fedaware(alpha=0.5, **common),
    }
    keep("aware-authors", algorithms, image_task(federated, "cifar_cnn"), SETTING, options)


if __name__ == "__main__":
    main()
