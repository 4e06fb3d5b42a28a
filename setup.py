"""The native kernels: optional, so that an install without a C compiler succeeds and Hansa runs without them."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/hansa/core/native")

setup(
    ext_modules=[
        Extension(
            "hansa.core.native._kernels",
            sources=sorted(path.as_posix() for path in NATIVE.glob("*.c")),
            depends=sorted(path.as_posix() for path in NATIVE.glob("*.h")),
            # Plain arithmetic: contraction to fused multiply-add is allowed, assumptions about NaN are not.
            extra_compile_args=[
                "-O3",
                "-g0",
                "-std=gnu11",
                "-ffp-contract=fast",
                "-fno-math-errno",
                "-fvisibility=hidden",
            ],
            libraries=["m"],
            optional=True,
        )
    ]
)
