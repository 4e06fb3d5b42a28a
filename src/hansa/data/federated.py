"""Data sets and federated data: inputs, targets, the rows of each client, their statistics, and data made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from hansa.core import trees
from hansa.core.errors import HansaError, check_positive, invalid_argument, suggestion
from hansa.core.keys import Key
from hansa.data.partitions import Partition, Split, divide, owner_column, saved_split
from hansa.data.schema import Schema, TableEncoding
from hansa.training.batch_sources import count_rows, take_rows
from hansa.training.losses import strip_weights


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A data set that is not yet assigned to clients.

    Images are float32 of logical shape [n, C, H, W], channels-last in memory; windows of characters are bytes.

    Args:
        name: Name of the data set.
        inputs: Inputs, one entry per row: a tensor, or dicts and tuples of tensors.
        targets: Targets, one entry per row.
        test_inputs: Inputs of the test set.
        test_targets: Targets of the test set.
        classes: Number of classes, if targets are class numbers.
        groups: The natural owner of each row, -1 for none.
        group_names: Names of the natural owners.
        class_names: Names of the classes.
        test_groups: The natural owner of each test row.
        encoding: For tables, the schema by which they were encoded.

    >>> Dataset("mine", torch.rand(4, 2), torch.tensor([0, 1, 0, 1])).classes
    """

    name: str
    inputs: Any
    targets: Any
    test_inputs: Any = None
    test_targets: Any = None
    classes: int | None = None
    groups: torch.Tensor | None = None
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    test_groups: torch.Tensor | None = None
    encoding: TableEncoding | None = None

    def __post_init__(self) -> None:
        _check_pair(self.name, "inputs", self.inputs, "targets", self.targets, self.classes)
        _check_test(self.name, self.inputs, self.test_inputs, self.test_targets, self.classes)
        _check_owners(self.name, self.test_groups, self.test_targets, None)
        if self.groups is not None and self.groups.shape != (count_rows(self.targets),):
            raise HansaError(f"{self.name}: {len(self.groups)} owners for {count_rows(self.targets)} rows.")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return count_rows(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return _shape(self.name, self.inputs)


class Redraw(NamedTuple):
    """How federated data is drawn with another seed, and the content that was drawn with seed 0."""

    draw: Callable[..., FederatedData]
    content: tuple[Any, ...]

    @staticmethod
    def content_of(data: FederatedData) -> tuple[Any, ...]:
        """Return what a draw decides; data in which it was replaced is no longer that draw."""
        return (data.inputs, data.targets, data.index, data.offsets, data.test_inputs, data.test_targets,
                data.test_owners, data.validation_targets)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FederatedData:
    """Data of many clients, which share the tensors of one data set.

    Args:
        inputs: Inputs, one entry per row: a tensor or `MemmapArray`, or dicts and tuples of these.
        targets: Targets, one entry per row.
        index: Row numbers, client after client, int64.
        offsets: Client i has the rows ``index[offsets[i]:offsets[i + 1]]``.
        test_inputs: Inputs of the test set.
        test_targets: Targets of the test set.
        classes: Number of classes, if targets are class numbers.
        name: Name of the data set.
        test_owners: The client of each test row, -1 for none; with it each client is also evaluated on its own rows.
        client_names: Names of the clients, such as those of their files; none if they have no names.
        encoding: For tables, the schema by which they were encoded.
        validation_inputs: Inputs of the validation rows, which tuning is scored on; see `with_validation`.
        validation_targets: Targets of the validation rows.
        redraw: Draws the clients again with the seed of a run; None if they are fixed.

    >>> data = FederatedData(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]), torch.tensor([3, 0, 1]),
    ...                      torch.tensor([0, 2, 3]), classes=2, name="tiny")
    >>> data.population, data.samples(0), data.rows(1).tolist(), data.label_counts().tolist()
    (2, 2, [1], [[2, 0], [0, 1]])
    """

    inputs: Any
    targets: Any
    index: torch.Tensor
    offsets: torch.Tensor
    test_inputs: Any = None
    test_targets: Any = None
    classes: int | None = None
    name: str = "data"
    test_owners: torch.Tensor | None = None
    client_names: tuple[str, ...] = ()
    encoding: TableEncoding | None = None
    validation_inputs: Any = None
    validation_targets: Any = None
    redraw: Redraw | None = None

    def __post_init__(self) -> None:
        _check_pair(self.name, "inputs", self.inputs, "targets", self.targets, self.classes)
        _check_test(self.name, self.inputs, self.test_inputs, self.test_targets, self.classes)
        _check_owners(self.name, self.test_owners, self.test_targets, self.population)
        if self.client_names and len(self.client_names) != self.population:
            raise HansaError(f"{self.name}: {len(self.client_names)} names for {self.population} clients.")
        rows = self.split.index
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count_rows(self.inputs)):
            found = f"rows {rows.min()} to {rows.max()}, the data has {count_rows(self.inputs)}"
            raise HansaError(f"{self.name}: clients have {found}.")

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {self.classes} classes"
        test = 0 if self.test_targets is None else count_rows(self.test_targets)
        shapes = trees.tree_map(lambda leaf: tuple(leaf.shape[1:]), self.inputs)
        rows = f"{len(self.index)} samples of shape {shapes}"
        return f"FederatedData({self.name!r}, {self.population} clients, {rows}{classes}, {test} test rows)"

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in str(self.summary()).splitlines())
        return f"<div><b>{escape(repr(self))}</b>{lines}{self._picture(40) if self.labelled else ''}</div>"

    def _picture(self, most: int) -> str:
        """Return a bar for the samples of each label of the first clients, as HTML."""
        import pandas

        counts = pandas.DataFrame(self.label_counts()[:most, :most].tolist())
        names = self.client_names or range(self.population)
        counts.index = [f"client {escape(str(name))}" for name in names[:most]]
        picture: str = counts.style.bar(axis=None, color="#9ec5e8", vmin=0).to_html()
        return picture

    def for_seed(self, seed: int) -> FederatedData:
        """Return the data with the clients that a run's seed draws; itself if they are fixed, or drawn with this seed.

        Args:
            seed: The seed of a run.

        >>> from hansa.data import dirichlet, federate
        >>> follows, fixed = federate("fashion-mini", clients=5), federate("fashion-mini", clients=5, seed=0)
        >>> follows.for_seed(1) is follows, fixed.for_seed(1) is fixed, follows.for_seed(0) is follows
        (False, True, True)
        """
        if seed == 0 or self.redraw is None:
            return self
        unchanged = all(a is b for a, b in zip(self.redraw.content, Redraw.content_of(self), strict=True))
        return self.redraw.draw(seed=seed) if unchanged else self

    def following(self, draw: Callable[..., FederatedData]) -> FederatedData:
        """Return the data, which was drawn with seed 0, such that runs draw it with their own seeds.

        Args:
            draw: Returns the data of its argument ``seed``.
        """
        return replace(self, redraw=Redraw(draw, Redraw.content_of(self)))

    @property
    def split(self) -> Split:
        """The rows of each client."""
        return Split(self.index, self.offsets)

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def schema(self) -> Schema | None:
        """The schema of tables."""
        return None if self.encoding is None else self.encoding.schema

    @property
    def sizes(self) -> torch.Tensor:
        """Number of samples of each client, [population]."""
        return self.offsets.diff()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return _shape(self.name, self.inputs)

    @property
    def labelled(self) -> bool:
        """Whether targets are class numbers, one per row."""
        return self.classes is not None and getattr(strip_weights(self.targets), "ndim", 0) == 1

    def rows(self, client: int) -> torch.Tensor:
        """Return the row numbers of one client, as a view."""
        if not 0 <= client < self.offsets.shape[0] - 1:
            raise HansaError(f"{self.name}: client {client}: there are {self.population}, numbered from 0.")
        start, stop = self.offsets[client : client + 2].tolist()
        return self.index[start:stop]

    def samples(self, client: int) -> int:
        """Return the number of samples of one client."""
        return len(self.rows(client))

    def label_counts(self) -> torch.Tensor:
        """Count the samples of each label of each client, [population, classes]."""
        if self.classes is None:
            raise HansaError(f"{self.name}: has no classes.")
        return label_counts(self.split, strip_weights(self.targets), self.classes)

    def summary(self) -> Summary:
        """Return sizes, label entropy, and the effective number of clients per label."""
        sizes, entropy, effective = self.sizes, None, None
        if self.labelled:
            counts = self.label_counts()
            nonempty, present = counts[counts.sum(1) > 0], counts[:, counts.sum(0) > 0]
            entropy = float(_entropy_bits(nonempty).mean()) if len(nonempty) else 0.0
            effective = tuple(torch.exp2(_entropy_bits(present.T)).tolist())
        median = float(sizes.double().quantile(0.5))
        total, smallest, largest = int(sizes.sum()), int(sizes.min()), int(sizes.max())
        return Summary(self.population, total, smallest, median, largest, entropy, effective)


def partition_dataset(
    data: Dataset, partition: Partition, clients: int | None = None, seed: int | None = None
) -> FederatedData:
    """Assign the rows of a data set to clients. The clients share its tensors; nothing is copied.

    Args:
        data: The data set.
        partition: How rows are assigned, such as ``dirichlet(0.3)``.
        clients: Number of clients; None for a partition that has its own.
        seed: Seed of the partition; by default it follows the seed of the run.

    >>> from hansa.data import iid
    >>> partition_dataset(Dataset("mine", torch.rand(6, 2), torch.arange(6) % 2), iid(), clients=3).population
    3
    """
    if seed is None:
        data_of_seed_0 = partition_dataset(data, partition, clients, 0)
        return data_of_seed_0.following(partial(partition_dataset, data, partition, clients))
    key, labels = Key(seed).child("partition"), strip_weights(data.targets)
    if not isinstance(labels, torch.Tensor):  # only the number of rows is known
        labels = torch.zeros(count_rows(labels))
    if isinstance(partition, saved_split) or data.groups is None:
        split = partition.split(labels, clients, key, data.groups)
    else:
        rows = torch.nonzero(data.groups >= 0).squeeze(1)
        owned = partition.split(labels[rows], clients, key, data.groups[rows])
        split = Split(rows[owned.index], owned.offsets)
    return apply_split(data, split)


def apply_split(data: Dataset, split: Split) -> FederatedData:
    """Return a data set with the given split.

    Args:
        data: The data set.
        split: The rows of each client.

    >>> import numpy as np
    >>> data = Dataset("mine", torch.rand(4, 2), torch.arange(4) % 2)
    >>> apply_split(data, Split.of_owners(np.array([0, 0, 1, 1]), 2)).population
    2
    """
    test_owners, names = _natural_clients(data, split)
    return FederatedData(
        data.inputs, data.targets, split.index, split.offsets, data.test_inputs, data.test_targets, data.classes,
        data.name, test_owners, names, data.encoding,
    )  # fmt: skip


def _natural_clients(data: Dataset, split: Split) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Return the client of each test row and the names of the clients, if every client is one natural owner."""
    if data.groups is None:
        return None, ()
    groups, clients = data.groups[split.index], torch.nonzero(split.sizes).squeeze(1)
    owners = groups[split.offsets[clients]]
    one_owner_each = bool((groups == torch.repeat_interleave(owners, split.sizes[clients])).all())
    if not one_owner_each or len(torch.unique(owners)) < len(owners) or int(owners.min()) < 0:
        return None, ()
    known = len(clients) == split.population and int(owners.max()) < len(data.group_names)
    names = tuple(data.group_names[owner] for owner in owners.tolist()) if known else ()
    if data.test_groups is None:
        return None, names
    client_of = torch.full((max(int(owners.max()), int(data.test_groups.max())) + 2,), -1)  # the last is for owner -1
    client_of[owners] = clients
    return client_of[data.test_groups], names


def _shape(name: str, inputs: Any) -> tuple[int, ...]:
    if isinstance(inputs, (dict, tuple, list)):
        raise HansaError(f"{name}: its inputs are several tensors, which no built-in model takes: use your own model.")
    return tuple(inputs.shape[1:])


def _check_pair(name: str, inputs_are: str, inputs: Any, targets_are: str, targets: Any, classes: int | None) -> None:
    leaves = [(inputs_are, leaf) for leaf in trees.tree_leaves(inputs)]
    leaves += [(targets_are, leaf) for leaf in trees.tree_leaves(strip_weights(targets))]
    leaves += [("weights", leaf) for leaf in trees.tree_leaves(getattr(targets, "weight", ()))]
    shapes = [(label, getattr(leaf, "shape", None)) for label, leaf in leaves]
    lengths = {shape[0] if shape else 0 for _, shape in shapes}
    if len(lengths) != 1 or lengths == {0}:
        actual = " and ".join(f"{label} of shape {None if shape is None else tuple(shape)}" for label, shape in shapes)
        raise HansaError(f"{name}: {actual}: expected one target per row, and at least one row.")
    targets = strip_weights(targets)
    if classes is not None and isinstance(targets, torch.Tensor) and not targets.is_floating_point():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise HansaError(f"{name}: {targets_are} run from {low} to {high}: expected 0 to {classes - 1}.")


def _check_owners(name: str, owners: torch.Tensor | None, targets: Any, population: int | None) -> None:
    """Raise for owners of test rows that do not match the rows, or that are not clients."""
    if owners is None:
        return
    rows = 0 if targets is None else count_rows(targets)
    if owners.dtype != torch.int64 or owners.shape != (rows,):
        found = f"{owners.dtype} {tuple(owners.shape)}"
        raise HansaError(f"{name}: owners of test rows: expected int64 [{rows}], found {found}.")
    low, high = (int(owners.min()), int(owners.max())) if rows else (-1, -1)
    if low < -1 or (population is not None and high >= population):
        upper = "" if population is None else f" to {population - 1}"
        raise HansaError(f"{name}: test rows belong to {low} to {high}: expected clients 0{upper}, or -1 for none.")


def _check_test(name: str, inputs: Any, test_inputs: Any, test_targets: Any, classes: int | None) -> None:
    if test_inputs is None and test_targets is None:
        return
    if test_inputs is None or test_targets is None:
        raise HansaError(f"{name}: a test set needs both inputs and targets.")
    _check_pair(name, "test inputs", test_inputs, "test targets", test_targets, classes)
    structure, test_structure = (trees.tree_structure(tree) for tree in (inputs, test_inputs))
    shapes = [[tuple(leaf.shape[1:]) for leaf in trees.tree_leaves(tree)] for tree in (inputs, test_inputs)]
    if structure != test_structure or shapes[0] != shapes[1]:
        train, test = (shape[0] if len(shape) == 1 else shape for shape in shapes)
        raise HansaError(f"{name}: test inputs are {test} each, training inputs {train}.")


# ---- statistics of a partition


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of the clients, and for labelled data the distribution of labels.

    Args:
        clients: Number of clients.
        samples: Number of samples of all clients.
        smallest: Samples of the smallest client.
        median: Median number of samples.
        largest: Samples of the largest client.
        label_entropy: Mean over clients of H = -sum p log2 p over the client's labels: 0 for one label each,
            log2(classes) for uniform labels.
        effective_clients: For each label 2^H over the clients that have it: the number of equal clients with the same
            entropy.

    >>> from hansa.data import federate
    >>> federate("synthetic", clients=4).summary().clients
    4
    """

    clients: int
    samples: int
    smallest: int
    median: float
    largest: int
    label_entropy: float | None
    effective_clients: tuple[float, ...] | None

    def __str__(self) -> str:
        lines = [
            f"{self.clients} clients, {self.samples} samples: "
            f"{self.smallest} / {self.median:g} / {self.largest} per client (min, median, max)"
        ]
        if self.label_entropy is not None and self.effective_clients:
            spread = self.effective_clients
            mean = sum(spread) / len(spread)
            lines.append(
                f"mean label entropy {self.label_entropy:.2f} bits; "
                f"effective clients per label {min(spread):.1f} to {max(spread):.1f}, mean {mean:.1f}"
            )
        return "\n".join(lines)


def label_counts(split: Split, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Count the rows of each label of each client, [clients, classes].

    Args:
        split: The split.
        labels: The class number of every row.
        classes: Number of classes.

    >>> label_counts(Split.of_rows([[0, 1], [2]]), torch.tensor([1, 1, 0]), 2).tolist()
    [[0, 2], [1, 0]]
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise HansaError(f"label_counts: expected a class number per row, found {labels.dtype} {tuple(labels.shape)}.")
    cells = split.owners() * classes + labels[split.index]
    return torch.bincount(cells, minlength=split.population * classes).view(split.population, classes)


def _entropy_bits(counts: torch.Tensor) -> torch.Tensor:
    """Return the Shannon entropy of every row of counts, in bits."""
    fractions = counts.double() / counts.sum(1, keepdim=True)
    return -torch.xlogy(fractions, fractions).sum(1) / torch.log(torch.tensor(2.0, dtype=torch.float64))


# ---- test rows of clients, validation rows, feature noise

TestClients: TypeAlias = "Literal['labels'] | float"
"""How test rows are assigned to clients: ``"labels"``, or the fraction of each client's rows to hold out."""

_HOLD_OUT_HINT = "A fraction, such as 0.2, holds out some of each client's rows."


def with_test_clients(data: FederatedData, test_clients: TestClients, seed: int | None = None) -> FederatedData:
    """Return the data with test rows assigned to clients, so that each client is evaluated on its own rows.

    Args:
        data: The federated data.
        test_clients: ``"labels"`` divides each label's test rows like its training rows, so that a client's test rows
            have about its distribution of labels. A fraction, such as 0.2, holds out that part of each client's rows
            (at least one, never all) as the test set, in place of any other.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import federate
    >>> data = with_test_clients(federate("fashion-mini", clients=20), "labels")
    >>> len(data.test_owners) == len(data.test_targets), int(data.test_owners.max()) < 20
    (True, True)
    >>> with_test_clients(federate("fashion-mini", clients=20), 0.25).sizes.sum().item()
    7497
    """
    if seed is None:
        return _following(with_test_clients, data, test_clients)
    key = Key(seed).child("test clients")
    if isinstance(test_clients, str):
        if test_clients != "labels":
            hint = suggestion(test_clients, ["labels"])
            raise invalid_argument("data", "test_clients", test_clients, "'labels' or a fraction", hint)
        return _assign_by_label(data, key)
    if isinstance(test_clients, bool) or not isinstance(test_clients, (int, float)) or not 0 < test_clients < 1:
        raise invalid_argument("data", "test_clients", test_clients, "'labels', or a fraction between 0 and 1")
    split, rows, owners = _take_out(data, float(test_clients), key, minimum=2)
    inputs, targets = take_rows(data.inputs, rows), take_rows(data.targets, rows)
    return replace(data, index=split.index, offsets=split.offsets, test_inputs=inputs, test_targets=targets,
                   test_owners=owners)  # fmt: skip


def with_validation(data: FederatedData, fraction: float, seed: int | None = None) -> FederatedData:
    """Return the data with some rows of every client taken out of training, to score hyperparameters on.

    Every run reports its metrics on them as ``validation/test_accuracy`` and so on, and `hansa.search` and ``hansa
    sweep`` score these instead of the test rows.

    Args:
        data: The federated data.
        fraction: The part of each client's training rows: at least one row, never all; none of a client with one row.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import federate
    >>> data = with_validation(federate("fashion-mini", clients=20), 0.1)
    >>> len(data.index) + len(data.validation_targets) == len(federate("fashion-mini", clients=20).index)
    True
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise invalid_argument("with_validation", "fraction", fraction, "a fraction between 0 and 1", "0.1 is common.")
    if not isinstance(data, FederatedData):
        remedy = "pass Task(test={'validation': ...})"
        raise HansaError(f"with_validation: {type(data).__name__} has no rows to take: {remedy}.")
    if seed is None:
        return _following(with_validation, data, fraction)
    split, rows, _ = _take_out(data, float(fraction), Key(seed).child("validation"), minimum=1)
    inputs, targets = take_rows(data.inputs, rows), take_rows(data.targets, rows)
    return replace(data, index=split.index, offsets=split.offsets, validation_inputs=inputs, validation_targets=targets)


def test_owner_numbers(data: FederatedData, test_clients: Any) -> torch.Tensor:
    """Return the number of the client of every test row, given by number or by name."""
    rows, names = 0 if data.test_targets is None else count_rows(data.test_targets), np.array(data.client_names)
    if not rows:
        raise HansaError(f"{data.name}: test_clients needs test rows: give test=(x, y).")
    owners = owner_column(data.name, test_clients, "test_clients")
    if owners is None or owners.shape != (rows,) or owners.dtype.kind not in "iuU":
        raise HansaError(f"{data.name}: test_clients: expected the owner of each of {rows} test rows.")
    if owners.dtype.kind != "U":
        return torch.from_numpy(owners.astype(np.int64))
    if not len(names):
        raise HansaError(f"{data.name}: test rows have client names ({str(owners[0])!r}), training rows have numbers.")
    position = np.minimum(np.searchsorted(names, owners), len(names) - 1)
    if (unknown := owners[names[position] != owners]).size:
        name, hint = str(unknown[0]), suggestion(str(unknown[0]), data.client_names)
        raise HansaError(f"{data.name}: test_clients has {name!r}, who has no training rows. {hint}")
    return torch.from_numpy(position.astype(np.int64))


def _assign_by_label(data: FederatedData, key: Key) -> FederatedData:
    if data.test_targets is None:
        raise HansaError(f"{data.name}: there are no test rows to assign. {_HOLD_OUT_HINT}")
    targets, test_targets = strip_weights(data.targets), strip_weights(data.test_targets)
    if data.classes is None or targets.ndim != 1:
        raise HansaError(f"{data.name}: has no labels to assign test rows by. {_HOLD_OUT_HINT}")
    counts, labels = data.label_counts().numpy().astype(np.float64), test_targets.numpy()
    owners = np.full(len(labels), -1, np.int64)
    for label in np.unique(labels):
        if not (total := counts[:, label].sum()):
            continue  # no client trains on it
        draw = key.child(int(label)).numpy()
        rows = draw.permutation(np.flatnonzero(labels == label))
        owners[rows] = divide(len(rows), np.cumsum(counts[:, label]) / total, draw)
    return replace(data, test_owners=torch.from_numpy(owners))


def _take_out(data: FederatedData, fraction: float, key: Key, minimum: int) -> tuple[Split, torch.Tensor, torch.Tensor]:
    """Divide each client's rows: return those that stay, and those that are taken out with their owners."""
    remaining, held_out, owners = [], [], []
    for client in range(data.population):
        rows = data.rows(client)
        if len(rows) < minimum:
            raise HansaError(f"{data.name}: client {client} has {len(rows)} row: too few to hold one out.")
        count = min(len(rows) - 1, max(1, round(fraction * len(rows))))
        is_taken = np.zeros(len(rows), bool)
        is_taken[key.child(client).numpy().permutation(len(rows))[:count]] = True
        mask = torch.from_numpy(is_taken)
        remaining.append(rows[~mask])
        held_out.append(rows[mask])
        owners += [client] * count
    return Split.of_rows(remaining), torch.cat(held_out), torch.tensor(owners)


def with_feature_noise(data: FederatedData, level: float, seed: int | None = None) -> FederatedData:
    """Return the data with Gaussian noise on the inputs: client i of N has noise of deviation level i / (N - 1).

    This is the noise-based feature imbalance of Li et al. 2022. The noise of a row is drawn once, so that a row is the
    same in every round. A test row has the noise of its client; if test rows have no clients, row r has that of client
    r mod N, so that all levels are tested alike. Validation rows stay as they are: take them out afterwards.

    Args:
        data: The federated data; its inputs are one tensor of numbers.
        level: Deviation of the last client's noise, in the units of the inputs.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import from_arrays, iid
    >>> data = from_arrays(torch.zeros(300, 20), torch.zeros(300).long(), clients=3, partition=iid())
    >>> noisy = with_feature_noise(data, 0.1, seed=0)
    >>> [round(float(noisy.inputs[noisy.rows(client)].std()), 2) for client in range(3)]
    [0.0, 0.05, 0.1]
    """
    check_positive("with_feature_noise", "level", level, "0.1 is the level of NIID-Bench, for pixels from 0 to 1.")
    if not isinstance(data, FederatedData) or not isinstance(data.inputs, torch.Tensor):
        raise HansaError("with_feature_noise: expected inputs that are one tensor in memory.")
    if not data.inputs.is_floating_point():
        raise HansaError(f"{data.name}: with_feature_noise: the inputs are {data.inputs.dtype}: expected numbers.")
    if seed is None:
        return _following(with_feature_noise, data, level)
    key, last = Key(seed).child("feature noise"), max(1, data.population - 1)

    def noisy(part: str, values: torch.Tensor, rows_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        values = values.clone()
        for client in range(data.population):
            rows = rows_of(client)
            noise = level * client / last * key.child(part, client).numpy().standard_normal(values[rows].shape)
            values[rows] += torch.from_numpy(noise).to(values.dtype)
        return values

    inputs, test = noisy("train", data.inputs, data.rows), data.test_inputs
    if test is not None:
        owners = torch.arange(len(test)) % data.population if data.test_owners is None else data.test_owners
        test = noisy("test", test, lambda client: torch.nonzero(owners == client).flatten())
    return replace(data, inputs=inputs, test_inputs=test)


def _following(make: Callable[..., FederatedData], data: FederatedData, argument: Any) -> FederatedData:
    """Return what a function makes of data, drawn again with the seed of each run."""
    return make(data, argument, 0).following(partial(_redraw, make, data, argument))


def _redraw(make: Callable[..., FederatedData], data: FederatedData, argument: Any, seed: int) -> FederatedData:
    """Return what a function makes of the data of a seed."""
    return make(data.for_seed(seed), argument, seed)
