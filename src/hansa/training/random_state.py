"""The generators that any code may draw from: seeded from a key before a client's steps, given back after a run."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from hansa.core.keys import Key

Own: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Generators that a model may hold as attributes of its own."""

LOCK = threading.RLock()
"""Held while a model is made from a seed, and to seed or give back: the three are the process's, of all its threads."""


def seed_all(key: Key, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators, and that of the device.

    `torch.manual_seed` would also note a traceback for every kind of device that is not there, at 0.3 ms and some
    memory a call.
    """
    seed = _number(key)
    with LOCK:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - what a model draws from, not what we do
        if device.type != "cpu":
            _seed_device(device, seed)


def _seed_device(device: torch.device, seed: int) -> None:
    module: Any = torch.get_device_module(device)
    each = getattr(module, "default_generators", ())
    if each:
        each[module.current_device() if device.index is None else device.index].manual_seed(seed)
    else:
        module.manual_seed(seed)


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
def kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Python's, NumPy's and torch's generators, those of the devices too, are afterwards what they were before.

    >>> random.seed(1)
    >>> with kept():
    ...     seed_all(Key(0), torch.device("cpu"))
    >>> random.random() == random.Random(1).random()
    True
    """
    stack = ExitStack()
    with LOCK:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu"}:
            places = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=places, device_type=kind))
    try:
        yield
    finally:
        with LOCK:
            stack.close()


def drawn(before: tuple[Any, ...], device: torch.device | None = None) -> bool:
    """Whether any of them has been drawn from since `state` was taken."""
    pairs = zip(before, state(device), strict=True)
    return not all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def state(device: torch.device | None = None) -> tuple[Any, ...]:
    """The states of the three, and of a device's own generator, to be compared by `drawn`."""
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002
    known = random.getstate(), words, place, torch.get_rng_state().numpy().copy()
    if device is None or device.type == "cpu":
        return known
    module: Any = torch.get_device_module(device)
    return *known, (module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)).numpy().copy()


def _number(key: Key) -> int:
    return int.from_bytes(key.digest(8), "little") >> 1


@contextmanager
def exact_arithmetic(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """One intra-op thread, since their number changes the last bits, and on GPUs convolutions that repeat themselves;
    torch's, NumPy's and Python's generators are left as they were."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    torch.set_num_threads(1)
    repeatable(devices)
    try:
        with kept(devices):
            yield
    finally:
        torch.set_num_threads(threads)
        cudnn.deterministic, cudnn.benchmark = before


def repeatable(devices: Sequence[torch.device]) -> None:
    """Have cuDNN choose algorithms that give the same bits each time, wherever a GPU is in use."""
    if any(device.type == "cuda" for device in devices):
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
