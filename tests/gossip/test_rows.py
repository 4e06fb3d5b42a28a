"""Mean and distance from consensus of a cohort's rows, dense and lazy, against the rows themselves."""

from __future__ import annotations

import math

import pytest
import torch

from hansa.gossip import complete, ring, star
from hansa.gossip.rows import DenseRows, LazyRows, Mixer, Rows

DIM, PARAMETERS = 6000, 5000


def trained(rows: Rows, mixer: Mixer, lost: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    for step, active in enumerate([[0, 4], [2], [1, 3, 6], [5, 0]]):
        for position, row in zip(active, rows.read(active), strict=True):
            rows.write(position, row, row + torch.randn(DIM, generator=draw, dtype=row.dtype))
        if lost and step == 1:
            mixer.drop(2)
        rows.mix(mixer)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("topology", [ring(), star(), complete()], ids=repr)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_mean_and_spread_are_those_of_the_rows(topology, lost, dtype, close):
    start = torch.linspace(-1, 1, DIM, dtype=dtype)
    for rows in (DenseRows(start.repeat(7, 1)), LazyRows(start, 7, 8)):
        mixer = Mixer(topology, 7)
        assert rows.spread(mixer, PARAMETERS) < 1e-12
        assert torch.allclose(rows.mean(mixer), start.double(), atol=1e-6)
        trained(rows, mixer, lost)
        read = rows.read(mixer.positions).double()
        assert len(read) == 7 - lost
        assert torch.allclose(rows.mean(mixer), read.mean(dim=0), rtol=0, atol=close)
        models = read[:, :PARAMETERS]  # buffers are no part of it
        expected = math.sqrt(float((models - models.mean(dim=0)).square().sum() / len(models)))
        assert rows.spread(mixer, PARAMETERS) == pytest.approx(expected, rel=close, abs=close)
        assert expected > 1 or topology == complete()
