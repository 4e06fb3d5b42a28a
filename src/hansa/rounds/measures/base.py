"""Optional measures of a round: ``hansa.run(..., measures=[hansa.measures.compression])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.types import Vectors


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The input of a measure: the broadcast vectors, each client's accepted vectors and its memory before and after,
    and the ``mean`` of all local models in rounds where a measure's ``wants_mean(round)`` is true.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> def up_norm(probe: Probe) -> dict[str, float]:
    ...     return {"clients_heard": float(len(probe.received))}
    >>> hansa.run(hansa.presets.fedavg(steps=2), task, rounds=1, measures=[up_norm]).history[0]["clients_heard"]
    4.0
    """

    round: int
    algorithm: Algorithm
    key: Key
    got: Vectors
    received: Mapping[int, Vectors]
    before: Mapping[int, Vectors]
    after: Mapping[int, Vectors]
    mean: Vectors | None = None


Measure: TypeAlias = Callable[[Probe], dict[str, float]]


def wants_mean(measures: Sequence[Measure], round: int) -> bool:
    """Return whether any measure needs the mean of all local models in a round.

    >>> wants_mean([], round=1)
    False
    """
    return any(measure.wants_mean(round) for measure in measures if hasattr(measure, "wants_mean"))


def take_measures(measures: Sequence[Measure], probe: Probe) -> dict[str, float]:
    """Return all measures of a round in one record.

    >>> take_measures([lambda probe: {"answer": 42.0}], None)
    {'answer': 42.0}
    """
    return {name: value for measure in measures for name, value in measure(probe).items()}
