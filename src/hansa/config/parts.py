"""Slots for parts of a run beside its algorithm: who holds what, what goes wrong, how long messages take."""

from __future__ import annotations

from collections.abc import Sequence

from hansa.config.registry import slot
from hansa.data import Partition
from hansa.rounds.faults import faults
from hansa.rounds.ledger import LinkModel
from hansa.training.augment import Augmentation
from hansa.training.losses import Loss

AUGMENT = slot(Augmentation | Sequence[Augmentation])
FAULTS = slot(faults)
LOSS = slot(Loss)
LINKS = slot(LinkModel)
PARTITION = slot(Partition)
