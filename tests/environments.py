"""Run tests in unusual environments: ``python tests/environments.py`` (``make test-environments``).

Each environment gets a copy of the working tree in a new folder. Names choose some of them. Arguments after ``--`` go
to pytest and name the tests to run: by default the fast tier with the command line, run folders and data.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["--fast", "tests"], ["tests/cli", "tests/runs", "tests/data"]
NOBODY = 65534
LEFT_OUT = {".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build", "runs"}
READING = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
"""For a user that cannot reach Python's folder: it may read everything, and write only what is its own."""
TRIAL = """
import subprocess, sys, torch
assert sys.base_prefix == sys.argv[1], f"{sys.executable} fell back to {sys.base_prefix}"
subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""
"""What the user must be able to do: run this Python, not another of the machine, and start it again as workers do."""


@dataclass(frozen=True)
class Environment:
    """What differs: variables (None removes one), the umask, the user, the folder's name, an ignored hangup."""

    about: str
    variables: dict[str, str | None] = field(default_factory=dict)
    umask: int = 0o022
    user: int | None = None
    folder: str = "hansa"
    nohup: bool = False


C = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
ENVIRONMENTS = {
    "no-home": Environment("HOME is not set", {"HOME": None, "XDG_CACHE_HOME": None, "XDG_DATA_HOME": None}),
    "read-only-home": Environment("HOME cannot be written, even by root", {"HOME": "/proc/self/fdinfo"}),
    "tmpdir": Environment("TMPDIR has spaces", {"TMPDIR": "{place}/a temporary folder"}),
    "umask": Environment("umask 077", umask=0o077),
    "locale": Environment("LANG=C", C),
    "path": Environment("a path with spaces and umlauts", folder="größe und maß"),
    "nohup": Environment("a hangup is ignored", nohup=True),
    "user": Environment("another user than root", {"HOME": "{place}"}, user=NOBODY),
    "all": Environment(
        "all of these at once",
        {"HOME": None, "XDG_CACHE_HOME": None, "XDG_DATA_HOME": None, "TMPDIR": "{place}/a temporary folder", **C},
        umask=0o077,
        user=NOBODY,
        folder="größe und maß",
        nohup=True,
    ),
}


def prepare(environment: Environment, place: Path) -> tuple[Path, dict[str, str], Callable[[], None]]:
    """Copy the tree; return the copy, the variables, and what a child does before it becomes the program."""
    copy = place / environment.folder

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__" or (Path(folder) == ROOT and name in LEFT_OUT)]

    shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
    variables = {**os.environ, "PYTHONPATH": str(copy / "src")}
    for name, value in environment.variables.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value.format(place=place)
    if "TMPDIR" in environment.variables:
        Path(variables["TMPDIR"]).mkdir()
    if environment.user is not None:
        for folder, _, files in os.walk(place):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, environment.user, environment.user, follow_symlinks=False)

    def become() -> None:
        os.umask(environment.umask)
        if environment.nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    return copy, variables, become


def launcher(environment: Environment) -> list[str] | str:
    """Return the command that starts another one as the environment's user, or why there is none."""
    if environment.user is None:
        return []
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which("setpriv") is None:
        return "there is no setpriv"
    command = ["setpriv", f"--reuid={environment.user}", f"--regid={environment.user}", "--clear-groups"]
    for more in ([], READING):
        trial = [*command, *more, sys.executable, "-c", TRIAL, sys.base_prefix]
        if subprocess.run(trial, cwd="/", capture_output=True, check=False).returncode == 0:
            return [*command, *more]
    return f"user {environment.user} cannot run {sys.executable} and start it again: its folder is closed to that user"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}; each by default")
    own = sys.argv[1:]
    rest = own[own.index("--") + 1 :] if "--" in own else []
    options = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}. Known: {', '.join(ENVIRONMENTS)}.")
    results: dict[str, str] = {}
    for name in options.names or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        prefix = launcher(environment)
        if isinstance(prefix, str):
            results[name] = f"NOT RUN: {prefix}"
            continue
        with tempfile.TemporaryDirectory(prefix="environment-") as place:
            os.chmod(place, 0o755)
            copy, variables, become = prepare(environment, Path(place))
            codes = []
            for tests in [rest] if rest else TESTS:
                command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
                print(f"\n{name}: {environment.about}: pytest {' '.join(tests)}", flush=True)
                done = subprocess.run(command, cwd=copy, env=variables, preexec_fn=become, check=False)
                codes.append(done.returncode)
        results[name] = "passed" if not any(codes) else "FAILED"
    print("\n" + "\n".join(f"{name:16} {result}" for name, result in results.items()))
    return sum(result == "FAILED" for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
