"""Every preset in a small setting, so that a suite over all of them is one line."""

from __future__ import annotations

from typing import Any

import hansa
from hansa import presets

GOSSIP = {"clusters": 2, "reporters": 1}
OWN: dict[str, dict[str, Any]] = {
    "ha_fed": GOSSIP,
    "cafga": GOSSIP,
    "afga": {"participation": 0.4},
    **{name: {} for name in ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")},
}
NAMES = sorted(presets.catalogue())


def small(name: str, **words: Any) -> hansa.Algorithm:
    """The preset with two local steps and two of five clients a round, where it has a say in that."""
    return presets.named(name, **{"steps": 2, **OWN.get(name, {"participation": 0.4}), **words})
