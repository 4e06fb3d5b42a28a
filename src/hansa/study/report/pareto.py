"""A front of two costs, both in powers of ten, as one SVG: what nothing else beats in both is joined and named."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hansa.study.report import formats

WIDTH, HEIGHT, LEFT, RIGHT, TOP, LOW = 760, 440, 70, 30, 30, 50


class Point(NamedTuple):
    """Something that costs bytes and hours; ``named`` if it is of the front."""

    name: str
    bytes: float
    hours: float
    named: bool = False


def svg(points: Sequence[Point]) -> str:
    """The picture.

    >>> picture = svg([Point("a<b", 1e6, 1.0, True), Point("c", 1e9, 0.1, True), Point("d", 1e9, 2.0)])
    >>> "a&lt;b" in picture, picture.count("<circle")
    (True, 3)
    """
    across = [math.log10(max(point.bytes, 1.0)) for point in points]
    along = [math.log10(max(point.hours, 1e-6)) for point in points]
    x = _scale(across, LEFT, WIDTH - RIGHT)
    y = _scale(along, HEIGHT - LOW, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(WIDTH / 2, HEIGHT - 12, "bits with the server", "middle", "#5d6875"),
        _text(18, HEIGHT / 2, "time", "middle", "#5d6875", f' transform="rotate(-90 18 {HEIGHT / 2})"'),
    ]
    for power in _powers(across):
        parts.append(f'<path d="M{x(power):.1f} {TOP}V{HEIGHT - LOW}" stroke="#eeebe4"/>')
        parts.append(_text(x(power), HEIGHT - 32, formats.bits(8 * 10.0**power), "middle", "#98a1ab"))
    for power in _powers(along):
        parts.append(f'<path d="M{LEFT} {y(power):.1f}H{WIDTH - RIGHT}" stroke="#eeebe4"/>')
        parts.append(_text(LEFT - 6, y(power) + 4, formats.duration(3600 * 10.0**power), "end", "#98a1ab"))
    placed = [(point, x(a), y(b)) for point, a, b in zip(points, across, along, strict=True)]
    for point, at, up in placed:
        if not point.named:
            parts.append(_dot(point, at, up, 3, "#98a1ab"))
    front = sorted((one for one in placed if one[0].named), key=lambda one: one[1])
    corners = " ".join(f"{at:.1f},{up:.1f}" for _, at, up in front)
    parts.append(f'<polyline points="{corners}" fill="none" stroke="#14507a" stroke-dasharray="4 3"/>')
    for place, (point, at, up) in enumerate(front):
        anchor, apart = ("end", -9) if at > WIDTH / 2 else ("start", 9)
        parts.append(_dot(point, at, up, 5, "#14507a"))
        parts.append(_text(at + apart, up + (16 if place % 2 else -8), point.name, anchor, "#1b2430"))
    return "".join([*parts, "</svg>\n"])


def _scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    least, most = min(values), max(values)
    return lambda value: first + (last - first) * ((value - least) / (most - least) if most > least else 0.5)


def _powers(values: Sequence[float]) -> list[int]:
    return list(range(math.ceil(min(values)), math.floor(max(values)) + 1))


def _text(x: float, y: float, words: str, anchor: str, colour: str, more: str = "") -> str:
    told = html.escape(words)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{told}</text>'


def _dot(point: Point, x: float, y: float, radius: int, colour: str) -> str:
    name = html.escape(point.name)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{name}</title></circle>'
