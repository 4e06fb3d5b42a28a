"""kill -9 at random moments of asynchronous runs: queue, jobs in flight and versions resume exactly."""

from __future__ import annotations

from functools import partial

from torture import kill

HALF = "sample={participation: 0.5}"
SLOW = "profile={step_seconds: {kind: lognormal, median: 1.0, sigma: 1.2}, up_bandwidth: 10000.0, jitter: 0.3}"
WINDOWS = "profile={step_seconds: {kind: zipf}, latency: 0.2, on_seconds: 3.0, off_seconds: 5.0}"
CASES: dict[str, tuple[str, ...]] = {
    "fedasync": ("fedasync", HALF, SLOW),
    "fedasync, windows": ("fedasync", HALF, WINDOWS, "algorithm.mu=0.1"),
    "fedbuff, old ones refused": ("fedbuff", SLOW, "pace={size: 2, concurrency: 6, max_staleness: 1}"),
    "fadas, compressed": ("fadas", HALF, SLOW, "compress.compressor={kind: top_k, ratio: 0.1}"),
    "ca2fl, rows on disk": ("ca2fl", SLOW, "algorithm.momentum_storage=disk", "compress.compressor=sign"),
    "scaffold, buffered": ("scaffold", HALF, WINDOWS, "pace={size: 2}"),
    "fedams, deadline, clients lost": (
        "fedams", SLOW, "pace={kind: deadline, seconds: 4.0, min_updates: 2}", "faults={before: 0.2, nan: 0.1}",
    ),
    "fedcams, two-way, over-selected": (
        "fedcams", SLOW, "pace={kind: overselect, factor: 1.5}", "compress.two_way=true",
    ),
}  # fmt: skip

run = partial(kill.run, cases=CASES)
