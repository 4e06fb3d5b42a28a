"""Every preset in a small setting, so that a suite over all of them is one line; clients of unequal sizes for it."""

from __future__ import annotations

from typing import Any

import torch

import hansa
from hansa import presets

GOSSIP = {"clusters": 2, "reporters": 1}
OWN: dict[str, dict[str, Any]] = {
    "ha_fed": GOSSIP,
    "cafga": GOSSIP,
    "afga": {"participation": 0.4},
    **{name: {} for name in ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")},
}
NAMES = sorted(presets.catalogue())


def small(name: str, **words: Any) -> hansa.Algorithm:
    """The preset with two local steps and two of five clients a round, where it has a say in that."""
    return presets.get(name, **{"steps": 2, **OWN.get(name, {"participation": 0.4}), **words})


def sizes(clients: int) -> list[int]:
    """Samples by client, no two neighbours alike: 4, 11, 7, 14, 10, 6, 13, ..."""
    return [4 + 7 * client % 11 for client in range(clients)]


def bowls(
    clients: int = 5, dim: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> hansa.training.quadratic:
    """A quadratic a client, each with its own number of rows."""
    draw = torch.Generator().manual_seed(seed)
    A = [torch.randn(rows, dim, dtype=dtype, generator=draw) for rows in sizes(clients)]
    return hansa.training.quadratic(A, [torch.randn(len(a), dtype=dtype, generator=draw) for a in A])
