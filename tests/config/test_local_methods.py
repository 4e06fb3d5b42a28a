"""A file composes the newer local methods as Python does."""

from __future__ import annotations

import hansa
from hansa import presets
from hansa.algorithm import Channel
from hansa.config import build_algorithm, from_yaml
from hansa.local import blocks, sam
from hansa.server import adam, momentum, scale


def test_solver_optimizer_and_blocks():
    text = """
    algorithm: fedavg
    local: {solver: {kind: sam, rho: 0.1}, optimizer: adam, optimizer_state: kept,
            decoupled_weight_decay: true, weight_decay: 0.01,
            private_blocks: ["norm.*"], frozen_blocks: ["first.*", "*.bias"]}
    """
    expected = presets.fedavg(weight_decay=0.01).with_local(
        solver=sam(0.1),
        optimizer=adam(),
        optimizer_state="kept",
        decoupled_weight_decay=True,
        private_blocks=blocks("norm.*"),
        frozen_blocks=blocks("first.*", "*.bias"),
    )
    assert build_algorithm(from_yaml(text)) == expected


def test_a_channel_that_is_only_broadcast():
    text = """
    algorithm: fedavg
    local: {optimizer: {kind: momentum, beta: 0.8}, optimizer_state: {m: drift}}
    channels: {drift: {follows: model, server: {kind: scale, lr: 0.5}}}
    """
    plain = presets.fedavg()
    phase = {"optimizer": momentum(0.8), "optimizer_state": {"m": "drift"}}
    local = hansa.LocalPhase(plain.local.solver, plain.local.steps, plain.local.lr, **phase)
    channels = {**plain.channels, "drift": Channel(follows="model", server=scale(0.5))}
    assert build_algorithm(from_yaml(text)) == hansa.Algorithm("fedavg", plain.sampler, local, channels)
