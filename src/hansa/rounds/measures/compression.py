"""Compression error: the q and gamma of the FedCAMS paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hansa.compress import Compressor, decode, error_feedback
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import MODEL
from hansa.rounds.measures.base import Probe


def compression(probe: Probe) -> dict[str, float]:
    """gamma = ||C(mean(Delta_i+e_i)) - mean C(Delta_i+e_i)|| / ||mean Delta_i|| (Assumption 4.17 of the FedCAMS paper),
    and q, the mean over clients of ||C(x)-x||/||x|| at x = Delta_i+e_i. Empty for links without error feedback.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedcams(steps=2), task, rounds=2, measures=[compression])
    >>> sorted({"gamma", "q"} & done.history[-1].keys())
    ['gamma', 'q']
    """
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
    round_gamma = gamma(link.compressor, deltas, residuals, probe.key.child("gamma", probe.round))
    return {"gamma": round_gamma, "q": math.fsum(ratios) / len(ratios)}


def q(x: Tensor, compressed: Tensor) -> float:
    """Return ||C(x) - x|| / ||x||, the smallest q of [CAMS] Assumption 4.14 for this vector; 0 for x = 0.

    >>> q(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0]))
    0.6
    """
    size = float(torch.linalg.vector_norm(x.double()))
    return float(torch.linalg.vector_norm(compressed.double() - x.double())) / size if size else 0.0


def gamma(compressor: Compressor, deltas: Sequence[Tensor], residuals: Sequence[Tensor | None], key: Key) -> float:
    """Return the compression dissimilarity of a round ([CAMS] Assumption 4.17); inf if only the mean update is zero.

    gamma = ||C(mean(Delta_i + e_i)) - mean C(Delta_i + e_i)|| / ||mean Delta_i||, e_i = 0 where a residual is None.

    >>> import torch
    >>> from hansa.compress import sign
    >>> from hansa.core.keys import Key
    >>> round(gamma(sign(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])], [None, None], Key(0)), 3)
    0.767
    """
    if not deltas or len(deltas) != len(residuals):
        raise HansaError(f"gamma: {len(deltas)} updates, {len(residuals)} residuals; expected as many, at least one.")
    totals = [delta if e is None else delta + e for delta, e in zip(deltas, residuals, strict=True)]

    def compressed(x: Tensor, key: Key) -> Tensor:
        return decode(compressor.encode(x, key), compressor, dim=x.numel())

    apart = _mean([compressed(total, key.child(i)) for i, total in enumerate(totals)])
    together = compressed(_mean(totals).to(deltas[0].dtype), key.child("mean")).double()
    above = float(torch.linalg.vector_norm(together - apart))
    below = float(torch.linalg.vector_norm(_mean(deltas)))
    if below:
        return above / below
    return math.inf if above else 0.0


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean in float64, summed in order."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        total += vector
    return total / len(vectors)
