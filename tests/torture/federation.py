"""Federations of every preset under whatever happens: frames lost, doubled, late, damaged; sites and servers that die.

``python -m torture.federation 3000`` (with ``tests`` on the path) takes so many through five rounds each, every preset
in turn. The server keeps its last checkpoints and goes back by up to two; each model and record must be those of the
serial run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter

from federation.crash_recovery import SETTINGS, expected, survive
from federation.faulty_transport import FaultyTransport
from federation.problems import same

ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=3000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    settings, words, met = list(SETTINGS), (*FaultyTransport.FAULTS, *FaultyTransport.SERVER_FAULTS), Counter[str]()
    for number in range(given.count):
        draw = random.Random(f"{given.seed} {number}")
        plan = [draw.choice(words) for _ in range(draw.randint(1, 40))]
        backs = [draw.randint(0, 2) for _ in range(20)]
        setting = settings[number % len(settings)]
        run, _ = survive(setting, ROUNDS, plan, backs)
        try:
            same(run, expected(setting, ROUNDS))
        except AssertionError:
            print(f"number {number}, {setting}: not the serial run; {plan}, back by {backs}")
            return 1
        met.update(plan)
    print(f"{given.count} federations of {len(settings)} settings, {met.total()} mishaps planned: all equal to serial")
    return 0


if __name__ == "__main__":
    sys.exit(main())
