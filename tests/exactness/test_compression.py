"""FedCAMS and compressed methods against the NumPy reference: 1e-9 over 50 rounds in float64."""

from __future__ import annotations

import numpy as np
import pytest

import hansa
from exactness.laboratory import followed
from hansa import compress, presets
from oracle import compression, server

OPERATORS = [
    (compress.sign(), compression.compressor("sign")),
    (compress.top_k(0.4), compression.compressor("top_k", 0.4)),
]
IDS = ["sign", "top_k"]


@pytest.mark.parametrize("two_way", [False, True], ids=["one-way", "two-way"])
@pytest.mark.parametrize(("mine", "theirs"), OPERATORS, ids=IDS)
def test_fedcams(mine, theirs, two_way):
    run, state = followed(
        presets.fedcams,
        compression.fedcams,
        {"compressor": mine, "two_way": two_way, "server_lr": 0.2, "eps": 1e-2},
        {"C": theirs, "two_way": two_way, "eta": 0.2, "eps": 1e-2},
        1e-9,
        measures=[hansa.measures.compression],
    )
    np.testing.assert_allclose([r["gamma"] for r in run.history], state["gamma"], rtol=1e-6)
    assert all(0 <= r["q"] < 1 for r in run.history)
    for client, row in enumerate(state["e"]):
        np.testing.assert_allclose(run.store.read(client)["uplink/model/residual"].numpy(), row, atol=1e-8)


@pytest.mark.parametrize(("mine", "theirs"), OPERATORS, ids=IDS)
def test_compression_composes_with_fedavg(mine, theirs):
    followed(presets.fedavg, compression.fedavg_compressed, {"compressor": mine}, {"C": theirs}, 1e-9)


@pytest.mark.parametrize(("mine", "theirs"), OPERATORS, ids=IDS)
def test_compression_composes_with_both_channels_of_scaffold(mine, theirs):
    followed(presets.scaffold, compression.scaffold_compressed, {"compressor": mine}, {"C": theirs}, 1e-9)


def test_identity_compression_is_no_compression():
    identity = {"compressor": compress.identity(), "two_way": True}
    followed(presets.fedcams, server.fedams, {**identity, "server_lr": 0.3}, {"eta": 0.3})
