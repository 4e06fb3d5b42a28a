"""Sign compression warns once if a few entries dominate its scale."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa import compress, presets


class Risk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def task(scale: float) -> hansa.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=draw)
    y = x.sum(1, keepdim=True)
    x[:, 3] = 50 + scale * x[:, 3] if scale != 1 else x[:, 3]
    return hansa.Task(Risk, nn.functional.mse_loss, hansa.data.from_arrays(x, y, clients=[i % 3 for i in range(60)]))


@pytest.mark.parametrize(
    ("scale", "compressor", "expected"),
    [(10.0, compress.sign(), 1), (1.0, compress.sign(), 0), (10.0, compress.top_k(0.2), 0), (10.0, None, 0)],
)
def test_a_run_warns_once_of_a_dominated_scale(scale: float, compressor: Any, expected: int, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="hansa"):
        hansa.run(presets.fedavg(local_lr=1e-5, steps=2, compressor=compressor), task(scale), rounds=2, workers=1)
    warnings = [record.getMessage() for record in caplog.records if "sign compression" in record.getMessage()]
    assert len(warnings) == expected
    if expected:
        assert "of 21 entries carry the update of client 0" in warnings[0]
        assert "linear.weight" in warnings[0]
        assert "Standardise the inputs" in warnings[0]
