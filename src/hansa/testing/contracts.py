"""The contracts of components: each function checks one kind; a `ContractError` names the requirement that fails."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from hansa.aggregate import Aggregator, BaseAggregator
from hansa.aggregate.base import Combined, check_weights
from hansa.compress import Coder, Compressor, Downlink, Packet, PacketError, Uplink, accumulate, decode
from hansa.compress.base import Mergeable, packet_kind
from hansa.compress.packet import floats, make_packet
from hansa.compress.uplink import BaseUplink
from hansa.core.citations import check_citations
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import missing_methods, with_defaults
from hansa.core.types import MODEL, ClientStats, Population, RoundContext, State, Update
from hansa.gossip import Activity, BaseActivity, BaseClustering, Clustering, MixingRule, Topology
from hansa.local import Correction, LocalWork, Solver, SolverResult, Work
from hansa.local.solvers import BaseSolver
from hansa.local.work import BaseLocalWork
from hansa.runs.store import RamStore
from hansa.sample import BaseSampler, Sampler
from hansa.server import ServerTransform

DTYPES = (torch.float32, torch.float64)
SAMPLES = (5, 60, 1, 17, 8, 33, 2, 9, 21, 4, 13, 6)
KEY = Key(9)
DRAWS = 60


class ContractError(AssertionError):
    """A requirement that a component violates.

    >>> issubclass(ContractError, AssertionError)
    True
    """


def require(condition: object, component: object, text: str) -> None:
    """Raise unless the condition holds, naming the component and the requirement."""
    if not condition:
        raise ContractError(f"{component!r}: {text}")


def check_component_contract(component: object, protocol: type) -> None:
    """Check the common requirements: the protocol's methods, a repr that is equal in every process, known citations."""
    missing = missing_methods(component, protocol)
    require(not missing, component, f"lacks {', '.join(missing)} of {protocol.__name__}")
    require(not isinstance(component, type), component, "is a class: give a part that was made of it")
    require(
        " at 0x" not in repr(component),
        component,
        "its repr has an address: make it a dataclass, so that runs can resume",
    )
    try:
        check_citations([component])
    except HansaError as problem:
        raise ContractError(f"{component!r}: {problem}") from problem


def vector(dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, a tenth of them zero."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.standard_normal(dim) * (draw.random(dim) > 0.1)).to(dtype)


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two trees are bit-identical."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return False
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def unsupported_state(tree: Any, place: str = "state") -> str:
    """Return where a tree holds a value that a checkpoint cannot store without pickle; empty if there is none."""
    if isinstance(tree, Mapping):
        wrong = [name for name in tree if not isinstance(name, str)]
        if wrong:
            return f"{place} has the key {wrong[0]!r}, which is no string"
        return next(
            (problem for name, item in tree.items() if (problem := unsupported_state(item, f"{place}[{name!r}]"))), ""
        )
    if isinstance(tree, list):
        return next(
            (problem for at, item in enumerate(tree) if (problem := unsupported_state(item, f"{place}[{at}]"))), ""
        )
    if tree is None or isinstance(tree, (bool, int, float, str, Tensor)):
        return ""
    return f"{place} is a {type(tree).__name__}"


def all_finite_tree(tree: Any) -> bool:
    """Return whether all numbers of a tree are finite."""
    if isinstance(tree, Tensor):
        return not tree.is_floating_point() or bool(torch.isfinite(tree).all())
    if isinstance(tree, Mapping):
        return all(all_finite_tree(item) for item in tree.values())
    if isinstance(tree, (list, tuple)):
        return all(all_finite_tree(item) for item in tree)
    return not isinstance(tree, float) or math.isfinite(tree)


def call_twice(component: object, name: str, call: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
    """Return the result of a call, after checking that it is pure: it modifies no argument, draws no global random
    numbers, and gives the same result again."""
    before = copy.deepcopy(list(arguments))
    with no_global_draws(component, name):
        first = call(*arguments, **options)
        second = call(*copy.deepcopy(before), **options)
    require(same_bits(list(arguments), before), component, f"{name} changes what it is given")
    require(
        same_bits(first, second), component, f"{name} gives another result the second time: state goes in and comes out"
    )
    return first


@contextmanager
def no_global_draws(component: object, name: str) -> Iterator[None]:
    """Raise if the block draws from the global generators, because results would depend on earlier draws."""
    torch_state, numpy_state = torch.get_rng_state(), _numpy_state()
    yield
    touched = not torch.equal(torch_state, torch.get_rng_state()) or numpy_state != _numpy_state()
    require(not touched, component, f"{name} draws from a global generator: draw from the key it is given")


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tobytes(), int(state[2])


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
        again, _ = component.update(vector(dim, 2, dtype), copy.deepcopy(states[1]), ctx)
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
        before = copy.deepcopy([update.vector for update in updates]), copy.deepcopy(state)
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


@dataclass(frozen=True, slots=True)
class _Stranger(Coder):
    """A compressor whose packets no link accepts."""

    def payload(self, x: Any, key: Key) -> list[Any]:
        return [x[:1]]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return itemsize


def check_compressor(component: Compressor, sizes: Sequence[int] = (1, 2, 7, 8, 64, 500)) -> None:
    """Check a compressor.

    Packets have their declared kind and size and decode to one C(x); C(0) = 0; the contraction holds; non-finite input
    is an error; invalid bytes raise only a `PacketError`.

    >>> from hansa.compress import sign
    >>> check_compressor(sign())
    """
    check_component_contract(component, Compressor)
    for dtype in DTYPES:
        for dim in sizes:
            _check_roundtrip(component, vector(dim, dim, dtype))
            zero = torch.zeros(dim, dtype=dtype)
            require(
                same_bits(decode(component.encode(zero, KEY), component, dim=dim), zero), component, "C(0) is not 0"
            )
        for bad in (math.nan, math.inf, -math.inf):
            x = vector(sizes[-1], 1, dtype)
            x[len(x) // 3] = bad
            _check_refused(component, f"encodes a vector with {bad}", HansaError, component.encode, x, KEY)
        _check_hostile_payloads(component, vector(sizes[-1], 2, dtype))
    _check_contraction(component, sizes[-1])


def _check_roundtrip(component: Compressor, x: Tensor) -> None:
    dim, dtype = x.numel(), x.dtype
    data = call_twice(component, "encode", lambda x: bytes(component.encode(x, KEY).bytes), [x])
    packet, kind = component.encode(x, KEY), packet_kind(component)
    require(packet.nbytes == len(data), component, f"says {packet.nbytes} bytes, makes {len(data)}")
    require(packet.kind == kind, component, f"makes packets of kind {packet.kind!r}, its kind is {kind!r}")
    most = component.max_nbytes(dim, dtype)
    require(packet.nbytes <= most, component, f"makes {packet.nbytes} bytes of {dim} entries, max_nbytes says {most}")
    try:
        vectors = [decode(source, component, dim=dim, dtype=dtype) for source in (packet, data, bytearray(data))]
        rest = accumulate(data, x.clone(), -1.0, component)
    except Exception as problem:
        raise ContractError(f"{component!r}: does not read its own packet of {dim} entries: {problem!r}") from problem
    require(all(same_bits(v, vectors[0]) for v in vectors), component, "decodes the same bytes to several vectors")
    require(same_bits(rest, x - vectors[0]), component, "what accumulate leaves of x is not x - decode")


def _check_hostile_payloads(component: Compressor, x: Tensor) -> None:
    """Check invalid payloads in otherwise valid packets."""
    dim, dtype = x.numel(), floats(x.dtype)
    good = bytes(Packet.parse(bytes(component.encode(x, KEY).bytes)).payload())
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
            require(bool((out == 1).all()), component, "a refused packet changes the vector it was to be added to")
            continue
        except Exception as error:
            raise ContractError(
                f"{component!r}: raises {error!r} for bytes it did not write, expected a PacketError"
            ) from error
        require(
            decoded.shape == x.shape and all_finite_tree(decoded),
            component,
            "reads what it did not write as no proper vector",
        )


def _check_contraction(component: Compressor, dim: int) -> None:
    q = with_defaults(component, Coder).contraction(dim)
    require(q >= 0, component, f"declares a contraction of {q}")
    if math.isinf(q):
        return
    draw = np.random.default_rng(1)
    for x in map(
        torch.from_numpy, (draw.standard_normal(dim), draw.standard_cauchy(dim), np.ones(dim), np.eye(dim)[0])
    ):
        errors = np.array([_error(component, x, KEY.child(i)) for i in range(DRAWS)]) / float(x.square().sum())
        slack = 4 * errors.std() / math.sqrt(DRAWS) + 1e-9
        require(
            errors.mean() <= q * q + slack, component, f"E|C(x)-x|^2 = {errors.mean():.3g} |x|^2, declared {q * q:.3g}"
        )


def _error(component: Compressor, x: Tensor, key: Key) -> float:
    return float((decode(component.encode(x, key), component, dim=x.numel()) - x).square().sum())


def check_uplink(component: Uplink, dim: int = 97) -> None:
    """Check an uplink: ``send`` is pure and returns the declared rows; ``receive`` decodes its packets and rejects
    those of another size or kind.

    >>> from hansa.compress import error_feedback, sign
    >>> check_uplink(error_feedback(sign()))
    """
    check_component_contract(component, Uplink)
    names = with_defaults(component, BaseUplink).memory
    for dtype in DTYPES:
        memory: dict[str, Tensor] = {}
        for turn in range(3):
            x = vector(dim, turn, dtype)
            before = copy.deepcopy((x, memory))
            packet, rows = component.send(x, memory, KEY.child(turn))
            again, same_kept = component.send(x, memory, KEY.child(turn))
            require(same_bits((x, memory), before), component, "send changes what it is given")
            require(set(rows) == set(names), component, f"keeps the rows {sorted(rows)}, declares {sorted(names)}")
            equal = bytes(packet.bytes) == bytes(again.bytes) and same_bits(rows, same_kept)
            require(equal, component, "send gives another result the second time: all memory is in its rows")
            require(
                packet.nbytes == len(packet.bytes), component, f"says {packet.nbytes} bytes, sends {len(packet.bytes)}"
            )
            received = component.receive(packet, dim=dim, dtype=dtype)
            carried = component.receive(Packet.parse(bytes(packet.bytes)), dim=dim, dtype=dtype)
            require(
                same_bits(received, carried),
                component,
                "receives another vector once the packet has travelled as bytes",
            )
            require(
                (received.dtype, received.shape) == (dtype, x.shape),
                component,
                "receives another dtype or shape than was sent",
            )
            _check_refused(
                component,
                "receives a packet of another size",
                PacketError,
                component.receive,
                packet,
                dim=dim + 1,
                dtype=dtype,
            )
            memory = dict(rows)
        stranger = _Stranger().encode(x, KEY)
        _check_refused(
            component,
            "receives a packet of a kind it never sends",
            PacketError,
            component.receive,
            stranger,
            dim=dim,
            dtype=dtype,
        )


@dataclass(slots=True)
class _Listener:
    """A client: its vector, its version, and its vector before the last message."""

    vector: Tensor | None
    version: int = 0
    before: tuple[Tensor | None, int] = (None, 0)


def check_downlink(component: Downlink, dim: int = 64, clients: int = 4, rounds: int = 14) -> None:
    """Check a downlink.

    Every recipient of a round's message holds the round's vector, bit for bit, whatever it missed before;
    ``broadcast`` and ``acknowledge`` are pure and the state is plain.

    >>> from hansa.compress import replica, sign
    >>> check_downlink(replica(sign()))
    """
    check_component_contract(component, Downlink)
    for dtype in DTYPES:
        x = vector(dim, 0, dtype)
        state = call_twice(component, "init", component.init, [x])
        public = x.clone() if getattr(component, "public_start", True) else None
        listeners = {client: _Listener(public, 0, (public, 0)) for client in range(clients)}
        draw = np.random.default_rng(3)
        for round in range(rounds):
            x = x + (0.1 * vector(dim, round + 1, dtype) if round % 5 else 0.0)
            participants = [client for client in range(clients) if draw.random() < 0.6] or [round % clients]
            before = copy.deepcopy((x, state))
            broadcast, after = component.broadcast(x, state, participants, round, KEY.child(round))
            again, _ = component.broadcast(x, state, participants, round, KEY.child(round))
            require(same_bits((x, state), before), component, "broadcast changes what it is given")
            require(
                same_bits(again.vector, broadcast.vector), component, "broadcast gives another vector the second time"
            )
            problem = unsupported_state(after)
            require(not problem, component, f"{problem}: a checkpoint holds tensors, numbers, strings, lists and dicts")
            for client in participants:
                got = _receive(component, listeners[client], broadcast, client, after)
                require(
                    same_bits(got, broadcast.vector),
                    component,
                    f"client {client} holds another vector in round {round}",
                )
            answered = [client for client in participants if draw.random() < 0.8]
            state = call_twice(component, "acknowledge", component.acknowledge, [after, answered, round])


def _receive(component: Downlink, listener: _Listener, broadcast: Any, client: int, state: State) -> Tensor:
    """Return the vector that a client decodes from the bytes of its message, starting from the right version."""
    packets = [Packet.parse(bytes(packet.bytes)) for packet in broadcast.packets(client)]
    base, previous = broadcast.bases[client], (listener.vector, listener.version)
    if base is not None and isinstance(getattr(component, "compressor", None), Mergeable):
        previous = previous if base == listener.version else listener.before
    elif base is not None:
        packets = packets[listener.version - base :]
    listener.vector, listener.before = component.apply(previous[0], packets), previous
    listener.version = int(state.get("version", 0))
    return listener.vector


def _check_refused(
    component: object, text: str, error: type[Exception], call: Any, *arguments: Any, **options: Any
) -> None:
    """Require that a call raises an error."""
    try:
        call(*arguments, **options)
    except error:
        return
    except Exception as other:
        raise ContractError(f"{component!r}: {text}: raises {other!r}, expected a {error.__name__}") from other
    raise ContractError(f"{component!r}: {text}")


def check_solver(component: Solver, dim: int = 23) -> None:
    """Check a local solver: it reports on its declared channels, keeps its declared rows, and a is its prox_weight.

    >>> from hansa.local import prox
    >>> check_solver(prox(0.1))
    """
    check_component_contract(component, Solver)
    channels, memory = with_defaults(component, BaseSolver).channels, with_defaults(component, BaseSolver).memory
    receives, prox_weight = (
        with_defaults(component, BaseSolver).receives,
        with_defaults(component, BaseSolver).prox_weight,
    )
    for dtype in DTYPES:
        got = {name: vector(dim, place, dtype) for place, name in enumerate((MODEL, *channels, *receives))}
        memory_rows: dict[str, torch.Tensor] = {}
        for round in range(3):
            correction = call_twice(component, "correction", component.correction, [got, memory_rows])
            require(
                isinstance(correction, Correction), component, "correction returns no Correction(prox_weight, shift)"
            )
            require(
                correction.prox_weight == prox_weight,
                component,
                f"its correction has prox_weight {correction.prox_weight}, but it declares {prox_weight}",
            )
            if correction.shift is not None:
                _check_form(component, "s of correction", correction.shift, dim, dtype)
            change = vector(dim, 10 + round, dtype)
            finished = call_twice(component, "finish", component.finish, [change, 3 + round, 0.05, got, memory_rows])
            require(isinstance(finished, SolverResult), component, "finish returns no SolverResult(reports, memory)")
            reports = set(finished.reports)
            require(reports == set(channels), component, f"reports on {sorted(reports)}, declares {sorted(channels)}")
            kept_rows = set(finished.memory)
            require(
                kept_rows == set(memory), component, f"keeps the rows {sorted(kept_rows)}, declares {sorted(memory)}"
            )
            for name, row in {**finished.reports, **finished.memory}.items():
                _check_form(component, f"{name} of finish", row, dim, dtype)
            memory_rows = dict(finished.memory)
        offset_of = with_defaults(component, BaseSolver).ascent_offset
        if offset_of is not None:
            gradients = [vector(4, 1, dtype), vector(6, 2, dtype).reshape(2, 3)]
            offset = call_twice(component, "ascent_offset", offset_of, [gradients])
            shapes = [tuple(e.shape) for e in offset]
            require(
                shapes == [(4,), (2, 3)], component, f"ascent_offset returns {shapes} for gradients of [(4,), (2, 3)]"
            )


def _check_form(component: Solver, place: str, row: torch.Tensor, dim: int, dtype: torch.dtype) -> None:
    form = (row.dtype, tuple(row.shape))
    require(form == (dtype, (dim,)), component, f"{place} is {form[0]} {form[1]} for {dtype} ({dim},)")
    require(all_finite_tree(row), component, f"{place} has NaN or infinity")


def check_work(component: LocalWork, population: int = 5) -> None:
    """Check local work: integer steps and a batch no larger than the client's data, as a function of its arguments.

    >>> from hansa.local import fixed
    >>> check_work(fixed(3))
    """
    check_component_contract(component, LocalWork)
    with_defaults(component, BaseLocalWork).check(population)
    common = with_defaults(component, BaseLocalWork).common
    for client in range(population):
        for samples in (1, 13, 200):
            for batch_size in (None, 1, 20):
                work = call_twice(
                    component, "draw", component.draw, [client, samples, batch_size, Key(3).child(client)]
                )
                require(isinstance(work, Work), component, f"draw gives a {type(work).__name__}, expected Work(...)")
                steps, batch = work
                require(type(steps) is int and steps >= 1, component, f"draw gives {steps!r} steps")
                fills = type(batch) is int and 1 <= batch <= samples
                require(fills, component, f"draw gives a batch of {batch!r} to a client with {samples} samples")
                require(common in (None, steps), component, f"draw gives {steps} steps, but common = {common} for all")


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


CONTRACTS: tuple[tuple[type, Callable[[Any], None]], ...] = (
    (Topology, check_topology),
    (Clustering, check_clustering),
    (Compressor, check_compressor),
    (Uplink, check_uplink),
    (Downlink, check_downlink),
    (Aggregator, check_aggregator),
    (MixingRule, check_mixing_rule),
    (ServerTransform, check_server),
    (Sampler, check_sampler),
    (Solver, check_solver),
)
"""The kinds of components whose methods tell them apart, and their checks."""


def contracts_of(component: object) -> list[Callable[[Any], None]]:
    """Return the checks of a component's kinds, which its methods tell: `direct` is an uplink and a downlink."""
    draw = getattr(component, "draw", None)
    if callable(draw):  # of local work for a client, of an activity for a round
        return [check_work if next(iter(signature(draw).parameters), "") == "client" else check_activity]
    kinds = {protocol: contract for protocol, contract in CONTRACTS if not missing_methods(component, protocol)}
    if Aggregator in kinds:
        kinds.pop(MixingRule)  # both combine
    return list(kinds.values())


def check(component: object) -> None:
    """Check that a component of any kind satisfies its protocol; a `ContractError` names the requirement that it fails.

    Args:
        component: An object that takes part in a round: a compressor, a server transform, a sampler, a topology, ...

    >>> from hansa import compress, gossip, server
    >>> for component in (compress.sign(), server.adam(), gossip.ring()):
    ...     check(component)
    """
    found = [] if isinstance(component, type) else contracts_of(component)
    if not found:
        known = ", ".join(sorted(["Activity", "LocalWork", *(protocol.__name__ for protocol, _ in CONTRACTS)]))
        raise HansaError(f"check({component!r}): expected a component, with the methods of one of: {known}.")
    for contract in found:
        contract(component)
