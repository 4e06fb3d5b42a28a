"""sigma_L, sigma_g within and between clusters, zeta: by hand on quadratics, in NumPy on a module of a user's own."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.rounds.measures import heterogeneity, track_heterogeneity
from mistakes import refused

SIZES = [1, 4, 7, 2, 5]
CLUSTERS = [[0, 2], [1, 3, 4]]


class Line(nn.Module):
    """A model as users write theirs: w x + b in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[:, 0]


class Noisy(nn.Module):
    """Dropout and batch statistics: neither is noise of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)[:, 0]


def points() -> list[tuple[np.ndarray, np.ndarray]]:
    """Unequal clients with targets that are not classes."""
    draw = np.random.default_rng(4)
    return [(draw.normal(size=(n, 2)) + client, draw.normal(size=n) * (1 + client)) for client, n in enumerate(SIZES)]


def task(model: type[nn.Module] = Line) -> hansa.Task:
    x, y = (np.concatenate(part).astype(np.float32) for part in zip(*points(), strict=True))
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    held = hansa.data.from_arrays(torch.from_numpy(x), torch.from_numpy(y), clients=owner)
    return hansa.Task(model, nn.functional.mse_loss, held)


def by_hand(w: np.ndarray) -> list[np.ndarray]:
    """The gradient of every sample's (w.x + b - y)^2, a matrix a client; w = (w_1, w_2, b)."""
    found = []
    for x, y in points():
        x, y = x.astype(np.float32).astype(float), y.astype(np.float32).astype(float)
        found.append(2 * (x @ w[:2] + w[2] - y)[:, None] * np.hstack([x, np.ones((len(x), 1))]))
    return found


def test_by_hand_on_quadratics() -> None:
    """f_i = (x - b_i)^2 / 2 with b = 0, 2, 7 at x = 1: g = 1, -1, -6, mean -2."""
    lab = hansa.training.quadratic([[[1.0]]] * 3, [[0.0], [2.0], [7.0]], x0=[1.0])
    found = heterogeneity(lab, clusters=[[0, 1], [2]])
    assert found.zeta == (9.0, 1.0, 16.0)
    assert found.sigma_g == pytest.approx(math.sqrt(26 / 3))
    assert found.gradient_norm == 2.0
    assert found.diversity == pytest.approx(math.sqrt((1 + 1 + 36) / 3 / 4))
    # cluster means 0 and -6: within (1 + 1)/2 and 0, their mean 1/2; between, around -3: (9 + 9)/2
    assert found.sigma_within == pytest.approx(math.sqrt(0.5))
    assert found.sigma_between == pytest.approx(3.0)
    assert found.sigma_l == 0.0
    weighted = heterogeneity(lab, weights=[1.0, 1.0, 2.0])  # g = (1 - 1 - 12)/4 = -3
    assert weighted.zeta == (16.0, 4.0, 9.0)
    assert weighted.sigma_g == pytest.approx(math.sqrt((16 + 4 + 18) / 4))
    assert weighted.sigma_within is None


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_module_with_unequal_clients_agrees_with_numpy(weights: str, batch_size: int) -> None:
    w = np.array([0.3, -0.2, 0.5])
    found = heterogeneity(
        task(), torch.tensor(w), clusters=CLUSTERS, weights=weights, batch_size=batch_size, samples=None,
        dtype=torch.float64,
    )  # fmt: skip
    single = by_hand(w)
    g = np.array([rows.mean(axis=0) for rows in single])
    lam = np.array(SIZES if weights == "samples" else [1] * 5, dtype=float)
    lam /= lam.sum()
    zeta = ((g - lam @ g) ** 2).sum(axis=1)
    assert found.zeta == pytest.approx(zeta, rel=1e-9)
    assert found.sigma_g == pytest.approx(math.sqrt(lam @ zeta), rel=1e-9)
    noise = []  # the mean over every batch that could be drawn
    for rows, full in zip(single, g, strict=True):
        batches = itertools.combinations(range(len(rows)), min(batch_size, len(rows)))
        noise.append(np.mean([((rows[list(batch)].mean(axis=0) - full) ** 2).sum() for batch in batches]))
    assert found.sigma_l == pytest.approx(math.sqrt(np.mean(noise)), rel=1e-9)
    means = np.array([g[group].mean(axis=0) for group in CLUSTERS])
    within = np.mean([((g[group] - mean) ** 2).sum(axis=1).mean() for group, mean in zip(CLUSTERS, means, strict=True)])
    assert found.sigma_within == pytest.approx(math.sqrt(within), rel=1e-9)
    assert found.sigma_between == pytest.approx(
        math.sqrt(((means - means.mean(axis=0)) ** 2).sum(axis=1).mean()), rel=1e-9
    )


def test_large_populations_are_gone_through_twice_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    held = heterogeneity(task(), clusters=CLUSTERS)
    module = sys.modules["hansa.rounds.measures"]
    monkeypatch.setattr(module, "MAX_CACHED_NUMBERS", 0)
    monkeypatch.setattr(module, "PIECE", 3)
    again = heterogeneity(task(), clusters=CLUSTERS)
    assert again.zeta == pytest.approx(held.zeta, rel=1e-5)
    assert (again.sigma_within, again.sigma_l) == pytest.approx((held.sigma_within, held.sigma_l), rel=1e-5)


def test_noise_from_some_samples_is_that_of_all_on_average() -> None:
    at = torch.tensor([0.3, -0.2, 0.5])
    whole = heterogeneity(task(), at, samples=None).sigma_l ** 2
    some = [heterogeneity(task(), at, samples=2, seed=seed).sigma_l ** 2 for seed in range(150)]
    assert len(set(some)) > 20
    assert abs(np.mean(some) - whole) < 3 * np.std(some) / math.sqrt(len(some))
    assert np.mean(some) == pytest.approx(whole, rel=0.1)


def test_dropout_and_batch_statistics_are_no_noise_and_the_task_is_left_as_it_was() -> None:
    made = task(Noisy)
    first, second = heterogeneity(made), heterogeneity(made)
    assert first == second
    run = hansa.run(hansa.presets.fedavg(steps=2, batch_size=3, sampler=hansa.sample.replay([[1, 2]])), made, rounds=1)
    before = {name: vector.clone() for name, vector in run.state.vectors.items()}
    heterogeneity(made, run.state.vectors)
    assert all(torch.equal(before[name], vector) for name, vector in run.state.vectors.items())


def test_in_every_second_round_of_a_run_with_its_clusters() -> None:
    method = hansa.presets.ha_fed(clusters=CLUSTERS, reporters=1, steps=2, batch_size=2)
    run = hansa.run(method, task(), rounds=4, callbacks=[track_heterogeneity(every=2, samples=None)])
    assert ["sigma_g" in record for record in run.history] == [False, True, False, True]
    last = heterogeneity(task(), run.state.vectors, clusters=CLUSTERS, samples=None)
    assert run.history[-1]["zeta"] == list(last.zeta)
    assert run.history[-1]["sigma_between"] == last.sigma_between
    assert run.history[-1]["gradient_diversity"] == last.diversity
    plain = hansa.run(
        hansa.presets.fedavg(steps=1, weights="samples"), task(), rounds=1, callbacks=[track_heterogeneity()]
    )
    assert "sigma_within" not in plain.history[0]
    assert plain.history[0]["sigma_g"] == heterogeneity(task(), plain.state.vectors, weights="samples").sigma_g


test_wrong_questions_are_refused = refused(
    (lambda: heterogeneity(task(), batch_size=0), "batch_size=0"),
    (lambda: heterogeneity(task(), samples=0), "samples=0"),
    (lambda: heterogeneity(task(), weights="clusters"), "weights='clusters'"),
    (lambda: heterogeneity(task(), clusters=[[0, 1]]), "every one of the 5 clients"),
    (lambda: heterogeneity(task(), clusters=[[0, 1, 2, 3, 4], []]), "every one of the 5 clients"),
    (lambda: heterogeneity(task(), torch.zeros(9)), r"shape \(9,\), the model has \(3,\)"),
)
