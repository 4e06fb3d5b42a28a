"""A configuration: typos with line and near match, values refused where they stand, presets from words."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

import hansa
import hansa.data
from hansa import presets
from hansa.config import ConfigError, build_algorithm, from_preset, from_yaml, json_schema
from hansa.config.components import KINDS
from hansa.config.compose import SECTION_ARGUMENTS, own_arguments, preset_arguments
from hansa.config.sections import EngineSection
from hansa.engine import Loopback, RayPool, Serial
from hansa.runs.experiment import _engine_factory, config_digest


def problems(text: str, *changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, changes, source="run.yaml")
    return str(caught.value)


def test_all_problems_are_told_at_once_in_the_order_of_the_file():
    with pytest.raises(ConfigError) as caught:
        from_yaml("rounds: many\nlocal: {lrr: 1}\nserver:\n  epss: 1\n", source="run.yaml")
    assert [problem.where for problem in caught.value.problems] == ["run.yaml:1", "run.yaml:2", "run.yaml:4"]
    assert caught.value.problems[2].excerpt == "  epss: 1"


def test_a_typo_on_the_command_line_names_the_option():
    assert problems("", "local.lrr=3").startswith("--set local.lrr=3: local.lrr: no such key. Did you mean lr?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nlocal:\n  lr: 0.1\n  momentun: 0.9\n", "run.yaml:4: local.momentun: no such key. .*momentum[?]$"),
        ("lr: 0.1", "run.yaml:1: lr: no such key. Did you mean local.lr or server.lr[?]"),
        ("algorithm: {preset: fedavg, batch_size: 3}", "it belongs elsewhere: local.batch_size"),
        *((text, r"expected .*number.*, found '.*'\. Leave out the quotes") for text in (
            'rounds: "3"', 'local: {lr: "0.1"}', 'local: {batch_size: "5"}', 'sample: {participation: "0.1"}',
            'data: {partition: {kind: dirichlet, alpha: "0.3"}}',
        )),
        ("engine: rya", "engine: expected 'pool', 'serial', .* found 'rya'"),
        *((f"engine: {{kind: ray, gpus: {share}}}", "engine.gpus: expected") for share in (0, 2)),
        ("rounds: 0", "rounds: expected greater than or equal to 1, found 0"),
        ("dtype: float16", "dtype: expected 'float32' or 'float64', found 'float16'"),
        ("workers: few", "workers: expected a whole number or 'auto', found 'few'"),
        ("local: {batch_size: big}", "batch_size: expected a whole number or 'all'"),
        ("local: 3", "local: expected keys such as lr, steps, epochs, found 3"),
        ("local: {steps: 3, epochs: 1}", "steps and epochs: expected one of the two"),
        ("local: {lr: fast}", r"local.lr: no schedule 'fast'\. Known"),
        ("local: {lr: true}", "local.lr: expected a number or a schedule .*, found True.$"),
        ("compress: {two_way: 3}", "two_way: expected true or false or a compressor .* or a downlink .* 3.$"),
        ("sample: {participation: 1.5}", "sample.participation: uniform\\(participation=1.5\\): expected 0 < "),
        ("algorithm: fedavgg", "algorithm.preset: no preset 'fedavgg'. Did you mean fedavg"),
        ("algorithm: {preset: fedprox, muu: 1}", "algorithm.muu: fedprox has no such argument. Did you mean mu?"),
        ("server: {b1: 0.9}", "server.b1: fedavg has no such argument."),
        ("algorithm: fedams\nserver: {b1: 2}", "run.yaml:2: server.b1: ams\\(b1=2.0\\): expected 0 <= b1 < 1"),
        ("algorithm: feddyn\nserver: {weights: samples}", "uniform"),
        ("faults: {before: 0.8, nan: 0.4}", "faults: .*rates sum to 1.2"),
        *((f"{section}: {{name: mlp, factory: 'a:b'}}", "name and factory: expected one of the two")
          for section in ("model", "data")),
        ("max_norm: .inf", "max_norm: expected a finite number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_where_it_stands(text, said):
    found = problems(text)
    assert re.search(said, found), found
    assert found.startswith("run.yaml:")


ENGINES = {"serial": Serial, "loopback": Loopback}


def test_the_engine_is_chosen_by_name_and_results_do_not_depend_on_it():
    config = from_yaml("engine: {kind: ray, gpus: 0.25, address: 'ray://here:1'}\nworkers: 3")
    factory: Any = _engine_factory(config, 0)
    assert factory.func is RayPool
    assert factory.keywords == {"workers": 3, "address": "ray://here:1", "gpus": 0.25}
    with pytest.raises(hansa.HansaError, match=r"engine\.gpus: 0\.25: engine pool has no actors"):
        _engine_factory(from_yaml("engine: {gpus: 0.25}"), 0)
    assert config_digest(config) == config_digest(from_yaml(""))
    assert set(get_args(EngineSection.model_fields["kind"].annotation)) == {*ENGINES, "pool", "ray", "flower"}
    assert [_engine_factory(from_yaml(f"engine: {kind}"), 0) for kind in ENGINES] == list(ENGINES.values())
    with pytest.raises(hansa.HansaError, match="the clients are at sites"):
        _engine_factory(from_yaml("engine: flower"), 0)


@pytest.mark.parametrize("name", presets.catalogue())
def test_every_preset_is_reached_by_name_and_means_the_same_as_in_python(name):
    assert build_algorithm(from_preset(name)) == presets.get(name)


@pytest.mark.parametrize("name", presets.catalogue())
def test_every_word_of_every_preset_has_exactly_one_place_in_a_file(name):
    made = presets.catalogue()[name]
    shared = [word for table in SECTION_ARGUMENTS.values() for word in table.values()]
    assert len(shared) == len(set(shared))
    for word in preset_arguments(made):
        places = (word in shared) + (word in own_arguments(made)) + (word in ("participation", "sampler"))
        assert places == 1, word


WRITTEN = """
algorithm: fedams
local:
  lr: {kind: warmup, lr: {kind: cosine, lr: 0.1, rounds: 9}, rounds: 2}
  steps: {kind: random_steps, low: 2, high: 5}
server: {lr: {kind: step_decay, lr: 1.0, every: 10}, eps: 1e-4}
sample: {kind: weighted, count: 3}
uplink: {kind: error_feedback, compressor: {kind: top_k, ratio: 1/64}}
aggregate: {kind: clipped, norm: 2.0, inner: {kind: trimmed_mean, trim: 0.2}}
"""
MEANT = presets.fedams(
    local_lr=hansa.local.warmup(hansa.local.cosine(0.1, 9), 2), steps=hansa.local.random_steps(2, 5),
    server_lr=hansa.local.step_decay(1.0, 10), eps=1e-4, sampler=hansa.sample.weighted(count=3),
).on(
    "model", uplink=hansa.compress.error_feedback(hansa.compress.top_k(1 / 64)),
    aggregate=hansa.aggregate.clipped(hansa.aggregate.trimmed_mean(0.2), 2.0),
)  # fmt: skip
PROX = """
algorithm: {preset: fedprox, mu: 0.5}
local: {lr: 0.2, epochs: 1.5, batch_size: all, momentum: 0.9, weight_decay: 1e-4, max_grad_norm: 5.0}
server: {lr: 0.7, weights: samples}
sample: {participation: 0.25}
"""
GOSSIP = """
algorithm: ha_fed
gossip: {clusters: 4, reporters: 2, topology: {kind: erdos_renyi, p: 0.6}, gossip_every: 2, active: 0.5}
local: {steps: 8}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WRITTEN, MEANT),
        (PROX, presets.fedprox(
            mu=0.5, local_lr=0.2, epochs=1.5, batch_size=None, local_momentum=0.9, weight_decay=1e-4,
            max_grad_norm=5.0, server_lr=0.7, weights="samples", participation=0.25,
        )),
        (GOSSIP, presets.ha_fed(
            clusters=4, reporters=2, topology=hansa.gossip.erdos_renyi(0.6), gossip_every=2, active=0.5, steps=8
        )),
    ],
)  # fmt: skip
def test_a_file_means_what_python_says(text, expected):
    assert build_algorithm(from_yaml(text)) == expected


def test_the_schema_is_strict_json_and_knows_presets_parts_and_sections():
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]["AlgorithmSection"]["properties"]["preset"]["anyOf"][0]["enum"]) == set(
        presets.catalogue()
    )
    assert "mu" in schema["$defs"]["AlgorithmSection"]["properties"]
    kinds = {part["title"] for part in schema["$defs"]["partition"]["anyOf"] if "title" in part}
    assert {"iid", "shards", "dirichlet", "quantity_skew", "natural"} <= kinds
    refs = re.findall('"\\$ref": "#/\\$defs/(.*?)"', json.dumps(schema))
    assert {"server", "compressor"} <= set(refs) <= set(schema["$defs"])
    private = schema["$defs"]["LocalSection"]["properties"]["private_blocks"]["anyOf"]
    assert {"type": "array", "items": {"type": "string"}} in private
    chain = schema["$defs"]["ServerSection"]["properties"]["optimizer"]["anyOf"]
    assert {"type": "array", "items": {"$ref": "#/$defs/server"}} in chain


@pytest.mark.parametrize(
    ("package", "method", "kind"),
    [
        (hansa.compress, "encode", "compressor"),
        (hansa.compress, "send", "uplink"),
        (hansa.compress, "broadcast", "downlink"),
        (hansa.aggregate, "combine", "aggregate"),
        (hansa.server, "update", "server"),
        (hansa.sample, "select", "sampler"),
        (hansa.local, "at", "schedule"),
        (hansa.local, "correction", "solver"),
        (hansa.gossip, "assign", "clustering"),
        (hansa.gossip, "draw", "activity"),
        (hansa.data, "split", "partition"),
    ],
)
def test_every_public_part_can_be_named_in_a_file(package, method, kind):
    public = {name for name in package.__all__ if name.islower() and hasattr(getattr(package, name), method)}
    assert public
    assert public <= set(KINDS[kind].names)
