"""Partitions: who gets which rows. Each is a value that deals every row at most once, the same for equal keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

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
    """Deals rows to clients; ``labels`` are the targets of the rows, ``groups`` their natural owners.

    >>> from hansa.core.protocols import lacking
    >>> lacking(iid(), Partition), lacking(print, Partition)
    ([], [])
    """

    def split(
        self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None
    ) -> Split: ...


@dataclass(frozen=True, slots=True)
class iid:
    """Every row dealt at random; sizes differ by at most one.

    >>> iid().split(torch.zeros(7), 3, Key(0)).sizes.tolist()
    [3, 2, 2]
    """

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, rows = _clients("iid", clients), len(labels)
        _room("iid", number, rows, f"{rows} samples")
        owners = np.empty(rows, np.int64)
        owners[key.numpy().permutation(rows)] = np.arange(rows) % number
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class shards:
    """Sort by label, cut into equal shards, deal ``per_client`` of them at random to each (McMahan et al. 2017).

    [AWARE]: ``shards(200, 2)`` among 100. [HAFED], among 32: ``shards(200, 6)`` for CIFAR-10 and Fashion-MNIST,
    ``shards(2000, 60)`` for CIFAR-100. Shards beyond ``clients * per_client`` stay undealt, as in the papers.

    >>> labels = torch.arange(10).repeat(30)
    >>> shards(20, 2).split(labels, 10, Key(0)).sizes.tolist()
    [30, 30, 30, 30, 30, 30, 30, 30, 30, 30]
    """

    shards: int = 200
    per_client: int = 2

    def __post_init__(self) -> None:
        check_integer("shards", "shards", self.shards)
        check_integer("shards", "per_client", self.per_client)

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, classes = _clients("shards", clients), _classes("shards", labels)
        if self.shards > len(classes):
            raise invalid_argument("shards", "shards", self.shards, f"at most one a sample, {len(classes)}")
        _room("shards", number, self.shards // self.per_client, f"{self.shards} shards, {self.per_client} a client")
        order = np.argsort(classes, kind="stable")
        # the first len % shards shards are one row longer, as numpy.array_split cuts
        shard_of = np.repeat(np.arange(self.shards), _equal(len(classes), self.shards))
        dealt = np.full(self.shards, -1, np.int64)
        dealt[key.numpy().permutation(self.shards)[: number * self.per_client]] = np.repeat(
            np.arange(number), self.per_client
        )
        owners = np.empty(len(classes), np.int64)
        owners[order] = dealt[shard_of]
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class dirichlet:
    """Each label's rows are shared by p ~ Dirichlet(alpha) over the clients: small alpha, few labels a client.

    No client holds fewer than ``min_size`` rows: what such a client lacks is taken from the largest ones, of as few
    labels as can be, so nothing is drawn again and any alpha ends. Every row is dealt (Yurochkin et al. 2019, Hsu et
    al. 2019; [AFGA] 0.6 and 0.3, [AWARE] 0.1).

    >>> labels = torch.arange(10).repeat(100)
    >>> int(dirichlet(0.1).split(labels, 20, Key(0)).sizes.min()) >= 10
    True
    """

    alpha: float
    min_size: int = 10

    def __post_init__(self) -> None:
        check_positive("dirichlet", "alpha", self.alpha, "0.1 is very uneven, 100 nearly iid.")
        check_integer("dirichlet", "min_size", self.min_size, minimum=0)

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, classes = _clients("dirichlet", clients), _classes("dirichlet", labels)
        _room_for_sizes("dirichlet", number, len(classes), self.min_size)
        draw = key.numpy()
        owners = np.empty(len(classes), np.int64)
        for label in np.unique(classes):
            rows = draw.permutation(np.flatnonzero(classes == label))
            shares = np.cumsum(_simplex(self.alpha, number, draw))
            shares[-1] = 1.0
            # systematic rounding: a count is its share of the rows rounded up or down, exact in expectation
            ends = np.minimum(np.floor(shares * len(rows) + draw.random()), len(rows)).astype(np.int64)
            owners[rows] = np.repeat(np.arange(number), np.diff(ends, prepend=0))
        _top_up(owners, classes, number, self.min_size, draw)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class quantity_skew:
    """Labels iid, sizes uneven: shares ~ Dirichlet(``alpha``), or falling as rank^(-``power``). Every row is dealt.

    >>> quantity_skew(power=1.0, min_size=0).split(torch.zeros(110), 3, Key(0)).sizes.sort().values.tolist()
    [20, 30, 60]
    """

    alpha: float | None = None
    power: float | None = None
    min_size: int = 1

    def __post_init__(self) -> None:
        if (self.alpha is None) == (self.power is None):
            raise HansaError(
                f"quantity_skew(alpha={self.alpha!r}, power={self.power!r}): expected one of the two. "
                "alpha=0.5 draws the shares, power=1.0 makes them fall as 1/rank."
            )
        if self.alpha is not None:
            check_positive("quantity_skew", "alpha", self.alpha)
        if self.power is not None:
            check_non_negative("quantity_skew", "power", self.power)
        check_integer("quantity_skew", "min_size", self.min_size, minimum=0)

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        number, rows = _clients("quantity_skew", clients), len(labels)
        _room_for_sizes("quantity_skew", number, rows, self.min_size)
        draw = key.numpy()
        if self.alpha is not None:
            shares = _simplex(self.alpha, number, draw)
        else:
            shares = np.arange(1, number + 1, dtype=np.float64) ** -float(self.power or 0.0)
            shares = draw.permutation(shares / shares.sum())
        sizes = self.min_size + _whole_shares(shares, rows - number * self.min_size)
        owners = np.empty(rows, np.int64)
        owners[draw.permutation(rows)] = np.repeat(np.arange(number), sizes)
        return Split.of_owners(owners, number)


@dataclass(frozen=True, slots=True)
class kept:
    """Another partition of which each client keeps a ``share`` of its rows, at random, and at least one.

    [CAMS]'s code trains on 80% of a client's rows: ``kept(iid(), 0.8)``.

    >>> kept(iid(), 0.8).split(torch.zeros(50), 5, Key(0)).sizes.tolist()
    [8, 8, 8, 8, 8]
    """

    partition: Partition
    share: float = 0.8

    def __post_init__(self) -> None:
        check_fraction("kept", "share", self.share, "0.8 keeps four rows of five.")

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        whole_split = self.partition.split(labels, clients, key, groups)
        rows = []
        for client in range(whole_split.population):
            own = whole_split.rows(client)
            count = min(len(own), max(1, int(self.share * len(own))))
            drawn = key.child("kept", client).numpy().permutation(len(own))[:count]
            rows.append(own[torch.from_numpy(np.sort(drawn))])
        return Split.of_rows(rows)


@dataclass(frozen=True, slots=True)
class natural:
    """A client for each writer, role or user of at least ``min_size`` rows; asked for fewer, some chosen at random.

    >>> natural(min_size=10).min_size
    10
    """

    min_size: int = 1

    def __post_init__(self) -> None:
        check_integer("natural", "min_size", self.min_size)

    def split(self, labels: torch.Tensor, clients: int | None, key: Key, groups: torch.Tensor | None = None) -> Split:
        if groups is None:
            raise HansaError(
                "natural: this data set has no natural owners. Use iid, shards, dirichlet or quantity_skew."
            )
        owners = groups.numpy()
        sizes = np.bincount(owners[owners >= 0])
        able = np.flatnonzero(sizes >= self.min_size)
        if not len(able):
            raise invalid_argument(
                "natural", "min_size", self.min_size, f"at most {sizes.max(initial=0)}, the most any owner has"
            )
        number = len(able) if clients is None else _clients("natural", clients)
        _room("natural", number, len(able), f"{len(able)} natural owners of {self.min_size} samples or more")
        chosen = np.sort(key.numpy().permutation(able)[:number])
        renamed = np.full(len(sizes) + 1, -1, np.int64)  # the last entry is where -1 looks
        renamed[chosen] = np.arange(number)
        return Split.of_owners(renamed[owners], number)


def _clients(part: str, clients: int | None) -> int:
    if clients is None:
        raise HansaError(f"{part}: expected a number of clients. Only natural() knows its own.")
    check_integer(part, "clients", clients)
    return clients


def _room(part: str, clients: int, feasible: int, holding: str) -> None:
    if clients > feasible:
        raise invalid_argument(part, "clients", clients, f"at most {feasible}: there are {holding}")


def _room_for_sizes(part: str, clients: int, rows: int, min_size: int) -> None:
    each = max(1, min_size)
    lower = f"With min_size=1 at most {rows} are possible." if each > 1 and clients <= rows else ""
    if clients * each > rows:
        held = f"{rows} samples, {each} a client" if each > 1 else f"{rows} samples"
        raise invalid_argument(part, "clients", clients, f"at most {rows // each}: there are {held}", lower)


def _classes(part: str, labels: torch.Tensor) -> Integers:
    if labels.ndim != 1 or labels.is_floating_point():
        raise HansaError(
            f"{part}: deals by label, but these targets are {labels.dtype} of shape {tuple(labels.shape)}. "
            "Use iid, quantity_skew or natural."
        )
    return np.asarray(labels.numpy(), np.int64)


def _equal(rows: int, parts: int) -> Integers:
    return np.full(parts, rows // parts, np.int64) + (np.arange(parts) < rows % parts)


def _simplex(alpha: float, size: int, draw: np.random.Generator) -> Floats:
    """One draw of a symmetric Dirichlet; for alpha < 1 in logarithms, as Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha),
    because the plain draw underflows to 0/0."""
    if alpha >= 1:
        weights = draw.standard_gamma(alpha, size)
        weights /= weights.max()
    else:
        logs = alpha * np.log(draw.standard_gamma(alpha + 1, size)) + np.log1p(-draw.random(size))
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logs - logs.max()) / alpha)
    return np.asarray(weights / weights.sum(), np.float64)


def _whole_shares(shares: Floats, total: int) -> Integers:
    """Whole numbers of the given total, each its share rounded down, or up for those with the largest remainders."""
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes


def _top_up(owners: Integers, classes: Integers, clients: int, least: int, draw: np.random.Generator) -> None:
    """Move rows, in place, from the largest clients to those that hold fewer than ``least``."""
    sizes = np.bincount(owners, minlength=clients)
    lacking = np.maximum(least - sizes, 0)
    wanted = int(lacking.sum())
    if wanted == 0:
        return
    # the highest level to which the largest may be cut so that enough is freed
    low, high = least, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= wanted else (low, middle - 1)
    giving = np.maximum(sizes - low, 0)
    spare = np.flatnonzero(giving)[: int(giving.sum()) - wanted]
    giving[spare] -= 1
    order = np.lexsort((draw.random(len(owners)), owners))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    freed = order[np.arange(len(owners)) - first[owners[order]] < giving[owners[order]]]
    freed = freed[np.lexsort((draw.random(len(freed)), classes[freed]))]
    takers = draw.permutation(np.flatnonzero(lacking))
    owners[freed] = np.repeat(takers, lacking[takers])
