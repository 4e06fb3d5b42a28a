"""A topology for each cluster: W_k, rho_k and rho_max."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml

import hansa
from exactness.laboratory import assert_agree
from hansa import presets
from hansa.config import build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.gossip import by_cluster, complete, erdos_renyi, matrix, ring
from oracle import gossip
from oracle.quadratic import heterogeneous

GROUPS = [[6, 0, 3, 1, 5], [2, 7, 4]]
UNEVEN = [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]
N, DIM, ROUNDS, STEPS = 8, 5, 15, 4


def lab():
    return heterogeneous(11, N, [3, 5, 4, 6, 8, 4, 7, 5], DIM)


@pytest.mark.parametrize("name", ["ha_fed", "dsgd"])
def test_each_cluster_mixes_by_its_own_matrix(name):
    graphs = [ring(), matrix(UNEVEN)]
    W = [gossip.ring(5), np.array(UNEVEN)]
    task = hansa.training.quadratic([torch.from_numpy(a) for a in lab().A], [torch.from_numpy(b) for b in lab().b])
    if name == "ha_fed":
        reporters = [[0, 3, 7, 2], [6, 5, 4, 7], [1, 0, 2, 4]] * 5
        common = {"b1": 0.8, "b2": 0.95, "eps": 1e-4}
        algorithm = presets.ha_fed(
            clusters=GROUPS, topology=graphs, reporters=hansa.sample.replay(reporters), local_lr=0.05, steps=STEPS,
            server_lr=0.05, **common,
        )  # fmt: skip
        expected, _ = gossip.ha_fed(lab(), np.zeros(DIM), GROUPS, W, reporters, STEPS, 0.05, eta=0.05, **common)
    else:
        algorithm = presets.dsgd(clusters=GROUPS, topology=graphs, local_lr=0.05, steps=STEPS)
        expected, _ = gossip.dsgd(lab(), np.zeros(DIM), gossip.block(GROUPS, W), ROUNDS, STEPS, 0.05)
    run = hansa.run(algorithm, task, rounds=ROUNDS, dtype=torch.float64, keep_params=True)
    assert_agree(run, expected)


def test_a_list_in_a_configuration():
    document = {
        "algorithm": {"preset": "cafga"},
        "gossip": {"clusters": 3, "reporters": 1, "topology": ["ring", {"kind": "erdos_renyi", "p": 0.5}, "complete"]},
        "local": {"lr": 0.1, "steps": 2},
    }
    algorithm = build_algorithm(from_yaml(yaml.safe_dump(document)))
    mixing = algorithm.bind(12, Key(0)).local.mixing
    assert mixing is not None
    assert mixing.topology == by_cluster([ring(), erdos_renyi(0.5), complete()])
    document["gossip"]["topology"] = {"kind": "by_cluster", "topologies": ["ring", "ring", "ring"]}
    again = build_algorithm(from_yaml(yaml.safe_dump(document))).local.mixing
    assert again is not None
    assert again.topology == by_cluster([ring()] * 3)


def test_a_wrong_number_of_topologies():
    algorithm = presets.ha_fed(clusters=4, reporters=1, topology=[ring(), ring()])
    with pytest.raises(HansaError, match="2 topologies for 4 clusters"):
        algorithm.bind(16, Key(0))
    with pytest.raises(HansaError, match="one topology per cluster"):
        by_cluster([])
    with pytest.raises(HansaError, match="a topology"):
        by_cluster([ring(), "ring"])
