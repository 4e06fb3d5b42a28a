"""Parts from words: nested by annotations, checked when made, refused with the place and the near match."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hansa import aggregate, compress, data, gossip, local, sample, server
from hansa.compress import Compressor, Downlink, Uplink
from hansa.config import ConfigError
from hansa.config.components import KINDS, signature_of
from hansa.config.fields import ComponentField
from hansa.core.schedule import Rate
from hansa.server import ServerTransform

OWN = '''
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
def own(write_module):
    write_module("slots_of_mine", OWN)


def refused(where, value):
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
    assert refused(many, ["sign", "sing"]).keys == (1,)


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
    misfit = refused(ComponentField(hint), value)
    assert misfit.keys == keys
    assert said in misfit.message


def test_code_of_ones_own_is_a_part_and_nests_like_one(own):
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
def test_code_of_ones_own_is_refused_like_a_part(own, hint, value, keys, said):
    misfit = refused(ComponentField(hint), value)
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
