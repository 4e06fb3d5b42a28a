"""Parts are checked where they are composed; what they do not declare has a default; their citations are theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import hansa
from engine import problems
from hansa import Algorithm, Channel, HansaError, LocalPhase
from hansa.aggregate import BaseAggregator, clipped, mean
from hansa.aggregate.base import Combined, sum_updates
from hansa.algorithm import Mixing
from hansa.compress import direct, error_feedback, replica, sign
from hansa.core.protocols import bibliography, bibtex_entries, citations, with_defaults
from hansa.gossip import everyone, ring
from hansa.local import Correction, SolverResult, Work, fixed, sgd
from hansa.sample import BaseSampler, Sampler, per_cluster, startup, uniform
from hansa.server import BaseServerTransform, chain, scale
from mistakes import refused

REFUSED: list[tuple[Any, str]] = [
    (lambda: Channel(uplink=sign()), "Channel(uplink=sign()): expected a link, with receive and send. error_feedback("),
    (lambda: Channel(downlink=error_feedback(sign())), "Channel(downlink=error_feedback(compressor=sign()))"),
    (lambda: Channel(uplink=replica(sign())), "Channel(uplink=replica(compressor=sign(), public_start=True, every=1))"),
    (lambda: Channel(server=0.1), "Channel(server=0.1): expected a server transform, with init and update. scale(0.1)"),
    (lambda: Channel(server=mean()), "Channel(server=mean(weights='uniform')): expected a server transform"),
    (lambda: Channel(aggregate=mean), "Channel(aggregate=mean): expected an aggregator, with combine and init. mean()"),
    (lambda: Algorithm(sampler=0.1), "Algorithm(sampler=0.1): expected a sampler, with select. uniform(0.1) is one."),
    (lambda: Algorithm(local=sgd()), "Algorithm(local=sgd()): expected a local phase."),
    (lambda: Algorithm(channels=scale()), "Algorithm(channels=scale(lr=1.0)): expected channels by name. {'model': Ch"),
    (lambda: Algorithm(channels={"model": scale()}), "Algorithm(channels={'model': scale(lr=1.0)}): expected"),
    (lambda: LocalPhase(steps=5), "LocalPhase(steps=5): expected an amount of local work, with draw. fixed(5) is one."),
    (lambda: LocalPhase(solver=0.1), "LocalPhase(solver=0.1): expected a local solver, with correction and finish."),
    (lambda: LocalPhase(mixing=ring(), steps=fixed(2)), "LocalPhase(mixing=ring()): expected Mixing(ring())."),
    (lambda: Mixing(7), "Mixing(topology=7): expected a topology, with weights. ring() is one."),
    (lambda: Mixing(ring(), active=2), "Mixing(active=2): expected a rule for who computes, with draw. everyone() is"),
    (lambda: Mixing(ring(), compressor=direct()), "Mixing(compressor=direct()): expected a compressor, with encode"),
    (lambda: replica(direct()), "replica(compressor=direct()): expected a compressor, with encode, max_nbytes and par"),
    (
        lambda: hansa.presets.scaffold().on("model", aggregate=clipped(mean("samples"), 1.0)),
        "scaffold(weights='uniform'): expected 'samples' on the channel 'control', as on 'model'.",
    ),
]


test_a_wrong_composition_says_what_was_expected = refused(*((make, f"^{re.escape(told)}") for make, told in REFUSED))


class lion:
    """Two methods and nothing else."""

    def init(self, x):
        return {"m": torch.zeros_like(x)}

    def update(self, delta, state, ctx):
        m = 0.9 * state["m"] + 0.1 * delta
        return 0.01 * torch.sign(m), {"m": m}


class plain_mean:
    def init(self, dim, population):
        return {}

    def combine(self, updates, state, ctx):
        return Combined(sum_updates(updates, [1 / len(updates)] * len(updates)), state, {})


class whole_link:
    def send(self, x, memory, key):
        return direct().send(x, memory, key)

    def receive(self, packet, *, dim, dtype):
        return direct().receive(packet, dim=dim, dtype=dtype)


class first_two:
    def select(self, round, population, key):
        return (0, 1 + round % 2)


class three_steps:
    def draw(self, client, samples, batch_size, key):
        return Work(3, min(samples, batch_size or samples))


class plain_sgd:
    def correction(self, got, memory):
        return Correction()

    def finish(self, change, steps, lr, got, memory):
        return SolverResult({}, {})


class all_compute:
    def draw(self, round, step, clients, key):
        return sorted(clients)


class halves:
    def assign(self, population, key, labels):
        return [list(range(0, population, 2)), list(range(1, population, 2))]


def test_parts_with_their_methods_alone_run_as_the_built_in_ones_do() -> None:
    own = Algorithm(
        "own",
        first_two(),
        LocalPhase(plain_sgd(), three_steps(), lr=0.05, batch_size=7),
        {"model": Channel(uplink=whole_link(), aggregate=plain_mean(), server=scale(0.5))},
    )
    theirs = Algorithm(
        "own",
        hansa.sample.replay([[0, 1], [0, 2]]),
        LocalPhase(sgd(), fixed(3), lr=0.05, batch_size=7),
        {"model": Channel(server=scale(0.5))},
    )
    found, expected = (
        hansa.run(a, problems.task(problems.convolution), rounds=3, workers=1, seed=3) for a in (own, theirs)
    )
    assert torch.equal(found.params, expected.params)
    moved = hansa.run(own.with_server(lion()), problems.task(), rounds=3, workers=1)
    assert citations(own.with_server(lion())) == []
    assert float(moved.params.abs().max()) > 0


def test_a_rule_of_activity_and_of_clusters_needs_one_method() -> None:
    def gossiping(active, clusters) -> hansa.Run:
        mixing = Mixing(ring(), clusters, active)
        phase = LocalPhase(sgd(), fixed(2), lr=0.05, batch_size=7, mixing=mixing)
        return hansa.run(Algorithm("own", per_cluster(1), phase), problems.task(), rounds=2, workers=1)

    found = gossiping(all_compute(), halves())
    expected = gossiping(everyone(), [[0, 2, 4], [1, 3, 5]])
    assert torch.equal(found.params, expected.params)
    with pytest.raises(HansaError, match="expected one number of steps for all"):
        LocalPhase(steps=three_steps(), mixing=Mixing(ring()))


@dataclass(frozen=True, slots=True)
class by_cluster(BaseSampler):
    """A sampler of one's own that asks for the clusters, inside another one."""

    clusters: tuple[tuple[int, ...], ...] = ()

    def bind(self, clusters):
        return by_cluster(clusters)

    def select(self, round, population, key):
        return tuple(sorted(cluster[round % len(cluster)] for cluster in self.clusters))


@pytest.mark.parametrize("sampler", [by_cluster(), startup(by_cluster())])
def test_binding_to_clusters_is_the_parts_own_method(sampler) -> None:
    method = hansa.presets.ha_fed(clusters=[[0, 3, 4], [5, 1, 2]], reporters=sampler, steps=2)
    run = hansa.run(method, problems.task(), rounds=4, workers=1)
    assert [record["participants"] for record in run.history][-3:] == [2, 2, 2]
    assert "clusters=((0, 3, 4), (5, 1, 2))" in repr(run.algorithm.sampler)


@dataclass(frozen=True, slots=True)
class demanding(BaseAggregator):
    """Declares what an aggregator may declare."""

    min_updates: int = 3
    weights: Any = "samples"
    momentum_storage: Any = "disk"

    def combine(self, updates, state, ctx):
        return mean("samples").combine(updates, state, ctx)


def test_declarations_of_an_aggregator_reach_those_who_need_them_also_through_a_wrapper() -> None:
    for aggregator in (demanding(), clipped(demanding(), 1e9)):
        method = hansa.presets.fedavg(sampler=uniform(count=4), steps=1).on("model", aggregate=aggregator)
        assert method.with_buffers(2).channels["buffers"].aggregate == mean("samples")
        run = hansa.run(method, problems.task(), rounds=1, workers=1, faults=hansa.faults(before=0.9), seed=1)
        assert type(run.store).__name__ == "DiskStore"
        assert run.history[-1]["participants"] < 3
        assert torch.equal(run.params, problems.task().start(hansa.Key(1), torch.float32)["model"])


def test_defaults_are_the_protocols() -> None:
    assert with_defaults(plain_mean(), BaseAggregator).weights == "uniform"

    @dataclass(frozen=True, slots=True)
    class forgetful(BaseAggregator):
        weights: Any

        def combine(self, updates, state, ctx):
            return Combined(updates[0].vector, state, {})

    with pytest.raises(HansaError, match="forgetful: its field 'weights' has no value"):
        Algorithm(channels={"model": Channel(aggregate=forgetful())})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        type("half", (Sampler,), {})()


OWN = "@article{me2026, author = {Me}, title = {Mine}, year = {2026}}"


@dataclass(frozen=True, slots=True)
class cited(BaseServerTransform):
    cites: ClassVar[tuple[str, ...]] = (OWN, "reddi2021")

    def update(self, delta, state, ctx):
        return delta, state


def test_a_citation_is_a_key_or_an_entry_of_ones_own(capsys) -> None:
    method = hansa.presets.fedavg().with_server(chain(cited(), cited()))
    assert citations(method).count(OWN) == 1
    text = hansa.cite(method)
    assert capsys.readouterr().out == text + "\n"
    assert text.count(OWN) == 1
    assert bibliography()["reddi2021"] in text
    assert bibtex_entries(citations(method) * 2) == text

    class one(cited):
        cites: ClassVar[str] = OWN  # type: ignore[assignment]

    assert OWN in citations(hansa.presets.fedavg().with_server(one()))


def test_a_part_that_is_no_dataclass_is_cited_too_also_in_a_chain() -> None:
    class plain(lion):
        cites = (OWN,)

    assert OWN in citations(hansa.presets.fedavg().with_server(plain()))
    assert OWN in citations(hansa.presets.fedavg().with_server(chain(scale(), plain())))


@pytest.mark.parametrize("wrong", ["reddi2020", "@article me", "@article{me}", 7])
def test_an_unknown_citation_is_an_error_that_names_the_part(wrong) -> None:
    class mistaken(cited):
        cites: ClassVar[tuple[Any, ...]] = (wrong,)

    with pytest.raises(HansaError, match=re.escape(f"mistaken cites {wrong!r}: expected a key")):
        hansa.presets.fedavg().with_server(mistaken())
