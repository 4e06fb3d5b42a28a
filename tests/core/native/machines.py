"""The kernels of other processors and systems, run by an emulator, against the plain ones of this machine.

    python tests/core/native/machines.py neon     # 64-bit Arm: cross compiler and qemu-user (make test-neon)
    python tests/core/native/machines.py windows  # Windows on x86-64: mingw-w64 and wine (make test-mingw)
    python tests/core/native/machines.py here     # the instruction sets of this machine, nothing emulated

Each program of `results` calls every kernel of an instruction set with the same random inputs: all lengths modulo the
widths of vectors and tiles, buffers at every alignment that end at a page that cannot be touched, and networks of
random shapes. Bytes, digests and inner products must have the same bits everywhere; the rest agrees but for rounding.
The reference is ``base`` of this machine, which the tests beside this file compare with PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "src" / "hansa" / "core" / "native"
SOURCES = Path(__file__).parent / "results"
FLAGS = ["-O3", "-g0", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"]
"""Those of setup.py; tests/test_release.py compares them."""
EXACT, CLOSE, TRAINED = range(3)
TOLERANCE = {CLOSE: {"f": 2e-6, "d": 1e-5}, TRAINED: {"f": 5e-4, "d": 5e-4}}
"""Largest difference relative to the largest entry. Float64 results may be sums of float32."""


@dataclass(frozen=True)
class Machine:
    """Another machine: its instruction sets, the compilers that build for it, and the emulators."""

    about: str
    sets: tuple[str, ...]
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    emulators: tuple[str, ...]
    packages: str


MACHINES = {
    "neon": Machine(
        "64-bit Arm", ("neon", "base"), ("aarch64-linux-gnu-gcc",), ("-static",),
        ("qemu-aarch64-static", "qemu-aarch64"), "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static",
    ),
    # GCC keeps 32-byte vectors on a stack that Windows aligns to 16 bytes: every such access must allow that.
    "windows": Machine(
        "Windows on x86-64", ("avx512", "avx2", "base"), ("x86_64-w64-mingw32-gcc",),
        ("-static", "-Wa,-muse-unaligned-vector-move"), ("wine64", "/usr/lib/wine/wine64"),
        "gcc-mingw-w64-x86-64 wine64",
    ),
}  # fmt: skip


class Case(NamedTuple):
    """The results of one call."""

    name: str
    how: int
    values: np.ndarray[Any, Any]


def cases(path: Path) -> Iterator[Case]:
    """Yield the results that a program wrote."""
    types: dict[str, np.dtype[Any]] = {"f": np.dtype("<f4"), "d": np.dtype("<f8"), "B": np.dtype("u1")}
    with path.open("rb") as file:
        while line := file.readline():
            name, kind, how, count = line.decode("ascii").rstrip("\n").split("|")
            values = np.frombuffer(file.read(int(count) * types[kind].itemsize), types[kind])
            assert len(values) == int(count), f"{path} ends within {name}"
            yield Case(name, int(how), values)


def differences(reference: Path, found: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of cases of each kernel, and a line for each case that differs."""
    counts: dict[str, int] = {}
    wrong = []
    for wanted, given in zip(cases(reference), cases(found), strict=True):
        assert (wanted.name, wanted.how, len(wanted.values)) == (given.name, given.how, len(given.values))
        kernel = wanted.name.split()[0]
        counts[kernel] = counts.get(kernel, 0) + 1
        if wanted.how == EXACT:
            fine = wanted.values.tobytes() == given.values.tobytes()
        else:
            bound = TOLERANCE[wanted.how][wanted.values.dtype.char]
            true, here = wanted.values.astype(np.float64), given.values.astype(np.float64)
            fine = bool(np.abs(true - here).max(initial=0) <= bound * max(np.abs(true).max(initial=0), 1e-30))
        if not fine:
            wrong.append(f"{wanted.name} ({len(wanted.values)} values, case {counts[kernel]})")
    return counts, wrong


def present(names: Sequence[str]) -> str | None:
    """Return the first program of these that exists."""
    return next((found for name in names if (found := shutil.which(name))), None)


def build(compiler: str, flags: Sequence[str], folder: Path, library: Path | None = None) -> Path:
    """Build the program, with all kernels or on a library that has them."""
    program = folder / "results.exe"
    kernels = sorted(NATIVE.glob("*.c")) if library is None else [library, f"-Wl,-rpath,{library.parent}"]
    command = [compiler, *FLAGS, *flags, f"-I{NATIVE}", *sorted(SOURCES.glob("*.c")), *kernels, "-lm", "-o", program]
    subprocess.run(list(map(str, command)), check=True)
    return program


def run(command: Sequence[str | Path], name: str, folder: Path) -> Path | None:
    """Run the program for one instruction set; return its results, or None if the machine does not run that set."""
    path = folder / f"results-{name}"
    quiet = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(folder / "wine")}
    done = subprocess.run(
        [*map(str, command), name, path.name], cwd=folder, env=quiet, capture_output=True, text=True, check=False
    )
    if done.returncode == 3:
        return None
    if done.returncode or done.stdout.strip() != name:
        raise RuntimeError(f"results {name}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return path


def compare(reference: Path, found: Path, title: str) -> bool:
    """Print the outcome of one comparison and return whether all agrees."""
    counts, wrong = differences(reference, found)
    print(f"{title}: {len(counts)} kernels, {sum(counts.values())} results, {len(wrong)} differ", flush=True)
    for line in wrong[:20]:
        print(f"  {line}")
    return not wrong


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in (*MACHINES, "here"):
        sys.exit(f"usage: machines.py {' | '.join([*MACHINES, 'here'])}")
    here = present([os.environ.get("CC", "cc"), "gcc", "clang"])
    if here is None:
        print("SKIPPED: no C compiler on the path, and so no reference.")
        return 0
    with TemporaryDirectory(prefix="hansa-machines-") as place:
        folder = Path(place)
        machine = MACHINES.get(arguments[0])
        if machine is not None:
            compiler, emulator = present(machine.compilers), present(machine.emulators)
            if compiler is None or emulator is None:
                missing = [*machine.compilers] * (compiler is None) + [machine.emulators[0]] * (emulator is None)
                print(f"SKIPPED: {machine.about}: {' and '.join(missing)} not installed. Debian: {machine.packages}")
                return 0
        own = build(here, [], folder)
        reference = run([own], "base", folder)
        assert reference is not None
        reference = reference.rename(folder / "reference")
        if machine is None:
            command, sets = [str(own)], ("avx512", "avx2", "neon", "base")
        else:
            command, sets = [str(emulator), str(build(str(compiler), machine.flags, folder))], machine.sets
        fine = True
        for name in sets:
            found = run(command, name, folder)
            if found is None:
                print(f"{name}: NOT RUN: {Path(command[0]).name} does not have these instructions")
                continue
            fine &= compare(reference, found, f"{machine.about if machine else 'here'}, {name}")
            found.unlink()
        return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
