"""Curves as a figure for a paper: means over seeds with their bands. Needs ``hansa[plot]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from hansa.core.errors import HansaError, suggestion
from hansa.runs.metrics import ACCURACY
from hansa.runs.seed_statistics import spread
from hansa.runs.store import io
from hansa.study.report.entries import COLOURS, DRAWN, Entry

AXES = {
    "round": "communication rounds",
    "server_bits": "bits to and from the server",
    "bits": "bits sent",
    "wall_seconds": "wall time, seconds",
    "simulated_total_seconds": "simulated time, seconds",
}
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
"""Colours are told apart by most, lines by all."""


def draw(entries: Sequence[Entry], path: Path | str | None = None, metric: str | None = None, x: str = "round") -> Any:
    """A matplotlib figure of a metric against ``x``, written to ``path`` if one is given, in the format of its ending.

    Without a metric the accuracy is drawn, or the loss where there is none. A band is the mean ± one sample standard
    deviation over the seeds, at the rounds that all of them have.
    """
    if x not in AXES:
        raise HansaError(f"plot(x={x!r}): {suggestion(x, AXES)}")
    try:
        figures, backend = import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise HansaError("plot() needs matplotlib: pip install 'hansa[plot]'.") from error
    tables = [entry.curves() for entry in entries]
    known = [name for name in DRAWN if name not in AXES and any(name in table for seeds in tables for table in seeds)]
    chosen = next(
        (name for name in (ACCURACY, "test_loss", "global_loss", "loss", "train_loss") if name in known), None
    )
    metric = chosen if metric is None else metric
    if metric is None or metric not in known:
        raise HansaError(f"plot(metric={metric!r}): {suggestion(str(metric), known)}")
    made = figures.Figure(figsize=(5.2, 3.4), layout="constrained")
    backend.FigureCanvasAgg(made)
    axes = made.add_subplot()
    for place, (entry, seeds) in enumerate(zip(entries, tables, strict=True)):
        points = curve(seeds, metric, x)
        if not points:
            continue
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        at = [point[0] for point in points]
        axes.plot(at, [y.mean for _, y in points], color=colour, linestyle=dash, linewidth=1.6, label=entry.name)
        if entry.members:
            low, high = ([y.mean + sign * y.deviation for _, y in points] for sign in (-1, 1))
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    if path is not None:
        path = Path(path)
        io.make_folder(path.parent.resolve())
        try:
            made.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:  # an ending that is no format
            raise HansaError(f"plot({str(path)!r}): {error}.") from error
    return made


def curve(seeds: Sequence[dict[str, list[float | None]]], metric: str, x: str) -> list[tuple[float, Any]]:
    """(x, spread of the metric) at the rounds at which all seeds measured both; x is the mean over seeds.

    >>> curve([{"round": [1.0], "loss": [2.0]}, {"round": [1.0], "loss": [4.0]}], "loss", "round")[0][1].mean
    3.0
    """
    found = []
    if any(name not in table for table in seeds for name in (metric, x)):
        return []
    for rows in zip(*(zip(table[x], table[metric], strict=True) for table in seeds), strict=True):
        if all(value is not None and math.isfinite(value) for row in rows for value in row):
            found.append((fmean(row[0] for row in rows), spread([float(row[1]) for row in rows])))
    return found
