"""Drawings of a graph: braille dots for the terminal, SVG for web pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hansa.core.errors import check_integer
from hansa.gossip.weights import as_sparse

if TYPE_CHECKING:
    from hansa.gossip.weights import Array, Matrix

CIRCLE_UP_TO = 64  # clients: above this, draw the pattern of the matrix instead
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bits of a braille cell, 4 rows x 2 columns


def text(W: Matrix, width: int = 48, *, ascii_only: bool = False) -> str:
    """Draw the graph as text: clients on a circle joined by lines, or the pattern of W for many clients.

    Args:
        W: Mixing matrix.
        width: Width in characters.
        ascii_only: Use ASCII characters only.

    >>> from hansa.gossip import ring
    >>> print(text(ring()(4), ascii_only=True))
    ##.#
    ###.
    .###
    #.##
    """
    check_integer("text", "width", width, minimum=8)
    S = as_sparse(W)
    if ascii_only:
        return "\n".join("".join("#" if dot else "." for dot in row) for row in _pattern(W, width))
    if S.shape[0] > CIRCLE_UP_TO:
        return _braille(_pattern(W, 2 * width))
    return _circle(W, width)


def svg(W: Matrix, size: int = 360) -> str:
    """Draw the graph as a standalone SVG, ``size`` pixels wide; thicker lines are larger weights.

    Args:
        W: Mixing matrix.
        size: Width and height in pixels.

    >>> from hansa.gossip import ring
    >>> svg(ring().weights(4)).startswith("<svg")
    True
    """
    check_integer("svg", "size", size, minimum=32)
    S = as_sparse(W)
    n = S.shape[0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" role="img">'
        f"<title>gossip graph of {n} clients</title>"
    )
    body = _svg_circle(W, size) if n <= CIRCLE_UP_TO else _svg_pattern(W, size)
    return "\n".join([head, *body, "</svg>"])


def _places(n: int, radius: float) -> Array:
    """Return n points on a circle about the origin, clockwise from the top, with y downwards."""
    angle = 2 * np.pi * np.arange(n) / n - np.pi / 2
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1) if n > 1 else np.zeros((1, 2))


def _pairs(W: Matrix) -> list[tuple[int, int, float]]:
    """Return each connected pair, with the larger weight of the two directions."""
    S = as_sparse(W)
    both = S.maximum(S.T).tocoo()
    entries = zip(both.row.tolist(), both.col.tolist(), both.data.tolist(), strict=True)
    return [(i, j, weight) for i, j, weight in entries if i < j]


def _pattern(W: Matrix, most: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which entries of W are nonzero, downsampled to at most ``most`` cells per side."""
    S = as_sparse(W)
    side = min(S.shape[0], most)
    grid = np.zeros((side, side), dtype=bool)
    rows, columns = S.nonzero()
    grid[rows * side // S.shape[0], columns * side // S.shape[0]] = True
    return grid


def _braille(grid: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> str:
    high, wide = (-(-grid.shape[0] // 4), -(-grid.shape[1] // 2))
    padded = np.zeros((4 * high, 2 * wide), dtype=bool)
    padded[: grid.shape[0], : grid.shape[1]] = grid
    cells = (padded.reshape(high, 4, wide, 2) * np.array(DOTS)[None, :, None, :]).sum(axis=(1, 3))
    return "\n".join("".join(chr(0x2800 + cell) if cell else " " for cell in row).rstrip() for row in cells.tolist())


def _circle(W: Matrix, width: int) -> str:
    n = as_sparse(W).shape[0]
    high = max(4, width // 2)
    dots = np.zeros((4 * high, 2 * width), dtype=bool)
    # a cell is 2 x 4 roughly square dots: use one radius for both axes, and leave room for the numbers
    at = _places(n, min(width - 6, 2 * high - 3)) + np.array([width - 1, 2 * high - 1])
    for i, j, _ in _pairs(W):
        many = int(np.abs(at[j] - at[i]).max()) + 2
        x, y = np.rint(np.linspace(at[i], at[j], many)).astype(int).T
        dots[y, x] = True
    lines = [list(line.ljust(width)) for line in _braille(dots).split("\n")]
    for client, (x, y) in enumerate(at):
        label = str(client)
        left = min(max(0, int(x) // 2 - (len(label) - 1) // 2), width - len(label))
        lines[int(y) // 4][left : left + len(label)] = label
    return "\n".join("".join(line).rstrip() for line in lines).strip("\n")


def _svg_circle(W: Matrix, size: int) -> list[str]:
    n = as_sparse(W).shape[0]
    dot = max(3.0, min(14.0, size * math.pi / (4 * n)))
    at = _places(n, size / 2 - dot - 2) + size / 2
    strongest = max((weight for _, _, weight in _pairs(W)), default=1.0)
    body = ['<g stroke="#64748b" stroke-linecap="round">']
    for i, j, weight in _pairs(W):
        ends = f'x1="{at[i, 0]:.1f}" y1="{at[i, 1]:.1f}" x2="{at[j, 0]:.1f}" y2="{at[j, 1]:.1f}"'
        body.append(f'<line {ends} stroke-width="{0.4 + 2 * weight / strongest:.2f}"/>')
    body.append('</g><g fill="#0f766e">')
    body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}"/>' for x, y in at]
    body.append(f'</g><g fill="#fff" font-family="sans-serif" font-size="{dot:.1f}" text-anchor="middle">')
    body += [f'<text x="{x:.1f}" y="{y + 0.35 * dot:.1f}">{client}</text>' for client, (x, y) in enumerate(at)]
    return [*body, "</g>"]


def _svg_pattern(W: Matrix, size: int) -> list[str]:
    grid = _pattern(W, 128)
    cell = size / len(grid)
    body = ['<g fill="#0f766e">']
    for row, column in np.argwhere(grid).tolist():
        body.append(f'<rect x="{column * cell:.2f}" y="{row * cell:.2f}" width="{cell:.2f}" height="{cell:.2f}"/>')
    return [*body, "</g>"]
