"""One contract for every compressor, then what each of them is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hansa.compress import accumulate, cast, decode, grid, identity, quantize, random_k, sign, top_k
from hansa.compress.sparse import shuffled_indices
from hansa.core.keys import Key
from mistakes import refused

KEY = Key(3)
ALWAYS = [
    identity(), cast("float16"), cast("bfloat16"), sign(), top_k(1 / 8), top_k(1.0),
    top_k(1 / 8, "float16"), top_k(1 / 8, "bfloat16"), top_k(1 / 8, sign()),
    top_k(1 / 8, quantize(7, rounding="nearest")), quantize(1, rounding="nearest"),
    quantize(16, 32, "nearest"), grid(0.01), grid(1.0), grid(7.0),
]  # fmt: skip
IN_THE_MEAN = [random_k(1 / 4), random_k(1 / 4, sign()), quantize(16), quantize(1, 64), top_k(1 / 8, quantize(3))]
ALL = ALWAYS + IN_THE_MEAN + [quantize(16, rounding="unbiased")]
contract = pytest.mark.parametrize("compressor", ALL, ids=repr)
relaxed = settings(deadline=None, max_examples=60)


def vectors(dtype: type = np.float32) -> st.SearchStrategy[np.ndarray]:
    """Vectors of any scale, many with ties and zeros."""
    width = 32 if dtype is np.float32 else 64
    entries = st.one_of(st.floats(-1e4, 1e4, width=width), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]))
    return hnp.arrays(dtype, st.integers(1, 130), elements=entries)


def error(compressor, x: torch.Tensor, key: Key = KEY) -> float:
    """||C(x) - x||^2, in float64."""
    return float((decode(compressor.encode(x, key)).double() - x.double()).square().sum())


@pytest.mark.parametrize("compressor", ALWAYS, ids=repr)
@relaxed
@given(st.one_of(vectors(), vectors(np.float64)))
def test_contraction_holds_for_every_vector(compressor, array) -> None:
    x = torch.from_numpy(array)
    size = float(x.double().square().sum())
    if size < 1e-60:  # the scale of so small a vector is no longer a normal float32
        return
    q = compressor.contraction(x.numel())
    assert error(compressor, x) <= (q**2 + 1e-6) * size


def test_the_published_contractions() -> None:
    assert top_k(1 / 64).contraction(6400) == pytest.approx(math.sqrt(1 - 1 / 64), abs=1e-12)
    assert random_k(1 / 4).contraction(400) == pytest.approx(math.sqrt(3 / 4), abs=1e-12)
    x = torch.tensor([3.0, -1.0, 0.0, 2.0])
    assert sign.q(x) == pytest.approx(math.sqrt(1 - 36 / (4 * 14)), abs=1e-12)
    assert identity().contraction(5) == 0
    assert all(c.contraction(10**8) < 1 for c in ALWAYS + IN_THE_MEAN)


@contract
@pytest.mark.parametrize("native", ["", "off"])
def test_large_vectors_go_through_the_same_code_as_small_ones(compressor, native, monkeypatch) -> None:
    """C acts on chunks, so a vector longer than several of them must still decode, add and shrink as promised."""
    monkeypatch.setenv("HANSA_NATIVE", native)
    x = torch.from_numpy(np.random.default_rng(2).standard_normal(300_007, dtype=np.float32))
    before = x.clone()
    packet = compressor.encode(x, KEY)
    vector = decode(bytes(packet.bytes))
    assert torch.equal(x, before)
    assert torch.equal(accumulate(packet, x.clone(), -1.0), x - vector)
    limit = max(compressor.contraction(x.numel()), 1e-12) * 1.001
    assert float((vector - x).norm()) <= limit * float(x.norm())
    assert packet.nbytes <= compressor.max_nbytes(x.numel(), x.dtype)


@pytest.mark.parametrize(("values", "significant"), [("float16", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e20, 3.4e38])
def test_half_precision_neither_overflows_nor_fades(values, significant, scale) -> None:
    x = torch.linspace(0.01, 1, 64) * scale
    decoded = decode(cast(values).encode(x, KEY))
    room = 1e-44 if scale < 1e-30 else 0.0
    assert bool(((decoded - x).abs() <= 2.0**-significant * x + room).all())


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 64, 1000, 70_000])
def test_a_seed_names_a_permutation(dim) -> None:
    places = np.concatenate([part for _, part in shuffled_indices(12345, dim, dim)])
    assert sorted(places.tolist()) == list(range(dim))


def test_stochastic_quantization_is_right_in_the_mean() -> None:
    x = torch.from_numpy(np.random.default_rng(6).standard_normal(64))
    step = x.abs().reshape(2, 32).amax(1).repeat_interleave(32) / 4
    chance = (x.abs() / step) % 1
    room = step * (5 * (chance * (1 - chance) / 1000).sqrt() + 10 / 1000)
    for rounding, factor in (("unbiased", 1.0), ("stochastic", 1 / (1 + quantize(4, 32).omega(64)))):
        coder = quantize(4, 32, rounding)
        mean = torch.stack([decode(coder.encode(x, KEY.child(i))) for i in range(1000)]).mean(0)
        assert bool(((mean - factor * x).abs() < factor * room).all())
        assert not bool(((mean - 0.97 * factor * x).abs() < factor * room).all())


@relaxed
@given(st.one_of(vectors(), vectors(np.float64)), st.integers(1, 127), st.sampled_from([8, 24, 64]))
def test_quantized_entries_lie_on_the_grid_next_to_the_entry(array, levels, bucket) -> None:
    decoded = decode(quantize(levels, bucket, "unbiased").encode(torch.from_numpy(array), KEY)).numpy()
    for start in range(0, array.size, bucket):
        x, y = (v[start : start + bucket].astype(np.float64) for v in (array, decoded))
        step = np.abs(x).max() / levels
        if step > 1e-40:
            np.testing.assert_allclose(np.rint(y / step), y / step, atol=1e-4)
            assert (np.abs(y - x) <= step * (1 + 1e-4)).all()
            assert (y * x >= 0).all()


test_wrong_settings_are_refused_by_name = refused(
    (lambda: top_k(2), r"top_k\(ratio=2\): expected 0 < ratio <= 1. 1/64 keeps one entry in 64."),
    (lambda: top_k(0), "0 < ratio"),
    (lambda: random_k(-0.1), "0 < ratio"),
    (lambda: top_k(0.1, "int8"), "float16"),
    (lambda: top_k(0.1, top_k(0.1)), "sign"),
    (lambda: quantize(0), "whole number >= 1"),
    (lambda: quantize(128), "<= 127"),
    (lambda: quantize(4, 9), "multiple of 8"),
    (lambda: quantize(4, rounding="up"), "nearest"),
    (lambda: cast("float64"), "bfloat16"),
    (lambda: grid(0), "coarseness > 0"),
)


@relaxed
@given(vectors(np.float64))
def test_the_error_of_sign_is_exactly_the_papers(array) -> None:
    x = torch.from_numpy(array)
    size = float(x.square().sum())
    if size > 1e-60 and not (array == 0).any():  # Remark 4.16 is an equality where no entry is zero
        assert error(sign(), x) == pytest.approx(sign.q(x) ** 2 * size, rel=1e-9, abs=1e-12 * size)


@pytest.mark.parametrize(("dim", "k"), [(5, 2), (8, 3), (13, 4)])
def test_random_k_chooses_every_pair_equally_often(dim, k) -> None:
    draws = 2500
    together = np.zeros((dim, dim))
    for i in range(draws):
        (_, places), *_ = shuffled_indices(int.from_bytes(KEY.child("pairs", i).digest(8), "little"), dim, k)
        together[np.ix_(places, places)] += 1
    alone, pairs = np.diag(together), together[np.triu_indices(dim, 1)]
    for seen, chance in ((alone, k / dim), (pairs, k * (k - 1) / (dim * (dim - 1)))):
        spread = math.sqrt(draws * chance * (1 - chance))
        assert np.abs(seen - draws * chance).max() < 5 * spread
        assert np.std(seen) < 1.6 * spread


def test_composition_saves_the_bytes_it_promises() -> None:
    x = torch.from_numpy(np.random.default_rng(3).standard_normal(64_000, dtype=np.float32))
    plain, half, coarse, signs = (
        top_k(1 / 64, values).encode(x, KEY).nbytes for values in ("float32", "float16", quantize(7), sign())
    )
    assert (plain - half, plain - coarse) == (2000 - 3, 4000 - 5 - 2 * 4 - 500)
    assert plain - signs == 4000 - 4 - 125
