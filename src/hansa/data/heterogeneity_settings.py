"""The heterogeneity settings of the FedAWARE paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hansa.core.errors import HansaError, suggestion
from hansa.data.partitions import Partition, dirichlet, shards
from hansa.local import hybrid_plus


@dataclass(frozen=True, slots=True)
class HeterogeneitySetting:
    """A heterogeneity setting of the FedAWARE paper: a partition, and arguments for a preset.

    Args:
        name: "statistical", "hybrid" or "hybrid+".
        partition: How rows are assigned to clients.
        clients: Number of clients.
        arguments: Keyword arguments for a preset, as in ``fedavg(**setting.arguments)``.

    >>> setting = heterogeneity_setting("hybrid")
    >>> setting.clients, sorted(setting.arguments)
    (100, ['batch_size', 'epochs', 'local_lr', 'participation'])
    """

    name: str
    partition: Partition
    clients: int = 100
    arguments: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"local_lr": 0.01, "participation": 0.1}
HETEROGENEITY_SETTINGS = {
    setting.name: setting
    for setting in (
        HeterogeneitySetting("statistical", shards(200, 2), arguments={**_COMMON, "epochs": 3, "batch_size": 64}),
        HeterogeneitySetting("hybrid", dirichlet(0.1), arguments={**_COMMON, "epochs": 3, "batch_size": 64}),
        HeterogeneitySetting(
            "hybrid+", dirichlet(0.1), arguments={**_COMMON, "steps": hybrid_plus(epochs=(2, 5), min_batch=10)}
        ),
    )
}


def heterogeneity_setting(name: str) -> HeterogeneitySetting:
    """Return a heterogeneity setting of the FedAWARE paper.

    ``federate(dataset, setting.partition, setting.clients)`` assigns the data, ``fedavg(**setting.arguments)`` is a
    method in that setting.

    Args:
        name: "statistical", "hybrid" or "hybrid+".

    >>> heterogeneity_setting("hybrid+").arguments["steps"]
    hybrid_plus(epochs=(2, 5), min_batch=10)
    """
    if name not in HETEROGENEITY_SETTINGS:
        raise HansaError(f"unknown setting {name!r}. {suggestion(name, HETEROGENEITY_SETTINGS)}")
    return HETEROGENEITY_SETTINGS[name]
