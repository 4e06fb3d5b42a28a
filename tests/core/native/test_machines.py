"""`machines` notices what differs, and builds as setup.py does; the comparison itself is `make test-neon`."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from core.native import machines
from hansa.core import native

ROOT = Path(__file__).parents[3]


def written(path: Path, *cases: tuple[str, str, int, list[float]]) -> Path:
    kinds = {"f": "<f4", "d": "<f8", "B": "u1"}
    path.write_bytes(
        b"".join(
            f"{name}|{kind}|{how}|{len(values)}\n".encode() + np.array(values, kinds[kind]).tobytes()
            for name, kind, how, values in cases
        )
    )
    return path


@pytest.mark.parametrize(
    ("kind", "how", "here", "there", "fine"),
    [
        ("B", machines.EXACT, [1, 10, 3], [1, 10, 3], True),
        ("B", machines.EXACT, [1, 10, 3], [1, 11, 3], False),
        ("f", machines.EXACT, [0.0, 1.0], [-0.0, 1.0], False),
        ("f", machines.CLOSE, [1.0, 1e-9], [1.000001, 0.0], True),
        ("f", machines.CLOSE, [1.0, 0.0], [1.0, 1e-5], False),
        ("f", machines.CLOSE, [1.0, 2.0], [1.0, float("nan")], False),
        ("f", machines.TRAINED, [1.0], [1.0001], True),
        ("d", machines.TRAINED, [1.0], [1.001], False),
    ],
)
def test_results_that_differ_are_named(tmp_path, kind, how, here, there, fine):
    same = ("mean32", "f", machines.CLOSE, [1.0, 2.0])
    reference = written(tmp_path / "reference", same, ("digest of words", kind, how, here))
    found = written(tmp_path / "found", same, ("digest of words", kind, how, there))
    counts, wrong = machines.differences(reference, found)
    assert counts == {"mean32": 1, "digest": 1}
    assert wrong == ([] if fine else [f"digest of words ({len(here)} values, case 1)"])


def test_the_flags_are_those_of_the_build():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert ast.literal_eval(re.search(r"^FLAGS = (\[.*\])$", setup, re.MULTILINE)[1]) == machines.FLAGS


def test_every_kernel_of_the_table_is_called():
    """Also those of a later version: a kernel that the programs do not call is not tested on other machines."""
    header = (machines.NATIVE / "native.h").read_text(encoding="utf-8")
    table = header[header.index("/* The kernels of one instruction set. */") : header.index("} hansa_kernels;")]
    kernels = re.findall(r"\(\*(\w+)\)\(", table)
    assert len(kernels) > 30
    called = "".join(path.read_text(encoding="utf-8") for path in machines.SOURCES.glob("*.c"))
    assert [name for name in kernels if f"k->{name}(" not in called] == []


def test_the_instruction_sets_of_this_machine_agree(tmp_path):
    compiler = machines.present([os.environ.get("CC", "cc"), "gcc", "clang"])
    if compiler is None or not sys.platform.startswith("linux") or not native.available():
        pytest.skip("needs Linux, a C compiler and the native kernels")
    (library,) = machines.NATIVE.glob("_kernels*.so")
    program = machines.build(compiler, ["-O1"], tmp_path, library)
    reference = machines.run([program], "base", tmp_path)
    for name in set(native.instruction_sets()) - {"base"}:
        found = machines.run([program], name, tmp_path)
        counts, wrong = machines.differences(reference, found)
        assert wrong == [], name
        assert len(counts) > 30
    assert machines.run([program], "mmx", tmp_path) is None
