"""The net: for every preset, on mini-batches of unequal clients, eager and native, plain and compressed."""

from __future__ import annotations

import pytest

from contracts.small import NAMES
from hansa import HansaError, compress
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

ALONE = [(name, variant) for name, variant in CASES if name in FEDERATED and name not in COUNTS_EVERYBODY]
both = pytest.mark.parametrize("path", PATHS, ids=repr)


@pytest.fixture(autouse=True)
def shared_runs():
    with sharing():
        yield


def each(cases):
    return pytest.mark.parametrize(("name", "variant"), cases)


def on_each(cases, native=("plain",)):
    """All on the eager path, and on the native one those variants that differ there."""
    pairs = [(EAGER, *case) for case in cases] + [(NATIVE, *case) for case in cases if case[1] in native]
    return pytest.mark.parametrize(("path", "name", "variant"), pairs, ids=["-".join(map(str, pair)) for pair in pairs])


@on_each([case for case in ALONE if case[0] not in ASYNCHRONOUS], native=("options",))
def test_isolated_clients_are_the_plain_loop(path, name, variant):
    relations.isolated_clients_are_the_plain_loop(path, name, variant)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_clients_that_gossip_do_not_finish_at_different_times(name):
    with pytest.raises(HansaError, match="finish together, from one version"):
        method(name).with_local(mixing=relations.ISOLATED)


@pytest.mark.parametrize("name", [name for name in COUNTS_EVERYBODY if name not in ASYNCHRONOUS])
def test_clients_with_variates_of_their_own_do_not_gossip(name):
    with pytest.raises(HansaError, match="clients that gossip keep no variates"):
        method(name).with_local(mixing=relations.ISOLATED)


@both
@pytest.mark.parametrize("name", GOSSIPING)
def test_without_neighbours_there_is_only_the_server(path, name):
    relations.without_neighbours_there_is_only_the_server(path, name)


@both
@pytest.mark.parametrize("name", DECENTRALIZED)
def test_without_neighbours_there_is_only_the_optimizer(path, name):
    relations.without_neighbours_there_is_only_the_optimizer(path, name)


@each(CASES)
def test_renumbering_permutes(name, variant):
    relations.renumbering_permutes(EAGER, name, variant)


@pytest.mark.parametrize("name", NAMES)
def test_renumbering_permutes_on_native_models(name):
    relations.renumbering_permutes(NATIVE, name, "plain")


SPLIT = [(name, {}) for name in DECENTRALIZED] + [
    ("dsgd", {"local_momentum": 0.9}),
    ("dsgd", {"order": "adapt-then-combine"}),
    ("d_amsgrad", {"second_moment": "local"}),
    ("choco_sgd", {"gossip_compressor": compress.quantize(4)}),
    ("choco_sgd", {"gossip_compressor": compress.random_k(0.3), "consensus_rate": 0.2}),
    ("fedavg", {"sampler": relations.sample.replay([[2]])}),
    ("fednova", {"sampler": relations.sample.replay([[2]]), "weight_decay": 0.01}),
]


@pytest.mark.parametrize(("name", "words"), SPLIT, ids=str)
def test_steps_may_be_split_over_rounds(name, words):
    relations.steps_may_be_split_over_rounds(name, **words)


@each([(name, variant) for name, variant in ALONE if name != "fedaware_yogi"])  # FedYogi inside it counts equally
def test_a_client_may_stand_twice_with_half_its_weight(name, variant):
    relations.a_client_may_stand_twice_with_half_its_weight(EAGER, name, variant)


ONE_GRAPH = ("afga",)  # over all clients: it would have to be cut in two
TWICE = [case for case in CASES if case[0] not in (*ONE_GRAPH, *ASYNCHRONOUS) and case[1] != "options"]
"""Twice the clients arrive in another order, so that asynchronous methods take other steps."""


@each(TWICE)
def test_everybody_may_stand_twice(name, variant):
    relations.everybody_may_stand_twice(EAGER, name, variant)


@on_each([(name, variant) for name, variant in CASES if name not in (*COUNTS_EVERYBODY, *ONE_GRAPH)])
def test_who_never_takes_part_changes_nothing(path, name, variant):
    relations.who_never_takes_part_changes_nothing(path, name, variant)


@pytest.mark.parametrize("name", NAMES)
def test_scaling_the_loss_is_scaling_the_rate(name):
    relations.scaling_the_loss_is_scaling_the_rate(EAGER, name)


@on_each([case for case in CASES if case[1] != "options"])
def test_a_batch_of_everything_is_the_full_gradient(path, name, variant):
    relations.a_batch_of_everything_is_the_full_gradient(path, name, variant)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_gradient_is_the_one_on_paper(name):
    relations.the_full_gradient_is_the_one_on_paper(name)


@on_each(CASES)
def test_a_resumed_run_is_a_run(path, name, variant, tmp_path):
    relations.a_resumed_run_is_a_run(path, name, variant, tmp_path)
