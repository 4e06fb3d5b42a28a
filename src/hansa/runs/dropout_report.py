"""What a run says of clients whose updates it went on without."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hansa.core.errors import HansaError
from hansa.rounds.messages import DroppedClient

log = logging.getLogger("hansa")

ABSENT = {"lost", "silent", "quorum"}
"""Reasons of clients that sent nothing, or too few of them: nobody was refused."""


def refuse_nothing_done(history: Sequence[Mapping[str, Any]], lost: Sequence[tuple[int, DroppedClient]]) -> None:
    """A run of which no update was ever admitted, all for one reason, did not succeed: it says that reason."""
    reasons = {reason for record in history for reason in record.get("reasons") or ()}
    if not lost or len(reasons) != 1 or reasons <= ABSENT or any(record["participants"] for record in history):
        return
    round, example = lost[-1]
    raise HansaError(
        f"every update of all {len(history)} rounds was refused, so the model never moved ({reasons.pop()}; "
        f"client {example.client} in round {round}: {example.detail})."
    )


def say_who_was_lost(history: Sequence[Mapping[str, Any]], lost: Sequence[tuple[int, DroppedClient]]) -> None:
    """Warn of updates that were left out, by reason, and of the last of them in full."""
    if not lost:
        return
    reasons: Counter[str] = Counter()
    for record in history:
        reasons.update(record.get("reasons") or {})
    round, example = lost[-1]
    log.warning(
        "%d client updates were left out of %d rounds (%s); the last: client %d in round %d, %s",
        reasons.total(),
        sum(bool(record.get("lost")) for record in history),
        ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())),
        example.client,
        round,
        example.detail,
    )
