"""The page on internet scale says what the code does: its tables are made by it, its laws are those of the ledger."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hansa
from hansa.aggregate.aware import MOMENTUM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import internet_scale as page

CLIENTS, ABSENT = 6, 40
FAMILIES = {family.name: family for family in page.FAMILIES}


class Regression(nn.Module):
    """2010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(200, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def ran(name: str, rounds: int, **arguments) -> hansa.Run:
    draw = torch.Generator().manual_seed(0)
    owners = torch.repeat_interleave(torch.arange(CLIENTS), torch.arange(CLIENTS) + 2)
    x, y = torch.randn(len(owners), 200, generator=draw), torch.randn(len(owners), 10, generator=draw)
    task = hansa.Task(Regression, nn.functional.mse_loss, hansa.data.from_arrays(x, y, clients=owners))
    if name == "HA-Fed, CAFGA":
        arguments |= {"clusters": 2, "reporters": 1, "steps": page.STEPS}
    else:
        arguments |= {"steps": 2, "two_way": True} if name == "FedCAMS, both ways" else {"steps": 2}
    method = getattr(hansa.presets, FAMILIES[name].preset)(batch_size=2, local_lr=0.01, **arguments)
    return hansa.run(method, task, rounds=rounds, workers=1, evaluate_every=0)


def floats(tree) -> int:
    """The numbers of all vectors in a tree; packets lie there as bytes."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() if tree.is_floating_point() and tree.ndim == 1 else 0
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(map(floats, below))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_costs_what_the_page_says(name):
    family, run = FAMILIES[name], ran(name, 2)
    d, last = run.params.numel(), run.history[-1]
    seen = last["participants"]
    assert last["up_bytes"] == seen * family.up(d)
    two_way = name == "FedCAMS, both ways"  # of two rounds one was missed
    assert last["down_bytes"] == seen * (page.rejoined(d, 1) if two_way else family.down(d))
    passed_on = seen * page.dense(d)  # to all but those who report
    assert last["peer_bytes"] == (CLIENTS * family.peer(d) - passed_on if family.peer(d) else 0)
    state = run.state.tree()
    stored = floats([state[part] for part in ("vectors", "server", "aggregate", "downlink")])
    assert stored == (family.server - two_way) * d  # the log of packets is less than a vector
    assert floats(run.store.read(last["clients"][0])) == family.kept * d
    if family.rows:
        assert run.store.read_many(last["clients"], MOMENTUM).shape == (seen, d)


@pytest.mark.parametrize("gap", [2, 10, ABSENT])
def test_who_was_away_is_sent_what_was_missed_or_everything(gap):
    away = hansa.sample.replay([[0, 2]] * gap + [[1]])
    run = ran("FedCAMS, both ways", gap + 1, sampler=away)
    d = run.params.numel()
    assert run.history[-1]["down_bytes"] == page.rejoined(d, gap)
    assert (page.rejoined(d, gap) == page.dense(d)) == (gap == ABSENT)


def test_the_tables_of_the_page_are_those_of_the_code():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text) == text
