"""Regression over sites of unequal size, with samples weighted by the precision of their measurement."""

import os

import numpy as np
from torch import Tensor, nn

import hansa

draw = np.random.default_rng(0)
sizes = draw.integers(20, 120, 12)
site = np.repeat(np.arange(12), sizes)
x = draw.normal(size=(len(site), 4)).astype(np.float32)
noise = draw.uniform(0.05, 1.0, len(site))
y = (np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + noise[:, None] * draw.normal(size=(len(site), 1))).astype(np.float32)
weights = (1 / noise**2).clip(max=50)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.outer(nn.functional.silu(self.inner(x)))
        return output


def r2(output: Tensor, target: Tensor) -> Tensor:  # over all test rows
    return 1 - (output - target).pow(2).sum() / (target - target.mean()).pow(2).sum()


test = (x[::7], y[::7], weights[::7])
data = hansa.data.from_arrays(x, y, weights=weights, clients=site, test=test)
task = hansa.Task(Net, nn.functional.mse_loss, data, metrics={"r2": hansa.higher(r2)})
method = hansa.presets.scaffold(local_lr=0.05, steps=10, batch_size=20)
run = hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "60")))
print(run.table("round", "test_loss", "test_r2"))
