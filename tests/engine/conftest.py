from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hansa.engine.processes import ProcessGroup


@pytest.fixture(scope="session")
def group(_warm_workers: None) -> Iterator[ProcessGroup]:
    """Three worker processes for all tests: their start takes seconds."""
    with closing(ProcessGroup()) as group:
        for _ in range(3):
            group.spawn()
        yield group


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a run: the number of intra-op threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
