"""Files damaged in every way a disk or a hand can: each must be noticed and named, none may turn into zeros.

``python -m torture.corruption 10000`` (with ``tests`` on the path) damages 10,000 times.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs import checkpoint
from hansa.runs.store import DiskStore, RamStore, io
from hansa.runs.store.row_file import RowEntry
from torture.disks import Hasty

KINDS = ("truncation", "zeroed page", "bit flip", "swap", "stale", "missing")
PAGE = 4096
CLIENTS, ROUNDS = 9, 14


def rows(round: int) -> dict[int, dict[str, torch.Tensor]]:
    draw = Key(3).child("rows", round).numpy()
    chosen = range(CLIENTS) if round < 2 else draw.choice(CLIENTS, size=4, replace=False)
    return {
        int(client): {
            "uplink/model/residual": torch.from_numpy(draw.normal(size=1500)).float(),
            "solver/control": torch.from_numpy(draw.normal(size=30)).bfloat16(),
        }
        for client in chosen
    }


class Patient:
    """A folder with a store and checkpoints, damaged and healed again and again."""

    def __init__(self, place: Path) -> None:
        self.store, self.saved, self.old = place / "store", place / "saved", place / "old"
        self.truth = RamStore()
        with io.use_disk(Hasty()), DiskStore(self.store) as store:
            for round in range(ROUNDS):
                if round == ROUNDS - 5:
                    shutil.copytree(self.store, self.old)
                self.truth.commit(round, rows(round))
                store.commit(round, rows(round))
                store.retain([store.generation])
            self.entries = [
                store._index.rows[client][name] for client in store.clients() for name in store.read(client)
            ]
            for round in range(4):
                state = {"x": Key(4).child(round).numpy().normal(size=20).tolist(), "m": torch.randn(2000)}
                checkpoint.save(self.saved, state, {"round": round})
        self.index = sorted((self.store / "index").glob("*.json"))
        self.checkpoints = sorted(path for path in self.saved.iterdir())

    def rows_file(self, entry: RowEntry) -> Path:
        return self.store / "rows" / f"{entry.stride}.rows"


def hurt(path: Path, kind: str, live: list[range], stale: bytes | None, draw: np.random.Generator) -> bool:
    """Damage one file within its live bytes; False if this kind cannot change it."""
    before = path.read_bytes()
    part = live[int(draw.integers(len(live)))]
    at = int(draw.integers(part.start, part.stop))
    after = bytearray(before)
    if kind == "missing":
        path.unlink()
        return True
    if kind == "truncation":
        del after[at:]
    elif kind == "zeroed page":
        start = at // PAGE * PAGE
        end = min(start + PAGE, len(after))
        after[start:end] = bytes(end - start)
    elif kind == "bit flip":
        after[at] ^= 1 << int(draw.integers(8))
    elif kind == "stale":
        after = bytearray(stale or b"")
    path.write_bytes(after)
    return any(before[a.start : a.stop] != after[a.start : a.stop] for a in live)


def damage_rows(patient: Patient, kind: str, draw: np.random.Generator) -> None:
    """Rows: the error names a client whose bytes changed, its row and the file; all other rows read as they were."""
    entry = patient.entries[int(draw.integers(len(patient.entries)))]
    path = patient.rows_file(entry)
    peers = [other for other in patient.entries if other.stride == entry.stride]
    live = {other: range(other.slot * other.stride, other.slot * other.stride + other.nbytes) for other in peers}
    before = path.read_bytes()
    if kind == "swap":
        other = next(p for p in draw.permutation(np.array(peers, dtype=object)) if p.sha != entry.sha)
        after = bytearray(before)
        one, two = live[entry], live[other]
        after[one.start : one.stop], after[two.start : two.stop] = (
            before[two.start : two.stop],
            before[one.start : one.stop],
        )
        path.write_bytes(after)
    else:
        stale = (patient.old / "rows" / path.name).read_bytes() if kind == "stale" else None
        if not hurt(path, kind, [live[entry]], stale, draw):
            path.write_bytes(before)
            return damage_rows(patient, kind, draw)
    now = path.read_bytes() if path.exists() else b""
    victims = {peer for peer, at in live.items() if before[at.start : at.stop] != now[at.start : at.stop]}
    assert victims
    with DiskStore(patient.store, at_round=ROUNDS) as store:
        for client in store.clients():
            mine = {peer for peer in victims if peer.client == client}
            if not mine:
                expected = patient.truth.read(client)
                assert all(torch.equal(expected[name], row) for name, row in store.read(client).items())
                continue
            message = complaint(lambda client=client: store.read(client))
            assert str(path) in message
            assert any(f"client {peer.client}, row {peer.name!r}" in message for peer in mine), message
            for peer in mine:  # every way of reading notices
                for read in (
                    lambda p=peer: store.read_many([p.client], p.name),
                    lambda p=peer: store.combine([p.client], p.name, [1.0]),
                ):
                    assert f"client {peer.client}, row {peer.name!r}" in complaint(read)
    path.write_bytes(before)
    return None


def damage_index(patient: Patient, kind: str, draw: np.random.Generator) -> None:
    """The index: the store does not open, and says which file; or, a round being gone, that the round is."""
    path = patient.index[int(draw.integers(len(patient.index)))]
    before = path.read_bytes()
    others = [other for other in patient.index if other != path]
    other = others[int(draw.integers(len(others)))]
    swapped = other.read_bytes()
    if kind == "swap":
        path.write_bytes(swapped)
        other.write_bytes(before)
    else:
        hurt(path, kind, [range(len(before))], swapped, draw)
    message = complaint(lambda: DiskStore(patient.store, at_round=ROUNDS).close())
    newest = path == patient.index[-1] and kind == "missing"
    assert path.name in message or other.name in message or newest or "has no base file" in message, message
    path.write_bytes(before)
    other.write_bytes(swapped)


def damage_checkpoint(patient: Patient, kind: str, draw: np.random.Generator) -> None:
    """Checkpoints: load refuses and names the file; asked to, it falls back to the one before, whole."""
    newest, previous = patient.checkpoints[-1], patient.checkpoints[-2]
    names = sorted(path.name for path in newest.iterdir())
    name = names[int(draw.integers(len(names)))]
    path, other = newest / name, previous / name
    before, swapped = path.read_bytes(), other.read_bytes()
    if kind == "swap":
        path.write_bytes(swapped)
        other.write_bytes(before)
    else:
        hurt(path, kind, [range(len(before))], swapped, draw)
    message = complaint(lambda: checkpoint.load(patient.saved))
    assert newest.name in message
    assert name in message, message
    _, meta = checkpoint.load(patient.saved, fallback=True)
    assert meta["round"] == (1 if kind == "swap" else 2)
    path.write_bytes(before)
    other.write_bytes(swapped)


def complaint(act: object) -> str:
    """What the error says; that there is one is the point."""
    try:
        act()  # type: ignore[operator]
    except HansaError as error:
        return str(error)
    raise AssertionError("damage went unnoticed")


PLACES = {"rows": damage_rows, "index": damage_index, "checkpoint": damage_checkpoint}


def run(place: Path, count: int, seed: int = 0) -> Counter[str]:
    """Damage ``count`` times, everywhere and in every way; returns how often each was noticed."""
    patient = Patient(place)
    noticed: Counter[str] = Counter()
    for trial in range(count):
        draw = Key(seed).child("damage", trial).numpy()
        where = ("rows", "rows", "index", "checkpoint")[trial % 4]
        kind = KINDS[trial // 4 % len(KINDS)]
        with io.use_disk(Hasty()):
            PLACES[where](patient, kind, draw)
        noticed[f"{where}: {kind}"] += 1
    with DiskStore(patient.store) as store:  # healed, it is what it was
        assert store.digest() == patient.truth.digest()
        assert store.verify() == len(patient.entries)
    return noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("hansa").setLevel(logging.ERROR)  # falling back is asked for a thousand times here
    with tempfile.TemporaryDirectory() as place:
        noticed = run(Path(place), options.count, options.seed)
    for what, times in sorted(noticed.items()):
        print(f"{what:28} {times:6} of {times} noticed and named")
    print(f"{sum(noticed.values())} corruptions, all noticed and named; no row was reset")


if __name__ == "__main__":
    main()
