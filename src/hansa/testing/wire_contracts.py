"""Requirements of compressors, uplinks and downlinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.compress import Coder, Compressor, Downlink, Packet, PacketError, Uplink, accumulate, decode
from hansa.compress.base import Mergeable, packet_kind
from hansa.compress.packet import floats, make_packet
from hansa.compress.uplink import BaseUplink
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import State
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

KEY = Key(9)
DRAWS = 60


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
            before = deep_copy((x, memory))
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
            before = deep_copy((x, state))
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
