"""The native kernels, and README as a package index shows it.

The kernels are optional: an install without a C compiler succeeds, and Hansa runs without them.

GCC and Clang compile them. Microsoft's compiler does not: on Windows they are built by clang-cl if it is on the path.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/hansa/core/native")
# Plain arithmetic: contraction to fused multiply-add is allowed, assumptions about NaN are not.
FLAGS = ["-O3", "-g0", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"]


class BuildKernels(build_ext):
    """Chooses the compiler and its flags. The library is loaded by ctypes: it is not a Python module."""

    def build_extensions(self) -> None:
        kind = self.compiler.compiler_type
        if kind == "msvc":
            clang = shutil.which("clang-cl")
            if clang is None:
                print(
                    "hansa: the native kernels are NOT built: install LLVM (clang-cl) and build again.", file=sys.stderr
                )
                self.extensions = []
                return
            self.compiler.initialize()
            self.compiler.cc = clang
        for extension in self.extensions:
            if kind == "msvc":
                extension.extra_compile_args = [f"/clang:{flag}" for flag in FLAGS]
            elif kind == "mingw32":  # the stack of Windows is aligned to 16 bytes, and GCC keeps wider vectors there
                extension.extra_compile_args = [*FLAGS, "-Wa,-muse-unaligned-vector-move"]
            else:
                extension.extra_compile_args = [*FLAGS, "-fvisibility=hidden"]
                extension.libraries = ["m"]
        super().build_extensions()

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


def long_description(readme: str, address: str | None) -> str:
    """Return README with absolute links; as it is while [project.urls] has no Repository."""
    if address is None:
        return readme

    def absolute(link: re.Match[str]) -> str:
        return f"]({address}/{'raw' if link[1].endswith('.png') else 'blob'}/HEAD/{link[1]})"

    return re.sub(r"\]\((?!https?://|#)([^)]+)\)", absolute, readme)


if __name__ == "__main__":
    urls = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    setup(
        long_description=long_description(Path("README.md").read_text(encoding="utf-8"), urls.get("Repository")),
        long_description_content_type="text/markdown",
        cmdclass={"build_ext": BuildKernels},
        ext_modules=[
            Extension(
                "hansa.core.native._kernels",
                sources=sorted(path.as_posix() for path in NATIVE.glob("*.c")),
                depends=sorted(path.as_posix() for path in NATIVE.glob("*.h")),
                optional=True,
            )
        ],
    )
