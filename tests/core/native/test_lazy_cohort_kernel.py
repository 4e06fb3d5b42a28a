"""Models made from the changes so far: the same steps as on rows that are held, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.native.sets import each_set
from core.native.test_cohort_kernel import laboratory, turns
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.clients import GROUP, ChangeSums, LazyCohortKernel, combine_changes, gram
from hansa.core.native.network import AffineStep

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

PLAIN, MORE = AffineStep(0.05), AffineStep(0.05, prox_weight=0.1, weight_decay=0.01, momentum=0.9, max_grad_norm=0.5)


def plan(index, groups):
    """Turns of groups of clients, each taking its next batch."""
    taken = [0] * len(index)
    found = []
    for group in groups:
        found.append((abi.GATHER, None, len(group)))
        for client in group:
            found.append((client, index[client][taken[client]], 0))
            taken[client] += 1
    made = turns(*((row, batch) for row, batch, _ in found))
    for place, (row, _, many) in enumerate(found):
        if row == abi.GATHER:
            made["batch"][place] = many
    return made


@pytest.mark.parametrize("isa", each_set())
@pytest.mark.parametrize("name", ["CNN-29k", "MLP", "embeddings"])
@pytest.mark.parametrize(
    "settings",
    [AffineStep(0.05), AffineStep(0.05, prox_weight=0.1, weight_decay=0.01, momentum=0.9, max_grad_norm=0.5)],
    ids=["plain", "more"],
)
def test_steps_from_sums_of_changes(settings, name, isa):
    clients, rows, index = laboratory(isa, name)
    start = rows.mean(dim=0)
    made = plan(index, [[0, 3], [1], [3, 0, 4]])
    weights = [np.zeros((1, 0)), np.zeros((2, 0)), np.zeros((1, 0)), np.array([[0.5, 0.25]]), np.zeros((1, 0))]
    weights.append(np.array([[0.0, 1.0, 0.5], [0.3, 0.3, 0.4], [0.0, 0.0, 0.0]]))
    velocities = {client: torch.zeros_like(start) for client in range(5)} if settings.momentum else {}
    changes = torch.full((6, len(start)), torch.nan)
    kernel = LazyCohortKernel(clients, start, replace(settings, anchor=start))
    losses, done = kernel.run(changes, 0, made, ChangeSums.of(weights), velocities)
    assert (done, kernel.dropped) == (len(made), None)
    expected, taken = [], [0] * 5
    kept = {client: torch.zeros_like(start) for client in range(5)}
    steps = [(0, []), (3, []), (1, [0.5, 0.25]), (3, [0.0, 1.0, 0.5]), (0, [0.3, 0.3, 0.4]), (4, [0.0, 0.0, 0.0])]
    for place, (client, own) in enumerate(steps):
        model = start + sum((w * changes[k] for k, w in enumerate(own)), torch.zeros_like(start))
        before = model.clone()
        one = replace(settings, anchor=start, velocity=kept[client] if settings.momentum else None)
        expected.append(float(clients.steps(model, index[client][taken[client]][None], one)))
        taken[client] += 1
        torch.testing.assert_close(changes[place], model - before, rtol=1e-4, atol=2e-7)
        assert changes[place].abs().max() > 1e-5
    assert losses[made["row"] >= 0].tolist() == pytest.approx(expected, rel=1e-6)
    for client, velocity in velocities.items():
        torch.testing.assert_close(velocity, kept[client], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("isa", each_set())
def test_a_step_that_leaves_the_numbers_ends_the_walk_without_its_change(isa):
    clients, rows, index = laboratory(isa, "MLP")
    start = rows[0].clone()
    made = plan(index, [[0, 1], [2]])
    terms = ChangeSums.of([np.zeros((1, 0)), np.zeros((2, 0)), np.zeros((1, 0)), np.array([[1.0, 0.0]])])
    kernel = LazyCohortKernel(clients, start, AffineStep(3e38))
    _, done = kernel.run(torch.empty(3, len(start)), 0, made, terms)
    assert (done, kernel.dropped) == (2, 0)


@pytest.mark.parametrize("isa", each_set())
@pytest.mark.parametrize("dim", [1, 37, 1025, 3000])
def test_sums_of_changes_and_their_products(dim, isa):
    draw = torch.Generator().manual_seed(dim)
    start, changes = torch.randn(dim, generator=draw), torch.randn(9, dim, generator=draw)
    weights = torch.rand(6, 7, generator=draw, dtype=torch.float64) * (torch.rand(6, 7, generator=draw) < 0.5)
    found = combine_changes(start, changes, weights.numpy(), isa)
    torch.testing.assert_close(found.double(), start.double() + weights @ changes[:7].double(), rtol=1e-5, atol=1e-5)
    part = dim - dim // 3
    expected = (changes[:, :part].double() @ changes[:, :part].double().T).numpy()
    np.testing.assert_allclose(gram(changes, part, isa), expected, rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused_before_anything_moves():
    clients, rows, index = laboratory(name="MLP")
    kernel = LazyCohortKernel(clients, rows[0].clone(), AffineStep(0.1))
    made = plan(index, [[0]])
    changes = torch.full((1, rows.shape[1]), torch.nan)
    for wrong in ([np.zeros((1, 0))], [np.zeros((1, 0)), np.array([[0.0, 0.0, 1.0]])]):
        with pytest.raises(HansaError, match="not those of 2 turns"):
            kernel.run(changes, 0, made, ChangeSums.of(wrong))
    terms = ChangeSums.of([np.zeros((1, 0)), np.zeros((1, 0))])
    with pytest.raises(HansaError, match="a row that does not exist"):
        kernel.run(changes, 1, made, terms)  # no room for one more
    with pytest.raises(HansaError, match="expected contiguous"):
        kernel.run(changes[:, 1:], 0, made, terms)
    many = made.copy()
    many["batch"][0] = GROUP + 1
    with pytest.raises(HansaError, match="not those of 2 turns"):
        kernel.run(changes, 0, many, terms)
    with pytest.raises(HansaError, match="combine_changes"):
        combine_changes(rows[0], rows, np.zeros((1, 9)))
    with pytest.raises(HansaError, match="gram"):
        gram(rows, rows.shape[1] + 1)
    assert changes.isnan().all()
