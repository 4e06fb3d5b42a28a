"""Start-up cost, in processor time of all processes.

    python startup.py TURNS ANSWER.json

Measures the help, commands that do not train, the import, and a first round of `hansa run` on embedded data, each in a
fresh process. Reports medians after a warm-up turn, which compiles bytecode as an installation does.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HANSA = [sys.executable, "-c", "import sys; from hansa_command import main; sys.exit(main())"]  # what `hansa` is
LISTS = ("--help", "presets", "parts", "data list")
LOOKING = (*LISTS, "config show fedavg", "cite fedcams", "show first", "report first")
FIRST_ROUND = [*HANSA, "run", "fedavg", "--rounds", "1", "--out", "new"]
CASES = {
    **{f"`hansa {words}`": ([*HANSA, *words.split()], 0.4) for words in LOOKING},
    "`import torch` alone": ([sys.executable, "-c", "import torch"], None),
    "`import hansa`": ([sys.executable, "-c", "import hansa"], 0.5),
    "first round of `hansa run fedavg` on embedded data": (FIRST_ROUND, 3.0),
}


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: list[str], folder: str) -> float:
    """Seconds of one process, in a folder with a run called first."""
    shutil.rmtree(Path(folder, "new"), ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = spent()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
    return spent() - before


def main() -> None:
    turns, answer = int(sys.argv[1]), Path(sys.argv[2])
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        measure([*HANSA, "run", "fedavg", "--rounds", "2", "--out", "first", "--quiet"], folder)
        for _ in range(turns + 1):
            for name, (command, _) in CASES.items():
                taken[name].append(measure(command, folder))
    found = {name: {"seconds": statistics.median(taken[name][1:]), "target": aim} for name, (_, aim) in CASES.items()}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
