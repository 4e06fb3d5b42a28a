"""The cost of a round when most clients are idle: AFGA on a ring, 5 clients computing at a step, CNN-29k, 24 steps.

    python gossip.py CLIENTS ROUNDS lazy|dense ARRAYS.npz ANSWER.json

"lazy" is the choice of Hansa's cost rule: rows of idle clients are never created. "dense" stores and mixes all rows.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

import hansa
from hansa.training import models
from scaling import Point, federated, measure

ACTIVE = 5
LOOP: Any = importlib.import_module("hansa.gossip.cohort")


def main() -> None:
    clients, rounds, how, arrays = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if how == "dense":
        LOOP.lazy_pays = lambda *_: False
    point = Point(clients, ACTIVE, "cnn_29k", 24, 50, rounds, workers=1, images=arrays)
    dealt = federated(point)
    factory = partial(models.build, point.model, classes=10, shape=dealt.shape)
    task = hansa.Task(factory, cross_entropy, dealt)
    algorithm = hansa.presets.afga(
        participation=ACTIVE / clients,
        topology=hansa.gossip.ring(),
        steps=point.steps,
        batch_size=point.batch,
        local_lr=0.1,
        server_lr=0.01,
    )
    Path(sys.argv[5]).write_text(json.dumps(measure(algorithm, task, point)))


if __name__ == "__main__":
    main()
