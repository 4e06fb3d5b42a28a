"""A cohort's round as turns of native code: whose step comes when, on which batch, and when all gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy
import torch

from hansa.core.native import abi
from hansa.core.native.cohort_kernel import TURN, Links
from hansa.gossip.rows import Mixer
from hansa.gossip.topology import Topology

Array: TypeAlias = np.ndarray[Any, Any]


class Batches:
    """Where each client's batches lie, and how many of them are used up. ``draw`` gives a client's [steps, batch]."""

    def __init__(self, clients: int, draw: Callable[[int], torch.Tensor]) -> None:
        self._draw = draw
        self._held: dict[int, torch.Tensor] = {}
        self._where: dict[int, tuple[int, int]] = {}
        self.taken = [0] * clients

    def turns(self, positions: Sequence[int]) -> list[Made]:
        """The next step of each of these, as the fields of `TURN`."""
        made = []
        for position in positions:
            if position not in self._held:
                index = self._held[position] = self._draw(position)
                self._where[position] = index.data_ptr(), index.shape[1]
            base, width = self._where[position]
            made.append((position, width, base + 8 * width * self.taken[position]))
            self.taken[position] += 1
        return made

    def rewind(self, taken: Sequence[int], rows: Array) -> None:
        """As many are used up as then, and those of the given steps."""
        self.taken = (np.array(taken) + np.bincount(rows, minlength=len(taken))).tolist()


Made: TypeAlias = tuple[int, int, int]


def as_turns(made: Sequence[Made]) -> Array:
    """The turns as native code reads them: addresses are below 2^63."""
    return np.array(made, np.int64).reshape(-1, 3).view(TURN).ravel()


class Program(NamedTuple):
    """Turns of several steps: the step that each belongs to, and which of them are exact averages."""

    turns: Array
    steps: Array
    averages: Array

    def exchanges(self, done: int) -> tuple[int, int]:
        """How many gossips, and how many exact averages, the first ``done`` turns have."""
        kinds, averages = self.turns["row"][:done], self.averages[:done]
        return int(((kinds < 0) & (kinds != abi.SETTLE) & ~averages).sum()), int(averages.sum())

    def rest(self, done: int) -> list[int]:
        """The rows whose turn was still to come in the step of the last of ``done`` turns."""
        same = self.steps[done:] == self.steps[done - 1]
        return [int(row) for row in self.turns["row"][done:][same] if row >= 0]


def program(
    steps: Sequence[int], active: Callable[[int], list[Made]], gossip: Callable[[int], tuple[int, bool] | None]
) -> Program:
    """For each step the turns of those who are active, then what all do: a kind, and whether that is an average."""
    made: list[Made] = []
    places: list[int] = []
    exact: list[bool] = []
    for step in steps:
        after = gossip(step)
        made += active(step)
        exact += [False] * (len(made) - len(exact))
        if after is not None:
            made.append((after[0], 1, 0))
            exact.append(after[1])
        places += [step] * (len(exact) - len(places))
    return Program(as_turns(made), np.array(places), np.array(exact, bool))


def links_of(mixer: Mixer, *, uniform: bool) -> Links:
    """W over all positions by its links, none at those that are lost. Where W = 11'/n its links are wanted only if
    ``uniform``; each row's link to itself stands for them otherwise."""
    if len(mixer.positions) == len(mixer.alive):
        return _all_links(mixer.topology, len(mixer.alive), uniform)
    return _links(mixer, uniform)


@lru_cache(maxsize=64)
def _all_links(topology: Topology, n: int, uniform: bool) -> Links:
    return _links(Mixer(topology, n), uniform)


def _links(mixer: Mixer, uniform: bool) -> Links:
    positions, n = np.array(mixer.positions, np.int64), len(mixer.positions)
    if mixer.weights is not None:
        matrix = mixer.weights.tocsr()
    else:
        matrix = (
            scipy.sparse.csr_array(np.full((n, n), 1.0 / n)) if uniform else scipy.sparse.eye_array(n, format="csr")
        )
    counts = np.zeros(len(mixer.alive), np.int64)
    counts[positions] = np.diff(matrix.indptr)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Links.of(len(mixer.alive), starts, positions[matrix.indices], np.asarray(matrix.data, np.float64))
