"""A cohort's round natively where most clients are idle: only the changes are made, and gossip carries coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hansa.core.native import abi
from hansa.core.native.lazy_cohort_kernel import GROUP, Terms, Trail
from hansa.gossip.rows import LazyRows, Mixer
from hansa.rounds.native_schedule import Batches, Made, as_turns

Array = np.ndarray[Any, Any]


class Walk(NamedTuple):
    """How a cohort walks: who is active at a step (positions), whether all gossip after it (None), and whether that is
    an exact average; ``late``: before those who are active have moved."""

    active: Callable[[int], Sequence[int]]
    gossip: Callable[[int], bool | None]
    late: bool = False


class Path(NamedTuple):
    """Turns of several steps with the terms of their models, and the step that each belongs to, -1 where it gathers."""

    turns: Array
    steps: Array
    terms: Terms


class Step(NamedTuple):
    """A step that was broken off: those who have moved already, and those who are still to."""

    moved: list[int]
    rest: list[int]


def path(
    walk: Walk, steps: Sequence[int], rows: LazyRows, mixer: Mixer, batches: Batches, broken: Step | None = None
) -> Path:
    """The turns of the given steps, the first of which may have been broken off; ``rows`` is then as if all of them had
    been made."""
    made: list[Made] = []
    places: list[int] = []
    coefficients: list[Array] = []
    for step in steps:
        moved, positions = broken or Step([], list(walk.active(step)))
        terms, broken = rows.terms(positions), None
        for first in range(0, len(positions), GROUP):
            group = positions[first : first + GROUP]
            made += [(abi.GATHER, len(group), 0), *batches.turns(group)]
            places += [-1, *[step] * len(group)]
            coefficients += [np.zeros((1, 0)), terms[first : first + GROUP]]
        _after(walk, step, [*moved, *positions], rows, mixer)
    return Path(as_turns(made), np.array(places, np.int64), Terms.of(coefficients))


def _after(walk: Walk, step: int, positions: list[int], rows: LazyRows, mixer: Mixer) -> None:
    """What a step does to the coefficients."""
    exact = walk.gossip(step)
    if not walk.late:
        rows.made(positions)
    if exact is not None:
        (rows.average if exact else rows.mix)(mixer)
    if walk.late:
        rows.made(positions)


def march(
    trail: Trail,
    walk: Walk,
    steps: int,
    rows: LazyRows,
    mixer: Mixer,
    batches: Batches,
    velocities: Callable[[list[int]], Mapping[int, torch.Tensor]],
    lose: Callable[[int, int], None],
) -> list[float]:
    """All steps, in one call as long as nobody is lost; gives the loss of each local step."""
    losses: list[float] = []
    first, broken = 0, None
    while first < steps and mixer.positions:
        mark, taken = rows.mark(), batches.taken.copy()
        plan = path(walk, range(first, steps), rows, mixer, batches, broken)
        rows.room(0)  # for all of them
        stepping = sorted({int(row) for row in plan.turns["row"][plan.steps >= 0]})
        made = mark[1] + (len(broken.moved) if broken else 0)
        found, done = trail.run(rows.changes, made, plan.turns, plan.terms, velocities(stepping))
        own = plan.steps[:done] >= 0
        if trail.lost is None:
            return [*losses, *found[:done][own].tolist()]
        own[-1] = False
        losses += found[:done][own].tolist()
        step = int(plan.steps[done - 1])
        here = np.flatnonzero(plan.steps == step)
        moved = plan.turns["row"][here[here < done - 1]].tolist()
        if broken and step == first:
            moved = [*broken.moved, *moved]
        batches.rewind(taken, plan.turns["row"][:done][plan.steps[:done] >= 0])
        rows.back(mark)
        for earlier in range(first, step):
            before = broken or Step([], list(walk.active(earlier)))
            _after(walk, earlier, [*before.moved, *before.rest], rows, mixer)
            broken = None
        broken, first = Step(moved, plan.turns["row"][here[here >= done]].tolist()), step
        lose(trail.lost, step)
    return losses
