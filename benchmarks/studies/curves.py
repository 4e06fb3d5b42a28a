"""Draw the curves of a study from its results: python benchmarks/studies/curves.py ha-fed-fashion test_accuracy
Writes docs/<study>.svg, one panel a measure, one line a method (the mean over seeds, where there are several)."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {"test_accuracy": "test accuracy", "test_loss": "test loss", "train_loss": "training loss"}
COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518", "#72b7b2", "#9d755d", "#888888")


def load(study: str, results: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The histories of each method, one a seed."""
    found: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for path in sorted(results.glob(f"{study}-*-seed*.json")):
        name = path.stem.removeprefix(f"{study}-").rpartition("-seed")[0]
        found[name].append(json.loads(path.read_text())["history"])
    if not found:
        raise SystemExit(f"no results of {study!r} in {results}")
    return dict(found)


def line(histories: list[list[dict[str, Any]]], measure: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and the measure at them, averaged over seeds; a running mean over ``smooth`` rounds where it is noisy."""
    rounds = [entry["round"] for entry in histories[0] if measure in entry]
    values = np.array([[entry[measure] for entry in history if measure in entry] for history in histories]).mean(0)
    if smooth > 1 and len(values) > smooth:
        values = np.convolve(values, np.ones(smooth) / smooth, mode="valid")
        rounds = rounds[smooth - 1 :]
    return np.array(rounds), values


def draw(study: str, measures: list[str], order: list[str], results: Path, target: Path) -> None:
    found = load(study, results)
    names = [name for name in order if name in found] or list(found)
    figure, axes = pyplot.subplots(1, len(measures), figsize=(6.4 * len(measures), 4.4), layout="constrained")
    for axis, measure in zip(np.atleast_1d(axes), measures, strict=True):
        for colour, name in zip(COLOURS, names, strict=False):
            if any(measure in entry for entry in found[name][0]):
                rounds, values = line(found[name], measure, 10 if measure.endswith("diversity") else 1)
                axis.plot(rounds, values, color=colour, linewidth=1.4, label=name)
        axis.set_xlabel("round")
        axis.set_ylabel(WORDS.get(measure, measure.replace("_", " ")))
        axis.grid(alpha=0.25)
    labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
    figure.legend(*labels, frameon=False, ncols=min(4, len(names)), loc="outside lower center")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("measures", nargs="+")
    parser.add_argument("--order", nargs="*", default=[], help="the methods to draw, in this order")
    parser.add_argument("--results", type=Path, default=DOCS / "results")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw(
        options.study,
        options.measures,
        options.order,
        options.results,
        options.out or DOCS / f"{options.study}.svg",
    )


if __name__ == "__main__":
    main()
