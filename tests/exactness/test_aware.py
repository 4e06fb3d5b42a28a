"""FedAWARE against the NumPy reference: the trajectory to 1e-8 over 40 rounds (the weights need not be unique)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from exactness import laboratory
from exactness.laboratory import STEPS, assert_agree, task
from hansa import presets
from mistakes import refused
from oracle import aware
from oracle.quadratic import heterogeneous

N, DIM, ROUNDS = 7, 12, 40


def lab():
    return heterogeneous(3, N, [3, 4, 6, 6, 8, 9, 14], DIM)


def participants():
    draw = np.random.default_rng(8)
    return [draw.permutation(N)[: 2 + t % 2].tolist() for t in range(ROUNDS)]


def run(algorithm, **more):
    return hansa.run(algorithm, task(lab()), rounds=ROUNDS, dtype=torch.float64, keep_params=True, **more)


def words(**more):
    return laboratory.words(**{"sampler": hansa.sample.replay(participants()), **more})


def reference(weights="uniform", method=aware.fedaware, **said):
    samples = np.array(lab().samples) if weights == "samples" else None
    return method(lab(), np.zeros(DIM), participants(), STEPS, 0.05, weights=samples, **said)


def diversities(found, name):
    return [record[name] for record in found.history if name in record]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_fedaware(normalize, explore, from_zero, weights):
    eta = 0.05 if normalize else 0.8
    said = {"alpha": 0.6, "normalize": normalize, "explore": explore, "from_zero": from_zero}
    expected, state = reference(weights, **said, eta=eta)
    found = run(presets.fedaware(**words(**said, weights=weights, server_lr=eta)))
    assert_agree(found, expected, 1e-8)
    rows = found.store.read_many(sorted(state["rows"]), "server/aware/momentum").numpy()
    np.testing.assert_allclose(rows, [state["rows"][i] for i in sorted(state["rows"])], atol=1e-8)
    np.testing.assert_allclose(diversities(found, "surrogate_diversity"), state["surrogate"], rtol=1e-6)
    np.testing.assert_allclose(diversities(found, "momentum_diversity"), state["diversity"], rtol=1e-6)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_direction_as_long_as_the_average_update(normalize, weights):
    said = {"alpha": 0.6, "normalize": normalize}
    expected, state = reference(weights, **said, average_length=True, eta=0.5)
    found = run(presets.fedaware(**words(**said, weights=weights, server_lr=0.5, length="average")))
    assert_agree(found, expected, 1e-8)
    printed, _ = reference(weights, **said, eta=0.5)
    assert np.abs(expected - printed).max() > 1e-3
    rows = np.array([state["rows"][i] for i in sorted(state["rows"])])
    products = rows @ state["direction"]
    assert products.min() >= -1e-9 * np.abs(products).max(), "not a common descent direction"


def test_the_authors_code_by_its_words():
    """Momenta from zero, sample weights until all were seen, their solver on unit momenta."""
    said = {"normalize": True, "explore": True, "from_zero": True}
    expected, _ = reference("samples", **said, authors=True, eta=0.05)
    exact, _ = reference("samples", **said, eta=0.05)
    found = run(presets.fedaware(**words(**said, weights="samples", min_norm="authors", server_lr=0.05)))
    assert_agree(found, expected, 1e-6)
    assert np.abs(expected - exact).max() > 1e-4


@pytest.mark.parametrize(("explore", "weights"), [(False, "uniform"), (True, "uniform"), (True, "samples")])
def test_fedaware_projecting_yogi(explore, weights):
    expected, _ = reference(weights, aware.fedaware_yogi, explore=explore, eta=0.1, eps=1e-3)
    found = run(presets.fedaware_yogi(**words(explore=explore, weights=weights, yogi_lr=0.1, eps=1e-3)))
    assert_agree(found, expected, 1e-8)


@pytest.mark.parametrize("weights", ["uniform", "samples", [3.0, 1.0, 1.0, 2.0, 5.0, 1.0, 0.5]])
def test_weights_are_on_the_simplex_and_the_numbers_reported_follow_from_them(weights):
    """By the definitions, from the rows that the store holds after the last round."""
    found = run(presets.fedaware(**words(weights=weights)))
    for record in found.history:
        weights_found = np.array([record["weights"].get(i, 0.0) for i in range(N)])
        assert weights_found.min() >= 0
        assert weights_found.sum() == pytest.approx(1.0, abs=1e-9)
        assert record["density"] == (weights_found > 0).sum()
        assert record["min_norm_gap"] <= 1e-9
        assert record["zero_rows"] == 0
    samples = task(lab()).population.samples
    raw = np.array([1.0] * N if weights == "uniform" else samples if weights == "samples" else weights, dtype=float)
    lam = raw / raw.sum()
    rows = found.store.read_many(range(N), "server/aware/momentum").numpy()
    above = lam @ (rows**2).sum(axis=1)
    assert record["surrogate_diversity"] ** 2 == pytest.approx(above / np.sum((weights_found @ rows) ** 2), rel=1e-9)
    assert record["momentum_diversity"] ** 2 == pytest.approx(above / np.sum((lam @ rows) ** 2), rel=1e-9)
    assert record["chi_square"] == pytest.approx(np.sum(weights_found**2 / lam**2), rel=1e-9)
    assert record["surrogate_diversity"] > record["momentum_diversity"] > 1


def test_rows_on_disk_are_the_same_to_the_last_bit(tmp_path):
    """With a store of the user's own, and without."""
    ram, disk = run(presets.fedaware(**words())), run(presets.fedaware(**words(momentum_storage="disk")))
    own = run(presets.fedaware(**words(momentum_storage="disk")), store=hansa.runs.store.DiskStore(tmp_path / "rows"))
    assert isinstance(disk.store, hansa.runs.store.DiskStore)
    for found in (disk, own):
        assert torch.equal(ram.trajectory, found.trajectory)
        assert ram.store.digest() == found.store.digest()


def idle(client, x):
    """Client 1 has nothing to learn from round to round; client 0 starts at its optimum."""
    return (x - client).square().sum() * (0.0 if client == 1 else 1.0)


def test_a_zero_update_makes_a_zero_row_and_that_is_the_shortest_vector():
    function = hansa.training.function(idle, clients=4, x0=torch.full((2,), 9.0, dtype=torch.float64))
    found = hansa.run(presets.fedaware(steps=2, participation=1.0), function, rounds=2)
    assert found.store.clients("server/aware/momentum") == [0, 1, 2, 3]
    assert [record["zero_rows"] for record in found.history] == [1, 1]
    assert torch.equal(found.params, function.x0)
    assert found.history[0]["weights"] == {1: 1.0}


def test_a_zero_update_decays_the_momentum_of_its_client():
    """Client 1 moves in round 0 and reports zero in round 1, when the model has reached its optimum."""
    sampler = hansa.sample.replay([[1], [1]])
    at = torch.zeros(2, dtype=torch.float64)

    def loss(client, x):
        return 0.5 * (x - (client - 1)).square().sum()

    function = hansa.training.function(loss, clients=3, x0=at + 4.0)
    made = presets.fedaware(steps=1, local_lr=1.0, alpha=0.25, sampler=sampler)
    kept = []

    def look(run, record):
        kept.append(run.store.read_many([1], "server/aware/momentum")[0])

    hansa.run(made, function, rounds=2, callbacks=[look])
    assert torch.equal(kept[0], at - 4.0)
    assert torch.equal(kept[1], 0.25 * (at - 4.0))


def test_startup_wraps_the_sampler_that_begins_after_it():
    made = presets.fedaware(startup=True, participation=0.4)
    assert made.sampler == hansa.sample.startup(hansa.sample.uniform(0.4))
    again = presets.fedaware(startup=True, explore=True, participation=0.4)
    assert again.sampler == hansa.sample.startup(hansa.sample.explore(0.4, then="uniform"))


test_wrong_arguments_are_named = refused(
    ({"alpha": 1.0}, "alpha=1.0.*0 <= alpha < 1"),
    ({"alpha": -0.1}, "alpha=-0.1"),
    ({"rows": "tape"}, "rows='tape'"),
    ({"min_norm": "quick"}, "min_norm='quick'.*'exact' or 'authors'"),
    ({"weights": "clusters"}, "weights='clusters'.*'samples'"),
    ({"weights": "sample"}, "weights='sample'.*'uniform', 'samples' or"),
    (lambda: presets.fedaware_yogi(length="average"), r"length=.average.*projected"),
    by=lambda made: made() if callable(made) else presets.fedaware(**made),
)


@pytest.mark.parametrize("from_zero", [False, True])
def test_a_decay_rate_for_each_client(from_zero):
    alpha = np.linspace(0.0, 0.9, N)
    expected, _ = reference(alpha=alpha, from_zero=from_zero, eta=0.8)
    method = presets.fedaware(**words(alpha=tuple(alpha.tolist()), from_zero=from_zero, server_lr=0.8))
    assert_agree(run(method), expected, 1e-8)
    with pytest.raises(hansa.HansaError, match="3 numbers"):
        run(presets.fedaware(**words(alpha=(0.1, 0.2, 0.3))))
    with pytest.raises(hansa.HansaError, match="alpha"):
        presets.fedaware(alpha=(0.5, 1.5))
