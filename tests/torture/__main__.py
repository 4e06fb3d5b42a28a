"""Long crash, corruption and message-loss tests: ``python -m torture`` with ``tests`` on the path, or ``make torture``.

``python -m torture kill malformed`` runs those two, each in a process of its own; ``--share 0.1`` runs a tenth of each,
``--count 5`` five of each. Each module has a function ``run`` that raises what does not hold and returns what it saw.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORMS = {
    "faults": (50, "power cuts before every call of every case, and every call failed in every way"),
    "corruption": (10_000, "damaged records, and a tenth as many damaged runs"),
    "malformed": (100_000, "malformed uploads"),
    "losses": (20, "seeds at every rate of loss for every preset"),
    "federation": (3000, "federations of every preset, with frames, sites and servers that are lost"),
    "folders": (100, "runs started at once; changed data and code"),
    "search": (200, "searches killed with SIGKILL between any two of their steps and resumed"),
    "asynchronous": (200, "asynchronous runs killed with SIGKILL and resumed"),
    "kill": (1000, "runs of every preset killed with SIGKILL and resumed"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FORMS], default=[], help="all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    parser.add_argument("--count", type=int, help="instead of the full counts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed, names = 0, options.names or list(FORMS)
    for name in names:
        count, what = FORMS[name]
        count = max(1, round(count * options.share)) if options.count is None else options.count
        if len(names) == 1:
            run_form(name, count, options.seed)
            continue
        print(f"\n{name}: {count} {what}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "torture", name, "--count", str(count), "--seed", str(options.seed)]
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: {'held' if code == 0 else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
        failed += code != 0
    return failed


def run_form(name: str, count: int, seed: int) -> None:
    """Run a form in this process."""
    # before torch is loaded: some fork, which a process with threads cannot
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    module = importlib.import_module(f"torture.{name}")
    with tempfile.TemporaryDirectory() as place:
        for what, times in sorted(module.run(count, Path(place), seed).items()):
            print(f"{what:50} {times:7}")


if __name__ == "__main__":
    sys.exit(main())
