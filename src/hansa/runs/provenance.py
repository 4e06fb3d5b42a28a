"""Provenance: digests of everything besides the configuration that resuming a run depends on.

=========  ==============================================================================================
data       every byte of inputs and targets, for training and test
partition  the rows of every client
schema     the schema of tables
augment    the augmentations of training batches
model      names, shapes and dtypes of its tensors, its layers as torch prints them, source of user classes
loss       its name, and its source if it is user-defined
metric     names and sources of all metrics of the task
method     source of user-defined components of the algorithm
version    of Hansa
=========  ==============================================================================================

The source of user-defined code is compared without comments, docstrings and layout.

Digests are SHA-256 of blocks, hashed in parallel: about a second for two gigabytes on one core. Digests of tensors are
cached, for sweeps.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch

from hansa import __version__
from hansa.core.errors import HansaError, suggestion
from hansa.runs.columns import VALIDATION
from hansa.runs.store.database import row_bytes
from hansa.runs.store.io import sha256
from hansa.training.metric_direction import DirectedMetric

if TYPE_CHECKING:
    from hansa.runs.driver import Run

Provenance: TypeAlias = dict[str, str]
PROVENANCE_KINDS = ("data", "partition", "schema", "augment", "model", "loss", "metric", "method", "version")
_BLOCK = 1 << 23
_LIBRARIES = frozenset({"torch", "hansa", "builtins", "functools", "numpy"})
"""Packages whose code is identified by version instead of a hash."""

_cached: dict[int, tuple[ref[torch.Tensor], int, str]] = {}
_CACHE_SIZE = 32


def provenance_of(run: Run) -> Provenance:
    """Return the current digests of a run."""
    task = run.task
    digests = {"method": _source_digest(run.algorithm.components()), "version": __version__, **data_digests(task)}
    if augment := getattr(task, "augment", None):
        digests["augment"] = sha256("\n".join(map(source_text, augment.parts)).encode())
    if hasattr(task, "module"):
        digests["model"] = _model_digest(task, run)
    for name in ("loss", "metric"):
        if hasattr(task, name):
            others = getattr(task, "metrics", {}) if name == "metric" else {}
            texts = [source_text(getattr(task, name)), *(f"{key} {source_text(others[key])}" for key in sorted(others))]
            digests[name] = sha256("\n".join(texts).encode())
    return digests


def data_digests(task: Any) -> Provenance:
    """Return the digests of a task's data and of its partition."""
    federated = getattr(task, "data", None)
    if federated is None:
        return {}
    test_sets = [test_set for name, test_set in getattr(task, "test_sets", {}).items() if name and name != VALIDATION]
    digests = {
        "data": digest([_identity(federated), *map(_identity, test_sets)]),
        "partition": digest([getattr(federated, name, None) for name in ("index", "offsets", "test_owners")]),
    }
    if (schema := getattr(federated, "schema", None)) is not None:
        digests["schema"] = schema.sha256
    return digests


def _identity(rows: Any) -> Any:
    names = ("inputs", "targets", "test_inputs", "test_targets", "validation_targets")
    return rows.identity() if hasattr(rows, "identity") else [getattr(rows, name, None) for name in names]


def changed_kinds(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return the kinds of provenance that differ, in a fixed order."""
    return [kind for kind in PROVENANCE_KINDS if recorded.get(kind) != current.get(kind)]


def parse_accepted_changes(groups: Iterable[str]) -> set[str]:
    """Return the kinds of changes to accept; unknown kinds are refused.

    >>> sorted(parse_accepted_changes(["data,model"]))
    ['data', 'model']
    """
    kinds = {kind.strip() for group in groups for kind in group.split(",") if kind.strip()}
    for kind in kinds:
        if kind not in PROVENANCE_KINDS:
            raise HansaError(f"--accept {kind}: {suggestion(kind, PROVENANCE_KINDS)}")
    return kinds


def digest(value: object) -> str:
    """Return a SHA-256 of a tree of tensors, with dtypes and shapes; other values are hashed by their repr.

    >>> digest([torch.zeros(2), None]) == digest([torch.zeros(2), None]) != digest([torch.zeros(1, 2), None])
    True
    """
    return sha256("".join(_leaves(value)).encode())


SOURCES: dict[str, str] = {}
"""In a worker process, the source by name of code that was sent by value."""


def sources_of(code: Iterable[type | FunctionType]) -> dict[str, str]:
    """Return the available sources of the user's classes and functions, by name."""
    sources = {}
    for definition in code:
        name = f"{definition.__module__}.{definition.__qualname__}"
        if name.split(".")[0] not in _LIBRARIES:
            with suppress(OSError, TypeError):
                sources[name] = code_without_comments(inspect.getsource(definition))
    return sources


def source_text(definition: Any) -> str:
    """Return the name and source of a function, class or callable object; for library code only the name."""
    if isinstance(definition, functools.partial):
        arguments = [definition.args, sorted(definition.keywords.items())]
        return f"{source_text(definition.func)} with {stable_repr(arguments)}"
    if isinstance(definition, DirectedMetric):
        return f"{definition!r} {source_text(definition.function)}"
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        return f"{source_text(type(definition))} {stable_repr(definition)}"
    name = f"{getattr(definition, '__module__', '')}.{getattr(definition, '__qualname__', repr(definition))}"
    if name.split(".")[0] in _LIBRARIES:
        return name
    try:
        return f"{name}\n{code_without_comments(inspect.getsource(definition))}"
    except (OSError, TypeError):
        if name in SOURCES:
            return f"{name}\n{SOURCES[name]}"
        code = getattr(definition, "__code__", None)
        return f"{name}\n{'' if code is None else (code.co_code.hex(), code.co_names)}"


def code_without_comments(source: str) -> str:
    """Return Python code without comments, docstrings and layout; unchanged if it cannot be parsed alone.

    >>> code_without_comments("def f(x):\\n    'Double it.'\\n    return (2 *  x)  # twice")
    'def f(x):\\n    return 2 * x'
    """
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # a lambda in the middle of an expression
        return source
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{_tensor_digest(value)};"
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
        yield source_text(value) + ";"
    else:
        yield stable_repr(value) + ";"


def _tensor_digest(tensor: torch.Tensor) -> str:
    version = -1 if tensor.is_inference() else tensor._version
    cached = _cached.get(id(tensor))
    if cached is not None and cached[0]() is tensor and cached[1] == version >= 0:
        return cached[2]
    view = row_bytes(tensor)
    blocks = [view[start : start + _BLOCK] for start in range(0, len(view), _BLOCK)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        digest = sha256(*(text.encode() for text in (pool.map if len(blocks) > 1 else map)(sha256, blocks)))
    _cached[id(tensor)] = (ref(tensor), version, digest)
    while len(_cached) > _CACHE_SIZE:
        _cached.pop(next(iter(_cached)))
    return digest


def _model_digest(task: Any, run: Run) -> str:
    from hansa.training.modules import saved_tensors

    module: torch.nn.Module = task.module(run.host_vectors)
    shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in saved_tensors(module).items()]
    layers = sorted({source_text(type(layer)) for layer in module.modules()})
    execution = getattr(task, "execution", "")
    compiled = [execution] if execution in ("compiled", "vmap") else []
    if (autocast := getattr(task, "autocast", None)) is not None:
        compiled.append(f"autocast={autocast}")
    return sha256("\n".join([source_text(task.model), *shapes, stable_repr(module), *layers, *compiled]).encode())


def _source_digest(parts: Iterable[object]) -> str:
    user_code = {source_text(type(part)) for part in parts if type(part).__module__.split(".")[0] not in _LIBRARIES}
    return sha256("\n".join(sorted(user_code)).encode())


def stable_repr(value: object) -> str:
    """Return the repr without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
