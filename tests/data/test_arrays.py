"""Whatever a user brings: arrays, torch datasets, columns, owners of test rows; what does not fit is named."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from hansa import HansaError, data
from hansa.config import from_yaml
from hansa.config.build import load_data
from hansa.data import (
    FederatedData,
    Split,
    dirichlet,
    from_arrays,
    from_dataset,
    from_hf,
    iid,
    quantity_skew,
    with_feature_noise,
    with_test_clients,
)
from mistakes import refused

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.arange(12) % 4


def frame(extra: list[Any]) -> pandas.DataFrame:
    return pandas.DataFrame({"age": np.arange(12.0), "extra": extra * 6})


def test_arrays_with_rows_for_each_client() -> None:
    data = from_arrays(X, Y, clients=[[0, 5], np.array([2]), torch.tensor([7, 1, 3])])
    assert [data.rows(i).tolist() for i in range(3)] == [[0, 5], [2], [7, 1, 3]]
    assert data.inputs.dtype == torch.float32
    assert data.targets.dtype == torch.int64
    assert data.classes == 4
    np.testing.assert_allclose(data.inputs.numpy(), X, rtol=1e-6)


NAMES = ["north", "south", "east"]
OWNERS = [1, 0, 1, 1, 0, 2, 2, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "given",
    [
        OWNERS,
        tuple(OWNERS),
        np.array(OWNERS, np.uint8),
        np.array(OWNERS, object),
        [np.int64(owner) for owner in OWNERS],
        torch.tensor(OWNERS),
        pandas.Series(OWNERS),
        pandas.Series(OWNERS, dtype="Int64"),
        pandas.Series(OWNERS, index=range(50, 62)).astype("category"),
    ],
)
def test_owners_are_understood_in_any_column(given: Any) -> None:
    data = from_arrays(X, Y, clients=given)
    assert [data.rows(i).tolist() for i in range(data.population)] == [[1, 4, 7], [0, 2, 3, 8, 9, 10], [5, 6, 11]]


@pytest.mark.parametrize("kind", [list, tuple, np.array, pandas.Series, lambda names: np.array(names, object)])
def test_owners_may_have_names_which_are_numbered_in_their_order(kind: Any) -> None:
    data = from_arrays(X, Y, clients=kind([NAMES[owner] for owner in OWNERS]))
    assert [data.rows(i).tolist() for i in range(3)] == [[5, 6, 11], [1, 4, 7], [0, 2, 3, 8, 9, 10]]


def test_arrays_dealt_to_a_number_of_clients() -> None:
    assert from_arrays(X, Y, clients=[0, -1, 1] * 4).sizes.tolist() == [4, 4]  # -1 is nobody
    assert from_arrays(X, Y, clients=[[0, 1], [1, 2]]).index.tolist() == [0, 1, 1, 2]  # they may overlap
    assert from_arrays(X, Y, clients=5).sizes.tolist() == [3, 3, 2, 2, 2]
    assert from_arrays(X, Y, clients=3, partition=dirichlet(0.1, min_size=2)).sizes.min() >= 2
    split = Split.of_rows([[3], [4]])
    assert from_arrays(X, Y, clients=split).index.tolist() == [3, 4]


def test_kinds_of_numbers() -> None:
    shades = np.array([[0, 51, 255]] * 12, np.uint8)
    assert from_arrays(shades, Y, clients=2).inputs[0].tolist() == pytest.approx([0.0, 0.2, 1.0])
    tokens = np.arange(36).reshape(12, 3)
    assert from_arrays(tokens, Y, clients=2).inputs.dtype == torch.int64
    assert from_arrays(X, Y, clients=2, dtype=torch.float64).inputs.dtype == torch.float64
    regression = from_arrays(X, X[:, 0], clients=2)
    assert (regression.classes, regression.targets.dtype) == (None, torch.float32)
    several = from_arrays(X, np.array([[0, 1], [1, 1], [0, 0]] * 4), clients=2)
    assert (several.classes, tuple(several.targets.shape)) == (None, (12, 2))
    ignored = from_arrays(X, np.array([[0, -100, 3]] * 12), clients=2)
    assert ignored.targets[0].tolist() == [0, -100, 3]
    assert from_arrays(X, Y, clients=2, test=(X[:2], np.array([1, 6]))).classes == 7  # those of the test set, too


test_arrays_that_do_not_fit_are_refused = refused(
    (lambda: from_arrays(X, Y[:-1], clients=2), "expected one target per row"),
    (lambda: from_arrays(np.where(X[5, 1] == X, np.nan, X), Y, clients=2), "x, row 5, has a NaN or infinite"),
    (lambda: from_arrays(X, np.where(Y == 3, -1, Y), clients=2), "the label -1: expected labels from 0"),
    (lambda: from_arrays(X, Y, clients=2, classes=3), "targets run from 0 to 3: expected 0 to 2"),
    (lambda: from_arrays(X.astype(str), Y, clients=2), "expected numbers of NumPy's types, all rows of one shape"),
    (lambda: from_arrays(X, Y, clients=[[0], [12]]), "rows 0 to 12, the data has 12"),
    (lambda: from_arrays(X, Y, clients=np.zeros(5, int)), r"owners are int64 of shape \(5,\)"),
    (lambda: from_arrays(X, Y, clients=np.zeros(12)), "owners are float64"),
    (lambda: from_arrays(X, Y, clients=13), r"iid\(clients=13\): expected at most 12"),
    (lambda: from_arrays(X, Y, clients=[[0]], partition=dirichlet(1.0)), "clients already assign the rows"),
    (lambda: from_arrays(X, Y, clients=[]), "at least one client"),
    (lambda: from_arrays(X, Y, clients=[0.5] * 12), "owners are object"),
    (lambda: from_arrays(X, Y, clients=["a", 0] * 6), "owners are object"),
    (lambda: from_arrays(X, Y, clients=pandas.Series([0, None] * 6)), "owners are float64"),
    (lambda: from_arrays(X, Y, clients=[0, 1, [2, 3]]), r"owners of rows or lists of rows, not both"),
    (lambda: from_arrays(X, Y, clients=[0, 2] * 6), "2 have rows: expected 0, 1"),
    (lambda: from_arrays(X, Y, clients=[-1] * 12), "owners run from -1 to -1"),
    (lambda: from_arrays(X, Y, clients="ab"), "expected a number, owners of rows"),
    (lambda: from_arrays(X, Y, clients=True), "expected a number"),
    (lambda: from_arrays(X, Y, clients=[[0, 1], [2.5]]), r"client 1's rows are \[2.5\]"),
    (lambda: from_arrays(X, Y, clients=[[[0, 1]], [[2]]]), r"client 0's rows are \[\[0, 1\]\]"),
    (lambda: from_arrays(X[:0], Y[:0], clients=1), "at least one row"),
    (lambda: from_arrays([[1.0, 2.0], [3.0]], [0, 1], clients=2), "x has rows of different lengths: pad them"),
    (lambda: from_arrays(X, [[0], [1, 2]] * 6, clients=2), "y has rows of different lengths"),
    (lambda: from_arrays(frame([True, False]), Y, clients=2), "column 'extra' of x is bool: expected numbers"),
    (lambda: from_arrays(frame(["a", "b"]), Y, clients=2), "column 'extra' of x is (str|object)"),
    (lambda: from_arrays(frame([pandas.Timestamp(0)] * 2), Y, clients=2), "column 'extra' of x is datetime64"),
    (lambda: from_arrays(frame([1, 2]).astype("Int64"), Y, clients=2), "column 'age' of x is Int64"),
    (lambda: from_arrays(X, Y, clients=2, weights=[1.0] * 11), r"and weights of shape \(11,\): expected one"),
)


def test_columns_of_a_frame_are_arrays() -> None:
    table = frame([1, 2])
    data = from_arrays(table[["age", "extra"]], table["age"], clients=3)
    assert torch.equal(data.inputs[:, 0], data.targets)


class Pairs(TorchDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(i)]), i % 2) for i in range(6)])


class Picture:
    """As a PIL image looks to NumPy."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def getbands(self) -> tuple[str, ...]:
        return ("L",)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


def test_torch_datasets_of_every_kind() -> None:
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert from_dataset(tensors, clients=3).targets.tolist() == Y.tolist()
    pairs = Pairs([(torch.tensor([i, i]).float(), i % 3) for i in range(9)])
    data = from_dataset(pairs, clients=3, test=pairs)
    assert (data.classes, data.name, data.shape) == (3, "Pairs", (2,))
    assert data.test_inputs is not None
    assert torch.equal(data.test_inputs, data.inputs)
    assert from_dataset(Stream(), clients=2).inputs.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_random_transform_is_read_once_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(Pairs):
        shifted = 0

        def __getitem__(self, index: int) -> Any:
            pair = list(super().__getitem__(index))
            pair[self.shifted] = pair[self.shifted] + torch.rand(())
            return pair

    from_dataset(Pairs([(torch.zeros(2), 0)] * 3), clients=1)
    assert not caplog.messages
    for Shifted.shifted in (0, 1):
        caplog.clear()
        from_dataset(Shifted([(torch.zeros(2), 0)] * 3), clients=1)
        assert "Shifted: two reads of one row differ" in caplog.text
        assert "Task(augment=...)" in caplog.text


def test_a_data_loader_is_refused_for_its_dataset() -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))
    for arguments in ({"data": loader}, {"data": loader.dataset, "test": loader}):
        with pytest.raises(HansaError, match=r"pass loader\.dataset"):
            from_dataset(**arguments, clients=3)


def test_images_become_channels_first_and_are_scaled() -> None:
    coloured = np.zeros((4, 5, 3), np.uint8)
    coloured[1, 2] = (0, 51, 255)
    data = from_dataset(Pairs([(coloured, 0), (coloured, 1)]), clients=1)
    assert data.inputs.shape == (2, 3, 4, 5)
    assert data.inputs[0, :, 1, 2].tolist() == pytest.approx([0.0, 0.2, 1.0])
    grey = from_dataset(Pairs([(Picture(np.full((4, 5), 255, np.uint8)), 0)]), clients=1)
    assert grey.inputs.shape == (1, 1, 4, 5)
    assert float(grey.inputs.max()) == 1.0


test_torch_datasets_that_do_not_fit_are_refused = refused(
    ([(torch.zeros(2), 0), torch.zeros(2)], "item 1 is a Tensor: expected a pair"),
    ([], "is empty"),
    ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"input 1 has shape \(3,\), the first \(2,\)"),
    ([("words", 0)], "input 0 is 'words': expected numbers or an image"),
    ([(torch.zeros(2), "words")], "targets are no numbers of one shape"),
    ([(torch.zeros(2), None)], "targets are no numbers of one shape"),
    ([(torch.zeros(2), [0]), (torch.zeros(2), [0, 1])], "targets are no numbers of one shape"),
    (3, "int: expected a dataset of pairs"),
    by=lambda items: from_dataset(Pairs(items) if isinstance(items, list) else items, clients=1),
)


class Columns:
    """As much of a Hugging Face dataset as is asked for: named columns."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {"label": SimpleNamespace(num_classes=5)}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def rows(count: int = 6) -> Columns:
    return Columns(
        ids=[[i, i + 1] for i in range(count)],
        label=[i % 3 for i in range(count)],
        user=["bo", "al", "bo", "cy", "al", "bo"][:count],
        text=["a"] * count,
    )


def test_a_hugging_face_dataset_by_its_columns_clients_and_splits() -> None:
    data = from_hf({"train": rows(), "test": rows(2)}, "ids", "label", clients=2)
    assert data.inputs.tolist() == [[i, i + 1] for i in range(6)]
    assert (data.inputs.dtype, data.classes, data.population) == (torch.int64, 5, 2)  # classes as its features say
    assert data.test_inputs.tolist() == [[0, 1], [1, 2]]
    data = from_hf(rows(), "ids", "label", client_column="user", test=rows(3))
    assert [data.rows(i).tolist() for i in range(3)] == [[1, 4], [0, 2, 5], [3]]  # al, bo, cy
    assert data.test_targets.tolist() == [0, 1, 2]
    assert from_hf(rows(), "ids", "label", client_column="user", clients=2).population == 2


test_columns_that_do_not_fit_are_refused = refused(
    (lambda: from_hf(rows(), "idz", "label", clients=2), r"no column 'idz'\. Did you mean ids"),
    (lambda: from_hf(rows(), "ids", "text", clients=2), "'text' has 'a': expected numbers"),
    (lambda: from_hf(rows(), "text", "label", clients=2), "expected numbers or an image. Tokenize"),
    (lambda: from_hf(rows(), "ids", "label"), "expected clients=, or client_column="),
    (lambda: from_hf(Columns(ids=[[1, 2], [3]], label=[0, 1]), "ids", "label", clients=1), "resize or pad"),
)


GRID = np.arange(24, dtype=np.float32).reshape(12, 2)
KINDS = np.array([0, 1, 2] * 4)
SITES = ["b", "b", "a", "a", "a", "c", "c", "c", "c", "c", "b", "a"]
TEST = (GRID[:5] + 100, KINDS[:5])


@pytest.mark.parametrize(
    ("clients", "test_clients", "expected"),
    [
        (SITES, ["c", "a", "a", "b", "c"], [2, 0, 0, 1, 2]),  # names are those of the training owners
        ([0] * 6 + [1] * 6, np.array([1, 0, -1, 1, 1]), [1, 0, -1, 1, 1]),  # -1 is nobody
    ],
)
def test_owners_of_test_rows_by_name_and_by_number(clients: Any, test_clients: Any, expected: list[int]) -> None:
    held = data.from_arrays(GRID, KINDS, clients=clients, test=TEST, test_clients=test_clients)
    assert held.test_owners.tolist() == expected


test_what_does_not_fit_is_named = refused(
    ({"test_clients": ["c", "a", "a", "b", "z"]}, "test_clients has 'z', who has no training rows"),
    ({"test_clients": ["c", "a"]}, "expected the owner of each of 5 test rows"),
    ({"test_clients": [0, 1, 2, 0, 9]}, r"test rows belong to 0 to 9: expected clients 0 to 2"),
    ({"test_clients": ["a"] * 5, "clients": [0] * 6 + [1] * 6}, r"client names \('a'\), training rows"),
    ({"test_clients": "label"}, "test_clients='label'.*labels"),
    ({"test_clients": 1.5}, "test_clients=1.5"),
    ({"test_clients": ["a"] * 5, "test": None}, "test_clients needs test rows: give test"),
    ({"test_clients": "labels", "test": None}, "no test rows to assign. A fraction"),
    ({"test_clients": {"a": 1}}, r"test_clients=\{'a': 1\}"),
    by=lambda words: data.from_arrays(GRID, KINDS, **{"clients": SITES, "test": TEST, **words}),
)


def test_test_rows_are_dealt_as_the_training_labels_are() -> None:
    held = data.with_test_clients(data.federate("fashion-mini", data.dirichlet(0.2), 10, seed=3), "labels", seed=5)
    assert held.test_targets is not None
    assert held.test_owners is not None
    share = held.label_counts().double()
    expected = share / share.sum(0) * torch.bincount(held.test_targets)
    found = torch.zeros(10, 10).index_put_((held.test_owners, held.test_targets), torch.ones(2000), accumulate=True)
    assert (found - expected).abs().max() < 1  # each count is its share, rounded up or down
    again = data.with_test_clients(held, "labels", seed=5)
    other = data.with_test_clients(held, "labels", seed=6)
    assert torch.equal(again.test_owners, held.test_owners)
    assert not torch.equal(other.test_owners, held.test_owners)


def test_held_out_rows_are_each_clients_own_and_no_longer_trained_on() -> None:
    before = data.from_arrays(GRID, KINDS, clients=SITES)
    held = data.with_test_clients(before, 0.3, seed=1)
    assert held.test_inputs is not None
    assert held.test_owners is not None
    assert held.test_owners.tolist() == [0, 1, 2, 2]  # of 4, 3 and 5 rows: 1.2, 0.9 and 1.5
    for client in range(3):
        away = held.test_inputs[held.test_owners == client]
        both = torch.cat([held.inputs[held.rows(client)], away])
        assert sorted(both[:, 0].tolist()) == sorted(before.inputs[before.rows(client)][:, 0].tolist())
    with pytest.raises(HansaError, match="client 1 has 1 row: too few"):
        data.with_test_clients(data.from_arrays(GRID[:3], KINDS[:3], clients=[0, 0, 1]), 0.5)


def test_natural_owners_of_test_rows_follow_those_of_the_training_rows() -> None:
    groups, tests = torch.tensor([3, 3, 1, 0, 0, 0, 1, -1]), torch.tensor([1, 3, 0, 7, -1])
    whole = data.Dataset("leafy", torch.zeros(8, 2), torch.zeros(8).long(), torch.zeros(5, 2), torch.zeros(5).long(),
                         groups=groups, test_groups=tests)  # fmt: skip
    assert data.partition_dataset(whole, data.natural()).test_owners.tolist() == [1, 2, 0, -1, -1]
    assert data.partition_dataset(whole, data.natural(min_size=3)).test_owners.tolist() == [-1, -1, 0, -1, -1]
    assert data.partition_dataset(whole, data.iid(), 2).test_owners is None  # dealt otherwise: nobody's own


def test_a_test_column_of_a_hugging_face_set_names_owners() -> None:
    class Columns(dict[str, Any]):
        column_names = ("x", "y", "who")

    train = Columns(x=GRID, y=KINDS, who=SITES)
    test = Columns(x=TEST[0], y=TEST[1], who=["c", "nobody", "a", "b", "c"])
    held = data.from_hf({"train": train, "test": test}, "x", "y", client_column="who")
    assert held.test_owners.tolist() == [2, -1, 0, 1, 2]


def flat(rows: int = 5000, clients: int = 5) -> FederatedData:
    x, y = torch.zeros(rows, 4), torch.arange(rows) % 3
    return from_arrays(x, y, clients=clients, partition=quantity_skew(power=0.5), test=(x, y), seed=0)


def test_deviations_grow_linearly_from_zero_to_the_level() -> None:
    noisy = with_feature_noise(flat(), 0.2, seed=3)
    owned = with_feature_noise(with_test_clients(flat(), "labels", seed=0), 0.2, seed=0)
    for client in range(5):
        rows = noisy.inputs[noisy.rows(client)]
        assert abs(float(rows.mean())) < 0.01
        # test rows have the noise of their client, or row r that of client r mod 5
        for part in (rows, noisy.test_inputs[client::5], owned.test_inputs[owned.test_owners == client]):
            assert float(part.std()) == pytest.approx(0.2 * client / 4, rel=0.1)


def test_the_noise_is_a_function_of_the_seed_and_leaves_the_data_alone() -> None:
    data = flat()
    first, again, other = (with_feature_noise(data, 0.1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.test_inputs, again.test_inputs)
    assert not torch.equal(first.inputs, other.inputs)
    following = with_feature_noise(from_arrays(data.inputs, data.targets, clients=3, partition=iid()), 0.1)
    assert not torch.equal(following.for_seed(1).inputs, following.inputs)
    assert not torch.equal(following.for_seed(1).index, following.index)  # and so does the partition
    assert not data.inputs.any()
    assert torch.equal(first.targets, data.targets)
    assert torch.equal(first.index, data.index)


def test_in_a_file_it_is_a_key_of_the_data() -> None:
    text = "{algorithm: fedavg, data: {clients: 4, partition: iid%s}}"
    plain, noisy = (load_data(from_yaml(text % extra)) for extra in ("", ", noise: 0.5"))
    change = noisy.inputs - plain.inputs
    deviations = [float(change[noisy.rows(client)].std()) for client in range(4)]
    assert deviations == pytest.approx([0.0, 0.5 / 3, 1.0 / 3, 0.5], rel=0.02)


NINE = torch.zeros(9, 2).long()
test_refusals_name_the_reason = refused(
    (lambda: with_feature_noise(flat(), 0.0), "level"),
    (lambda: with_feature_noise(flat(), float("nan")), "level"),
    (lambda: with_feature_noise(from_arrays(NINE, NINE[:, 0], clients=3), 0.1), "int64"),
    (lambda: with_feature_noise(from_arrays({"a": NINE.float()}, NINE[:, 0], clients=3), 0.1), "one tensor"),
)
