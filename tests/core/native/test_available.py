"""The kernels are optional: what is said where they are absent, and that they are there where they can be."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from core.native.models import compile_network
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.vectors import kernels

ROOT = Path(__file__).parents[3]
COMPILER = next((name for name in os.environ.get("CC", "cc gcc clang").split() if shutil.which(name)), None)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2))


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here, so the native kernels cannot be built")
def test_where_a_compiler_is_found_the_kernels_are_there() -> None:
    if os.environ.get("HANSA_NATIVE") == "off":
        pytest.skip("HANSA_NATIVE=off")
    assert native.unavailable_reason() is None, (
        f"{COMPILER} is on the path, but: {native.unavailable_reason()}. Install again."
    )
    assert native.instruction_set() in native.instruction_sets()
    assert "base" in native.instruction_sets()


def test_hidden_kernels_say_why_and_everything_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANSA_NATIVE", "off")
    assert not native.available()
    assert native.instruction_set() is None
    assert "HANSA_NATIVE=off" in str(native.unavailable_reason())
    assert compile_network(linear(), (4,)) is None
    with pytest.raises(HansaError, match="HANSA_NATIVE=off"):
        kernels.squared_norm(torch.ones(3))


def test_a_library_that_does_not_load_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in native.EXTENSION_SUFFIXES:
        (tmp_path / f"_kernels{suffix}").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    assert "does not load" in str(native.unavailable_reason())


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")
def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANSA_NATIVE", "neon9")
    with pytest.raises(HansaError, match="neon9"):
        native.load()
    assert "this machine runs" in str(native.unavailable_reason())


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")
def test_structures_of_another_size_are_refused_before_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Data(abi.Data):
        _fields_ = [("more", ctypes.c_int64)]  # noqa: RUF012

    class Extra(ctypes.Structure):
        _fields_ = [("one", ctypes.c_int64)]

    built, known = next(Path(native.__file__).parent.glob("_kernels*.so")), len(abi.STRUCTURES)
    for place, (structures, complaint) in enumerate(
        [
            ((abi.Stage, Data, *abi.STRUCTURES[2:]), "Data takes 40 bytes, not 48"),
            (abi.STRUCTURES[:-1], f"it does not have the {known - 1} structures Stage, "),
            ((*abi.STRUCTURES, Extra), f"it does not have the {known + 1} structures Stage, "),
            (abi.STRUCTURES, None),
        ]
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        shutil.copy(built, folder)
        monkeypatch.setattr(abi, "STRUCTURES", structures)
        monkeypatch.setattr(native, "__file__", str(folder / "__init__.py"))
        told = native.unavailable_reason()
        assert told is None if complaint is None else complaint in str(told)
        assert told is None or "Install again" in told


def test_a_build_without_a_compiler_succeeds_and_builds_nothing(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-compiler")
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "t"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CC": missing, "LDSHARED": missing}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_kernels*"))


def test_structures_are_read_from_the_header():
    """native.h is the one description: names in order, pointers as addresses, arrays, and constants."""
    assert [name for name, _ in abi.StepParameters._fields_] == [
        *("velocity", "anchor", "shift"),
        *("lr", "prox_weight", "weight_decay", "momentum", "max_grad_norm"),
    ]
    for structure in (abi.Client, abi.Turn):
        assert abi.record(structure).itemsize == ctypes.sizeof(structure)
    assert abi.record(abi.Client)["key"].shape == (2,)
    assert (abi.MIX, abi.GATHER, abi.LINEAR, abi.BAD_SUM) == (-1, -6, 1, 5)
