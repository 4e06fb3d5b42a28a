"""The C side as ctypes sees it: the structures of native.h, field for field, and the table of kernels."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

ABI = 11
SUM_LANES = 1024
CONV, LINEAR = 0, 1
MAX, MEAN = 1, 2
DROP, DROP_FLAT, DROP_CHANNELS = 1, 2, 3
MOST_STRIDE = 4
CUT = 1024
GRAM_SPARE, GRAM_LANES = 4, 8
OK, NO_MEMORY, BAD_ROW, BAD_LABEL, BAD_SIZE, BAD_SUM = range(6)
REFUSALS = ("", "no memory", "a row that does not exist", "a label that does not exist", "a batch of another size")
MIX, AVERAGE, SETTLE, PULL, SIGNS, GATHER = -1, -2, -3, -4, -5, -6
SERVER_KINDS = ("momentum", "adagrad", "adam", "yogi", "amsgrad", "ams")


class Stage(Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            *("kind", "channels", "height", "width", "out", "kernel", "stride", "padding"),
            *("relu", "pool", "pool_h", "pool_w", "step_h", "step_w"),
            *("drop", "weight", "bias", "planar"),
        )
    ]


class Data(Structure):
    kept: object = None
    _fields_ = [
        ("values", c_void_p),
        ("table", c_void_p),
        ("labels", c_void_p),
        ("rows", c_int64),
        ("planar", c_int64),
    ]


class Batches(Structure):
    kept: tuple[Any, ...] = ()
    _fields_ = [
        *(("index", c_void_p), ("sizes", c_void_p), ("steps", c_int64), ("batch", c_int64)),
        ("keep", c_void_p),
    ]


class Update(Structure):
    _fields_ = [
        ("momentum", c_void_p),
        ("anchor", c_void_p),
        ("shift", c_void_p),
        ("lr", c_double),
        ("pull", c_double),
        ("decay", c_double),
        ("mu", c_double),
        ("clip", c_double),
    ]


class Client(Structure):
    _fields_ = [
        ("x", c_void_p),
        ("y", c_void_p),
        ("change", c_void_p),
        ("own", c_void_p),
        ("samples", c_int64),
        ("steps", c_int64),
        ("batch", c_int64),
        ("key", c_uint64 * 2),
        ("losses", c_void_p),
        ("done", c_int64),
        ("finite", c_int64),
        ("keep", c_int64),
    ]


class Turn(Structure):
    _fields_ = [("row", c_int64), ("batch", c_int64), ("index", c_void_p)]


class Cohort(Structure):
    kept: object = None
    _fields_ = [
        ("x", c_void_p),
        ("later", c_void_p),
        ("open", c_void_p),
        ("stepped", c_void_p),
        ("rows", c_int64),
        ("turns", c_void_p),
        ("count", c_int64),
        ("done", c_int64),
        ("lost", c_int64),
        ("losses", c_void_p),
        ("momenta", c_void_p),
        ("starts", c_void_p),
        ("links", c_void_p),
        ("weights", c_void_p),
        ("reach", c_void_p),
        ("scratch", c_void_p),
        ("rate", c_double),
        ("seconds", c_double),
        ("start", c_void_p),
        ("begun", c_void_p),
    ]


class Trail(Structure):
    kept: object = None
    _fields_ = [
        ("start", c_void_p),
        ("models", c_void_p),
        ("changes", c_void_p),
        ("room", c_int64),
        ("made", c_int64),
        ("turns", c_void_p),
        ("starts", c_void_p),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("count", c_int64),
        ("done", c_int64),
        ("lost", c_int64),
        ("losses", c_void_p),
        ("momenta", c_void_p),
        ("seconds", c_double),
    ]


class Score(Structure):
    _fields_ = [("loss", c_double), ("correct", c_int64)]


class Rule(Structure):
    _fields_ = [
        ("kind", c_int64),
        ("eps_inside", c_int64),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("rate", c_double),
        ("correct1", c_double),
        ("correct2", c_double),
    ]


_pointer, _whole = c_void_p, c_int64
_server = CFUNCTYPE(None, POINTER(Rule), _whole, *[_pointer] * 9)
_mean = CFUNCTYPE(None, _pointer, _pointer, _whole, _whole, _pointer)
_mix = CFUNCTYPE(None, *[_pointer] * 4, _whole, _whole, _pointer)
_squares = CFUNCTYPE(c_double, _pointer, _whole, POINTER(c_int64))


class Kernels(Structure):
    """The kernels of one instruction set. Calls through CFUNCTYPE release the interpreter lock."""

    _fields_ = [
        ("name", c_char_p),
        ("stack_new", CFUNCTYPE(_pointer, POINTER(Stage), _whole, _whole)),
        ("stack_free", CFUNCTYPE(None, _pointer)),
        (
            "train",
            CFUNCTYPE(
                _whole,
                *(_pointer, _pointer, POINTER(Data), POINTER(Batches), POINTER(Update)),
                *(_pointer, POINTER(c_int64), c_double),
            ),
        ),
        (
            "clients",
            CFUNCTYPE(_whole, _pointer, POINTER(Data), POINTER(Update), _pointer, _whole, POINTER(_whole), c_double),
        ),
        ("cohort", CFUNCTYPE(_whole, _pointer, POINTER(Data), POINTER(Update), POINTER(Cohort))),
        ("trail", CFUNCTYPE(_whole, _pointer, POINTER(Data), POINTER(Update), POINTER(Trail))),
        ("carried", CFUNCTYPE(None, *[_pointer] * 5, _whole, _whole, _pointer)),
        ("spread", CFUNCTYPE(c_double, _pointer, _pointer, _whole, _whole, _whole, _pointer, _pointer)),
        ("choose", CFUNCTYPE(None, c_char_p, _whole, _whole, _pointer)),
        ("draw", CFUNCTYPE(None, _pointer, _pointer, _whole, _whole, _pointer, _pointer)),
        (
            "gradient",
            CFUNCTYPE(_whole, _pointer, _pointer, POINTER(Data), POINTER(Batches), _pointer, POINTER(c_float)),
        ),
        ("evaluate", CFUNCTYPE(_whole, _pointer, _pointer, POINTER(Data), _whole, _whole, POINTER(Score))),
        ("logits", CFUNCTYPE(_whole, _pointer, _pointer, POINTER(Data), POINTER(Batches), _pointer)),
        ("server32", _server),
        ("server64", _server),
        ("mean32", _mean),
        ("mean64", _mean),
        ("mix32", _mix),
        ("mix64", _mix),
        ("gram32", CFUNCTYPE(_whole, _pointer, _whole, _pointer, _whole, _whole, _pointer)),
        ("gram32_add", CFUNCTYPE(_whole, *[_pointer, _whole, _whole] * 2, _whole, _pointer)),
        ("rows_add", CFUNCTYPE(_whole, _whole, *[_pointer, _whole] * 2, _whole, _whole, *[_pointer] * 3)),
        ("gram32_sum", CFUNCTYPE(None, _pointer, _whole, _whole, _pointer)),
        ("gram", CFUNCTYPE(None, _pointer, _whole, _whole, _whole, _pointer)),
        ("squares32", _squares),
        ("squares64", _squares),
        ("digest", CFUNCTYPE(None, _pointer, _whole, _pointer, _pointer)),
        ("sign_pack", CFUNCTYPE(None, _pointer, _whole, _pointer, _pointer)),
        ("sign_add", CFUNCTYPE(None, _pointer, _pointer, _whole, _whole, _whole, _pointer)),
        ("reaching", CFUNCTYPE(_whole, _pointer, _whole, c_float, _whole, _pointer, _pointer)),
        ("crc32", CFUNCTYPE(c_uint32, _pointer, _whole, c_uint32)),
        ("highest32", CFUNCTYPE(c_float, _pointer, _whole)),
        ("half_pack", CFUNCTYPE(None, _pointer, _whole, _pointer, c_float, _whole, _pointer)),
        ("levels_pack", CFUNCTYPE(_whole, _pointer, *[_whole] * 4, *[_pointer] * 3)),
        ("planes_pack", CFUNCTYPE(_whole, _pointer, _pointer, _whole, _pointer, _whole, _pointer)),
    ]


STRUCTURES: tuple[type[Structure], ...] = (
    *(Stage, Data, Batches, Update, Client, Turn),
    *(Cohort, Trail, Score, Rule, Kernels),
)
"""All of them, in the order in which the library tells their sizes."""
