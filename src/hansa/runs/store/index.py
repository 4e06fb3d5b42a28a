"""The index of a store: a base file and one sealed file per closed round, chained by hashes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.runs.store import io
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.row_file import RowEntry

FORMAT = 1
LOG = 32  # log rounds before the oldest kept generation at which a new base is written


class Index:
    """Which rows exist at which generation.

    On disk, ``base-<g>.json`` has every row at generation g, and ``round-<g>.json`` the rows that generation g changed.
    Renaming the newest file into place is the commit. A replaced row is *retired*, and kept while a kept generation
    uses it. SQLite is not used: tests could not fail its writes one by one, and it does not detect a damaged or
    swapped file by a checksum.
    """

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder = folder
        self.generation = 0
        self.generations: set[int] = set()
        self.rows: dict[int, dict[str, RowEntry]] = {}
        self.retired: list[tuple[RowEntry, int]] = []
        self._base = 0
        self._stamps: dict[int, str] = {}
        self._load(at)

    def entries(self) -> list[RowEntry]:
        """Return every row whose slot is in use."""
        return [entry for named in self.rows.values() for entry in named.values()] + [e for e, _ in self.retired]

    def commit(self, fresh: list[RowEntry]) -> list[RowEntry]:
        """Close a round with these rows, durably, and return the rows that are no longer needed."""
        generation = self.generation + 1
        stamp = self._stamp(self._stamps[self.generation], generation, fresh)
        self._write("round", generation, stamp, self.generations, fresh)
        self._apply(generation, stamp, fresh)
        return self._forget()

    def compact(self) -> None:
        """Write a new base and remove older round files, once there are enough of them."""
        oldest = min(self.generations, default=self.generation)
        if oldest - self._base < LOG:
            return
        alive = [entry for named in self.rows.values() for entry in named.values() if entry.born <= oldest]
        alive += [entry for entry, died in self.retired if entry.born <= oldest < died]
        alive.sort(key=lambda entry: (entry.client, entry.name))
        self._write("base", oldest, self._stamps[oldest], self.generations, alive)
        self._base = oldest
        self._stamps = {generation: stamp for generation, stamp in self._stamps.items() if generation >= oldest}
        self._sweep()

    def _load(self, at: int | None) -> None:
        bases, rounds = self._numbers("base"), self._numbers("round")
        if not bases:
            self._begin(rounds)
            bases = [0]
        self._base = bases[-1]
        head = max([self._base, *rounds])
        goal = head if at is None else at
        available = self._available_generations(head, goal)
        if goal != head and goal not in available:
            raise HansaError(
                f"{self.folder.parent} cannot be opened at round {goal}: it holds rounds "
                f"{', '.join(map(str, sorted({*available, head})))}. Start from the checkpoint of one of these."
            )
        body = self._read("base", self._base)
        self.rows = {}
        for entry in self._entries(body):
            self.rows.setdefault(entry.client, {})[entry.name] = entry
        self._stamps = {self._base: body["stamp"]}
        self.generation = self._base
        for generation in range(self._base + 1, goal + 1):
            body = self._read("round", generation)
            fresh = self._entries(body)
            stamp = self._stamp(self._stamps[generation - 1], generation, fresh)
            if body["stamp"] != stamp:
                raise DamagedFileError(
                    f"{self._path('round', generation)} does not follow the round before it. "
                    "Restore it, or start from another checkpoint."
                )
            self._apply(generation, stamp, fresh)
        self.generations = {g for g in available if g <= goal} | ({goal} if at is not None else set())
        if goal < head:
            self._roll_back(head, body)
        self._forget()
        self._sweep()

    def _available_generations(self, head: int, goal: int) -> set[int]:
        """Return the older generations that are kept, according to the newest file. If that is damaged, the requested
        generation is assumed to be kept: its rows are checked as they are read."""
        try:
            newest = self._read("round" if head > self._base else "base", head)
        except DamagedFileError:
            if not self._base <= goal < head:
                raise
            return {goal}
        return {generation for generation in newest["kept"] if self._base <= generation <= head}

    def _begin(self, rounds: list[int]) -> None:
        """Start a new index; if there are rounds or rows already, the base file was lost, which is an error."""
        if rounds or any((self.folder.parent / "rows").glob("*.rows")):
            raise DamagedFileError(f"{self.folder} has no base file. Restore it, or start from another checkpoint.")
        self._write("base", 0, self._stamp("", 0, []), set(), [])

    def _roll_back(self, head: int, body: dict[str, Any]) -> None:
        """Remove the newer rounds, newest first and each durably: a crash leaves a shorter, consistent index. The kept
        generations are written first: they may be fewer than before."""
        kind = "round" if self.generation > self._base else "base"
        self._write(kind, self.generation, body["stamp"], self.generations, self._entries(body))
        for generation in range(head, self.generation, -1):
            io.remove(self._path("round", generation), sync=True)

    def _apply(self, generation: int, stamp: str, fresh: Iterable[RowEntry]) -> None:
        for entry in fresh:
            named = self.rows.setdefault(entry.client, {})
            if entry.name in named:
                self.retired.append((named[entry.name], generation))
            named[entry.name] = entry
        self._stamps[generation] = stamp
        self.generation = generation

    def _forget(self) -> list[RowEntry]:
        needed, gone = [], []
        for entry, died in self.retired:
            if any(entry.born <= generation < died for generation in self.generations):
                needed.append((entry, died))
            else:
                gone.append(entry)
        self.retired = needed
        return gone

    def _sweep(self) -> None:
        """Remove files that a crash or a new base left behind."""
        for generation in self._numbers("base"):
            if generation < self._base:
                io.remove(self._path("base", generation))
        for generation in self._numbers("round"):
            if generation <= self._base:
                io.remove(self._path("round", generation))
        for path in self.folder.glob(f"*{io.TEMPORARY_SUFFIX}"):
            io.remove(path)

    def _numbers(self, kind: str) -> list[int]:
        names = (path.stem.removeprefix(f"{kind}-") for path in self.folder.glob(f"{kind}-*.json"))
        return sorted(int(name) for name in names if name.isdigit())

    def _path(self, kind: str, generation: int) -> Path:
        return self.folder / f"{kind}-{generation:09d}.json"

    @staticmethod
    def _stamp(before: str, generation: int, fresh: Iterable[RowEntry]) -> str:
        """Return the hash of everything written up to a generation."""
        return io.sha256(
            before.encode(), str(generation).encode(), *(repr(entry.to_json()).encode() for entry in fresh)
        )

    @staticmethod
    def _entries(body: dict[str, Any]) -> list[RowEntry]:
        return [RowEntry.from_json(fields) for fields in body["rows"]]

    def _write(
        self, kind: str, generation: int, stamp: str, generations: set[int], entries: Iterable[RowEntry]
    ) -> None:
        body = {
            "format": FORMAT,
            "kind": kind,
            "generation": generation,
            "stamp": stamp,
            "kept": sorted(generations),
            "rows": [entry.to_json() for entry in entries],
        }
        io.write_sealed(self._path(kind, generation), body)

    def _read(self, kind: str, generation: int) -> dict[str, Any]:
        path = self._path(kind, generation)
        body = io.read_sealed(path)
        if body["format"] != FORMAT:
            raise HansaError(f"{path} has store format {body['format']}; this Hansa reads format {FORMAT}.")
        if (body["kind"], body["generation"]) != (kind, generation):
            raise DamagedFileError(
                f"{path} holds {body['kind']} {body['generation']}: files were swapped. "
                "Restore it, or start from another checkpoint."
            )
        return body
