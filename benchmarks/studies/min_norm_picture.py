"""Figure 3 of the FedAWARE paper: the direction of two clients that maximises gradient diversity.

lambda~ g_1 + (1 - lambda~) g_2 is the point of the segment between both gradients that is nearest to the origin. It is
perpendicular to the segment, unless g_1.g_2 >= min(g_1.g_1, g_2.g_2): then it is the shorter gradient alone, as in
footnote 1 of the paper. Run: python benchmarks/studies/min_norm_picture.py"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hansa.aggregate.diversity import diversity, surrogate_diversity
from hansa.aggregate.min_norm import min_norm

DOCS = Path(__file__).parents[2] / "docs"
CASES = {
    "conflicting clients": ((2.0, 0.6), (-0.9, 1.3)),
    "one client larger": ((2.6, -0.3), (0.2, 1.1)),
    "one client alone": ((2.4, 1.6), (0.9, 0.35)),
}
"""The gradients of both clients."""
COLOURS = {
    "$\\nabla f_1$": "#4c78a8",
    "$\\nabla f_2$": "#72b7b2",
    "mean of both (FedAvg)": "#b0b0b0",
    "min-norm (FedAWARE)": "#e45756",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """Both gradients, their mean, the min-norm direction, and the diversities of both."""

    gradients: torch.Tensor
    weights: tuple[float, float]
    mean: torch.Tensor
    direction: torch.Tensor
    D: float
    D_surrogate: float


def solve(first: tuple[float, float], second: tuple[float, float]) -> Picture:
    """Solve the min-norm problem of two gradients with the product's solver."""
    gradients = torch.tensor([first, second], dtype=torch.float64)
    solved = min_norm(gradients @ gradients.T)
    mean, direction = gradients.mean(dim=0), solved.weights @ gradients
    squares, half = gradients.square().sum(dim=1).tolist(), [0.5, 0.5]
    return Picture(
        gradients,
        (float(solved.weights[0]), float(solved.weights[1])),
        mean,
        direction,
        diversity(squares, half, float(mean @ mean)),
        surrogate_diversity(squares, half, float(direction @ direction)),
    )


def draw(pictures: dict[str, Picture], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "min-norm"  # equal results give equal files
    figure, axes = pyplot.subplots(1, len(pictures), figsize=(12, 3.9), layout="constrained")
    for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
        g = picture.gradients
        axis.plot(g[:, 0], g[:, 1], color="0.6", linestyle="--", linewidth=1)
        for vector, colour in zip((*g, picture.mean, picture.direction), COLOURS.values(), strict=True):
            _arrow(axis, vector, colour)
        axis.set_title(
            f"{title}: $\\tilde\\lambda$ = ({picture.weights[0]:.2f}, {picture.weights[1]:.2f})", fontsize=10
        )
        axis.set_xlabel(f"D = {picture.D:.2f}, $\\tilde D$ = {picture.D_surrogate:.2f}")
        axis.set_aspect("equal")
        axis.margins(0.12)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
        axis.axvline(0, color="0.85", linewidth=0.8, zorder=0)
        axis.set_xticks([])
        axis.set_yticks([])
    handles = [pyplot.Line2D([], [], color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(target, metadata={"Date": None})


def _arrow(axis: Any, vector: torch.Tensor, colour: str) -> None:
    axis.plot([0, vector[0]], [0, vector[1]], alpha=0)  # for the limits of the axis
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", xy=vector.tolist(), xytext=(0, 0), arrowprops=style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of min-norm.svg")
    options = parser.parse_args()
    pictures = {title: solve(*gradients) for title, gradients in CASES.items()}
    draw(pictures, options.out / "min-norm.svg")
    for title, picture in pictures.items():
        print(f"{title}: weights {picture.weights}, D {picture.D:.3f}, D~ {picture.D_surrogate:.3f}")


if __name__ == "__main__":
    main()
