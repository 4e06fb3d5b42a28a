"""The arguments of traced torch calls."""

from __future__ import annotations

from typing import Any

from hansa.core.native import abi
from hansa.core.native.eligibility import NotEligible


def given_arguments(args: Any, kwargs: Any, **defaults: Any) -> list[Any]:
    """Return the arguments of a call after the first, positional or by keyword."""
    unknown = set(kwargs) - set(defaults)
    if unknown or len(args) > len(defaults):
        raise NotEligible(f"a call with {', '.join(sorted(unknown)) or 'more arguments'}")
    return list({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values())


def activation_of(name: str, args: Any, kwargs: Any) -> tuple[int, float]:
    """Return the kind of an activation and its slope or scale."""
    word = name.rpartition(".")[2].removesuffix("_")
    if word == "leaky_relu":
        return abi.LEAKY_RELU, float(given_arguments(args, kwargs, negative_slope=0.01, inplace=False)[0])
    if word == "elu":
        return abi.ELU, float(given_arguments(args, kwargs, alpha=1.0, inplace=False)[0])
    if word == "gelu":
        form = given_arguments(args, kwargs, approximate="none")[0]
        return (abi.GELU_TANH if form == "tanh" else abi.GELU), 0.0
    given_arguments(args, kwargs, inplace=False)
    return {"relu": abi.RELU, "sigmoid": abi.SIGMOID, "tanh": abi.TANH, "silu": abi.SILU}[word], 0.0


def dropout_of(args: Any, kwargs: Any) -> list[Any]:
    return given_arguments(args, kwargs, p=0.5, training=True, inplace=False)


def pair_of(value: Any) -> tuple[int, int]:
    """Return a pair from one number or two."""
    if isinstance(value, int):
        return value, value
    sides = tuple(value)
    return (sides[0], sides[-1])


def equal_pair(value: Any) -> tuple[int, ...]:
    """Return the pair if both sides are equal, otherwise (); also () for a string."""
    if isinstance(value, str):
        return ()
    sides = pair_of(value)
    return sides if sides[0] == sides[1] else ()
