"""Which modules native code may replace: no hooks, buffers or frozen weights, and a forward() without side effects."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class NotEligible(Exception):
    """The reason why a module has no native form."""


def parameter_offsets(module: nn.Module) -> dict[int, tuple[Tensor, int]]:
    """Return each parameter with its offset in the flat vector, keyed by ``id``."""
    if any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        raise NotEligible("there are hooks for all modules")
    for part in module.modules():
        if any(getattr(part, name, None) for name in _HOOKS):
            raise NotEligible(f"{type(part).__name__} has a hook")
    if any(True for _ in module.buffers()):
        raise NotEligible("it has buffers")
    places: dict[int, tuple[Tensor, int]] = {}
    offset = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise NotEligible(f"{name} is frozen")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise NotEligible(f"{name} is {parameter.dtype} on {parameter.device}")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotEligible(f"{name} has a hook")
        places[id(parameter)] = (parameter, offset)
        offset += parameter.numel()
    return places


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@contextmanager
def check_pure(module: nn.Module) -> Iterator[None]:
    """Refuse a forward() that writes to its module or draws random numbers, which native code would not do."""
    before = [(part, {name: (value, _size(value)) for name, value in vars(part).items()}) for part in module.modules()]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - it is only looked at
    yield
    for part, had in before:
        now = {name: value for name, value in vars(part).items() if name != "training"}
        for name, value in now.items():
            if name not in had or value is not had[name][0] or _size(value) != had[name][1]:
                raise NotEligible(f"its forward() writes to {type(part).__name__}.{name}")
    same = torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    state, after = drawn[2], np.random.get_state()  # noqa: NPY002
    if not same or any(not np.array_equal(a, b) for a, b in zip(state, after, strict=True)):
        raise NotEligible("its forward() draws random numbers")


def _size(value: object) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) and isinstance(value, Sized) else None
