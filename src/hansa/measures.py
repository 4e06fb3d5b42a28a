"""Measures of a round that are made on request: ``hansa.run(..., measures=[hansa.measures.compression])``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.comm import gamma
from hansa.compress import error_feedback
from hansa.keys import Key
from hansa.types import MODEL, Vectors


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


def compression(probe: Probe) -> dict[str, float]:
    """gamma = ||C(mean(Delta_i+e_i)) - mean C(Delta_i+e_i)|| / ||mean Delta_i|| (Assumption 4.17 of the FedCAMS paper),
    and q, the mean over clients of ||C(x)-x||/||x|| at x = Delta_i+e_i. Nothing for links without error feedback."""
    link = probe.algorithm.channels[MODEL].uplink
    if not isinstance(link, error_feedback):
        return {}
    row = f"uplink/{MODEL}/residual"
    deltas: list[torch.Tensor] = []
    residuals: list[torch.Tensor | None] = []
    ratios: list[float] = []
    for client in sorted(probe.received):
        left = probe.after[client][row]
        carried = probe.received[client][MODEL] + left
        before = probe.before.get(client, {}).get(row)
        deltas.append(carried if before is None else carried - before)
        residuals.append(before)
        length = float(torch.linalg.vector_norm(carried))
        ratios.append(float(torch.linalg.vector_norm(left)) / length if length else 0.0)
    found = gamma(link.compressor, deltas, residuals, probe.key.child("gamma", probe.round))
    return {"gamma": found, "q": math.fsum(ratios) / len(ratios)}


def measured(measures: Sequence[Measure], probe: Probe) -> dict[str, float]:
    """All measures of a round in one record."""
    return {name: value for measure in measures for name, value in measure(probe).items()}
