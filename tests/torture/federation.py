"""Federations of every preset under whatever happens: frames lost, doubled, late, damaged; sites and servers that die.

Every preset in turn goes through five rounds. The server keeps its last checkpoints and goes back by up to two; each
model and record must be those of the serial run.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path

from federation.problems import SETTINGS, FaultyTransport, expected, same, survive

ROUNDS = 5


def run(count: int, place: Path | None = None, seed: int = 0) -> Counter[str]:
    """``count`` federations; returns the mishaps."""
    logging.disable(logging.WARNING)
    settings, words, met = list(SETTINGS), (*FaultyTransport.FAULTS, *FaultyTransport.SERVER_FAULTS), Counter[str]()
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        plan = [draw.choice(words) for _ in range(draw.randint(1, 40))]
        backs = [draw.randint(0, 2) for _ in range(20)]
        setting = settings[number % len(settings)]
        found, _ = survive(setting, ROUNDS, plan, backs)
        try:
            same(found, expected(setting, ROUNDS))
        except AssertionError as error:
            error.add_note(f"number {number}, {setting}: not the serial run; {plan}, back by {backs}")
            raise
        met.update(plan)
    return met
