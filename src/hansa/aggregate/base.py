"""The aggregator protocol, and the only place where weights are normalized.

The mean of FedAvg and the normalized mean of FedNova.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.core.bounds import Checked, bound, rule_or_numbers
from hansa.core.devices import has_float64
from hansa.core.errors import HansaError
from hansa.core.protocols import check_component
from hansa.core.types import RoundContext, State, Update, Vector, in_client_order
from hansa.core.vectors import arithmetic, kernels

Weights: TypeAlias = Literal["uniform", "samples", "clusters"] | tuple[float, ...]
"""Weights of updates: uniform, by sample count, uniform over clusters, or one number per client."""
WEIGHTS = bound(rule_or_numbers, "uniform", "samples", "clusters")
MAX_DECODED, MAX_DECODED_BYTES = 16, 1 << 22  # updates decoded at once, and their total bytes if they are large


class Combined(NamedTuple):
    """An aggregate, the state after it, values to report, and rows to store for clients.

    Args:
        vector: The aggregate.
        state: State after the round.
        info: Values to report.
        rows: Rows to store for clients.

    >>> Combined(torch.ones(2), {}, {"weights": [0.5, 0.5]}).info
    {'weights': [0.5, 0.5]}
    """

    vector: Vector
    state: State
    info: dict[str, Any]
    rows: Mapping[int, Mapping[str, Vector]] = MappingProxyType({})


class Participant(NamedTuple):
    """A participant before its update arrives, with what determines its weight."""

    client: int
    cohort: int
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Participants(Sequence[Participant]):
    """Many participants as columns; each `Participant` is created on access."""

    clients: Sequence[int]
    cohorts: Sequence[int]
    samples: Sequence[int]

    @classmethod
    def of(cls, clients: Sequence[int], cohorts: Mapping[int, int], samples: Sequence[int]) -> Participants:
        """Return the participants of a round, from the cohort of each client and the samples of the population."""
        return cls(clients, [cohorts[client] for client in clients], [samples[client] for client in clients])

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, index: Any) -> Any:
        kind: Any = Participants if isinstance(index, slice) else Participant
        return kind(self.clients[index], self.cohorts[index], self.samples[index])

    def __iter__(self) -> Iterator[Participant]:
        return map(Participant, self.clients, self.cohorts, self.samples)


class RunningAggregate(Protocol):
    """An aggregate in progress: updates are added once each, in client order."""

    def add(self, update: Update) -> None: ...

    def vector(self) -> Vector: ...


@runtime_checkable
class Aggregator(Protocol):
    """Combines updates into one vector, independently of their arrival order.

    Vectors are flat, in the order of ``model.named_parameters()``, with convolution weights channels-last: read a
    parameter by the ``view`` of its entry in ``task.layout``.
    """

    __slots__ = ()

    @abstractmethod
    def init(self, dim: int, population: int) -> State:
        """Return the state before the first round, a plain tree."""

    @abstractmethod
    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        """Return the aggregate of a round's accepted updates, at least ``min_updates`` of them."""


class BaseAggregator(Checked, Aggregator):
    """The optional traits of aggregators, with their defaults.

    >>> from hansa.aggregate import median
    >>> median().min_updates, median().weights
    (1, 'uniform')
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    def init(self, dim: int, population: int) -> State:
        return {}

    @property
    def needs_client_stats(self) -> bool:
        """Whether it needs ``ctx.population.losses``, ``norms`` and ``participations``, from before the round.

        The losses of the round itself are in ``update.loss``.
        """
        return False

    @property
    def min_updates(self) -> int:
        """The minimum number of updates; a round with fewer is not applied. With 0, also a round for which the sampler
        selected nobody is aggregated, as private averaging with Poisson sampling requires."""
        return 1

    @property
    def weights(self) -> Weights:
        """Weights of the updates; buffers are averaged with the same weights."""
        return "uniform"

    @property
    def is_mean(self) -> bool:
        """Whether the aggregate is the mean of the updates with these weights."""
        return False

    @property
    def on_device(self) -> bool:
        """Whether it computes with torch on the device of the updates; otherwise it receives them on the CPU."""
        return False

    @property
    def momentum_storage(self) -> Literal["ram", "disk"]:
        """Where the client rows returned by ``combine`` are stored."""
        return "ram"

    @property
    def running(self) -> Callable[[Sequence[Participant]], RunningAggregate] | None:
        """For streaming aggregation: a method from the possible participants to a `RunningAggregate`."""
        return None


require_aggregator = partial(check_component, protocol=Aggregator, noun="an aggregator", example="mean() is one.")


def normalize_weights(weights: Weights, updates: Sequence[Update] | Sequence[Participant]) -> list[float]:
    """Return the weight of each update, summing to one. Weights are normalized only here.

    Args:
        weights: Rule, or one number per client.
        updates: Updates or participants to weigh.

    >>> normalize_weights("samples", [Update(0, 0, None, 30, 1), Update(1, 1, None, 10, 1)])
    [0.75, 0.25]
    """
    raw = raw_weights(weights, updates)
    total = math.fsum(raw)
    if not total > 0:
        raise zero_weight_error([update.client for update in updates], total)
    return [w / total for w in raw]


def raw_weights(weights: Weights, updates: Sequence[Update] | Sequence[Participant]) -> list[float]:
    """Return the weight of each update before normalization."""
    if weights == "uniform":
        return [1.0] * len(updates)
    if weights == "samples":
        if isinstance(updates, Participants):
            return [float(samples) for samples in updates.samples]
        return [float(update.samples) for update in updates]
    if weights == "clusters":
        members: dict[int, int] = {}
        for update in updates:
            members[update.cohort] = members.get(update.cohort, 0) + 1
        return [1.0 / members[update.cohort] for update in updates]
    return [_client_weight(weights, update.client) for update in updates]


def client_weights(weights: Weights, clients: Sequence[int], samples: Sequence[int]) -> list[float]:
    """Return the weights of clients in the objective, summing to one, whether or not they reported.

    Args:
        weights: Rule, or one number per client.
        clients: Clients to weigh.
        samples: Number of samples of every client of the population.

    >>> client_weights("samples", [0, 1], [30, 10])
    [0.75, 0.25]
    """
    return normalize_weights(weights, [Participant(client, 0, samples[client]) for client in clients])


def zero_weight_error(clients: Sequence[int], total: float) -> HansaError:
    return HansaError(
        f"the weights of clients {list(clients)} sum to {total}: expected a positive sum. "
        "Give every client that may take part alone a weight above 0."
    )


def _client_weight(weights: Sequence[float] | str, client: int) -> float:
    if client >= len(weights):
        raise HansaError(f"weights: {len(weights)} numbers given, none for client {client}. Give one number a client.")
    return float(weights[client])


def sum_updates(updates: Sequence[Update], weights: Sequence[float]) -> Vector:
    """Return sum w_i u_i, folded left to right. Compressed updates are decoded a few at a time."""
    total = arithmetic.weighted_sum([update.vector for update in updates[:MAX_DECODED]], weights[:MAX_DECODED])
    for start in range(MAX_DECODED, len(updates), MAX_DECODED):
        batch = slice(start, start + MAX_DECODED)
        total = arithmetic.weighted_sum([total, *(update.vector for update in updates[batch])], [1.0, *weights[batch]])
    return total


def gram_matrix(vectors: Sequence[Vector], block: int = 1 << 16) -> torch.Tensor:
    """Return the Gram matrix in float64 on the CPU, computed where the vectors are, in blocks of coordinates to avoid a
    copy of the rows."""
    n, dim = len(vectors), vectors[0].numel()
    device = vectors[0].device if has_float64(vectors[0].device) else torch.device("cpu")
    total = torch.zeros(n, n, dtype=torch.float64, device=device)
    for start in range(0, dim, block):
        rows = torch.stack([v[start : start + block] for v in vectors]).to(device).to(torch.float64)
        total.addmm_(rows, rows.T)
    return total.cpu()


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
