"""Partitions: every row at most once, sizes as promised, the papers' settings, and any alpha ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data import (
    Dataset,
    Split,
    dirichlet,
    iid,
    labels_per_client,
    natural,
    partition_dataset,
    quantity_skew,
    shards,
)
from hansa.data.partitions import Partition
from mistakes import refused

ALL_DEALING_EVERYTHING = [
    iid(),
    dirichlet(0.1, min_size=2),
    dirichlet(5.0, min_size=0),
    quantity_skew(alpha=0.3),
    quantity_skew(power=1.5, min_size=2),
    shards(40, 4),
    labels_per_client(3),
]


def balanced(classes: int, each: int) -> torch.Tensor:
    return torch.arange(classes).repeat(each)


@pytest.mark.parametrize("how", ALL_DEALING_EVERYTHING, ids=repr)
def test_every_row_is_dealt_exactly_once_and_equally_for_equal_keys(how: Partition) -> None:
    first, again, other = (how.split(balanced(10, 37), 10, Key(seed)) for seed in (1, 1, 2))
    assert sorted(first.index.tolist()) == list(range(370))
    assert first.population == 10
    assert torch.equal(first.index, again.index)
    assert torch.equal(first.offsets, again.offsets)
    assert not torch.equal(first.index, other.index)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 300),
    clients=st.integers(1, 60),
    classes=st.integers(1, 12),
    alpha=st.sampled_from([5e-324, 1e-300, 1e-6, 0.01, 0.3, 1.0, 50.0, 1e6, 1e300]),
    least=st.integers(0, 12),
    seed=st.integers(0, 5),
)
def test_dirichlet_ends_and_honours_its_least_size_for_any_input(
    rows: int, clients: int, classes: int, alpha: float, least: int, seed: int
) -> None:
    labels = torch.from_numpy(np.random.default_rng(seed).integers(classes, size=rows))
    how = dirichlet(alpha, min_size=least)
    if clients * max(1, least) > rows:
        with pytest.raises(HansaError, match=f"at most {rows // max(1, least)}:"):
            how.split(labels, clients, Key(seed))
        return
    split = how.split(labels, clients, Key(seed))
    assert sorted(split.index.tolist()) == list(range(rows))
    assert int(split.sizes.min()) >= least


@pytest.mark.parametrize("alpha", [1e-6, 0.05, 0.3, 1.0, 4.0])
def test_dirichlet_shares_have_the_second_moment_of_a_dirichlet(alpha: float) -> None:
    # E sum_i p_i^2 = (alpha + 1) / (N alpha + 1) for the symmetric Dirichlet over N
    clients, classes, each = 8, 600, 500
    labels = balanced(classes, each)
    split = dirichlet(alpha, min_size=0).split(labels, clients, Key(5))
    counts = torch.bincount(labels[split.index] * clients + split.owners(), minlength=classes * clients)
    shares = counts.view(classes, clients).double() / each
    found = shares.square().sum(1)
    expected = (alpha + 1) / (clients * alpha + 1)
    assert abs(float(found.mean()) - expected) < 4 * float(found.std()) / classes**0.5 + 1e-3


def test_topping_up_moves_only_the_rows_that_were_lacking_and_only_from_the_largest() -> None:
    labels = balanced(10, 60)
    free = dirichlet(0.05, min_size=0).split(labels, 30, Key(2))
    least = dirichlet(0.05, min_size=12).split(labels, 30, Key(2))
    owner = {}
    for name, split in (("free", free), ("least", least)):
        owner[name] = torch.empty(600, dtype=torch.int64)
        owner[name][split.index] = split.owners()
    lacking = (12 - free.sizes).clamp(min=0)
    assert int(lacking.sum()) > 50  # or the test would say nothing
    assert int((owner["free"] != owner["least"]).sum()) == int(lacking.sum())
    assert torch.equal(least.sizes[lacking > 0], torch.full_like(least.sizes[lacking > 0], 12))
    cut = least.sizes < free.sizes
    assert int(least.sizes[cut].max() - least.sizes[cut].min()) <= 1
    assert int(free.sizes[~cut].max()) <= int(least.sizes[cut].max())


def test_a_topped_up_client_gets_few_labels() -> None:
    labels = balanced(10, 200)
    free = dirichlet(0.02, min_size=0).split(labels, 60, Key(0))
    split = dirichlet(0.02, min_size=20).split(labels, 60, Key(0))
    empty = torch.nonzero(free.sizes == 0).flatten().tolist()
    assert len(empty) > 10  # all they hold was given to them
    kinds = [len(set(labels[split.rows(client)].tolist())) for client in empty]
    assert sum(kinds) / len(kinds) < 1.5


def test_rounding_does_not_favour_the_same_clients_for_every_label() -> None:
    # a tenth of a row is each client's share of each label: 5 rows a client in all, not 50 for one in ten
    labels = balanced(50, 10)
    split = dirichlet(1e6, min_size=0).split(labels, 100, Key(0))
    assert int(split.sizes.max()) < 16


@pytest.mark.parametrize(
    ("how", "clients", "classes", "each"),
    [
        (shards(200, 2), 100, 10, 5000),
        (shards(200, 6), 32, 10, 5000),
        (shards(200, 6), 32, 10, 6000),
        (shards(2000, 60), 32, 100, 500),
    ],
    ids=["AWARE CIFAR-10", "HAFED CIFAR-10", "HAFED Fashion-MNIST", "HAFED CIFAR-100"],
)
def test_the_papers_shards(how: shards, clients: int, classes: int, each: int) -> None:
    labels = balanced(classes, each)
    split = how.split(labels, clients, Key(0))
    size = classes * each // how.shards
    assert set(split.sizes.tolist()) == {how.per_client * size}
    assert len(set(split.index.tolist())) == clients * how.per_client * size
    for client in range(clients):
        counts = torch.bincount(labels[split.rows(client)])
        assert int((counts > 0).sum()) <= how.per_client
        assert not (counts % size).any()  # whole shards of one label each


def test_shards_are_runs_of_the_rows_sorted_by_label() -> None:
    labels = torch.tensor([1, 0, 1, 0, 2, 2, 0])
    # sorted by label: rows 1 3 6 | 0 2 | 4 5; three shards are 1 3 6, 0 2, 4 5
    split = shards(3, 1).split(labels, 3, Key(0))
    assert sorted(split.rows(client).tolist() for client in range(3)) == [[0, 2], [1, 3, 6], [4, 5]]


def test_quantity_skew_leaves_the_labels_even() -> None:
    labels = balanced(4, 5000)
    split = quantity_skew(alpha=0.5).split(labels, 5, Key(1))
    largest = int(split.sizes.argmax())
    shares = torch.bincount(labels[split.rows(largest)], minlength=4).double() / int(split.sizes[largest])
    assert float((shares - 0.25).abs().max()) < 0.03
    assert int(split.sizes.max()) > 3 * int(split.sizes.min())


@pytest.mark.parametrize(("number", "clients", "classes"), [(2, 10, 10), (2, 100, 10), (3, 7, 5), (5, 5, 5), (1, 6, 4)])
def test_labels_per_client_is_its_definition(number: int, clients: int, classes: int) -> None:
    assert labels_per_client(1).split(balanced(5, 10), 2, Key(0)).sizes.tolist() == [10, 10]  # three are nobody's
    labels = balanced(classes, 211)[torch.randperm(211 * classes, generator=torch.Generator().manual_seed(0))]
    split = labels_per_client(number).split(labels, clients, Key(5))
    counts = torch.stack([torch.bincount(labels[split.rows(i)], minlength=classes) for i in range(clients)])
    assert ((counts > 0).sum(dim=1) == number).all()
    for client in range(clients):
        assert counts[client, client % classes] > 0
    for label in range(classes):  # each label's rows are divided equally among its clients
        shared = counts[:, label][counts[:, label] > 0]
        assert int(shared.sum()) == 211
        assert int(shared.max() - shared.min()) <= 1


def test_natural_keeps_owners_together_and_drops_the_small() -> None:
    groups = torch.tensor([2, 0, 2, -1, 5, 2, 0])
    all_three = natural().split(torch.zeros(7), None, Key(0), groups)
    assert [all_three.rows(i).tolist() for i in range(3)] == [[1, 6], [0, 2, 5], [4]]
    two = natural(min_size=2).split(torch.zeros(7), None, Key(0), groups)
    assert [two.rows(i).tolist() for i in range(2)] == [[1, 6], [0, 2, 5]]


def test_natural_with_fewer_clients_chooses_among_all_owners() -> None:
    groups = torch.arange(20).repeat(3)
    chosen = set()
    for seed in range(30):
        split = natural().split(torch.zeros(60), 4, Key(seed), groups)
        owners = {int(groups[row]) for row in split.index}
        assert split.sizes.tolist() == [3, 3, 3, 3]
        assert len(owners) == 4
        chosen |= owners
    assert chosen == set(range(20))


@pytest.mark.parametrize(
    ("how", "feasible"),
    [
        (iid(), 100),
        (shards(50, 2), 25),
        (dirichlet(0.3, min_size=7), 14),
        (dirichlet(0.3, min_size=0), 100),
        (quantity_skew(alpha=1.0, min_size=3), 33),
        (natural(), 5),
    ],
    ids=repr,
)
def test_more_clients_than_can_be_served_are_refused_with_the_largest_feasible_number(
    how: Partition, feasible: int
) -> None:
    labels, groups = balanced(10, 10), torch.arange(5).repeat(20)
    with pytest.raises(HansaError, match=f"at most {feasible}: there are"):
        how.split(labels, feasible + 1, Key(0), groups)
    assert how.split(labels, feasible, Key(0), groups).population == feasible


test_wrong_numbers_are_refused = refused(
    (lambda: shards(4, 1).split(torch.randn(40), 4, Key(0)), "expected a label per row, found torch.float"),
    (lambda: dirichlet(0.5).split(torch.randn(40), 4, Key(0)), "expected a label per row"),
    (lambda: natural().split(torch.zeros(4), None, Key(0)), r"no natural owners\. Use iid, shards"),
    (lambda: labels_per_client(4).split(balanced(3, 10), 2, Key(0)), "at most the labels, 3"),
    (lambda: labels_per_client(1).split(torch.tensor([0] * 9 + [1]), 4, Key(0)), "no rows of its labels"),
    (lambda: dirichlet(0.0), "expected"),
    (lambda: dirichlet(1.0, min_size=-1), "expected"),
    (lambda: shards(0, 2), "expected"),
    (lambda: quantity_skew(), "expected"),
    (lambda: natural(min_size=3).split(torch.zeros(4), None, Key(0), torch.tensor([0, 0, 1, 1])), "expected"),
    (lambda: iid().split(torch.zeros(4), None, Key(0)), "expected"),
    (lambda: iid().split(torch.zeros(4), 0, Key(0)), "expected"),
    (lambda: shards(5, 1).split(torch.zeros(4, dtype=torch.int64), 2, Key(0)), "expected"),
)


def test_rows_that_are_nobodys_are_never_dealt_by_any_partition() -> None:
    groups = torch.tensor([0, -1, 1, -1, 0, 1] * 20)
    data = Dataset("toy", torch.randn(120, 2), balanced(2, 60), classes=2, groups=groups)
    for how, clients in ((iid(), 7), (dirichlet(0.5, min_size=3), 7), (shards(14, 2), 7), (natural(), None)):
        found = partition_dataset(data, how, clients, seed=4)
        assert (groups[found.index] >= 0).all()
        assert len(found.index) == 80


@pytest.mark.parametrize(
    ("index", "offsets", "message"),
    [
        (torch.arange(3), [0, 2], "increasing values to 3"),
        (torch.arange(3), [0, 4, 3], "increasing values to 3"),
        (torch.zeros(3), [0, 3], "int64"),
    ],
)
def test_splits_that_do_not_add_up_are_refused(index: torch.Tensor, offsets: list[int], message: str) -> None:
    with pytest.raises(HansaError, match=message):
        Split(index, torch.tensor(offsets))
