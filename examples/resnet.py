"""A custom ResNet on CIFAR-10 (`hansa data get cifar10`) with random crops and flips: two methods, three seeds."""

import os
from typing import Any

from torch import Tensor, nn

import hansa

clients = hansa.data.federate(os.environ.get("DATA", "cifar10"), clients=100, normalize=False)
channels, rounds, seeds = clients.shape[0], int(os.environ.get("ROUNDS", "100")), int(os.environ.get("SEEDS", "3"))


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(2, outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(2, outside),
        )  # fmt: skip
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.short(x))


def resnet() -> nn.Module:
    widths = [(channels, 16, 1), (16, 32, 2), (32, 64, 2)]
    return nn.Sequential(*(ResidualBlock(*w) for w in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


augment = [hansa.augment.crop(4), hansa.augment.flip(), hansa.augment.normalize([0.5] * channels, [0.25] * channels)]
task = hansa.Task(resnet, nn.functional.cross_entropy, clients, augment=augment)
common: dict[str, Any] = {"local_lr": 0.05, "steps": 5, "batch_size": 20, "participation": 0.1}
methods = {"FedAvg": hansa.presets.fedavg(**common), "FedAMS": hansa.presets.fedams(server_lr=0.05, **common)}
result = hansa.compare(methods, task, rounds=rounds, seeds=seeds, workers=1)
print(result)
result.plot("resnet.pdf")
