"""FedAWARE against the NumPy reference: the trajectory to 1e-8 over 40 rounds (the weights need not be unique)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from exactness.laboratory import assert_agree, task
from hansa import presets
from oracle import aware
from oracle.quadratic import heterogeneous

N, DIM, ROUNDS = 7, 12, 40
STEPS = [1, 2, 3, 5, 4, 2, 8]


def lab():
    return heterogeneous(3, N, [3, 4, 6, 6, 8, 9, 14], DIM)


def participants():
    draw = np.random.default_rng(8)
    return [draw.permutation(N)[: 2 + t % 2].tolist() for t in range(ROUNDS)]


def run(algorithm, **more):
    return hansa.run(algorithm, task(lab()), rounds=ROUNDS, dtype=torch.float64, keep_params=True, **more)


def words(**more):
    return {
        "local_lr": 0.05,
        "steps": hansa.local.fixed(STEPS),
        "sampler": hansa.sample.replay(participants()),
        **more,
    }


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_fedaware(normalize, explore):
    eta = 0.05 if normalize else 0.8
    expected, state = aware.fedaware(
        lab(), np.zeros(DIM), participants(), STEPS, 0.05, alpha=0.6, normalize=normalize, explore=explore, eta=eta
    )
    found = run(presets.fedaware(**words(alpha=0.6, normalize=normalize, explore=explore, server_lr=eta)))
    assert_agree(found, expected, 1e-8)
    rows = found.store.read_many(sorted(state["rows"]), "server/aware/momentum").numpy()
    np.testing.assert_allclose(rows, [state["rows"][i] for i in sorted(state["rows"])], atol=1e-8)
    diversities = [r["surrogate_diversity"] for r in found.history if "surrogate_diversity" in r]
    np.testing.assert_allclose(diversities, state["diversity"], rtol=1e-6)


@pytest.mark.parametrize("explore", [False, True])
def test_fedaware_projecting_yogi(explore):
    expected, _ = aware.fedaware_yogi(
        lab(), np.zeros(DIM), participants(), STEPS, 0.05, alpha=0.5, explore=explore, eta=0.1, eps=1e-3
    )
    found = run(presets.fedaware_yogi(**words(explore=explore, yogi_lr=0.1, eps=1e-3)))
    assert_agree(found, expected, 1e-8)


def test_weights_are_on_the_simplex_and_the_numbers_reported_follow_from_them():
    found = run(presets.fedaware(**words()))
    for record in found.history:
        weights = np.array([record["weights"].get(i, 0.0) for i in range(N)])
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1.0, abs=1e-9)
        assert record["density"] == (weights > 0).sum()
        n = record["seen"]
        assert record["chi_square"] == pytest.approx(
            n * np.sum((weights[weights > 0] - 1 / n) ** 2) + (n - record["density"]) / n
        )
        assert record["surrogate_diversity"] >= 1 - 1e-9
        assert record["momentum_diversity"] >= 1 - 1e-9
        assert record["min_norm_gap"] <= 1e-9


def test_rows_on_disk_are_the_same_to_the_last_bit(tmp_path):
    ram = run(presets.fedaware(**words()))
    disk = run(presets.fedaware(**words(rows="disk")), store=hansa.store.DiskStore(tmp_path / "rows"))
    assert torch.equal(ram.trajectory, disk.trajectory)
    assert ram.store.digest() == disk.store.digest()


def test_rows_on_disk_need_no_store_of_the_users_own():
    ram, disk = run(presets.fedaware(**words())), run(presets.fedaware(**words(rows="disk")))
    assert isinstance(disk.store, hansa.store.DiskStore)
    assert torch.equal(ram.trajectory, disk.trajectory)


def test_bfloat16_rows_take_half_the_room_and_stay_near():
    from hansa.aggregate import aware as part

    narrow = run(presets.fedaware(**words()).on("model", aggregate=part(storage="bfloat16")))
    wide = run(presets.fedaware(**words()))
    assert narrow.store.read_many([0], "server/aware/momentum").dtype == torch.bfloat16
    assert torch.linalg.vector_norm(narrow.params - wide.params) < 0.05 * torch.linalg.vector_norm(wide.params)


def test_a_zero_update_never_enters_a_row():
    def loss(client, x):
        return (x - client).square().sum() * (0.0 if client == 1 else 1.0)

    function = hansa.tasks.function(loss, clients=3, x0=torch.zeros(2, dtype=torch.float64))
    found = hansa.run(presets.fedaware(steps=2, participation=1.0), function, rounds=1)
    assert found.store.clients("server/aware/momentum") == [2]
    assert found.history[0]["seen"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"alpha": 1.0}, "alpha=1.0.*0 <= alpha < 1"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"rows": "tape"}, "rows='tape'"),
        ({"weights": "samples"}, "finds the weights itself"),
    ],
)
def test_wrong_arguments_are_named(words, message):
    with pytest.raises(hansa.HansaError, match=message):
        presets.fedaware(**words)
