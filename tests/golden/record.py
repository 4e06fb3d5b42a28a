"""Records the golden hashes of this machine: ``python tests/golden/record.py``.

Hashes are facts about a commit whose results are known to be right, so record from such a commit, never to make a
failing test pass. Cases that are recorded already stay. ``--replace`` records anew what differs, with ``--only`` of the
cases whose names match a pattern; it is then removed where it was recorded on other machines.
``HANSA_GOLDEN=all pytest tests/golden`` compares.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import hansa
from golden import cases, runner


def commit() -> str:
    """The commit of the hansa in use, as far as git knows it."""
    command = ["git", "-C", str(Path(hansa.__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def dumped(golden: dict[str, Any]) -> str:
    """JSON with one line a case, so that a difference of two versions can be read."""
    machines = []
    for machine, sets in sorted(golden.items()):
        entries = []
        for kernels, entry in sorted(sets.items()):
            lines = [f"    {json.dumps(name)}: {json.dumps(case)}" for name, case in sorted(entry["cases"].items())]
            head = "".join(f"   {json.dumps(key)}: {json.dumps(entry[key])},\n" for key in entry if key != "cases")
            cases = ",\n".join(lines)
            entries.append(f'  {json.dumps(kernels)}: {{\n{head}   "cases": {{\n{cases}\n   }}\n  }}')
        machines.append(f" {json.dumps(machine)}: {{\n" + ",\n".join(entries) + "\n }")
    return "{\n" + ",\n".join(machines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replace", action="store_true", help="also where this machine has hashes already")
    parser.add_argument("--only", default="*", help="a pattern of case names")
    options = parser.parse_args()
    logging.getLogger("hansa").setLevel(logging.ERROR)
    right = [one_set(kernels, options) for kernels in runner.KERNELS]
    sys.exit(not all(right))


def one_set(kernels: str, options: argparse.Namespace) -> bool:
    """Record the cases with one set of kernels; false where something is wrong."""
    with runner.using(kernels):
        facts = runner.arithmetic()
        if facts["kernels"] == "none":
            print(f"{kernels}: these kernels are not available here")
            return True
        found = runner.run_cases([name for name in cases.CASES if fnmatch.fnmatchcase(name, options.only)])
    if errors := [f"{name}: {case['error']}" for name, case in found.items() if "error" in case]:
        print(f"{kernels}: nothing recorded, {len(errors)} cases fail", *errors, sep="\n  ")
        return False
    golden = runner.recorded()
    started: dict[str, Any] = {"recorded": f"hansa {hansa.__version__}, {commit()}", "cases": {}}
    known = golden.setdefault(facts["machine"], {}).setdefault(facts["kernels"], started)
    if options.replace and options.only == "*":
        known["recorded"] = started["recorded"]
    changed = {
        name: case
        for name, case in found.items()
        if name not in known["cases"] or (options.replace and known["cases"][name] != case)
    }
    for sets in golden.values() if options.replace else ():
        for name in changed:
            sets.get(facts["kernels"], started)["cases"].pop(name, None)
    known["cases"].update(changed)
    runner.GOLDEN.write_text(dumped(golden), encoding="utf-8")
    print(f"{kernels}: {len(changed)} of {len(found)} cases recorded ({facts['machine']}; {facts['kernels']})")
    return True


if __name__ == "__main__":
    main()
