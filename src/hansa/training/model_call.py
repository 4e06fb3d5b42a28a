"""How a model is called with a batch: one tensor as it is, tuples and dicts as its ``forward()`` takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def caller(module: nn.Module, inputs: Any) -> Callable[[Any], Any]:
    """A function that gives the module a batch like ``inputs``.

    A dict goes by name, ``module(**batch)``, where ``forward()`` has parameters of all those names, as for what a
    tokenizer gives; a tuple by place, ``module(*batch)``, where it takes so many. Otherwise it is one argument.

    >>> class Both(nn.Module):
    ...     def forward(self, a, b=0): return a + b
    >>> caller(Both(), {"a": 1, "b": 2})({"a": 1, "b": 2}), caller(Both(), (1, 2))((3, 4))
    (3, 7)
    """
    parameters = _parameters(module)
    if isinstance(inputs, Mapping):
        named = {name for name, one in parameters.items() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
        if set(inputs) <= named:
            return lambda batch: module(**batch)
    elif isinstance(inputs, (tuple, list)):
        places = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        starred = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        if len(inputs) <= len(places) or starred:
            return lambda batch: module(*batch)
    return module


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
