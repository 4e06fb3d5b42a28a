"""What the server's parts promise: transforms, aggregators, samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hansa.aggregate import Aggregator, BaseAggregator
from hansa.aggregate.base import Combined, check_weights
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import ClientStats, Population, RoundContext, Update
from hansa.runs.store import RamStore
from hansa.sample import BaseSampler, Sampler
from hansa.server import ServerTransform
from hansa.testing.promises import (
    DTYPES,
    ContractError,
    all_finite_tree,
    call_twice,
    check_component_contract,
    deep_copy,
    require,
    same_bits,
    unsupported_state,
    vector,
)

SAMPLES = (5, 60, 1, 17, 8, 33, 2, 9, 21, 4, 13, 6)


def check_server(part: ServerTransform, dim: int = 33) -> None:
    """A server transform: pure, of the vector's own kind, with a state that a checkpoint can hold and that is all it
    remembers.

    >>> from hansa.server import adam
    >>> check_server(adam())
    """
    check_component_contract(part, ServerTransform)
    for dtype in DTYPES:
        x = vector(dim, 0, dtype)
        start = call_twice(part, "init", part.init, [x])
        require(isinstance(start, dict), part, f"init gives a {type(start).__name__}, expected a dict")
        states, steps = [start], []
        for round in range(4):
            problem = unsupported_state(states[-1])
            require(not problem, part, f"{problem}: a checkpoint holds tensors, numbers, strings, lists and dicts")
            ctx = RoundContext(round, Population(SAMPLES), (0, 2, 3))
            delta = vector(dim, round + 1, dtype) if round != 2 else torch.zeros(dim, dtype=dtype)
            step, after = call_twice(part, "update", part.update, [delta, states[-1], ctx])
            form = (step.dtype, step.shape)
            require(form == (dtype, x.shape), part, f"update gives {form[0]} {tuple(form[1])} for {dtype} ({dim},)")
            require(all_finite_tree(step), part, "update gives NaN or infinity for a finite delta")
            steps.append(step)
            states.append(after)
        ctx = RoundContext(1, Population(SAMPLES), (0, 2, 3))
        again, _ = part.update(vector(dim, 2, dtype), deep_copy(states[1]), ctx)
        require(
            same_bits(again, steps[1]), part, "update depends on more than its arguments: all state is in the state"
        )


def check_aggregator(part: Aggregator, dim: int = 29) -> None:
    """An aggregator: a function of who reported what and not of the order, with declarations that hold.

    >>> from hansa.aggregate import mean
    >>> check_aggregator(mean())
    """
    check_component_contract(part, Aggregator)
    least = with_defaults(part, BaseAggregator).min_updates
    require(
        isinstance(least, int) and least >= 1, part, f"declares min_updates = {least!r}, expected a whole number >= 1"
    )
    rows = with_defaults(part, BaseAggregator).momentum_storage
    require(rows in ("ram", "disk"), part, f"declares momentum_storage = {rows!r}, expected 'ram' or 'disk'")
    try:
        check_weights(type(part).__name__, with_defaults(part, BaseAggregator).weights)
    except HansaError as problem:
        raise ContractError(f"{part!r}: {problem}") from problem
    for dtype in DTYPES:
        _check_rounds(part, dim, max(least, 5) + 1, least, dtype)


def _check_rounds(part: Aggregator, dim: int, most: int, least: int, dtype: torch.dtype) -> None:
    population = Population((SAMPLES * (1 + 2 * most // len(SAMPLES)))[: 2 * most])
    state = call_twice(part, "init", part.init, [dim, population.count])
    store = RamStore()
    for round, count in enumerate((most, least, most)):
        clients = tuple(sorted((7 * round + 2 * place) % population.count for place in range(count)))
        updates = [
            Update(
                client,
                place % 3,
                vector(dim, 100 * round + place, dtype),
                population.samples[client],
                1.0 + place,
                None if place == 1 else 0.5 + place,
            )
            for place, client in enumerate(clients)
        ]
        ctx = RoundContext(round, _with_client_stats(part, BaseAggregator, population), clients, store)
        before = deep_copy([update.vector for update in updates]), deep_copy(state)
        combined = _checked_result(part, part.combine(updates, state, ctx), dim, dtype)
        require(same_bits(before, ([u.vector for u in updates], state)), part, "combine changes what it is given")
        for shuffled in (updates[::-1], [*updates[1::2], *updates[::2]]):
            other = part.combine(shuffled, state, ctx)
            require(same_bits(other.vector, combined.vector), part, "the order in which updates arrive matters")
            require(same_bits(other.state, combined.state), part, "the order in which updates arrive matters to the state")
        problem = unsupported_state(combined.state)
        require(not problem, part, f"{problem}: a checkpoint holds tensors, numbers, strings, lists and dicts")
        strangers = set(combined.rows) - set(range(population.count))
        require(not strangers, part, f"keeps rows of {sorted(strangers)}, who are no clients")
        store.commit(round, {client: dict(rows) for client, rows in combined.rows.items()})
        state = combined.state


def _with_client_stats(
    part: object, base: type[BaseAggregator] | type[BaseSampler], population: Population
) -> Population:
    """What a part that asks for it sees: of some clients something was heard, of others nothing yet."""
    if not with_defaults(part, base).needs_client_stats:
        return population
    some = range(0, population.count, 3)
    heard = ClientStats.empty(population.count).updated({c: 0.1 * c for c in some}, {c: 1.0 + c for c in some})
    return replace(population, stats=heard)


def _checked_result(part: Aggregator, combined: object, dim: int, dtype: torch.dtype) -> Combined:
    require(isinstance(combined, Combined), part, f"combine gives a {type(combined).__name__}, expected Combined(...)")
    assert isinstance(combined, Combined)
    form = (combined.vector.dtype, tuple(combined.vector.shape))
    require(form == (dtype, (dim,)), part, f"combine gives {form[0]} {form[1]} for {dtype} ({dim},)")
    require(all_finite_tree(combined.vector), part, "combine gives NaN or infinity for finite updates")
    return combined


def check_sampler(
    part: Sampler,
    population: int = 12,
    clusters: Sequence[Sequence[int]] = ((0, 2, 4, 6), (1, 3, 5, 7), (8, 9, 10, 11)),
) -> None:
    """A sampler: a function of (round, population, key) that gives clients of the population in ascending order.

    >>> from hansa.sample import uniform
    >>> check_sampler(uniform(0.5))
    """
    check_component_contract(part, Sampler)
    groups = tuple(tuple(group) for group in clusters)
    bound = with_defaults(part, BaseSampler).bind(groups)
    check_component_contract(bound, Sampler)
    with_defaults(bound, BaseSampler).check(population)
    people = _with_client_stats(
        bound, BaseSampler, Population((SAMPLES * (1 + population // len(SAMPLES)))[:population])
    )
    for seed in range(3):
        for round in (0, 1, 2, 7):
            chosen = call_twice(bound, "select", bound.select, [round, people, Key(seed)])
            require(isinstance(chosen, tuple), part, f"select gives a {type(chosen).__name__}, expected a tuple")
            require(len(chosen) > 0, part, f"select chooses nobody in round {round}")
            whole = all(type(client) is int and 0 <= client < population for client in chosen)
            require(whole, part, f"select gives {chosen}: expected clients 0 to {population - 1}, as int")
            require(list(chosen) == sorted(set(chosen)), part, f"select gives {chosen}: not ascending, or one twice")
