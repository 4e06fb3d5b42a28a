"""Each preset against a reference written from the papers that shares no code with it: 1e-10 over 50 rounds."""

from __future__ import annotations

import numpy as np
import pytest

import hansa
from exactness.laboratory import ROUNDS, followed
from hansa import presets
from oracle import local, server

FLAGS = [
    {},
    {"bias_correction": True},
    {"v0": 0.05},
    {"eps_inside": True},
    {"bias_correction": True, "v0": 0.01, "eps_inside": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi", "fedamsgrad", "fedams"])
def test_adaptive_servers_follow_the_reference_with_every_flag(name, flags):
    if name == "fedams":
        flags = {k: v for k, v in flags.items() if k != "eps_inside"}
    common = {"b1": 0.8, "b2": 0.95, "eps": 0.02, "weights": "samples", **flags}
    if name == "fedadagrad":
        del common["b2"]
    followed(getattr(presets, name), getattr(server, name), {"server_lr": 0.3, **common}, {"eta": 0.3, **common})


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi", "fedamsgrad", "fedams"])
def test_adaptive_defaults_are_those_of_the_papers(name):
    run, state = followed(getattr(presets, name), getattr(server, name), {"server_lr": 0.3}, {"eta": 0.3})
    kept = run.state.server["model"]["0"]
    for moment in state:
        np.testing.assert_allclose(kept[moment].numpy(), state[moment], rtol=1e-9, atol=1e-12)


def test_scaffold_follows_the_reference_with_its_control_variates():
    run, state = followed(presets.scaffold, local.scaffold, {"server_lr": 0.9}, {"eta": 0.9})
    np.testing.assert_allclose(run.state.vectors["control"].numpy(), state["c"], atol=1e-9)
    for client, row in enumerate(state["c_i"]):
        np.testing.assert_allclose(run.store.read(client)["solver/control"].numpy(), row, atol=1e-9)


def test_feddyn_follows_the_reference_with_its_duals():
    run, state = followed(presets.feddyn, local.feddyn, {"alpha": 0.9}, {"alpha": 0.9})
    np.testing.assert_allclose(run.state.server["model"]["h"].numpy(), state["h"], atol=1e-9)
    for client, row in enumerate(state["h_i"]):
        np.testing.assert_allclose(run.store.read(client)["solver/dual"].numpy(), row, atol=1e-9)


@pytest.mark.parametrize("epsilon", [1.0, 0.15, 0.0])
def test_fedmgda_follows_the_reference(epsilon):
    mine, theirs = {"server_lr": 0.05, "epsilon": epsilon}, {"eta": 0.05, "epsilon": epsilon}
    followed(presets.fedmgda, local.fedmgda, mine, theirs, 1e-9)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"local_momentum": 0.6}, {"momentum": 0.6}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ({"max_grad_norm": 1.5}, {"clip": 1.5}),
        (
            {"local_momentum": 0.4, "weight_decay": 0.2, "max_grad_norm": 2.0},
            {"momentum": 0.4, "weight_decay": 0.2, "clip": 2.0},
        ),
    ],
    ids=["momentum", "decay", "clip", "all"],
)
def test_local_options_follow_the_reference(mine, theirs):
    followed(presets.fedavg, local.fedavg_local_options, mine, theirs)


def test_a_learning_rate_schedule_follows_the_reference():
    schedule = hansa.local.step_decay(0.08, every=10, factor=0.5)
    rates = [0.08 * 0.5 ** (t // 10) for t in range(ROUNDS)]
    followed(presets.fedavg, server.fedavg, {"local_lr": schedule}, {"local_lr": rates})
