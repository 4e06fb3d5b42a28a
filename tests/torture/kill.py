"""kill -9 at random moments: every run, taken up again to its end, is to the bit the run that was never killed.

Runs of the command ``hansa run`` are killed and resumed. They are forked from one process that has torch loaded, so
that the moments fall into the run and not into imports; every tenth has another number of workers, one to four, at
every start.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hansa.core.keys import Key
from hansa.presets import catalogue
from hansa.runs.record import DiskStore, RunRecord

ROUNDS = 10
COMMON = ("data.name=synthetic", "data.clients=10", f"rounds={ROUNDS}", "local.steps=3", "checkpoint.minutes=60")
HALF = "sample={participation: 0.5}"
CASES: dict[str, tuple[str, ...]] = {
    "fedcams, two-way": ("fedcams", HALF, "compress.two_way=true"),
    "scaffold": ("scaffold", HALF),
    "fedavg": ("fedavg", HALF),
    "fedams": ("fedams", HALF),
    "fedcams": ("fedcams", HALF),
    "feddyn": ("feddyn", HALF),
    "cafga": ("cafga", "gossip.clusters=2"),
    "fedaware": ("fedaware", HALF),
    "fedaware, rows on disk": ("fedaware", HALF, "algorithm.momentum_storage=disk"),
    "dadam, models of their own": ("dadam",),
    "fedams in float64, clients lost": ("fedams", HALF, "dtype=float64", "quorum=3", "faults={before: 0.2, nan: 0.2}"),
}
CASES |= {name: (name,) for name in catalogue() if name not in {words[0] for words in CASES.values()}}
"""Those with state of every kind in settings of their own, and all other presets as they are."""


def command(words: Sequence[str], folder: Path, workers: int, every: int) -> list[str]:
    """``hansa run``, to begin the run in a folder or to go on with the one that is there."""
    preset, *changes = words
    sets = [argument for change in (*COMMON, *changes, f"checkpoint.every={every}") for argument in ("--set", change)]
    place = ["--out", str(folder), "--resume", "--workers", str(workers), "--quiet"]
    return ["run", "--preset", preset, *sets, *place]


def fork_command(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Run ``hansa`` in a fork of this process, with its output at the end of a file; return its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        from hansa.cli import main

        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        prepare()
        sys.argv = ["hansa", *arguments]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


class Child:
    """The command in a fork of this process, whose output goes to a file beside the run's folder."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log, self.pid = log, fork_command(arguments, log)
        self.code: int | None = None

    def wait(self, until: float | None = None) -> int | None:
        """The exit code, or None if it is still at work when the time has come."""
        while self.code is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() >= until:
                return None
            elif until is not None:
                time.sleep(min(0.005, max(0.0, until - time.monotonic())))
        return self.code

    def kill(self) -> bool:
        """Whether the kill came before the end."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL


def fingerprint(folder: Path, rounds: int = ROUNDS) -> dict[str, str]:
    """SHA-256 of all that a finished run comes to: server, moments, clients' rows, ledger, history, model, summary."""
    assert not list(folder.glob("run.db-*")), f"{folder}: a finished run has a log"
    with RunRecord(folder) as record:
        record.check_pages()
        state, meta, _ = record.load_checkpoint()
        store = DiskStore(record)
        assert store.verify() > 0 or not store.clients(), f"{folder}: rows that were not verified"
        rows = f"{store.generation} {store.digest()}"
        clients = list(record.client_blocks())
        recorded = [each for each, _ in record.rounds()]
    summary = json.loads((folder / "summary.json").read_text())
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [repr(line["round"]) for line in history] == [repr(line["round"]) for line in recorded]
    for timed in (*history, summary):  # the only numbers that may differ
        for name in ("seconds", "wall_seconds", "record_digest"):  # and what covers them
            timed.pop(name, None)
    found = [record["round"] for record in history]
    assert found == list(range(1, rounds + 1)), f"{folder}: the history has rounds {found}"
    return {
        "server": sha(state["server"]),
        "ledger": sha(state["ledger"]),
        "lost": sha(state["lost"]),
        "facts": sha({name: meta[name] for name in ("round", "run", "seed")}),
        "rows": sha(rows),
        "history": sha(history),
        "summary": sha(summary),
        "model": sha(load_file(folder / "model.safetensors")),
        "clients": sha(clients),
    }


def sha(tree: Any) -> str:
    """One SHA-256 over a tree, every byte of its tensors included."""
    state = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, dict):
            for name in sorted(node, key=str):
                state.update(f"{name!r}:".encode())
                add(node[name])
        elif isinstance(node, list):
            state.update(f"[{len(node)}".encode())
            for value in node:
                add(value)
        elif isinstance(node, torch.Tensor):
            state.update(f"{node.dtype}{tuple(node.shape)}".encode())
            state.update(node.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            state.update(repr(node).encode())

    add(tree)
    return state.hexdigest()


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def finish(child: Child) -> None:
    assert child.wait() == 0, f"exit code {child.code}: {child.log.read_text()[-2000:]}"


@dataclass(frozen=True)
class Unkilled:
    """A run that nobody disturbs: its name and settings, what comes of it, and how long it takes."""

    case: str
    words: Sequence[str]
    expected: Mapping[str, str]
    seconds: float

    @classmethod
    def of(cls, case: str, words: Sequence[str], folder: Path) -> Unkilled:
        began = time.monotonic()
        finish(Child(command(words, folder, 1, 1), log_of(folder)))
        return cls(case, words, fingerprint(folder), time.monotonic() - began)


def trial(number: int, seed: int, place: Path, unkilled: Sequence[Unkilled]) -> Counter[str]:
    """One run, killed one to three times and resumed to its end."""
    draw = Key(seed).child("kill", number).numpy()
    known, seen = unkilled[number % len(unkilled)], Counter[str]()
    folder = place / f"trial {number}"

    def start(every: int) -> Child:
        workers = int(draw.integers(1, 5)) if number % 10 == 9 else 1
        return Child(command(known.words, folder, workers, every), log_of(folder))

    while not seen["kills"]:  # a run that was quicker than the kill proves nothing
        shutil.rmtree(folder, ignore_errors=True)
        every = int(draw.integers(1, 4))
        for _ in range(int(draw.integers(1, 4))):
            child = start(every)
            until = time.monotonic() + float(draw.uniform(0, known.seconds))
            if child.wait(until) is not None or not child.kill():
                finish(child)
                break
            seen["kills"] += 1
        finish(start(every))
    found = fingerprint(folder)
    different = [name for name in known.expected if found[name] != known.expected[name]]
    assert not different, f"trial {number}, {known.case}: {', '.join(different)} differ from the unkilled run"
    shutil.rmtree(folder)
    seen.update(["equal to the unkilled run", known.case])
    return seen


def run(
    count: int, place: Path, seed: int = 0, jobs: int = 2, cases: Mapping[str, tuple[str, ...]] = CASES
) -> Counter[str]:
    """``count`` trials; returns the kills, and the trials by method."""
    for name in ("hansa.runs.experiment", "hansa.cli.app", "hansa.study.report.progress", "hansa.study.report"):
        importlib.import_module(name)  # once, for all that are forked
    torch.set_num_threads(1)
    unkilled = [Unkilled.of(case, words, place / case) for case, words in [*cases.items()][:count]]
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        trials = pool.map(partial(trial, seed=seed, place=place, unkilled=unkilled), range(count))
        return sum(trials, Counter[str]())
