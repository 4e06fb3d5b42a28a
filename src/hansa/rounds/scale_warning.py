"""A warning, once per run, where a few entries of an update dominate the one scale of sign compression."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hansa.algorithm import Algorithm
from hansa.compress import sign
from hansa.core.protocols import walk_components
from hansa.core.types import MODEL, Vector
from hansa.core.vectors.layout import Layout

log = logging.getLogger("hansa")
FEW = 0.05
"""Warn if fewer than this part of the entries carries the update."""
SMALL, LEAST = 8, 1.5
"""Vectors below this size are never reported; of others, at least this many entries must carry the update."""

_warned: set[str] = set()


def effective_entries(x: Vector) -> float:
    """Return ||x||_1^2 / ||x||_2^2: the number of entries that carry x, d for equal magnitudes and 1 for one entry.

    >>> import torch
    >>> effective_entries(torch.tensor([1.0, -1.0, 1.0, 0.0]))
    3.0
    """
    wide = x.double()
    squares = float(wide.square().sum())
    return float(wide.abs().sum()) ** 2 / squares if squares else float(x.numel())


def warn_of_dominated_scale(
    algorithm: Algorithm, run: str, updates: Sequence[tuple[int, Vector]], layout: Layout | None
) -> None:
    """Log a warning, once per run, if sign compression gives an update the scale of a few of its entries."""
    if run in _warned or not any(isinstance(part, sign) for part in walk_components(algorithm.channels[MODEL].uplink)):
        return
    for client, change in updates:
        if change.numel() >= SMALL and _is_dominated(run, client, change, layout):
            return


def _is_dominated(run: str, client: int, update: Vector, layout: Layout | None) -> bool:
    d, carrying = update.numel(), effective_entries(update)
    if carrying >= max(LEAST, FEW * d):
        return False
    _warned.add(run)
    squares = update.double().square()
    place = int(squares.argmax())
    blocks = [] if layout is None else layout.parameters
    name = next((e.name for e in blocks if e.offset <= place < e.offset + e.size), f"entry {place}")
    share = 100 * float(squares[place] / squares.sum())
    log.warning(
        "sign compression: about %.3g of %d entries carry the update of client %d (the largest, in %s, has %.0f%% of "
        "its squared norm), and sign() gives all entries one scale. Standardise the inputs, or use top_k or quantize; "
        "see docs/compression.md.",
        carrying, d, client, name, share,
    )  # fmt: skip
    return True
