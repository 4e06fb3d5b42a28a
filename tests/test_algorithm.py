"""Parts are checked where they are composed; what they do not declare has a default; their citations are theirs."""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hansa
from contracts.small import bowls
from engine import problems
from hansa import Algorithm, Channel, HansaError, LocalPhase, aggregate, presets, server
from hansa.aggregate import BaseAggregator, clipped, krum, mean
from hansa.aggregate.base import Combined, sum_updates
from hansa.algorithm import Mixing
from hansa.compress import direct, error_feedback, replica, sign
from hansa.core.protocols import bibliography, bibtex_entries, citations, with_defaults
from hansa.gossip import ring
from hansa.local import fixed, sgd
from hansa.sample import BaseSampler, Sampler, startup, uniform
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
    assert all("author = {" in entry for entry in bibliography().values())
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


def lab(clients=4):
    return bowls(clients, dim=2)


def pairs():
    return hansa.data.from_arrays(torch.ones(6, 4), torch.arange(6) % 3, clients=2)


class Affine(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


class Turned(Affine):
    """A model with a complex parameter."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))


test_wrong_parts_are_refused_where_they_are_made = refused(
    (lambda: presets.fedavg(local_lr=-0.1), "lr=-0.1.*lr > 0"),
    (lambda: presets.fedavg(local_lr=math.nan), "lr=nan"),
    (lambda: presets.fedavg(server_lr=0), "lr=0"),
    (lambda: presets.fedavg(participation=1.2), "participation=1.2"),
    (lambda: presets.fedavg(batch_size=0), "batch_size=0"),
    (lambda: presets.fedavg(steps=2, epochs=1), "steps=2, epochs=1.*one of the two"),
    (lambda: presets.fedavg(participation=0.1, sampler=hansa.sample.everyone()), "one of the two"),
    (lambda: presets.fedavg(weights="size"), "weights='size'.*Known|weights='size'"),
    (lambda: presets.fedavg(weights=[1.0, -2.0]), r"weights\[1\]=-2.0"),
    (lambda: presets.fedavg(local_momentum=1.0), "momentum=1.0.*0 <= momentum < 1"),
    (lambda: presets.fedavg(weight_decay=-1.0), "weight_decay=-1.0"),
    (lambda: presets.fedavg(max_grad_norm=0.0), "max_grad_norm=0.0"),
    (lambda: presets.fedavg(local_lrr=0.1), "local_lrr=0.1.*Did you mean local_lr"),
    (lambda: presets.fedadam(b1=1.0), r"adam\(b1=1.0\).*0 <= b1 < 1"),
    (lambda: presets.fedadam(b2=1), r"adam\(b2=1\)"),
    (lambda: presets.fedadam(eps=-1e-3), "eps=-0.001"),
    (lambda: presets.fedams(eps_inside=True), "eps_inside=True.*no such argument"),
    (lambda: presets.fedadam(betas=(0.9, 0.99)), "betas=.*no such argument"),
    (lambda: presets.fedavgm(momentum=1.0), "beta=1.0"),
    (lambda: presets.fedprox(mu=-0.1), "mu=-0.1"),
    (lambda: presets.feddyn(alpha=0), "alpha=0"),
    (lambda: presets.feddyn(server_lr=0.5), "server_lr=0.5"),
    (lambda: presets.feddyn(weights="samples"), "weights='samples'.*equal weights"),
    (lambda: presets.scaffold(weights="clusters"), r"participation_scale\(weights='clusters'\)"),
    (lambda: presets.scaffold().with_local(optimizer=hansa.server.adam()), r"scaffold\(optimizer=adam.*plain"),
    (lambda: presets.scaffold(local_momentum=0.9), "local_momentum=0.9"),
    (lambda: presets.fedmgda(epsilon=1.5), "epsilon=1.5"),
    (lambda: presets.fedmgda(weights="samples"), "FedMGDA. computes the weights itself"),
    (lambda: presets.get("fedadan"), "unknown preset 'fedadan'. Did you mean fedadam"),
    (lambda: presets.get("qwertz"), "Known: afga, ca2fl, cafga"),
    (lambda: Algorithm(channels={}), "lack 'model'"),
    (lambda: Algorithm(channels={"model": Channel(), "moddel": Channel()}), "nothing reports on channel 'moddel'"),
    (lambda: presets.fedavg().with_local(solver=hansa.local.scaffold()), "reports on channel 'control'"),
    (lambda: presets.fedavg().on("modle", uplink=None), "no channel 'modle'. Did you mean model"),
    (lambda: server.chain(), "at least one transform"),
    (lambda: aggregate.trimmed_mean(0.5), "trim=0.5"),
    (lambda: aggregate.krum(byzantine=-1), "byzantine=-1"),
    (lambda: aggregate.clipped(mean(), norm=0), "norm=0"),
    (lambda: hansa.Key(-1), "seed=-1"),
    (lambda: hansa.Key(0).child(1.5), "part=1.5"),
)


test_wrong_runs_are_refused = refused(
    ({"algorithm": presets.fedavg(sampler=hansa.sample.uniform(count=9))}, "count=9.*<= 4"),
    ({"algorithm": presets.fedavg(sampler=hansa.sample.replay([[7]]))}, "client 7"),
    ({"algorithm": presets.fedavg(weights=[1.0, 2.0])}, "2 weights for 4 clients"),
    ({"algorithm": "fedavg"}, "algorithm='fedavg'.*hansa.presets"),
    ({"rounds": 0}, "rounds=0"),
    ({"rounds": 2.5}, "rounds=2.5"),
    ({"seed": -3}, "seed=-3"),
    ({"dtype": torch.float16}, "dtype=torch.float16"),
    ({"workers": 0}, "workers=0"),
    ({"quorum": 0}, "quorum=0"),
    ({"callbacks": len}, "callbacks=<built-in function len>.: expected a list of functions"),
    ({"callbacks": [lambda run: None]}, r"callbacks=<lambda>.: expected a function of .run, record.: too many"),
    ({"measures": [3]}, r"measures=3.: expected a function of .probe.: not a function"),
    ({"faults": 3}, "faults=3.: expected a plan of faults"),
    ({"algorithm": presets.fedavg().on("model", aggregate=krum(byzantine=3))}, "needs at least 6 updates.*has 4"),
    by=lambda words: hansa.run(**{"algorithm": presets.fedavg(steps=1), "task": lab(), "rounds": 1, **words}),
)


test_wrong_tasks_are_refused = refused(
    (lambda: hansa.training.quadratic([], []), "0 matrices"),
    (lambda: hansa.training.quadratic(torch.ones(2, 3, 2), torch.ones(3, 3)), "2 matrices A and 3 vectors b"),
    (lambda: hansa.training.quadratic(torch.ones(2, 3, 2), torch.ones(2, 4)), r"\(4,\): expected \(3,\)"),
    (lambda: hansa.training.quadratic([torch.ones(3, 2), torch.ones(3, 1)], torch.ones(2, 3)), r"A\[1\] has shape"),
    (lambda: hansa.training.quadratic(torch.full((1, 1, 1), math.nan), torch.ones(1, 1)), "client 0 has a NaN"),
    (lambda: hansa.training.quadratic(torch.ones(1, 2, 3), torch.ones(1, 2), x0=torch.ones(2)), r"expected \(3,\)"),
    (lambda: hansa.training.function(lambda i, x: x.sum(), clients=0, x0=torch.ones(2)), "clients=0"),
    (lambda: hansa.training.function(lambda i, x: x.sum(), clients=1, x0=torch.ones(2, 2)), "1-D float vector"),
    (lambda: hansa.Task("cnn_29k", cross_entropy, pairs()), "model='cnn_29k'.: expected a function that returns"),
    (lambda: hansa.Task(nn.Linear, cross_entropy, pairs()), "missing a required argument: 'in_features'"),
    (lambda: hansa.Task(Turned, cross_entropy, pairs()), r"complex64: only real .*view_as_real"),
    (lambda: hansa.Task(Affine, cross_entropy, pairs(), metric=nn.Linear), "expected an .* a function of .outputs"),
    (lambda: hansa.Task(Affine, cross_entropy, pairs(), metrics=[cross_entropy]), "expected metrics by name"),
    (lambda: hansa.Task(Affine, cross_entropy, pairs(), metric=lambda output: 1.0), "function of .outputs, targets."),
    (lambda: hansa.Task(Affine, cross_entropy, pairs(), augment=lambda batch: batch), "function of .batch, generator."),
    (lambda: hansa.Task(Affine, cross_entropy, DataLoader([])), "Task.data=DataLoader.: expected federated"),
)


def test_the_trajectory_is_there_only_when_kept():
    run = hansa.run(presets.fedavg(steps=1), lab(), rounds=1)
    with pytest.raises(HansaError, match="keep_params=True"):
        _ = run.trajectory
    with pytest.raises(HansaError, match="not a module"):
        _ = run.model


def test_a_client_whose_loss_becomes_nan_is_left_out_and_the_run_says_so(caplog):
    def loss(client, x):
        return (x - 1).square().sum() * (math.nan if client == 1 else 1.0)

    task = hansa.training.function(loss, clients=3, x0=torch.zeros(2, dtype=torch.float64))
    healthy = hansa.training.function(
        lambda i, x: (x - 1).square().sum(), clients=3, x0=torch.zeros(2, dtype=torch.float64)
    )
    with caplog.at_level(logging.WARNING, logger="hansa"):
        run = hansa.run(presets.fedavg(steps=2), task, rounds=3)
    without = hansa.run(presets.fedavg(steps=2, sampler=hansa.sample.replay([[0, 2]])), healthy, rounds=3)
    assert torch.equal(run.params, without.params)
    assert [record["lost"] for record in run.history] == [1, 1, 1]
    assert run.history[0]["reasons"] == {"non-finite": 1}
    assert run.history[0]["clients"] == [0, 2]
    assert "3 client updates were left out of 3 rounds (non-finite 3); the last: client 1 in round 3" in caplog.text
