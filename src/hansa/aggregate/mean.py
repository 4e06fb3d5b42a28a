"""The mean of FedAvg and the normalized mean of FedNova."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hansa.aggregate.base import (
    MAX_DECODED,
    MAX_DECODED_BYTES,
    WEIGHTS,
    BaseAggregator,
    Combined,
    Participant,
    Participants,
    Weights,
    normalize_weights,
    raw_weights,
    sum_updates,
    zero_weight_error,
)
from hansa.core.types import RoundContext, State, Update, Vector, in_client_order
from hansa.core.vectors import arithmetic, kernels


@dataclass(frozen=True, slots=True)
class mean(BaseAggregator):
    """Delta = sum_i w_i Delta_i / sum_i w_i over the received updates (FedAvg, McMahan 2017).

    Args:
        weights: "uniform", "samples", "clusters", or one number per client.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> mean().combine(updates, {}, ctx).vector
    tensor([4.])
    """

    weights: Weights = field(default="uniform", metadata=WEIGHTS)
    cites: ClassVar[tuple[str, ...]] = ("mcmahan2017",)
    on_device: ClassVar[bool] = True
    is_mean: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        running = self.running([Participant(update.client, update.cohort, update.samples) for update in ordered])
        for update in ordered:
            running.add(update)
        return Combined(running.vector(), state, {})

    def running(self, participants: Sequence[Participant]) -> RunningMean:
        """Return a running mean, which keeps few updates in memory.

        ``participants`` are all clients that may report; the result depends only on those that do.
        """
        clients = (
            participants.clients if isinstance(participants, Participants) else [entry.client for entry in participants]
        )
        return RunningMean(dict(zip(clients, raw_weights(self.weights, participants), strict=True)))


class RunningMean:
    """(sum w_i Delta_i) / (sum w_i), folded left to right, a few updates at a time.

    Weights are divided by the first one, so that equal weights give the bits of the plain mean.
    """

    def __init__(self, weights: dict[int, float]) -> None:
        self._weights, self._used = weights, list[int]()
        self._unit = 0.0
        self._waiting: list[Update] = []
        self._total: Vector | None = None
        self._max_waiting = 2  # updates folded at a time, to limit memory; it does not affect the bits

    def add(self, update: Update) -> None:
        """Add the next update in client order."""
        self._used.append(update.client)
        self._unit = self._unit or self._weights[update.client]
        self._waiting.append(update)
        if len(self._waiting) >= self._max_waiting:
            self._fold()

    def add_rows(self, clients: Sequence[int], rows: Vector) -> None:
        """Add the next updates in client order, the rows of a matrix that native code supports."""
        self._fold()
        self._used += clients
        self._unit = self._unit or next((w for client in clients if (w := self._weights[client])), 0.0)
        self._total = kernels.native_weighted_sum(rows, self._counts(clients), self._total)

    def vector(self) -> Vector:
        """Return the mean of the added updates."""
        self._fold()
        total = math.fsum(self._counts(self._used))
        if self._total is None or not total > 0:
            raise zero_weight_error(self._used, total)
        return self._total if total == 1 else self._total.mul_(1 / total)

    def _counts(self, clients: Sequence[int]) -> list[float]:
        """Return the weights of clients, divided by the first one."""
        weights, unit = [self._weights[client] for client in clients], self._unit
        if weights.count(unit) == len(weights) and unit:
            return [1.0] * len(weights)
        return [weight / unit if weight else 0.0 for weight in weights]

    def _fold(self) -> None:
        if not self._waiting:
            return
        rows, weights = [u.vector for u in self._waiting], self._counts([u.client for u in self._waiting])
        if self._total is not None:
            rows, weights = [self._total, *rows], [1.0, *weights]
        self._total = arithmetic.weighted_sum(rows, weights)
        self._max_waiting = max(2, min(MAX_DECODED, MAX_DECODED_BYTES // max(1, self._total.nbytes)))
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class nova(BaseAggregator):
    """Delta = (sum_i p_i tau_i) sum_i p_i Delta_i / tau_i (FedNova, Wang 2020).

    tau_i is the number of local steps, or its generalization for local momentum or a proximal term.
    Some public implementations normalize p twice or not at all; here p sums to one over the participants.

    Args:
        weights: "uniform", "samples", "clusters", or one number per client.

    >>> import torch
    >>> from hansa.core.types import Population, RoundContext, Update
    >>> updates = [Update(i, i, torch.tensor([v]), 10, 1) for i, v in enumerate((1.0, 2.0, 9.0))]
    >>> ctx = RoundContext(1, Population((10, 10, 10)), (0, 1, 2))
    >>> nova().combine(updates, {}, ctx).vector
    tensor([4.])
    """

    weights: Weights = field(default="uniform", metadata=WEIGHTS)
    cites: ClassVar[tuple[str, ...]] = ("wang2020",)
    on_device: ClassVar[bool] = True

    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        ordered = in_client_order(updates)
        if len({update.steps for update in ordered}) == 1:  # then nova equals the mean, bit for bit
            return mean(self.weights).combine(ordered, state, ctx)._replace(info={"tau_effective": ordered[0].steps})
        p = normalize_weights(self.weights, ordered)
        effective = math.fsum(w * u.steps for w, u in zip(p, ordered, strict=True))
        coefficients = [w * (effective / u.steps) for w, u in zip(p, ordered, strict=True)]
        return Combined(sum_updates(ordered, coefficients), state, {"tau_effective": effective})
