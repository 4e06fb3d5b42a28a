"""Every part of ours keeps its contract, and so do those of the plug-in example; a new member joins by one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import hansa
from compress.ternary import ternary
from hansa import aggregate, compress, gossip, local, sample, server, testing

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin" / "hansa_plugin_example.py"
spec = importlib.util.spec_from_file_location("hansa_plugin_example", PLUGIN)
assert spec is not None
assert spec.loader is not None
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)

COMPRESSORS = [
    compress.identity(), compress.cast("float16"), compress.cast("bfloat16"), compress.sign(),
    compress.top_k(1 / 8), compress.top_k(1.0, "float16"), compress.top_k(1 / 8, compress.sign()),
    compress.top_k(1 / 8, ternary()), compress.random_k(1 / 4),
    compress.random_k(1 / 4, compress.quantize(3, rounding="nearest")), compress.quantize(16),
    compress.quantize(3, 64, "nearest"), compress.quantize(7, rounding="unbiased"), compress.grid(1.0),
    compress.grid(5.0), ternary(), plugin.ternary(0.3),
]  # fmt: skip
SERVERS = [
    server.scale(0.5), server.sgd(), server.participation_scale(), server.derived_control(4, 0.1),
    server.momentum(), server.adagrad(), server.adam(bias_correction=True), server.yogi(v0=1e-6),
    server.amsgrad(eps_inside=True), server.ams(), server.delay_adaptive(0.5, threshold=2), server.dyn(0.1),
    server.chain(server.ams(), server.scale(0.1)), gossip.consensus_amsgrad(), plugin.lion(),
]  # fmt: skip
AGGREGATORS = [
    aggregate.mean(), aggregate.mean("samples"), aggregate.mean("clusters"), aggregate.nova(),
    aggregate.nova("samples"), aggregate.median(), aggregate.trimmed_mean(0.2), aggregate.krum(1),
    aggregate.clipped(aggregate.mean("samples"), 2.0), aggregate.clipped(aggregate.krum(1), 2.0),
    aggregate.mgda(), aggregate.discounted(),
    aggregate.discounted(aggregate.hinge(), "samples", normalize=True),
    aggregate.mixed_models(0.3, aggregate.constant()), aggregate.calibrated(), aggregate.aware(),
    aggregate.aware(normalize=True, project=server.yogi()), plugin.geometric_median(),
]  # fmt: skip
SAMPLERS = [
    sample.uniform(0.3), sample.uniform(count=12), sample.everyone(), sample.varying(2, 5),
    sample.weighted(count=3), sample.explore(0.25), sample.explore(count=5, then="uniform"),
    sample.startup(sample.uniform(0.2)), sample.startup(sample.per_cluster(1)),
    sample.availability([[0, 3, 4], [1, 2, 11]], count=2), sample.replay([[0, 2], [3, 1]]),
    sample.per_cluster(2), sample.per_cluster(0.25), plugin.round_robin(5),
]  # fmt: skip
SOLVERS = [
    local.sgd(),
    local.prox(0.1),
    local.scaffold(),
    local.scaffold_derived(),
    local.dyn(0.1),
    local.sam(0.05),
]
WORK = [
    local.fixed(5),
    local.fixed([1, 2, 3, 4, 5]),
    local.epochs(1.5),
    local.random_steps(2, 8),
    local.drawn(epochs=local.between(1, 3), batch=local.one_of((4, 8))),
    local.hybrid_plus(min_batch=1),
    local.deadline(2.0, epochs=3, jitter=0.3),
]
TOPOLOGIES = [
    gossip.redrawn(gossip.erdos_renyi(0.6)), gossip.ring(), gossip.complete(),
    gossip.unbalanced_complete(seed=1), gossip.erdos_renyi(0.9, seed=3), gossip.torus(), gossip.star(),
    gossip.exponential(), gossip.isolated(), plugin.chordal_ring(),
    gossip.by_cluster([gossip.ring(), gossip.complete()]), gossip.hypercube(),
    gossip.edges([(0, 1), (1, 2)]), gossip.matrix([[0.75, 0.25], [0.25, 0.75]]),
]  # fmt: skip
ACTIVITIES = [
    gossip.available([[0, 2, 3, 5], [1, 4, 6, 7]], gossip.resample(2)), gossip.everyone(),
    gossip.selected(), gossip.resample(), gossip.resample(2), gossip.resample(0.5), gossip.bernoulli(0.5),
    gossip.replay([[[0, 5], [1, 4], [2]]]),
]  # fmt: skip
MIXING_RULES = [gossip.clipped(0.5), gossip.clipped(100.0), gossip.trimmed(1), gossip.trimmed(3)]
CLUSTERINGS = [gossip.equal(3), gossip.random(3), gossip.given([[0, 2, *range(4, 12)], [3, 1]]), gossip.by_labels(3)]
UPLINKS: list[Any] = [compress.direct()]
UPLINKS += [link(c) for c in COMPRESSORS for link in (compress.error_feedback, compress.memoryless)]
DOWNLINKS: list[Any] = [compress.direct(), compress.replica(compress.sign(), every=3)]
DOWNLINKS += [compress.replica(c, public_start=known) for c in COMPRESSORS for known in (True, False)]


KINDS = {
    "Compressor": COMPRESSORS,
    "Uplink": UPLINKS,
    "Downlink": DOWNLINKS,
    "ServerTransform": SERVERS,
    "Aggregator": AGGREGATORS,
    "Sampler": SAMPLERS,
    "Solver": SOLVERS,
    "LocalWork": WORK,
    "Topology": TOPOLOGIES,
    "Activity": ACTIVITIES,
    "MixingRule": MIXING_RULES,
    "Clustering": CLUSTERINGS,
}


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, members in KINDS.items() for part in members], ids=repr
)
def test_a_part_keeps_the_contract_of_its_kind_which_its_methods_tell(kind, part) -> None:
    found = [protocol.__name__ for protocol in testing._contracts_of(part)]
    assert found == (["Uplink", "Downlink"] if part == compress.direct() else [kind])
    testing.check(part)


@pytest.mark.parametrize("other", [object(), compress.sign, 3], ids=["object", "class", "number"])
def test_what_is_no_component_is_refused(other) -> None:
    with pytest.raises(hansa.HansaError, match="expected a component"):
        testing.check(other)


def test_every_public_part_of_a_room_is_here() -> None:
    """What a room makes public and what a check would take must have gone through it."""
    rooms = {
        server: ["ServerTransform"],
        aggregate: ["Aggregator"],
        compress: ["Compressor"],
        sample: ["Sampler"],
        local: ["Solver", "LocalWork"],
        gossip: ["Activity", "Clustering", "MixingRule", "Topology"],
    }
    for room, found in ((room, kind) for room, kinds in rooms.items() for kind in kinds):
        protocol, members = getattr(room, found), KINDS[found]
        known = {type(member).__name__ for member in members}
        for name in room.__all__:
            kind = getattr(room, name)
            own = isinstance(kind, type) and name.islower() and protocol in kind.__mro__
            assert not own or name in known, f"{room.__name__}.{name} has not gone through its contract"
