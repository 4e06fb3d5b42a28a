"""Partitions deal every row at most once, in sizes as promised; splits come back from files; federated data agree."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data import (
    DataError,
    Dataset,
    FederatedData,
    MissingFileError,
    Split,
    apply_split,
    dirichlet,
    from_arrays,
    iid,
    label_counts,
    labels_per_client,
    load_split,
    natural,
    partition_dataset,
    quantity_skew,
    save_split,
    saved_split,
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


test_splits_that_do_not_add_up_are_refused = refused(
    (lambda: Split(torch.arange(3), torch.tensor([0, 2])), "increasing values to 3"),
    (lambda: Split(torch.arange(3), torch.tensor([0, 4, 3])), "increasing values to 3"),
    (lambda: Split(torch.zeros(3), torch.tensor([0, 3])), "int64"),
)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(5).repeat(40)


def test_a_saved_partition_comes_back_and_is_the_same_bytes(tmp_path: Path, labels: torch.Tensor) -> None:
    """safetensors orders metadata by chance: a run side by side would have another file than one alone."""
    split = dirichlet(0.2).split(labels, 8, Key(1))
    files = [tmp_path / str(number) for number in range(5)]
    for path in files:
        save_split(path, split, labels, 'Grüße \x01 "quoted"', [[1, 2], [3, 4]])
    assert len({path.read_bytes() for path in files}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    with safe_open(files[0], framework="pt") as file:
        assert json.loads(file.metadata()["hansa"])["made_by"] == 'Grüße \x01 "quoted"'
    back = load_split(files[0], labels)
    assert torch.equal(back.index, split.index)
    assert torch.equal(back.offsets, split.offsets)
    with pytest.raises(MissingFileError, match="nowhere: no such file"):
        load_split(tmp_path / "nowhere", labels)


def test_a_partition_of_other_labels_is_refused(tmp_path: Path, labels: torch.Tensor) -> None:
    save_split(tmp_path / "split", dirichlet(0.2).split(labels, 8, Key(1)), labels)
    other = labels.clone()
    other[3] = 0
    with pytest.raises(DataError, match=r"split: expected a partition of these 200 targets .* found one of 200 others"):
        load_split(tmp_path / "split", other)


def test_no_damage_gives_another_split(tmp_path: Path, labels: torch.Tensor) -> None:
    path, split = tmp_path / "split", dirichlet(0.2).split(labels, 8, Key(1))
    save_split(path, split, labels, "made by a test")
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        back = split  # a change may leave the meaning alone, but it may never give another split
        with contextlib.suppress(DataError):
            back = load_split(path, labels)
        assert torch.equal(back.index, split.index)
        assert torch.equal(back.offsets, split.offsets)
    for keep in (0, 5, 100, -1):
        path.write_bytes(good[:keep])
        with pytest.raises(DataError, match="split: expected a 'hansa partition 2' file"):
            load_split(path, labels)


def test_the_saved_part_repeats_a_run_whatever_its_seed(tmp_path: Path, labels: torch.Tensor) -> None:
    groups = torch.where(torch.arange(200) % 4 == 0, -1, 0)  # with rows that are nobody's
    data = Dataset("toy", torch.randn(200, 2), labels, classes=5, groups=groups)
    first = partition_dataset(data, dirichlet(0.2), 6, seed=3)
    save_split(tmp_path / "split", first.split, data.targets)
    again = partition_dataset(data, saved_split(str(tmp_path / "split")), 6, seed=99)
    assert torch.equal(first.index, again.index)
    with pytest.raises(DataError, match="among 7 clients, found one among 6"):
        partition_dataset(data, saved_split(str(tmp_path / "split")), 7)


def tiny() -> FederatedData:
    return FederatedData(
        torch.arange(12.0).view(6, 2),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.tensor([0, 2, 4, 1, 5]),
        torch.tensor([0, 3, 3, 5]),
        classes=3,
        name="tiny",
    )


def test_rows_of_each_client() -> None:
    data = tiny()
    assert [data.rows(client).tolist() for client in range(3)] == [[0, 2, 4], [], [1, 5]]
    with pytest.raises(HansaError, match="tiny: client 3: there are 3, numbered from 0"):
        data.rows(3)


def test_a_notebook_gets_a_picture_of_the_labels_of_each_client() -> None:
    data = from_arrays(torch.zeros(6, 2), torch.tensor([0, 0, 1, 2, 2, 2]), clients=["<i>a"] * 2 + ["b"] * 4)
    shown = data._repr_html_()
    assert "client &lt;i&gt;a" in shown
    assert [int(count) for count in re.findall(r'class="data row\d+ col\d+" >(\d+)<', shown)] == [2, 0, 0, 0, 1, 3]
    assert "100.0%" in shown  # a bar, of the three
    assert "<table" not in from_arrays(torch.zeros(6, 2), torch.zeros(6, 1), clients=2)._repr_html_()


def test_summary_by_hand() -> None:
    # client 0 holds labels 0 0 1 1 (1 bit), client 1 holds 1 1 1 1 (0 bits)
    split = Split.of_rows([[0, 1, 2, 3], [4, 5, 6, 7]])
    data = FederatedData(
        torch.zeros(8, 1), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]), split.index, split.offsets, classes=2
    )
    found = data.summary()
    assert (found.clients, found.samples, found.smallest, found.median, found.largest) == (2, 8, 4, 4.0, 4)
    assert found.label_entropy == pytest.approx(0.5)
    # label 0 has one holder; label 1 is shared 1/3 to 2/3: 2^(log2 3 - 2/3) = 3 / 2^(2/3)
    assert found.effective_clients == pytest.approx((1.0, 3 / 2 ** (2 / 3)))
    assert "2 clients, 8 samples: 4 / 4 / 4 per client" in str(found)


def test_regression_data_have_a_summary_without_labels() -> None:
    split = Split.of_rows([[0], [1, 2]])
    data = FederatedData(torch.zeros(3, 1), torch.randn(3), split.index, split.offsets)
    assert data.summary().label_entropy is None
    with pytest.raises(HansaError, match="no classes"):
        data.label_counts()
    with pytest.raises(HansaError, match="a class number per row"):
        label_counts(split, torch.randn(3), 2)


test_data_that_do_not_fit_together_are_refused = refused(
    ({"targets": torch.zeros(5, dtype=torch.int64)}, "expected one target per row"),
    ({"targets": torch.tensor([0, 0, 1, 1, 2, 3])}, "targets run from 0 to 3: expected 0 to 2"),
    ({"index": torch.tensor([0, 2, 4, 1, 6])}, "rows 0 to 6, the data has 6"),
    ({"index": torch.tensor([0, 2, 4, 1, -1])}, "rows -1 to 4"),
    ({"test_inputs": torch.zeros(2, 2)}, "needs both"),
    ({"test_inputs": torch.zeros(2, 3), "test_targets": torch.tensor([0, 1])}, r"training inputs \(2,\)"),
    ({"test_inputs": torch.zeros(2, 2), "test_targets": torch.tensor([0, 3])}, "test targets run from 0 to 3"),
    by=lambda change: replace(tiny(), **change),
)


def test_with_clients_keeps_the_test_set() -> None:
    source = Dataset(
        "one", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.ones(2, 3), torch.tensor([0, 0]), classes=1
    )
    data = apply_split(source, Split.of_rows([[0], [3]]))
    assert data.inputs is source.inputs  # nothing is copied
    assert data.test_inputs is source.test_inputs
    assert data.population == 2
    assert data.rows(1).untyped_storage().data_ptr() == data.index.untyped_storage().data_ptr()
