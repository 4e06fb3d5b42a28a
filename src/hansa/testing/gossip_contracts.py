"""What gossip's parts promise: topologies, activities, clusterings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.gossip import Activity, Clustering, Topology
from hansa.testing.promises import Broken, check_part, promise, twice


def check_topology(part: Topology, sizes: Sequence[int] = (1, 2, 3, 4, 8, 16)) -> None:
    """A topology: for every n one doubly stochastic matrix, connected unless it says otherwise.

    >>> from hansa.gossip import ring
    >>> check_topology(ring())
    """
    check_part(part, Topology)
    promise(isinstance(part, Topology), part, "does not inherit from hansa.gossip.Topology")
    for n in sizes:
        try:
            dense = twice(part, "topology(n)", part, [n])
        except HansaError as problem:
            raise Broken(f"{part!r}: {problem}") from problem
        promise(dense.shape == (n, n), part, f"is {tuple(dense.shape)} for {n} clients")
        sparse = torch.from_numpy(part.sparse(n).toarray())
        promise(torch.equal(dense, sparse), part, f"sparse({n}) is another matrix than topology({n})")
        pieces = connected_components(np.asarray(dense) != 0, directed=True, connection="strong")[0]
        promise(pieces == 1 or not part.connected, part, f"falls into {pieces} pieces for {n} clients")
        if part.averages:
            mean = torch.full((n, n), 1 / n, dtype=dense.dtype)
            promise(torch.allclose(dense, mean, rtol=0, atol=1e-12), part, f"averages, but W is not 11'/n for n = {n}")
        if part.isolates:
            promise(torch.equal(dense, torch.eye(n, dtype=dense.dtype)), part, f"isolates, but W is not I for n = {n}")


def check_activity(
    part: Activity, cohorts: Sequence[Sequence[int]] = ((0, 1, 2, 3), (4, 5, 6, 7)), steps: int = 3
) -> None:
    """An activity: clients of the cohort in ascending order, as a function of (round, step, cohort, key).

    >>> from hansa.gossip import bernoulli
    >>> check_activity(bernoulli(0.5))
    """
    check_part(part, Activity)
    declared(part, Activity, "check")(cohorts, steps)
    for cohort in cohorts:
        rule = declared(part, Activity, "among")(cohort[:2])
        check_part(rule, Activity)
        for round in range(3):
            for step in range(steps):
                for clients in (cohort, cohort[::-1], cohort[1:]):
                    active = twice(rule, "draw", rule.draw, [round, step, clients, Key(round)])
                    known = set(active) <= set(clients)
                    promise(known, part, f"draw gives {active} of the cohort {list(clients)}")
                    promise(list(active) == sorted(set(active)), part, f"draw gives {active}: not ascending")
                orders = [rule.draw(round, step, clients, Key(round)) for clients in (cohort, cohort[::-1])]
                promise(list(orders[0]) == list(orders[1]), part, "draw depends on the order of the cohort")


def check_clustering(part: Clustering, population: int = 12, classes: int = 4) -> None:
    """A clustering: every client in one cluster, as a function of (population, key, labels).

    >>> from hansa.gossip import random
    >>> check_clustering(random(3))
    """
    check_part(part, Clustering)
    labels = np.random.default_rng(0).integers(0, 9, (population, classes)).astype(np.float64)
    given = None if declared(part, Clustering, "needs_labels") is False else labels
    groups = twice(part, "assign", part.assign, [population, Key(1), given])
    promise(all(len(group) for group in groups), part, f"gives an empty cluster: {groups}")
    members = sorted(client for group in groups for client in group)
    promise(members == list(range(population)), part, f"gives {groups}: expected every client once")
