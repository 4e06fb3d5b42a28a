from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hansa.engine.processes import Processes


@pytest.fixture(scope="session")
def crew() -> Iterator[Processes]:
    """Three worker processes for all tests: their start takes seconds."""
    with Processes(3) as crew:
        yield crew


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a run: the number of intra-op threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
