"""A folder is one run's: taken at once, held as long as the run lives, replaced only whole, never through a link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hansa
from hansa.config import from_preset
from hansa.runs.experiment import open_run
from hansa.runs.folder import LOCK, REPLACED, RunFolder
from hansa.runs.store import io
from hansa.runs.store.io import FileLock, InUseError
from torture.disks import Counting, Dead, Dying, remembered_locks, use_disk

SMALL = ("data.name=synthetic", "data.clients=4", "rounds=2", "local.steps=1", "workers=1")


def config(*words, preset="fedavg"):
    return from_preset(preset, [*SMALL, *words])


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_living_run_is_refused_to_everybody_else_by_name(tmp_path, every, overwrite):
    living = open_run(config(f"checkpoint.every={every}"), tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(hansa.HansaError, match=f"in use by process {os.getpid()}" if overwrite else "holds a run"):
        open_run(config("seed=7"), tmp_path / "out", if_exists="replace" if overwrite else "refuse")
    with pytest.raises(InUseError, match=f"in use by process {os.getpid()} on .* since 20"):
        open_run(None, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    assert living.execute()["status"] == "finished"
    if every:
        open_run(None, tmp_path / "out", rounds=3).execute()  # it has let go


def test_a_lock_is_free_when_its_holder_is_gone_however_that_happened(tmp_path):
    FileLock(tmp_path / "lock")  # dropped at once
    held = FileLock(tmp_path / "lock")
    with pytest.raises(InUseError):
        FileLock(tmp_path / "lock")
    held.close()
    held.close()
    FileLock(tmp_path / "lock").close()


def test_a_lock_of_a_file_that_was_replaced_meanwhile_is_refused(tmp_path, monkeypatch):
    real = os.open

    def open_and_replace(path, *more):
        file = real(path, *more)
        os.replace(path, tmp_path / "moved")
        return file

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_replace)
        with pytest.raises(InUseError):
            FileLock(tmp_path / "lock")


def test_a_run_that_does_not_fit_overwrites_nothing(tmp_path):
    open_run(config(), tmp_path / "out").execute()
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(hansa.HansaError):
        open_run(config("sample.count=99"), tmp_path / "out", if_exists="replace")
    with pytest.raises(hansa.HansaError):
        open_run(config("model=cnn_29k"), tmp_path / "out", if_exists="replace")
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert after == before


def test_somebody_elses_project_is_no_run_though_it_has_a_configuration(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "checkpoint").mkdir(parents=True)
    (theirs / "config.yaml").write_text("rounds: 3\n")
    (theirs / "model.safetensors").write_bytes(b"years of work")
    (theirs / "checkpoint" / "best.pt").write_bytes(b"more of it")
    with pytest.raises(hansa.HansaError, match=r"but no \.hansa-run"):
        open_run(config(), theirs, if_exists="replace")
    assert (theirs / "checkpoint" / "best.pt").read_bytes() == b"more of it"
    assert (theirs / "model.safetensors").read_bytes() == b"years of work"
    assert not (theirs / LOCK).exists()


def state(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file() and path.name != LOCK}


def test_whenever_a_replacement_dies_the_old_run_or_the_new_one_is_whole(tmp_path):
    with remembered_locks() as let_go:
        replace_and_die(tmp_path, let_go)


def replace_and_die(tmp_path, let_go):
    out = tmp_path / "out"
    open_run(config("seed=5", "checkpoint.every=0"), out).execute()
    (out / "notes.txt").write_text("not of a run")
    with use_disk(Counting()) as counted:
        open_run(config("checkpoint.every=0"), tmp_path / "new").folder.release()
    old = state(out)
    seen = set()
    for at in range(len(counted.calls) + 80):  # type: ignore[attr-defined]
        with use_disk(Dying(at)):
            try:
                open_run(config("checkpoint.every=0"), out, if_exists="replace")
                died = False
            except Dead:
                died = True
        let_go()
        taken = RunFolder(out)
        taken.acquire_existing()  # as `hansa resume` does
        taken.release()
        seed = RunFolder(out).config.seed
        seen.add(seed)
        assert not (out / REPLACED).exists()
        assert (out / "notes.txt").read_text("utf-8") == "not of a run"
        if seed == 5:
            assert state(out) == old, f"died at call {at}"
        else:
            assert RunFolder(out).summary["rounds"] == 0
            open_run(config("seed=5", "checkpoint.every=0"), out, if_exists="replace").execute()
            old = state(out)
        if not died:
            break
    assert not died
    assert seen == {0, 5}


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("where", ["run.db.part", "run.rows", "metrics.jsonl.part", "metrics.jsonl"])
def test_links_are_removed_never_followed(tmp_path, where, kind):
    mine = tmp_path / "mine"
    (mine / "index").mkdir(parents=True)
    (mine / "index" / "thesis.txt").write_text("years of work")
    target = mine if kind == "folder" else mine / "index" / "thesis.txt"
    out = tmp_path / "out"
    open_run(config("checkpoint.every=1"), out).execute()
    io.remove(out / where)
    (out / where).symlink_to(target)
    if where in ("run.rows", "metrics.jsonl"):
        open_run(config("checkpoint.every=1"), out, if_exists="replace").execute()
    else:
        open_run(None, out, rounds=4).execute()
        open_run(config("checkpoint.every=1"), out, if_exists="replace").execute()
    assert (mine / "index" / "thesis.txt").read_text("utf-8") == "years of work"
    assert sorted(path.name for path in mine.rglob("*")) == ["index", "thesis.txt"]


def test_locks_work_where_there_is_no_fcntl(tmp_path):
    """As on Windows: msvcrt locks a byte; here one of ours stands in for it."""
    script = f"""
import sys, types, os, errno
held = set()
def locking(file, mode, count):
    key = os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR)
    if key in held: raise OSError(errno.EACCES, "locked")
    held.add(key)
sys.modules["fcntl"] = None
import hansa
assert "msvcrt" not in sys.modules
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
from hansa.runs.store.io import FileLock, InUseError
from pathlib import Path
path = Path({str(tmp_path / "lock")!r})
first = FileLock(path)
try: FileLock(path)
except InUseError as error: print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "is in use by process" in found.stdout
