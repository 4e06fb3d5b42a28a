"""The native kernels: optional, so that an install without a C compiler succeeds and Hansa runs without them.

GCC and Clang compile them. Microsoft's compiler does not: on Windows they are built by clang-cl if it is on the path.
"""

import shutil
import sys
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


setup(
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
