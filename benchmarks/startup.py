"""What it takes until something happens, in processor time of all processes.

    python startup.py TURNS ANSWER.json

The help, the import, and a first round of `hansa run` on embedded data, each in a fresh process; medians.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HANSA = [sys.executable, "-c", "import sys; from hansa_command import main; sys.exit(main())"]  # what `hansa` is
CASES = {
    "`hansa --help`": ([*HANSA, "--help"], 0.5),
    "`import torch` alone": ([sys.executable, "-c", "import torch"], None),
    "`import hansa`": ([sys.executable, "-c", "import hansa"], 0.5),
    "first round of `hansa run fedavg` on embedded data": (
        [*HANSA, "run", "fedavg", "--rounds", "1", "--out", "first"],
        3.0,
    ),
}


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: list[str], turns: int) -> float:
    taken = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            before = spent()
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
            taken.append(spent() - before)
    return statistics.median(taken)


def main() -> None:
    turns, answer = int(sys.argv[1]), Path(sys.argv[2])
    found = {name: {"seconds": measure(command, turns), "target": aim} for name, (command, aim) in CASES.items()}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
