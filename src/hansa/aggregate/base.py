"""The protocol of aggregators, and the one place where weights are normalized."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.protocols import check_component
from hansa.core.types import RoundContext, State, Update, Vector
from hansa.core.vectors import arithmetic

Weights: TypeAlias = Literal["uniform", "samples", "clusters"] | tuple[float, ...]
"""How updates count: equally, by sample count, equally by cluster, or by one given number a client."""


MAX_DECODED, MAX_DECODED_BYTES = 16, 1 << 22  # updates decoded at once, and bytes of them where they are large


class Combined(NamedTuple):
    """An aggregate, the state after it, what is worth reporting of it, and rows to keep of clients with the round.

    Args:
        vector: The aggregate.
        state: State after the round.
        info: Values worth reporting.
        rows: Rows to store for clients.

    >>> import torch
    >>> Combined(torch.ones(2), {}, {"weights": [0.5, 0.5]}).info
    {'weights': [0.5, 0.5]}
    """

    vector: Vector
    state: State
    info: dict[str, Any]
    rows: Mapping[int, Mapping[str, Vector]] = MappingProxyType({})


class Participant(NamedTuple):
    """What is known of a participant before its update arrives: enough to say how much it will count."""

    client: int
    cohort: int
    samples: int


class RunningAggregate(Protocol):
    """An aggregate in the making: updates are added in client order, each once."""

    def add(self, update: Update) -> None: ...

    def vector(self) -> Vector: ...


@runtime_checkable
class Aggregator(Protocol):
    """Individual updates in, one vector out. Arrival order never matters."""

    __slots__ = ()

    @abstractmethod
    def init(self, dim: int, population: int) -> State:
        """Return the state before the first round, a plain tree."""

    @abstractmethod
    def combine(self, updates: Sequence[Update], state: State, ctx: RoundContext) -> Combined:
        """Return the aggregate of a round's accepted updates, at least ``min_updates`` of them."""


class BaseAggregator(Aggregator):
    """The optional traits of aggregators, with their defaults.

    >>> from hansa.aggregate import median
    >>> median().min_updates, median().weights
    (1, 'uniform')
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_client_stats(self) -> bool:
        """Whether it asks for ``ctx.population.losses``, ``norms`` and ``participations``, as they were before the
        round. The losses of the round itself are with the updates: ``update.loss``."""
        return False

    @property
    def min_updates(self) -> int:
        """The fewest updates it can work with: of fewer a round makes nothing."""
        return 1

    @property
    def weights(self) -> Weights:
        """How updates count; buffers are averaged by the same weights."""
        return "uniform"

    @property
    def momentum_storage(self) -> Literal["ram", "disk"]:
        """Where the rows are wanted that ``combine`` keeps of clients."""
        return "ram"

    @property
    def running(self) -> Callable[[Sequence[Participant]], RunningAggregate] | None:
        """For one that folds updates as they come, in client order: a method from all that may come to the fold."""
        return None


def require_aggregator(owner: str, argument: str, value: object) -> None:
    """Refuse what is no aggregator."""
    check_component(owner, argument, value, Aggregator, "an aggregator", example="mean() is one.")


def check_weights(component: str, weights: object) -> Weights:
    """Return the weights in the form that components store, or raise a `HansaError`."""
    if isinstance(weights, str):
        if weights not in ("uniform", "samples", "clusters"):
            raise invalid_argument(
                component,
                "weights",
                weights,
                "a known rule",
                suggestion(weights, ["uniform", "samples", "clusters", "a list"]),
            )
        return weights  # type: ignore[return-value]
    if not isinstance(weights, Sequence) and not isinstance(weights, torch.Tensor):
        raise invalid_argument(component, "weights", weights, "'uniform', 'samples', 'clusters' or one number a client")
    numbers = tuple(float(w) for w in weights)
    for client, number in enumerate(numbers):
        if not math.isfinite(number) or number < 0:
            raise HansaError(
                f"{component}(weights): client {client} has weight {number}: expected a finite number >= 0."
            )
    return numbers


def normalize_weights(weights: Weights, updates: Sequence[Update] | Sequence[Participant]) -> list[float]:
    """The weight of each update, summing to one: the only place where weights are normalised.

    Args:
        weights: Rule, or one number per client.
        updates: Updates or participants to weigh.

    >>> from hansa.core.types import Update
    >>> normalize_weights("samples", [Update(0, 0, None, 30, 1), Update(1, 1, None, 10, 1)])
    [0.75, 0.25]
    """
    raw = raw_weights(weights, updates)
    total = math.fsum(raw)
    if not total > 0:
        raise zero_weight_error([update.client for update in updates], total)
    return [w / total for w in raw]


def raw_weights(weights: Weights, updates: Sequence[Update] | Sequence[Participant]) -> list[float]:
    """How much each update counts beside the others, before normalisation."""
    if weights == "uniform":
        return [1.0] * len(updates)
    if weights == "samples":
        return [float(update.samples) for update in updates]
    if weights == "clusters":
        members: dict[int, int] = {}
        for update in updates:
            members[update.cohort] = members.get(update.cohort, 0) + 1
        return [1.0 / members[update.cohort] for update in updates]
    return [_own_weight(weights, update.client) for update in updates]


def client_weights(weights: Weights, clients: Sequence[int], samples: Sequence[int]) -> list[float]:
    """The same of clients that need not have reported: their weights in the objective, summing to one over them.

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


def _own_weight(weights: Sequence[float] | str, client: int) -> float:
    if client >= len(weights):
        raise HansaError(f"weights: {len(weights)} numbers given, none for client {client}. Give one number a client.")
    return float(weights[client])


def sum_updates(updates: Sequence[Update], weights: Sequence[float]) -> Vector:
    """sum w_i u_i, folded left to right; of updates that came compressed only a few are decoded at a time."""
    total = arithmetic.weighted_sum([update.vector for update in updates[:MAX_DECODED]], weights[:MAX_DECODED])
    for start in range(MAX_DECODED, len(updates), MAX_DECODED):
        some = slice(start, start + MAX_DECODED)
        total = arithmetic.weighted_sum([total, *(update.vector for update in updates[some])], [1.0, *weights[some]])
    return total


def gram_matrix(vectors: Sequence[Vector], block: int = 1 << 16) -> torch.Tensor:
    """The Gram matrix in float64, block by block of coordinates so that no second copy of the rows exists."""
    n, dim = len(vectors), vectors[0].numel()
    total = torch.zeros(n, n, dtype=torch.float64)
    for start in range(0, dim, block):
        rows = torch.stack([v[start : start + block] for v in vectors]).to(torch.float64)
        total.addmm_(rows, rows.T)
    return total
