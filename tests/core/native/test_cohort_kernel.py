"""A cohort's turns in one native call: steps in place, gossip in place, and the loop's own bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch

from core.native.sets import in_each_set
from core.native.test_client_kernel import made
from hansa.compress import accumulate, sign
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.clients import (
    GROUP,
    TURN,
    ChangeSums,
    ClientKernel,
    CohortKernel,
    LazyCohortKernel,
    combine_changes,
    gram,
    squared_spread,
)
from hansa.core.native.network import AffineStep
from hansa.core.vectors.kernels import CsrWeights
from hansa.gossip import complete, erdos_renyi, exponential, ring, star, unbalanced_complete

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

N = 5


def laboratory(name="CNN-29k"):
    stack, x, inputs, labels = made(name)
    draw = torch.Generator().manual_seed(3)
    rows = torch.stack([x + 0.05 * torch.randn(x.shape, generator=draw) for _ in range(N)])
    index = [torch.randint(0, 30, (4, 3 + client), generator=draw) for client in range(N)]
    return ClientKernel(stack, inputs, labels), rows, index


def turns(*given):
    return np.array(
        [(row, 1, 0) if index is None else (row, len(index), index.data_ptr()) for row, index in given], TURN
    )


def mixing_links(matrix):
    return CsrWeights.of(scipy.sparse.csr_array(matrix))


def run(kernel, plan, weights, *options):
    kernel.prepare(plan, mixing_links(weights), *options)
    return kernel.run()


RING = np.asarray(ring().sparse(N).toarray())


@in_each_set
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("seconds", "name"), [(10.0, "CNN-29k"), (0.0, "CNN-29k"), (10.0, "residuals"), (10.0, "embeddings")]
)
def test_steps_are_those_of_each_client_alone_to_the_bit_and_gossip_over_itself_changes_none(momentum, seconds, name):
    clients, rows, index = laboratory(name)
    anchor = rows.mean(dim=0)
    settings = AffineStep(
        0.05, anchor, prox_weight=0.1, shift=anchor * 1e-3, weight_decay=0.01, momentum=momentum, max_grad_norm=0.5
    )
    alone, velocities = rows.clone(), torch.zeros_like(rows)
    expected = []
    for t in range(4):
        for client in range(N):
            own = replace(settings, velocity=velocities[client] if momentum else None)
            expected.append(float(clients.steps(alone[client], index[client][t : t + 1], own)))
    kernel = CohortKernel(clients, rows, settings)
    kernel._cohort.seconds = seconds  # a call that ends after every turn, so that Ctrl-C is heard
    kept = {client: torch.zeros_like(rows[0]) for client in range(N)} if momentum else {}
    plan = turns(*(turn for t in range(4) for turn in [*((c, index[c][t]) for c in range(N)), (abi.MIX, None)]))
    losses, done = run(kernel, plan, np.eye(N), None, 1.0, kept)
    assert done == len(plan)
    assert kernel.dropped is None
    assert losses[plan["row"] >= 0].tolist() == expected
    assert torch.equal(rows, alone)
    for client, velocity in kept.items():
        assert torch.equal(velocity, velocities[client])


@in_each_set
@pytest.mark.parametrize("name", ["single linear layer", "CNN-29k"])
def test_signs_are_the_compressors_own_to_the_bit(name):
    clients, rows, _ = laboratory(name)
    draw = torch.Generator().manual_seed(9)
    copies = rows + 0.01 * torch.randn(rows.shape, generator=draw)
    copies[0, :7] = rows[0, :7]  # both zeros are +
    expected_rows, expected = rows.double().clone(), copies.clone()
    for client in range(N):
        packet = sign().encode(rows[client] - copies[client], Key(0))
        accumulate(packet, expected[client])
        assert packet.nbytes == sign().max_nbytes(rows.shape[1], torch.float32)
    kernel = CohortKernel(clients, rows, AffineStep(0.05))
    run(kernel, turns((abi.SIGNS, None)), RING, copies, 0.3)
    assert torch.equal(copies, expected)
    pulled = torch.from_numpy(RING) @ copies.double() - copies.double()
    torch.testing.assert_close(rows.double(), expected_rows + 0.3 * pulled, rtol=0, atol=1e-6)
    rows[3, 5] = torch.finfo(torch.float32).max
    copies[3, 5] = -torch.finfo(torch.float32).max
    with pytest.raises(HansaError, match="row 3 to its public copy: it overflows"):
        run(kernel, turns((abi.SIGNS, None)), RING, copies, 0.3)


def test_what_does_not_fit_is_refused_before_anything_moves():
    clients, rows, index = laboratory("single linear layer")
    kernel = CohortKernel(clients, rows, AffineStep(0.05))
    with pytest.raises(HansaError, match="links of 4 rows for 5"):
        run(kernel, turns((abi.MIX, None)), np.eye(4))
    with pytest.raises(HansaError, match="copies is"):
        run(kernel, turns((abi.MIX, None)), RING, rows[:2], 0.3)
    with pytest.raises(HansaError, match="rows is"):
        CohortKernel(clients, rows[0], AffineStep(0.05))
    before = rows.clone()
    for wrong in ((N, index[0][0]), (0, torch.tensor([0, 30]))):
        with pytest.raises(HansaError, match="a row that does not exist"):
            run(kernel, turns((0, index[0][0]), wrong), RING)
    assert torch.equal(rows, before)


def apart(rows):
    return float((rows.double() - rows.double().mean(dim=0)).square().sum())


@in_each_set
@pytest.mark.parametrize(("size", "close"), [(1.0, 1e-7), (1e25, 1e-12), (1e-18, 1e-12)])
def test_the_spread_is_that_of_the_chosen_rows(size, close):
    """Of few rows to seven digits; where squares do not fit float32, and of many rows, in float64."""
    rows = 100 * size + size * torch.randn(20, 2500, generator=torch.Generator().manual_seed(0))
    assert squared_spread(rows, [0, 2, 5], 2300) == pytest.approx(apart(rows[[0, 2, 5], :2300]), rel=close)
    assert squared_spread(rows, range(17), 2300) == pytest.approx(apart(rows[:17, :2300]), rel=1e-12)
    assert squared_spread(rows[:1].repeat(3, 1), [0, 2], 2300) == 0
    with pytest.raises(HansaError, match="spread: 1 rows"):
        squared_spread(rows, [20], 2300)


@in_each_set
@pytest.mark.parametrize("name", ["MLP", "CNN-29k"])
def test_rows_that_grow_are_followed_until_they_leave_the_numbers(name):
    """Bounds stand in for a look at every row: the step at which one overflows is still found."""
    clients, rows, index = laboratory(name)
    rows, expected = rows.mul_(30), None
    alone, settings = rows.clone(), AffineStep(1e12)
    kernel = CohortKernel(clients, rows, settings)
    order = [(client, index[client][t]) for t in range(4) for client in range(N)]
    for place, (client, batch) in enumerate(order):
        clients.steps(alone[client], batch[None], settings)
        if not alone[client].isfinite().all():
            expected = (place, client)
            break
    assert expected is not None
    assert expected[0] >= N  # not at once
    made = turns(*(turn for t in range(4) for turn in [*order[N * t : N * t + N], (abi.MIX, None)]))
    _, done = run(kernel, made, np.eye(N))
    assert (int((made["row"][:done] >= 0).sum()) - 1, kernel.dropped) == expected


GRAPHS = [
    *((ring(), n) for n in (2, 3, 4, 7)),
    (star(), 5),
    (complete(), 5),
    (erdos_renyi(0.5), 7),
    (exponential(), 9),
    (unbalanced_complete(), 13),
    (complete(), 14),
]
KINDS = [(abi.MIX, False), (abi.MIX, True), (abi.PULL, False), (abi.SIGNS, False)]


def exchanged(kind, later, weights, rows, copies):
    """Rows and public copies after one exchange; with ``later`` every second row has stepped."""
    clients, *_ = laboratory("single linear layer")
    rows, copies = rows.clone(), copies.clone()
    kernel = CohortKernel(clients, rows, AffineStep(0.05), after_exchange=later)
    if later:
        kernel._later.copy_(rows + 1)
        kernel._stepped[::2] = 1
    run(kernel, turns((kind, None)), weights, copies, 0.3)
    return rows, copies


@in_each_set
@pytest.mark.parametrize(("topology", "n"), GRAPHS)
@pytest.mark.parametrize(("kind", "later"), KINDS)
def test_any_graph_is_the_product_with_the_same_bits_beside_a_row_that_hears_nobody(kind, later, topology, n):
    """The lone row moves the groups of rows that are summed together, and makes a complete graph like any other, and a
    ring, whose rows pass through registers. No two weights of a ring are alike."""
    _, rows, _ = laboratory("single linear layer")
    draw = torch.Generator().manual_seed(n)
    rows = torch.randn(n + 1, rows.shape[1], generator=draw)
    rows[:, 3] = -0.0
    copies = rows + 0.01 * torch.randn(rows.shape, generator=draw)
    beside = np.zeros((n + 1, n + 1))
    beside[:n, :n] = topology.sparse(n).toarray()
    if topology == ring():
        beside[:n, :n] *= np.random.default_rng(n).uniform(0.2, 1.0, (n, n))
        beside[:n, :n] /= beside[:n, :n].sum(axis=1, keepdims=True)
    beside[n, n] = 1.0
    mixed, public = exchanged(kind, later, beside[:n, :n], rows[:n], copies[:n])
    found, found_public = exchanged(kind, later, beside, rows, copies)
    assert mixed.numpy().tobytes() == found[:n].numpy().tobytes()
    assert public.numpy().tobytes() == found_public[:n].numpy().tobytes()
    weights = torch.from_numpy(beside[:n, :n])
    if kind == abi.MIX:
        expected = weights @ rows[:n].double()
        expected[::2] += 1.0 if later else 0.0
    else:
        expected = rows[:n] + 0.3 * (weights @ public.double() - public.double())
    torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=2e-6)


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


@in_each_set
@pytest.mark.parametrize("name", ["CNN-29k", "MLP", "embeddings"])
@pytest.mark.parametrize("settings", [PLAIN, MORE], ids=["plain", "more"])
def test_steps_from_sums_of_changes(settings, name):
    clients, rows, index = laboratory(name)
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


@in_each_set
@pytest.mark.parametrize("dim", [1, 37, 1025, 3000])
def test_sums_of_changes_and_their_products(dim):
    draw = torch.Generator().manual_seed(dim)
    start, changes = torch.randn(dim, generator=draw), torch.randn(9, dim, generator=draw)
    weights = torch.rand(6, 7, generator=draw, dtype=torch.float64) * (torch.rand(6, 7, generator=draw) < 0.5)
    found = combine_changes(start, changes, weights.numpy())
    torch.testing.assert_close(found.double(), start.double() + weights @ changes[:7].double(), rtol=1e-5, atol=1e-5)
    part = dim - dim // 3
    expected = (changes[:, :part].double() @ changes[:, :part].double().T).numpy()
    np.testing.assert_allclose(gram(changes, part), expected, rtol=1e-5, atol=1e-4)


def test_sums_of_changes_that_do_not_fit_are_refused_before_anything_moves():
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
