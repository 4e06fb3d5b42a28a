"""Torch's functions on trees of tensors (``torch.utils._pytree``), imported on first use: commands that only look
load no torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    from torch.utils import _pytree

    return getattr(_pytree, name)
