"""All long forms, one after the other: ``python -m torture`` (with ``tests`` on the path), as ``make torture`` does.

``python -m torture kill malformed`` runs those two; ``--share 0.1`` runs a tenth of each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

COUNTS = {
    "faults": (50, "power cuts before every call of every case, and every call failed in every way"),
    "corruption": (10_000, "damaged records, and a tenth as many damaged runs"),
    "malformed": (100_000, "malformed uploads"),
    "losses": (20, "seeds at every rate of loss for every preset"),
    "federation": (3000, "federations of every preset, with frames, sites and servers that are lost"),
    "folders": (100, "runs started at once; half as many overwrites and sweeps; links; changed data and code"),
    "search": (200, "searches killed with SIGKILL between any two of their steps and resumed"),
    "asynchronous": (200, "asynchronous runs killed with SIGKILL and resumed"),
    "kill": (1000, "runs of every preset killed with SIGKILL and resumed"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COUNTS)}; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    options = parser.parse_args()
    if unknown := set(options.names) - set(COUNTS):
        parser.error(f"no such form: {', '.join(sorted(unknown))}. Known: {', '.join(COUNTS)}.")
    failed = []
    for name in options.names or COUNTS:
        count, what = COUNTS[name]
        count = max(1, round(count * options.share))
        print(f"\n{name}: {count} {what}", flush=True)
        began = time.monotonic()
        # a process each: one of them forks, which must be done before anything has started threads
        code = subprocess.run([sys.executable, "-m", f"torture.{name}", str(count)], check=False).returncode
        print(f"{name}: {'held' if code == 0 else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] if code else []
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
