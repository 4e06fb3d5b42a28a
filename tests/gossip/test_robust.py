"""Robust mixing: what a malicious neighbour can do, refusals, and equal bits with workers, engines and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from contracts import five
from hansa import gossip, presets
from hansa.config import build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.engine import Loopback
from hansa.gossip.robust import Attack
from mistakes import refused

N = 10
ATTACKED = hansa.faults(malicious=(1, 7), attack="noise", attack_scale=5.0)


def task(model: Any = five.Net) -> Any:
    return five.task(sizes=(3, 5, 12, 7, 4, 13, 8, 14, 9, 15), model=model)


def method(robust: Any = None, **more: Any) -> hansa.Algorithm:
    settings = {"topology": gossip.complete(), "local_lr": 0.1, "steps": 3, "batch_size": 4, **more}
    return presets.ha_fed(clusters=2, reporters=2, robust=robust, **settings)


RULES = {"none": None, "clipped": gossip.clipped(0.1), "trimmed": gossip.trimmed(1)}


def test_one_neighbour_moves_a_client_by_at_most_its_weight_times_the_radius() -> None:
    own = torch.zeros(4)
    for size in (1e-3, 1.0, 1e30, float("inf"), float("nan")):
        moved = gossip.clipped(0.5).combine(own, [torch.full((4,), size)], [0.3])
        assert float(moved.norm()) <= 0.15 + 1e-6
    near = torch.tensor([0.1, 0.0, 0.0, 0.0])
    assert torch.equal(gossip.clipped(0.5).combine(own, [near], [0.3]), 0.3 * near)


def test_trimmed_values_stay_between_those_of_honest_neighbours() -> None:
    honest = [torch.tensor([1.0, -1.0]), torch.tensor([2.0, -2.0]), torch.tensor([3.0, 0.0])]
    for bad in (1e30, -1e30, float("nan"), float("inf")):
        mixed = gossip.trimmed(1).combine(torch.tensor([2.0, -1.0]), [*honest, torch.full((2,), bad)], [0.2] * 4)
        assert 1.0 <= float(mixed[0]) <= 3.0
        assert -2.0 <= float(mixed[1]) <= 0.0


def test_trimming_less_where_dropouts_leave_too_few_neighbours() -> None:
    pair = [torch.tensor([1.0]), torch.tensor([4.0])]
    assert float(gossip.trimmed(2).combine(torch.tensor([1.0]), pair, [0.3, 0.3])) == 2.0


def test_noise_has_the_size_of_the_change_and_is_one_message_to_all() -> None:
    attack, start = Attack((0,), "noise", 3.0), torch.zeros(1000, dtype=torch.float64)
    row = torch.randn(1000, dtype=torch.float64)
    sent = attack.message(row, start, Key(1).child("attack", 1, 0))
    assert float((sent - row).norm()) == pytest.approx(3 * float(row.norm()))
    assert torch.equal(sent, attack.message(row, start, Key(1).child("attack", 1, 0)))
    assert not torch.equal(sent, attack.message(row, start, Key(1).child("attack", 2, 0)))


@pytest.mark.parametrize("rule", [*RULES, "dsgd", "cafga"])
def test_the_same_bits_with_workers_over_the_wire_and_after_resuming(rule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"topology": gossip.complete(), "local_lr": 0.1, "steps": 2, "batch_size": 4}
    if rule in RULES:
        algorithm = method(RULES[rule])
    elif rule == "dsgd":
        algorithm = presets.dsgd(robust=gossip.clipped(0.1), **settings)
    else:
        algorithm = presets.cafga(robust=gossip.clipped(0.1), clusters=2, reporters=2, **settings)
    options: dict[str, Any] = {"faults": ATTACKED}
    once = hansa.run(algorithm, task(), rounds=4, workers=1, **options)
    wired = hansa.Run(algorithm, task(), engine=Loopback, **options).advance(4)
    hansa.run(algorithm, task(), rounds=2, out=tmp_path / "run", workers=1, **options)
    resumed = hansa.run(algorithm, task(), rounds=4, out=tmp_path / "run", workers=1, **options)
    others = [wired, resumed]
    if rule == "trimmed":  # processes are slow to start
        others.append(hansa.run(algorithm, task(), rounds=4, workers=2, **options))
    for other in others:
        assert torch.equal(once.params, other.params)
    assert not torch.equal(once.params, hansa.run(algorithm, task(), rounds=4, workers=1).params)


def test_models_with_native_kernels_are_trained_eagerly_with_the_same_result() -> None:
    native = task(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    wide = hansa.run(method(gossip.clipped(1e9), topology=gossip.ring()), native, rounds=3, workers=1)
    plain = hansa.run(method(topology=gossip.ring()), native, rounds=3, workers=1)
    assert torch.allclose(wide.params, plain.params, atol=1e-5)
    assert wide.history[-1]["peer_bytes"] == plain.history[-1]["peer_bytes"]
    trimmed = hansa.run(method(gossip.trimmed(1)), native, rounds=3, workers=1, faults=ATTACKED)
    attacked = hansa.run(method(), native, rounds=3, workers=1, faults=ATTACKED)
    honest = hansa.run(method(), native, rounds=3, workers=1)
    assert (trimmed.params - honest.params).norm() < (attacked.params - honest.params).norm()


test_what_is_not_protected_or_simulated_is_refused = refused(
    (lambda: method("clipped"), "a mixing rule"),
    (lambda: method(gossip.clipped(0.1), gossip_compressor=hansa.compress.sign()), "compressed differences"),
    (lambda: presets.gossip_pga(robust=gossip.clipped(0.1)), "all enter an average"),
    (lambda: presets.d_amsgrad(robust=gossip.clipped(0.1)), "gossips without a rule"),
    (lambda: method(gossip.trimmed(1), topology=gossip.ring()).bind(N, Key(0)), "half of the 2 neighbours"),
    (lambda: gossip.clipped(0.0), "radius"),
    (lambda: gossip.trimmed(0), "count"),
    (lambda: hansa.faults(malicious=(1, 1)), "listed twice"),
    (lambda: hansa.faults(malicious=(-1,)), "malicious"),
    (lambda: hansa.faults(malicious=(1,), attack="lie"), "'flip' or 'noise'"),  # type: ignore[arg-type]
    (lambda: hansa.run(method(), task(), rounds=1, faults=hansa.faults(malicious=(10,))), "clients 0 to 9"),
    (lambda: hansa.run(presets.fedavg(), task(), rounds=1, faults=ATTACKED), "whose clients gossip"),
    (
        lambda: hansa.run(method(gossip_compressor=hansa.compress.sign()), task(), rounds=1, faults=ATTACKED),
        "without a compressor",
    ),
)


def test_files_say_rules_and_attacks() -> None:
    config = from_yaml(
        "algorithm: ha_fed\ngossip: {topology: complete, robust: {kind: clipped, radius: 0.5}}\n"
        "faults: {malicious: [1, 2], attack: noise, attack_scale: 10}"
    )
    mixing = build_algorithm(config).local.mixing
    assert mixing is not None
    assert mixing.robust == gossip.clipped(0.5)
    assert "robust=clipped(radius=0.5)" in repr(mixing)
    assert "robust" not in repr(gossip_of(presets.ha_fed()))


def gossip_of(algorithm: hansa.Algorithm) -> Any:
    return algorithm.local.mixing


def test_clusters_draw_their_own_random_graphs() -> None:
    graphs = gossip.redrawn(gossip.erdos_renyi(0.4, seed=1))
    rates = gossip.cluster_rho(graphs, [8] * 4)
    assert len(set(rates)) == 4
    assert rates[2] == gossip.rho(gossip.erdos_renyi(0.4, seed=3).sparse(8))
    config = from_yaml("algorithm: ha_fed\ngossip: {topology: {kind: redrawn, topology: {kind: erdos_renyi, p: 0.4}}}")
    assert gossip_of(build_algorithm(config)).topology == gossip.redrawn(gossip.erdos_renyi(0.4))
    with pytest.raises(HansaError, match="with a seed"):
        gossip.redrawn(gossip.ring())
