"""The passes over whole vectors against sorting and exact sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hansa.compress import chunked
from hansa.core.errors import HansaError


def by_sorting(x: np.ndarray, k: int) -> list[int]:
    """The k largest magnitudes by a stable sort, so that ties go to the lower index; zeros left out."""
    order = np.argsort(-np.abs(x), kind="stable")[:k]
    return sorted(int(i) for i in order if x[i] != 0)


coarse = hnp.arrays(np.float32, st.integers(1, 200), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-44]))
fine = hnp.arrays(np.float64, st.integers(1, 200), elements=st.floats(-1e300, 1e300))


@settings(deadline=None, max_examples=200)
@given(st.one_of(coarse, fine), st.data())
def test_the_largest_are_those_a_stable_sort_puts_first(x, data):
    k = data.draw(st.integers(1, x.size))
    assert chunked.top_k_indices(x, k, "test").tolist() == by_sorting(x, k)


def hostile(name: str, d: int) -> np.ndarray:
    return HOSTILE[name](np.random.default_rng(7), d).astype(np.float32)


def spoilt(draw: np.random.Generator, d: int, factor: float, whole: bool = False) -> np.ndarray:
    """Normal numbers, or their signs, with other magnitudes where the threshold is sampled."""
    x = draw.standard_normal(d)
    x = np.sign(x) if whole else x
    x[:: d // chunked.SAMPLE | 1] *= factor
    return x


HOSTILE = {
    "normal": lambda draw, d: draw.standard_normal(d),
    "constant": lambda draw, d: np.full(d, -0.25),
    "zero": lambda draw, d: np.zeros(d),
    "nearly zero": lambda draw, d: draw.standard_normal(d) * (draw.random(d) >= 0.999),
    "one layer holds all": lambda draw, d: draw.standard_normal(d) * np.where(np.arange(d) < d // 50, 1e6, 1),
    "heavy tails": lambda draw, d: draw.standard_cauchy(d),
    "small where sampled": lambda draw, d: spoilt(draw, d, 1e-9),
    "large where sampled": lambda draw, d: spoilt(draw, d, 1e9, whole=True),
    "two values": lambda draw, d: np.where(draw.random(d) < 0.01, 2, -1),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("ratio", [1 / 64, 1 / 2000, 0.5])
def test_threshold_selection_is_exact_on_vectors_longer_than_the_sample(monkeypatch, name, ratio):
    monkeypatch.setattr(chunked, "SAMPLE", 1 << 10)
    x = hostile(name, 70_001)
    k = int(ratio * x.size)
    assert chunked.top_k_indices(x, k, "test").tolist() == by_sorting(x, k)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("d", [10, 70_001])
def test_a_single_bad_entry_is_found_wherever_it_is(monkeypatch, bad, d):
    monkeypatch.setattr(chunked, "SAMPLE", 1 << 10)
    for place in (0, d // 3, d - 1):
        x = hostile("normal", d)
        x[place] = bad
        with pytest.raises(HansaError, match=f"1 of {d} entries are NaN or infinite, the first at {place}"):
            chunked.top_k_indices(x, 2, "test")
        assert math.isnan(chunked.absolute_sum(x))
