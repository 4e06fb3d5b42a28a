"""Benchmark Hansa against its peers, plain PyTorch.

    python benchmarks/bench.py              everything, about 27 minutes; writes docs/benchmarks.md
    python benchmarks/bench.py --quick      without peers, about 4 minutes; only prints tables
    python benchmarks/bench.py --agreement  only check that all contenders compute the same thing

Peer environments, logs and results are stored in .bench/. A peer that fails or cannot be installed is reported and does
not stop the others.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import page
from harness.agreement import Check, agrees
from harness.contenders import CONTENDERS, Contender, compete, interpreters
from harness.points import Points
from harness.workloads import WORKLOADS, Workload, fashion, judge, write

ROOT = Path(__file__).parents[1]
QUICK = ("hansa-own-2", "hansa-catalogue-2", "hansa-own-avx2-2", "plain-2")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without peers and with few rounds")
    parser.add_argument("--only", nargs="*", help="names of the contenders", choices=[c.name for c in CONTENDERS])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="rounds of a repeat (default: the workload's, at most 4 if quick)")
    parser.add_argument("--repeats", type=int, help="repeats (default: the workload's, or 1 if quick)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--agreement", action="store_true", help="only check that all compute the same thing")
    parser.add_argument("--no-scaling", action="store_true", help="only the table of contenders")
    parser.add_argument(
        "--again", nargs="+", metavar="TABLE", help="measure these tables anew, keep the rest of the page"
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="where environments and results are kept")
    parser.add_argument(
        "--out", type=Path, help="the page to write (default: docs/benchmarks.md, or none if only parts are run)"
    )
    return parser.parse_args()


class Bench:
    """A benchmark under way; ``results`` is written down after every run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.root: Path = options.work
        self.root.mkdir(parents=True, exist_ok=True)
        names = options.only or [c.name for c in CONTENDERS if not options.quick or c.name in QUICK]
        self.contenders = [c for c in CONTENDERS if c.name in names]
        self.workloads = [WORKLOADS[name] for name in options.workloads]
        self.notes: list[str] = []
        self.results: dict[str, Any] = {name: {} for name in ("runs", "accuracy", "loss", "agreement", "missing")}
        self.results["machine"] = page.machine()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def keep(self) -> None:
        self.results["minutes"] = (time.monotonic() - self.began) / 60
        (self.root / "results.json").write_text(json.dumps(self.results, indent=1))

    def run(self) -> None:
        busy = page.busy()
        if busy > 0.05:
            self.say(f"something else uses {busy:.0%} of the machine: these numbers will mean little")
        data = self.root / "data"
        for old in data.glob("*-*-*.npz"):  # models of an earlier benchmark
            old.unlink()
        alone = not (self.options.no_scaling or self.options.agreement)
        needed = {workload.name for workload in self.workloads} | ({"W1", "W2"} if alone else set())
        for name in sorted(needed):
            self.write(WORKLOADS[name])
        self.results["note"] = "; ".join(self.notes)
        self.compete()
        if alone:
            self.results["scaling"] = Points(self.root, self.say, quick=self.options.quick).all()
        self.keep()

    def write(self, workload: Workload) -> None:
        """The arrays of a workload, and what data they are."""
        found, note = fashion()
        if note not in self.notes:
            self.notes.append(note)
            self.say(f"data: {note}")
        write(workload, found, self.root / "data")

    def again(self, tables: list[str]) -> None:
        """Measure some tables about Hansa alone anew, beside what the last whole run found."""
        self.results = json.loads((self.root / "results.json").read_text())
        found = Points(self.root, self.say).all(tables)
        self.results["scaling"] |= found
        told = f"{', '.join(found)} ({page.busy():.0%} busy before)"
        self.results["machine"]["measured again, in a later run"] = told
        (self.root / "results.json").write_text(json.dumps(self.results, indent=1))

    def compete(self) -> None:
        """All contenders in turn, as many times as there are repeats."""
        pythons, self.results["missing"] = interpreters(self.root, self.contenders, self.say)
        able = [c for c in self.contenders if c.peer is None or c.peer in pythons]
        check = Check(self.root, pythons, self.say, self.options.timeout)
        self.results["agreement"] = check.all(self.workloads, able)
        self.keep()
        if self.options.agreement:
            return
        asked = self.options.repeats or (1 if self.options.quick else 0)
        repeats = {workload.name: int(asked or workload.repeats) for workload in self.workloads}
        for repeat in range(1, max(repeats.values()) + 1):
            turn = repeat % len(able)
            for contender in able[turn:] + able[:turn]:  # another one begins each time
                for workload in self.workloads:
                    if workload.name in contender.only and repeat <= repeats[workload.name]:
                        self.one(contender, workload, pythons.get(contender.peer or ""), repeat)
            self.keep()
        for workload in self.workloads:
            self.judge(workload)

    def one(self, contender: Contender, workload: Workload, python: Path | None, repeat: int) -> None:
        runs = self.results["runs"].setdefault(workload.name, {}).setdefault(contender.name, [])
        if any(run["reason"] for run in runs):
            return  # what failed once is not waited for again
        try:
            rounds = int(self.options.rounds or (min(4, workload.rounds) if self.options.quick else workload.rounds))
            words: dict[str, Any] = {"python": python, "repeat": repeat, "timeout": self.options.timeout}
            run = compete(contender, workload, self.root, rounds=rounds, **words)
        except (OSError, ValueError, KeyError) as problem:  # an answer that is not one does not stop the rest
            run = {"reason": f"{type(problem).__name__}: {problem}", "wall": 0.0, "peak": 0}
        runs.append(run)
        told = run["reason"] and f"failed: {run['reason']}"
        told = told or f"{run['rate']:.0f} client-steps/s, {run['peak'] / page.MEGABYTE:.0f} MB, {run['wall']:.0f} s"
        self.say(f"{repeat}: {workload.name} {contender.name}: {told}")
        self.keep()

    def judge(self, workload: Workload) -> None:
        """The accuracy and loss of every contender that came to the end."""
        found, _ = fashion()
        for name, runs in self.results["runs"].get(workload.name, {}).items():
            if runs and not runs[-1]["reason"]:
                model = self.root / "data" / f"{workload.name}-{name}-{len(runs)}.npz"
                accuracy, loss = judge(workload, model, found)
                self.results["accuracy"].setdefault(workload.name, {})[name] = accuracy
                self.results["loss"].setdefault(workload.name, {})[name] = loss


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two benchmarks at a time would spoil each other's times and files."""
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"another benchmark is under way in {folder}: wait for it, or give another folder with --work")
        yield


def main() -> int:
    options = arguments()
    bench = Bench(options)
    with alone(options.work):
        if options.again:
            bench.again(options.again)
        else:
            bench.run()
    if not options.agreement:
        tell(bench, options)
    wrong = 0
    for part, text in (("runs", "Hansa itself failed"), ("agreement", "not the model of the reference")):
        for workload, found in bench.results.get(part, {}).items():
            for name, told in found.items():
                failed = name.startswith("hansa") and told[-1]["reason"] if part == "runs" else not agrees(told)
                if failed:
                    bench.say(f"{text}: {workload} {name}")
                    wrong = 1
    return wrong


def tell(bench: Bench, options: argparse.Namespace) -> None:
    """Print all tables, and write the page if everything was measured."""
    command = "make bench-quick" if options.quick else "make bench"
    parts = (options.quick, options.only, options.rounds, options.repeats, options.no_scaling)
    whole = bool(options.again) or (not any(parts) and len(options.workloads) == len(WORKLOADS))
    out = options.out or (ROOT / "docs" / "benchmarks.md" if whole else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page.page(bench.results, command, page.PUBLISHED))
        bench.say(f"written: {out}")
    print("\n" + page.page(bench.results, command))


if __name__ == "__main__":
    sys.exit(main())
