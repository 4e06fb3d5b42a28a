"""Every write, sync and commit fails once, the power goes before each of them, and a log is cut anywhere; then all must
be whole."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from hansa.core.keys import Key
from hansa.core.types import State
from hansa.runs.client_columns import decode_clients, encode_clients
from hansa.runs.record import RunRecord
from hansa.runs.store import ClientStore, DiskStore
from hansa.runs.store.database import DATABASE
from torture.disks import FAULTS, Counting, Dead, Failing, Hasty, PowerCut, use_disk
from torture.kill import sha

ROUNDS = 8
SAVED = (0, 3, 5, 6)


def rows(round: int) -> dict[int, dict[str, torch.Tensor]]:
    """What round ``round`` commits: some of six clients, rows of two sizes, one of them the server's own and large."""
    draw = Key(1).child("rows", round).numpy()
    clients = sorted(int(client) for client in draw.choice(6, size=3, replace=False))
    return {
        client: {
            "solver/control": torch.from_numpy(draw.normal(size=40)),
            "server/momentum": torch.from_numpy(draw.normal(size=20_000)).float(),
        }
        for client in clients
    }


@cache
def digests() -> list[str]:
    """The digest of every generation, from a store in memory."""
    store = ClientStore()
    found = [store.digest()]
    for round in range(ROUNDS + 3):
        store.commit(round, rows(round))
        found.append(store.digest())
    return found


def state(number: int) -> State:
    return {
        "round": number,
        "vectors": {
            "model": Key(2).child(number).numpy().normal(size=50).tolist(),
            "m": torch.full((20_000,), number / 3),
        },
    }


def clients_of(round: int) -> bytes:
    return encode_clients({"client": np.array(sorted(rows(round))), "norm": np.array([round, 1, 2.0])})


def close_round(record: RunRecord, *, save: bool = False) -> None:
    """One round, with a checkpoint in the same transaction if asked."""
    store = DiskStore(record)
    round = store.generation
    store.commit(round, rows(round))
    record.add_round({"round": round + 1, "loss": 1 / (round + 1)}, clients_of(round))
    if save:
        record.save_checkpoint(state(round + 1), {"round": round + 1}, keep=3)
    record.commit()


def begin(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with RunRecord.create(folder) as record:
        DiskStore(record)
        record.save_checkpoint(state(0), {"round": 0})
        record.commit()


def history(folder: Path) -> None:
    begin(folder)
    with RunRecord(folder, writing=True) as record:
        for round in range(1, ROUNDS + 1):
            close_round(record, save=round in SAVED)


def whole(folder: Path, expected: tuple[int, ...]) -> None:
    """The record is at one of these rounds, with everything of it; every checkpoint can be resumed, and it goes on."""
    with RunRecord(folder) as record:
        found = [each["round"] for each, _ in record.rounds()]
        assert len(found) in expected
        assert found == list(range(1, len(found) + 1))
        blocks = {round: decode_clients(block)["client"].tolist() for round, block in record.client_blocks()}
        assert blocks == {round: sorted(rows(round - 1)) for round in found}
        store = DiskStore(record)
        assert store.generation == len(found)
        assert store.digest() == digests()[len(found)]
        store.verify()
        saved = record.checkpoint_rounds()
        assert saved in ([round for round in SAVED if round <= len(found)][-3:], [5, 6, ROUNDS + 1], [3, 5], [3])
        record.check_pages()
    for round in reversed(saved):
        copy = folder.with_name("resumed")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        with RunRecord(copy, writing=True) as record:
            record.check_checkpoint(round)
            assert sha(record.load_checkpoint(round).state) == sha(state(round))
            assert len(record.rewind(record.load_checkpoint(round).head)) == round
            close_round(record)
            close_round(record, save=True)
            assert DiskStore(record).digest() == digests()[round + 2]
            DiskStore(record).verify()
            assert record.checkpoint_rounds()[-1] == round + 2


def is_new(folder: Path, finished: bool) -> None:
    """The record is empty, or was not made."""
    if not (folder / DATABASE).exists():
        assert not finished
        begin(folder)
    with RunRecord(folder, writing=True) as record:
        assert list(record.rounds()) == []
        DiskStore(record)
        record.save_checkpoint(state(0), {"round": 0})
        close_round(record)
        assert DiskStore(record).verify() == 6


@dataclass(frozen=True)
class Case:
    """A folder as it was, one act on its record, and the rounds that it has before and after."""

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[RunRecord], object] | None
    before: int = 0
    after: int = 0

    def run(self, folder: Path) -> None:
        if self.act is None:
            begin(folder)
        else:
            with RunRecord(folder, writing=True) as record:
                self.act(record)

    def check(self, folder: Path, finished: bool) -> None:
        with use_disk(Hasty()):
            if self.act is None:
                is_new(folder, finished)
            else:
                whole(folder, (self.after,) if finished else (self.before, self.after))


def go_back(record: RunRecord) -> None:
    record.rewind(record.load_checkpoint(5).head)


def write_anew(record: RunRecord) -> None:
    record._salvage(record.load_checkpoint(3).head)


CASES = (
    Case("a record is made", Path.mkdir, None),
    Case("the first round is committed", begin, close_round, 0, 1),
    Case("a round is committed", history, close_round, ROUNDS, ROUNDS + 1),
    Case("a round is committed with a checkpoint", history, partial(close_round, save=True), ROUNDS, ROUNDS + 1),
    Case("a record goes back to a checkpoint", history, go_back, ROUNDS, 5),
    Case("a damaged record is written anew", history, write_anew, ROUNDS, 3),
)


def try_case(case: Case, place: Path, cuts: int) -> int:
    """Every call fails in every way, and the power goes ``cuts`` times before each and after the last; return how many
    trials there were."""
    template, folder, counting = place / "template", place / "trial", Counting()
    with use_disk(Hasty()):
        case.prepare(template)
    shutil.copytree(template, folder)
    with use_disk(counting):
        case.run(folder)
    calls = range(len(counting.calls))
    disks: list[Failing | PowerCut] = [Failing(at, fault) for at in calls for fault in FAULTS]
    for at in (*calls, None):
        draws = [Key(seed).child(case.name, -1 if at is None else at) for seed in range(cuts + 2 * (at is None))]
        disks += [PowerCut(at, draw.numpy()) for draw in draws]
    for disk in disks:
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        error: BaseException | None = None
        with use_disk(disk):
            try:
                case.run(folder)
            except (OSError, Dead) as caught:
                error = caught
        if isinstance(disk, PowerCut):
            disk.cut()
        else:  # the error reaches the caller, or was of no consequence
            assert disk.struck
            assert not isinstance(error, OSError) or error.filename is not None, "the error does not name the file"
        case.check(folder, error is None)
    return len(disks)


def cut_logs(place: Path, count: int, seed: int = 0) -> int:
    """The power goes while the log of a transaction is written: any part of its end is missing, or is zeros."""
    folder, live = place / "cut", place / "live"
    with use_disk(Hasty()):
        history(live)
        with RunRecord(live, writing=True) as record:
            log = record.path.with_name(DATABASE + "-wal")
            with closing(sqlite3.connect(f"file:{record.path}?mode=ro", uri=True)) as reader:  # keeps the log growing
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM rounds").fetchone()
                before = log.stat().st_size
                close_round(record, save=True)
            after = log.read_bytes()
            shutil.copytree(live, folder, ignore=shutil.ignore_patterns("*-shm"))
        assert len(after) > before
        for trial in range(count):
            draw = Key(seed).child("log", trial).numpy()
            at = int(draw.integers(before, len(after) + 1))
            torn = after[:at] + (bytes(len(after) - at) if draw.random() < 0.5 else b"")
            trial_folder = place / "trial"
            shutil.rmtree(trial_folder, ignore_errors=True)
            shutil.copytree(folder, trial_folder)
            (trial_folder / log.name).write_bytes(torn)
            whole(trial_folder, (ROUNDS, ROUNDS + 1) if at < len(after) else (ROUNDS + 1,))
    return count


def run(count: int, place: Path, seed: int = 0) -> Counter[str]:
    """``count`` power cuts before every call of every case, and twenty times as many logs that are cut."""
    seen: Counter[str] = Counter()
    for case in CASES:
        (place / case.name).mkdir()
        seen[case.name] = try_case(case, place / case.name, count)
    seen["logs cut"] = cut_logs(place, 20 * count, seed)
    return seen
