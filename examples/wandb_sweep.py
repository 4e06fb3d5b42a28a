"""A sweep that Weights & Biases drives. WANDB_MODE=offline runs one trial, without an account."""

import os
from typing import Any

import torch
import wandb

import hansa

METRIC = "validation/test_accuracy"
SWEEP: dict[str, Any] = {
    "method": "bayes",
    "metric": {"name": METRIC, "goal": "maximize"},
    "parameters": {
        "local_lr": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.3},
        "server_lr": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.3},
        "batch_size": {"values": [16, 32]},
    },
}
clients = hansa.data.with_validation(hansa.data.federate("fashion-mini", clients=20), 0.1)  # rows to tune on
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
rounds = int(os.environ.get("ROUNDS", "20"))


def trial(**init: Any) -> None:
    """Train at the point that the sweep proposes; the sweep optimizes what is last logged."""
    with wandb.init(project="hansa", **init) as tracked:

        def log(run: hansa.Run, record: dict[str, Any]) -> None:
            tracked.log({name: value for name, value in record.items() if isinstance(value, int | float)})

        run = hansa.run(hansa.presets.fedams(**tracked.config), task, rounds=rounds, callbacks=[log])
        print(METRIC, run.history[-1][METRIC])


if os.environ.get("WANDB_MODE") == "offline":  # a point of our own, in place of the sweep's
    trial(config={"local_lr": 0.1, "server_lr": 0.1, "batch_size": 32})
else:
    wandb.agent(wandb.sweep(SWEEP, project="hansa"), trial, count=20)
