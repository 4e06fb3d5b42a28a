"""The process has one set of generators; runs in several threads get the models of their own seeds all the same."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from hansa import Key
from hansa.training import random_state
from hansa.training.modules import fresh


class Slow(nn.Module):
    """Draws from all three generators, with time for others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            time.sleep(0.001)
            self.layers.append(nn.Linear(3, 3))
        self.more = nn.Parameter(torch.tensor([random.random(), np.random.rand()]))  # noqa: NPY002


def made(seed: int) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in fresh(Slow, Key(seed)).parameters()])


def busy(seed: int) -> torch.Tensor:
    """What a run does to the generators beside making its model."""
    with random_state.fixed_arithmetic():
        random_state.seed_all(Key(100 + seed), torch.device("cpu"))
    return made(seed)


def test_models_made_in_threads_are_those_of_their_seeds() -> None:
    expected = [made(seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(busy, range(12)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
