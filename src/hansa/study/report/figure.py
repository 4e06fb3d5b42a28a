"""Figures for papers by matplotlib, as PDF, SVG or PNG: curves with bands over seeds. Needs ``hansa[plot]``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError, suggestion
from hansa.runs.columns import AXES, column_of
from hansa.runs.metrics import column_names, curve_over_seeds
from hansa.runs.store import io
from hansa.study.report.entries import ReportEntry
from hansa.study.report.ranking import PALETTE, choose_metric

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
    known = dict.fromkeys(each for entry in entries for h in entry.histories for each in column_names(h))
    if name not in known:
        raise HansaError(f"plot(metric={metric!r}): {suggestion(str(metric), known)}")
    figure, axes = _new_figure(5.2, 3.4)
    for place, entry in enumerate(entries):
        if not (points := curve_over_seeds(entry.histories, name, x)):
            continue
        colour, dash = PALETTE[place % len(PALETTE)], DASHES[place % len(DASHES)]
        xs = [at for at, _ in points]
        axes.plot(xs, [y.mean for _, y in points], color=colour, linestyle=dash, linewidth=1.6, label=entry.name)
        if entry.members:
            low, high = ([y.mean + sign * y.std for _, y in points] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(column_of(name).label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return _save(figure, path)


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure that notebooks display as it is, without pyplot, and its axes."""
    try:
        figures, backend = import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise HansaError("plot() needs matplotlib: pip install 'hansa[plot]'.") from error

    class DisplayedFigure(figures.Figure):  # type: ignore[misc, name-defined]
        def _repr_png_(self) -> bytes:
            content = BytesIO()
            self.savefig(content, format="png", dpi=110)
            return content.getvalue()

    figure = DisplayedFigure(figsize=(width, height), layout="constrained")
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
