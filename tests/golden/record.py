"""Records the golden hashes of this machine: ``python tests/golden/record.py``.

Hashes are facts about a commit whose results are known to be right, so record from such a commit, never to make a
failing test pass. Cases that are recorded already stay. ``--replace`` records anew; with ``--only`` and a pattern of
names these cases alone, which are then removed where they were recorded on other machines.
``HANSA_GOLDEN=all pytest tests/golden`` compares.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import hansa
from golden import runner


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
    parser.add_argument("--only", default="*", help="a pattern of case names to replace")
    options = parser.parse_args()
    if options.only != "*" and not options.replace:
        parser.error("--only is for --replace")
    golden, failed = runner.recorded(), False
    with tempfile.TemporaryDirectory() as folder:
        for kernels in runner.KERNELS:
            failed |= not one_set(kernels, Path(folder), golden, options)
    sys.exit(int(failed))


def one_set(kernels: str, folder: Path, golden: dict[str, Any], options: argparse.Namespace) -> bool:
    """Record the cases with one set of kernels; false where something is wrong."""
    facts = runner.results(kernels, folder, "--describe")["arithmetic"]
    known = golden.get(facts["machine"], {}).get(facts["kernels"])
    if facts["kernels"] == "none":
        print(f"{kernels}: these kernels are not available here")
        return True
    cases = runner.results(kernels, folder, "--only", options.only)["cases"]
    if errors := [f"{name}: {case['error']}" for name, case in cases.items() if "error" in case]:
        print(f"{kernels}: nothing recorded, {len(errors)} cases fail", *errors, sep="\n  ")
        return False
    if known is not None and not options.replace:
        missing = {name: case for name, case in cases.items() if name not in known["cases"]}
        known["cases"].update(missing)
        runner.GOLDEN.write_text(dumped(golden), encoding="utf-8")
        print(f"{kernels}: {len(missing)} of {len(cases)} cases added to those recorded from {known['recorded']}")
        return True
    if options.only != "*":
        if known is None:
            print(f"{kernels}: nothing is recorded here; record all cases")
            return False
        changed = {name: case for name, case in cases.items() if known["cases"].get(name) != case}
        for machine, sets in golden.items():
            if facts["kernels"] in sets:
                other = sets[facts["kernels"]]
                other["cases"] = {name: case for name, case in other["cases"].items() if name not in changed}
                other["cases"].update(changed if machine == facts["machine"] else {})
        runner.GOLDEN.write_text(dumped(golden), encoding="utf-8")
        print(f"{kernels}: {len(changed)} of {len(cases)} cases recorded anew")
        return True
    entry: dict[str, Any] = {"recorded": f"hansa {hansa.__version__}, {commit()}"}
    golden.setdefault(facts["machine"], {})[facts["kernels"]] = {**entry, "cases": cases}
    runner.GOLDEN.write_text(dumped(golden), encoding="utf-8")
    print(f"{kernels}: {len(cases)} cases recorded ({facts['machine']}; {facts['kernels']})")
    return True


if __name__ == "__main__":
    main()
