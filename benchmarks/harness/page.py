"""What was measured, as one Markdown page."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hansa import __version__
from hansa.core import native
from harness.agreement import TOLERANCE, agrees
from harness.contenders import CONTENDERS, NARROWER, Contender
from harness.environments import RECIPES
from harness.tables import MEGABYTE, TABLES, table
from harness.workloads import WORKLOADS

Results = Mapping[str, Any]
AGREE = 0.05  # accuracies may differ by this much: clients and batches are drawn by each contender's own generator
# wanted: at least 4 times the client-steps of the fastest peer, and at most 450 MB

METHOD = """\
## How it is measured

- All contenders get the same arrays: one partition, one first model, full batches, equal weights. Each is written with
  its framework's own parts as its documentation advises (`benchmarks/peers/`), without evaluation during training, and
  is installed in a separate environment with the same torch. Hansa's model is a user's class with `forward()`.
- Before anything is timed, every contender computes a small job without randomness. Its model must agree with a float64
  reference to 5% of the distance that it moved, or the benchmark fails; one step more or less is 20%.
- Rates are medians of three interleaved repeats in fresh processes, with their extremes; the first round of a repeat is
  a warm-up. *Wall* is the time of all repeats with start-up. *MB* is the largest sum of the resident memory of all
  processes, in which shared pages count more than once. Accuracy is that of the last model on the test set.
- FedLab and fluke train in one process with torch's threads, pfl in two workers under torchrun, Flower in two Ray
  actors of one thread, FedJAX with XLA's threads. Peers and the plain loop keep PyTorch's default layout of images; the
  last row of W1 shows the effect of channels-last images.
- Compare numbers of one run only: between runs the machine drifts by up to 15%.
"""

REPEAT = """\
## Repeat it

`make bench` on a quiet machine installs the other frameworks, measures for about half an hour and writes this page.
`make bench-quick` leaves them out. Both also print tables that matter only to those who change Hansa: start-up,
overhead of the engine, gossip, parallel studies, large models, server and compressors.
`python benchmarks/bench.py --agreement` only checks that all contenders compute the same model.
"""

PUBLISHED = ("eager", "population")
"""The tables of the page; all are printed."""


def page(results: Results, command: str, tables: Iterable[str] = TABLES) -> str:
    """Return the page with these of the tables about Hansa alone."""
    parts = [
        "# Benchmarks",
        f"Client steps per second of Hansa, other frameworks and plain PyTorch, side by side. Made by `{command}`.",
        "## Small models with native kernels",
        *_main(results),
        METHOD.strip(),
    ]
    scaling = results.get("scaling", {})
    for name in tables:
        if scaling.get(name):
            parts += TABLES[name](scaling[name])
    parts += [REPEAT.strip(), "## Machine", *_machine(results)]
    return "\n\n".join(parts) + "\n"


def _machine(results: Results) -> list[str]:
    machine = results.get("machine")
    if not machine:
        return ["Not measured yet on this machine."]
    lines = [f"- {name}: {value}" for name, value in machine.items()]
    lines.append(f"- peers: {'; '.join(recipe.version for recipe in RECIPES.values())}")
    return ["\n".join([*lines, f"- data: {results['note']}", f"- time taken: {results.get('minutes', 0):.0f} minutes"])]


def machine() -> dict[str, str]:
    """What it ran on, without any name of the place."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {memory:.0f} GB, {platform.system()}",
        "software": f"Hansa {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "native kernels": _sets(),
        "busy before": f"{busy():.0%} of the processor in the three seconds before (more than 5% spoils the numbers)",
    }


def _sets() -> str:
    """The instruction sets that run here, and which of them are measured."""
    used = native.instruction_set()
    if used is None:
        return f"none ({native.unavailable_reason()})"
    runs = f"{used}; this machine runs {', '.join(native.instruction_sets())}"
    return f"{runs}; lines that say so are forced to avx2" if NARROWER else f"{runs}; avx512 is not measured here"


def busy(seconds: float = 3.0) -> float:
    """The share of all cores that something else uses at the moment."""

    def spent() -> tuple[int, int]:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]

    try:
        total, idle = spent()
        time.sleep(seconds)
        later, idle_later = spent()
    except OSError:
        return math.nan
    return 1 - (idle_later - idle) / max(1, later - total)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "no AVX")
    return f"{facts.get('model name', platform.machine())} ({widest})"


def rates(results: Results, workload: str, contender: str) -> list[float]:
    runs = results.get("runs", {}).get(workload, {}).get(contender, [])
    return [run["rate"] for run in runs if "rate" in run]


def fastest_peer(results: Results, workload: str) -> tuple[str, float] | None:
    """The peer with the highest median."""
    found = [
        (contender.label, statistics.median(measured))
        for contender in CONTENDERS
        if contender.peer and (measured := rates(results, workload, contender.name))
    ]
    return max(found, key=lambda pair: pair[1]) if found else None


def _main(results: Results) -> list[str]:
    if not any(results.get("runs", {}).values()):
        return ["No run yet."]
    parts = []
    for workload in WORKLOADS:
        rows = [
            [contender.label, *_cells(results, workload, contender)]
            for contender in CONTENDERS
            if results["runs"].get(workload, {}).get(contender.name) or contender.peer in results.get("missing", {})
        ]
        if rows:
            head = ["", "client-steps/s", "x fastest peer", "MB", "wall s", "accuracy"]
            parts += [f"{workload}: {WORKLOADS[workload]}.", table(head, rows)]
            parts.append("\n".join(f"- {line}" for line in _found(results, workload)))
    return parts


def _cells(results: Results, workload: str, contender: Contender) -> list[str]:
    nothing = [""] * 5
    if contender.peer in results.get("missing", {}):
        return [_said("not installed", results["missing"][contender.peer]), *nothing[1:]]
    runs = results["runs"].get(workload, {}).get(contender.name, [])
    if not runs:
        return nothing
    measured = [run["rate"] for run in runs if "rate" in run]
    if not measured:
        return [_said("failed", runs[-1]["reason"]), *nothing[1:]]
    rate = statistics.median(measured)
    spread = f" ({min(measured):.0f}-{max(measured):.0f})" if len(measured) > 1 else ""
    peer = fastest_peer(results, workload)
    accuracy = results.get("accuracy", {}).get(workload, {}).get(contender.name)
    return [
        f"{rate:.0f}{spread}",
        f"{rate / peer[1]:.2f}" if peer else "",
        f"{max(run['peak'] for run in runs) / MEGABYTE:.0f}",
        f"{sum(run['wall'] for run in runs):.0f}",
        "" if accuracy is None else f"{accuracy:.3f}",
    ]


def _said(what: str, reason: str) -> str:
    return f"{what}: {reason}".replace("|", "/")


def _found(results: Results, workload: str) -> Iterable[str]:
    """What the table shows, in words."""
    peer, loop = fastest_peer(results, workload), rates(results, workload, "plain-2")
    for contender in CONTENDERS:
        measured = rates(results, workload, contender.name)
        if not contender.hansa or not measured or "own" not in contender.name or "eager" in contender.name:
            continue
        rate, label = statistics.median(measured), contender.label.replace("**", "")
        peak = max(run["peak"] for run in results["runs"][workload][contender.name]) / MEGABYTE
        times = f"{rate / peer[1]:.2f} times the client-steps of the fastest peer, {peer[0]}" if peer else ""
        if not peer and loop:
            times = f"{rate / statistics.median(loop):.2f} times the client-steps of the plain loop in 2 processes"
        if times and not contender.name.endswith("-1"):
            yield f"{workload}: {label}: {times}, {peak:.0f} MB"
    checked = results.get("agreement", {}).get(workload, {})
    if checked:
        wrong = [name for name, told in checked.items() if not agrees(told)]
        most = max((told for told in checked.values() if agrees(told)), default=math.nan)
        verdict = f"yes, all within {most:.0e} (at most {TOLERANCE:g})"
        verdict = f"**not those of {', '.join(wrong)}**" if wrong else verdict
        yield f"{workload}: models of the job without randomness are the reference's: {verdict}"
    found = results.get("accuracy", {}).get(workload, {})
    if found:
        middle = statistics.median(found.values())
        apart = [name for name, value in found.items() if abs(value - middle) > AGREE]
        verdict = f"**{', '.join(apart)} more than {AGREE} from the median**" if apart else "they agree"
        yield f"{workload}: accuracies from {min(found.values()):.3f} to {max(found.values()):.3f}: {verdict}"
