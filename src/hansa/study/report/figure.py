"""Figures for papers by matplotlib, as PDF, SVG or PNG: curves with bands over seeds, and label distributions. Needs
``hansa[plot]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from hansa.core.errors import HansaError, suggestion
from hansa.runs.columns import AXES, column_of
from hansa.runs.metrics import SeedStatistics, seed_statistics
from hansa.runs.store import io
from hansa.study.report.entries import PALETTE, ReportEntry, choose_metric

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
"""Line styles, for readers who cannot tell the colours apart."""


def draw_curves(
    entries: Sequence[ReportEntry], path: Path | str | None = None, metric: str | None = None, x: str = "round"
) -> Any:
    """Draw a metric against ``x`` as a matplotlib figure; bands are one standard deviation over seeds.

    Args:
        entries: The methods to draw.
        path: Where to write the figure, if given; the suffix chooses the format.
        metric: The column to draw, any of the histories; by default the main metric of the tasks.
        x: The column of the x axis.
    """
    if x not in AXES:
        raise HansaError(f"plot(x={x!r}): {suggestion(x, AXES)}")
    name = choose_metric(entries)[0] if metric is None else metric.partition(":")[0]
    tables = [entry.curves(also=name) for entry in entries]
    known = dict.fromkeys(each for seeds in tables for table in seeds for each in table if each not in AXES)
    if name not in known:
        raise HansaError(f"plot(metric={metric!r}): {suggestion(str(metric), known)}")
    metric = name
    figure, axes = _new_figure(5.2, 3.4)
    for place, (entry, seeds) in enumerate(zip(entries, tables, strict=True)):
        points = curve(seeds, metric, x)
        if not points:
            continue
        colour, dash = PALETTE[place % len(PALETTE)], DASHES[place % len(DASHES)]
        xs = [point[0] for point in points]
        axes.plot(xs, [y.mean for _, y in points], color=colour, linestyle=dash, linewidth=1.6, label=entry.name)
        if entry.members:
            low, high = ([y.mean + sign * y.std for _, y in points] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(column_of(metric).label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return _save(figure, path)


def draw_partition(counts: Sequence[Sequence[int]], labels: Sequence[str], path: Path | str | None = None) -> Any:
    """Draw how many samples of each label each client holds, as a matplotlib figure.

    Args:
        counts: ``counts[client][label]``.
        labels: The names of the labels.
        path: Where to write the figure, if given; the suffix chooses the format.
    """
    figure, axes = _new_figure(7.0, 0.8 + 0.2 * len(labels))
    image = axes.imshow([list(row) for row in zip(*counts, strict=True)], aspect="auto", cmap="Blues", vmin=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("client")
    figure.colorbar(image, label="samples")
    return _save(figure, path)


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        figures, backend = import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise HansaError("plot() needs matplotlib: pip install 'hansa[plot]'.") from error
    figure = _displayed(figures.Figure)(figsize=(width, height), layout="constrained")
    backend.FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path | str | None) -> Any:
    if path is not None:
        path = Path(path)
        io.make_folder(path.parent.resolve())
        try:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:  # an unknown format
            raise HansaError(f"plot({str(path)!r}): {error}.") from error
    return figure


def _displayed(figure_class: Any) -> Any:
    """Return a class of figures that notebooks display as they are, without pyplot."""

    class CurveFigure(figure_class):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            content = BytesIO()
            self.savefig(content, format="png", dpi=110)
            return content.getvalue()

    return CurveFigure


def curve(seeds: Sequence[dict[str, list[float | None]]], metric: str, x: str) -> list[tuple[float, SeedStatistics]]:
    """Return (x, spread of the metric) at the rounds at which all seeds measured both; x is its mean over seeds.

    >>> curve([{"round": [1.0], "loss": [2.0]}, {"round": [1.0], "loss": [4.0]}], "loss", "round")[0][1].mean
    3.0
    """
    if any(name not in table for table in seeds for name in (metric, x)):
        return []
    points = []
    for rows in zip(*(zip(table[x], table[metric], strict=True) for table in seeds), strict=True):
        known = [(a, b) for a, b in rows if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
        if len(known) == len(rows):
            points.append((fmean(a for a, _ in known), seed_statistics([float(b) for _, b in known])))
    return points
