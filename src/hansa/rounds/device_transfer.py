"""Between the CPU, where messages and memories are, and the device where a client trains."""

from __future__ import annotations

from dataclasses import replace

import torch

from hansa.core.types import Vector, Vectors
from hansa.rounds.cohort_result import CohortResult
from hansa.rounds.messages import WorkOrder


def away(device: torch.device, order: WorkOrder, got: Vectors) -> tuple[WorkOrder, Vectors]:
    """What a client received and remembers, on its device."""
    memory = {client: _moved(rows, device) for client, rows in order.memory.items()}
    return replace(order, memory=memory), _moved(got, device)


def home(mixed: CohortResult) -> CohortResult:
    """What training made, on the CPU."""
    mixed.trained = {
        client: replace(
            trained,
            change=_cpu(trained.change),
            buffers=None if trained.buffers is None else _cpu(trained.buffers),
            memory=_moved(trained.memory, torch.device("cpu")),
        )
        for client, trained in mixed.trained.items()
    }
    mixed.mean = None if mixed.mean is None else _cpu(mixed.mean)
    return mixed


def _moved(vectors: Vectors, device: torch.device) -> Vectors:
    return {name: vector.to(device) for name, vector in vectors.items()}


def _cpu(vector: Vector) -> Vector:
    return vector.to("cpu")
