"""What the clients of a closed round did, as columns for the record."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hansa.rounds import Outcome
from hansa.runs.client_columns import Array


def participation(down: Mapping[int, int], outcome: Outcome) -> dict[str, Array]:
    """A row a client that was asked or talked to its neighbours; ``down`` has the bytes of those who were asked."""
    clients = sorted({*down, *outcome.peer_bytes})
    if not clients:
        return {}
    admitted = set(outcome.admitted)
    losses = ((math.nan if (loss := outcome.losses.get(client)) is None else loss) for client in clients)
    norms = (outcome.norms.get(client, math.nan) for client in clients)
    count = len(clients)
    with np.errstate(over="ignore"):  # what single precision cannot hold is infinite
        return {
            "client": np.array(clients, np.int64),
            "asked": np.fromiter((client in down for client in clients), np.bool_, count),
            "admitted": np.fromiter((client in admitted for client in clients), np.bool_, count),
            "loss": np.fromiter(losses, np.float64, count).astype(np.float32),
            "norm": np.fromiter(norms, np.float64, count).astype(np.float32),
            "up_bytes": np.fromiter((outcome.up_bytes.get(client, 0) for client in clients), np.int64, count),
            "down_bytes": np.fromiter((down.get(client, 0) for client in clients), np.int64, count),
            "peer_bytes": np.fromiter((outcome.peer_bytes.get(client, 0) for client in clients), np.int64, count),
        }
