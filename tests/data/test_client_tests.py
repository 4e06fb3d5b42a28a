"""Whose the test rows are: given by number or name, dealt by label, held out, or natural."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hansa import HansaError, data

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.array([0, 1, 2] * 4)
SITES = ["b", "b", "a", "a", "a", "c", "c", "c", "c", "c", "b", "a"]
TEST = (X[:5] + 100, Y[:5])


@pytest.mark.parametrize(
    ("clients", "test_clients", "expected"),
    [
        (SITES, ["c", "a", "a", "b", "c"], [2, 0, 0, 1, 2]),  # names are those of the training owners
        ([0] * 6 + [1] * 6, np.array([1, 0, -1, 1, 1]), [1, 0, -1, 1, 1]),  # -1 is nobody
    ],
)
def test_owners_of_test_rows_by_name_and_by_number(clients: Any, test_clients: Any, expected: list[int]) -> None:
    assert (
        data.from_arrays(X, Y, clients=clients, test=TEST, test_clients=test_clients).test_owners.tolist() == expected
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"test_clients": ["c", "a", "a", "b", "z"]}, "test_clients has 'z', who has no training rows"),
        ({"test_clients": ["c", "a"]}, "expected the owner of each of 5 test rows"),
        ({"test_clients": [0, 1, 2, 0, 9]}, r"test rows belong to 0 to 9: expected clients 0 to 2"),
        ({"test_clients": ["a"] * 5, "clients": [0] * 6 + [1] * 6}, r"client names \('a'\), training rows"),
        ({"test_clients": "label"}, "test_clients='label'.*labels"),
        ({"test_clients": 1.5}, "test_clients=1.5"),
        ({"test_clients": ["a"] * 5, "test": None}, "test_clients needs test rows: give test"),
        ({"test_clients": "labels", "test": None}, "no test rows to assign. A fraction"),
        ({"test_clients": {"a": 1}}, r"test_clients=\{'a': 1\}"),
    ],
)
def test_what_does_not_fit_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(HansaError, match=message):
        data.from_arrays(X, Y, **{"clients": SITES, "test": TEST, **words})


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
    before = data.from_arrays(X, Y, clients=SITES)
    held = data.with_test_clients(before, 0.3, seed=1)
    assert held.test_inputs is not None
    assert held.test_owners is not None
    assert held.test_owners.tolist() == [0, 1, 2, 2]  # of 4, 3 and 5 rows: 1.2, 0.9 and 1.5
    for client in range(3):
        away = held.test_inputs[held.test_owners == client]
        both = torch.cat([held.inputs[held.rows(client)], away])
        assert sorted(both[:, 0].tolist()) == sorted(before.inputs[before.rows(client)][:, 0].tolist())
    with pytest.raises(HansaError, match="client 1 has 1 row: too few"):
        data.with_test_clients(data.from_arrays(X[:3], Y[:3], clients=[0, 0, 1]), 0.5)


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

    train = Columns(x=X, y=Y, who=SITES)
    test = Columns(x=TEST[0], y=TEST[1], who=["c", "nobody", "a", "b", "c"])
    held = data.from_hf({"train": train, "test": test}, "x", "y", client_column="who")
    assert held.test_owners.tolist() == [2, -1, 0, 1, 2]
