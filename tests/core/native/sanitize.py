"""The native kernels under the address and undefined-behaviour sanitizers: ``make sanitize``.

    python tests/core/native/sanitize.py [pytest arguments]

Builds a copy of the package whose kernels are instrumented, shows that an error would be noticed, and runs the tests of
the kernels on it, with every instruction set of this machine. The package in use is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/core/native/test_network.py",
    "tests/core/native/test_random_networks.py",
    "tests/core/native/test_random_images.py",
    "tests/core/native/test_winograd.py",
    "tests/core/native/test_client_kernel.py",
    "tests/core/native/test_cohort_kernel.py",
    "tests/core/vectors/test_kernels.py",
    "tests/core/vectors/test_arithmetic.py",
    "tests/compress/test_chunked.py",
    "tests/compress/test_same_bytes.py",
    "tests/fuzz/test_fuzz_decode.py",
]
PLAIN = ["-O1", "-g", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-shared"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
CANARIES = {
    "heap-buffer-overflow": "int *p = malloc(8); int x = p[n]; free(p); return x;",
    "signed integer overflow": "return 2147483647 + n;",
    "out of bounds for type": "int a[2] = {1, 2}; return a[n];",
}
"""Errors that must be noticed, with n = 2."""


def compiler() -> str:
    found = next((name for name in (os.environ.get("CC", "cc"), "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        sys.exit("sanitize: there is no C compiler on the path: install gcc.")
    return found


def runtime(cc: str) -> str:
    """The sanitizers' libraries, which must be loaded before Python's."""
    names = [subprocess.check_output([cc, f"-print-file-name={name}"], text=True).strip() for name in (
        "libasan.so", "libubsan.so",
    )]  # fmt: skip
    missing = [name for name in names if not Path(name).is_absolute()]
    if missing:
        sys.exit(f"sanitize: {cc} has no {' and no '.join(missing)}: install gcc with its sanitizers.")
    return ":".join(names)


def environment(preload: str, source: Path | None = None) -> dict[str, str]:
    """Leaks are not looked for: Python itself leaves some. Pools are off, so that every vector has fences around it."""
    words = {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",
    }
    if source is not None:
        words["PYTHONPATH"] = os.pathsep.join([str(source), str(ROOT / "tests")])
    return {**os.environ, **words}


def notices(cc: str, preload: str, folder: Path) -> dict[str, bool]:
    """Whether each canary is noticed."""
    found = {}
    for place, (error, body) in enumerate(CANARIES.items()):
        source, library = folder / f"canary{place}.c", folder / f"canary{place}.so"
        source.write_text(
            f'#include <stdlib.h>\n__attribute__((visibility("default"))) int sing(int n) {{ {body} }}\n', "ascii"
        )
        subprocess.run([cc, *PLAIN, "-O0", *SANITIZERS, "-w", str(source), "-o", str(library)], check=True)
        call = f"import ctypes; ctypes.CDLL({str(library)!r}).sing(2)"
        done = subprocess.run([sys.executable, "-c", call], env=environment(preload), capture_output=True, text=True)
        found[error] = done.returncode != 0 and error in done.stderr
    return found


def main(arguments: Sequence[str]) -> int:
    cc = compiler()
    preload = runtime(cc)
    with TemporaryDirectory(prefix="hansa-sanitize-") as place:
        folder = Path(place)
        silent = [error for error, noticed in notices(cc, preload, folder).items() if not noticed]
        if silent:
            sys.exit(f"sanitize: the sanitizers of {cc} did not notice: {', '.join(silent)}.")
        source = folder / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        native = source / "hansa" / "core" / "native"
        library = native / f"_kernels{EXTENSION_SUFFIXES[0]}"
        sources = sorted(map(str, native.glob("*.c")))
        subprocess.run([cc, *PLAIN, *SANITIZERS, *sources, "-lm", "-o", str(library)], check=True)
        tests = [*arguments] or TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={source} tests"]
        return subprocess.run([*command, *tests], cwd=ROOT, env=environment(preload, source)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
