"""Feature noise: the deviations of NIID-Bench's definition, and rows that keep their noise."""

from __future__ import annotations

import pytest
import torch

from hansa.config import from_yaml
from hansa.config.build import load_data
from hansa.core.errors import HansaError
from hansa.data import FederatedData, from_arrays, iid, quantity_skew, with_feature_noise, with_test_clients


def flat(rows: int = 5000, clients: int = 5) -> FederatedData:
    x, y = torch.zeros(rows, 4), torch.arange(rows) % 3
    return from_arrays(x, y, clients=clients, partition=quantity_skew(power=0.5), test=(x, y), seed=0)


def test_deviations_grow_linearly_from_zero_to_the_level() -> None:
    noisy = with_feature_noise(flat(), 0.2, seed=3)
    owned = with_feature_noise(with_test_clients(flat(), "labels", seed=0), 0.2, seed=0)
    for client in range(5):
        rows = noisy.inputs[noisy.rows(client)]
        assert abs(float(rows.mean())) < 0.01
        # test rows have the noise of their client, or row r that of client r mod 5
        for part in (rows, noisy.test_inputs[client::5], owned.test_inputs[owned.test_owners == client]):
            assert float(part.std()) == pytest.approx(0.2 * client / 4, rel=0.1)


def test_the_noise_is_a_function_of_the_seed_and_leaves_the_data_alone() -> None:
    data = flat()
    first, again, other = (with_feature_noise(data, 0.1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.test_inputs, again.test_inputs)
    assert not torch.equal(first.inputs, other.inputs)
    following = with_feature_noise(from_arrays(data.inputs, data.targets, clients=3, partition=iid()), 0.1)
    assert not torch.equal(following.for_seed(1).inputs, following.inputs)
    assert not torch.equal(following.for_seed(1).index, following.index)  # and so does the partition
    assert not data.inputs.any()
    assert torch.equal(first.targets, data.targets)
    assert torch.equal(first.index, data.index)


def test_in_a_file_it_is_a_key_of_the_data() -> None:
    text = "{algorithm: fedavg, data: {clients: 4, partition: iid%s}}"
    plain, noisy = (load_data(from_yaml(text % extra)) for extra in ("", ", noise: 0.5"))
    change = noisy.inputs - plain.inputs
    deviations = [float(change[noisy.rows(client)].std()) for client in range(4)]
    assert deviations == pytest.approx([0.0, 0.5 / 3, 1.0 / 3, 0.5], rel=0.02)


@pytest.mark.parametrize(
    ("data", "level", "message"),
    [
        (flat(), 0.0, "level"),
        (flat(), float("nan"), "level"),
        (from_arrays(torch.zeros(9, 2).long(), torch.zeros(9).long(), clients=3), 0.1, "int64"),
        (from_arrays({"a": torch.zeros(9, 2)}, torch.zeros(9).long(), clients=3), 0.1, "one tensor"),
    ],
)
def test_refusals_name_the_reason(data: FederatedData, level: float, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        with_feature_noise(data, level)
