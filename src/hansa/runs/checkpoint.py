"""A run's state on disk: whole, hashed, exact, without pickle. Three generations are kept."""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors.torch
import torch
from torch import Tensor

from hansa import __version__
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import State
from hansa.runs.store import io
from hansa.runs.store.io import Damaged

log = logging.getLogger("hansa")

Meta: TypeAlias = dict[str, Any]
"""Plain facts beside the state: round, seed, config hash, store generation; and the versions that wrote it."""

FORMAT = 1
MIGRATIONS: dict[int, Callable[[State, Meta], tuple[State, Meta]]] = {}
"""From format n to n + 1. A format without a way to the present one is refused."""

MANIFEST, TREE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
REMEDY = "Restore it, or take the checkpoint before it: `hansa resume --fallback`."


class Checkpoint(NamedTuple):
    """A state and its facts."""

    state: State
    meta: Meta


def save(folder: str | Path, state: State, meta: Mapping[str, Any], *, keep: int = 3) -> Path:
    """Write a new generation beside the old ones, then give up all but the newest ``keep``.

    Written aside and synced, the manifest with every file's SHA-256 last; renamed, the folder synced: a crash leaves
    the old generations, or the old ones and this, never part of one. Returns where it lies.
    """
    check_integer("checkpoint.save", "keep", keep)
    home = Path(folder)
    writer, plain = _Writer(), _Writer()
    tree = writer.encode(state, "state")
    facts = plain.encode({**meta, "versions": _versions()}, "meta")
    if plain.tensors:
        raise invalid_argument("checkpoint.save", "meta", "a tensor", "plain facts", "Tensors go into the state.")
    files = {
        TREE: json.dumps(tree, separators=(",", ":"), allow_nan=False).encode(),
        TENSORS: safetensors.torch.save(writer.tensors),
    }
    io.make_folder(home)
    _sweep(home)
    number = max(_numbers(home), default=0) + 1
    target = _path(home, number)
    aside = target.with_name(target.name + io.ASIDE)
    io.make_folder(aside)
    for name, data in files.items():
        io.write_new(aside / name, data)
    manifest = {
        "format": FORMAT,
        "generation": number,
        "files": {name: {"sha256": io.sha256(data), "bytes": len(data)} for name, data in files.items()},
        "meta": facts,
    }
    io.write_sealed(aside / MANIFEST, manifest, aside=False)
    io.sync_folder(aside)
    io.rename(aside, target)
    for old in _numbers(home)[:-keep]:
        _discard(_path(home, old))
    return target


def load(folder: str | Path, *, fallback: bool = False) -> Checkpoint:
    """The newest generation, every file checked against its SHA-256.

    A damaged one is an error that names the file. With ``fallback`` the newest whole one before it is taken instead,
    and a warning says so.
    """
    home = Path(folder)
    numbers = _numbers(home)
    if not numbers:
        raise HansaError(f"{home} holds no checkpoint. Give the folder of a run that has saved one.")
    if not fallback:
        return _load(_path(home, numbers[-1]), numbers[-1])
    for found in undamaged(home):
        return found
    raise Damaged(f"{home}: none of its {len(numbers)} checkpoints is whole.")


def undamaged(folder: str | Path) -> Iterator[Checkpoint]:
    """Every whole generation, newest first; a warning tells of each that is not."""
    home = Path(folder)
    for number in reversed(_numbers(home)):
        try:
            yield _load(_path(home, number), number)
        except Damaged as damage:
            log.warning("%s Falling back to the checkpoint before it.", damage)


def kept(folder: str | Path) -> list[Meta]:
    """The facts of every generation whose manifest is whole, oldest first."""
    found = []
    for number in _numbers(Path(folder)):
        try:
            found.append(_decode(_manifest(_path(Path(folder), number), number)["meta"], {}))
        except Damaged as damage:
            log.warning("%s", damage)
    return found


def _load(path: Path, number: int) -> Checkpoint:
    manifest = _manifest(path, number)
    data = {name: _checked(path / name, facts) for name, facts in manifest["files"].items()}
    tensors = safetensors.torch.load(data[TENSORS])
    state, meta = _decode(json.loads(data[TREE]), tensors), _decode(manifest["meta"], {})
    for step in range(manifest["format"], FORMAT):
        log.info("%s: migrating from checkpoint format %d to %d", path, step, step + 1)
        state, meta = MIGRATIONS[step](state, meta)
    return Checkpoint(state, meta)


def _manifest(path: Path, number: int) -> dict[str, Any]:
    """The manifest, if this hansa can read what it describes."""
    manifest = io.read_sealed(path / MANIFEST)
    found = manifest["format"]
    if found > FORMAT or any(step not in MIGRATIONS for step in range(found, FORMAT)):
        writer = manifest["meta"].get("versions", {}).get("hansa", "unknown")
        raise HansaError(
            f"{path} is of checkpoint format {found}, written by hansa {writer}; this is hansa {_versions()['hansa']}, "
            f"which reads format {FORMAT}. Resume with hansa {writer}, or start anew."
        )
    if manifest["generation"] != number:
        raise Damaged(
            f"{path / MANIFEST} describes generation {manifest['generation']}: folders were swapped. {REMEDY}"
        )
    return manifest


def _checked(path: Path, facts: Mapping[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing. {REMEDY}") from None
    if len(data) != facts["bytes"]:
        raise Damaged(f"{path} is damaged: {len(data)} bytes instead of {facts['bytes']}. {REMEDY}")
    if io.sha256(data) != facts["sha256"]:
        raise Damaged(f"{path} is damaged: its SHA-256 does not match. {REMEDY}")
    return data


class _Writer:
    """Turns a tree into JSON with ``{"$tensor": name}`` in place of each tensor, and gathers the tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def encode(self, node: object, path: str) -> Any:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if isinstance(node, float):  # those that JSON lacks go by name
            return node if math.isfinite(node) else {"$float": repr(float(node))}
        if isinstance(node, list):
            return [self.encode(value, f"{path}[{i}]") for i, value in enumerate(node)]
        if isinstance(node, dict):
            if wrong := [key for key in node if not isinstance(key, str) or key.startswith("$")]:
                raise invalid_argument("checkpoint.save", path, wrong[0], "keys that are words without a leading $")
            return {key: self.encode(value, f"{path}.{key}") for key, value in node.items()}
        if isinstance(node, Tensor):
            name = f"{len(self.tensors)}:{path}"  # a key may hold a dot: the number keeps names apart
            self.tensors[name] = self._alone(node.detach().cpu().contiguous())
            return {"$tensor": name}
        raise invalid_argument("checkpoint.save", path, type(node).__name__, "tensors, numbers, words, lists and dicts")

    def _alone(self, tensor: Tensor) -> Tensor:
        """Two names may share memory, which a file cannot."""
        memory = tensor.untyped_storage().data_ptr()
        if memory in self._memory:
            return tensor.clone()
        self._memory.add(memory)
        return tensor


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if isinstance(node, dict):
        if "$tensor" in node:
            return tensors[node["$tensor"]]
        if "$float" in node:
            return float(node["$float"])
        return {key: _decode(value, tensors) for key, value in node.items()}
    return node


def _versions() -> dict[str, str]:
    return {"hansa": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _path(home: Path, number: int) -> Path:
    return home / f"{number:08d}"


def _numbers(home: Path) -> list[int]:
    return sorted(int(path.name) for path in home.iterdir() if path.name.isdigit()) if home.is_dir() else []


def _discard(path: Path) -> None:
    """Remove a generation: out of sight by one rename, so that a crash leaves no part of it in place."""
    aside = path.with_name(path.name + io.ASIDE)
    io.rename(path, aside)
    io.remove(aside)


def _sweep(home: Path) -> None:
    for path in home.glob(f"*{io.ASIDE}"):
        io.remove(path)
