"""Requirements of server transforms, aggregators and samplers."""

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
from hansa.testing.requirements import (
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


def check_server(component: ServerTransform, dim: int = 33) -> None:
    """Check a server transform: pure, with the vector's shape and dtype, a state that a checkpoint can store, and no
    hidden state.

    >>> from hansa.server import adam
    >>> check_server(adam())
    """
    check_component_contract(component, ServerTransform)
    for dtype in DTYPES:
        x = vector(dim, 0, dtype)
        start = call_twice(component, "init", component.init, [x])
        require(isinstance(start, dict), component, f"init gives a {type(start).__name__}, expected a dict")
        states, steps = [start], []
        for round in range(4):
            problem = unsupported_state(states[-1])
            require(not problem, component, f"{problem}: a checkpoint holds tensors, numbers, strings, lists and dicts")
            ctx = RoundContext(round, Population(SAMPLES), (0, 2, 3))
            delta = vector(dim, round + 1, dtype) if round != 2 else torch.zeros(dim, dtype=dtype)
            step, after = call_twice(component, "update", component.update, [delta, states[-1], ctx])
            form = (step.dtype, step.shape)
            require(
                form == (dtype, x.shape), component, f"update gives {form[0]} {tuple(form[1])} for {dtype} ({dim},)"
            )
            require(all_finite_tree(step), component, "update gives NaN or infinity for a finite delta")
            steps.append(step)
            states.append(after)
        ctx = RoundContext(1, Population(SAMPLES), (0, 2, 3))
        again, _ = component.update(vector(dim, 2, dtype), deep_copy(states[1]), ctx)
        require(
            same_bits(again, steps[1]),
            component,
            "update depends on more than its arguments: all state is in the state",
        )


def check_aggregator(component: Aggregator, dim: int = 29) -> None:
    """Check an aggregator: independent of arrival order, with correct declarations.

    >>> from hansa.aggregate import mean
    >>> check_aggregator(mean())
    """
    check_component_contract(component, Aggregator)
    least = with_defaults(component, BaseAggregator).min_updates
    require(
        isinstance(least, int) and least >= 1,
        component,
        f"declares min_updates = {least!r}, expected a whole number >= 1",
    )
    rows = with_defaults(component, BaseAggregator).momentum_storage
    require(rows in ("ram", "disk"), component, f"declares momentum_storage = {rows!r}, expected 'ram' or 'disk'")
    try:
        check_weights(type(component).__name__, with_defaults(component, BaseAggregator).weights)
    except HansaError as problem:
        raise ContractError(f"{component!r}: {problem}") from problem
    for dtype in DTYPES:
        _check_rounds(component, dim, max(least, 5) + 1, least, dtype)


def _check_rounds(component: Aggregator, dim: int, most: int, least: int, dtype: torch.dtype) -> None:
    population = Population((SAMPLES * (1 + 2 * most // len(SAMPLES)))[: 2 * most])
    state = call_twice(component, "init", component.init, [dim, population.count])
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
        ctx = RoundContext(round, _with_client_stats(component, BaseAggregator, population), clients, store)
        before = deep_copy([update.vector for update in updates]), deep_copy(state)
        combined = _checked_result(component, component.combine(updates, state, ctx), dim, dtype)
        require(same_bits(before, ([u.vector for u in updates], state)), component, "combine changes what it is given")
        for shuffled in (updates[::-1], [*updates[1::2], *updates[::2]]):
            other = component.combine(shuffled, state, ctx)
            require(same_bits(other.vector, combined.vector), component, "the order in which updates arrive matters")
            require(
                same_bits(other.state, combined.state),
                component,
                "the order in which updates arrive matters to the state",
            )
        problem = unsupported_state(combined.state)
        require(not problem, component, f"{problem}: a checkpoint holds tensors, numbers, strings, lists and dicts")
        strangers = set(combined.rows) - set(range(population.count))
        require(not strangers, component, f"keeps rows of {sorted(strangers)}, who are no clients")
        store.commit(round, {client: dict(rows) for client, rows in combined.rows.items()})
        state = combined.state


def _with_client_stats(
    component: object, base: type[BaseAggregator] | type[BaseSampler], population: Population
) -> Population:
    """Return the population with statistics of some clients, if the component needs them."""
    if not with_defaults(component, base).needs_client_stats:
        return population
    some = range(0, population.count, 3)
    heard = ClientStats.empty(population.count).updated({c: 0.1 * c for c in some}, {c: 1.0 + c for c in some})
    return replace(population, stats=heard)


def _checked_result(component: Aggregator, combined: object, dim: int, dtype: torch.dtype) -> Combined:
    require(
        isinstance(combined, Combined), component, f"combine gives a {type(combined).__name__}, expected Combined(...)"
    )
    assert isinstance(combined, Combined)
    form = (combined.vector.dtype, tuple(combined.vector.shape))
    require(form == (dtype, (dim,)), component, f"combine gives {form[0]} {form[1]} for {dtype} ({dim},)")
    require(all_finite_tree(combined.vector), component, "combine gives NaN or infinity for finite updates")
    return combined


def check_sampler(
    component: Sampler,
    population: int = 12,
    clusters: Sequence[Sequence[int]] = ((0, 2, 4, 6), (1, 3, 5, 7), (8, 9, 10, 11)),
) -> None:
    """Check a sampler: clients of the population in ascending order, as a function of (round, population, key).

    >>> from hansa.sample import uniform
    >>> check_sampler(uniform(0.5))
    """
    check_component_contract(component, Sampler)
    groups = tuple(tuple(group) for group in clusters)
    bound = with_defaults(component, BaseSampler).bind(groups)
    check_component_contract(bound, Sampler)
    with_defaults(bound, BaseSampler).check(population)
    people = _with_client_stats(
        bound, BaseSampler, Population((SAMPLES * (1 + population // len(SAMPLES)))[:population])
    )
    for seed in range(3):
        for round in (0, 1, 2, 7):
            chosen = call_twice(bound, "select", bound.select, [round, people, Key(seed)])
            require(isinstance(chosen, tuple), component, f"select gives a {type(chosen).__name__}, expected a tuple")
            require(len(chosen) > 0, component, f"select chooses nobody in round {round}")
            whole = all(type(client) is int and 0 <= client < population for client in chosen)
            require(whole, component, f"select gives {chosen}: expected clients 0 to {population - 1}, as int")
            require(
                list(chosen) == sorted(set(chosen)), component, f"select gives {chosen}: not ascending, or one twice"
            )
