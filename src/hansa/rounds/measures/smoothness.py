"""Estimates of the smoothness L and of the gradient bound G that the papers' theorems assume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.types import Vector, Vectors
from hansa.rounds.measures.client_gradients import ClientGradients, Trainable, square

STEP = 1e-4  # of the differences of gradients, times the size of the model; exact for quadratics at any size


@dataclass(frozen=True, slots=True)
class Smoothness:
    """Estimates at one model. The theorems assume bounds at every model: the true constants are at least these.

    - ``L``: the largest, over the ``clients`` measured, of max |eigenvalue| of the Hessian of the client's loss;
    - ``G``: the largest norm of the measured stochastic gradients;
    - ``loss``: the mean of the clients' losses, f_0 if the model is the first one. It bounds f_0 - f* for losses that
      are never negative.

    >>> from hansa.training import quadratic
    >>> found = smoothness(quadratic([[[2.0]], [[3.0]]], [[0.0], [3.0]]))  # f_i = (a_i x - b_i)^2/2
    >>> round(found.L, 6), round(found.G, 6), found.loss
    (9.0, 9.0, 2.25)
    """

    L: float
    G: float
    loss: float
    clients: tuple[int, ...]


def smoothness(
    task: Trainable,
    at: Vectors | Vector | None = None,
    *,
    clients: int | None = 16,
    iterations: int = 30,
    batch_size: int = 1,
    batches: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Smoothness:
    """Estimate L and G of a task at a model, by default the initial model of ``seed``.

    L is found by power iteration on differences of full gradients, G as the largest norm among random batches.

    Args:
        task: A task.
        at: A flat vector, or ``run.state.vectors``.
        clients: How many clients to measure, drawn with the seed; None measures all.
        iterations: Steps of the power iteration of each client, of two full gradients each.
        batch_size: Rows of a stochastic gradient.
        batches: Stochastic gradients per client.
        seed: Seed of the first model and of all draws.
        dtype: Dtype of the arithmetic; differences of gradients lose most digits of float32.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.diag(torch.tensor([1.0, 2.0])).expand(3, 2, 2), torch.ones(3, 2))
    >>> round(smoothness(task).L, 6)  # A'A/2 has eigenvalues 1/2 and 2
    2.0
    """
    for name, number in (("iterations", iterations), ("batch_size", batch_size), ("batches", batches)):
        check_integer("smoothness", name, number)
    population, key = task.population.count, Key(seed)
    if clients is not None:
        check_integer("smoothness", "clients", clients, "None measures all.")
    chosen: Sequence[int] = range(population)
    if clients is not None and clients < population:
        drawn = key.child("smoothness", "clients").numpy().choice(population, clients, replace=False, shuffle=False)
        chosen = sorted(drawn.tolist())
    measuring = ClientGradients("smoothness", task, at, key, dtype)
    step = STEP * max(1.0, math.sqrt(square(measuring.model.double())))
    largest, longest, losses = 0.0, 0.0, []
    for client in chosen:
        losses.append(measuring.loss(client))
        longest = max(longest, _longest_gradient(measuring, client, batch_size, batches))
        largest = max(largest, _largest_eigenvalue(measuring, client, iterations, step))
    if not math.isfinite(largest + longest):
        raise HansaError("smoothness: a gradient at this model is not finite. Give a model with finite gradients.")
    return Smoothness(largest, longest, math.fsum(losses) / len(losses), tuple(chosen))


def _longest_gradient(measuring: ClientGradients, client: int, batch_size: int, batches: int) -> float:
    """Return the largest norm of a client's stochastic gradients: of all rows alone if there are few, else of draws."""
    rows = measuring.rows(client)
    if rows is None:
        return math.sqrt(square(measuring.flat(client, None)))
    size, draw = min(batch_size, len(rows)), measuring.key.child("smoothness", client).numpy()
    if len(rows) <= batches and size == 1:
        picked = [rows[i : i + 1] for i in range(len(rows))]
    else:
        picked = [rows[torch.from_numpy(draw.choice(len(rows), size, replace=False))] for _ in range(batches)]
    return math.sqrt(max(square(measuring.flat(client, each)) for each in picked))


def _largest_eigenvalue(measuring: ClientGradients, client: int, iterations: int, step: float) -> float:
    """Return max |eigenvalue| of the Hessian: power iteration on (g(x + h v) - g(x - h v))/(2h)."""
    x, eigenvalue = measuring.model, 0.0
    direction = measuring.key.child("smoothness", client, "direction").numpy().standard_normal(measuring.dim)
    v = torch.from_numpy(direction)
    v /= torch.linalg.vector_norm(v)
    for _ in range(iterations):
        sides = []
        for sign in (1.0, -1.0):
            measuring.load((x.double() + sign * step * v).to(x.dtype))
            sides.append(measuring.full(client))
        product = (sides[0] - sides[1]) / (2 * step)
        length = math.sqrt(square(product))
        if length == 0.0 or not math.isfinite(length):
            eigenvalue = max(eigenvalue, length)
            break
        eigenvalue, v = length, product / length
    measuring.load(x)
    return eigenvalue
