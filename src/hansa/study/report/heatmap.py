"""Who holds which labels, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDEST = 400
"""More clients than this are not told apart by eye: the first so many are drawn."""


def heat_map(counts: Sequence[Sequence[int]], labels: Sequence[str], population: int | None = None) -> str:
    """Counts[client][label] as an SVG: a column a client, a row a label, the darker the more; ``population`` if counts
    are those of the first clients only.

    >>> heat_map([[4, 0], [1, 3]], ["cat", "dog"]).count("<rect")
    3
    """
    shown = counts[:WIDEST]
    most = max((count for row in shown for count in row), default=0) or 1
    side = 1060 / (len(shown) or 1)
    high = max(10.0, min(side, 19.0))
    width, top, left = 1180, 4, 112
    across = (width - left) / (len(shown) or 1)
    gap = 1.0 if across > 4 else 0.0
    body = [
        f'<text x="{left - 8}" y="{top + row * high + high / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        for row, name in enumerate(labels)
    ]
    for client, held in enumerate(shown):
        for row, count in enumerate(held):
            if count:
                x, y = left + client * across, top + row * high
                strength = 0.12 + 0.88 * (count / most) ** 0.6
                body.append(
                    f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{across - gap:.1f}" height="{high - 1:.1f}" '
                    f'rx="1.5" opacity="{strength:.2f}">'
                    f"<title>client {client}: {count} of {escape(labels[row])}</title></rect>"
                )
    height = top + len(labels) * high + 22
    total = population or len(counts)
    more = f", the first {len(shown)} of {total}" if total > len(shown) else ""
    body.append(f'<text x="{left}" y="{height - 5:.1f}">clients 0 to {len(shown) - 1}{more}</text>')
    return (
        f'<svg class="heat" viewBox="0 0 {width} {height:.0f}" role="img"><title>samples of each label a client</title>'
        f"{''.join(body)}</svg>"
    )
