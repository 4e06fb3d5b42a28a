"""The generators that any code may draw from: seeded from a key before a client's steps, given back after a run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from hansa.keys import Key

Own: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Generators that a model may hold as attributes of its own."""


def seed_all(key: Key, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators, and that of the device.

    `torch.manual_seed` would also note a traceback for every kind of device that is not there, at 0.3 ms and some
    memory a call.
    """
    seed = _number(key)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - what a model draws from, not what we do
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_own(generator: Any, key: Key) -> None:
    """Seed a generator in place, whoever else holds it."""
    seed = _number(key)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)


@contextmanager
def kept() -> Iterator[None]:
    """Python's, NumPy's and torch's generators are afterwards what they were before.

    >>> random.seed(1)
    >>> with kept():
    ...     seed_all(Key(0), torch.device("cpu"))
    >>> random.random() == random.Random(1).random()
    True
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def drawn(before: tuple[Any, ...]) -> bool:
    """Whether any of the three has been drawn from since `state` was taken."""
    pairs = zip(before, state(), strict=True)
    return not all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def state() -> tuple[Any, ...]:
    """The states of the three, to be compared by `drawn`."""
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002
    return random.getstate(), words, place, torch.get_rng_state().numpy().copy()


def _number(key: Key) -> int:
    return int.from_bytes(key.digest(8), "little") >> 1


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """One intra-op thread, since their number changes the last bits; torch's, NumPy's and Python's generators are left
    as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept():
            yield
    finally:
        torch.set_num_threads(threads)
