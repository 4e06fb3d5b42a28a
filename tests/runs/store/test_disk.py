from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs.store import ClientStore, DamagedFileError, DiskStore, io
from hansa.runs.store.database import DATABASE, ROWS
from torture.disks import Counting, Failing, Hasty, Stingy, use_disk

LARGE = 20_000


def row(*path: int | str, size: int = 200) -> torch.Tensor:
    return torch.from_numpy(Key(8).child(*path).numpy().normal(size=size))


def test_only_rows_that_changed_are_written(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {client: {"a": row(client, size=LARGE)} for client in range(10)})
        size = (tmp_path / ROWS).stat().st_size
        with use_disk(Counting()) as disk:
            store.commit(1, {client: {"a": row(client, size=LARGE)} for client in range(10)})
        assert (tmp_path / ROWS).stat().st_size == size
        assert disk.calls == ["commit"]  # type: ignore[attr-defined]
        with use_disk(Counting()) as disk:
            store.commit(2, {client: {"a": row(client + (client == 4), size=LARGE)} for client in range(10)})
        assert disk.calls == ["open_file", "write_some", "sync", "commit"]


def test_old_rows_are_deleted_and_their_space_is_used_again(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for round in range(60):
            store.commit(round, {round % 5: {"a": row(round, size=LARGE), "b": row("b", round)}})
        assert (tmp_path / ROWS).stat().st_size <= 6 * (8 * LARGE + 4096)
        assert store.verify() == 10
    assert (tmp_path / DATABASE).stat().st_size < 200_000


def test_staged_rows_are_written_with_the_round_or_discarded(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0, size=LARGE)}})
        digest, size = store.digest(), (tmp_path / ROWS).stat().st_size
        store.stage(1, {"a": row(1, size=LARGE)})
        store.discard()
        store.commit(1, {})
        assert store.digest() == digest
        store.stage(1, {"a": row(1, size=LARGE)})
        store.stage(0, {"a": row(2)})
        assert torch.equal(store.read(0)["a"], row(0, size=LARGE))
        store.commit(2, {0: {"a": row(3)}})
    with DiskStore(tmp_path) as store:
        assert torch.equal(store.read(1)["a"], row(1, size=LARGE))
        assert torch.equal(store.read(0)["a"], row(3))
        assert (tmp_path / ROWS).stat().st_size < 2 * size + 4096


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with DiskStore(tmp_path), pytest.raises(HansaError, match=f"in use by process {os.getpid()} on "):
        DiskStore(tmp_path)
    DiskStore(tmp_path).close()


@pytest.mark.parametrize("at", range(4))
def test_after_a_failed_write_the_store_must_be_opened_again(tmp_path: Path, at: int) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0, size=LARGE)}})
        with use_disk(Failing(at, "ENOSPC")), pytest.raises(OSError, match=r"run\.") as caught:
            store.commit(1, {0: {"a": row(1, size=LARGE)}})
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(HansaError, match="Open it again"):
            store.commit(1, {0: {"a": row(1)}})
    with DiskStore(tmp_path) as store:
        assert torch.equal(store.read(0)["a"], row(0, size=LARGE))
        store.commit(1, {0: {"a": row(1)}})


def test_a_disk_that_is_full_ends_the_round_and_leaves_the_one_before(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
        pages = store.database.execute("PRAGMA page_count").fetchone()[0]
        store.database.execute(f"PRAGMA max_page_count={pages + 2}")
        with pytest.raises(OSError, match=r"run\.db") as caught:
            store.commit(1, {client: {"a": row(client, size=1000)} for client in range(50)})
        assert caught.value.errno == errno.ENOSPC
    with DiskStore(tmp_path) as store:
        assert (store.generation, store.clients()) == (1, [0])


@pytest.mark.parametrize("read", ["read_many", "dot", "combine"])
def test_damage_after_a_first_good_read_is_noticed_too(tmp_path: Path, read: str) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {client: {"a": row(client, size=LARGE)} for client in range(3)})
        arguments = {"read_many": (), "dot": (row("v", size=LARGE)[None],), "combine": ([1.0, 1.0, 1.0],)}[read]
        getattr(store, read)([0, 1, 2], "a", *arguments)
        data = bytearray((tmp_path / ROWS).read_bytes())
        data[len(data) // 2] ^= 16
        (tmp_path / ROWS).write_bytes(data)
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
    ram, path = ClientStore(), tmp_path / ROWS
    with DiskStore(tmp_path) as store:
        for each in (ram, store):
            each.commit(0, {client: {"a": value} for client, value in rows.items()})
        clients = [5, *range(6, 70), 0]
        for _ in range(2):  # by SHA-256, then by CRC-32
            assert torch.equal(store.dot(clients, "a", vectors), ram.dot(clients, "a", vectors))
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


def test_a_lost_database_is_not_taken_for_a_new_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0, size=LARGE)}})
    (tmp_path / DATABASE).unlink()
    with pytest.raises(DamagedFileError, match=r"run\.db is missing"):
        DiskStore(tmp_path)


def test_a_forked_process_does_not_use_or_close_the_connection_of_its_parent(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.commit(0, {0: {"a": row(0)}})
        if (child := os.fork()) == 0:
            code = 1
            try:
                store.commit(1, {0: {"a": row(1)}})
            except HansaError as error:
                code = 0 if "another process" in str(error) else 2
            finally:
                del store
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (tmp_path / f"{DATABASE}-wal").exists()
        store.commit(1, {0: {"a": row(2)}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", DATABASE]
    with DiskStore(tmp_path) as store:
        assert torch.equal(store.read(0)["a"], row(2))


def test_a_file_is_replaced_by_write_sync_rename_and_sync_of_the_folder(tmp_path: Path) -> None:
    with use_disk(Counting()) as disk:
        io.write_file(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert disk.calls == ["open_file", "write_some", "sync", "replace", "sync_folder"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short"])
@pytest.mark.parametrize("at", range(4))
def test_a_failed_replacement_leaves_the_old_file_and_names_it(tmp_path: Path, at: int, fault: str) -> None:
    io.write_file(tmp_path / "a", b"old")
    with use_disk(Failing(at, fault)), pytest.raises(OSError, match=str(tmp_path / "a")):
        io.write_file(tmp_path / "a", b"new and longer")
    assert (tmp_path / "a").read_bytes() == b"old"
    io.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_writes_that_take_a_few_bytes_at_a_time_are_finished(tmp_path: Path) -> None:
    with use_disk(Stingy()):
        io.write_file(tmp_path / "a", bytes(range(256)))
        io.append(tmp_path / "a", b"and more than seven")
    assert (tmp_path / "a").read_bytes() == bytes(range(256)) + b"and more than seven"


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path) -> None:
    class Full(Hasty):
        def write_some(self, file: int, offset: int, data: io.Bytes) -> int:
            return 0

    with use_disk(Full()), pytest.raises(OSError, match="nothing was written"):
        io.write_file(tmp_path / "a", b"x")


@pytest.mark.parametrize("position", [0, 30, 64, 65, 80])
def test_a_sealed_file_proves_itself(tmp_path: Path, position: int) -> None:
    path = tmp_path / "facts.json"
    io.write_sealed(path, {"round": 3, "kept": [1, 2]})
    assert io.read_sealed(path) == {"round": 3, "kept": [1, 2]}
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=r"facts\.json is damaged"):
        io.read_sealed(path)
    path.unlink()
    with pytest.raises(DamagedFileError, match=r"facts\.json is missing"):
        io.read_sealed(path)


def test_words_that_are_no_utf8_come_back_from_a_file_of_json(tmp_path: Path) -> None:
    io.write_json(tmp_path / "a", {"command": "hansa run caf\u00e9 \udc80"})
    assert io.read_json(tmp_path / "a") == {"command": "hansa run caf\u00e9 \udc80"}


def test_folders_are_made_and_removed_whole_and_links_in_them_are_not_followed(tmp_path: Path) -> None:
    io.make_folder(tmp_path / "a" / "b")
    io.write_file(tmp_path / "a" / "b" / "c", b"x")
    io.write_file(tmp_path / "thesis", b"years of work")
    for name, target in (("folder", tmp_path), ("file", tmp_path / "thesis"), ("nowhere", tmp_path / "nothing")):
        (tmp_path / "a" / name).symlink_to(target)
    io.remove(tmp_path / "a")
    io.remove(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    assert (tmp_path / "thesis").read_bytes() == b"years of work"
