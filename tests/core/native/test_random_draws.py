"""Draws without replacement by native code are NumPy's own."""

from __future__ import annotations

import numpy as np
import pytest

from hansa.core import native
from hansa.core.keys import Key
from hansa.core.native.random_draws import draws_like_numpy, draws_without_replacement

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")


@pytest.mark.parametrize(
    ("many", "some"), [(1, 1), (5, 2), (5, 5), (20, 1), (20, 19), (9_999, 64), (10_001, 3), (200, 70)]
)
def test_what_is_chosen_is_what_numpy_chooses(many, some):
    assert draws_like_numpy()
    for seed in range(40):
        key = Key(seed).child("active", many)
        expected = key.numpy().choice(many, some, replace=False, shuffle=False).tolist()
        assert draws_without_replacement([key.digest(16)], many, some) == [expected]


def test_rare_numbers_are_drawn_again_as_numpy_does():
    """Below 3 x 2^30 every fourth number is rejected: of small ranges almost none is."""
    table, most = native.load(), 3 * 2**30 - 1
    out, differ = np.empty(1, np.int64), set()
    for seed in range(60):
        key = Key(seed).child("rare")
        table.choose(key.digest(16), 1, most + 1, 1, out.ctypes.data)
        raw = key.numpy().integers(0, 2**32, dtype=np.uint32)
        differ.add(int(raw) * (most + 1) >> 32 != int(out[0]))
        bits = np.random.Philox(key=np.frombuffer(key.digest(16), "<u8"))
        halves = bits.random_raw(8).view("<u4").tolist()
        wanted = next(v * (most + 1) >> 32 for v in halves if v * (most + 1) % 2**32 >= 2**32 % (most + 1))
        assert int(out[0]) == wanted
    assert differ == {True, False}


def test_draws_with_several_keys_are_those_with_each():
    keys = [Key(3).child(step).digest(16) for step in range(7)]
    for many, some in ((5, 2), (9, 9), (40, 1), (70, 65), (10_001, 3)):
        expected = [draws_without_replacement([key], many, some)[0] for key in keys]
        assert draws_without_replacement(keys, many, some) == expected
    assert draws_without_replacement(keys, 40, 3)[0] != draws_without_replacement(keys, 40, 3)[1]
