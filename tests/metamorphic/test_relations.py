"""The net: for every preset, on mini-batches of unequal clients, eager and native, plain and compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from contracts.small import NAMES
from hansa import compress
from metamorphic import relations
from metamorphic.laboratory import (
    ASYNCHRONOUS,
    CASES,
    COUNTS_EVERYBODY,
    DECENTRALIZED,
    EAGER,
    FEDERATED,
    GOSSIPING,
    NATIVE,
    PATHS,
    method,
    sharing,
)
from mistakes import refused

ALONE = [(name, variant) for name, variant in CASES if name in FEDERATED and name not in COUNTS_EVERYBODY]
ONE_GRAPH = ("afga",)  # over all clients: it would have to be cut in two
TWICE = [case for case in CASES if case[0] not in (*ONE_GRAPH, *ASYNCHRONOUS) and case[1] != "options"]
"""Twice the clients arrive in another order, so that asynchronous methods take other steps."""
ALL = [(name,) for name in NAMES]
SPLIT = [(name, {}) for name in DECENTRALIZED] + [
    ("dsgd", {"local_momentum": 0.9}),
    ("dsgd", {"order": "adapt-then-combine"}),
    ("d_amsgrad", {"second_moment": "local"}),
    ("choco_sgd", {"gossip_compressor": compress.quantize(4)}),
    ("choco_sgd", {"gossip_compressor": compress.random_k(0.3), "consensus_rate": 0.2}),
    ("fedavg", {"sampler": relations.sample.replay([[2]])}),
    ("fednova", {"sampler": relations.sample.replay([[2]]), "weight_decay": 0.01}),
]
Relation = tuple[Callable[..., None], tuple[Any, ...]]


def eagerly(relation: Callable[..., None], cases: Iterable[tuple[str, ...]]) -> Iterator[Relation]:
    return ((relation, (EAGER, *case)) for case in cases)


def on_each(
    relation: Callable[..., None], cases: list[tuple[str, str]], native: tuple[str, ...] = ("plain",)
) -> Iterator[Relation]:
    """All on the eager path, and on the native one those variants that differ there."""
    yield from eagerly(relation, cases)
    yield from ((relation, (NATIVE, *case)) for case in cases if case[1] in native)


NET: list[Relation] = [
    *on_each(
        relations.isolated_clients_are_the_plain_loop,
        [case for case in ALONE if case[0] not in ASYNCHRONOUS],
        native=("options",),
    ),
    *((relations.without_neighbours_there_is_only_the_server, (path, name)) for path in PATHS for name in GOSSIPING),
    *(
        (relations.without_neighbours_there_is_only_the_optimizer, (path, name))
        for path in PATHS
        for name in DECENTRALIZED
    ),
    *eagerly(relations.renumbering_permutes, CASES),
    *((relations.renumbering_permutes, (NATIVE, name, "plain")) for name in NAMES),
    *((relations.steps_may_be_split_over_rounds, case) for case in SPLIT),
    *eagerly(  # FedYogi inside fedaware_yogi counts equally
        relations.a_client_may_stand_twice_with_half_its_weight, [case for case in ALONE if case[0] != "fedaware_yogi"]
    ),
    *eagerly(relations.everybody_may_stand_twice, TWICE),
    *on_each(
        relations.who_never_takes_part_changes_nothing,
        [case for case in CASES if case[0] not in (*COUNTS_EVERYBODY, *ONE_GRAPH)],
    ),
    *eagerly(relations.scaling_the_loss_is_scaling_the_rate, ALL),
    *on_each(relations.a_batch_of_everything_is_the_full_gradient, [case for case in CASES if case[1] != "options"]),
    *((relations.the_full_gradient_is_the_one_on_paper, case) for case in ALL),
    *on_each(relations.a_resumed_run_is_a_run, CASES),
]


@pytest.mark.parametrize(
    ("relation", "arguments"), NET, ids=["-".join([each.__name__, *map(str, given)]) for each, given in NET]
)
def test_the_relation_holds(relation, arguments, tmp_path):
    folder = (tmp_path,) if relation is relations.a_resumed_run_is_a_run else ()
    with sharing():
        relation(*arguments, *folder)


test_methods_whose_clients_cannot_gossip_are_refused = refused(
    *((name, "finish together, from one version") for name in ASYNCHRONOUS),
    *((name, "clients that gossip keep no variates") for name in COUNTS_EVERYBODY if name not in ASYNCHRONOUS),
    by=lambda name: method(name).with_local(mixing=relations.ISOLATED),
)
