"""Requirements of topologies, activities and clusterings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.gossip import Activity, BaseActivity, BaseClustering, Clustering, MixingRule, Topology
from hansa.testing.requirements import ContractError, call_twice, check_component_contract, require


def check_topology(component: Topology, sizes: Sequence[int] = (1, 2, 3, 4, 8, 16)) -> None:
    """Check a topology: one doubly stochastic matrix for every n, connected unless declared otherwise.

    >>> from hansa.gossip import ring
    >>> check_topology(ring())
    """
    check_component_contract(component, Topology)
    require(isinstance(component, Topology), component, "does not inherit from hansa.gossip.Topology")
    for n in sizes:
        try:
            dense = call_twice(component, "topology(n)", component, [n])
        except HansaError as problem:
            raise ContractError(f"{component!r}: {problem}") from problem
        require(dense.shape == (n, n), component, f"is {tuple(dense.shape)} for {n} clients")
        sparse = torch.from_numpy(component.sparse(n).toarray())
        require(torch.equal(dense, sparse), component, f"sparse({n}) is another matrix than topology({n})")
        pieces = connected_components(np.asarray(dense) != 0, directed=True, connection="strong")[0]
        require(pieces == 1 or not component.connected, component, f"falls into {pieces} pieces for {n} clients")
        if component.averages:
            mean = torch.full((n, n), 1 / n, dtype=dense.dtype)
            require(
                torch.allclose(dense, mean, rtol=0, atol=1e-12), component, f"averages, but W is not 11'/n for n = {n}"
            )
        if component.isolates:
            require(
                torch.equal(dense, torch.eye(n, dtype=dense.dtype)), component, f"isolates, but W is not I for n = {n}"
            )


def check_activity(
    component: Activity, cohorts: Sequence[Sequence[int]] = ((0, 1, 2, 3), (4, 5, 6, 7)), steps: int = 3
) -> None:
    """Check an activity: clients of the cohort in ascending order, as a function of (round, step, cohort, key).

    >>> from hansa.gossip import bernoulli
    >>> check_activity(bernoulli(0.5))
    """
    check_component_contract(component, Activity)
    with_defaults(component, BaseActivity).check(cohorts, steps)
    for cohort in cohorts:
        rule = with_defaults(component, BaseActivity).among(cohort[:2])
        check_component_contract(rule, Activity)
        for round in range(3):
            for step in range(steps):
                for clients in (cohort, cohort[::-1], cohort[1:]):
                    active = call_twice(rule, "draw", rule.draw, [round, step, clients, Key(round)])
                    known = set(active) <= set(clients)
                    require(known, component, f"draw gives {active} of the cohort {list(clients)}")
                    require(list(active) == sorted(set(active)), component, f"draw gives {active}: not ascending")
                orders = [rule.draw(round, step, clients, Key(round)) for clients in (cohort, cohort[::-1])]
                require(list(orders[0]) == list(orders[1]), component, "draw depends on the order of the cohort")


def check_mixing_rule(component: MixingRule, dim: int = 5, neighbours: int = 4) -> None:
    """Check a mixing rule: a function of its arguments, which it does not change, that keeps a model all agree on.

    >>> from hansa.gossip import clipped
    >>> check_mixing_rule(clipped(1.0))
    """
    check_component_contract(component, MixingRule)
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(dim, generator=draw, dtype=torch.float64)
    received = list(torch.randn(neighbours, dim, generator=draw, dtype=torch.float64))
    weights = [1 / (neighbours + 1)] * neighbours
    before = [own.clone(), *(vector.clone() for vector in received)]
    mixed = call_twice(component, "combine", component.combine, [own, received, weights])
    same = all(torch.equal(a, b) for a, b in zip(before, [own, *received], strict=True))
    require(same, component, "combine changes the vectors that it is given")
    require(mixed.shape == own.shape and mixed.dtype == own.dtype, component, f"combine returns {tuple(mixed.shape)}")
    agreed = component.combine(own, [own.clone() for _ in received], weights)
    require(torch.allclose(agreed, own, rtol=0, atol=1e-12), component, "moves a model on which all neighbours agree")
    alone = component.combine(own, [], [])
    require(torch.equal(alone, own), component, "moves a model that has no neighbours")


def check_clustering(component: Clustering, population: int = 12, classes: int = 4) -> None:
    """Check a clustering: every client in one cluster, as a function of (population, key, labels).

    >>> from hansa.gossip import random
    >>> check_clustering(random(3))
    """
    check_component_contract(component, Clustering)
    labels = np.random.default_rng(0).integers(0, 9, (population, classes)).astype(np.float64)
    label_counts = None if with_defaults(component, BaseClustering).needs_labels is False else labels
    groups = call_twice(component, "assign", component.assign, [population, Key(1), label_counts])
    require(all(len(group) for group in groups), component, f"gives an empty cluster: {groups}")
    members = sorted(client for group in groups for client in group)
    require(members == list(range(population)), component, f"gives {groups}: expected every client once")
