"""kill -9 at random moments: every run, taken up again to its end, is to the bit the run that was never killed.

``python -m torture.kill 1000`` (with ``tests`` on the path) kills and resumes 1,000 runs of the command ``hansa run``.
Most are forked from one process that has torch loaded, so that the moments fall into the run and not into imports;
every tenth is a fresh interpreter, and every twentieth has another number of workers, one to four, at every start.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is loaded: a process with threads cannot be forked
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import torch
from safetensors.torch import load_file

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.presets import catalogue
from hansa.runs.folder import RunFolder
from hansa.runs.record import RunRecord

ROUNDS = 10
COMMON = ("data.name=synthetic", "data.clients=10", f"rounds={ROUNDS}", "local.steps=3", "checkpoint.minutes=60")
HALF = "sample={participation: 0.5}"
CASES: dict[str, tuple[str, ...]] = {
    "fedavg": ("fedavg", HALF),
    "fedams": ("fedams", HALF),
    "fedcams": ("fedcams", HALF),
    "fedcams, two-way": ("fedcams", HALF, "compress.two_way=true"),
    "scaffold": ("scaffold", HALF),
    "feddyn": ("feddyn", HALF),
    "cafga": ("cafga", "gossip.clusters=2"),
    "fedaware": ("fedaware", HALF),
    "fedaware, rows on disk": ("fedaware", HALF, "algorithm.momentum_storage=disk"),
    "dadam, models of their own": ("dadam",),
    "fedams in float64, clients lost": ("fedams", HALF, "dtype=float64", "quorum=3", "faults={before: 0.2, nan: 0.2}"),
}
CASES |= {name: (name,) for name in catalogue() if name not in {words[0] for words in CASES.values()}}
"""Those with state of every kind in settings of their own, and all other presets as they are."""


def command(case: str, folder: Path, workers: int, every: int) -> list[str]:
    """``hansa run``, to begin the run in a folder or to go on with the one that is there."""
    preset, *words = CASES[case]
    changes = (*COMMON, *words, f"checkpoint.every={every}")
    sets = [argument for change in changes for argument in ("--set", change)]
    place = ["--out", str(folder), "--resume", "--workers", str(workers), "--quiet"]
    return ["run", "--preset", preset, *sets, *place]


class Child:
    """The command in a process of its own, whose output goes to a file beside the run's folder."""

    def __init__(self, arguments: list[str], log: Path, fresh: bool) -> None:
        self.code: int | None = None
        self.fresh: subprocess.Popen[bytes] | None = None
        self.log = log
        with log.open("ab") as output:
            if fresh:
                start = [sys.executable, "-c", "from hansa.cli import main; main()", *arguments]
                self.fresh = subprocess.Popen(start, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
                self.pid = self.fresh.pid
                return
            self.pid = os.fork()
            if self.pid == 0:
                self._be(arguments, output.fileno())

    def _be(self, arguments: list[str], output: int) -> None:
        code = 1
        try:
            from hansa.cli import main

            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["hansa", *arguments]
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)

    def wait(self, until: float | None = None) -> int | None:
        """The exit code, or None if it is still at work when the time has come."""
        while self.code is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                if self.fresh is not None:
                    self.fresh.returncode = self.code  # it is ours to wait for
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
        record.database.check_pages()
        state, meta = record.load_checkpoint()
        store = record.open_rows()
        assert store.verify() > 0 or not store.clients(), f"{folder}: rows that were not verified"
        rows = f"{store.generation} {store.digest()}"
        clients = [repr(tables) for _, tables in record.client_blocks()]
        recorded = [each.record for each in record.rounds()]
    summary = json.loads((folder / "summary.json").read_text())
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [repr(line["round"]) for line in history] == [repr(line["round"]) for line in recorded]
    for timed in (*history, summary):  # the only numbers that may differ
        for name in ("seconds", "wall_seconds", "record_digest", "metrics_sha256"):  # and what covers them
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


class Unkilled:
    """The runs that nobody disturbs: what comes of them, and how long the longest takes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.expected: dict[str, dict[str, str]] = {}
        self.seconds = 0.0

    def add(self, case: str) -> None:
        if case not in self.expected:
            folder = self.place / f"unkilled {case}"
            began = time.monotonic()
            finish(Child(command(case, folder, 1, 1), log_of(folder), fresh=False))
            self.seconds = max(self.seconds, time.monotonic() - began)
            self.expected[case] = fingerprint(folder)


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def finish(child: Child) -> None:
    assert child.wait() == 0, f"exit code {child.code}: {child.log.read_text()[-2000:]}"


def kind(number: int) -> tuple[str, bool, int]:
    """The method of a trial, whether it is a fresh interpreter, and its workers."""
    return list(CASES)[number % len(CASES)], number % 10 == 9, 2 if number % 20 == 19 else 1


def some(workers: int, draw: np.random.Generator) -> int:
    """One worker, or in trials with several another number at every start."""
    return 1 if workers == 1 else int(draw.integers(1, 5))


def trial(number: int, seed: int, place: Path, unkilled: Unkilled) -> Counter[str]:
    """One run, killed one to three times and resumed to its end; returns where it was killed."""
    draw = Key(seed).child("kill", number).numpy()
    case, fresh, workers = kind(number)
    expected, seconds = unkilled.expected[case], unkilled.seconds
    seen: Counter[str] = Counter()
    while not seen["kills"]:  # a run that was quicker than the kill proves nothing
        folder = place / f"trial {number}"
        shutil.rmtree(folder, ignore_errors=True)
        every = int(draw.integers(1, 4))
        for _ in range(int(draw.integers(1, 4))):
            child = Child(command(case, folder, some(workers, draw), every), log_of(folder), fresh)
            if fresh:  # most of its time goes into starting: let some rounds pass
                rounds = int(draw.integers(ROUNDS))
                while closed(folder) < rounds and child.wait(time.monotonic() + 0.005) is None:
                    pass
            if child.wait(time.monotonic() + float(draw.uniform(0, 0.2 if fresh else seconds))) is not None:
                finish(child)
                break
            if not child.kill():
                finish(child)
                break
            seen.update(kills=1)
            seen[f"at round {closed(folder)}"] += 1
        finish(Child(command(case, folder, some(workers, draw), every), log_of(folder), fresh))
    found = fingerprint(folder)
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, f"trial {number}, {case}: {', '.join(different)} differ from the unkilled run"
    shutil.rmtree(folder)
    seen[case] += 1
    return seen


def closed(folder: Path) -> int:
    """The rounds that a killed run has recorded."""
    try:
        return len(RunFolder(folder).history)
    except HansaError:  # it has none yet
        return 0


def share(work: Callable[[int], Counter[str]], numbers: range, jobs: int) -> Counter[str]:
    """The trials shared out to forked processes, each with an account of its own."""
    pipes = []
    for first in range(jobs):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                total: Counter[str] = Counter()
                for number in numbers[first::jobs]:
                    total += work(number)
                os.write(write, json.dumps(total).encode())
                code = 0
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        os.close(write)
        pipes.append((pid, read))
    total = Counter[str]()
    codes = []
    for pid, read in pipes:
        with os.fdopen(read) as answer:
            text = answer.read()
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        total += Counter(json.loads(text or "{}"))
    assert not any(codes), "a killed run did not come to the result of the unkilled one"
    return total


def run(count: int, place: Path, seed: int = 0, jobs: int = 2, first: int = 0) -> Counter[str]:
    """``count`` trials; returns the kills, by the round that they fell into, and the trials by method."""
    for name in ("hansa.runs.experiment", "hansa.cli.app", "hansa.study.report.progress", "hansa.study.report"):
        importlib.import_module(name)  # once, for all that are forked
    torch.set_num_threads(1)
    place.mkdir(parents=True, exist_ok=True)
    unkilled = Unkilled(place)
    numbers = range(first, first + count)
    for number in numbers:
        unkilled.add(kind(number)[0])
    return share(lambda number: trial(number, seed, place, unkilled), numbers, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        seen = run(options.count, Path(place), options.seed, options.jobs, options.first)
    for case in CASES:
        print(f"{case:34} {seen[case]:4} of {seen[case]} equal to the unkilled run")
    rounds = [f"{number}: {seen[f'at round {number}']}" for number in range(ROUNDS + 1)]
    print(f"kills by rounds closed before them: {', '.join(rounds)}")
    print(
        f"{options.count} runs killed {seen['kills']} times and resumed: {options.count} of {options.count} SHA-equal"
    )


if __name__ == "__main__":
    main()
