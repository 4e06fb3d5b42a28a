"""Synthetic federated data."""

from __future__ import annotations

import numpy as np
import torch

from hansa.core.errors import check_integer, check_non_negative, invalid_argument
from hansa.core.keys import Key
from hansa.data.federated import FederatedData
from hansa.data.partitions import Split

_DIMENSION, _CLASSES = 60, 10


def two_gaussians(
    study: int = 1, seed: int = 0, *, points: int = 10, dtype: torch.dtype | None = None
) -> FederatedData:
    """The simulation study of [HAFED] F.1: two clients with points in the plane, one label each.

    x ~ N(mu_k, s I) with mu_0 = (1, 0), mu_1 = (0, 1), label k. There is no test set: the global loss is over all
    points.

    Args:
        study: 1 for s = 1 (used with an MLP of 10 hidden units), 2 for s = 0.5 (4 hidden units).
        seed: Seed of the points.
        points: Points per client.
        dtype: Type of the inputs; default float32.

    >>> data = two_gaussians(study=2)
    >>> data.population, data.targets[data.rows(1)].unique().tolist()
    (2, [1])
    """
    if study not in (1, 2):
        raise invalid_argument("two_gaussians", "study", study, "1 or 2")
    check_integer("two_gaussians", "points", points)
    deviation = 1.0 if study == 1 else float(np.sqrt(0.5))
    means = np.array([[1.0, 0.0], [0.0, 1.0]])
    noise = Key(seed).child("two gaussians", study).numpy().standard_normal((2, points, 2))
    inputs = (means[:, None] + deviation * noise).reshape(2 * points, 2)
    targets = np.repeat(np.arange(2), points)
    split = Split.of_owners(targets, 2)
    x, y = torch.from_numpy(inputs).to(dtype or torch.float32), torch.from_numpy(targets)
    return FederatedData(x, y, split.index, split.offsets, classes=2, name=f"two-gaussians({study})")


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    seed: int = 0,
    *,
    iid: bool = False,
    largest: int = 2000,
    dtype: torch.dtype | None = None,
) -> FederatedData:
    """Synthetic(alpha, beta) of FedProx (Li et al. 2020), logistic data in R^60 with 10 classes.

    Client k: y = argmax(W x + b) with W, b ~ N(u_k, 1), u_k ~ N(0, alpha); x ~ N(v_k, Sigma), Sigma_jj = j^-1.2,
    v_k ~ N(B_k, 1), B_k ~ N(0, beta). As in the authors' code alpha and beta are standard deviations and sizes are
    50 + lognormal(4, 2). A tenth of each client's points is for testing.

    Args:
        alpha: Heterogeneity of the clients' models.
        beta: Heterogeneity of the clients' inputs.
        clients: Number of clients.
        seed: Seed of the data.
        iid: Give all clients one W and b, and v = 0.
        largest: Maximum size of a client, as the lognormal has a long tail.
        dtype: Type of the inputs; default float32.

    >>> data = synthetic(0.5, 0.5, clients=3)
    >>> data.population, data.shape, data.classes
    (3, (60,), 10)
    """
    check_non_negative("synthetic", "alpha", alpha)
    check_non_negative("synthetic", "beta", beta)
    check_integer("synthetic", "clients", clients)
    check_integer("synthetic", "largest", largest, minimum=50)
    key, dtype = Key(seed).child("synthetic"), dtype or torch.float32
    sizes = 50 + key.child("sizes").numpy().lognormal(4.0, 2.0, clients)
    deviations = np.arange(1, _DIMENSION + 1, dtype=np.float64) ** -0.6
    train, test, owners = [], [], []
    for client in range(clients):
        draw = key.child("client", client).numpy()
        model = key.child("model").numpy() if iid else draw
        u = 0.0 if iid else draw.normal(0.0, alpha)
        weights, bias = model.normal(u, 1.0, (_DIMENSION, _CLASSES)), model.normal(u, 1.0, _CLASSES)
        centre = np.zeros(_DIMENSION) if iid else draw.normal(draw.normal(0.0, beta), 1.0, _DIMENSION)
        count = int(min(sizes[client], largest))
        x = centre + deviations * draw.standard_normal((count, _DIMENSION))
        y = np.argmax(x @ weights + bias, axis=1)
        train_count = count - count // 10
        train.append((x[:train_count], y[:train_count]))
        test.append((x[train_count:], y[train_count:]))
        owners.append(np.full(train_count, client, np.int64))
    split = Split.of_owners(np.concatenate(owners), clients)
    inputs, tests = (torch.from_numpy(np.concatenate([x for x, _ in part])).to(dtype) for part in (train, test))
    targets, labels = (torch.from_numpy(np.concatenate([y for _, y in part])) for part in (train, test))
    name = f"synthetic({alpha:g}, {beta:g})"
    return FederatedData(inputs, targets, split.index, split.offsets, tests, labels, _CLASSES, name)
