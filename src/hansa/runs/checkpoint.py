"""Checkpoints: the state of a run on disk, exact, with SHA-256 and without pickle. Several generations are kept."""

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
from hansa.runs.store.io import DamagedFileError

log = logging.getLogger("hansa")

Meta: TypeAlias = dict[str, Any]
"""Plain data beside the state: round, seed, digest of the configuration, and versions."""

FORMAT = 1
MIGRATIONS: dict[int, Callable[[State, Meta], tuple[State, Meta]]] = {}
"""Migrations from format n to n + 1; a format without one is refused."""

MANIFEST, TREE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
REMEDY = "Restore it, or use the checkpoint before it: `hansa resume --fallback`."


class Checkpoint(NamedTuple):
    """A state and its metadata."""

    state: State
    meta: Meta


def save(folder: str | Path, state: State, meta: Mapping[str, Any], *, keep: int = 3) -> Path:
    """Write a new generation, remove all but the newest ``keep``, and return the new folder.

    Files are written to a temporary folder and synced, the manifest of SHA-256 digests last; then the folder is
    renamed. A crash never leaves a partial generation.
    """
    check_integer("checkpoint.save", "keep", keep)
    folder_path = Path(folder)
    encoder, meta_encoder = _Encoder(), _Encoder()
    tree = encoder.encode(state, "state")
    encoded_meta = meta_encoder.encode({**meta, "versions": _versions()}, "meta")
    if meta_encoder.tensors:
        raise invalid_argument("checkpoint.save", "meta", "a tensor", "plain data", "Tensors belong in the state.")
    files = {
        TREE: json.dumps(tree, separators=(",", ":"), allow_nan=False).encode(),
        TENSORS: safetensors.torch.save(encoder.tensors),
    }
    io.make_folder(folder_path)
    _sweep(folder_path)
    number = max(_numbers(folder_path), default=0) + 1
    target = _path(folder_path, number)
    temporary = target.with_name(target.name + io.TEMPORARY_SUFFIX)
    io.make_folder(temporary)
    for name, data in files.items():
        io.write_new(temporary / name, data)
    manifest = {
        "format": FORMAT,
        "generation": number,
        "files": {name: {"sha256": io.sha256(data), "bytes": len(data)} for name, data in files.items()},
        "meta": encoded_meta,
    }
    io.write_sealed(temporary / MANIFEST, manifest, aside=False)
    io.sync_folder(temporary)
    io.rename(temporary, target)
    for old in _numbers(folder_path)[:-keep]:
        _discard(_path(folder_path, old))
    return target


def load(folder: str | Path, *, fallback: bool = False) -> Checkpoint:
    """Load the newest generation and verify every file against its SHA-256.

    Damage raises an error that names the file. With ``fallback``, warn and return the newest undamaged generation.
    """
    home = Path(folder)
    numbers = _numbers(home)
    if not numbers:
        raise HansaError(f"{home}: no checkpoint. Pass the folder of a run that has saved one.")
    if not fallback:
        return _load(_path(home, numbers[-1]), numbers[-1])
    for checkpoint in iter_intact(home):
        return checkpoint
    raise DamagedFileError(f"{home}: all {len(numbers)} checkpoints are damaged.")


def iter_intact(folder: str | Path) -> Iterator[Checkpoint]:
    """Yield every undamaged generation, newest first, and warn about the others."""
    home = Path(folder)
    for number in reversed(_numbers(home)):
        try:
            yield _load(_path(home, number), number)
        except DamagedFileError as damage:
            log.warning("%s Falling back to the checkpoint before it.", damage)


def list_metadata(folder: str | Path) -> list[Meta]:
    """Return the metadata of every generation with an undamaged manifest, oldest first."""
    metadata = []
    for number in _numbers(Path(folder)):
        try:
            metadata.append(_decode(_manifest(_path(Path(folder), number), number)["meta"], {}))
        except DamagedFileError as damage:
            log.warning("%s", damage)
    return metadata


def _load(path: Path, number: int) -> Checkpoint:
    manifest = _manifest(path, number)
    data = {name: _read_checked(path / name, facts) for name, facts in manifest["files"].items()}
    tensors = safetensors.torch.load(data[TENSORS])
    state, meta = _decode(json.loads(data[TREE]), tensors), _decode(manifest["meta"], {})
    for step in range(manifest["format"], FORMAT):
        log.info("%s: migrating from checkpoint format %d to %d", path, step, step + 1)
        state, meta = MIGRATIONS[step](state, meta)
    return Checkpoint(state, meta)


def _manifest(path: Path, number: int) -> dict[str, Any]:
    """Return the manifest, if this version can read its format."""
    manifest = io.read_sealed(path / MANIFEST)
    format = manifest["format"]
    if format > FORMAT or any(step not in MIGRATIONS for step in range(format, FORMAT)):
        writer = manifest["meta"].get("versions", {}).get("hansa", "unknown")
        raise HansaError(
            f"{path} has checkpoint format {format}, written by Hansa {writer}; this is Hansa {_versions()['hansa']}, "
            f"which reads format {FORMAT}. Resume with Hansa {writer}, or start a new run."
        )
    if manifest["generation"] != number:
        raise DamagedFileError(
            f"{path / MANIFEST} describes generation {manifest['generation']}: folders were swapped. {REMEDY}"
        )
    return manifest


def _read_checked(path: Path, facts: Mapping[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing. {REMEDY}") from None
    if len(data) != facts["bytes"]:
        raise DamagedFileError(f"{path} is damaged: {len(data)} bytes instead of {facts['bytes']}. {REMEDY}")
    if io.sha256(data) != facts["sha256"]:
        raise DamagedFileError(f"{path} is damaged: its SHA-256 does not match. {REMEDY}")
    return data


class _Encoder:
    """Encodes a tree as JSON with ``{"$tensor": name}`` for each tensor, and collects the tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def encode(self, node: object, path: str) -> Any:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if isinstance(node, float):  # JSON has no NaN or infinity
            return node if math.isfinite(node) else {"$float": repr(float(node))}
        if isinstance(node, list):
            return [self.encode(value, f"{path}[{i}]") for i, value in enumerate(node)]
        if isinstance(node, dict):
            if wrong := [key for key in node if not isinstance(key, str) or key.startswith("$")]:
                raise invalid_argument("checkpoint.save", path, wrong[0], "string keys without a leading $")
            return {key: self.encode(value, f"{path}.{key}") for key, value in node.items()}
        if isinstance(node, Tensor):
            name = f"{len(self.tensors)}:{path}"  # keys may contain dots: the number makes names unique
            self.tensors[name] = self._unshared(node.detach().cpu().contiguous())
            return {"$tensor": name}
        raise invalid_argument(
            "checkpoint.save", path, type(node).__name__, "tensors, numbers, strings, lists and dicts"
        )

    def _unshared(self, tensor: Tensor) -> Tensor:
        """Return a copy if the tensor shares memory with an earlier one, which a file cannot represent."""
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
    """Rename a generation, then remove it, so that a crash leaves no partial generation."""
    aside = path.with_name(path.name + io.TEMPORARY_SUFFIX)
    io.rename(path, aside)
    io.remove(aside)


def _sweep(home: Path) -> None:
    for path in home.glob(f"*{io.TEMPORARY_SUFFIX}"):
        io.remove(path)
