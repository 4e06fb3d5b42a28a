from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs.store import DamagedFileError, DiskStore, RamStore, io
from torture.disks import Counting, Failing, Hasty, Stingy


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    with io.use_disk(Hasty()):
        yield


def row(*path: int | str, size: int = 200) -> torch.Tensor:
    return torch.from_numpy(Key(8).child(*path).numpy().normal(size=size))


def rows_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "rows").iterdir())


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {1: {"a": row(1)}, 2: {"a": row(2), "b": torch.tensor([3])}})
        digest = store.digest()
    with DiskStore.open(tmp_path) as store:
        assert (store.generation, store.digest(), store.verify()) == (1, digest, 3)
        assert torch.equal(store.read(2)["a"], row(2))


def test_only_rows_that_changed_are_written(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {client: {"a": row(client)} for client in range(10)})
        size = rows_size(tmp_path)
        with io.use_disk(Counting()) as disk:
            store.commit(1, {client: {"a": row(client)} for client in range(10)})
        assert rows_size(tmp_path) == size
        assert disk.calls.count("write") == 2  # type: ignore[attr-defined]  # the seal and the body of the round's file
        store.commit(2, {client: {"a": row(client + (client == 4))} for client in range(10)})
        assert rows_size(tmp_path) <= size + 4096


def test_old_rows_are_collected_and_their_space_used_again(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for round in range(120):
            store.commit(round, {round % 5: {"a": row(round)}})
        assert rows_size(tmp_path) <= 6 * 4096
        assert len(list((tmp_path / "index").iterdir())) <= 40
        assert store.verify() == 5


def test_kept_generations_are_opened_exactly_and_what_followed_is_given_up(tmp_path: Path) -> None:
    digests = {}
    with DiskStore(tmp_path) as store:
        for round in range(60):
            store.commit(round, {(7 * round) % 10: {"a": row(round)}, 11: {"b": row("b", round)}})
            digests[store.generation] = store.digest()
            if store.generation % 10 == 0:
                store.retain([*store.retained[-2:], store.generation])
        assert store.retained == [40, 50, 60]
        store.commit(60, {})
    for generation in (50, 40):
        with DiskStore.open(tmp_path, at_round=generation) as store:
            assert store.generation == generation
            assert store.digest() == digests[generation]
            store.verify()
    with DiskStore(tmp_path) as store:
        assert (store.generation, store.retained) == (40, [40])
        store.commit(40, {1: {"a": row("another")}})
        assert torch.equal(store.read(1)["a"], row("another"))


def test_a_generation_that_was_not_kept_is_refused_with_what_is_held(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for round in range(5):
            store.commit(round, {0: {"a": row(round)}})
            if round == 1:
                store.retain([2])
    for wrong in (0, 1, 3, 4, 6):
        with pytest.raises(HansaError, match=f"cannot be opened at round {wrong}: it holds rounds 2, 5"):
            DiskStore(tmp_path, at_round=wrong)


def test_a_generation_is_kept_only_if_named_while_it_is_there(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for round in range(3):
            store.commit(round, {0: {"a": row(round)}})
        store.retain([1, 3, 9])
        assert store.retained == [3]


def test_opening_at_the_present_round_keeps_it(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
    with DiskStore(tmp_path, at_round=1) as store:
        store.commit(1, {0: {"a": row(1)}})
    with DiskStore(tmp_path, at_round=1) as store:
        assert torch.equal(store.read(0)["a"], row(0))


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with DiskStore(tmp_path), pytest.raises(HansaError, match=f"in use by process {os.getpid()} on "):
        DiskStore(tmp_path)
    DiskStore(tmp_path).close()


def test_opening_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HansaError, match="a folder with a store"):
        DiskStore.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_after_a_failed_write_the_store_must_be_opened_again(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
        with io.use_disk(Failing(0, "ENOSPC")), pytest.raises(OSError, match=r"\.rows") as caught:
            store.commit(1, {0: {"a": row(1)}})
        assert caught.value.errno == errno.ENOSPC
        assert torch.equal(store.read(0)["a"], row(0))
        with pytest.raises(HansaError, match="Open it again"):
            store.commit(1, {0: {"a": row(1)}})
    with DiskStore(tmp_path) as store:
        store.commit(1, {0: {"a": row(1)}})


def test_short_writes_are_finished(tmp_path: Path) -> None:
    with io.use_disk(Stingy()), DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
        assert torch.equal(store.read(0)["a"], row(0))


@pytest.mark.parametrize("read", ["read_many", "dot", "combine"])
def test_damage_after_a_first_good_read_is_noticed_too(tmp_path: Path, read: str) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {client: {"a": row(client)} for client in range(3)})
        arguments = {"read_many": (), "dot": (row("v")[None],), "combine": ([1.0, 1.0, 1.0],)}[read]
        getattr(store, read)([0, 1, 2], "a", *arguments)
        path = next((tmp_path / "rows").iterdir())
        data = bytearray(path.read_bytes())
        data[1600 + 100] ^= 16
        path.write_bytes(data)
        with pytest.raises(DamagedFileError, match=r"client 1, row 'a' of round 0 is damaged: its CRC-32"):
            getattr(store, read)([0, 1, 2], "a", *arguments)


@pytest.mark.parametrize("native", ["", "base", "off"])
def test_streamed_rows_are_checked_whoever_reads_them(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_NATIVE", native)
    d = 40_003
    rows = {client: row(client, size=d).float() for client in range(70)}
    vectors = torch.stack([row("v", i, size=d).float() for i in range(6)])
    ram = RamStore()
    with DiskStore(tmp_path) as store:
        for one in (ram, store):
            one.commit(0, {client: {"a": value} for client, value in rows.items()})
        clients = [5, *range(6, 70), 0]
        for _ in range(2):  # by SHA-256, then by CRC-32
            assert torch.equal(store.dot(clients, "a", vectors), ram.dot(clients, "a", vectors))
        path = next((tmp_path / "rows").iterdir())
        data = path.read_bytes()
        path.write_bytes(data[:-9000])
        with pytest.raises(
            DamagedFileError, match=r"client 69, row 'a' of round 0 is damaged: the file ends after \d+ of 160"
        ):
            store.dot(clients, "a", vectors)
        stride = -(-4 * d // 4096) * 4096
        hurt = bytearray(data)
        hurt[41 * stride + 160_005] ^= 1
        path.write_bytes(hurt)
        with pytest.raises(DamagedFileError, match=r"client 41, row 'a' of round 0 is damaged: its CRC-32") as told:
            store.dot(clients, "a", vectors)
        assert f"bytes {41 * stride} to {41 * stride + 4 * d}" in str(told.value)
        path.write_bytes(data)
        assert torch.equal(store.dot(clients, "a", vectors), ram.dot(clients, "a", vectors))


def test_a_lost_index_is_not_taken_for_a_new_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    with pytest.raises(DamagedFileError, match="has no base file"):
        DiskStore(tmp_path)


def test_a_damaged_newest_round_does_not_bar_the_way_to_an_older_checkpoint(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for round in range(4):
            store.commit(round, {0: {"a": row(round)}})
            if round == 1:
                store.retain([2])
    (tmp_path / "index" / "round-000000004.json").write_bytes(b"nonsense")
    with pytest.raises(DamagedFileError, match="round-000000004"):
        DiskStore(tmp_path)
    with DiskStore(tmp_path, at_round=2) as store:
        assert torch.equal(store.read(0)["a"], row(1))


def test_a_round_of_another_history_is_noticed(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        with DiskStore(tmp_path / name) as store:
            for round in range(3):
                store.commit(round, {0: {"a": row(seed, round)}})
    name = "index/round-000000002.json"
    (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
    with pytest.raises(DamagedFileError, match=r"round-000000002\.json does not follow the round before it"):
        DiskStore(tmp_path / "one")


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    path = tmp_path / "index" / "base-000000000.json"
    io.write_sealed(path, {**io.read_sealed(path), "format": 99})
    with pytest.raises(HansaError, match="format 99; this Hansa reads format 1"):
        DiskStore(tmp_path)
