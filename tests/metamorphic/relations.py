"""The relations themselves. Each takes a method apart from its numbers: two runs that must agree because of what the
words mean, whatever the numbers are. A relation that does not hold raises AssertionError."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import hansa
from exactness.laboratory import task
from gossip.laboratory import problem, regression
from hansa import gossip, presets, sample
from hansa.algorithm import Mixing
from hansa.runs.driver import Run
from hansa.runs.store import ClientStore
from metamorphic.laboratory import (
    CLIENTS,
    DECENTRALIZED,
    GOSSIPING,
    GROUPS,
    REPORTERS,
    STEPS,
    Path,
    assert_moved,
    assert_near,
    assert_same_rows,
    bowls,
    drawing_as,
    method,
    plain_run,
)
from recorded import through_disk

ISOLATED = Mixing(gossip.isolated(), 2)


def isolated_clients_are_the_plain_loop(path: Path, name: str, variant: str, **words: Any) -> None:
    """Gossip over W = I, whoever computes: to the last bit what clients do alone."""
    alone = method(name, variant, **words)
    plain = plain_run(path, name, variant, **words)
    assert_moved(plain)
    for mixing in (ISOLATED, replace(ISOLATED, active=gossip.selected()), replace(ISOLATED, reporters_only=True)):
        assert torch.equal(path.run(alone.with_local(mixing=mixing)).trajectory, plain.trajectory)


def without_neighbours_there_is_only_the_server(path: Path, name: str) -> None:
    """HA-Fed, AFGA and CAFGA over W = I are FedAMSGrad with eps inside the root."""
    words: dict[str, Any] = {"weights": "uniform", "server_lr": 0.05, "eps": 1e-4}
    active = {} if name == "ha_fed" else {"active": gossip.selected()}
    lonely = path.run(method(name, topology=gossip.isolated(), **words, **active))
    plain = method("fedamsgrad", sampler=sample.replay(REPORTERS), eps_inside=True, **words)
    assert_moved(lonely)
    assert torch.equal(lonely.trajectory, path.run(plain).trajectory)


def without_neighbours_there_is_only_the_optimizer(path: Path, name: str) -> None:
    """A round of a decentralized method over W = I is everybody's own training, averaged where one looks at it."""
    options = {"period": 100} if name == "gossip_pga" else {"second_moment": "local"} if name == "d_amsgrad" else {}
    lonely = method(name, topology=gossip.isolated(), **options)
    alone = presets.fedavg(local_lr=0.1, steps=STEPS, batch_size=lonely.local.batch_size)
    alone = alone.with_local(optimizer=lonely.local.optimizer)
    found = path.run(lonely, rounds=1)
    assert_moved(found)
    assert torch.equal(found.trajectory, path.run(alone, rounds=1).trajectory)


def renumbering_permutes(path: Path, name: str, variant: str, **words: Any) -> None:
    """Other numbers for the same clients, who draw what they drew: the same models, and memories at the new numbers."""
    to = dict(enumerate((3, 0, 4, 1, 2)))
    back = {new: old for old, new in to.items()}
    expected = plain_run(path, name, variant, **words)
    assert_moved(expected)
    with drawing_as(back):
        renumbered = path.task(tuple(back[client] for client in range(CLIENTS)))
        found = path.run(method(name, variant, rename=to, **words), renumbered)
    assert [sorted(back[c] for c in r["clients"]) for r in found.history] == [r["clients"] for r in expected.history]
    assert [r["peer_bytes"] for r in found.history] == [r["peer_bytes"] for r in expected.history]
    assert_near(found.trajectory, expected.trajectory, path.near)
    assert_same_rows(found, expected, path.near, to)


def steps_may_be_split_over_rounds(name: str, words: dict[str, Any]) -> None:
    """Six steps in one round are three rounds of two, where all that lives on is the model and what is kept of it: the
    clients' models to the last bit, their mean to rounding."""
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        runs = [
            hansa.run(method(name, **{**words, "steps": steps}), bowls(), rounds=rounds, dtype=dtype, evaluate_every=0)
            for rounds, steps in ((1, 6), (3, 2), (6, 1))
        ]
        assert runs[0].params.abs().max() > 1e-2
        for run in runs[1:]:
            assert_near(run.params, runs[0].params, near)
            if name in DECENTRALIZED:
                assert_same_rows(run, runs[0])


def a_client_may_stand_twice_with_half_its_weight(path: Path, name: str, variant: str) -> None:
    """The last client is the third one again; both count half. Min-norm weights need not even be told."""
    given = name not in ("fedaware", "fedaware_yogi", "fedmgda")
    shares = (1.0, 3.0, 2.0, 0.5, 1.5)
    weights = {"weights": shares} if given else {}
    halves = {"weights": (1.0, 3.0, 1.0, 0.5, 1.5, 1.0)} if given else {}
    once = path.run(method(name, variant, sampler=sample.everyone(), **weights))
    assert_moved(once)
    with drawing_as({CLIENTS: 2}):
        twice = path.run(method(name, variant, sampler=sample.everyone(), **halves), path.task((*range(CLIENTS), 2)))
    assert_near(twice.trajectory, once.trajectory, path.near)
    assert_same_rows(twice, once, path.near)


def everybody_may_stand_twice(path: Path, name: str, variant: str) -> None:
    """Two of each client, in clusters of their own: nothing that the server sees changes."""
    words, again = _for_everybody(name)
    once = path.run(method(name, variant, **words))
    assert_moved(once)
    with drawing_as({client + CLIENTS: client for client in range(CLIENTS)}):
        twice = path.run(method(name, variant, **again), path.task((*range(CLIENTS), *range(CLIENTS))))
    assert_near(twice.trajectory, once.trajectory, path.near)
    assert_same_rows(twice, once, path.near, {client: client + CLIENTS for client in range(CLIENTS)})


def _for_everybody(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    doubled = [[c + shift for c in group] for shift in (0, CLIENTS) for group in GROUPS]
    if name in DECENTRALIZED:
        return {}, {"clusters": doubled}
    if name in GOSSIPING:
        both = sample.replay([[*chosen, *(c + CLIENTS for c in chosen)] for chosen in REPORTERS])
        active = {} if name == "ha_fed" else {"active": gossip.everyone()}
        return active, {"clusters": doubled, "reporters": both, **active}
    return {"sampler": sample.everyone()}, {"sampler": sample.everyone()}


def who_never_takes_part_changes_nothing(path: Path, name: str, variant: str) -> None:
    """One more client, whom nobody ever asks, in a cluster of its own: the same to the last bit."""
    expected = plain_run(path, name, variant)
    assert_moved(expected)
    more = {"clusters": [*GROUPS, (CLIENTS,)]} if name in (*GOSSIPING, *DECENTRALIZED) else {}
    found = path.run(method(name, variant, **more), path.task((*range(CLIENTS), 1)))
    if name not in DECENTRALIZED:  # there it takes part, and the mean has it
        assert torch.equal(found.trajectory, expected.trajectory)
    assert_same_rows(found, expected)


SCALE = 4.0


def fourfold(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return SCALE * cross_entropy(output, target)


def scaling_the_loss_is_scaling_the_rate(path: Path, name: str) -> None:
    """Four times the loss and a quarter of the rate, with every word that has the loss's unit scaled along."""
    same, other = _in_units(name, 1.0), _in_units(name, SCALE)
    expected = path.run(method(name, **same))
    assert_moved(expected)
    assert_near(path.run(method(name, **other), path.task(loss=fourfold)).trajectory, expected.trajectory, path.near)


def _in_units(name: str, unit: float) -> dict[str, Any]:
    words: dict[str, Any] = {"max_grad_norm": 0.5 * unit, "weight_decay": 0.02 * unit, "local_lr": 0.1 / unit}
    if name == "fedprox":
        words["mu"] = 0.5 * unit
    if name == "feddyn":
        words["alpha"] = 0.5 * unit
    if name == "dadam":
        words.update(local_lr=0.1, eps=1e-3 * unit)
    if name == "d_amsgrad":
        words.update(local_lr=0.1, eps=1e-2 * unit * unit)
    return words


def a_batch_of_everything_is_the_full_gradient(path: Path, name: str, variant: str) -> None:
    """No batch size, and one that is larger than most clients have: the same to the last bit."""
    none, all_of_it = (path.run(method(name, variant, batch_size=size), rounds=2).trajectory for size in (None, 40))
    some = plain_run(path, name, variant).trajectory[: len(none)]
    assert not torch.equal(none, some)
    assert torch.equal(none, all_of_it)


def the_full_gradient_is_the_one_on_paper(name: str) -> None:
    """A module on rows of unequal clients, and the same losses written as matrices: the same to rounding."""
    reference = problem()
    matrices = task(reference)
    words: dict[str, Any] = {"local_lr": 0.05, "steps": 2, "batch_size": None}
    if name in GOSSIPING:
        words.update({"clusters": [[0, 1, 2], [3]]} if name != "afga" else {}, reporters=1)
    elif name in DECENTRALIZED:
        words["clusters"] = [[0, 1, 2], [3]]
    else:
        words["participation"] = 0.5
    algorithm = presets.get(name, **words)
    runs = [
        hansa.run(algorithm, held, rounds=4, dtype=torch.float64, keep_params=True, evaluate_every=0).trajectory
        for held in (regression(reference), matrices)
    ]
    assert runs[1].abs().max() > 1e-3
    assert_near(runs[0], runs[1], 1e-10)


def a_resumed_run_is_a_run(path: Path, name: str, variant: str, folder: Folder) -> None:
    """Two rounds, a checkpoint on disk, one more: to the last bit three rounds."""
    whole = plain_run(path, name, variant)
    assert_moved(whole)
    half = path.run(method(name, variant), rounds=2)
    assert type(half.store) is ClientStore
    saved, store = through_disk(folder, half.checkpoint_state()), copy.deepcopy(half.store)
    again = Run(method(name, variant), path.task(), dtype=path.dtype, evaluate_every=0, store=store)
    again.restore(saved, half.history)
    again.advance(1)
    assert torch.equal(again.params, whole.params)
    assert_same_rows(again, whole)
