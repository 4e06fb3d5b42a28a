"""The heterogeneity settings of the FedAWARE paper by name: who holds what, and how much work clients do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hansa.core.errors import HansaError, suggestion
from hansa.data.partitions import Partition, dirichlet, shards
from hansa.local import hybrid_plus


@dataclass(frozen=True, slots=True)
class Setting:
    """A partition of the data over ``clients``, and the words for a preset: ``fedavg(**setting.words)``.

    >>> setting("hybrid").clients, sorted(setting("hybrid").words)
    (100, ['batch_size', 'epochs', 'local_lr', 'participation'])
    """

    name: str
    partition: Partition
    clients: int = 100
    words: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"local_lr": 0.01, "participation": 0.1}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("statistical", shards(200, 2), words={**_COMMON, "epochs": 3, "batch_size": 64}),
        Setting("hybrid", dirichlet(0.1), words={**_COMMON, "epochs": 3, "batch_size": 64}),
        Setting("hybrid+", dirichlet(0.1), words={**_COMMON, "steps": hybrid_plus(epochs=(2, 5), min_batch=10)}),
    )
}


def setting(name: str) -> Setting:
    """A setting by its name, "statistical", "hybrid" or "hybrid+": ``federate(name, made.partition, made.clients)``
    deals the data, and ``fedavg(**made.words)`` is a method in it.

    >>> setting("hybrid+").words["steps"]
    hybrid_plus(epochs=(2, 5), min_batch=10)
    """
    if name not in SETTINGS:
        raise HansaError(f"unknown setting {name!r}. {suggestion(name, SETTINGS)}")
    return SETTINGS[name]
