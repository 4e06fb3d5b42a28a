"""The Python form of a composition makes an equal one."""

from __future__ import annotations

import math

import pytest

import hansa
from hansa import presets
from hansa.config import build_algorithm, composition, from_preset, from_yaml
from hansa.config.compose import to_python


def evaluated(found):
    space: dict[str, object] = {}
    exec("\n".join(found.imports), space)
    return eval(found.text, space)


@pytest.mark.parametrize("name", presets.catalogue())
def test_every_preset_is_the_python_that_is_printed_for_it(name):
    made = presets.get(name)
    assert evaluated(to_python(made)) == made
    assert evaluated(composition(from_preset(name)).python) == made


COMPOSED = {
    "FedProx with an Adam server": "algorithm: {preset: fedprox, mu: 0.1}\nserver: {optimizer: adam, lr: 0.1}",
    "SCAFFOLD with a compressed control channel":
        "algorithm: scaffold\nchannels: {control: {uplink: {kind: error_feedback, compressor: sign}}}",
    "CAFGA with a trimmed mean": "algorithm: cafga\naggregate: {kind: trimmed_mean, trim: 0.2}",
    "SCAFFOLD by hand": "local: {solver: scaffold}\nchannels: {control: {server: participation_scale}}",
    "local Adam": "local: {optimizer: {kind: adam, b1: 0.5}, solver: {kind: prox, mu: 0.2}}",
    "FedAvg that gossips": "gossip: {topology: torus, clusters: 2, reporters: 0.5, active: 2}\nlocal: {steps: 3}",
    "schedules and distributions": """
        local: {lr: {kind: warmup, lr: {kind: cosine, lr: 0.1, rounds: 9}, rounds: 2},
                steps: {kind: deadline, seconds: 2.0, speed: {kind: lognormal, median: 3.0}}, batch_size: all}
        sample: {kind: replay, rounds: [[0, 1], [2]]}
    """,
    "compressed both ways": """
        algorithm: fedcams
        compress: {compressor: {kind: top_k, ratio: 1/64, values: {kind: quantize, levels: 4}}, two_way: grid}
        uplink: {kind: memoryless, compressor: {kind: random_k, ratio: 0.1}}
    """,
    "clusters as lists":
        "algorithm: cafga\ngossip: {clusters: [[0, 2], [1, 3]], reporters: {kind: replay, rounds: [[0]]}}",
    "words that are parts": "algorithm: {preset: fedaware, project: [yogi, {kind: scale, lr: 0.5}], startup: true}",
    "blocks": "local: {private_blocks: ['0.*'], optimizer: adam, optimizer_state: kept}",
    "weights": "server: {weights: [1.0, 2.0, 0.5]}",
}  # fmt: skip


@pytest.mark.parametrize("text", COMPOSED.values(), ids=COMPOSED)
def test_a_composition_is_the_python_that_is_printed_for_it(text):
    config = from_yaml(text)
    assert evaluated(composition(config).python) == build_algorithm(config)
    assert evaluated(to_python(build_algorithm(config))) == build_algorithm(config)


def test_own_parts_are_named_by_their_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "printed_of_mine.py").write_text(
        "import hansa\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass(frozen=True)\nclass half:\n"
        "    by: float = 2.0\n\n"
        "    def init(self, x):\n        return {}\n\n"
        "    def update(self, delta, state, ctx):\n        return delta / self.by, state\n\n\n"
        "@hansa.component\n"
        "def mine(*, by=2.0, **common):\n    return hansa.presets.fedavg(**common).with_server(half(by))\n"
    )
    config = from_yaml("algorithm: {preset: 'printed_of_mine:mine', by: 4.0}\nlocal: {optimizer: printed_of_mine:half}")
    found = composition(config).python
    assert found.text == "printed_of_mine.mine(by=4.0).with_local(optimizer=printed_of_mine.half())"
    assert found.imports == ("import printed_of_mine",)
    assert evaluated(found) == build_algorithm(config)


def test_numbers_that_python_has_no_word_for():
    assert evaluated(to_python((math.inf, -math.inf, (1,), {"a": [True, None]}))) == (
        math.inf, -math.inf, (1,), {"a": [True, None]}
    )  # fmt: skip
    assert str(to_python(hansa.Mixing(hansa.gossip.ring()))) == (
        "from hansa import Mixing, gossip\nMixing(topology=gossip.ring())"
    )
