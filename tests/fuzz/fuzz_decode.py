"""Fuzzes the packet decoder: no crash, no silent acceptance, no memory beyond what the vector explains.

    python tests/fuzz/fuzz_decode.py [--inputs 100000] [--seed 0]

With atheris installed its coverage-guided engine chooses the inputs; without it a seeded mutation fuzzer does, from
real packets of every kind. Half of the inputs get a right length and checksum after the damage, so that the checks
behind those are reached. Native decoders and those without native code must agree about every input, to the bit and to
the words of a refusal; the instruction sets take turns.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import struct
import sys
import time
import tracemalloc
import zlib
from collections import Counter

import numpy as np
import torch

if guided := __name__ == "__main__" and importlib.util.find_spec("atheris") is not None:
    import atheris

    with atheris.instrument_imports(include=["hansa.compress"]):
        importlib.import_module("hansa.compress")

from hansa.compress import PacketError, accumulate, cast, decode, grid, identity, quantize, random_k, sign, top_k
from hansa.compress.packet import HEADER
from hansa.core import native
from hansa.core.keys import Key

DIM = 259
TABLES = 100_000  # bytes for look-up tables and the interpreter's own objects
INTERESTING = [0, 1, 2**16, DIM - 1, DIM, DIM + 1, *(2**n - less for n in (3, 7, 8, 31, 32, 63, 64) for less in (0, 1))]
COMPRESSORS = [
    identity(),
    cast("float16"),
    cast("bfloat16"),
    sign(),
    quantize(16),
    quantize(3, 64),
    top_k(1 / 64),
    top_k(1 / 8),
    top_k(1 / 2),
    top_k(1 / 8, "bfloat16"),
    top_k(1 / 8, sign()),
    top_k(1 / 8, quantize(7, 8)),
    random_k(1 / 8),
    random_k(1 / 8, quantize(1)),
    grid(0.05),
    grid(1.0),
    grid(4.0),
]


def corpus() -> list[bytes]:
    """Real packets of every kind, of spread and of clustered vectors, in both dtypes."""
    draw = np.random.default_rng(0)
    spread = draw.standard_normal(DIM)
    clustered = spread * (np.arange(DIM) % 97 < 4)
    found = []
    for dtype in (torch.float32, torch.float64):
        for vector in (spread, clustered, np.zeros(DIM)):
            x = torch.from_numpy(vector).to(dtype)
            found += [bytes(compressor.encode(x, Key(1)).bytes) for compressor in COMPRESSORS]
    return sorted(set(found))


def mend(data: bytes) -> bytes:
    """The same bytes with the length and the checksum that they should have."""
    if len(data) < HEADER.size:
        return data
    start = data[:12] + struct.pack("<Q", len(data) - HEADER.size)
    payload = data[HEADER.size :]
    return start + struct.pack("<I", zlib.crc32(payload, zlib.crc32(start))) + payload


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One to four kinds of damage."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(damaged)) if damaged else 0
        match draw.randrange(8):
            case 0 if damaged:
                damaged[place] ^= 1 << draw.randrange(8)
            case 1 if damaged:
                damaged[place] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
            case 2:
                del damaged[place:]
            case 3:
                damaged += draw.randbytes(draw.randint(1, 40))
            case 4:
                damaged[place : place + draw.randint(1, 16)] = other[place : place + draw.randint(1, 16)]
            case 5 if len(damaged) > HEADER.size:
                size = draw.choice([1, 2, 4, 8])
                number = draw.choice(INTERESTING) % 256**size
                at = draw.choice([4, 12, HEADER.size, HEADER.size + 4, HEADER.size + 8, place])
                damaged[at : at + size] = number.to_bytes(size, "little")
            case 6 if len(damaged) > HEADER.size:
                at = HEADER.size + draw.randrange(12)
                damaged[at : at + 8] = struct.pack("<d", draw.choice([float("nan"), float("inf"), -1.0, 1e308]))
            case _:
                damaged[place:place] = draw.randbytes(draw.randint(1, 4))
    return bytes(damaged)


def outcome(data: bytes, isa: str) -> str | tuple[bytes, bytes]:
    """The refusal's words, or the bits of the decoded vector and of ones with it added, by one set of decoders."""
    before = os.environ.get("HANSA_NATIVE")
    os.environ["HANSA_NATIVE"] = isa
    try:
        vector = decode(data, dim=DIM)
        return vector.numpy().tobytes(), accumulate(data, torch.ones_like(vector), 0.3).numpy().tobytes()
    except PacketError as error:
        return str(error)
    finally:
        if before is None:
            del os.environ["HANSA_NATIVE"]
        else:
            os.environ["HANSA_NATIVE"] = before


def check(data: bytes, *, genuine: bool, watched: bool = False) -> str:
    """Decode and see that it is either refused for a reason or a proper vector; what became of it, in a word."""
    sets = native.instruction_sets()
    isa = sets[zlib.crc32(data) % len(sets)] if sets else "off"
    assert outcome(data, isa) == outcome(data, "off"), f"{isa} decodes it differently"
    dtype = torch.float64 if len(data) > 3 and data[3] & 0x80 else torch.float32
    out = torch.ones(DIM, dtype=dtype)
    if watched:
        tracemalloc.start()
    try:
        vector = decode(data, dim=DIM)
    except PacketError as error:
        vector, reason = None, str(error)
    finally:
        if watched:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    if watched:
        assert peak <= 2 * DIM * 8 + TABLES, f"{peak} bytes taken"
    if vector is None:
        assert reason.startswith("packet: "), reason
        try:
            accumulate(data, out)
        except PacketError:
            assert bool((out == 1).all()), "a refused packet changed the vector"
            return "refused"
        raise AssertionError("accumulate took what decode refused")
    assert genuine, "damaged bytes were accepted"
    assert vector.shape == (DIM,)
    assert vector.dtype == dtype
    assert bool(torch.isfinite(vector).all())
    assert torch.equal(accumulate(data, out, 0.3), 1 + vector * 0.3)
    return "accepted"


def run(inputs: int, seed: int) -> Counter[str]:
    """The seeded fuzzer; every input is a function of the seed and its number."""
    seeds = corpus()
    known = set(seeds)
    outcomes: Counter[str] = Counter()
    for number in range(inputs):
        draw = random.Random(f"{seed} {number}")
        damaged = mutate(draw.choice(seeds), draw.choice(seeds), draw)
        if mended := number % 2 == 1:
            damaged = mend(damaged)
        state = "undamaged" if damaged in known else "mended" if mended else "damaged"
        outcomes[f"{state} {check(damaged, genuine=state != 'damaged', watched=number % 50 == 1)}"] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not guided:
        began = time.perf_counter()
        outcomes = run(given.inputs, given.seed)
        print(
            f"{given.inputs} inputs in {time.perf_counter() - began:.0f} s without a failure (atheris is not installed)"
        )
        for outcome, count in sorted(outcomes.items()):
            print(f"{count:8d} {outcome}")
        return

    seeds = corpus()
    known = set(seeds)

    def one(data: bytes) -> None:
        """The first byte says which packet to start from and whether to mend, the rest is laid over it."""
        if len(data) < 3:
            return
        chosen, mended, at = seeds[data[0] % len(seeds)], data[1] & 1, data[1] >> 1
        damaged = chosen[:at] + data[2:] + chosen[at + len(data) - 2 :]
        check(mend(damaged) if mended else damaged, genuine=bool(mended) or damaged in known)

    atheris.Setup([sys.argv[0], f"-runs={given.inputs}", f"-seed={given.seed + 1}"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
