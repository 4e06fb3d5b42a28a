"""Federated data: one tensor of inputs, one of targets, and each client's rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data.partitions import Partition
from hansa.data.split import Split, saved
from hansa.data.summary import Summary, label_counts, summarize
from hansa.training.losses import unweighted


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A data set before anyone owns it. ``groups`` are the natural owners of the rows, -1 for rows that are nobody's;
    ``test_groups`` those of the test rows.

    Images are float32 of logical shape [n, C, H, W] that lie channels-last in memory; windows of characters are bytes.

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

    def __post_init__(self) -> None:
        _check_pair(self.name, "inputs", self.inputs, "targets", self.targets, self.classes)
        _check_test(self.name, self.inputs, self.test_inputs, self.test_targets, self.classes)
        _check_owners(self.name, self.test_groups, self.test_targets, None)
        if self.groups is not None and self.groups.shape != (_rows(self.targets),):
            raise HansaError(f"{self.name}: {len(self.groups)} owners for {_rows(self.targets)} rows.")

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return _rows(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return _shape(self.name, self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class FederatedData:
    """What a task trains on. Client i holds the rows ``index[offsets[i]:offsets[i + 1]]`` of inputs and targets, which
    are tensors, or dicts and tuples of them; in place of a tensor may stand a `hansa.data.Mapped` file. Where
    ``test_owners`` says whose each test row is (-1 for nobody's), clients are also evaluated one by one.

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

    def __post_init__(self) -> None:
        _check_pair(self.name, "inputs", self.inputs, "targets", self.targets, self.classes)
        _check_test(self.name, self.inputs, self.test_inputs, self.test_targets, self.classes)
        _check_owners(self.name, self.test_owners, self.test_targets, self.population)
        rows = self.split.index
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < _rows(self.inputs)):
            raise HansaError(
                f"{self.name}: clients hold rows {int(rows.min())} to {int(rows.max())}, "
                f"but the data has rows 0 to {_rows(self.inputs) - 1}."
            )

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {self.classes} classes"
        test = 0 if self.test_targets is None else _rows(self.test_targets)
        shapes = torch.utils._pytree.tree_map(lambda leaf: tuple(leaf.shape[1:]), self.inputs)
        rows = f"{len(self.index)} samples of shape {shapes}"
        return f"FederatedData({self.name!r}, {self.population} clients, {rows}{classes}, {test} to test with)"

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in str(self.summary()).splitlines())
        return f"<div><b>{escape(repr(self))}</b>{lines}</div>"

    @property
    def split(self) -> Split:
        """Who holds which rows."""
        return Split(self.index, self.offsets)

    @property
    def population(self) -> int:
        """How many clients there are."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> torch.Tensor:
        """Samples held by each client, [population]."""
        return self.offsets.diff()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return _shape(self.name, self.inputs)

    @property
    def labelled(self) -> bool:
        """Whether it is known how many samples of each label each client holds."""
        return self.classes is not None and getattr(unweighted(self.targets), "ndim", 0) == 1

    def rows(self, client: int) -> torch.Tensor:
        """The row numbers of one client: a view, never a copy."""
        if not 0 <= client < self.offsets.shape[0] - 1:
            raise HansaError(f"{self.name}: client {client}: there are {self.population}, numbered from 0.")
        first, last = self.offsets[client : client + 2].tolist()
        return self.index[first:last]

    def samples(self, client: int) -> int:
        """How many samples one client holds."""
        return len(self.rows(client))

    def label_counts(self) -> torch.Tensor:
        """How many samples of each label each client holds, [population, classes]."""
        if self.classes is None:
            raise HansaError(f"{self.name}: has no classes to count.")
        return label_counts(self.split, unweighted(self.targets), self.classes)

    def summary(self) -> Summary:
        """Sizes, label entropy, effective number of clients a label."""
        return summarize(self.split, self.label_counts() if self.labelled else None)


def partition(data: Dataset, how: Partition, clients: int | None = None, seed: int = 0) -> FederatedData:
    """Deal a data set to clients. Nothing is copied: the clients share its tensors.

    >>> from hansa.data import iid
    >>> partition(Dataset("mine", torch.rand(6, 2), torch.arange(6) % 2), iid(), clients=3).population
    3
    """
    key, labels = Key(seed).child("partition"), unweighted(data.targets)
    if not isinstance(labels, torch.Tensor):  # only how many rows there are is known
        labels = torch.zeros(_rows(labels))
    if isinstance(how, saved) or data.groups is None or bool((data.groups >= 0).all()):
        split = how.split(labels, clients, key, data.groups)
    else:
        rows = torch.nonzero(data.groups >= 0).squeeze(1)
        dealt = how.split(labels[rows], clients, key, data.groups[rows])
        split = Split(rows[dealt.index], dealt.offsets)
    return with_clients(data, split)


def with_clients(data: Dataset, split: Split) -> FederatedData:
    """A data set under a given split.

    >>> import numpy as np
    >>> whole = Dataset("mine", torch.rand(4, 2), torch.arange(4) % 2)
    >>> with_clients(whole, Split.of_owners(np.array([0, 0, 1, 1]), 2)).population
    2
    """
    return FederatedData(
        inputs=data.inputs,
        targets=data.targets,
        index=split.index,
        offsets=split.offsets,
        test_inputs=data.test_inputs,
        test_targets=data.test_targets,
        classes=data.classes,
        name=data.name,
        test_owners=_natural_owners(data, split),
    )


def _natural_owners(data: Dataset, split: Split) -> torch.Tensor | None:
    """Whose each test row is where every client is one natural owner; None where rows were dealt otherwise."""
    if data.groups is None or data.test_groups is None:
        return None
    groups, there = data.groups[split.index], torch.nonzero(split.sizes).squeeze(1)
    first = groups[split.offsets[there]]
    alone = bool((groups == torch.repeat_interleave(first, split.sizes[there])).all())
    if not alone or len(torch.unique(first)) < len(first) or int(first.min()) < 0:
        return None
    most = max(int(first.max()), int(data.test_groups.max()))
    client_of = torch.full((most + 2,), -1)  # the last entry is where -1 looks
    client_of[first] = there
    return client_of[data.test_groups]


def _rows(tree: Any) -> int:
    return len(torch.utils._pytree.tree_leaves(tree)[0])


def _shape(name: str, inputs: Any) -> tuple[int, ...]:
    if isinstance(inputs, (dict, tuple, list)):
        raise HansaError(f"{name}: its inputs are several tensors, which no model of Hansa's takes: name your own.")
    return tuple(inputs.shape[1:])


def _check_pair(name: str, inputs_are: str, inputs: Any, targets_are: str, targets: Any, classes: int | None) -> None:
    leaves = [(inputs_are, leaf) for leaf in torch.utils._pytree.tree_leaves(inputs)]
    leaves += [(targets_are, leaf) for leaf in torch.utils._pytree.tree_leaves(targets)]
    shapes = [(what, getattr(leaf, "shape", None)) for what, leaf in leaves]
    lengths = {shape[0] if shape else 0 for _, shape in shapes}
    if len(lengths) != 1 or lengths == {0}:
        told = " and ".join(f"{what} of shape {None if shape is None else tuple(shape)}" for what, shape in shapes)
        raise HansaError(f"{name}: {told}: expected one target a row, and at least one row.")
    targets = unweighted(targets)
    if classes is not None and isinstance(targets, torch.Tensor) and not targets.is_floating_point():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise HansaError(f"{name}: {targets_are} run from {low} to {high}: expected 0 to {classes - 1}.")


def _check_owners(name: str, owners: torch.Tensor | None, targets: Any, population: int | None) -> None:
    """Refuse owners of test rows that do not fit them, or that are no clients."""
    if owners is None:
        return
    rows = 0 if targets is None else _rows(targets)
    if owners.dtype != torch.int64 or owners.shape != (rows,):
        raise HansaError(
            f"{name}: owners of test rows are {owners.dtype} of shape {tuple(owners.shape)}: expected int64, one for "
            f"each of {rows} test rows."
        )
    low, high = (int(owners.min()), int(owners.max())) if rows else (-1, -1)
    if low < -1 or (population is not None and high >= population):
        known = "" if population is None else f" to {population - 1}"
        raise HansaError(f"{name}: test rows belong to {low} to {high}: expected clients 0{known}, -1 for nobody's.")


def _check_test(name: str, inputs: Any, test_inputs: Any, test_targets: Any, classes: int | None) -> None:
    if test_inputs is None and test_targets is None:
        return
    if test_inputs is None or test_targets is None:
        raise HansaError(f"{name}: a test set needs both inputs and targets.")
    _check_pair(name, "test inputs", test_inputs, "test targets", test_targets, classes)
    form, other = (torch.utils._pytree.tree_structure(each) for each in (inputs, test_inputs))
    shapes = [
        [tuple(leaf.shape[1:]) for leaf in torch.utils._pytree.tree_leaves(each)] for each in (inputs, test_inputs)
    ]
    if form != other or shapes[0] != shapes[1]:
        train, test = (each[0] if len(each) == 1 else each for each in shapes)
        raise HansaError(f"{name}: test inputs are {test} each, training inputs {train}.")
