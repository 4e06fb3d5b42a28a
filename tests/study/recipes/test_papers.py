"""The recipes as they were compared with their papers: settings, published numbers and claims."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import hansa
from hansa.config import allow_code, build_algorithm, from_yaml
from hansa.core.keys import Key
from hansa.data.sources import DataError
from hansa.study.recipes import SCALES, flamby, library
from hansa.study.recipes.verdict import compare_with_paper

RECIPES = sorted(library())

DIGESTS: dict[str, str] = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))
"""SHA-256 of the settings, published numbers, measures and claims of each recipe, as they were when they were compared
with the paper, cell by cell and rate by rate."""


@pytest.mark.parametrize("name", RECIPES)
def test_settings_numbers_and_claims_are_those_that_were_compared_with_the_paper(name: str) -> None:
    """Whoever changes a recipe compares it with its paper again, and then records the digest that the failure tells."""
    recipe = library()[name]
    cells = [[scale, cell.row, cell.column, cell.document] for scale in SCALES for cell in recipe.cells(scale)]
    seeds = [recipe.at(scale).seeds for scale in SCALES]
    published = [[cell.row, cell.column, cell.published] for cell in recipe.cells("paper")]
    measures = {name: measure.model_dump() for name, measure in recipe.measures.items()}
    claims = [claim.model_dump() for claim in recipe.claims]
    told = json.dumps([cells, seeds, published, measures, claims], sort_keys=True)
    assert hashlib.sha256(told.encode()).hexdigest() == DIGESTS[name]


def test_numbers_of_other_data_have_no_difference_and_no_target_of_the_paper() -> None:
    history = [{"round": r, "test_accuracy": 0.5 + r / 100, "simulated_seconds": 60.0} for r in range(1, 41)]
    checked = 0
    for name, recipe in library().items():
        measures = recipe.measured("cpu")
        if recipe.same_data("cpu"):
            assert measures == recipe.measures, name
            continue
        for measure in measures.values():
            if measure.target is not None:
                assert measure.target in recipe.at("cpu").targets.values(), name
        if not {measure.metric for measure in measures.values()} <= {"test_accuracy"}:
            continue
        cells = [(cell.row, cell.column) for cell in recipe.cells("cpu")]
        comparisons, _ = compare_with_paper(recipe, "cpu", dict.fromkeys(cells, [history] * 3))
        assert comparisons
        assert {one.difference for one in comparisons} == {None}, name
        checked += 1
    assert checked >= 5
    assert library()["afga-table-3"].same_data("cpu")  # Shakespeare, with a smaller network
    assert not library()["afga-table-1"].same_data("cpu")
    assert library()["cams-table-2"].measures["bits"].counted  # the same on any data


def test_scaffold_of_niid_bench_is_its_recursion() -> None:
    beta, lr, steps, parties, rounds = 0.9, 0.02, 5, 6, 7
    draw = np.random.default_rng(0)
    sizes = [3, 9, 4, 7, 5, 8]
    inputs = [draw.normal(size=(size, 3)).astype(np.float32).astype(np.float64) for size in sizes]  # as they are kept
    targets = [draw.normal(size=(size, 1)).astype(np.float32).astype(np.float64) for size in sizes]
    owners = np.repeat(np.arange(parties), sizes)
    data = hansa.data.from_arrays(np.concatenate(inputs), np.concatenate(targets), clients=owners)
    task = hansa.Task(lambda: torch.nn.Linear(3, 1, bias=False), torch.nn.functional.mse_loss, data)
    cells = library()["niid-cifar-10-parties"].cells("paper")
    document = next(cell.document for cell in cells if cell.row.startswith("SCAFFOLD, NIID"))
    settings = {"lr": lr, "epochs": steps, "batch_size": 9, "weight_decay": 0.0}
    with allow_code():
        words = [*(f"local.{key}={value}" for key, value in settings.items()), "sample.participation=0.5"]
        method = build_algorithm(from_yaml(yaml.safe_dump(document), words))
    run = hansa.Run(method, task, seed=0, dtype=torch.float64)
    x = run.state.vectors["model"].numpy().copy()
    run.advance(rounds)
    c, own = np.zeros(3), np.zeros((parties, 3))
    for record in run.history:
        chosen, models, changes = record["clients"], [], []
        for i in chosen:
            y, velocity = x.copy(), np.zeros(3)
            for _ in range(steps):
                residual = inputs[i] @ y - targets[i][:, 0]
                gradient = 2 * inputs[i].T @ residual / sizes[i]
                velocity = beta * velocity + gradient + (1 - beta) * (c - own[i])
                y = y - lr * velocity
            changes.append((x - y) / (steps * lr) - c)
            models.append(y)
        for i, change in zip(chosen, changes, strict=True):
            own[i] = own[i] + change
        c = c + np.mean(changes, axis=0)
        x = np.average(models, axis=0, weights=[sizes[i] for i in chosen])
    assert {client for record in run.history for client in record["clients"]} == set(range(parties))
    np.testing.assert_allclose(run.state.vectors["model"].numpy(), x, rtol=1e-10)
    np.testing.assert_allclose(run.state.vectors["control"].numpy(), c, rtol=1e-10)


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
