"""The speed of an installed wheel against that of this checkout, interleaved, in processor time.

    python benchmarks/installed.py build/try/bin/python [--turns 15] [--demos 3] [--within 0.03] [--out ANSWER.json]

`make bench-wheel` builds and installs the wheel first. Each installation has one process on one thread that runs a
round of W1 or W2 when it is asked; the two take turns. `hansa demo --tiny` runs as a process of its own, with its
workers. Ratios are of medians, wheel over checkout; the exit code is 1 if one is beyond the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKLOADS = ("W1", "W2")


def serve() -> None:
    """Run a round of the workload that each line names; answer with the processor time of a step."""
    import torch
    from torch.nn.functional import cross_entropy

    import hansa
    from hansa.core import native
    from harness import workloads
    from ratios import Turns

    torch.set_num_threads(1)
    found, _ = workloads.fashion()
    turns = {}
    for name in WORKLOADS:
        work = workloads.WORKLOADS[name]
        algorithm = hansa.presets.fedavg(
            local_lr=work.lr, steps=work.steps, batch_size=work.batch, participation=work.cohort / work.clients
        )
        turns[name] = Turns(
            algorithm, hansa.Task(work.module, cross_entropy, workloads.deal(found, work)), work.steps_a_round
        )
        turns[name].turn()
    answer({"version": hansa.__version__, "place": str(Path(hansa.__file__).parent), "kernels": native.describe()})
    for line in sys.stdin:
        turns[line.strip()].turn()
        answer({"seconds": turns[line.strip()].seconds[-1]})


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


class Installation:
    """A Python with its Hansa, and the process that runs rounds."""

    def __init__(self, python: Path, folder: str) -> None:
        self.python, self.folder = python, folder
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables = {**variables, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [python, Path(__file__).resolve(), "--serve"], cwd=folder, env=self.variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.facts = self._read()
        self.seconds: dict[str, list[float]] = {name: [] for name in (*WORKLOADS, "demo")}

    def turn(self, name: str) -> None:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        self.seconds[name].append(self._read()["seconds"])

    def demo(self) -> None:
        before = os.times()
        command = [self.python.with_name("hansa"), "demo", "--tiny", "--quiet"]
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            subprocess.run(command, cwd=place, env=self.variables, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        self.seconds["demo"].append(spent)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"installed: {self.python} ended with code {self.process.wait()}.")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="the Python of the environment with the wheel")
    parser.add_argument("--turns", type=int, default=15, help="rounds of each workload")
    parser.add_argument("--demos", type=int, default=3, help="runs of the demo")
    parser.add_argument("--within", type=float, default=0.03, help="bound on the ratios' distance from 1")
    parser.add_argument("--out", type=Path, help="file for the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="installed-") as folder:
        pair = {
            "wheel": Installation(options.python.absolute(), folder),
            "checkout": Installation(Path(sys.executable), folder),
        }
        for name, each in pair.items():
            print(f"{name}: hansa {each.facts['version']}, kernels {each.facts['kernels']}, {each.facts['place']}")
        if len({each.facts["place"] for each in pair.values()}) != 2:
            raise SystemExit("installed: both run the same Hansa: install the wheel in an environment of its own.")
        for turn in range(options.turns):
            for name in WORKLOADS:  # the first of a turn alternates
                for each in list(pair.values())[:: 1 if turn % 2 else -1]:
                    each.turn(name)
        for turn in range(options.demos):
            for each in list(pair.values())[:: 1 if turn % 2 else -1]:
                each.demo()
        for each in pair.values():
            each.close()
    medians = {
        name: {each: statistics.median(pair[each].seconds[name]) for each in pair}
        for name in (*WORKLOADS, "demo")
        if pair["wheel"].seconds[name]
    }
    ratios = {name: found["wheel"] / found["checkout"] for name, found in medians.items()}
    for name, found in medians.items():
        unit = "s" if name == "demo" else "ms a step"
        scale = 1 if name == "demo" else 1000
        times = ", ".join(f"{each} {seconds * scale:.4g} {unit}" for each, seconds in found.items())
        print(f"{name}: {ratios[name]:.3f} times the processor time of the checkout ({times})")
    beyond = [name for name, ratio in ratios.items() if abs(ratio - 1) > options.within]
    print(f"within {options.within:.0%}: {'no: ' + ', '.join(beyond) if beyond else 'yes'}")
    if options.out is not None:
        options.out.write_text(json.dumps({"medians": medians, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 1 if beyond else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
