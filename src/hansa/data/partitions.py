"""Partitions of rows over clients. Each assigns every row at most once, and equally for equal keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from hansa.core.bounds import Checked, bound
from hansa.core.counts import floor_share
from hansa.core.errors import (
    HansaError,
    check_fraction,
    check_integer,
    check_non_negative,
    check_positive,
    invalid_argument,
)
from hansa.core.keys import Key
from hansa.data.split import Split

if TYPE_CHECKING:
    import numpy.typing as npt

Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"


class Partition(Protocol):
    """Assigns rows to clients, given the targets of the rows and their natural owners (``groups``).

    >>> dirichlet(0.5).split(torch.arange(100) % 10, clients=4, key=Key(0)).population
    4
    """

    def split(
        self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None
    ) -> Split: ...


@dataclass(frozen=True, slots=True)
class iid:
    """Assign every row at random; sizes differ by at most one.

    >>> iid().split(torch.zeros(7), 3, Key(0)).sizes.tolist()
    [3, 2, 2]
    """

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, rows = _check_clients("iid", clients, len(labels)), len(labels)
        owners = np.empty(rows, np.int64)
        owners[key.numpy().permutation(rows)] = np.arange(rows) % number
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class shards(Checked):
    """Sort rows by label, cut them into equal shards, and give each client some at random (McMahan et al. 2017).

    [AWARE]: ``shards(200, 2)`` with 100 clients. [HAFED], with 32: ``shards(200, 6)`` for CIFAR-10 and Fashion-MNIST,
    ``shards(2000, 60)`` for CIFAR-100. Shards beyond ``clients * per_client`` are not used, as in the papers.

    Args:
        shards: Number of shards.
        per_client: Shards per client.

    >>> labels = torch.arange(10).repeat(30)
    >>> shards(20, 2).split(labels, 10, Key(0)).sizes.tolist()
    [30, 30, 30, 30, 30, 30, 30, 30, 30, 30]
    """

    shards: int = field(default=200, metadata=bound(check_integer))
    per_client: int = field(default=2, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("shards", labels)
        if self.shards > len(classes):
            raise invalid_argument("shards", "shards", self.shards, f"at most one per sample, {len(classes)}")
        number = _check_clients("shards", clients, self.shards, self.per_client, "shards")
        order = np.argsort(classes, kind="stable")
        # the first len % shards shards are one row longer, as in numpy.array_split
        shard_of = np.repeat(np.arange(self.shards), _equal_sizes(len(classes), self.shards))
        shard_owner = np.full(self.shards, -1, np.int64)
        shard_owner[key.numpy().permutation(self.shards)[: number * self.per_client]] = np.repeat(
            np.arange(number), self.per_client
        )
        owners = np.empty(len(classes), np.int64)
        owners[order] = shard_owner[shard_of]
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class dirichlet(Checked):
    """Divide each label's rows over the clients by p ~ Dirichlet(alpha) (Yurochkin et al. 2019, Hsu et al. 2019).

    Clients below ``min_size`` receive rows of as few labels as possible from the largest clients. Nothing is drawn
    again, so the partition succeeds for any alpha. Every row is assigned. [AFGA] uses 0.6 and 0.3, [AWARE] 0.1.

    Args:
        alpha: Concentration; a small alpha gives few labels per client.
        min_size: Minimum number of rows of a client.

    >>> labels = torch.arange(10).repeat(100)
    >>> int(dirichlet(0.1).split(labels, 20, Key(0)).sizes.min()) >= 10
    True
    """

    alpha: float = field(metadata=bound(check_positive, "0.1 is very uneven, 100 nearly iid."))
    min_size: int = field(default=10, metadata=bound(check_integer, minimum=0))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("dirichlet", labels)
        number = _check_clients("dirichlet", clients, len(classes), self.min_size)
        draw = key.numpy()
        owners = np.empty(len(classes), np.int64)
        for label in np.unique(classes):
            rows = draw.permutation(np.flatnonzero(classes == label))
            owners[rows] = divide(len(rows), np.cumsum(_simplex(self.alpha, number, draw)), draw)
        _top_up(owners, classes, number, self.min_size, draw)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class quantity_skew(Checked):
    """Uneven sizes with iid labels. Every row is assigned. Give either ``alpha`` or ``power``.

    Args:
        alpha: Sizes are proportional to a draw of Dirichlet(alpha).
        power: Sizes are proportional to rank^(-power).
        min_size: Minimum number of rows of a client.

    >>> quantity_skew(power=1.0, min_size=0).split(torch.zeros(110), 3, Key(0)).sizes.sort().values.tolist()
    [20, 30, 60]
    """

    alpha: float | None = field(default=None, metadata=bound(check_positive))
    power: float | None = field(default=None, metadata=bound(check_non_negative))
    min_size: int = field(default=1, metadata=bound(check_integer, minimum=0))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if (self.alpha is None) == (self.power is None):
            raise HansaError(f"quantity_skew(alpha={self.alpha!r}, power={self.power!r}): expected one of the two.")

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        rows = len(labels)
        number = _check_clients("quantity_skew", clients, rows, self.min_size)
        draw = key.numpy()
        if self.alpha is not None:
            fractions = _simplex(self.alpha, number, draw)
        else:
            fractions = np.arange(1, number + 1, dtype=np.float64) ** -float(self.power or 0.0)
            fractions = draw.permutation(fractions / fractions.sum())
        sizes = self.min_size + _round_to_total(fractions, rows - number * self.min_size)
        owners = np.empty(rows, np.int64)
        owners[draw.permutation(rows)] = np.repeat(np.arange(number), sizes)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class labels_per_client(Checked):
    """Give each client rows of a fixed number of labels (the quantity-based label imbalance of Li et al. 2022).

    Client i has the i-th label, counted round, and others at random. The rows of a label are divided equally among its
    clients. Rows of a label that no client has are not used, which happens with fewer clients than labels only.

    Args:
        labels: Labels per client.

    >>> targets = torch.arange(10).repeat(30)
    >>> split = labels_per_client(2).split(targets, 10, Key(0))
    >>> [len(targets[split.rows(client)].unique()) for client in range(10)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    labels: int = field(default=2, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        classes = _classes("labels_per_client", labels)
        number = _check_clients("labels_per_client", clients, len(classes))
        present = np.unique(classes)
        if self.labels > len(present):
            raise invalid_argument("labels_per_client", "labels", self.labels, f"at most the labels, {len(present)}")
        draw = key.numpy()
        assigned = np.zeros((number, len(present)), bool)
        for client in range(number):
            first_label = client % len(present)
            other_labels = np.delete(np.arange(len(present)), first_label)
            assigned[client, [first_label, *draw.permutation(other_labels)[: self.labels - 1]]] = True
        owners = np.full(len(classes), -1, np.int64)
        for position, label in enumerate(present):
            rows = draw.permutation(np.flatnonzero(classes == label))
            if len(sharing := np.flatnonzero(assigned[:, position])):
                owners[rows] = np.repeat(sharing, _equal_sizes(len(rows), len(sharing)))
        empty = np.flatnonzero(np.bincount(owners[owners >= 0], minlength=number) == 0)
        if len(empty):
            expected = f"fewer: client {empty[0]} would have no rows of its labels"
            raise invalid_argument("labels_per_client", "clients", number, expected)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class subsample(Checked):
    """Keep a random fraction of each client's rows of another partition, at least one.

    [CAMS]'s code trains on 80% of a client's rows: ``subsample(iid(), 0.8)``.

    Args:
        partition: The partition to draw from.
        fraction: Fraction of each client's rows.

    >>> subsample(iid(), 0.8).split(torch.zeros(50), 5, Key(0)).sizes.tolist()
    [8, 8, 8, 8, 8]
    """

    partition: Partition
    fraction: float = field(default=0.8, metadata=bound(check_fraction, "0.8 keeps four rows of five."))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        split = self.partition.split(labels, clients, key, groups)
        rows = []
        for client in range(split.population):
            available = split.rows(client)
            count = min(len(available), max(1, floor_share(self.fraction, len(available))))
            positions = key.child("kept", client).numpy().permutation(len(available))[:count]
            rows.append(available[torch.from_numpy(np.sort(positions))])
        return Split.of_rows(rows)


@dataclass(frozen=True, slots=True)
class natural(Checked):
    """One client per natural owner of the rows, such as a writer or a user; fewer clients are chosen at random.

    Args:
        min_size: Owners with fewer rows are left out.

    >>> natural(min_size=10).min_size
    10
    """

    min_size: int = field(default=1, metadata=bound(check_integer))

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        if groups is None:
            raise HansaError("natural: the data has no natural owners. Use iid, shards, dirichlet or quantity_skew.")
        owners = groups.numpy()
        sizes = np.bincount(owners[owners >= 0])
        eligible = np.flatnonzero(sizes >= self.min_size)
        if not len(eligible):
            largest = f"at most {sizes.max(initial=0)}, the largest owner"
            raise invalid_argument("natural", "min_size", self.min_size, largest)
        number = len(eligible) if clients is None else clients
        _check_clients("natural", number, len(eligible), unit=f"natural owners of {self.min_size} samples or more")
        selected = np.sort(key.numpy().permutation(eligible)[:number])
        client_of = np.full(len(sizes) + 1, -1, np.int64)  # the last entry is for owner -1
        client_of[selected] = np.arange(number)
        return Split.of_owners(client_of[owners], number)


def _check_clients(part: str, clients: int | None, available: int, per_client: int = 1, unit: str = "samples") -> int:
    """Return the number of clients, for each of which so many units must be available."""
    if clients is None:
        raise HansaError(f"{part}: expected a number of clients. Only natural() has its own.")
    check_integer(part, "clients", clients)
    if clients > (feasible := available // max(1, per_client)):
        needed = f"{available} {unit}, {per_client} per client" if per_client > 1 else f"{available} {unit}"
        raise invalid_argument(part, "clients", clients, f"at most {feasible}: there are {needed}")
    return clients


def _classes(part: str, labels: torch.Tensor) -> Integers:
    if labels.ndim != 1 or labels.is_floating_point():
        found = f"{labels.dtype} {tuple(labels.shape)}"
        raise HansaError(f"{part}: expected a label per row, found {found}. Use iid or natural.")
    return np.asarray(labels.numpy(), np.int64)


def divide(rows: int, ends: Floats, draw: np.random.Generator) -> Integers:
    """Return the client of each of some rows, by cumulative fractions.

    Rounding is systematic: a client's count is its expectation rounded up or down, and unbiased.
    """
    ends = np.append(ends[:-1], 1.0)
    bounds = np.minimum(np.floor(ends * rows + draw.random()), rows).astype(np.int64)
    return np.repeat(np.arange(len(ends)), np.diff(bounds, prepend=0))


def _equal_sizes(rows: int, count: int) -> Integers:
    return np.full(count, rows // count, np.int64) + (np.arange(count) < rows % count)


def _simplex(alpha: float, size: int, draw: np.random.Generator) -> Floats:
    """Draw from a symmetric Dirichlet.

    For alpha < 1 this uses logarithms, Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha): a plain draw underflows to 0/0.
    """
    if alpha >= 1:
        weights = draw.standard_gamma(alpha, size)
        weights /= weights.max()
    else:
        logs = alpha * np.log(draw.standard_gamma(alpha + 1, size)) + np.log1p(-draw.random(size))
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logs - logs.max()) / alpha)
    return np.asarray(weights / weights.sum(), np.float64)


def _round_to_total(shares: Floats, total: int) -> Integers:
    """Round shares of a total to integers with that sum, by the largest remainders."""
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes


def _top_up(owners: Integers, classes: Integers, clients: int, minimum: int, draw: np.random.Generator) -> None:
    """Move rows, in place, from the largest clients to those with fewer than ``minimum``."""
    sizes = np.bincount(owners, minlength=clients)
    deficits = np.maximum(minimum - sizes, 0)
    total_deficit = int(deficits.sum())
    if total_deficit == 0:
        return
    # the highest size to which the largest clients can be cut to free enough rows
    low, high = minimum, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= total_deficit else (low, middle - 1)
    surpluses = np.maximum(sizes - low, 0)
    spare = np.flatnonzero(surpluses)[: int(surpluses.sum()) - total_deficit]
    surpluses[spare] -= 1
    order = np.lexsort((draw.random(len(owners)), owners))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    freed = order[np.arange(len(owners)) - starts[owners[order]] < surpluses[owners[order]]]
    freed = freed[np.lexsort((draw.random(len(freed)), classes[freed]))]
    receivers = draw.permutation(np.flatnonzero(deficits))
    owners[freed] = np.repeat(receivers, deficits[receivers])
