"""Parts of a run that are no parts of its algorithm: who holds what, what goes wrong, how long messages take."""

from __future__ import annotations

from hansa.data import Partition
from hansa.registry import KINDS, add, slot
from hansa.rounds import ledger
from hansa.rounds.faults import faults

LINK_MODEL = add(
    "link_model",
    ledger.LinkModel,
    {"custom": ledger.LinkModel, "afga": ledger.afga},
    ("seconds",),
    word="link model",
    default="custom",
)

__all__ = ["FAULTS", "KINDS", "LINKS", "LINK_MODEL", "PARTITION"]

FAULTS = slot(faults)
LINKS = slot(ledger.LinkModel)
PARTITION = slot(Partition)
