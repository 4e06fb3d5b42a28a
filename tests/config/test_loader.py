"""Configurations: YAML with lines, wrong values refused where they stand, presets and components from words."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest

import hansa
import hansa.data
from hansa import aggregate, compress, data, gossip, local, presets, sample, server
from hansa.compress import Compressor, Downlink, Uplink
from hansa.config import ConfigError, build_algorithm, from_preset, from_yaml, json_schema
from hansa.config.components import KINDS, signature_of
from hansa.config.compose import SECTION_ARGUMENTS, own_arguments, preset_arguments
from hansa.config.fields import ComponentField
from hansa.config.sections import EngineSection
from hansa.config.yaml_text import parse_document, read_document
from hansa.core.schedule import Rate
from hansa.engine import Loopback, RayPool, Serial
from hansa.runs.experiment import _engine_factory, config_digest
from hansa.server import ServerTransform
from mistakes import refused


def test_all_problems_are_told_at_once_in_the_order_of_the_file():
    with pytest.raises(ConfigError) as caught:
        from_yaml("rounds: many\nlocal: {lrr: 1}\nserver:\n  epss: 1\n", source="run.yaml")
    assert [problem.where for problem in caught.value.problems] == ["run.yaml:1", "run.yaml:2", "run.yaml:4"]
    assert caught.value.problems[2].excerpt == "  epss: 1"


def test_a_typo_on_the_command_line_names_the_option():
    with pytest.raises(ConfigError, match=r"^--set local.lrr=3: local.lrr: no such key\. Did you mean lr\?"):
        from_yaml("", ["local.lrr=3"])


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
    with pytest.raises(ConfigError, match=said) as caught:
        from_yaml(text, source="run.yaml")
    assert str(caught.value).startswith("run.yaml:")


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


@pytest.mark.parametrize(
    ("written", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("-2e3", -2e3), (".5", 0.5), ("1.", 1.0), ("3", 3),
     *((word, word) for word in ("1e", "e5", "1-3", "12:30:00x", "1.2.3", "2026-01-31", "2026-99-99"))],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(written, number):
    found = parse_document(f"a: {written}").data["a"]
    assert found == number
    assert type(found) is type(number)


def test_one_text_from_two_places_names_the_place():
    """Texts are parsed once, wherever they come from; what one reader changes another does not see."""
    text = "seed: 1\nlocal: {lr: 0.1}\n"
    one, other = parse_document(text, "one.yaml"), parse_document(text, "other.yaml")
    one.apply("local.lr=0.5")
    assert (one.data["local"], other.data["local"]) == ({"lr": 0.5}, {"lr": 0.1})
    assert [each.problem(("seed",), "x").where for each in (one, other)] == ["one.yaml:1", "other.yaml:1"]
    for name in ("one.yaml", "other.yaml"):
        with pytest.raises(ConfigError, match=rf"^{name}:2: seed: is set twice"):
            parse_document("seed: 1\nseed: 2\n", name)


def test_every_key_knows_its_line():
    text = "seed: 1\nlocal:\n  lr: 0.1\n  steps: [1,\n    2]\n"
    assert parse_document(text, "run.yaml").problem(("local", "lr"), "x").where == "run.yaml:3"
    assert parse_document(text, "run.yaml").problem(("local", "steps", 1), "x").where == "run.yaml:5"
    assert parse_document(text, "run.yaml").problem(("local", "clip"), "x").where == "run.yaml:2"  # its section


def test_an_alias_repeats_what_it_names_and_one_that_contains_itself_is_refused():
    document = parse_document("a: &a {lr: 0.1}\n" + "".join(f"k{n}: *a\n" for n in range(1000)))
    assert document.data["k999"] == {"lr": 0.1}
    with pytest.raises(ConfigError, match=r"run.yaml:2: nested more than 40 levels"):
        parse_document("seed: 1\ndata: &x {options: *x}", "run.yaml")


def test_files_that_are_missing_binary_or_devices_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: no such file"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.yaml: cannot be read"):
        read_document(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="longer than 1048576 characters"):
        read_document("/dev/zero")  # which has no end
    with pytest.raises(ConfigError, match="cannot be read as text: embedded null"):
        read_document("a\0b")


def test_a_change_is_a_dotted_key_and_a_yaml_value():
    document = parse_document("local: {lr: 0.1}")
    for change in ("local.lr=1e-2", "local.steps=[1, 2]", "sample={participation: 0.1}", "name=a=b"):
        document.apply(change)
    assert document.data == {
        "local": {"lr": 0.01, "steps": [1, 2]}, "sample": {"participation": 0.1}, "name": "a=b"
    }  # fmt: skip


def test_a_change_below_a_bare_word_expands_it():
    document = parse_document("algorithm: fedprox\ndata: synthetic\nuplink: direct\n")
    document.apply("algorithm.mu=0.1")
    document.apply("data.clients=5")
    document.apply("uplink.kind=memoryless")
    assert document.data["algorithm"] == {"preset": "fedprox", "mu": 0.1}
    assert document.data["data"] == {"name": "synthetic", "clients": 5}
    assert document.data["uplink"] == {"kind": "memoryless"}


test_a_change_without_key_or_value_or_beyond_the_end_of_a_list_is_refused = refused(
    *((change, "expected KEY=VALUE") for change in ("local.lr", "=3", ".lr=3", "local..lr=3")),
    ("local.steps.5=3", "no entry 5 in this list of 2"),
    by=lambda change: parse_document("local: {steps: [1, 2]}").apply(change),
)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


def quickly(text):
    """The problem of a text, found within a moment of the machine's time."""
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, source="run.yaml")
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def test_aliases_that_stand_for_a_billion_values_are_refused_at_once():
    assert len(BOMB) < 450
    assert "run.yaml:1: expands to more than 100000 values by its aliases." in quickly(BOMB)
    merged = "a: &a {k: 1}\n" + "".join(
        f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in pairwise("abcdefghi")
    )
    assert "run.yaml:2: a value of type 'tag:yaml.org,2002:merge'" in quickly(merged)
    assert quickly("--- " + "x" * (1 << 20)) == "run.yaml:1: longer than 1048576 characters."


def test_deep_nesting_is_refused():
    for text in ("a: " + "[" * 50 + "]" * 50, "a: " + "[" * 100_000, "{a: " * 5000, "- " * 3000):
        assert quickly(text) == "run.yaml:1: nested more than 40 levels deep."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2", "run.yaml:1: expected sections"),
        ("just words", "run.yaml:1: expected sections"),
        ("a: 1\nb: [1, 2\nc: 3\n", "run.yaml:3: not YAML"),
        ("local:\n  lr: 0.1\n  lr: 0.2\n", "run.yaml:3: local.lr: is set twice, first in line 2"),
        ("a: !!python/object/apply:os.system ['true']", "a value of type 'tag:yaml.org,2002:python/object/apply:os."),
        ("seed: 1\nname: a\0b", "run.yaml:2: not YAML: unacceptable character #x0000"),
        ('seed: 1\nname: "a\\0b"', r"run.yaml:2: a string with the control character '\x00'."),
        ('seed: 1\nname: "\\e[31m"', r"run.yaml:2: a string with the control character '\x1b'."),
        ('seed: 1\n"\\ud800": 1', r"run.yaml:2: a string with the control character '\ud800'."),
        ("seed: 1\nrounds: " + "9" * 5000, "run.yaml:2: a number of 5000 digits: expected at most 100."),
        ("seed: 1\nmax_norm: 0." + "9" * 5000, "run.yaml:2: a number of 5002 digits"),
        ("seed: !!int x", "run.yaml:1: a value that does not match its tag"),
        ("seed: !!bool maybe", "run.yaml:1: a value that does not match its tag"),
        ("a: 1\nb: !!set {x, y}", "run.yaml:2: a value of type 'tag:yaml.org,2002:set': expected strings"),
        ("? [a, b]\n: 1", "run.yaml:1: not YAML: a key that is a list or a mapping"),
        ("local: {lr: " + "x" * 5000 + "}", "run.yaml:1: local.lr: no schedule 'xxx"),
        ("x" * 1000 + ": 1", "no such key"),
        ("sample: {count: " + "[1, " * 30 + "]" * 30 + "}", "run.yaml:1: "),
    ],
)  # fmt: skip
def test_odd_values_are_refused_in_a_sentence_with_their_line(text, message):
    assert message in quickly(text)


@pytest.mark.parametrize(
    "change",
    [
        "rounds=" + "9" * 5000,
        "local.steps." + "9" * 5000 + "=1",
        "local.steps.\u00b2=1",
        "name=a\0b",
        "\udcff=1",
        "data.options={x: &a [*a]}",
        "data.options=" + "[" * 5000,
        "local.lr=!!float x",
        "compress.compressor={kind: top_k, ratio: " + "1" * 5000 + "/3}",
        "compress.compressor={kind: top_k, ratio: \u00b2/3}",
    ],
)
def test_odd_changes_are_refused_in_a_sentence_that_can_be_printed(change):
    with pytest.raises(ConfigError) as caught:
        from_yaml("", [change])
    str(caught.value).encode()
    assert len(str(caught.value)) < 2000


PARTS = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
import hansa
import torch
if TYPE_CHECKING:
    from hansa.core.schedule import Schedule
    from hansa.server import ServerTransform

@dataclass(frozen=True, slots=True)
class halved:
    """Half of what another server says."""
    inner: ServerTransform
    rate: float | Schedule = 0.5

    def init(self, x):
        return self.inner.init(x)

    def update(self, delta, state, ctx):
        step, state = self.inner.update(delta, state, ctx)
        return step / 2, state

class short:
    def init(self, x):
        return {}

    def update(self, delta, state):
        return delta, state

@hansa.component
def untyped(compressor, lr=1.0):
    from hansa.compress import error_feedback
    return error_feedback(compressor)

made = halved(None)
'''


@pytest.fixture
def parts(write_module):
    write_module("slots_of_mine", PARTS)


def misfit_of(where, value):
    with pytest.raises(ConfigError) as caught:
        where.build(value)
    return caught.value.problems[0]


def test_a_part_nests_by_the_annotation_of_the_argument():
    words = {"kind": "warmup", "lr": {"kind": "cosine", "lr": 0.1, "rounds": 9}, "rounds": 2}
    assert ComponentField(Rate).build(words) == local.warmup(local.cosine(0.1, 9), 2)
    words = {
        "kind": "clipped",
        "norm": 2,
        "inner": {"kind": "aware", "project": ["yogi", {"kind": "scale", "lr": 0.1}]},
    }
    inner = aggregate.aware(project=server.chain(server.yogi(), server.scale(0.1)))
    assert ComponentField(aggregate.Aggregator).build(words) == aggregate.clipped(inner, 2)


def test_a_union_takes_each_of_its_members():
    two_way = ComponentField(bool | Compressor | Downlink)
    assert two_way.build(True) is True
    assert two_way.build("sign") == compress.sign()
    assert two_way.build({"kind": "replica", "compressor": "sign"}) == compress.replica(compress.sign())
    clusters = ComponentField(int | Sequence[Sequence[int]] | gossip.Clustering)
    assert clusters.build(3) == 3
    assert clusters.build([[0, 1], [2]]) == [[0, 1], [2]]
    assert clusters.build({"kind": "random", "k": 2}) == gossip.random(2)


def test_a_list_of_parts_is_built_entry_by_entry():
    many = ComponentField(tuple[Compressor, ...])
    assert many.build(["sign", {"kind": "top_k", "ratio": "1/4"}]) == (compress.sign(), compress.top_k(0.25))
    assert misfit_of(many, ["sign", "sing"]).keys == (1,)


def test_a_chain_is_a_list_or_is_named():
    by_list = ComponentField(ServerTransform).build(["adam", "scale"])
    by_name = ComponentField(ServerTransform).build({"kind": "chain", "transforms": ["adam", "scale"]})
    assert by_list == by_name == server.chain(server.adam(), server.scale())


@pytest.mark.parametrize(
    ("hint", "value", "keys", "said"),
    [
        (Compressor, "sing", (), "no compressor 'sing'. Did you mean sign?"),
        (Compressor, {"kind": "top_k"}, (), "top_k needs ratio."),
        (Compressor, {"kind": "top_k", "ration": 1}, ("ration",), "top_k has no 'ration'. Did you mean ratio?"),
        (Compressor, {"kind": "top_k", "ratio": 2}, ("ratio",), "top_k(ratio=2): expected 0 < ratio <= 1."),
        (Compressor, {"kind": "top_k", "ratio": "much"}, ("ratio",), "expected a number, found 'much'."),
        (Compressor, {"kind": "sign", "x": 1}, ("x",), "sign has no 'x'. It takes none."),
        (Compressor, {"ratio": 0.5}, (), "which compressor? Add kind: one of cast, grid, "),
        (Uplink, "sign", (), "no uplink 'sign'. Known: direct, error_feedback, memoryless."),
        (Uplink, 3, (), "expected an uplink (direct, error_feedback, memoryless), found 3."),
        (Rate, {"kind": "warmup", "lr": {"kind": "cosin"}, "rounds": 2}, ("lr", "kind"), "Did you mean cosine?"),
        (ServerTransform, ["adam", {"kind": "scale", "lr": -1}], (1, "lr"), "scale(lr=-1): expected lr > 0."),
        (gossip.Topology, "rign", (), "no topology 'rign'. Did you mean ring"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_where_it_stands(hint, value, keys, said):
    misfit = misfit_of(ComponentField(hint), value)
    assert misfit.keys == keys
    assert said in misfit.message


def test_code_of_ones_own_is_a_part_and_nests_like_one(parts):
    import slots_of_mine

    words = {"kind": "slots_of_mine:halved", "inner": "adam", "rate": {"kind": "cosine", "lr": 1, "rounds": 2}}
    made = ComponentField(ServerTransform).build([words, "scale"])
    assert made == server.chain(slots_of_mine.halved(server.adam(), local.cosine(1, 2)), server.scale())
    assert ComponentField(ServerTransform).build("slots_of_mine:made") is slots_of_mine.made
    assert ComponentField(gossip.Topology).build({"kind": "Erdos-Renyi", "p": 0.4}) == gossip.erdos_renyi(0.4)
    assert ComponentField(sample.Sampler).normalize({"count": 5}) == {"kind": "uniform", "count": 5}
    assert ComponentField(Uplink).build(
        {"kind": "slots_of_mine:untyped", "compressor": "sign"}
    ) == compress.error_feedback(compress.sign())


@pytest.mark.parametrize(
    ("hint", "value", "keys", "said"),
    [
        (ServerTransform, "slots_of_mine:halve", (), "slots_of_mine has no 'halve'. Did you mean halved?"),
        (ServerTransform, "slots_of_nobody:x", (), "the module cannot be imported (ModuleNotFoundError"),
        (ServerTransform, "slots of mine:x", (), "expected MODULE:NAME"),
        (ServerTransform, "slots_of_mine:halved", (), "slots_of_mine:halved needs inner."),
        (ServerTransform, {"kind": "slots_of_mine:halved", "inner": "adm"}, ("inner",), "Did you mean adam"),
        (ServerTransform, "slots_of_mine:short", (), "its method update cannot be called as update(delta, "),
        (Compressor, "slots_of_mine:short", (), "(no compressor: it has no method encode(x, key))."),
        (Compressor, "slots_of_mine:OWN", (), "has no 'OWN'"),
    ],
)  # fmt: skip
def test_code_of_ones_own_is_refused_like_a_part(parts, hint, value, keys, said):
    misfit = misfit_of(ComponentField(hint), value)
    assert misfit.keys == keys
    assert said in misfit.message, misfit.message


def test_every_part_of_every_kind_is_one_of_that_kind_by_its_own_check():
    needing_one_of_several = {"uniform", "explore", "weighted", "quantity_skew", "chain", "blocks"}
    for kind in KINDS.values():
        assert kind.built_in or kind.name == "loop", "Hansa itself has no loop"
        for name, part in kind.built_in.items():
            if not signature_of(part).required and name not in needing_one_of_several:
                assert kind.mismatch(part()) == "", name


def test_kinds_tell_parts_of_like_methods_apart():
    assert KINDS["work"].mismatch(local.between(1, 2))
    assert KINDS["distribution"].mismatch(local.fixed(1))
    assert KINDS["server"].mismatch(aggregate.mean())
    assert KINDS["topology"].mismatch(object()) == "it is no Topology"
    assert not KINDS["partition"].mismatch(data.iid())


def test_arguments_take_parts_by_their_name_or_by_an_annotation_with_a_class():
    def untyped(compressor, anything, *more): ...

    named, unknown, more = (each.annotation for each in signature_of(untyped).arguments.values())
    assert ComponentField(named).build("sign") == compress.sign()
    assert ComponentField(named).build(3) == 3
    assert ComponentField(unknown).build([1, {"a": 2}]) == [1, {"a": 2}]
    assert ComponentField(more).build([1, "sign"]) == (1, "sign")
    assert ComponentField(aggregate.mean).build("median") == aggregate.median()
