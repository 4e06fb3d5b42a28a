"""Which modules native code may replace: no hooks, buffers or frozen weights, and a forward() without side effects."""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hansa.core.object_state import ObjectState


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
    """Refuse a forward() that writes to its module, to objects that this holds, or to globals, or that draws random
    numbers: native code would not do so."""
    globals_before = referenced_globals(module)
    parameters = [id(parameter) for parameter in module.parameters()]
    state, outside = ObjectState(module, parameters), ObjectState(list(globals_before.values()), parameters)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - it is only looked at
    yield
    for path in state.changes():
        raise NotEligible(f"its forward() writes to {type(module).__name__}.{path}")
    after = referenced_globals(module)
    for name, value in globals_before.items():
        if after.get(name) is not value:
            raise NotEligible(f"its forward() writes to the global {name}")
    if any(True for _ in outside.changes()):
        raise NotEligible("its forward() writes to an object that is a global")
    same = torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    numbers, now = drawn[2], np.random.get_state()  # noqa: NPY002
    if not same or any(not np.array_equal(a, b) for a, b in zip(numbers, now, strict=True)):
        raise NotEligible("its forward() draws random numbers")


def referenced_globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals that the methods of a module's own classes name."""
    found: dict[str, Any] = {}
    for part in module.modules():
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            for method in vars(kind).values():
                if isinstance(function := inspect.unwrap(method) if callable(method) else method, types.FunctionType):
                    names = _names(function.__code__)
                    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    return found


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code refers to, those of inner functions too."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
