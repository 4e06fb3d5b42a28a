"""What the wire's parts promise: compressors, uplinks, downlinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.compress import Coder, Compressor, Downlink, Packet, PacketError, Uplink, accumulate, decode
from hansa.compress.base import Mergeable
from hansa.compress.packet import floats, seal
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.core.types import State
from hansa.testing.promises import DTYPES, Broken, check_part, copied, finite, promise, same, twice, unplain, vector

KEY = Key(9)
DRAWS = 60


@dataclass(frozen=True, slots=True)
class _Stranger(Coder):
    """Makes packets that no link knows."""

    def payload(self, x: Any, key: Key) -> list[Any]:
        return [x[:1]]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return itemsize


def check_compressor(part: Compressor, sizes: Sequence[int] = (1, 2, 7, 8, 64, 500)) -> None:
    """A compressor: packets of their declared kind and size that decode to one C(x), C(0) = 0, an error for what is
    not finite, its contraction, and nothing but a `PacketError` for bytes that it did not write.

    >>> from hansa.compress import sign
    >>> check_compressor(sign())
    """
    check_part(part, Compressor)
    for dtype in DTYPES:
        for dim in sizes:
            _roundtrip(part, vector(dim, dim, dtype))
            zero = torch.zeros(dim, dtype=dtype)
            promise(same(decode(part.encode(zero, KEY), part, dim=dim), zero), part, "C(0) is not 0")
        for bad in (math.nan, math.inf, -math.inf):
            x = vector(sizes[-1], 1, dtype)
            x[len(x) // 3] = bad
            _refused(part, f"encodes a vector with {bad}", HansaError, part.encode, x, KEY)
        _hostile(part, vector(sizes[-1], 2, dtype))
    _contracts(part, sizes[-1])


def _roundtrip(part: Compressor, x: Tensor) -> None:
    dim, dtype = x.numel(), x.dtype
    data = twice(part, "encode", lambda x: bytes(part.encode(x, KEY).bytes), [x])
    packet = part.encode(x, KEY)
    promise(packet.nbytes == len(data), part, f"says {packet.nbytes} bytes, makes {len(data)}")
    promise(packet.kind == part.kind, part, f"makes packets of kind {packet.kind!r}, its kind is {part.kind!r}")
    most = part.max_nbytes(dim, dtype)
    promise(packet.nbytes <= most, part, f"makes {packet.nbytes} bytes of {dim} entries, max_nbytes says {most}")
    try:
        vectors = [decode(source, part, dim=dim, dtype=dtype) for source in (packet, data, bytearray(data))]
        rest = accumulate(data, x.clone(), -1.0, part)
    except Exception as problem:
        raise Broken(f"{part!r}: does not read its own packet of {dim} entries: {problem!r}") from problem
    promise(all(same(v, vectors[0]) for v in vectors), part, "decodes the same bytes to several vectors")
    promise(same(rest, x - vectors[0]), part, "what accumulate leaves of x is not x - decode")


def _hostile(part: Compressor, x: Tensor) -> None:
    """Payloads that it did not write, around which everything is right."""
    dim, dtype = x.numel(), floats(x.dtype)
    good = bytes(Packet.parse(bytes(part.encode(x, KEY).bytes)).payload())
    draw = np.random.default_rng(0)
    bad = [good[:length] for length in {0, 1, len(good) // 2, len(good) - 1}] + [good + b"\0", b"\xff" * len(good)]
    for _ in range(60):
        damaged = bytearray(good or b"\0")
        damaged[int(draw.integers(len(damaged)))] ^= 1 << int(draw.integers(8))
        bad.append(bytes(damaged))
    like = np.broadcast_to(dtype.type(0), (dim,))
    for payload in bad:
        data = bytes(seal(part.kind, like, [payload]).bytes)
        out = torch.ones(dim, dtype=x.dtype)
        try:
            found = decode(data, part, dim=dim)
            accumulate(data, out, 1.0, part)
        except PacketError:
            promise(bool((out == 1).all()), part, "a refused packet changes the vector it was to be added to")
            continue
        except Exception as error:
            raise Broken(f"{part!r}: raises {error!r} for bytes it did not write, expected a PacketError") from error
        promise(found.shape == x.shape and finite(found), part, "reads what it did not write as no proper vector")


def _contracts(part: Compressor, dim: int) -> None:
    q = declared(part, Compressor, "contraction")(dim)
    promise(q >= 0, part, f"declares a contraction of {q}")
    if math.isinf(q):
        return
    draw = np.random.default_rng(1)
    for x in map(
        torch.from_numpy, (draw.standard_normal(dim), draw.standard_cauchy(dim), np.ones(dim), np.eye(dim)[0])
    ):
        errors = np.array([_error(part, x, KEY.child(i)) for i in range(DRAWS)]) / float(x.square().sum())
        slack = 4 * errors.std() / math.sqrt(DRAWS) + 1e-9
        promise(errors.mean() <= q * q + slack, part, f"E|C(x)-x|^2 = {errors.mean():.3g} |x|^2, declared {q * q:.3g}")


def _error(part: Compressor, x: Tensor, key: Key) -> float:
    return float((decode(part.encode(x, key), part, dim=x.numel()) - x).square().sum())


def check_uplink(part: Uplink, dim: int = 97) -> None:
    """An uplink: ``send`` is pure and keeps the rows that it declares; ``receive`` reads what ``send`` made, and no
    packet of another size or kind.

    >>> from hansa.compress import error_feedback, sign
    >>> check_uplink(error_feedback(sign()))
    """
    check_part(part, Uplink)
    names = declared(part, Uplink, "memory")
    for dtype in DTYPES:
        memory: dict[str, Tensor] = {}
        for turn in range(3):
            x = vector(dim, turn, dtype)
            before = copied((x, memory))
            packet, kept = part.send(x, memory, KEY.child(turn))
            again, same_kept = part.send(x, memory, KEY.child(turn))
            promise(same((x, memory), before), part, "send changes what it is given")
            promise(set(kept) == set(names), part, f"keeps the rows {sorted(kept)}, declares {sorted(names)}")
            equal = bytes(packet.bytes) == bytes(again.bytes) and same(kept, same_kept)
            promise(equal, part, "send gives another result the second time: all memory is in its rows")
            promise(packet.nbytes == len(packet.bytes), part, f"says {packet.nbytes} bytes, sends {len(packet.bytes)}")
            found = part.receive(packet, dim=dim, dtype=dtype)
            carried = part.receive(Packet.parse(bytes(packet.bytes)), dim=dim, dtype=dtype)
            promise(same(found, carried), part, "receives another vector once the packet has travelled as bytes")
            promise(
                (found.dtype, found.shape) == (dtype, x.shape), part, "receives another dtype or shape than was sent"
            )
            _refused(
                part, "receives a packet of another size", PacketError, part.receive, packet, dim=dim + 1, dtype=dtype
            )
            memory = dict(kept)
        stranger = _Stranger().encode(x, KEY)
        _refused(
            part,
            "receives a packet of a kind it never sends",
            PacketError,
            part.receive,
            stranger,
            dim=dim,
            dtype=dtype,
        )


@dataclass(slots=True)
class _Listener:
    """A client: what it holds, of which version, and what it held before the last message."""

    held: Tensor | None
    version: int = 0
    before: tuple[Tensor | None, int] = (None, 0)


def check_downlink(part: Downlink, dim: int = 64, clients: int = 4, rounds: int = 14) -> None:
    """A downlink: everybody who is sent a round's message holds the round's vector to the bit, whatever was missed or
    lost before; ``broadcast`` and ``acknowledge`` are pure and the state is plain.

    >>> from hansa.compress import replica, sign
    >>> check_downlink(replica(sign()))
    """
    check_part(part, Downlink)
    for dtype in DTYPES:
        x = vector(dim, 0, dtype)
        state = twice(part, "init", part.init, [x])
        public = x.clone() if getattr(part, "public_start", True) else None
        listeners = {client: _Listener(public, 0, (public, 0)) for client in range(clients)}
        draw = np.random.default_rng(3)
        for round in range(rounds):
            x = x + (0.1 * vector(dim, round + 1, dtype) if round % 5 else 0.0)
            asked = [client for client in range(clients) if draw.random() < 0.6] or [round % clients]
            before = copied((x, state))
            broadcast, after = part.broadcast(x, state, asked, round, KEY.child(round))
            again, _ = part.broadcast(x, state, asked, round, KEY.child(round))
            promise(same((x, state), before), part, "broadcast changes what it is given")
            promise(same(again.vector, broadcast.vector), part, "broadcast gives another vector the second time")
            told = unplain(after)
            promise(not told, part, f"{told}: a checkpoint holds tensors, numbers, strings, lists and dicts")
            for client in asked:
                got = _heard(part, listeners[client], broadcast, client, after)
                promise(same(got, broadcast.vector), part, f"client {client} holds another vector in round {round}")
            answered = [client for client in asked if draw.random() < 0.8]
            state = twice(part, "acknowledge", part.acknowledge, [after, answered, round])


def _heard(part: Downlink, listener: _Listener, broadcast: Any, client: int, state: State) -> Tensor:
    """What a client makes of the bytes of its message: it knows on which of its versions they build."""
    packets = [Packet.parse(bytes(packet.bytes)) for packet in broadcast.packets(client)]
    base, held = broadcast.bases[client], (listener.held, listener.version)
    if base is not None and isinstance(getattr(part, "compressor", None), Mergeable):
        held = held if base == listener.version else listener.before
    elif base is not None:
        packets = packets[listener.version - base :]
    listener.held, listener.before = part.apply(held[0], packets), held
    listener.version = int(state.get("version", 0))
    return listener.held


def _refused(part: object, text: str, error: type[Exception], call: Any, *arguments: Any, **words: Any) -> None:
    """Refuse a part that does not refuse."""
    try:
        call(*arguments, **words)
    except error:
        return
    except Exception as other:
        raise Broken(f"{part!r}: {text}: raises {other!r}, expected a {error.__name__}") from other
    raise Broken(f"{part!r}: {text}")
