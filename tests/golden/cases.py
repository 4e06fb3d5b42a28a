"""The golden cases: short runs that between them use every preset and every kind of component.

Only public names are used. Arguments that several cases share are constants, so that a renamed argument is one edit.
A case's name is its key in golden.json and must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import hansa
from golden import problems
from hansa import aggregate, compress, gossip, local, presets, sample, server

ROUNDS = 4
STEPS: dict[str, Any] = {"local_lr": 0.1, "steps": 4, "batch_size": 6}
SOME: dict[str, Any] = {**STEPS, "participation": 0.4}
UNEVEN = [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12, 13]]
SERVED: dict[str, Any] = {**STEPS, "clusters": UNEVEN, "reporters": 2, "server_lr": 0.05, "eps": 1e-2}
IDLE: dict[str, Any] = {**SERVED, "clusters": 1, "reporters": 1, "steps": 6}
"""One cluster of 14 of which one client steps at a time: idle clients have no rows of their own."""

ACTIVE = [[[0, 1, 5, 6, 9], [2, 7, 8, 13], [4, 9], [0, 3, 5, 11]]]
"""Who steps when, for activity that is replayed."""

DESCENT: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.05, "max_grad_norm": 0.7}
"""Options of the local phase, as `LocalPhase` names them."""

PRESET: dict[str, dict[str, Any]] = {
    "ha_fed": {"clusters": 3, "reporters": 2},
    "cafga": {"clusters": 3, "reporters": 1},
    "afga": {"participation": 0.2},
    "dsgd": {},
    "choco_sgd": {},
    "gossip_pga": {"period": 3},
    "dadam": {"local_lr": 0.01},
    "d_amsgrad": {"local_lr": 0.01},
    **{
        name: {"participation": 0.4, "server_lr": 0.1}
        for name in ("fedadagrad", "fedadam", "fedyogi", "fedamsgrad", "fadas")
    },
    **{name: {"participation": 0.4, "server_lr": 1.0} for name in ("fedams", "fedcams", "fedmgda", "fedbuff", "ca2fl")},
}
"""What a preset needs in a small setting, with the rates that were defaults when the results were recorded; the others
take 0.4 of the clients a round."""

CATALOGUE = (
    "fedavg", "fedavgm", "fedprox", "scaffold", "fednova", "feddyn", "fedmgda", "fedadagrad", "fedadam", "fedyogi",
    "fedamsgrad", "fedams", "fedcams", "fedaware", "fedaware_yogi", "fedasync", "fedbuff", "fadas", "ca2fl", "ha_fed",
    "afga", "cafga", "dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad",
)  # fmt: skip
SERVERLESS = ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")


@dataclass(frozen=True)
class Case:
    """A run: a method, a task by its name in `problems.TASKS`, and options of `hansa.run`.

    ``own``: the models of all clients count too. ``stop``: the run is kept in a folder, stopped after so many rounds
    and resumed. ``options`` may be a function of the task. ``rows``: the clients' rows are kept in a folder.
    """

    method: Callable[[], Any]
    task: str
    rounds: int = ROUNDS
    options: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict)
    own: bool = False
    stop: int | None = None
    rows: bool = False


def preset(name: str, **arguments: Any) -> Any:
    """A preset in its small setting."""
    return getattr(presets, name)(**{**STEPS, **PRESET.get(name, {"participation": 0.4}), **arguments})


CASES: dict[str, Case] = {}


def add(name: str, method: Callable[[], Any], *tasks: str, **facts: Any) -> None:
    """A case for each of the tasks, one of a native and one of an eager model where none is named."""
    for task in tasks or ("mlp", "norm"):
        key = f"{name} / {task}"
        assert key not in CASES, key
        CASES[key] = Case(method, task, **facts)


def every_preset() -> None:
    for name in CATALOGUE:
        add(name, partial(preset, name), own=name in SERVERLESS)
    for name in ("fedavg", "scaffold", "fedcams", "fedaware", "ha_fed", "cafga", "dsgd", "choco_sgd"):
        add(name, partial(preset, name), "cnn", "cnn, eager", own=name in SERVERLESS)


def local_options() -> None:
    add("momentum", lambda: preset("fedavg", local_momentum=0.8))
    add("weight decay", lambda: preset("fedavg", weight_decay=0.05))
    add("clip", lambda: preset("fedavg").with_local(max_grad_norm=DESCENT["max_grad_norm"]))
    add("momentum, decay, clip", lambda: preset("fedavg").with_local(**DESCENT), "mlp", "cnn", "norm")
    add("prox, momentum, decay, clip", lambda: preset("fedprox", mu=0.3).with_local(**DESCENT))
    add("nova with momentum", lambda: preset("fednova", local_momentum=0.8, weights="samples"))
    add("dyn with decay", lambda: preset("feddyn", weight_decay=0.05))
    add("all samples a step", lambda: preset("fedavg", batch_size=None))
    add("one pass", lambda: presets.fedavg(local_lr=0.1, epochs=1, batch_size=6, participation=0.4))
    for name, work in {
        "steps by client": lambda: [1 + i % 5 for i in range(len(problems.SIZES))],
        "random steps": lambda: local.random_steps(1, 5),
        "drawn work": lambda: local.drawn(epochs=local.one_of([1, 2]), batch=local.between(3, 8)),
        "hybrid work": lambda: local.hybrid_plus(epochs=(1, 3), min_batch=3),
        "deadline": lambda: local.deadline(2.0, speed=local.lognormal(3.0), jitter=0.2),
    }.items():
        add(name, lambda work=work: preset("fednova", steps=work(), weights="samples"))
    for name, rate in {
        "cosine": lambda: local.cosine(0.1, rounds=5),
        "step decay": lambda: local.step_decay(0.1, every=2, factor=0.5),
        "warm-up": lambda: local.warmup(0.1, rounds=3),
        "inverse square root": lambda: local.inverse_sqrt(0.1),
        "piecewise": lambda: local.piecewise((0.1, 0.03, 0.2)),
    }.items():
        add(f"rate: {name}", lambda rate=rate: preset("fedavgm", local_lr=rate(), server_lr=rate()), "mlp")


def solvers_and_optimizers() -> None:
    few = {"local_lr": 0.02}
    add("sam", lambda: preset("fedavg").with_local(solver=local.sam(0.1)))
    add("sam, momentum", lambda: preset("fedavg").with_local(solver=local.sam(0.1), **DESCENT))
    add("local adam", lambda: preset("fedavg", **few).with_local(optimizer=local_adam()))
    add(
        "local adam, kept, decoupled decay",
        lambda: preset("fedavg", **few, weight_decay=0.1).with_local(
            optimizer=local_adam(), optimizer_state="kept", decoupled_weight_decay=True
        ),
    )
    add("local momentum, kept", lambda: preset("fedavg").with_local(momentum=0.8, optimizer_state="kept"))
    add("local adam, first moment received", received_moment)
    add("local yogi in gossip", lambda: preset("ha_fed", **few).with_local(optimizer=server.yogi()))
    add("private head", lambda: preset("fedavg").with_local(private_blocks=local.blocks("head.*")), own=True)
    add(
        "private batch norm",
        lambda: preset("fedadam").with_local(private_blocks=local.blocks("bn.*")),
        "batch",
        own=True,
    )
    add("frozen layer", lambda: preset("fedavg").with_local(frozen_blocks=local.blocks("first.*")))
    add(
        "private head, frozen layer, momentum",
        lambda: preset("fedavg").with_local(
            private_blocks=local.blocks("head.*"), frozen_blocks=local.blocks("first.bias"), **DESCENT
        ),
        own=True,
    )


def local_adam() -> Any:
    """Any server transform is a local optimizer."""
    return server.adam(0.9, 0.99, 1e-4)


def received_moment() -> Any:
    """Clients start Adam's first moment from a channel that follows the model's aggregate."""
    plain = presets.fedavg(**{**SOME, "local_lr": 0.02})
    phase = replace(plain.local, optimizer=local_adam(), optimizer_state={"m": "momentum"})
    momentum = hansa.Channel(follows="model", server=server.scale(0.5))
    return hansa.Algorithm("received", plain.sampler, phase, {**plain.channels, "momentum": momentum})


def servers_and_aggregators() -> None:
    for name, made in {
        "adam, corrected": lambda: server.adam(0.9, 0.99, 1e-3, bias_correction=True),
        "adam, eps inside, v0": lambda: server.adam(0.9, 0.99, 1e-3, v0=1e-4, eps_inside=True),
        "amsgrad, corrected": lambda: server.amsgrad(0.9, 0.99, 1e-3, bias_correction=True),
        "ams, v0": lambda: server.ams(0.9, 0.99, 1e-3, v0=1e-4),
        "adagrad with momentum": lambda: server.adagrad(0.5, 0.99, 1e-3),
        "momentum, then sgd": lambda: server.momentum(0.8),
    }.items():
        add(
            f"server: {name}",
            lambda made=made: preset("fedavg").with_server(server.chain(made(), server.scale(0.05))),
            "mlp",
            "long",
        )
    for name, rule in {
        "mean by samples": lambda: aggregate.mean("samples"),
        "mean by given weights": lambda: aggregate.mean([1.0 + i % 3 for i in range(14)]),
        "median": lambda: aggregate.median(),
        "trimmed mean": lambda: aggregate.trimmed_mean(0.2),
        "krum": lambda: aggregate.krum(byzantine=1, keep=2),
        "clipped mean": lambda: aggregate.clipped(aggregate.mean("samples"), 0.3),
        "mgda near uniform": lambda: aggregate.mgda(0.1),
        "aware, half precision rows": lambda: aggregate.aware(0.4, momentum_dtype="bfloat16"),
    }.items():
        add(f"aggregate: {name}", lambda rule=rule: preset("fedavg").on("model", aggregate=rule()))
    add("aware on disk", lambda: preset("fedaware", momentum_storage="disk"), "mlp", "norm", "digits", "long")
    add("aware, explore, normalize", lambda: preset("fedaware", explore=True, normalize=True), rounds=5)
    add("aware, startup, by samples", lambda: preset("fedaware", startup=True, weights="samples"))
    add(
        "aware as its authors",
        lambda: preset("fedaware", explore=True, normalize=True, from_zero=True, min_norm="authors", weights="samples"),
        rounds=5,
    )
    add("aware yogi on disk", lambda: preset("fedaware_yogi", momentum_storage="disk", explore=True))


def samplers() -> None:
    there = tuple(tuple(range(start, 14, 2)) for start in (0, 1))
    for name, rule in {
        "count": lambda: sample.uniform(count=3),
        "everyone": lambda: sample.everyone(),
        "by samples": lambda: sample.weighted("samples", count=4),
        "by weights": lambda: sample.weighted(tuple(1.0 + i for i in range(14)), participation=0.3),
        "explore": lambda: sample.explore(0.3),
        "startup": lambda: sample.startup(sample.uniform(0.2)),
        "availability": lambda: sample.availability(there, count=3),
        "replay": lambda: sample.replay([[0, 2, 5], [1, 13], [7]]),
    }.items():
        add(f"sample: {name}", lambda rule=rule: presets.fedavg(**STEPS, sampler=rule(), weights="samples"), "mlp")


COMPRESSORS: dict[str, Callable[[], Any]] = {
    "sign": lambda: compress.sign(),
    "top_k": lambda: compress.top_k(0.1),
    "top_k, half precision": lambda: compress.top_k(0.05, values="float16"),
    "top_k, quantized": lambda: compress.top_k(0.1, values=compress.quantize(8, 64)),
    "random_k": lambda: compress.random_k(0.2),
    "quantize": lambda: compress.quantize(16, 128),
    "quantize, nearest": lambda: compress.quantize(4, 64, rounding="nearest"),
    "grid": lambda: compress.grid(),
    "fine grid": lambda: compress.grid(0.5),
    "cast": lambda: compress.cast("float16"),
    "bfloat16": lambda: compress.cast("bfloat16"),
    "identity": lambda: compress.identity(),
}


def compression() -> None:
    for name, made in COMPRESSORS.items():
        add(f"uplink: {name}", lambda made=made: preset("fedavg", compressor=made()), "mlp", "norm", "long")
        add(f"both ways: {name}", lambda made=made: preset("fedams", compressor=made(), two_way=True), "mlp", "digits")
    for name, made in {"sign": COMPRESSORS["sign"], "grid": COMPRESSORS["grid"]}.items():
        add(f"fedcams both ways: {name}", lambda made=made: preset("fedcams", compressor=made(), two_way=True), "norm")
        add(f"scaffold compressed: {name}", lambda made=made: preset("scaffold", compressor=made()))
    add("fedcams, grid down", lambda: preset("fedcams", two_way=compress.grid()))
    add(
        "fedcams, a rare private replica",
        lambda: preset("fedcams", two_way=compress.replica(compress.sign(), public_start=False, every=2)),
        rounds=5,
    )
    add(
        "uplink without memory",
        lambda: preset("fedavg").on("model", uplink=compress.memoryless(compress.quantize(16, 128))),
    )
    add("compressed buffers and model", compressed_buffers, "batch")


def compressed_buffers() -> Any:
    """Buffers on a channel that is given, with links of its own."""
    plain = presets.fedavg(**SOME, compressor=compress.sign())
    buffers = hansa.Channel(uplink=compress.error_feedback(compress.quantize(16, 8)), aggregate=aggregate.mean())
    return hansa.Algorithm("buffers", plain.sampler, plain.local, {**plain.channels, "buffers": buffers})


def gossiping() -> None:
    turns = {
        "momentum, decay, clip": lambda: presets.ha_fed(**SERVED).with_local(**DESCENT),
        "prox": lambda: presets.ha_fed(**SERVED).with_local(solver=local.prox(0.5)),
        "sam": lambda: presets.ha_fed(**SERVED).with_local(solver=local.sam(0.1)),
        "every second step": lambda: presets.ha_fed(**SERVED, gossip_every=2),
        "bernoulli": lambda: presets.ha_fed(**SERVED, active=gossip.bernoulli(0.5)),
        "two of each cluster": lambda: presets.cafga(**SERVED, active=gossip.resample(2)),
        "a share active": lambda: presets.ha_fed(**SERVED, active=0.5),
        "replayed activity": lambda: presets.ha_fed(**SERVED, active=gossip.replay(ACTIVE)),
        "reporters only": lambda: presets.cafga(**{**SERVED, "reporters": 3}, reporters_only=True),
        "uniform weights": lambda: presets.ha_fed(**SERVED, weights="uniform"),
    }
    for name, method in turns.items():
        add(f"gossip: {name}", method)
    for name, topology in {
        "complete": lambda: gossip.complete(),
        "unbalanced": lambda: gossip.unbalanced_complete(seed=1, spread=0.5),
        "random graph": lambda: gossip.erdos_renyi(0.5, seed=1),
        "star": lambda: gossip.star(),
        "exponential": lambda: gossip.exponential(),
        "isolated": lambda: gossip.isolated(),
    }.items():
        add(f"graph: {name}", lambda topology=topology: presets.ha_fed(**SERVED, topology=topology()))
    one = {**SERVED, "clusters": [list(range(8)), list(range(8, 14))], "reporters": 2}
    add("graph: torus", lambda: presets.ha_fed(**{**SERVED, "clusters": 1}, topology=gossip.torus(rows=2)), "mlp")
    hypercube = {**SERVED, "clusters": [list(range(8)), [8, 9, 10, 11], [12, 13]], "reporters": 1}
    add("graph: hypercube", lambda: presets.ha_fed(**hypercube, topology=gossip.hypercube()), "mlp")
    add("graph: matrix", lambda: presets.dsgd(**STEPS, topology=matrix()), "mlp", own=True)
    add("graph: edges", lambda: presets.dsgd(**STEPS, topology=edges()), own=True)
    add("graph: two rings", lambda: presets.ha_fed(**one), "mlp", "cnn")
    for name, clusters in {
        "equal": lambda: gossip.equal(3),
        "random": lambda: gossip.random(3),
        "alike": lambda: gossip.by_labels(3),
        "diverse": lambda: gossip.by_labels(3, diverse=True),
    }.items():
        add(f"clusters: {name}", lambda clusters=clusters: presets.ha_fed(**{**SERVED, "clusters": clusters()}), "mlp")
    for name, (made, rate) in {
        "sign": (COMPRESSORS["sign"], 0.3),
        "top_k": (COMPRESSORS["top_k"], 0.2),
        "random_k": (COMPRESSORS["random_k"], 0.2),
        "quantize": (COMPRESSORS["quantize"], 0.4),
    }.items():
        heard = partial(compressed_gossip, made, rate)
        add(f"compressed gossip: {name}", lambda heard=heard: presets.ha_fed(**SERVED, **heard()))
        add(f"choco: {name}", lambda heard=heard: presets.choco_sgd(**STEPS, **heard()), own=True)
    signs = partial(compressed_gossip, COMPRESSORS["sign"], 0.3)
    add(
        "compressed gossip: all hear all",
        lambda: presets.ha_fed(**SERVED, **signs(), topology=gossip.complete()),
        "mlp",
    )
    add("compressed gossip: momentum", lambda: presets.ha_fed(**SERVED, **signs()).with_local(**DESCENT))
    lazy = {
        "one of all": lambda: presets.cafga(**IDLE),
        "momentum, decay, clip": lambda: presets.cafga(**IDLE).with_local(**DESCENT),
        "prox, every second step": lambda: presets.cafga(**IDLE, gossip_every=2).with_local(solver=local.prox(0.5)),
        "complete": lambda: presets.cafga(**IDLE, topology=gossip.complete()),
        "bernoulli": lambda: presets.ha_fed(**IDLE, active=gossip.bernoulli(0.1)),
        "combine first": lambda: presets.cafga(**IDLE).with_local(
            mixing=hansa.Mixing(gossip.ring(), 1, gossip.resample(1), order="combine-then-adapt")
        ),
        "exact averages": lambda: presets.cafga(**IDLE).with_local(
            mixing=hansa.Mixing(gossip.ring(), 1, gossip.resample(1), average_every=3)
        ),
    }
    for name, method in lazy.items():
        add(f"idle: {name}", method)
    add("idle: one of all", lazy["one of all"], "cnn", "batch", "dropping", "long")
    alone = {
        "adapt first": lambda: presets.dsgd(**STEPS, order="adapt-then-combine"),
        "momentum": lambda: presets.dsgd(**STEPS).with_local(momentum=0.8),
        "every third step": lambda: presets.dsgd(**STEPS).with_local(
            mixing=hansa.Mixing(
                gossip.ring(), UNEVEN, keep_local_models=True, gossip_every=3, order="combine-then-adapt"
            )
        ),
        "clusters": lambda: presets.dsgd(**STEPS, clusters=UNEVEN),
        "exact averages, combine first": lambda: presets.gossip_pga(**STEPS, period=3, order="combine-then-adapt"),
        "adam, adapt first": lambda: presets.dadam(**{**STEPS, "local_lr": 0.01}, order="adapt-then-combine"),
        "own amsgrad": lambda: presets.d_amsgrad(**{**STEPS, "local_lr": 0.01}, second_moment="local"),
    }
    for name, method in alone.items():
        add(f"serverless: {name}", method, own=True)
    plain = partial(preset, "fedavg")
    add("fedavg in gossip", lambda: plain().with_local(mixing=hansa.Mixing(gossip.ring(), UNEVEN)))
    add("adam server in gossip, two-way sign", two_way_gossip)


def compressed_gossip(made: Callable[[], Any], rate: float) -> dict[str, Any]:
    """The arguments of presets in which neighbours hear compressed differences."""
    return {"gossip_compressor": made(), "consensus_rate": rate}


def two_way_gossip() -> Any:
    """Clusters that gossip, with compressed links to the server in both directions."""
    return presets.ha_fed(**SERVED, compressor=compress.sign(), two_way=True).with_server(server.adam())


def edges() -> Any:
    """A ring with three chords."""
    return gossip.edges([(i, (i + 1) % 14) for i in range(14)] + [(0, 7), (3, 10), (5, 12)])


def matrix() -> Any:
    """A ring whose members listen to one side more than to the other."""
    rows = [[0.0] * 14 for _ in range(14)]
    for i, row in enumerate(rows):
        row[i], row[(i + 1) % 14], row[(i - 1) % 14] = 0.5, 0.3, 0.2
    return gossip.matrix(rows)


def models_and_tasks() -> None:
    add("fedavg", partial(preset, "fedavg"), "colour", "strided", "digits", "long", "dropping", "noisy", "groups")
    add("fedavg", partial(preset, "fedavg"), "words", "regression", "quadratic", "double", "mlp, eager")
    add("fedavg", partial(preset, "fedavg"), "norm, own loss", "norm, weighted rows", "mlp, by function")
    add("fedavg", partial(preset, "fedavg"), "colour, augmented", "colour, own augmentation")
    add("fedavg", partial(preset, "fedavg"), "colour, eager, augmented", "batch", "batch, images")
    add("fedadam", partial(preset, "fedadam"), "batch", "colour, augmented", "dropping", "words", "regression")
    add("fedcams", partial(preset, "fedcams"), "batch", "digits", "double", "quadratic", "dropping", "noisy")
    add("scaffold", partial(preset, "scaffold"), "digits", "double", "quadratic", "batch")
    add("ha_fed", partial(preset, "ha_fed"), "batch", "dropping", "noisy", "double", "quadratic", "colour, augmented")
    add("cafga", partial(preset, "cafga"), "batch", "dropping", "noisy", "double", "quadratic", "colour")
    add("dsgd", partial(preset, "dsgd"), "batch", "dropping", "noisy", "double", own=True)
    add("dsgd", partial(preset, "dsgd"), "quadratic")
    add("choco_sgd", partial(preset, "choco_sgd"), "batch", "double", "dropping", own=True)
    add("fedaware", partial(preset, "fedaware"), "digits", "double", "batch", "quadratic")
    add("fedmgda", partial(preset, "fedmgda"), "digits", "double")
    add(
        "fedavg", partial(preset, "fedavg"), "hidden layers", "convmixer", "convmixer, groups", "function", "normalized"
    )
    add("fedavg", partial(preset, "fedavg"), "pair", "remembering", "binary", "bytes, on disk", "collated")
    add("fedavg", partial(preset, "fedavg"), "huber", "weighted classes", "torch weights", "sum")
    add("fedprox", partial(preset, "fedprox"), "dirichlet", "shards", "quantity skew", "iid", "synthetic")
    add("fedams", partial(preset, "fedams"), "fashion", "remembering", rounds=2, options={"evaluate_every": 0})
    add("ha_fed", partial(preset, "ha_fed"), "fashion", "remembering", "pair", "dirichlet", "bytes, on disk", rounds=2)
    add("fedcams", one_large_step, "resnet18", rounds=1, options={"evaluate_every": 0})
    for name in ("fedavg", "fedcams", "scaffold", "cafga", "fedaware", "fedyogi", "dadam"):
        wide = {"options": {"dtype": torch.float64}, "own": name in SERVERLESS}
        add(f"{name} in float64", partial(preset, name), **wide)


def one_large_step() -> Any:
    """A step of two clients, for a model of eleven million parameters."""
    return preset("fedcams", steps=1, batch_size=2, participation=0.15, two_way=True)


def overflowing() -> None:
    """Clients whose parameters become non-finite in a round, and those that go on without them."""
    spoilt = ("spoilt", "spoilt late", "spoilt, eager")
    few = {**SERVED, "batch_size": 4}
    idle = {**IDLE, "batch_size": 4, "reporters": 2}
    add("overflow: fedavg", lambda: presets.fedavg(**SOME), *spoilt)
    add("overflow: ha_fed", lambda: presets.ha_fed(**few), *spoilt)
    add("overflow: bernoulli", lambda: presets.ha_fed(**few, active=gossip.bernoulli(0.6)), *spoilt)
    signs = partial(compressed_gossip, COMPRESSORS["sign"], 0.3)
    add("overflow: sign", lambda: presets.ha_fed(**few, **signs()), *spoilt)
    add("overflow: top_k", lambda: presets.ha_fed(**few, **compressed_gossip(COMPRESSORS["top_k"], 0.2)), *spoilt)
    add("overflow: dsgd", lambda: presets.dsgd(**{**STEPS, "batch_size": 4}), *spoilt)
    add("overflow: gossip_pga", lambda: presets.gossip_pga(**{**STEPS, "batch_size": 4}, period=3), *spoilt)
    add("overflow: idle", lambda: presets.cafga(**idle), *spoilt, rounds=8)
    add("overflow: idle, momentum", lambda: presets.cafga(**idle).with_local(**DESCENT), *spoilt, rounds=8)


def many_clients() -> None:
    """Three hundred clients: sparse coefficients, min-norm among few rows first, means of many updates."""
    few = {**STEPS, "steps": 2}
    add("many: fedavg", lambda: presets.fedavg(**few, participation=0.5), "many", rounds=2)
    add("many: aware", lambda: presets.fedaware(**few, participation=1.0), "many", rounds=2)
    add("many: afga", lambda: presets.afga(**{**few, "steps": 5}, participation=0.02), "many", rounds=2)
    add("many: afga on a random graph", partial(random_graph, few), "many", rounds=2)
    add(
        "many: fedcams",
        lambda: presets.fedcams(**few, participation=0.3, two_way=True, server_lr=1.0),
        "many",
        rounds=2,
    )


def random_graph(few: dict[str, Any]) -> Any:
    return presets.afga(**{**few, "steps": 5}, participation=0.02, topology=gossip.erdos_renyi(0.05, seed=2))


def options_of_runs() -> None:
    lost = {"options": lambda task: {"faults": hansa.faults(before=0.1, after=0.1, upload=0.1, nan=0.1, stale=0.1)}}
    bad = {"options": lambda task: {"faults": hansa.faults(scaled=0.2, flipped=0.1), "max_norm": 50.0, "quorum": 3}}
    for name in ("fedavg", "fedcams", "scaffold", "ha_fed", "cafga", "fedaware"):
        add(f"{name}, clients lost", partial(preset, name), **lost)
    for name in ("fedavg", "fedadam", "cafga"):
        add(f"{name}, bad updates", partial(preset, name), "mlp", **bad)
    add("median, bad updates", lambda: preset("fedavg").on("model", aggregate=aggregate.median()), "mlp", **bad)
    add("fedavg, rare evaluation", partial(preset, "fedavg"), "mlp", options={"evaluate_every": 3})
    add("fedavg, another seed", partial(preset, "fedavg"), options={"seed": 7})
    add("fedcams, measured", lambda: preset("fedcams", two_way=True), options=measured)
    add("ha_fed, measured", partial(preset, "ha_fed"), options=measured)
    tuned = {"options": {"per_client": 2, "personalise": {"steps": 3, "lr": 0.05}}}
    tested = ("mlp, tested by client", "norm, tested by client")
    add("fedavg, personalised", partial(preset, "fedavg"), *tested, **tuned)
    add("dsgd", partial(preset, "dsgd"), *tested)
    add("private head", lambda: preset("fedavg").with_local(private_blocks=local.blocks("head.*")), *tested)
    kept = ("fedcams", "scaffold", "fedaware", "dsgd")
    for name in kept:
        add(f"{name}, rows in a folder", partial(preset, name), "mlp", rows=True, own=name in SERVERLESS)
    for name in (*kept, "cafga"):
        add(f"{name}, stopped and resumed", partial(preset, name), stop=2, own=name in SERVERLESS)


def measured(task: Any) -> dict[str, Any]:
    """Options that add measures to every record."""
    return {
        "measures": [hansa.measures.compression, hansa.measures.local_mean_loss(task)],
        "callbacks": [hansa.measures.track_heterogeneity(2)],
    }


for part in (
    every_preset, local_options, solvers_and_optimizers, servers_and_aggregators, samplers, compression, gossiping,
    models_and_tasks, overflowing, many_clients, options_of_runs,
):  # fmt: skip
    part()
