"""Synthetic data follow the distributions of their papers."""

from __future__ import annotations

import pytest
import torch

from hansa.core.errors import HansaError
from hansa.data import synthetic, two_gaussians


@pytest.mark.parametrize(("study", "variance"), [(1, 1.0), (2, 0.5)])
def test_the_two_client_study_has_its_means_and_covariances(study: int, variance: float) -> None:
    data = two_gaussians(study, seed=3, points=20_000, dtype=torch.float64)
    for client, mean in ((0, [1.0, 0.0]), (1, [0.0, 1.0])):
        own = data.inputs[data.rows(client)]
        assert own.mean(0).tolist() == pytest.approx(mean, abs=0.03)
        covariance = torch.cov(own.T)
        assert covariance.flatten().tolist() == pytest.approx([variance, 0, 0, variance], abs=0.03)
        assert data.targets[data.rows(client)].unique().tolist() == [client]


def test_the_two_client_study_has_ten_points_each_and_is_seeded() -> None:
    first, again, other = (two_gaussians(1, seed) for seed in (0, 0, 1))
    assert first.sizes.tolist() == [10, 10]
    assert (first.classes, first.shape, first.test_inputs) == (2, (2,), None)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    with pytest.raises(HansaError, match=r"two_gaussians\(study=3\): expected 1 or 2"):
        two_gaussians(3)


def test_synthetic_features_have_the_falling_variances_of_the_paper() -> None:
    data = synthetic(1.0, 1.0, clients=40, seed=1, dtype=torch.float64)
    pooled = torch.cat([data.inputs[data.rows(i)] - data.inputs[data.rows(i)].mean(0) for i in range(40)])
    expected = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    assert float((pooled.var(0) / expected - 1).abs().max()) < 0.1


def test_synthetic_centres_spread_with_beta() -> None:
    # a client's centre has mean B_k over its coordinates, B_k ~ N(0, beta)
    for beta in (0.0, 3.0):
        data = synthetic(0.0, beta, clients=200, seed=2, largest=60)
        centres = torch.stack([data.inputs[data.rows(i)].mean() for i in range(200)])
        assert float(centres.std()) == pytest.approx((beta**2 + 1 / 60) ** 0.5, rel=0.2, abs=0.05)


def agreement(iid: bool) -> float:
    """How well a linear model, fitted by least squares to one client, explains the others."""
    data = synthetic(1.0, 1.0, clients=6, seed=4, iid=iid, dtype=torch.float64)
    padded = torch.cat([data.inputs, torch.ones(len(data.inputs), 1)], 1)
    largest = int(data.sizes.argmax())
    own = data.rows(largest)
    labels = torch.nn.functional.one_hot(data.targets[own], 10).double()
    weights = torch.linalg.lstsq(padded[own], labels, driver="gelsd").solution
    others = torch.cat([data.rows(i) for i in range(6) if i != largest])
    return float(((padded[others] @ weights).argmax(1) == data.targets[others]).double().mean())


def test_clients_share_one_model_only_when_iid() -> None:
    assert agreement(iid=True) > 0.6
    assert agreement(iid=False) < 0.3


def test_synthetic_sizes_have_the_floor_the_cap_and_a_tenth_for_testing() -> None:
    data = synthetic(0.5, 0.5, clients=100, seed=0, largest=500)
    assert data.test_targets is not None
    assert int(data.sizes.min()) >= 45  # nine tenths of 50
    assert int(data.sizes.max()) == 450
    assert len(data.test_targets) == pytest.approx(len(data.targets) / 9, rel=0.03)
    more = synthetic(0.5, 0.5, clients=101, seed=0, largest=500)  # they leave the first ones as they are
    assert torch.equal(data.inputs[data.rows(99)], more.inputs[more.rows(99)])
