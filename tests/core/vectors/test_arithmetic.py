"""Passes over whole vectors: with native code and without, the same to rounding, and to the bit on the wire."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hansa import server
from hansa.core import native
from hansa.core.types import Population, RoundContext
from hansa.core.vectors import arithmetic
from hansa.core.vectors.arithmetic import _keys, fingerprint

CTX = RoundContext(0, Population((1,)), (0,))
needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")


SIZES = [0, 1, 2, 15, 16, 17, 31, 4095, 4096, 4097, 20_001]


@pytest.fixture(params=[*native.instruction_sets(), "off"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test below holds with every instruction set and with plain torch."""
    monkeypatch.setenv("HANSA_NATIVE", request.param)
    return str(request.param)


def vector(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_exact_to_rounding_and_large_entries_are_not_bad(either: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = vector(size, dtype=dtype)
        assert arithmetic.norm(x) == pytest.approx(math.sqrt(math.fsum(float(v) ** 2 for v in x)), rel=1e-13)
    assert arithmetic.norm(torch.full((100,), 3e38)) == pytest.approx(3e39)  # float32 squares would overflow
    assert arithmetic.norm(x[::2]) == pytest.approx(arithmetic.norm(x[::2].clone()), rel=1e-13)
    assert arithmetic.all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bad_entry_is_found_anywhere(either: str, dtype: torch.dtype) -> None:
    for size in SIZES[1:]:
        for place in {0, size // 2, size - 1}:
            for bad in (math.nan, math.inf, -math.inf):
                wrong = vector(size, dtype=dtype)
                wrong[place] = bad
                assert not arithmetic.all_finite(wrong)
                assert not math.isfinite(arithmetic.norm(wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_sums_fold_left_to_right_and_take_rows_apart_and_strided(either: str, dtype: torch.dtype) -> None:
    weights, tight = [0.1, 0.3, 0.05, 0.25, 0.2, 0.1], 8 * torch.finfo(dtype).eps
    for size in SIZES[1:]:
        rows = [vector(size, k, dtype) for k in range(6)]
        true = sum(w * row.double() for w, row in zip(weights, rows, strict=True))
        total = rows[0] * weights[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            total.add_(row, alpha=weight)
        for given in (rows, [torch.stack([row, row], dim=1)[:, 0] for row in rows]):
            found = arithmetic.weighted_sum(given, weights)
            torch.testing.assert_close(found, total, rtol=tight, atol=tight)
            torch.testing.assert_close(found.double(), true, rtol=tight, atol=tight)


@needs_native
@pytest.mark.parametrize("part", [server.adagrad(), server.adam(bias_correction=True), server.yogi(v0=1e-6)])
@pytest.mark.parametrize("more", [server.amsgrad(eps_inside=True, eps=1e-8), server.ams(), server.amsgrad(eps=0.0)])
def test_fused_servers_are_the_eager_ones_within_a_millionth(
    part: Any, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = server.chain(part, more, server.scale(0.3))
    fused = eager = rule.init(torch.zeros(3000))
    for t in range(5):
        delta = vector(3000, t) * 10.0 ** (t - 2)
        delta[:10] = 0  # entries that never moved
        ours, fused = rule.update(delta, fused, CTX)
        with monkeypatch.context() as hidden:
            hidden.setenv("HANSA_NATIVE", "off")
            theirs, eager = rule.update(delta, eager, CTX)
        assert float((ours - theirs).norm()) < 1e-6 * float(theirs.norm())
        for name in ("m", "v", "vhat"):
            assert float((fused["1"].get(name, ours) - eager["1"].get(name, ours)).norm()) <= 1e-6 * float(
                eager["1"].get(name, ours).norm()
            )


@needs_native
def test_a_rule_derived_from_a_known_one_keeps_its_own_equation() -> None:
    @dataclass(frozen=True, slots=True)
    class halved(server.adam):
        def second(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
            return v + squared / 2

    delta = vector(100)
    _, state = halved().update(delta, halved().init(delta), CTX)
    torch.testing.assert_close(state["v"], delta.square() / 2)


def test_inner_products_do_not_depend_on_the_threads_that_share_them(monkeypatch) -> None:
    rows, vectors = torch.randn(13, 4001), torch.randn(3, 4001)
    one = arithmetic.inner_products(rows, vectors)
    monkeypatch.setattr(arithmetic, "PARALLEL_PRODUCTS", 1)
    monkeypatch.setattr(arithmetic, "available_cores", lambda: 2)
    assert torch.equal(arithmetic.inner_products(rows, vectors), one)
    monkeypatch.setenv("HANSA_NATIVE", "off")
    assert torch.allclose(arithmetic.inner_products(rows, vectors), one, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_all_instruction_sets_and_plain_torch_agree(size, dtype, monkeypatch):
    x = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    found = set()
    for name in (*native.instruction_sets(), "off"):
        monkeypatch.setenv("HANSA_NATIVE", name)
        found.add(fingerprint(x))
    assert len(found) == 1


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
