"""kill -9 between any two steps of a search: resumed, it ends with the ``search.json`` of an unbroken one.

Searches of the command ``hansa sweep --search optuna`` are killed and resumed, each one to four times. A step is the
report of a round, the end of a trial, or the writing of ``search.json``. The search has trials that finish, are pruned
and fail, and points that are tried again. It is resumed from another copy of the configuration file and with another
number of workers, which must not matter.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hansa.core.keys import Key
from hansa.runs.search import RunningTrial, Search
from torture.kill import fork_command

CONFIG = """\
name: searched
rounds: 6
data: {name: synthetic, clients: 6, options: {largest: 60}}
model: logistic
local: {lr: 0.05, steps: 2, batch_size: 10}
checkpoint: {every: 2}
"""
GRID = ("local.lr=0.0005,0.01,0.3,1e30", "local.steps=1,6", "--seeds", "0,3")
TRIALS = 9
STATUSES = ("complete", "pruned", "failed")


def command(config: Path, folder: Path, workers: int) -> list[str]:
    """The arguments of ``hansa`` that start the search, or continue it."""
    place = ["--out", str(folder), "--quiet", "--workers", str(workers)]
    return ["sweep", str(config), *GRID, "--search", "optuna", "--trials", str(TRIALS), *place]


def count_steps(at_step: Callable[[bytes], None]) -> None:
    """Call ``at_step`` before and after every step of the searches of this process.

    Its letter is ``p`` before a pruned trial ends, ``f`` before a failed one does, and a dot otherwise.
    """

    def surrounded(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            at_step(b"p" if getattr(arguments[0], "pruned", False) else b"f" if options.get("failed") else b".")
            answer = function(*arguments, **options)
            at_step(b".")
            return answer

        return call

    for owner, name in ((RunningTrial, "report"), (RunningTrial, "finish"), (Search, "record")):
        setattr(owner, name, surrounded(getattr(owner, name)))


def start(arguments: list[str], log: Path, kill_at: int | None) -> tuple[int, bytes]:
    """Run the command in a fork that kills itself at a step; return its exit code and a letter for each step."""
    reading, writing = os.pipe()
    steps = 0

    def at_step(letter: bytes) -> None:
        nonlocal steps
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        os.write(writing, letter)

    pid = fork_command(arguments, log, lambda: count_steps(at_step))
    os.close(writing)
    with os.fdopen(reading, "rb") as counted:
        letters = counted.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), letters


class Unbroken:
    """The search that nothing disturbs: the bytes of its ``search.json``, and its steps."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config = place / "searched.yaml"
        self.config.write_text(CONFIG)
        self.other_config = place / "elsewhere" / "copied.yaml"
        self.other_config.parent.mkdir()
        shutil.copy(self.config, self.other_config)
        folder = place / "unbroken"
        code, letters = start(command(self.config, folder, 1), place / "unbroken.log", None)
        assert code == 0, (place / "unbroken.log").read_text()[-2000:]
        self.steps = len(letters)
        self.ends = [letters.index(letter) for letter in (b"p", b"f")]
        self.expected = (folder / "search.json").read_bytes()
        missing = [status for status in STATUSES if f'"{status}"'.encode() not in self.expected]
        assert not missing, f"no trial is {', '.join(missing)}: the search proves too little"

    def check(self, name: str, kills: list[int], workers: int) -> int:
        """Kill a search at these steps of its starts, resume it to its end, and compare; return the kills that came."""
        folder, log = self.place / name, self.place / f"{name}.log"
        codes = [start(command(self.config, folder, 1), log, kills[0])[0]]
        for kill_at in [*kills[1:], None]:
            if codes[-1] != 0:
                assert codes[-1] == -signal.SIGKILL, f"{name}: exit code {codes[-1]}: {log.read_text()[-2000:]}"
                codes.append(start(command(self.other_config, folder, workers), log, kill_at)[0])
        assert codes[-1] == 0, f"{name}: exit code {codes[-1]}: {log.read_text()[-2000:]}"
        equal = (folder / "search.json").read_bytes() == self.expected
        assert equal, f"{name}: search.json differs after kills at steps {kills} of {self.steps}"
        shutil.rmtree(folder)
        return codes.count(-signal.SIGKILL)


def run(count: int, place: Path, seed: int = 0) -> Counter[str]:
    """Check ``count`` killed searches; return the number of kills, and the steps of an unbroken search.

    The first two searches are killed before a trial's end, pruned and failed. The others are spread evenly over the
    steps. Up to three more kills of each search are random.
    """
    for name in ("optuna", "hansa.runs.experiment", "hansa.cli.app", "hansa.study.report.progress"):
        importlib.import_module(name)  # once, for all that are forked
    torch.set_num_threads(1)
    unbroken = Unbroken(place)
    total = 0
    for number in range(count):
        draw = Key(seed).child("search-kill", number).numpy()
        first = [*unbroken.ends, number * unbroken.steps // count][min(number, 2)]
        more = [int(draw.integers(unbroken.steps)) for _ in range(int(draw.integers(4)))]
        total += unbroken.check(f"search {number}", [first, *more], 2 if number % 10 == 9 else 1)
    return Counter({"kills": total, "steps": unbroken.steps, "equal to the unbroken search": count})
