"""The samples of a task: what it asks of federated data, and how a worker keeps the inputs."""

from __future__ import annotations

from typing import Protocol

import torch


class ClientData(Protocol):
    """What a task asks of federated data: one tensor of inputs, one of targets, and each client's rows of them."""

    @property
    def inputs(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def test_inputs(self) -> torch.Tensor | None: ...
    @property
    def test_targets(self) -> torch.Tensor | None: ...
    @property
    def population(self) -> int: ...
    def rows(self, client: int) -> torch.Tensor: ...
    def samples(self, client: int) -> int: ...


class Store:
    """Inputs as a worker keeps them: images lie channels-last, so that a gathered batch is channels-last for free,
    unless the model cannot work with it."""

    def __init__(
        self, inputs: torch.Tensor, dtype: torch.dtype, device: torch.device, channels_last: bool = True
    ) -> None:
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        self.image = inputs.ndim == 4 and channels_last
        if self.image:
            inputs = inputs.permute(0, 2, 3, 1)
        self.values = inputs.contiguous().to(device)

    @property
    def logical(self) -> torch.Tensor:
        """All inputs in the shape the model knows, whatever their order in memory."""
        return self.values.permute(0, 3, 1, 2) if self.image else self.values

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        batch = self.values.index_select(0, rows)
        return batch.permute(0, 3, 1, 2) if self.image else batch
