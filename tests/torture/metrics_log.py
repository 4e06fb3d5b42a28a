"""Damage to metrics.jsonl: a resume either names it, or comes to the very history of the run that nobody damaged.

``python -m torture.metrics_log 1000`` (with ``tests`` on the path) damages the metrics of a stopped run in 1,000 ways
and resumes it; where the resume is refused, ``--fallback`` has to come to the same history.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hansa.config import from_preset
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs.experiment import Experiment
from hansa.runs.folder import RunFolder
from hansa.runs.store import io
from torture.disks import Hasty

ROUNDS, STOPPED = 9, 7
SMALL = (
    "data.name=synthetic",
    "data.clients=6",
    f"rounds={ROUNDS}",
    "local.steps=1",
    "workers=1",
    "checkpoint={every: 2, keep: 9}",
)
CASES = {"fedavg": ("faults={before: 0.3}",), "scaffold": ("sample={participation: 0.5}",)}
Draw = np.random.Generator


def _line(data: bytes, draw: Draw) -> tuple[list[bytes], int]:
    lines = data.splitlines(keepends=True)
    return lines, int(draw.integers(len(lines)))


def flip(data: bytes, draw: Draw, other: bytes) -> bytes:
    """One bit is another."""
    at = int(draw.integers(len(data)))
    return data[:at] + bytes([data[at] ^ 1 << int(draw.integers(8))]) + data[at + 1 :]


def digit(data: bytes, draw: Draw, other: bytes) -> bytes:
    """One digit is another: still JSON, still plausible."""
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    at = places[int(draw.integers(len(places)))]
    return data[:at] + str((int(chr(data[at])) + 1 + int(draw.integers(8))) % 10).encode() + data[at + 1 :]


def cut(data: bytes, draw: Draw, other: bytes) -> bytes:
    """The end is missing."""
    return data[: int(draw.integers(len(data)))]


def hole(data: bytes, draw: Draw, other: bytes) -> bytes:
    """Some bytes are missing in the middle."""
    at = int(draw.integers(len(data)))
    return data[:at] + data[at + 1 + int(draw.integers(40)) :]


def zeros(data: bytes, draw: Draw, other: bytes) -> bytes:
    """A stretch was never written."""
    at, size = int(draw.integers(len(data))), 1 + int(draw.integers(500))
    return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def forget(data: bytes, draw: Draw, other: bytes) -> bytes:
    """A line is missing."""
    lines, at = _line(data, draw)
    return b"".join(lines[:at] + lines[at + 1 :])


def twice(data: bytes, draw: Draw, other: bytes) -> bytes:
    """A line stands twice."""
    lines, at = _line(data, draw)
    return b"".join(lines[: at + 1] + lines[at:])


def swap(data: bytes, draw: Draw, other: bytes) -> bytes:
    """Two lines have changed places."""
    lines, at = _line(data, draw)
    to = (at + 1 + int(draw.integers(len(lines) - 1))) % len(lines)
    lines[at], lines[to] = lines[to], lines[at]
    return b"".join(lines)


def foreign(data: bytes, draw: Draw, other: bytes) -> bytes:
    """A line is another run's."""
    lines, at = _line(data, draw)
    lines[at] = other.splitlines(keepends=True)[at]
    return b"".join(lines)


def replaced(data: bytes, draw: Draw, other: bytes) -> bytes:
    """The whole file is another run's, whole and sealed."""
    return other


def latin(data: bytes, draw: Draw, other: bytes) -> bytes:
    """Bytes that are no text."""
    at = int(draw.integers(len(data)))
    return data[:at] + b"\xff\xfe" + data[at:]


def gone(data: bytes, draw: Draw, other: bytes) -> bytes:
    """Nothing is left."""
    return b""


DAMAGES: tuple[Callable[[bytes, Draw, bytes], bytes], ...] = (
    flip, digit, cut, hole, zeros, forget, twice, swap, foreign, replaced, latin, gone,
)  # fmt: skip


def untimed(folder: Path) -> list[str]:
    """The history but for wall-clock seconds, as text: a NaN equals itself."""
    return [str({name: value for name, value in r.items() if name != "seconds"}) for r in RunFolder(folder).history]


class Laboratory:
    """A stopped run of each case, the history it has to come to, and another run's numbers."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.expected: dict[str, list[str]] = {}
        self.other: dict[str, bytes] = {}
        for case, words in CASES.items():
            config = from_preset(case, [*SMALL, *words])
            Experiment.new(config, place / f"{case} whole").execute()
            self.expected[case] = untimed(place / f"{case} whole")
            self._stop(config, place / f"{case} stopped")
            self._stop(config.model_copy(update={"seed": 1}), place / f"{case} other")
            self.other[case] = (place / f"{case} other" / "metrics.jsonl").read_bytes()

    @staticmethod
    def _stop(config, folder: Path) -> None:  # type: ignore[no-untyped-def]
        Experiment.new(config, folder).execute([lambda run, record: record["round"] == STOPPED])

    def trial(self, number: int, seed: int = 0) -> str:
        """Damage the numbers of one run and resume it; returns what came of it."""
        case = list(CASES)[number % len(CASES)]
        damage = DAMAGES[number // len(CASES) % len(DAMAGES)]
        draw = Key(seed).child("journal", number).numpy()
        folder = self.place / f"trial {number}"
        shutil.copytree(self.place / f"{case} stopped", folder)
        path = folder / "metrics.jsonl"
        before = path.read_bytes()
        path.write_bytes(damage(before, draw, self.other[case]))
        outcome = "harmless" if path.read_bytes() == before else "went on, exactly"
        try:
            Experiment.resume(folder).execute()
        except HansaError as error:
            if "metrics.jsonl" not in str(error):
                raise
            outcome = "refused, then fell back exactly"
            Experiment.resume(folder, fallback=True).execute()
        assert untimed(folder) == self.expected[case], f"trial {number}, {damage.__name__}: another history"
        shutil.rmtree(folder)
        return outcome


def run(count: int, place: Path, seed: int = 0, first: int = 0) -> Counter[str]:
    """``count`` trials; returns how they ended."""
    logging.getLogger("hansa").setLevel(logging.ERROR)
    try:
        with io.use_disk(Hasty()):
            laboratory = Laboratory(place)
            return Counter(laboratory.trial(number, seed) for number in range(first, first + count))
    finally:
        logging.getLogger("hansa").setLevel(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for outcome, number in sorted(run(options.count, Path(place), options.seed).items()):
            print(f"{outcome:34} {number:6}")
    print(f"{options.count} of {options.count} damaged histories: none went on with wrong numbers")


if __name__ == "__main__":
    main()
