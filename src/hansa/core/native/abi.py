"""The ctypes view of the C library. Structures, kernels and constants are parsed from native.h."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import CFUNCTYPE, Array, Structure, c_char_p, c_double, c_float, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_HEADER = re.sub(r"/\*.*?\*/", "", (Path(__file__).parent / "native.h").read_text(encoding="utf-8"), flags=re.DOTALL)
_TYPES: dict[str, Any] = {
    "int64_t": c_int64, "uint64_t": c_uint64, "uint32_t": c_uint32, "double": c_double, "float": c_float, "void": None,
}  # fmt: skip


def _ctype(declaration: str) -> Any:
    """Return the ctypes type of a C declaration; all pointers except strings are addresses."""
    if declaration.split()[:2] == ["const", "char"]:
        return c_char_p
    return c_void_p if "*" in declaration else _TYPES[declaration.replace("const ", "").split()[0]]


def _fields(name: str) -> Iterator[tuple[str, Any]]:
    """Return the fields of a structure, in order."""
    body = re.search(rf"typedef struct \{{([^{{}}]*)\}} hansa_{name};", _HEADER)
    assert body is not None
    for statement in filter(None, map(str.strip, body[1].split(";"))):
        function = re.fullmatch(r"([^(]*)\(\*(\w+)\)\((.*)\)", statement, re.DOTALL)
        if function:
            yield function[2], CFUNCTYPE(_ctype(function[1]), *map(_ctype, map(str.strip, function[3].split(","))))
            continue
        base = re.match(r"(?:const )?\w+", statement)
        assert base is not None
        for declarator in statement[base.end() :].split(","):
            field = re.search(r"(\w+)(?:\[(\d+)\])?$", declarator.strip())
            assert field is not None
            ctype = _ctype(f"{base[0]} {declarator}")
            yield field[1], ctype * int(field[2]) if field[2] else ctype


def _constants() -> dict[str, int]:
    """Return the enumerations and numbers of the header by name, without HANSA_."""
    values = {name: int(value) for name, value in re.findall(r"#define HANSA_(\w+) (\d+)", _HEADER)}
    for enumeration in re.findall(r"enum \{([^}]*)\}", _HEADER):
        for number, entry in enumerate(enumeration.split(",")):
            name, _, value = (part.strip() for part in entry.partition("="))
            values[name.removeprefix("HANSA_")] = int(value) if value else number
    return values


_C = _constants()
ABI, SUM_LANES, CUT = _C["ABI"], _C["SUM_LANES"], _C["CUT"]
CONV, LINEAR, ACTIVATION, NORM, ADD, EMBED = (
    _C[name] for name in ("CONV", "LINEAR", "ACTIVATION", "NORM", "ADD", "EMBED")
)
GROUP_NORM, IMAGE_ADD = _C["GROUP_NORM"], _C["IMAGE_ADD"]
ON_IMAGES = (CONV, GROUP_NORM, IMAGE_ADD)
RELU, LEAKY_RELU, ELU, SIGMOID = _C["RELU"], _C["LEAKY_RELU"], _C["ELU"], _C["SIGMOID"]
TANH, SILU, GELU, GELU_TANH = _C["TANH"], _C["SILU"], _C["GELU"], _C["GELU_TANH"]
MAX, MEAN, SUM = _C["MAX"], _C["MEAN"], _C["SUM"]
DROP, DROP_FLAT, DROP_CHANNELS = _C["DROP"], _C["DROP_FLAT"], _C["DROP_CHANNELS"]
OK, NO_MEMORY, BAD_ROW = _C["OK"], _C["NO_MEMORY"], _C["BAD_ROW"]
BAD_SIZE, BAD_SUM, BAD_TOKEN = _C["BAD_SIZE"], _C["BAD_SUM"], _C["BAD_TOKEN"]
MIX, AVERAGE, SETTLE = _C["MIX"], _C["AVERAGE"], _C["SETTLE"]
PULL, SIGNS, GATHER = _C["PULL"], _C["SIGNS"], _C["GATHER"]
REFUSALS = (
    *("", "no memory", "a row that does not exist", "a label that does not exist", "a batch of another size"),
    *("a sum that overflows", "a token that does not exist"),
)
SERVER_KINDS = ("momentum", "adagrad", "adam", "yogi", "amsgrad", "ams")
MOST_STRIDE = 4
GRAM_SPARE, GRAM_LANES = 4, 8


class Stage(Structure):
    _fields_ = [*_fields("stage")]


class Data(Structure):
    owners: tuple[Any, ...] = ()
    """The tensors that the addresses point into: inputs, table, labels."""
    _fields_ = [*_fields("data")]


class BatchIndex(Structure):
    owners: tuple[Any, ...] = ()
    _fields_ = [*_fields("batches")]


class StepParameters(Structure):
    _fields_ = [*_fields("update")]


class Client(Structure):
    _fields_ = [*_fields("client")]


class Turn(Structure):
    _fields_ = [*_fields("turn")]


class DenseCohort(Structure):
    _fields_ = [*_fields("cohort")]


class LazyCohort(Structure):
    _fields_ = [*_fields("lazy_cohort")]


class Evaluation(Structure):
    _fields_ = [*_fields("score")]


class Rule(Structure):
    _fields_ = [*_fields("rule")]


class Kernels(Structure):
    """The kernels of one instruction set. Calls through CFUNCTYPE release the interpreter lock."""

    _fields_ = [*_fields("kernels")]


STRUCTURES: tuple[type[Structure], ...] = (
    *(Stage, Data, BatchIndex, StepParameters, Client, Turn),
    *(DenseCohort, LazyCohort, Evaluation, Rule, Kernels),
)
"""All structures, in the order in which the library reports their sizes."""


def record(structure: type[Structure]) -> np.dtype[Any]:
    """Return a structure as the dtype of an array's rows; addresses are uint64."""
    fields = []
    declared: Any = structure._fields_
    for name, kind in declared:
        shape = (kind._length_,) if issubclass(kind, Array) else ()
        element = kind._type_ if issubclass(kind, Array) else kind
        fields.append((name, np.int64 if element is c_int64 else np.uint64, shape))
    return np.dtype(fields)
