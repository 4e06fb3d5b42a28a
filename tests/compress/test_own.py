"""A compressor of one's own is one file, and goes wherever the built-in ones go."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from compress.ternary import ternary
from hansa.compress import (
    Coder,
    Packet,
    PacketError,
    accumulate,
    decode,
    error_feedback,
    random_k,
    sign,
    top_k,
)
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from mistakes import refused

KEY = Key(1)
X = torch.from_numpy(np.random.default_rng(0).standard_normal(1001, dtype=np.float32))


def expected(x: np.ndarray, threshold: float = 0.7) -> np.ndarray:
    """C(x) from its definition."""
    kept = np.abs(x) > threshold * np.abs(x).mean()
    return np.where(kept, np.sign(x) * np.abs(x)[kept].mean(), 0).astype(x.dtype)


PACKET = ternary().encode(X, KEY)
test_without_its_compressor_a_packet_is_refused_and_the_remedy_is_named = refused(
    (lambda: decode(PACKET), r"kind 'ternary', which only its compressor reads: decode\(packet, ternary"),
    (lambda: accumulate(bytes(PACKET.bytes), X.clone()), "which only its compressor reads"),
    (lambda: decode(PACKET, sign()), "kind ternary, expected sign"),
    (lambda: decode(sign().encode(X, KEY), ternary()), "kind sign, expected ternary"),
    error=PacketError,
)


def forged(payload: bytes) -> bytes:
    """A packet of the same kind around any payload, with a right checksum."""
    data = bytes(PACKET.bytes)
    name = data[24:32]
    head = data[:4] + struct.pack("<QQ", PACKET.dim, len(name + payload))
    return head + struct.pack("<I", zlib.crc32(head + name + payload)) + name + payload


test_whatever_its_reader_cannot_read_is_a_refused_packet = refused(
    (b"", "ternary cannot read the payload"),
    (b"\0\0\0\0" + b"\0" * 251, "ternary cannot read the payload"),
    (b"\0\0\0\0" + b"\0" * 253, "takes at most 288 for 1001 entries"),
    (struct.pack("<f", float("nan")) + b"\xff" * 252, "NaN or infinite"),
    (struct.pack("<f", 1.0) + b"\xff" * 250, "ternary cannot read the payload"),
    by=lambda payload: error_feedback(ternary()).receive(Packet.parse(forged(payload)), dim=1001, dtype=torch.float32),
    error=PacketError,
)


@dataclass(frozen=True, slots=True)
class careless(Coder):
    """A reader that gives what it likes."""

    gives: object = None

    def payload(self, x, key):
        return [b"1"]

    def read(self, payload, dim, dtype):
        return self.gives

    def max_payload(self, dim, itemsize):
        return 1


@pytest.mark.parametrize("gives", [None, 1.0, np.zeros(3, np.float64), np.zeros(4, np.float32), np.zeros((3, 1))])
def test_a_reader_must_give_as_many_numbers_as_were_declared(gives) -> None:
    with pytest.raises(PacketError, match=r"careless reads .*, expected float32 \(3,\)"):
        decode(careless().encode(torch.ones(3), KEY), careless(gives))


@pytest.mark.parametrize("name", ["", "9lives", "ternäry", "a b", "x" * 65, "sign"])
def test_names_on_the_wire_are_short_and_plain(name: str) -> None:
    raw = name.encode("latin-1")
    body = bytes([len(raw)]) + raw + b"1"
    head = b"hP" + bytes([2, 127]) + struct.pack("<QQ", 3, len(body))
    data = head + struct.pack("<I", zlib.crc32(head + body)) + body
    with pytest.raises(PacketError, match="is not the name of a kind"):
        Packet.parse(data)
    if name != "sign":

        class odd(careless):
            kind: ClassVar[str] = name  # type: ignore[misc]

        with pytest.raises(HansaError, match=r"Packet\(kind=.*a name of up to 64"):
            odd().encode(torch.ones(3), KEY)


@pytest.mark.parametrize("sparse", [top_k, random_k])
def test_kept_values_go_through_it_as_well(sparse) -> None:
    compressor = sparse(1 / 8, values=ternary())
    packet = compressor.encode(X, KEY)
    assert packet.nbytes <= compressor.max_nbytes(1001, torch.float32)
    vector = decode(bytes(packet.bytes), compressor)
    plain = decode(sparse(1 / 8).encode(X, KEY))
    where = plain.nonzero()[:, 0]
    np.testing.assert_allclose(vector[where].numpy(), expected(plain[where].numpy()), rtol=1e-6)
    assert int((vector != 0).sum()) <= 125
    with pytest.raises(PacketError, match="values of kind ternary, which only their compressor reads"):
        decode(packet)
    with pytest.raises(PacketError, match="values of kind ternary, expected identity"):
        decode(packet, sparse(1 / 8))
    with pytest.raises(PacketError, match="values of kind sign, expected ternary"):
        decode(sparse(1 / 8, values=sign()).encode(X, KEY), compressor)
