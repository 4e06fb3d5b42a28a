"""Requirements shared by all contracts: required methods, pure functions, plain states, and keyed randomness."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.citations import check_citations
from hansa.core.errors import HansaError
from hansa.core.protocols import missing_methods

DTYPES = (torch.float32, torch.float64)


class ContractError(AssertionError):
    """A requirement that a component violates.

    >>> issubclass(ContractError, AssertionError)
    True
    """


def require(condition: object, component: object, text: str) -> None:
    """Raise unless the condition holds, naming the component and the requirement."""
    if not condition:
        raise ContractError(f"{component!r}: {text}")


def check_component_contract(component: object, protocol: type) -> None:
    """Check the common requirements: the protocol's methods, a repr that is equal in every process, known citations."""
    missing = missing_methods(component, protocol)
    require(not missing, component, f"lacks {', '.join(missing)} of {protocol.__name__}")
    require(not isinstance(component, type), component, "is a class: give a part that was made of it")
    require(
        " at 0x" not in repr(component),
        component,
        "its repr has an address: make it a dataclass, so that runs can resume",
    )
    try:
        check_citations([component])
    except HansaError as problem:
        raise ContractError(f"{component!r}: {problem}") from problem


def vector(dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, a tenth of them zero."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.standard_normal(dim) * (draw.random(dim) > 0.1)).to(dtype)


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two trees are bit-identical."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return False
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def deep_copy(tree: Any) -> Any:
    """Return a deep copy of a tree."""
    return copy.deepcopy(tree)


def unsupported_state(tree: Any, place: str = "state") -> str:
    """Return where a tree holds a value that a checkpoint cannot store without pickle; empty if there is none."""
    if isinstance(tree, Mapping):
        wrong = [name for name in tree if not isinstance(name, str)]
        if wrong:
            return f"{place} has the key {wrong[0]!r}, which is no string"
        return next(
            (problem for name, item in tree.items() if (problem := unsupported_state(item, f"{place}[{name!r}]"))), ""
        )
    if isinstance(tree, list):
        return next(
            (problem for at, item in enumerate(tree) if (problem := unsupported_state(item, f"{place}[{at}]"))), ""
        )
    if tree is None or isinstance(tree, (bool, int, float, str, Tensor)):
        return ""
    return f"{place} is a {type(tree).__name__}"


def all_finite_tree(tree: Any) -> bool:
    """Return whether all numbers of a tree are finite."""
    if isinstance(tree, Tensor):
        return not tree.is_floating_point() or bool(torch.isfinite(tree).all())
    if isinstance(tree, Mapping):
        return all(all_finite_tree(item) for item in tree.values())
    if isinstance(tree, (list, tuple)):
        return all(all_finite_tree(item) for item in tree)
    return not isinstance(tree, float) or math.isfinite(tree)


def call_twice(component: object, name: str, call: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
    """Return the result of a call, after checking that it is pure: it modifies no argument, draws no global random
    numbers, and gives the same result again."""
    before = deep_copy(list(arguments))
    with no_global_draws(component, name):
        first = call(*arguments, **options)
        second = call(*deep_copy(before), **options)
    require(same_bits(list(arguments), before), component, f"{name} changes what it is given")
    require(
        same_bits(first, second), component, f"{name} gives another result the second time: state goes in and comes out"
    )
    return first


@contextmanager
def no_global_draws(component: object, name: str) -> Iterator[None]:
    """Raise if the block draws from the global generators, because results would depend on earlier draws."""
    torch_state, numpy_state = torch.get_rng_state(), _numpy_state()
    yield
    touched = not torch.equal(torch_state, torch.get_rng_state()) or numpy_state != _numpy_state()
    require(not touched, component, f"{name} draws from a global generator: draw from the key it is given")


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tobytes(), int(state[2])
