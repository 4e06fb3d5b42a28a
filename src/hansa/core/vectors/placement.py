"""Where server components compute: on the device of the server's vectors if they have a form there, else on the CPU.

A component says so with the trait ``on_device``; without it, it is given tensors of the CPU and its result is moved.
"""

from __future__ import annotations

from typing import Any

import torch

from hansa.core.types import Vector, Vectors


def computes_on(component: object, device: torch.device) -> torch.device:
    """Return the device on which a component computes, where the server's vectors are on ``device``.

    >>> from hansa.aggregate import aware, mean
    >>> computes_on(mean(), torch.device("meta")), computes_on(aware(), torch.device("meta"))
    (device(type='meta'), device(type='cpu'))
    """
    return device if getattr(component, "on_device", False) else torch.device("cpu")


def where_computed(component: object, vector: Vector) -> Vector:
    """Return a vector on the device on which a component computes with it, without a copy if it is there."""
    return vector if vector.is_cpu else vector.to(computes_on(component, vector.device))


def vectors_to(vectors: Vectors, device: torch.device) -> Vectors:
    """Return the vectors on a device, those that are there without a copy."""
    return {name: vector.to(device) for name, vector in vectors.items()}


def tree_to(tree: Any, device: torch.device) -> Any:
    """Return a plain tree with its tensors on a device.

    >>> tree_to({"t": 1, "m": [torch.zeros(2)]}, torch.device("meta"))["m"][0].device
    device(type='meta')
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: tree_to(each, device) for name, each in tree.items()}
    return [tree_to(each, device) for each in tree] if isinstance(tree, list) else tree
