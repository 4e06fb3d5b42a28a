"""Checks that components satisfy their protocols.

>>> from hansa import compress, testing
>>> testing.check(compress.sign())

`check` takes a component of any kind and raises a `ContractError` that names the violated requirement. Hansa's own
components pass the same checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from hansa.aggregate import Aggregator, BaseAggregator
from hansa.aggregate.base import Combined
from hansa.compress import Coder, Compressor, Downlink, Packet, PacketError, Uplink, accumulate, decode
from hansa.compress.base import packet_kind
from hansa.compress.grid import grid
from hansa.compress.links import BaseUplink
from hansa.compress.packet import floats, make_packet
from hansa.core.bounds import rule_or_numbers
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import check_citations, missing_methods, with_defaults
from hansa.core.types import MODEL, ClientStats, Population, RoundContext, Update
from hansa.gossip import Activity, BaseActivity, Clustering, MixingRule, Topology, resolve
from hansa.local import Correction, LocalWork, Solver, SolverResult, Work
from hansa.local.loops import BaseClientLoop, ClientLoop, require_loop
from hansa.local.solvers import BaseSolver
from hansa.local.work import BaseLocalWork
from hansa.runs.record import to_json
from hansa.runs.store import ClientStore
from hansa.sample import BaseSampler, Sampler
from hansa.server import ServerTransform

__all__ = ["ContractError", "check"]

_DTYPES = (torch.float32, torch.float64)
_SAMPLES = (5, 60, 1, 17, 8, 33, 2, 9, 21, 4, 13, 6)
_KEY = Key(9)
_DRAWS = 60  # draws of a compressor that estimate its error
_SIZES = (1, 2, 7, 8, 64, 500)


class ContractError(AssertionError):
    """A requirement that a component violates.

    >>> issubclass(ContractError, AssertionError)
    True
    """


def check(component: object) -> None:
    """Check that a component satisfies the protocol of its kind; a `ContractError` names the violated requirement.

    Args:
        component: An object that takes part in a round: a compressor, a server transform, a sampler, a topology, ...

    >>> from hansa import compress, gossip, server
    >>> for component in (compress.sign(), server.adam(), gossip.ring()):
    ...     check(component)
    """
    contracts = {} if isinstance(component, type) else _contracts_of(component)
    if not contracts:
        protocols = ", ".join(sorted(protocol.__name__ for protocol in (Activity, LocalWork, *_CONTRACTS)))
        raise HansaError(f"check({component!r}): expected a component, with the methods of one of: {protocols}.")
    try:
        stable = " at 0x" not in repr(component)
        _expect(stable, "its repr has a memory address: make it a dataclass, so that runs can resume")
        check_citations([component])
        for contract in contracts.values():
            contract(component)
    except (ContractError, HansaError) as error:
        raise ContractError(f"{component!r}: {error}") from error


def _contracts_of(component: object) -> dict[type, Callable[[Any], None]]:
    """Return the checks of the kinds of a component by its methods; `direct` is both an uplink and a downlink."""
    draw = getattr(component, "draw", None)
    if callable(draw):  # local work draws for a client, an activity for a round
        by_client = next(iter(signature(draw).parameters), "") == "client"
        return {LocalWork: _check_work} if by_client else {Activity: _check_activity}
    contracts = {
        protocol: contract for protocol, contract in _CONTRACTS.items() if not missing_methods(component, protocol)
    }
    if Aggregator in contracts:
        contracts.pop(MixingRule, None)  # both combine
    return contracts


def _expect(condition: object, requirement: str) -> None:
    if not condition:
        raise ContractError(requirement)


def _vector(dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return normally distributed numbers, a tenth of them zero."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.standard_normal(dim) * (draw.random(dim) > 0.1)).to(dtype)


def _plain(tree: Any) -> Any:
    """Return a tree with text in place of tensors and floats, so that NaN equals NaN."""
    if isinstance(tree, Mapping):
        return {name: _plain(item) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [type(tree), *map(_plain, tree)]
    if isinstance(tree, (Tensor, np.ndarray)):
        return str(tree.dtype), repr(tree.tolist())
    return repr(tree) if isinstance(tree, float) else tree


def _same_bits(left: Any, right: Any) -> bool:
    """Return whether two trees are bit-identical."""
    return bool(_plain(left) == _plain(right))


def _check_vector(name: str, value: Any, dim: int, dtype: torch.dtype) -> None:
    """Check that a result is a finite vector of the right form."""
    form = (value.dtype, tuple(value.shape))
    _expect(form == (dtype, (dim,)), f"{name} gives {form[0]} {form[1]} for {dtype} ({dim},)")
    _expect(torch.isfinite(value).all(), f"{name} gives NaN or infinity for finite numbers")


@contextmanager
def _pure(name: str, *arguments: Any) -> Iterator[None]:
    """Check that a block modifies no argument, and draws nothing from the global generators, since results would then
    depend on earlier draws."""
    expected, generators = copy.deepcopy(arguments), (torch.get_rng_state(), np.random.get_state())  # noqa: NPY002
    yield
    same_generators = _same_bits((torch.get_rng_state(), np.random.get_state()), generators)  # noqa: NPY002
    _expect(same_generators, f"{name} draws from a global generator: draw from its key")
    _expect(_same_bits(arguments, expected), f"{name} modifies its arguments")


def _call_twice(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, after checking that it is pure and gives the same result again."""
    with _pure(name, *arguments):
        first, second = call(*arguments), call(*copy.deepcopy(arguments))
    _expect(_same_bits(first, second), f"{name} gives another result the second time: state goes in and comes out")
    return first


def _check_refused(text: str, error: type[Exception], call: Any, *arguments: Any, **options: Any) -> None:
    """Check that a call raises an error."""
    try:
        call(*arguments, **options)
    except error:
        return
    except Exception as other:
        raise ContractError(f"{text}: raises {other!r}, expected a {error.__name__}") from other
    raise ContractError(text)


def _check_server(component: ServerTransform, dim: int = 33) -> None:
    """Pure, with the vector's shape and dtype, a state that a checkpoint can store, and no hidden state."""
    for dtype in _DTYPES:
        x = _vector(dim, 0, dtype)
        state = _call_twice("init", component.init, x)
        _expect(isinstance(state, dict), f"init gives a {type(state).__name__}, expected a dict")
        for round in range(4):
            to_json(state, "state", {})
            ctx = RoundContext(round, Population(_SAMPLES), (0, 2, 3))
            delta = _vector(dim, round + 1, dtype) if round != 2 else torch.zeros(dim, dtype=dtype)
            step, state = _call_twice("update", component.update, delta, state, ctx)
            _check_vector("update", step, dim, dtype)


def _check_aggregator(component: Aggregator, dim: int = 29) -> None:
    """Independent of arrival order, with correct declarations."""
    declared = with_defaults(component, BaseAggregator)
    minimum, rows = declared.min_updates, declared.momentum_storage
    valid = isinstance(minimum, int) and minimum >= 0
    _expect(valid, f"declares min_updates = {minimum!r}, expected a whole number >= 0")
    _expect(rows in ("ram", "disk"), f"declares momentum_storage = {rows!r}, expected 'ram' or 'disk'")
    rule_or_numbers(type(component).__name__, "weights", declared.weights, "uniform", "samples", "clusters")
    for dtype in _DTYPES:
        maximum = max(minimum, 5) + 1
        people = Population((_SAMPLES * (1 + 2 * maximum // len(_SAMPLES)))[: 2 * maximum])
        state = _call_twice("init", component.init, dim, people.count)
        store = ClientStore()
        for round, count in enumerate((maximum, minimum, maximum)):
            clients = tuple(sorted((7 * round + 2 * index) % people.count for index in range(count)))
            updates = []
            for index, client in enumerate(clients):
                loss = None if index == 1 else 0.5 + index
                vector = _vector(dim, 100 * round + index, dtype)
                updates.append(Update(client, index % 3, vector, people.samples[client], 1.0 + index, loss))
            ctx = RoundContext(round, _with_client_stats(declared, people), clients, store)
            with _pure("combine", [update.vector for update in updates], state):
                combined = component.combine(updates, state, ctx)
            _expect(
                isinstance(combined, Combined), f"combine gives a {type(combined).__name__}, expected Combined(...)"
            )
            vector = combined.vector if updates else combined.vector.to(dtype)  # without updates it has no dtype
            _check_vector("combine", vector, dim, dtype)
            for shuffled in (updates[::-1], [*updates[1::2], *updates[::2]]):
                reordered = component.combine(shuffled, state, ctx)
                equal = _same_bits((reordered.vector, reordered.state), (combined.vector, combined.state))
                _expect(equal, "the order in which updates arrive matters")
            to_json(combined.state, "state", {})
            unknown = set(combined.rows) - set(range(people.count))
            _expect(not unknown, f"keeps rows of {sorted(unknown)}, which are not clients")
            store.commit(round, {client: dict(rows) for client, rows in combined.rows.items()})
            state = combined.state


def _with_client_stats(component: BaseAggregator | BaseSampler, population: Population) -> Population:
    """Return the population with statistics of some clients, if the component needs them."""
    if not component.needs_client_stats:
        return population
    clients = range(0, population.count, 3)
    stats = ClientStats.empty(population.count).updated({c: 0.1 * c for c in clients}, {c: 1.0 + c for c in clients})
    return replace(population, stats=stats)


def _check_sampler(component: Sampler) -> None:
    """Clients of the population in ascending order, as a function of (round, population, key)."""
    bound = with_defaults(component, BaseSampler).bind(((0, 2, 4, 6), (1, 3, 5, 7), (8, 9, 10, 11)))
    with_defaults(bound, BaseSampler).check(12)
    people = _with_client_stats(with_defaults(bound, BaseSampler), Population(_SAMPLES[:12]))
    for seed in range(3):
        for round in (0, 1, 2, 7):
            selected = _call_twice("select", bound.select, round, people, Key(seed))
            _expect(isinstance(selected, tuple), f"select gives a {type(selected).__name__}, expected a tuple")
            _expect(len(selected) > 0, f"select selects no client in round {round}")
            valid = all(type(client) is int and 0 <= client < 12 for client in selected)
            _expect(valid, f"select gives {selected}: expected clients 0 to 11, as int")
            _expect(list(selected) == sorted(set(selected)), f"select gives {selected}: not ascending, or one twice")


def _check_compressor(component: Compressor) -> None:
    """Packets have their declared kind and size and decode to one C(x); C(0) = 0; the contraction holds; non-finite
    input is an error; invalid bytes raise only a `PacketError`."""
    for dtype in _DTYPES:
        for dim in _SIZES:
            _check_roundtrip(component, _vector(dim, dim, dtype))
            zero = torch.zeros(dim, dtype=dtype)
            _expect(_same_bits(decode(component.encode(zero, _KEY), component, dim=dim), zero), "C(0) is not 0")
        for bad in (math.nan, math.inf, -math.inf):
            x = _vector(_SIZES[-1], 1, dtype)
            x[len(x) // 3] = bad
            _check_refused(f"encodes a vector with {bad}", HansaError, component.encode, x, _KEY)
        _check_hostile_payloads(component, _vector(_SIZES[-1], 2, dtype))
    q = with_defaults(component, Coder).contraction(_SIZES[-1])
    _expect(q >= 0, f"declares a contraction of {q}")
    if math.isfinite(q):
        _check_contraction(component, q)


def _check_roundtrip(component: Compressor, x: Tensor) -> None:
    dim, dtype = x.numel(), x.dtype
    data = _call_twice("encode", lambda x: bytes(component.encode(x, _KEY).bytes), x)
    packet, expected_kind = component.encode(x, _KEY), packet_kind(component)
    _expect(packet.nbytes == len(data), f"says {packet.nbytes} bytes, makes {len(data)}")
    _expect(packet.kind == expected_kind, f"makes packets of kind {packet.kind!r}, its kind is {expected_kind!r}")
    limit = component.max_nbytes(dim, dtype)
    _expect(packet.nbytes <= limit, f"makes {packet.nbytes} bytes of {dim} entries, max_nbytes says {limit}")
    try:
        vectors = [decode(source, component, dim=dim, dtype=dtype) for source in (packet, data, bytearray(data))]
        residual = accumulate(data, x.clone(), -1.0, component)
    except Exception as problem:
        raise ContractError(f"does not read its own packet of {dim} entries: {problem!r}") from problem
    _expect(all(_same_bits(v, vectors[0]) for v in vectors), "decodes the same bytes to several vectors")
    _expect(_same_bits(residual, x - vectors[0]), "accumulate(-1) to x is not x - decode")


def _check_hostile_payloads(component: Compressor, x: Tensor) -> None:
    """Check invalid payloads in otherwise valid packets."""
    dim, dtype = x.numel(), floats(x.dtype)
    good = bytes(Packet.parse(bytes(component.encode(x, _KEY).bytes)).payload())
    draw = np.random.default_rng(0)
    bad = [good[:length] for length in {0, 1, len(good) // 2, len(good) - 1}] + [good + b"\0", b"\xff" * len(good)]
    for _ in range(60):
        damaged = bytearray(good or b"\0")
        damaged[int(draw.integers(len(damaged)))] ^= 1 << int(draw.integers(8))
        bad.append(bytes(damaged))
    like = np.broadcast_to(dtype.type(0), (dim,))
    for payload in bad:
        data = bytes(make_packet(packet_kind(component), like, [payload]).bytes)
        out = torch.ones(dim, dtype=x.dtype)
        try:
            decoded = decode(data, component, dim=dim)
            accumulate(data, out, 1.0, component)
        except PacketError:
            _expect((out == 1).all(), "accumulate changes its vector although it refuses the packet")
            continue
        except Exception as error:
            raise ContractError(f"raises {error!r} for invalid bytes, expected a PacketError") from error
        _check_vector("decode of invalid bytes", decoded, dim, x.dtype)


def _check_contraction(component: Compressor, q: float) -> None:
    """Check E|C(x) - x|^2 <= q^2 |x|^2 for vectors of several kinds."""
    draw, dim = np.random.default_rng(1), _SIZES[-1]
    for numbers in (draw.standard_normal(dim), draw.standard_cauchy(dim), np.ones(dim), np.eye(dim)[0]):
        x = torch.from_numpy(numbers)
        residuals = [decode(component.encode(x, _KEY.child(i)), component, dim=dim) - x for i in range(_DRAWS)]
        errors = torch.stack(residuals).square().sum(1).numpy() / float(x.square().sum())
        slack = 4 * errors.std() / math.sqrt(_DRAWS) + 1e-9
        _expect(errors.mean() <= q * q + slack, f"E|C(x)-x|^2 = {errors.mean():.3g} |x|^2, declared {q * q:.3g}")


def _check_uplink(component: Uplink, dim: int = 97) -> None:
    """``send`` is pure and returns the declared rows; ``receive`` decodes its packets and rejects those of another size
    or kind."""
    names = with_defaults(component, BaseUplink).memory
    for dtype in _DTYPES:
        memory: dict[str, Tensor] = {}
        for turn in range(3):
            x = _vector(dim, turn, dtype)
            with _pure("send", x, memory):
                packet, rows = component.send(x, memory, _KEY.child(turn))
                repeated, same_rows = component.send(x, memory, _KEY.child(turn))
            _expect(set(rows) == set(names), f"keeps the rows {sorted(rows)}, declares {sorted(names)}")
            equal = bytes(packet.bytes) == bytes(repeated.bytes) and _same_bits(rows, same_rows)
            _expect(equal, "send gives another result the second time: all memory is in its rows")
            _expect(packet.nbytes == len(packet.bytes), f"says {packet.nbytes} bytes, sends {len(packet.bytes)}")
            received = component.receive(packet, dim=dim, dtype=dtype)
            carried = component.receive(Packet.parse(bytes(packet.bytes)), dim=dim, dtype=dtype)
            _expect(_same_bits(received, carried), "receives another vector from the bytes of the packet")
            _check_vector("receive", received, dim, dtype)
            memory = dict(rows)
        foreign = make_packet("stranger", x.numpy(), [x.numpy()[:1]])
        for bad, size, fault in ((packet, dim + 1, "another size"), (foreign, dim, "another kind")):
            text = f"receives a packet of {fault}"
            _check_refused(text, PacketError, component.receive, bad, dim=size, dtype=dtype)


def _check_downlink(component: Downlink, dim: int = 64, clients: int = 4, rounds: int = 14) -> None:
    """Every recipient of a round's message decodes the round's vector bit for bit, whatever it missed before;
    ``broadcast`` and ``acknowledge`` are pure and the state is plain."""
    for dtype in _DTYPES:
        x = _vector(dim, 0, dtype)
        state = _call_twice("init", component.init, x)
        public = x.clone() if getattr(component, "public_start", True) else None
        states: list[tuple[Tensor | None, int]] = [(public, 0)] * clients  # vector and version of each client
        earlier = list(states)  # before the last message
        merges = isinstance(getattr(component, "compressor", None), grid)
        draw = np.random.default_rng(3)
        for round in range(rounds):
            x = x + (0.1 * _vector(dim, round + 1, dtype) if round % 5 else 0.0)
            participants = [client for client in range(clients) if draw.random() < 0.6] or [round % clients]
            with _pure("broadcast", x, state):
                broadcast, new_state = component.broadcast(x, state, participants, round, _KEY.child(round))
                repeated, _ = component.broadcast(x, state, participants, round, _KEY.child(round))
            _expect(_same_bits(repeated.vector, broadcast.vector), "broadcast gives another vector the second time")
            to_json(new_state, "state", {})
            for client in participants:
                packets = [Packet.parse(bytes(packet.bytes)) for packet in broadcast.packets(client)]
                base, current = broadcast.bases[client], states[client]
                if base is not None and merges:
                    current = current if base == current[1] else earlier[client]
                elif base is not None:
                    packets = packets[current[1] - base :]
                vector = component.apply(current[0], packets)
                states[client], earlier[client] = (vector, int(new_state.get("version", 0))), current
                _expect(_same_bits(vector, broadcast.vector), f"client {client} holds another vector in round {round}")
            answered = [client for client in participants if draw.random() < 0.8]
            state = _call_twice("acknowledge", component.acknowledge, new_state, answered, round)


def _check_solver(component: Solver, dim: int = 23) -> None:
    """Reports on its declared channels, keeps its declared rows, and has its declared correction."""
    declared = with_defaults(component, BaseSolver)
    for dtype in _DTYPES:
        names = (MODEL, *declared.channels, *declared.receives)
        received = {name: _vector(dim, index, dtype) for index, name in enumerate(names)}
        memory: dict[str, Tensor] = {}
        for round in range(3):
            correction = _call_twice("correction", component.correction, received, memory)
            _expect(isinstance(correction, Correction), "correction returns no Correction(prox_weight, shift)")
            weight, weight_declared = correction.prox_weight, declared.prox_weight
            same_weight = weight == weight_declared
            _expect(same_weight, f"its correction has prox_weight {weight}, but it declares {weight_declared}")
            if correction.shift is not None:
                _check_vector("shift of correction", correction.shift, dim, dtype)
            change = _vector(dim, 10 + round, dtype)
            finished = _call_twice("finish", component.finish, change, 3 + round, 0.05, received, memory)
            _expect(isinstance(finished, SolverResult), "finish returns no SolverResult(reports, memory)")
            for verb, returned, expected in (
                ("reports on", finished.reports, declared.channels),
                ("keeps the rows", finished.memory, declared.memory),
            ):
                _expect(set(returned) == set(expected), f"{verb} {sorted(returned)}, declares {sorted(expected)}")
            for name, row in {**finished.reports, **finished.memory}.items():
                _check_vector(f"{name} of finish", row, dim, dtype)
            memory = dict(finished.memory)
        if declared.ascent_offset is not None:
            gradients = [_vector(4, 1, dtype), _vector(6, 2, dtype).reshape(2, 3)]
            shapes = [tuple(offset.shape) for offset in _call_twice("ascent_offset", declared.ascent_offset, gradients)]
            _expect(shapes == [(4,), (2, 3)], f"ascent_offset returns {shapes} for gradients of [(4,), (2, 3)]")


def _check_loop(component: ClientLoop) -> None:
    """Its traits and its arguments; what it trains is the user's own model, which is not here."""
    require_loop("check", "loop", component)
    declared = with_defaults(component, BaseClientLoop)
    for name in ("channels", "receives"):
        names = getattr(declared, name)
        fits = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
        _expect(fits, f"declares {name} = {names!r}, expected a tuple of channels")


def _check_work(component: LocalWork, population: int = 5) -> None:
    """Integer steps and a batch no larger than the client's data, as a function of the arguments."""
    declared = with_defaults(component, BaseLocalWork)
    declared.check(population)
    for client in range(population):
        for samples in (1, 13, 200):
            for batch_size in (None, 1, 20):
                work = _call_twice("draw", component.draw, client, samples, batch_size, Key(3).child(client))
                _expect(isinstance(work, Work), f"draw gives a {type(work).__name__}, expected Work(...)")
                steps, batch = work
                _expect(type(steps) is int and steps >= 1, f"draw gives {steps!r} steps")
                valid = type(batch) is int and 1 <= batch <= samples
                _expect(valid, f"draw gives a batch of {batch!r} to a client with {samples} samples")
                common = declared.common
                _expect(common in (None, steps), f"draw gives {steps} steps, but common = {common} for all")


def _check_topology(component: Topology) -> None:
    """One doubly stochastic matrix for every accepted size, connected unless declared otherwise."""
    refused: HansaError | None = None
    largest = 0
    for n in (1, 2, 3, 4, 5, 8, 16):
        try:
            dense = _call_twice("topology(n)", component, n)
        except HansaError as problem:
            refused = problem
            continue
        largest = n
        _expect(dense.shape == (n, n), f"is {tuple(dense.shape)} for {n} clients")
        sparse = torch.from_numpy(component.sparse(n).toarray())
        _expect(torch.equal(dense, sparse), f"sparse({n}) is another matrix than topology({n})")
        components = connected_components(np.asarray(dense) != 0, directed=True, connection="strong")[0]
        _expect(components == 1 or not component.connected, f"falls into {components} pieces for {n} clients")
        mean, identity = torch.full_like(dense, 1 / n), torch.eye(n, dtype=dense.dtype)
        averages = not component.averages or torch.allclose(dense, mean, rtol=0, atol=1e-12)
        _expect(averages, f"averages, but W is not 11'/n for n = {n}")
        _expect(not component.isolates or torch.equal(dense, identity), f"isolates, but W is not I for n = {n}")
    if largest < 2 and refused is not None:
        raise refused


def _check_activity(component: Activity) -> None:
    """Clients of the cohort in ascending order, as a function of (round, step, cohort, key)."""
    cohorts, steps = ((0, 1, 2, 3), (4, 5, 6, 7)), 3
    with_defaults(component, BaseActivity).check(cohorts, steps)
    for cohort in cohorts:
        rule = with_defaults(component, BaseActivity).among(cohort[:2])
        for round in range(3):
            for step in range(steps):
                for clients in (cohort, cohort[::-1], cohort[1:]):
                    active = _call_twice("draw", rule.draw, round, step, clients, Key(round))
                    _expect(set(active) <= set(clients), f"draw gives {active} of the cohort {list(clients)}")
                    _expect(list(active) == sorted(set(active)), f"draw gives {active}: not ascending")
                orders = [list(rule.draw(round, step, clients, Key(round))) for clients in (cohort, cohort[::-1])]
                _expect(orders[0] == orders[1], "draw depends on the order of the cohort")


def _check_mixing_rule(component: MixingRule, dim: int = 5, neighbours: int = 4) -> None:
    """A pure function that keeps a model on which all neighbours agree."""
    model, *received = (_vector(dim, seed, torch.float64) for seed in range(neighbours + 1))
    weights = [1 / (neighbours + 1)] * neighbours
    _check_vector("combine", _call_twice("combine", component.combine, model, received, weights), dim, model.dtype)
    agreed = component.combine(model, [model.clone() for _ in received], weights)
    _expect(torch.allclose(agreed, model, rtol=0, atol=1e-12), "moves a model on which all neighbours agree")
    _expect(torch.equal(component.combine(model, [], []), model), "moves a model that has no neighbours")


def _check_clustering(component: Clustering, population: int = 12, classes: int = 4) -> None:
    """Every client in one cluster, as a function of (population, key, labels)."""
    labels = np.random.default_rng(0).integers(0, 9, (population, classes))
    _call_twice("assign", resolve, component, population, Key(1), labels)


_CONTRACTS: Mapping[type, Callable[[Any], None]] = {
    Topology: _check_topology,
    Clustering: _check_clustering,
    Compressor: _check_compressor,
    Uplink: _check_uplink,
    Downlink: _check_downlink,
    Aggregator: _check_aggregator,
    MixingRule: _check_mixing_rule,
    ServerTransform: _check_server,
    Sampler: _check_sampler,
    Solver: _check_solver,
    ClientLoop: _check_loop,
}
"""The kinds of components that their methods distinguish, and their checks."""
