"""The tables about Hansa alone: what the engine adds to the steps, and how rounds grow."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import processes
from harness.contenders import CLEAN, CONTENDERS, HERE, compete
from harness.workloads import WORKLOADS

Say = Callable[[str], None]
Row = dict[str, Any]
GIGABYTE = 1 << 30


class Points:
    """Runs points, each in a process of its own, and keeps what came of them. ``quick`` takes fewer of them."""

    def __init__(self, root: Path, say: Say, *, quick: bool = False, timeout: float = 400.0) -> None:
        self.root, self.say, self.quick, self.timeout = root, say, quick, timeout

    def all(self, only: Sequence[str] = ()) -> dict[str, list[Row]]:
        turns = 1 if self.quick else 4
        tables: dict[str, Callable[[], Iterable[Row]]] = {
            "startup": lambda: self._rows("startup.py", [1 if self.quick else 3]),
            "eager": lambda: self._rows("eager.py", [turns]),
            "overhead": self.overhead,
            "population": self.population,
            "participants": self.participants,
            "dimension": self.dimension,
            "ratios": lambda: self._rows("ratios.py", ["gossip", 2 * turns]),
            "studies": lambda: self._rows("side_by_side.py", [3]),
            "scale": lambda: self._rows("ratios.py", ["scale", 5]),
            "aware": self.aware,
            "vectors": self.vectors,
        }
        if self.quick:
            tables = {name: tables[name] for name in ("startup", "eager", "overhead", "ratios", "vectors")}
        if unknown := set(only) - set(tables):
            raise SystemExit(f"no table {', '.join(unknown)}: there are {', '.join(tables)}")
        found = {}
        for name, table in tables.items():
            if only and name not in only:
                continue
            self.say(f"scaling: {name}")
            found[name] = list(table())
        return found

    def overhead(self) -> Iterable[Row]:
        """Each round followed by its own steps without the engine, in one run."""
        cases = [("W2", "hansa-own-2")] if self.quick else [
            ("W1", "hansa-own-1"), ("W1", "hansa-own-2"), ("W2", "hansa-own-1"), ("W2", "hansa-own-2"),
        ]  # fmt: skip
        for workload, name in cases:
            contender = next(one for one in CONTENDERS if one.name == name)
            ended = compete(
                contender,
                WORKLOADS[workload],
                self.root,
                python=None,
                rounds=6 if self.quick else 20 if workload == "W1" else 40,
                repeat=0,
                timeout=self.timeout,
                variant=f"{contender.variant} bare",
            )
            row: Row = {"workload": workload, "contender": contender.label, "reason": ended["reason"]}
            if not ended["reason"]:
                rounds, bare = (ended[what][1:] for what in ("round", "bare"))
                shares = [1 - steps / whole for steps, whole in zip(bare, rounds, strict=True)]  # drift hits both alike
                row |= {"round": statistics.median(rounds), "steps": statistics.median(bare)}
                row["share"] = statistics.median(shares)
            yield row

    def population(self) -> Iterable[Row]:
        """More clients, as many taking part; and the frugal case, 100 of 10,000."""
        counts = (100, 10_000) if self.quick else (100, 1000, 10_000)
        yield from self._scaled(
            [{**_CNN, "clients": count, "cohort": 10, "rounds": 3 if self.quick else 5} for count in counts],
            passes=1 if self.quick else 3,
        )
        if not self.quick:
            yield from self._scaled([{**_CNN, "clients": 10_000, "cohort": 100, "rounds": 2}])

    def participants(self) -> Iterable[Row]:
        """More of 1,000 clients taking part."""
        points = [{**_MLP, "clients": 1000, "cohort": count, "rounds": 5} for count in (10, 50, 100, 200)]
        return self._scaled(points)

    def dimension(self) -> Iterable[Row]:
        """Larger models: d from 29 thousand to 11 million."""
        points = [
            {**_CNN, "clients": 100, "cohort": 4, "rounds": 3},
            {**_CNN, "model": "cifar_cnn", "images": "", "steps": 4, "clients": 100, "cohort": 4, "rounds": 3},
            {**_MLP, "clients": 100, "cohort": 10, "rounds": 5},
            {
                **_CNN,
                "model": "resnet18",
                "images": "",
                "steps": 2,
                "batch": 20,
                "clients": 100,
                "cohort": 2,
                "rounds": 2,
            },
        ]
        return self._scaled(points)

    def aware(self) -> Iterable[Row]:
        """Momentum rows on disk; the naive form that holds all of them beside it, where they fit."""
        large = 2000
        room = shutil.disk_usage(self.root).free
        while large > 200 and large * 4_000_000 * 1.5 > room:
            large //= 2
        for how, clients in (("naive", 200), ("disk", 200), ("disk", large)):
            rows = self.root / "rows"
            row = self._point("aware_rows.py", f"aware-{how}-{clients}", [how, clients, 1_000_000, 20, 2, rows])
            yield {"form": how, "clients": clients, **row}

    def vectors(self) -> Iterable[Row]:
        """What the server and the wire do with eleven million numbers, against a copy of them."""
        found, reason = self._told("vectors.py", ["--repeats", 5 if self.quick else 15, "--out"])
        if reason:
            yield {"what": "all", "reason": reason}
            return
        copy = found["seconds"]["copy"]
        for name, seconds in found["seconds"].items():
            target = found["targets"].get(name)
            yield {"what": name, "reason": "", "seconds": seconds, "copies": seconds / copy, "target": target}

    def _rows(self, script: str, words: list[Any]) -> Iterable[Row]:
        """The rows that a script answers by their names."""
        found, reason = self._told(script, words)
        for name, row in (found or {"all": {}}).items():
            yield {"what": name, "reason": reason, **row}

    def _told(self, script: str, words: list[Any]) -> tuple[dict[str, Any], str]:
        """What a script answers, or why it did not."""
        stem = "-".join([script.removesuffix(".py"), *(word for word in words[:1] if str(word).isalpha())])
        answer = self.root / "answers" / f"{stem}.json"
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.unlink(missing_ok=True)
        ended = processes.run(
            [sys.executable, HERE / script, *map(str, words), answer],
            self.root / "logs" / f"{stem}.log",
            timeout=self.timeout,
            environment={**CLEAN, "OMP_NUM_THREADS": "1"},
        )
        reason = ended.reason or ("" if answer.is_file() else "ended without an answer")
        if reason:
            self.say(f"  {stem}: {reason}")
            return {}, reason
        self.say(f"  {stem}: {ended.seconds:.0f} s")
        return json.loads(answer.read_text()), ""

    def _scaled(self, points: list[Row], passes: int = 1) -> Iterable[Row]:
        """Points of `scaling.py`, taken in turn as often as asked."""
        found: list[list[Row]] = [[] for _ in points]
        for turn in range(passes):
            for place, point in enumerate(points):
                where = {**point, "images": str(self.root / "data" / "W1.npz") if point["images"] else ""}
                stem = f"scaling-{point['model']}-{point['clients']}-{point['cohort']}-{turn}"
                given = self.root / "jobs" / f"{stem}.json"
                given.parent.mkdir(parents=True, exist_ok=True)
                given.write_text(json.dumps(where))
                found[place].append(self._point("scaling.py", stem, [given]))
        for point, rows in zip(points, found, strict=True):
            good = [row for row in rows if not row["reason"]]
            row = {**point, **(rows[0] if not good else _together(good))}
            if good:
                row["rate"] = point["cohort"] * point["steps"] / row["round"]
            pairs = [pair for pair in zip(rows, found[0], strict=True) if not any(each["reason"] for each in pair)]
            if pairs and len(points) > 1:  # ratios within a pass: the machine drifts between passes
                medians = [[statistics.median(each["processor"]) for each in pair] for pair in pairs]
                row["ratio"] = statistics.median(own / first for own, first in medians)
            yield row

    def _point(self, script: str, stem: str, words: list[Any]) -> Row:
        answer = self.root / "answers" / f"{stem}.json"
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.unlink(missing_ok=True)
        ended = processes.run(
            [sys.executable, HERE / script, *map(str, words), answer],
            self.root / "logs" / f"{stem}.log",
            timeout=self.timeout,
            environment=CLEAN,
        )
        reason = ended.reason or ("" if answer.is_file() else "ended without an answer")
        row: Row = {"reason": reason, "peak": ended.peak, "wall": ended.seconds}
        if reason:
            self.say(f"  {stem}: {reason}")
            return row
        row |= json.loads(answer.read_text())
        row["round"] = statistics.median(row["seconds"])
        self.say(f"  {stem}: {row['round']:.3f} s a round, {row['peak'] / GIGABYTE:.2f} GB")
        return row


_CNN: Row = {"model": "cnn_29k", "steps": 24, "batch": 50, "workers": 2, "images": "W1"}
_MLP: Row = {"model": "mlp", "steps": 10, "batch": 20, "workers": 2, "images": "W1"}


def _together(rows: list[Row]) -> Row:
    """Several passes as one: all rounds, the largest memory."""
    seconds = [second for row in rows for second in row["seconds"]]
    return {
        **rows[0],
        "seconds": seconds,
        "round": statistics.median(seconds),
        "peak": max(row["peak"] for row in rows),
    }
