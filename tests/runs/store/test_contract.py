"""What every ClientStore promises. A new store joins by adding a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs.store import ClientStore, DiskStore

ALL_STORES: dict[str, Callable[[Path], ClientStore]] = {"ram": lambda _: ClientStore(), "disk": DiskStore}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


@pytest.fixture(params=ALL_STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClientStore]:
    made = ALL_STORES[request.param](tmp_path / "store")
    yield made
    made.close()


def row(*path: int | str, size: int = 17) -> torch.Tensor:
    return torch.from_numpy(Key(5).child(*path).numpy().normal(size=size))


def test_rows_come_back_with_their_bits_dtype_and_shape(store: ClientStore) -> None:
    rows = {str(dtype): (row(str(dtype)) * 100).to(dtype) for dtype in DTYPES}
    rows |= {"matrix": row("m", size=12).reshape(3, 4), "scalar": torch.tensor(7), "empty": torch.empty(0)}
    rows |= {"column": row("t", size=12).reshape(3, 4).T, "odd": torch.tensor([float("nan"), -0.0, float("inf")])}
    store.commit(0, {4: rows})
    back = store.read(4)
    assert back.keys() == rows.keys()
    for name, value in rows.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert back[name].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


def test_a_commit_adds_and_replaces_what_it_names_and_leaves_the_rest(store: ClientStore) -> None:
    assert (store.generation, store.read(3), store.clients()) == (0, {}, [])
    given = row(1).clone()
    store.commit(0, {1: {"a": given, "b": row(2)}, 2: {"a": row(3), "server/m": row(6)}})
    given.zero_()
    store.read(1)["a"].zero_()  # what was given or read is a copy
    store.commit(1, {1: {"b": row(4), "c": row(5)}})
    assert store.generation == 2
    assert store.clients() == [1, 2]
    assert store.clients("c") == [1]
    one, two = store.read(1), store.read(2)
    assert [torch.equal(one["a"], row(1)), torch.equal(one["b"], row(4)), torch.equal(one["c"], row(5))] == [True] * 3
    assert list(two) == ["a"]  # the rows of the server are kept apart
    assert torch.equal(two["a"], row(3))
    assert torch.equal(store.read_many([2], "server/m")[0], row(6))


def test_many_rows_are_read_multiplied_and_combined_as_numpy_does(store: ClientStore) -> None:
    clients = [3, 0, *range(5, 75)]
    rows = {client: row("many", client, size=700) for client in clients}
    store.commit(0, {client: {"server/m": value} for client, value in rows.items()})
    matrix = np.stack([rows[client].numpy() for client in clients])
    assert np.array_equal(store.read_many(clients, "server/m").numpy(), matrix)
    vectors = np.stack([row("v", i, size=700).numpy() for i in range(3)])
    assert np.allclose(
        store.dot(clients, "server/m", torch.from_numpy(vectors)).numpy(), matrix @ vectors.T, rtol=1e-12
    )
    weights = Key(6).numpy().normal(size=len(clients))
    assert np.allclose(store.combine(clients, "server/m", weights.tolist()).numpy(), weights @ matrix, atol=1e-12)


def test_half_precision_rows_are_multiplied_in_double(store: ClientStore) -> None:
    rows = {client: row("half", client, size=300).bfloat16() for client in range(4)}
    store.commit(0, {client: {"m": value} for client, value in rows.items()})
    exact = torch.stack([value.double() for value in rows.values()])
    assert store.read_many([0, 1, 2, 3], "m").dtype == torch.bfloat16
    assert torch.allclose(store.dot([0, 1, 2, 3], "m", exact), exact @ exact.T, rtol=1e-13)


def test_rounds_close_one_after_another(store: ClientStore) -> None:
    store.commit(0, {})
    assert store.generation == 1
    for wrong in (0, 2):
        with pytest.raises(HansaError, match=f"commit\\(round={wrong}\\): the store is at round 1"):
            store.commit(wrong, {1: {"a": row(1)}})
    assert store.read(1) == {}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({-1: {"a": torch.ones(1)}}, "client=-1"),
        ({True: {"a": torch.ones(1)}}, "client=True"),
        ({1: {"": torch.ones(1)}}, "client 1, row ''"),
        ({1: {"a": [1.0]}}, "client 1, row 'a': expected a tensor"),
        (
            {0: {"a": torch.ones(1)}, 1: {"a": torch.ones(1, dtype=torch.complex64)}},
            "client 1, row 'a': expected a tensor",
        ),
    ],
)
def test_a_commit_with_a_bad_row_is_refused_whole(store: ClientStore, rows: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(HansaError, match=words):
        store.commit(0, rows)
    assert store.generation == 0
    assert store.clients() == []


def test_asking_for_a_row_that_is_not_there_names_the_client(store: ClientStore) -> None:
    store.commit(0, {1: {"momentum": row(1)}})
    with pytest.raises(HansaError, match=r"client 1 has no row 'momentun'\. Did you mean momentum"):
        store.read_many([1], "momentun")
    with pytest.raises(HansaError, match="client 9 has no row 'momentum'"):
        store.dot([1, 9], "momentum", row(1)[None])
    with pytest.raises(HansaError, match="no clients"):
        store.read_many([], "momentum")


def test_rows_of_unequal_length_make_no_matrix(store: ClientStore) -> None:
    store.commit(0, {1: {"a": row(1)}, 2: {"a": row(2, size=5)}})
    with pytest.raises(HansaError, match="differ in dtype or length"):
        store.read_many([1, 2], "a")
    with pytest.raises(HansaError, match="differ in dtype or length"):
        store.combine([1, 2], "a", [1.0, 1.0])
    with pytest.raises(HansaError, match="vectors of 17"):
        store.dot([1], "a", torch.ones(1, 4))


@pytest.mark.parametrize("size", [99, 40_003])
def test_ram_and_disk_agree_to_the_last_bit(tmp_path: Path, size: int) -> None:
    with DiskStore(tmp_path / "store") as disk:
        ram = ClientStore()
        for round in range(6):
            rows = {
                c: {"a": row("a", round, c), "server/m": row("m", round, c, size=size).float()}
                for c in range(round, 40)
            }
            for store in (ram, disk):
                store.commit(round, rows)
        clients = ram.clients()
        vectors = torch.stack([row("v", i, size=size).float() for i in range(4)])
        assert ram.digest() == disk.digest()
        assert torch.equal(ram.dot(clients, "server/m", vectors), disk.dot(clients, "server/m", vectors))
        weights = Key(6).numpy().normal(size=len(clients)).tolist()
        assert torch.equal(ram.combine(clients, "server/m", weights), disk.combine(clients, "server/m", weights))


def test_the_digest_changes_with_any_bit_name_client_dtype_or_shape() -> None:
    def digest(client: int, name: str, value: torch.Tensor) -> str:
        store = ClientStore()
        store.commit(0, {client: {name: value}})
        return store.digest()

    value = torch.tensor([1.0, 2.0])
    nearly = torch.tensor([1.0, np.nextafter(np.float32(2), np.float32(3))])
    others = [(2, "a", value), (1, "b", value), (1, "a", nearly), (1, "a", value.reshape(1, 2))]
    others += [(1, "a", value.view(torch.int32)), (1, "a", torch.tensor([2.0, 1.0]))]
    assert len({digest(1, "a", value), *(digest(*other) for other in others)}) == 7
    assert digest(1, "a", value) == digest(1, "a", value.clone())
