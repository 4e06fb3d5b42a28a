"""Every write, sync and rename fails once, and the power goes before each of them; then all must be whole.

``python -m torture.faults 50`` (with ``tests`` on the path) cuts the power 50 times before every call of every case.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from hansa.core.keys import Key
from hansa.core.types import State
from hansa.runs import checkpoint
from hansa.runs.store import DiskStore, RamStore, index, io
from torture.disks import FAULTS, Counting, Dead, Failing, Hasty, PowerCut

ROUNDS = 8
KEPT = (3, 5, 6)


def rows(round: int) -> dict[int, dict[str, torch.Tensor]]:
    """What round ``round`` commits: some of six clients, rows of two sizes, one of them the server's own."""
    draw = Key(1).child("rows", round).numpy()
    clients = sorted(int(client) for client in draw.choice(6, size=3, replace=False))
    return {
        client: {
            "solver/control": torch.from_numpy(draw.normal(size=40)),
            "server/momentum": torch.from_numpy(draw.normal(size=1200)).float(),
        }
        for client in clients
    }


@cache
def digests() -> list[str]:
    """The digest of every generation, from a store in memory."""
    store = RamStore()
    found = [store.digest()]
    for round in range(ROUNDS + 1):
        store.commit(round, rows(round))
        found.append(store.digest())
    return found


def history(folder: Path, rounds: int = ROUNDS) -> None:
    with DiskStore(folder) as store:
        for round in range(rounds):
            store.commit(round, rows(round))
            if store.generation in KEPT:
                store.retain([*store.retained, store.generation])


def state(number: int) -> State:
    return {
        "round": number,
        "vectors": {
            "model": Key(2).child(number).numpy().normal(size=50).tolist(),
            "m": torch.full((300,), number / 3),
        },
    }


def save(folder: Path, number: int) -> None:
    checkpoint.save(folder, state(number), {"round": number})


@dataclass(frozen=True)
class Case:
    """A folder as it was, one act on it, and what must be true whether or not the act came to its end."""

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path, bool], None]


def _nothing(folder: Path) -> None:
    folder.mkdir()


def _create(folder: Path) -> None:
    DiskStore(folder).close()


def _is_new(folder: Path, finished: bool) -> None:
    with DiskStore(folder) as store:
        assert store.generation == 0
        store.commit(0, rows(0))
        assert store.verify() == 6


def _commit_first(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.commit(0, rows(0))


def _none_or_one(folder: Path, finished: bool) -> None:
    with DiskStore(folder) as store:
        assert store.generation in ((1,) if finished else (0, 1))
        assert store.digest() == digests()[store.generation]
        assert store.verify() == 6 * store.generation


def _commit(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.commit(ROUNDS, rows(ROUNDS))


def _retain_and_commit(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.retain([6, ROUNDS])
        store.commit(ROUNDS, rows(ROUNDS))


def _old_or_new(folder: Path, finished: bool) -> None:
    expected = digests()
    with DiskStore(folder) as store:
        assert store.generation in ((ROUNDS + 1,) if finished else (ROUNDS, ROUNDS + 1))
        assert store.digest() == expected[store.generation]
        assert store.verify() == 12
        held = store.retained
        assert 6 in held
    for generation in reversed(held):  # and back, to each that is kept
        _at(folder, generation, expected)
    with DiskStore(folder) as store:  # and on
        store.commit(store.generation, rows(store.generation))
        store.verify()


def _at(folder: Path, generation: int, expected: list[str]) -> None:
    with DiskStore(folder, at_round=generation) as store:
        assert store.generation == generation
        assert store.digest() == expected[generation]
        store.verify()


def _roll_back(folder: Path) -> None:
    DiskStore(folder, at_round=5).close()


def _rolled_or_rolling(folder: Path, finished: bool) -> None:
    expected = digests()
    with DiskStore(folder) as store:
        assert store.generation == 5 if finished else 5 <= store.generation <= ROUNDS
        assert store.digest() == expected[store.generation]
        if store.generation in (5, ROUNDS):
            store.verify()
    _at(folder, 5, expected)
    with DiskStore(folder) as store:
        store.commit(5, rows(5))
        assert store.digest() == expected[6]
        store.verify()


def _one_saved(folder: Path, finished: bool) -> None:
    if checkpoint.list_metadata(folder):
        _loads(folder, (1,))
    else:
        assert not finished
    save(folder, 2)
    _loads(folder, (2,))


def _three_saved(folder: Path) -> None:
    for number in (1, 2, 3):
        save(folder, number)


def _three_or_four(folder: Path, finished: bool) -> None:
    _loads(folder, (4,) if finished else (3, 4))
    standing = [path for path in folder.iterdir() if path.suffix != io.TEMPORARY_SUFFIX]
    assert all(len(list(path.iterdir())) == 3 for path in standing), "part of a generation stands where a whole one did"
    for _ in range(3):
        save(folder, 5)
    _loads(folder, (5,))
    assert len(list(folder.iterdir())) == 3


def _loads(folder: Path, numbers: tuple[int, ...]) -> None:
    found, meta = checkpoint.load(folder)
    assert meta["round"] in numbers
    wanted = state(meta["round"])
    assert torch.equal(found["vectors"].pop("m"), wanted["vectors"].pop("m"))
    assert found == wanted


CASES = (
    Case("a store is made", _nothing, _create, _is_new),
    Case("the first round is committed", _create, _commit_first, _none_or_one),
    Case("a round is committed", history, _commit, _old_or_new),
    Case("a round is committed and the log folded", history, _retain_and_commit, _old_or_new),
    Case("a store is rolled back", history, _roll_back, _rolled_or_rolling),
    Case("the first checkpoint is saved", _nothing, lambda folder: save(folder, 1), _one_saved),
    Case("a checkpoint is saved and the oldest given up", _three_saved, lambda folder: save(folder, 4), _three_or_four),
)


class Bench:
    """A case with its folder prepared once and copied for every trial."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case, self.place = case, place
        self.template = place / "template"
        counting = Counting()
        with io.use_disk(Hasty()):
            case.prepare(self.template)
        with io.use_disk(counting):
            case.act(self.fresh())
        self.calls = counting.calls

    def fresh(self) -> Path:
        folder = self.place / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.template, folder)
        return folder

    def fail(self, at: int, fault: str) -> None:
        """Call ``at`` fails; the error reaches the caller, or was of no consequence."""
        folder = self.fresh()
        disk = Failing(at, fault)
        finished = True
        with io.use_disk(disk):
            try:
                self.case.act(folder)
            except OSError as error:
                finished = False
                named = error.filename is not None
        assert disk.struck
        assert finished or named, "the error does not name the file"
        self.check(folder, finished)

    def cut(self, at: int | None, seed: int) -> None:
        """The power goes before call ``at``, or after the last."""
        folder = self.fresh()
        disk = PowerCut(at, Key(seed).child(self.case.name, -1 if at is None else at).numpy())
        finished = True
        with io.use_disk(disk):
            try:
                self.case.act(folder)
            except Dead:
                finished = False
        disk.cut()
        self.check(folder, finished)

    def check(self, folder: Path, finished: bool) -> None:
        with io.use_disk(Hasty()):
            self.case.check(folder, finished)


def trials(bench: Bench, cuts: int) -> Iterator[Callable[[], None]]:
    """Every call failing in every way, and ``cuts`` power cuts before each and after the last."""
    for at in range(len(bench.calls)):
        for fault in FAULTS:
            yield partial(bench.fail, at, fault)
        for seed in range(cuts):
            yield partial(bench.cut, at, seed)
    for seed in range(5 + cuts):
        yield partial(bench.cut, None, seed)


def run(case: Case, place: Path, cuts: int) -> int:
    """Every trial of a case; returns how many there were. The log folds early, so that a short history sees it."""
    done = 0
    before, index.LOG = index.LOG, 2
    try:
        for trial in trials(Bench(case, place), cuts):
            trial()
            done += 1
    finally:
        index.LOG = before
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20, help="power cuts before every call")
    count = parser.parse_args().count
    for case in CASES:
        with tempfile.TemporaryDirectory() as place:
            print(f"{case.name}: {run(case, Path(place), count)} faults, old or new whole every time", flush=True)


if __name__ == "__main__":
    main()
