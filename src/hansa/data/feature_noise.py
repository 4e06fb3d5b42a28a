"""Feature skew: Gaussian noise on the inputs, of a deviation that grows from client to client."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from hansa.core.errors import HansaError, check_positive
from hansa.core.keys import Key
from hansa.data.federated import FederatedData


def with_feature_noise(data: FederatedData, level: float, seed: int | None = None) -> FederatedData:
    """Return the data with Gaussian noise on the inputs: client i of N has noise of deviation level i / (N - 1).

    This is the noise-based feature imbalance of Li et al. 2022. The noise of a row is drawn once, so that a row is the
    same in every round. A test row has the noise of its client; if test rows have no clients, row r has that of client
    r mod N, so that all levels are tested alike. Validation rows stay as they are: take them out afterwards.

    Args:
        data: The federated data; its inputs are one tensor of numbers.
        level: Deviation of the last client's noise, in the units of the inputs.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import from_arrays, iid
    >>> data = from_arrays(torch.zeros(300, 20), torch.zeros(300).long(), clients=3, partition=iid())
    >>> noisy = with_feature_noise(data, 0.1, seed=0)
    >>> [round(float(noisy.inputs[noisy.rows(client)].std()), 2) for client in range(3)]
    [0.0, 0.05, 0.1]
    """
    check_positive("with_feature_noise", "level", level, "0.1 is the level of NIID-Bench, for pixels from 0 to 1.")
    if not isinstance(data, FederatedData) or not isinstance(data.inputs, torch.Tensor):
        raise HansaError("with_feature_noise: expected inputs that are one tensor in memory.")
    if not data.inputs.is_floating_point():
        raise HansaError(f"{data.name}: with_feature_noise: the inputs are {data.inputs.dtype}: expected numbers.")
    if seed is None:
        return with_feature_noise(data, level, 0).following(partial(_redraw_noise, data, level))
    key = Key(seed).child("feature noise")
    inputs = data.inputs.clone()
    for client in range(data.population):
        rows = data.rows(client)
        inputs[rows] += _noise(data, client, level, inputs[rows].shape, key.child("train", client)).to(inputs.dtype)
    test = data.test_inputs
    if test is not None:
        test = test.clone()
        owners = torch.arange(len(test)) % data.population if data.test_owners is None else data.test_owners
        for client in range(data.population):
            rows = torch.nonzero(owners == client).flatten()
            test[rows] += _noise(data, client, level, test[rows].shape, key.child("test", client)).to(test.dtype)
    return replace(data, inputs=inputs, test_inputs=test)


def _redraw_noise(data: FederatedData, level: float, seed: int) -> FederatedData:
    return with_feature_noise(data.for_seed(seed), level, seed)


def _noise(data: FederatedData, client: int, level: float, shape: tuple[int, ...], key: Key) -> torch.Tensor:
    deviation = level * client / max(1, data.population - 1)
    return torch.from_numpy(deviation * key.numpy().standard_normal(shape))
