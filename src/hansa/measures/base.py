"""Measures of a round that are made on request: ``hansa.run(..., measures=[hansa.measures.compression])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hansa.algorithm import Algorithm
from hansa.keys import Key
from hansa.types import Vectors


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What a measure may look at: what clients got, the admitted vectors of each, its memory before and after."""

    round: int
    algorithm: Algorithm
    key: Key
    got: Vectors
    received: Mapping[int, Vectors]
    before: Mapping[int, Vectors]
    after: Mapping[int, Vectors]


Measure: TypeAlias = Callable[[Probe], dict[str, float]]


def measured(measures: Sequence[Measure], probe: Probe) -> dict[str, float]:
    """All measures of a round in one record."""
    return {name: value for measure in measures for name, value in measure(probe).items()}
