"""What the continuation of a run depends on beside its configuration: digests of data, partition, model, code.

=========  ==============================================================================================
data       every byte of inputs and targets, for training and test
partition  who holds which rows
augment    what training batches go through
model      names, shapes and dtypes of its tensors, its layers as torch prints them, your classes' source
loss       its name, and its source where it is yours
metric     as the loss
method     the parts of the algorithm that are yours: their source
version    of hansa
=========  ==============================================================================================

Digests are SHA-256, in blocks that threads share: about a second for two gigabytes on one core. Tensors that were
digested before, as in a sweep, are not read again.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch

from hansa import __version__
from hansa.core.errors import HansaError, suggestion
from hansa.runs.store.io import sha256

if TYPE_CHECKING:
    from hansa.runs.driver import Run

Bindings: TypeAlias = dict[str, str]
KINDS = ("data", "partition", "augment", "model", "loss", "metric", "method", "version")
_BLOCK = 1 << 23
_SMALL = 1 << 20
_LIBRARIES = frozenset({"torch", "hansa", "builtins", "functools", "numpy"})
"""Whose code is named, not digested: their versions say what it is."""

_known: dict[int, tuple[ref[torch.Tensor], int, str]] = {}
_KNOWN = 32  # tensors whose digest is remembered


def bindings(run: Run) -> Bindings:
    """What this run depends on, as it is now."""
    task = run.task
    held = getattr(task, "data", None)
    found = {"method": _codes(run.algorithm.parts()), "version": hansa_version()}
    if held is not None:
        rows = [getattr(held, name, None) for name in ("inputs", "targets", "test_inputs", "test_targets")]
        found["data"] = digest(held.identity() if hasattr(held, "identity") else rows)
        owners = getattr(held, "test_owners", None)
        split = [getattr(held, name, None) for name in ("index", "offsets")]
        found["partition"] = digest(split if owners is None else [*split, owners])
    if augment := getattr(task, "augment", None):
        found["augment"] = sha256("\n".join(map(source, augment.parts)).encode())
    if hasattr(task, "module"):
        found["model"] = _model(task, run)
    for name in ("loss", "metric"):
        if hasattr(task, name):
            found[name] = sha256(source(getattr(task, name)).encode())
    return found


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The kinds that differ, in a fixed order."""
    return [kind for kind in KINDS if then.get(kind) != now.get(kind)]


def check_words(words: Iterable[str]) -> set[str]:
    """The kinds that a caller accepts changes of; a word that is none is refused.

    >>> sorted(check_words(["data,model"]))
    ['data', 'model']
    """
    found = {word.strip() for group in words for word in group.split(",") if word.strip()}
    for word in found:
        if word not in KINDS:
            raise HansaError(f"--accept-changes {word}: {suggestion(word, KINDS)}")
    return found


def hansa_version() -> str:
    """The version of the product."""
    return __version__


def digest(value: object) -> str:
    """One SHA-256 over tensors in lists and mappings, dtypes and shapes included; other things by their text.

    >>> digest([torch.zeros(2), None]) == digest([torch.zeros(2), None]) != digest([torch.zeros(1, 2), None])
    True
    """
    return sha256("".join(_leaves(value)).encode())


def source(thing: Any) -> str:
    """What a function, class or callable object does: its name, and its source unless a library's version says it."""
    if isinstance(thing, functools.partial):
        told = [thing.args, sorted(thing.keywords.items())]
        return f"{source(thing.func)} with {_text(told)}"
    if not (inspect.isroutine(thing) or inspect.isclass(thing)):
        return f"{source(type(thing))} {_text(thing)}"
    name = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
    if name.split(".")[0] in _LIBRARIES:
        return name
    try:
        return f"{name}\n{inspect.getsource(thing)}"
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return f"{name}\n{'' if code is None else (code.co_code.hex(), code.co_names)}"


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{_tensor(value)};"
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield f"{name}:"
            yield from _leaves(value[name])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"[{len(value)}"
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "identity"):
        yield f"{value.identity()};"
    elif callable(value):
        yield source(value) + ";"
    else:
        yield _text(value) + ";"


def _tensor(tensor: torch.Tensor) -> str:
    now = -1 if tensor.is_inference() else tensor._version
    known = _known.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == now >= 0:
        return known[2]
    plain = tensor.detach().cpu()
    strides = plain.stride()
    # as it lies in memory, so that nothing is copied; the order of its axes is part of the digest
    order = sorted(range(plain.ndim), key=lambda axis: (-strides[axis], axis))
    view = plain.permute(order).contiguous().reshape(-1).view(torch.uint8).numpy().data
    blocks = [view[start : start + _BLOCK] for start in range(0, len(view), _BLOCK)]
    if len(view) <= _SMALL:
        parts = [sha256(block) for block in blocks]
    else:
        with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1)) as pool:
            parts = list(pool.map(sha256, blocks))
    found = sha256(f"{order}".encode(), *(part.encode() for part in parts))
    _known[id(tensor)] = (ref(tensor), now, found)
    while len(_known) > _KNOWN:
        _known.pop(next(iter(_known)))
    return found


def _model(task: Any, run: Run) -> str:
    module: torch.nn.Module = task.module(run.state.vectors)
    shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in module.state_dict().items()]
    kinds = sorted({source(type(part)) for part in module.modules()})
    compiled = ["compiled"] if getattr(task, "compile", False) else []
    return sha256("\n".join([source(task.model), *shapes, _text(module), *kinds, *compiled]).encode())


def _codes(parts: Iterable[object]) -> str:
    yours = {source(type(part)) for part in parts if type(part).__module__.split(".")[0] not in _LIBRARIES}
    return sha256("\n".join(sorted(yours)).encode())


def _text(value: object) -> str:
    """As it prints, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
