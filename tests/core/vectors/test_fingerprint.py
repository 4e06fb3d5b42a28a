"""The fingerprint of a vector: one answer everywhere, another for any other vector."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from hansa.core import native
from hansa.core.vectors.fingerprint import _keys, fingerprint

SIZES = [0, 1, 2, 15, 16, 17, 4095, 4096, 4097, 20_001]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_all_instruction_sets_and_plain_torch_agree(size, dtype, monkeypatch):
    x = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    found = {fingerprint(x, isa) for isa in (native.instruction_sets() if native.available() else ("",))}
    monkeypatch.setenv("HANSA_NATIVE", "off")
    assert found == {fingerprint(x)}


def test_a_known_value_by_whole_numbers_without_end():
    """The equation by Python's own integers, and what it must come to for years."""
    x = torch.arange(7, dtype=torch.float32)
    words, keys = [*x.numpy().view(np.uint32).tolist(), 0], _keys().tolist()
    sums = [
        sum((words[i] + keys[i + s]) % 2**32 * ((words[i + 1] + keys[i + 1 + s]) % 2**32) for i in range(0, 8, 2))
        for s in (0, 4)
    ]
    packed = b"".join((total % 2**64).to_bytes(8, "little") for total in sums)
    assert fingerprint(x) == hashlib.blake2b((7).to_bytes(8, "little") + packed, digest_size=16).digest()
    assert fingerprint(x).hex() == "a88b655239251502347ffed4edc64016"


def test_any_change_of_a_bit_an_order_or_a_length_is_seen():
    x = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    seen = {fingerprint(x), fingerprint(x[:-1]), fingerprint(torch.cat([x, torch.zeros(1)])), fingerprint(x.flip(0))}
    for place in range(0, 9000, 97):
        for bit in (0, 31):
            other = x.clone()
            other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            seen.add(fingerprint(other))
    assert len(seen) == 4 + 2 * len(range(0, 9000, 97))
