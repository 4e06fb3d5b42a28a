"""A file composes what Python composes: parts exchanged on top of any preset, methods and parts of one's own."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest
import torch

from hansa import Mixing, aggregate, compress, gossip, local, presets, sample, server
from hansa.algorithm import Channel, LocalPhase
from hansa.config import ConfigError, build_algorithm, from_preset, from_yaml, load, to_yaml
from hansa.config.sections import ChannelSection, GossipSection, LocalSection
from hansa.runs.experiment import open_run
from mistakes import refused

OWN = '''
from dataclasses import dataclass
from typing import ClassVar, Unpack
import hansa
import torch
from hansa import presets
from hansa.compress import Compressor, error_feedback
from hansa.core.schedule import Rate, rate_at

@dataclass(frozen=True, slots=True)
class lion:
    """step = lr sign(b1 m + (1-b1) Delta); m <- b2 m + (1-b2) Delta."""
    lr: Rate = 0.01
    b1: float = 0.9
    b2: float = 0.99
    cites: ClassVar[tuple[str, ...]] = ()

    def init(self, x):
        return {"m": torch.zeros_like(x)}

    def update(self, delta, state, ctx):
        step = rate_at(self.lr, ctx.round) * torch.sign(self.b1 * state["m"] + (1 - self.b1) * delta)
        return step, {"m": self.b2 * state["m"] + (1 - self.b2) * delta}

@hansa.component
def fedlion(lr=0.01, **common):
    """FedLion, in two lines."""
    return presets.fedavg(**common).with_server(lion(lr))

@hansa.component
def typed(*, second: Compressor | None = None, **common: Unpack[presets.Common]):
    made = presets.scaffold(**common)
    return made if second is None else made.on("control", uplink=error_feedback(second))

@hansa.component
def bare(rate=0.1):
    return presets.fedavg(local_lr=rate)

@hansa.component
def wrong():
    return lion()
'''


@pytest.fixture
def own(write_module):
    write_module("composed_of_mine", OWN)
    return importlib.import_module("composed_of_mine")


def test_one_line_each():
    scaled = presets.fedprox().with_server(server.chain(server.adam(), server.scale(0.1)))
    control = presets.scaffold().on("control", uplink=compress.error_feedback(compress.sign()))
    for preset, change, expected in [
        ("fedprox", "server.optimizer=[adam, {kind: scale, lr: 0.1}]", scaled),
        ("scaffold", "channels.control.uplink={kind: error_feedback, compressor: sign}", control),
        ("cafga", "aggregate=trimmed_mean", presets.cafga().on("model", aggregate=aggregate.trimmed_mean())),
        ("fedams", "local.solver={kind: prox, mu: 0.1}", presets.fedams().with_local(solver=local.prox(0.1))),
        ("fedavg", "local.optimizer=adam", presets.fedavg().with_local(optimizer=server.adam())),
    ]:
        assert build_algorithm(from_preset(preset, [change])) == expected


def test_the_rate_of_a_chain_stands_at_its_end():
    for text in ("server: adam", "server: [adam]", "server: {optimizer: adam}", "server: {optimizer: [adam]}"):
        made = build_algorithm(from_yaml(text, ["server.lr=0.1"])).channels["model"].server
        assert made == server.chain(server.adam(), server.scale(0.1))
    assert build_algorithm(from_yaml("server: {optimizer: adam}")).channels["model"].server == server.adam()
    feddyn = from_yaml("algorithm: feddyn\nserver: {optimizer: adam, lr: 0.1}")
    assert build_algorithm(feddyn).local.solver == local.dyn(0.1)


def test_the_short_forms_are_those_of_the_model_channel():
    short = "uplink: {kind: memoryless, compressor: sign}\naggregate: median\nserver: {optimizer: yogi}"
    whole = "channels: {model: {uplink: {kind: memoryless, compressor: sign}, aggregate: median, server: yogi}}"
    assert build_algorithm(from_yaml(short)) == build_algorithm(from_yaml(whole))


def test_a_solver_comes_with_its_channel():
    made = build_algorithm(from_yaml("local: {solver: scaffold}\nchannels: {control: {server: participation_scale}}"))
    plain = presets.fedavg().channels["model"]
    assert made.channels == {"model": plain, "control": Channel(server=server.participation_scale())}
    assert made.local.solver == local.scaffold()


@pytest.mark.parametrize(
    ("part", "section", "elsewhere"),
    [(LocalPhase, LocalSection, {"mixing"}), (Mixing, GossipSection, set()), (Channel, ChannelSection, set())],
)
def test_every_field_of_a_composition_can_be_said_in_a_file(part, section, elsewhere):
    assert {field.name for field in fields(part)} - elsewhere <= set(section.model_fields)


def test_blocks_kept_optimizers_and_broadcast_channels():
    made = build_algorithm(from_yaml("local: {private_blocks: ['0.*'], optimizer: adam, optimizer_state: kept}"))
    kept = LocalPhase(private_blocks=local.blocks("0.*"), optimizer=server.adam(), optimizer_state="kept")
    assert made.local == kept
    channels = "channels: {push: {follows: model, server: momentum}}"
    made = build_algorithm(from_yaml(f"local: {{optimizer: momentum, optimizer_state: {{m: push}}}}\n{channels}"))
    assert made.channels["push"] == Channel(server=server.momentum(), follows="model")
    assert made.local.optimizer_state == {"m": "push"}


def test_any_preset_gossips():
    text = "algorithm: fedprox\nlocal: {steps: 3}\ngossip: {topology: torus, clusters: 2, reporters: 1, active: 0.5}"
    expected = presets.fedprox(steps=3).exchange(
        sampler=sample.per_cluster(1), local={"mixing": Mixing(gossip.torus(), 2, gossip.bernoulli(0.5))}
    )
    assert build_algorithm(from_yaml(text)) == expected
    dsgd = build_algorithm(from_yaml("algorithm: dsgd\ngossip: {gossip_every: 2, average_every: 6}"))
    assert dsgd.local.mixing == Mixing(
        gossip.ring(), gossip_every=2, keep_local_models=True, average_every=6, order="combine-then-adapt"
    )


test_what_does_not_compose_is_refused_where_it_stands = refused(
    ("uplink: sign", "run.yaml:1: uplink: no uplink 'sign'. Known: direct, error_feedback"),
    ("server: {kind: adam}", "run.yaml:1: server.kind: no such key. Known: .*optimizer"),
    ("server: {optimizer: adam, b1: 0.5}", "run.yaml:1: server.b1: server.optimizer replaces the preset's server"),
    ("server: {optimizer: [adam, {kind: scal}]}", "server.optimizer.1.kind: no server transform 'scal'"),
    ("uplink: direct\nchannels:\n  model: {uplink: direct}", "run.yaml:3: channels.model.uplink: is set twice"),
    ("server: {optimizer: adam}\nchannels:\n  model: {server: adam}", "run.yaml:3: channels.model.server: is set"),
    ("channels:\n  control: {uplink: direct}", "run.yaml:2: channels.control: .*nothing reports on channel"),
    ("channels: {model: 3}", "channels.model: expected keys such as downlink, uplink, aggregate, found 3"),
    ("seed: 1\nlocal: {solver: scaffold}", "run.yaml:2: local.solver: .*reports on channel 'control'"),
    ("local: {solver: {kind: prox, mu: -1}}", "local.solver.mu: prox\\(mu=-1\\): expected mu >= 0"),
    ("gossip: {topology: ring}", "run.yaml:1?.*local.steps: .*one number of steps for all"),
    ("seed: 0\nlocal: {momentum: 0.9, optimizer: adam}", "run.yaml:2: local.momentum: .*0 with a local optimizer"),
    by=lambda text: from_yaml(text, source="run.yaml"),
)


def test_a_method_of_ones_own_has_the_words_of_its_signature(own):
    text = "algorithm: {preset: 'composed_of_mine:fedlion', lr: 0.02}\nlocal: {lr: 0.1, steps: 3}\nsample: {count: 2}"
    expected = own.fedlion(0.02, local_lr=0.1, steps=3, sampler=sample.uniform(count=2))
    assert build_algorithm(from_yaml(text)) == expected
    assert build_algorithm(from_yaml("algorithm: composed_of_mine:fedlion")) == own.fedlion()
    nested = "algorithm: {preset: 'composed_of_mine:typed', second: {kind: top_k, ratio: 1/4}}"
    assert build_algorithm(from_yaml(nested)) == own.typed(second=compress.top_k(0.25))


def test_a_method_without_the_common_words_is_composed_all_the_same(own):
    text = (
        "algorithm: {preset: 'composed_of_mine:bare', rate: 0.3}\n"
        "local: {epochs: 2, batch_size: all}\nsample: {count: 3}"
    )
    expected = presets.fedavg(local_lr=0.3, epochs=2, batch_size=None, sampler=sample.uniform(count=3))
    assert build_algorithm(from_yaml(text)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm: composed_of_mine:fedlon", "algorithm.preset: .*no 'fedlon'. Did you mean fedlion?"),
        ("seed: 1\nalgorithm: {preset: 'composed_of_mine:fedlion', lrr: 1}", "run.yaml:2: algorithm.lrr: .*no such"),
        ("algorithm: composed_of_mine:wrong", "composed_of_mine:wrong: expected an Algorithm, got lion"),
        ("algorithm: composed_of_mine:fedlion\nserver: {b1: 0.5}", "run.yaml:2: server.b1: .*has no such"),
        ("algorithm: composed_of_nobody:x", "the module cannot be imported"),
        ("server: {optimizer: 'composed_of_mine:lion', lr: -1}", "server.lr"),
    ],
)  # fmt: skip
def test_a_method_of_ones_own_is_refused_like_a_preset(own, text, said):
    with pytest.raises(ConfigError, match=said):
        from_yaml(text, source="run.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: scaffold\nlocal: {steps: 2}\n"
        "channels: {control: {uplink: {kind: error_feedback, compressor: sign}}}",
        "algorithm: composed_of_mine:fedlion\nlocal: {steps: 2, optimizer: {kind: 'composed_of_mine:lion', b1: 0.8}}",
        "algorithm: fedprox\nlocal: {steps: 2}\ngossip: {clusters: 2, reporters: 1}\n"
        "server: {optimizer: [adam], lr: 0.1}",
    ],
)  # fmt: skip
def test_a_run_of_a_composition_is_written_down_and_resumed_exactly(own, tmp_path, text):
    setting = "rounds: 4\nworkers: 1\ndata: {name: synthetic, clients: 6, options: {largest: 60}}\nmodel: logistic\n"
    config = from_yaml(setting + text)
    assert from_yaml(to_yaml(config)) == config
    whole = open_run(config, tmp_path / "whole")
    whole.execute()
    part = open_run(config, tmp_path / "part")
    part.execute([lambda run, record: record["round"] == 2])
    assert load(tmp_path / "part" / "config.yaml") == config
    again = open_run(None, tmp_path / "part")
    again.execute()
    assert torch.equal(whole.run.params, again.run.params)
