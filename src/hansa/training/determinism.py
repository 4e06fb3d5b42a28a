"""Deterministic algorithms of torch and its libraries for training on accelerators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch.utils import deterministic

from hansa.core.errors import HansaError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""The setting with which cuBLAS is deterministic, if the environment has none; read when a process first uses it."""

NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"
"""What torch says of such an operation."""

REQUESTED: ContextVar[bool] = ContextVar("hansa.deterministic", default=True)
"""Whether the run of this context wants deterministic algorithms on accelerators, also on those of other machines."""


class DeterminismSettings(NamedTuple):
    """The settings of torch that decide whether accelerators give the same bits every time.

    Args:
        enabled: Whether operations without a deterministic form are errors.
        warn_only: Whether they are only warned of.
        fill_memory: Whether new memory is filled, which costs time and is not needed.
        cudnn_deterministic: Whether cuDNN uses deterministic algorithms only.
        cudnn_benchmark: Whether cuDNN chooses algorithms by their speed, which varies.
        cublas: The environment's setting of cuBLAS.
    """

    enabled: bool
    warn_only: bool
    fill_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cublas: str | None

    @classmethod
    def current(cls) -> DeterminismSettings:
        """Read the settings of this process."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(CUBLAS),
        )

    def for_training(self) -> DeterminismSettings:
        """Return the settings of deterministic training. A user's own choice to be only warned is kept."""
        return DeterminismSettings(
            True, self.enabled and self.warn_only, False, True, False, self.cublas or CUBLAS_WORKSPACE
        )

    def apply(self) -> None:
        """Set them for this process."""
        now = DeterminismSettings.current()
        if now[:2] != self[:2]:  # the call imports torch.compile, which takes a second
            if self.warn_only:
                torch.use_deterministic_algorithms(self.enabled, warn_only=True)
            else:
                torch.use_deterministic_algorithms(self.enabled)
        deterministic.fill_uninitialized_memory = self.fill_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self[3:5]
        if self.cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.cublas


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use deterministic algorithms only; on exit all settings are restored. An operation without a deterministic form
    raises an error that names the remedy.

    >>> with deterministic_algorithms():
    ...     torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    (True, True)
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    before = DeterminismSettings.current()
    before.for_training().apply()
    try:
        with naming_the_remedy():
            yield
    finally:
        before.apply()


@contextmanager
def naming_the_remedy() -> Iterator[None]:
    """Replace torch's error for an operation without a deterministic form by one that names the remedy."""
    try:
        yield
    except Exception as error:
        if NO_DETERMINISTIC_FORM not in str(error):
            raise
        said = str(error).partition(NO_DETERMINISTIC_FORM)[0] + NO_DETERMINISTIC_FORM
        raise HansaError(
            f"{said} on this device, so results would differ from run to run. Replace the operation, or allow it with "
            "deterministic=False (deterministic: false in a file, --no-deterministic)."
        ) from error
