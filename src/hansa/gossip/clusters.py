"""Clusterings: partitions of a population into groups that gossip internally."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from hansa.core.bounds import Checked, bound
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import missing_methods, with_defaults

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hansa.gossip.weights import Array

    Integers = NDArray[np.int64]

ROUNDS = 50  # maximum k-means iterations; it converges in a handful


@runtime_checkable
class Clustering(Protocol):
    """A rule that assigns every client of a population to one cluster.

    >>> isinstance(random(2), Clustering)
    True
    """

    __slots__ = ()

    @abstractmethod
    def assign(self, population: int, key: Key, labels: Array | None) -> list[list[int]]:
        """Return the clusters as lists of client ids; ``labels`` are counts [clients, classes], if known."""


class BaseClustering(Clustering):
    """The optional trait of clusterings, with its default.

    >>> random(2).needs_labels
    False
    """

    __slots__ = ()

    @property
    def needs_labels(self) -> bool | None:
        """Whether it needs labels; None uses them if the data has them."""
        return None


def resolve(
    clusters: int | Sequence[Sequence[int]] | Clustering, population: int, key: Key, labels: Any = None
) -> list[list[int]]:
    """Return the clusters of a population, validated to be disjoint and to cover it.

    A number k means ``equal(k)``, a list of lists ``given(...)``. ``labels`` are counts [clients, classes], or a
    function that returns them, which is called only for rules that use labels.

    Args:
        clusters: A number, lists of clients, or a clustering.
        population: Number of clients.
        key: Key of the draws.
        labels: Label counts [clients, classes], or a function that returns them.

    >>> resolve(2, 6, Key(0))
    [[0, 1, 2], [3, 4, 5]]
    """
    check_integer("clusters", "population", population)
    rule: Any = clusters
    if isinstance(clusters, int):
        rule = equal(clusters)
    elif missing_methods(clusters, Clustering):
        rule = given(rule)
    groups: list[list[int]] = rule.assign(population, key, _label_counts(rule, labels, population))
    _check(groups, population)
    return groups


@dataclass(frozen=True, slots=True)
class equal(Checked, BaseClustering):
    """k clusters of consecutive ids; sizes differ by at most one.

    Args:
        k: Number of clusters.

    >>> equal(3).assign(7, Key(0), None)
    [[0, 1, 2], [3, 4], [5, 6]]
    """

    k: int = field(metadata=bound(check_integer))
    needs_labels: ClassVar[bool] = False

    def assign(self, population: int, key: Key, labels: Array | None = None) -> list[list[int]]:
        """Split the ids into k consecutive ranges."""
        return _split_evenly(np.arange(population), self.k, "equal")


@dataclass(frozen=True, slots=True)
class random(Checked, BaseClustering):
    """k clusters of random clients; sizes differ by at most one, and ids ascend within a cluster.

    Args:
        k: Number of clusters.

    >>> sorted(len(group) for group in resolve(random(2), 5, Key(0)))
    [2, 3]
    """

    k: int = field(metadata=bound(check_integer))
    needs_labels: ClassVar[bool] = False

    def assign(self, population: int, key: Key, labels: Array | None = None) -> list[list[int]]:
        """Shuffle the ids, then split them."""
        return _split_evenly(key.child("clusters").numpy().permutation(population), self.k, "random")


@dataclass(frozen=True, slots=True)
class given:
    """User-defined clusters; the order within a cluster is the order around its ring.

    Args:
        groups: Clients of each cluster.

    >>> given([[0, 2], [1, 3]])
    given(groups=((0, 2), (1, 3)))
    """

    groups: Sequence[Sequence[int]]
    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            groups = tuple(tuple(group) for group in self.groups)
        except TypeError:
            raise invalid_argument("given", "groups", self.groups, "a list of lists of client ids") from None
        object.__setattr__(self, "groups", groups)

    def assign(self, population: int, key: Key, labels: Array | None = None) -> list[list[int]]:
        """Return the given clusters."""
        return [list(group) for group in self.groups]


@dataclass(frozen=True, slots=True)
class by_labels(Checked, BaseClustering):
    """k clusters of clients with similar label proportions (k-means on sqrt(p): the Hellinger distance).

    ``diverse`` does the opposite: it makes every cluster resemble the whole population. ``even`` keeps sizes within one
    of each other (always so when diverse). The result is deterministic.

    Args:
        k: Number of clusters.
        diverse: Make every cluster resemble the whole population.
        even: Keep cluster sizes within one of each other.

    >>> resolve(by_labels(2), 4, Key(0), np.array([[9, 0], [0, 9], [8, 1], [1, 8]]))
    [[0, 2], [1, 3]]
    """

    k: int = field(metadata=bound(check_integer))
    diverse: bool = False
    even: bool = True
    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.diverse and not self.even:
            raise invalid_argument("by_labels", "even", self.even, "even=True with diverse=True")

    def assign(self, population: int, key: Key, labels: Array | None) -> list[list[int]]:
        """Cluster the rows of the label counts."""
        if labels is None:
            raise HansaError(f"{self!r} needs the label counts of every client. Give labels=[clients, classes] counts.")
        capacities = np.array([len(group) for group in _split_evenly(np.arange(population), self.k, "by_labels")])
        total = labels.sum(axis=1, keepdims=True)
        share = np.divide(labels, total, out=np.zeros_like(labels), where=total > 0)
        # a client without data counts as an average client
        share[total[:, 0] == 0] = share[total[:, 0] > 0].mean(axis=0) if total.any() else 0.0
        if self.diverse:
            owner = _by_diversity(share, capacities)
        else:
            owner = _by_similarity(np.sqrt(share), capacities, self.even)
        return sorted([np.flatnonzero(owner == k).tolist() for k in range(self.k)])


def _split_evenly(order: Integers, k: int, component: str) -> list[list[int]]:
    if k > len(order):
        raise invalid_argument(component, "k", k, f"at most one cluster a client, and there are {len(order)} clients")
    return [sorted(piece.tolist()) for piece in np.array_split(order, k)]


def _label_counts(clusters: Clustering, labels: Any, population: int) -> Array | None:
    """Return the label counts for a rule that may use them."""
    needs = with_defaults(clusters, BaseClustering).needs_labels
    if labels is None or needs is False:
        return None
    if callable(labels):
        try:
            labels = labels()
        except HansaError as problem:
            if needs is None:  # a custom rule, which may not need labels
                return None
            raise HansaError(f"{clusters!r} needs the label counts of every client. {problem}") from problem
    counts = np.array(labels.tolist() if isinstance(labels, torch.Tensor) else labels, dtype=np.float64)
    if counts.ndim != 2 or len(counts) != population or not np.isfinite(counts).all() or (counts < 0).any():
        expected = f"one row of label counts >= 0 for each of {population} clients"
        raise HansaError(f"labels of shape {counts.shape}: expected {expected}.")
    return counts


def _check(groups: Sequence[Sequence[int]], population: int) -> None:
    counts = Counter(client for group in groups for client in group)
    invalid = [client for client in range(population) if counts[client] != 1]
    invalid += [client for client in counts if type(client) is not int or not 0 <= client < population]
    if invalid:
        raise HansaError(
            f"clusters: client {invalid[0]!r} is in {counts[invalid[0]]} clusters: expected each client from 0 to "
            f"{population - 1} in one."
        )
    if not all(groups):
        raise HansaError(f"clusters: cluster {next(k for k, g in enumerate(groups) if not g)} is empty.")


def _by_similarity(points: Array, capacities: Integers, even: bool) -> Integers:
    """Run Lloyd's k-means from farthest-first centres until the cost stops falling.

    BLAS is avoided because its rounding varies with the number of threads.
    """
    chosen: list[int] = []
    nearest = _squared_distances(points, points.mean(axis=0))
    while len(chosen) < len(capacities):
        chosen.append(int(np.argmax(nearest)))
        newest = _squared_distances(points, points[chosen[-1]])
        nearest = newest if len(chosen) == 1 else np.minimum(nearest, newest)
        nearest[chosen] = -1.0  # never select a client twice, even among duplicates
    centres, best, lowest_cost = points[chosen], np.zeros(len(points), dtype=np.int64), np.inf
    for _ in range(ROUNDS):
        distances = np.stack([_squared_distances(points, centre) for centre in centres], axis=1)
        owner = _assign_nearest(distances, capacities if even else np.full(len(capacities), len(points)))
        centres = np.stack([points[owner == k].mean(axis=0) for k in range(len(capacities))])
        cost = float(np.square(points - centres[owner]).sum())
        if cost >= lowest_cost - 1e-12:
            break
        best, lowest_cost = owner, cost
    return best


def _assign_nearest(distances: Array, capacities: Integers) -> Integers:
    """Assign clients to the nearest centre with capacity left, closest first; no cluster stays empty."""
    owner = np.full(len(distances), -1, dtype=np.int64)
    capacity, distances = capacities.copy(), distances.copy()
    while (waiting := np.flatnonzero(owner < 0)).size:
        nearest = distances[waiting].argmin(axis=1)
        for k in np.unique(nearest):
            candidates = waiting[nearest == k]
            assigned = candidates[np.argsort(distances[candidates, k], kind="stable")][: capacity[k]]
            owner[assigned], capacity[k] = k, capacity[k] - len(assigned)
            if capacity[k] == 0:
                distances[:, k] = np.inf
    for k in np.flatnonzero(np.bincount(owner, minlength=len(capacities)) == 0):
        spare = np.bincount(owner, minlength=len(capacities))[owner] > 1
        own_distances = np.take_along_axis(distances, owner[:, None], axis=1)[:, 0]
        owner[int(np.argmax(np.where(spare, own_distances, -1.0)))] = k
    return owner


def _by_diversity(share: Array, capacities: Integers) -> Integers:
    """Assign clients, the most unusual first, to the cluster that each brings nearest to the average."""
    deviation = share - share.mean(axis=0)
    owner = np.zeros(len(share), dtype=np.int64)
    total, capacity = np.zeros((len(capacities), share.shape[1])), capacities.copy()
    for client in np.argsort(-np.square(deviation).sum(axis=1), kind="stable"):
        increase = np.square(total + deviation[client]).sum(axis=1) - np.square(total).sum(axis=1)
        k = int(np.argmin(np.where(capacity > 0, increase, np.inf)))
        owner[client], total[k], capacity[k] = k, total[k] + deviation[client], capacity[k] - 1
    return owner


def _squared_distances(points: Array, centre: Array) -> Array:
    return np.asarray(np.square(points - centre).sum(axis=1))
