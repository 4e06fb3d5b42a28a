"""Global state of a run: random generators, seeded from a key before a client's steps and restored after a run, and the
deterministic algorithms of torch and its libraries on accelerators.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import deterministic as torch_deterministic

from hansa.core.errors import HansaError
from hansa.core.keys import Key

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""The default setting for deterministic cuBLAS, which reads it at the first use in a process."""

NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"
"""Torch's error message for such an operation."""

REQUESTED: ContextVar[bool] = ContextVar("hansa.deterministic", default=True)
"""Whether the current run requests deterministic algorithms on accelerators, including those of other machines."""
LOCK = threading.RLock()
"""Protects the global generators while they are seeded, used to build a model, or restored."""


def seed_all(key: Key, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators, and that of the device.

    `torch.manual_seed` would also record a traceback for every absent kind of device: 0.3 ms and some memory per call.
    """
    seed = _seed_number(key)
    with LOCK:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - models draw from it, Hansa does not
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            generators = getattr(module, "default_generators", ())
            index = (module.current_device() if device.index is None else device.index) if generators else 0
            (generators[index] if generators else module).manual_seed(seed)


def seed_generator(generator: Any, key: Key) -> None:
    """Seed a generator in place."""
    seed = _seed_number(key)
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
def preserve_rng(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the state of Python's, NumPy's, torch's and the devices' generators on exit.

    >>> random.seed(1)
    >>> with preserve_rng():
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
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
    try:
        yield
    finally:
        with LOCK:
            stack.close()


def rng_state(device: torch.device | None = None) -> bytes:
    """Return the states of Python's, NumPy's, torch's and the device's generators as comparable bytes."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()]  # noqa: NPY002
    if device is not None and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
        states.append(state.numpy())
    return pickle.dumps(states)


def _seed_number(key: Key) -> int:
    return int.from_bytes(key.digest(8), "little") >> 1


@contextmanager
def fixed_arithmetic(devices: Sequence[torch.device] = (), deterministic: bool = True) -> Iterator[None]:
    """Use one intra-op thread, as their number changes the last bits, and deterministic algorithms on accelerators,
    including those of an engine's other machines. On exit the global generators and all settings are restored."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    accelerated = deterministic and any(device.type != "cpu" for device in devices)
    requested = REQUESTED.set(deterministic)
    try:
        with preserve_rng(devices), deterministic_algorithms() if accelerated else nullcontext():
            yield
    finally:
        REQUESTED.reset(requested)
        torch.set_num_threads(threads)


class NumericSettings(NamedTuple):
    """The settings of torch that change numerical results: workers copy them from the run."""

    dtype: torch.dtype
    precision: str
    mkldnn: bool
    flush_denormal: bool
    enabled: bool
    """Whether operations without a deterministic form are errors, or warnings with ``warn_only``."""
    warn_only: bool
    fill_memory: bool
    """Whether new memory is filled, which costs time."""
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cublas: str | None
    """cuBLAS's setting in the environment."""
    deterministic: bool
    """Whether the run requests deterministic algorithms on accelerators, even if its own device is a CPU."""

    @classmethod
    def current(cls) -> NumericSettings:
        """Read the settings of this process and thread."""
        denormal = torch.full((1,), 1e-310, dtype=torch.float64)
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            bool(torch.backends.mkldnn.enabled),
            float(denormal.mul(1.0).sum()) == 0.0,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch_deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(CUBLAS),
            REQUESTED.get(),
        )

    def for_training(self) -> NumericSettings:
        """Return the settings of deterministic training; the user's ``warn_only`` is kept."""
        return self._replace(
            enabled=True,
            warn_only=self.enabled and self.warn_only,
            fill_memory=False,
            cudnn_deterministic=True,
            cudnn_benchmark=False,
            cublas=self.cublas or CUBLAS_WORKSPACE,
        )

    def apply(self, device: torch.device | None = None) -> None:
        """Set them for a worker process that trains on a device."""
        accelerated = device is not None and device.type != "cpu" and self.deterministic
        (self.for_training() if accelerated else self).apply_to_process()
        self.apply_to_thread()

    def apply_to_process(self) -> None:
        """Set all but those of a thread."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.mkldnn.set_flags(self.mkldnn)  # type: ignore[no-untyped-call]
        current = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if current != (self.enabled, self.warn_only):  # the call imports torch.compile, which takes a second
            torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)
        torch_deterministic.fill_uninitialized_memory = self.fill_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.cublas

    def apply_to_thread(self) -> None:
        """Set the per-thread ones, and one intra-op thread, since the number of threads changes the last bits."""
        torch.set_flush_denormal(self.flush_denormal)
        torch.set_num_threads(1)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use only deterministic algorithms; on exit all settings are restored. An operation without a deterministic form
    raises an error that names the remedy.

    >>> with deterministic_algorithms():
    ...     torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    (True, True)
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    previous = NumericSettings.current()
    previous.for_training().apply_to_process()
    try:
        with naming_the_remedy():
            yield
    finally:
        previous.apply_to_process()


@contextmanager
def naming_the_remedy() -> Iterator[None]:
    """Replace torch's error for an operation without a deterministic form by one that names the remedy."""
    try:
        yield
    except Exception as error:
        if NO_DETERMINISTIC_FORM not in str(error):
            raise
        message = str(error).partition(NO_DETERMINISTIC_FORM)[0] + NO_DETERMINISTIC_FORM
        raise HansaError(
            f"{message} on this device, so results would differ between runs. Replace the operation, or allow it with "
            "deterministic=False (deterministic: false in a file)."
        ) from error
