from __future__ import annotations

from pathlib import Path

import pytest

from hansa.runs.store import DamagedFileError, io
from torture.disks import Counting, Failing, Stingy


def test_a_file_is_replaced_by_write_sync_rename_and_sync_of_the_folder(tmp_path: Path) -> None:
    with io.use_disk(Counting()) as disk:
        io.write_file(tmp_path / "a", b"one", b"", b"two")
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    assert disk.calls == ["open", "write", "write", "sync", "rename", "sync_folder"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short"])
@pytest.mark.parametrize("at", range(4))
def test_a_failed_replacement_leaves_the_old_file_and_names_it(tmp_path: Path, at: int, fault: str) -> None:
    io.write_file(tmp_path / "a", b"old")
    with io.use_disk(Failing(at, fault)), pytest.raises(OSError, match=str(tmp_path / "a")):
        io.write_file(tmp_path / "a", b"new and longer")
    assert (tmp_path / "a").read_bytes() == b"old"
    io.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_writes_that_take_a_few_bytes_at_a_time_are_finished(tmp_path: Path) -> None:
    with io.use_disk(Stingy()):
        io.write_file(tmp_path / "a", bytes(range(256)))
        io.append(tmp_path / "a", b"and more than seven")
    assert (tmp_path / "a").read_bytes() == bytes(range(256)) + b"and more than seven"


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path) -> None:
    class Full(io.Disk):
        def write(self, file: int, offset: int, data: io.Bytes) -> int:
            return 0

    with io.use_disk(Full()), pytest.raises(OSError, match="nothing was written"):
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
