"""FLamby's benchmarks: its data, its definitions, and its published numbers."""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hansa.core.keys import Key
from hansa.data.sources import DataError
from hansa.study.recipes import flamby

ROOT = Path(__file__).parents[3]


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("flamby_example", ROOT / "examples" / "flamby.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_published_numbers_come_out_exactly() -> None:
    module = example()  # of SCAFFOLD, the one with most state; `python examples/flamby.py` runs all six
    ours = module.train("fed-heart-disease", "Scaffold", 42, flamby.read_heart_disease())
    assert ours == module.read_published()["fed-heart-disease", "Scaffold", 42]


def test_hospitals_have_the_rows_and_the_scale_of_flamby() -> None:
    benchmark = flamby.read_heart_disease()
    assert {name: (len(rows.targets), len(rows.test_targets)) for name, rows in benchmark.sites.items()} == {
        "cleveland": (199, 104),
        "hungarian": (172, 89),
        "switzerland": (30, 16),
        "va": (85, 45),
    }
    assert benchmark.test_inputs.shape == (254, 13)
    for rows in benchmark.sites.values():
        assert torch.allclose(rows.inputs.mean(dim=0), torch.zeros(13), atol=1e-4)
        deviations = rows.inputs.std(dim=0)
        assert bool(((deviations - 1).abs() < 1e-3).logical_or(deviations == 0).all())  # a constant column stays 0


@pytest.mark.parametrize("workers", [0, 1])
def test_orders_are_those_of_torch_loaders(workers: int) -> None:
    sizes, batch_size, steps, rounds = (11, 5, 7), 4, 3, 4
    order = example().flamby_order(sizes, batch_size, steps, rounds, 42, workers=bool(workers), inputs=6)
    torch.manual_seed(42)
    torch.nn.Linear(6, 1)
    loaders = [
        DataLoader(TensorDataset(torch.arange(size)), batch_size, shuffle=True, num_workers=workers) for size in sizes
    ]
    iterators = [iter(loader) for loader in loaders]
    torch.manual_seed(42)
    drawn: list[list[int]] = [[] for _ in sizes]
    for _ in range(rounds):
        for client, loader in enumerate(loaders):
            for _ in range(steps):
                try:
                    (batch,) = next(iterators[client])
                except StopIteration:
                    iterators[client] = iter(loader)
                    (batch,) = next(iterators[client])
                drawn[client] += batch.tolist()
    for client, size in enumerate(sizes):
        passes = math.ceil(len(drawn[client]) / size)
        ours = [row for number in range(passes) for row in order.permutation(client, size, number, Key(0))]
        assert ours[: len(drawn[client])] == drawn[client], client


def test_orders_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    example().flamby_order((4, 3), 2, 2, 2, seed=1, workers=True, before="all").permutation(0, 4, 0, Key(0))
    assert torch.equal(torch.rand(3), expected)


def test_cox_loss_by_hand() -> None:
    generator = torch.Generator()
    generator.manual_seed(0)
    scores = torch.randn(9, generator=generator).double()
    times = torch.tensor([5.0, 2.0, 8.0, 2.0, 1.0, 9.0, 3.0, 3.0, 7.0]).double()
    events = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]).double()
    rows = sorted(range(9), key=lambda row: -times[row])  # stable: of equal times the first row comes first
    expected = 0.0
    for place, row in enumerate(rows):
        if events[row]:
            expected += math.log(sum(math.exp(scores[other] - scores[row]) for other in rows[: place + 1]))
    target = torch.stack([events, times], dim=1)
    assert float(flamby.cox_loss(scores[:, None], target)) == pytest.approx(expected / 9)


def test_files_of_other_contents_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"github\.com/owkin/FLamby"):
        flamby.read_tcga_brca(tmp_path)
    (tmp_path / "flamby").mkdir()
    (tmp_path / "flamby" / "brca.csv").write_text("pid\n")
    with pytest.raises(DataError, match="SHA-256"):
        flamby.read_tcga_brca(tmp_path)
