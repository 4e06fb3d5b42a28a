"""A Pareto front of bytes and hours on logarithmic axes, as an SVG image."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hansa.study.report import formats

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 70, 30, 30, 50


class CostPoint(NamedTuple):
    """A training option with its cost in bytes and hours; ``on_front`` if no other is better in both."""

    name: str
    bytes: float
    hours: float
    on_front: bool = False


def pareto_svg(points: Sequence[CostPoint]) -> str:
    """Draw the points; those on the front are joined and labelled.

    >>> svg = pareto_svg([CostPoint("a<b", 1e6, 1.0, True), CostPoint("c", 1e9, 0.1, True), CostPoint("d", 1e9, 2.0)])
    >>> "a&lt;b" in svg, svg.count("<circle")
    (True, 3)
    """
    log_bytes = [math.log10(max(point.bytes, 1.0)) for point in points]
    log_hours = [math.log10(max(point.hours, 1e-6)) for point in points]
    x = _scale(log_bytes, LEFT, WIDTH - RIGHT)
    y = _scale(log_hours, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(WIDTH / 2, HEIGHT - 12, "bits to and from the server", "middle", "#5d6875"),
        _text(18, HEIGHT / 2, "time", "middle", "#5d6875", f' transform="rotate(-90 18 {HEIGHT / 2})"'),
    ]
    for power in _powers(log_bytes):
        parts.append(f'<path d="M{x(power):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eeebe4"/>')
        parts.append(_text(x(power), HEIGHT - 32, formats.format_bytes(10.0**power), "middle", "#98a1ab"))
    for power in _powers(log_hours):
        parts.append(f'<path d="M{LEFT} {y(power):.1f}H{WIDTH - RIGHT}" stroke="#eeebe4"/>')
        parts.append(_text(LEFT - 6, y(power) + 4, formats.format_duration(3600 * 10.0**power), "end", "#98a1ab"))
    placed = [(point, x(a), y(b)) for point, a, b in zip(points, log_bytes, log_hours, strict=True)]
    parts += [_dot(point, at, up, 3, "#98a1ab") for point, at, up in placed if not point.on_front]
    front = sorted((each for each in placed if each[0].on_front), key=lambda each: each[1])
    corners = " ".join(f"{at:.1f},{up:.1f}" for _, at, up in front)
    parts.append(f'<polyline points="{corners}" fill="none" stroke="#14507a" stroke-dasharray="4 3"/>')
    for place, (point, at, up) in enumerate(front):
        anchor, shift = ("end", -9) if at > WIDTH / 2 else ("start", 9)
        parts.append(_dot(point, at, up, 5, "#14507a"))
        parts.append(_text(at + shift, up + (16 if place % 2 else -8), point.name, anchor, "#1b2430"))
    return "".join([*parts, "</svg>\n"])


def _scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    least, most = min(values), max(values)
    return lambda value: first + (last - first) * ((value - least) / (most - least) if most > least else 0.5)


def _powers(values: Sequence[float]) -> list[int]:
    return list(range(math.ceil(min(values)), math.floor(max(values)) + 1))


def _text(x: float, y: float, text: str, anchor: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{html.escape(text)}</text>'


def _dot(point: CostPoint, x: float, y: float, radius: int, colour: str) -> str:
    name = html.escape(point.name)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{name}</title></circle>'
