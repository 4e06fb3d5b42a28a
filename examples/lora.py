"""LoRA: only low-rank corrections of a frozen model are trained and sent; workers share the frozen weights.

The layer is written out, so that the example has no dependencies; `peft_lora.py` does the same with `peft`.
"""

import os

import torch
from torch import Tensor, nn

import hansa


class Lora(nn.Module):
    """y = W x + B A x, W frozen, A and B of rank r."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.linear(x)
        return frozen + x @ self.a.T @ self.b.T


def pretrained() -> nn.Module:  # in practice: load_state_dict of a trained model
    torch.manual_seed(7)
    body = [Lora(nn.Linear(784, 256)), nn.ReLU(), Lora(nn.Linear(256, 256)), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(256, 10))


data = hansa.data.federate("fashion-mini", clients=30)
task = hansa.Task(pretrained, nn.functional.cross_entropy, data)
whole = sum(parameter.numel() for parameter in pretrained().parameters())
print(f"{task.layout.dim} of {whole} parameters are trained and sent")
method = hansa.presets.fedavg(local_lr=0.1, steps=10, batch_size=20, participation=0.2)
print(hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "30"))).table("round", "test_accuracy", "up_bytes"))
