"""How fast packets are made and read, as ratios to copying the same vector in the same run.

    python benchmarks/compress.py [--dim 11173962] [--repeats 15]

Every operation runs once a turn, the turns interleave, medians are compared: drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hansa.compress import accumulate, cast, decode, error_feedback, identity, quantize, random_k, sign, top_k
from hansa.keys import Key

KEY = Key(0)
#: What the design asks for, on one core and 11.2 million floats.
TARGETS = {"sign encode": 6.0, "sign accumulate": 6.0, "top_k(1/64) encode": 25.0}


def operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The timed calls by name; a plain copy comes first."""
    into, sums = torch.empty_like(x), torch.zeros_like(x)
    residual = 0.1 * x.flip(0)
    compressors = {
        "sign": sign(),
        "top_k(1/64)": top_k(1 / 64),
        "random_k(1/64)": random_k(1 / 64),
        "quantize(16)": quantize(16),
        "cast(float16)": cast("float16"),
        "identity": identity(),
    }
    found: dict[str, Callable[[], object]] = {"copy": lambda: into.copy_(x)}
    for name, compressor in compressors.items():
        packet = compressor.encode(x, KEY)
        found[f"{name} encode"] = lambda c=compressor: c.encode(x, KEY)  # type: ignore[misc]
        found[f"{name} decode"] = lambda p=packet: decode(p)  # type: ignore[misc]
        found[f"{name} accumulate"] = lambda p=packet: accumulate(p, sums, 0.1)  # type: ignore[misc]
    for name in ("sign", "top_k(1/64)"):
        link = error_feedback(compressors[name])
        found[f"error_feedback({name}) send"] = lambda c=link: c.send(x, {"residual": residual}, KEY)  # type: ignore[misc]
    return found


def measure(dim: int, repeats: int) -> dict[str, float]:
    """Median seconds of each operation."""
    torch.set_num_threads(1)
    x = torch.from_numpy(KEY.child("vector").numpy().standard_normal(dim, dtype="float32"))
    calls = operations(x)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn:  # the first turn only warms caches and memory
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=11_173_962, help="entries of the vector (default: ResNet-18)")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    taken = measure(given.dim, given.repeats)
    print(f"{given.dim} float32 entries, one thread, medians of {given.repeats} interleaved turns")
    print(f"{'operation':34s} {'ms':>8s} {'x copy':>8s} {'target':>8s}")
    for name, seconds in taken.items():
        target = f"<= {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:34s} {seconds * 1e3:8.2f} {seconds / taken['copy']:8.2f} {target:>8s}")


if __name__ == "__main__":
    main()
