"""Data larger than memory: arrays that stay in their files and are read row by row."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hansa.core.errors import HansaError
from hansa.data.errors import DataError, damaged, missing
from hansa.data.federated import Dataset, FederatedData

_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
_HEADER = 1 << 24  # bytes that a header may have
_SAMPLES, _BLOCK = 64, 1 << 16  # of a file, for its identity


class Mapped:
    """The rows of a .npy file, or of a tensor ``name`` in a .safetensors file, read when they are asked for.

    It goes to workers as its path: none of them copies the file. Bytes become float32 / 255, as everywhere.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(6.0).reshape(3, 2))
    ...     Mapped(f"{folder}/x.npy").gather(torch.tensor([2])).tolist()
    [[4.0, 5.0]]
    """

    def __init__(self, path: Path | str, name: str | None = None) -> None:
        self.path, self.name = Path(path).resolve(), name
        if not self.path.is_file():
            raise missing(path, "Name a .npy or .safetensors file.")
        try:
            self.array: Any = _npy(self.path) if name is None else _safetensors(self.path, name)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise damaged(self.path, "a .npy or .safetensors file of numbers", problem) from problem
        if self.array.dtype.kind not in "iuf" or self.array.ndim < 1:
            raise damaged(self.path, "numbers, one entry a row", f"{self.array.dtype} {self.array.shape}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapped, (self.path, self.name)

    def __repr__(self) -> str:
        return f"Mapped({str(self.path)!r}{'' if self.name is None else f', {self.name!r}'})"

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return int(self.array.ndim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that it gives."""
        if self.array.dtype == np.uint8 or self.array.dtype.kind == "f":
            return torch.float64 if self.array.dtype.itemsize == 8 else torch.float32
        return torch.int64

    def is_floating_point(self) -> bool:
        """Whether its rows are real numbers."""
        return self.dtype.is_floating_point

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows, in memory."""
        found = torch.from_numpy(np.ascontiguousarray(self.array[rows.cpu().numpy()]).astype(_native(self.array.dtype)))
        return found.to(self.dtype).div_(255) if self.array.dtype == np.uint8 else found.to(self.dtype)

    def identity(self) -> str:
        """Its size, kind and shape, and a digest of 64 blocks from all over the file: what a run depends on."""
        state = hashlib.sha256(f"{self.path.name} {self.name} {self.array.dtype} {self.array.shape}".encode())
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            state.update(str(size).encode())
            for place in range(_SAMPLES):
                file.seek(place * max(0, size - _BLOCK) // (_SAMPLES - 1))
                state.update(file.read(_BLOCK))
        return state.hexdigest()


def from_mapped(
    folder: Path | str, *, clients: Any = None, how: Any = None, seed: int = 0, classes: int | None = None
) -> FederatedData:
    """Federated data from arrays that stay on disk: ``inputs`` and ``targets``, and if they are there ``owners``,
    ``test_inputs`` and ``test_targets``, each a .npy file of the folder, or all of them tensors of one .safetensors
    file. ``inputs.NAME`` give inputs that are a dict.

    Inputs, and targets of several numbers a row, are read batch by batch; who owns what is in memory. ``clients`` is as
    in `from_arrays`; without it the owners are those in the file. Numbers are not looked through beforehand.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/inputs.npy", np.zeros((6, 2), np.float32))
    ...     np.save(f"{folder}/targets.npy", np.arange(6) % 2)
    ...     from_mapped(folder, clients=3).population
    3
    """
    from hansa.data.arrays import dealt

    found = _arrays(Path(folder))
    for name in ("inputs", "targets"):
        if name not in found:
            raise DataError(f"{folder}: no {name}: expected inputs and targets, found {', '.join(found) or 'nothing'}.")
    targets = _in_memory(found["targets"])
    held = found.get("test_targets")
    labelled = isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.ndim == 1
    if classes is None and labelled:
        classes = int(targets.max()) + 1
    data = Dataset(
        Path(folder).name,
        found["inputs"],
        targets,
        found.get("test_inputs"),
        None if held is None else _in_memory(held),
        classes,
    )
    if clients is None:
        if "owners" not in found:
            raise HansaError(f"{folder}: expected clients=, or owners among its files.")
        clients = found["owners"].array[:]
    return dealt(data, clients, how, seed)


def _arrays(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        named = {name: Mapped(folder, name) for name in sorted(_header(folder)[0]) if name != "__metadata__"}
    elif folder.is_dir():
        named = {path.stem: Mapped(path) for path in sorted(folder.glob("*.npy"))}
    else:
        raise missing(folder, "Name a folder of .npy files, or a .safetensors file.")
    found: dict[str, Any] = {}
    for name, array in named.items():
        whole, _, part = name.partition(".")
        if part:
            found.setdefault(whole, {})[part] = array
        else:
            found[whole] = array
    return found


def _in_memory(array: Any) -> Any:
    """Class numbers and single values are few bytes a row, and partitions look at them; all else stays on disk."""
    if isinstance(array, Mapped) and array.ndim == 1:
        return array.gather(torch.arange(len(array)))
    return array


def _npy(path: Path) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _HEADER:
            raise damaged(path, "a .safetensors file", f"a header of {size} bytes")
        found = json.loads(file.read(size))
    if not isinstance(found, dict):
        raise damaged(path, "a .safetensors file", "another header")
    return found, 8 + size


def _safetensors(path: Path, name: str) -> Any:
    header, start = _header(path)
    if name not in header:
        raise DataError(f"{path}: no tensor {name!r}, there are {', '.join(sorted(header))}.")
    entry = header[name]
    if entry["dtype"] not in _KINDS:
        raise DataError(f"{path}: {name} is {entry['dtype']}: expected one of {', '.join(_KINDS)}.")
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    kind = np.dtype(_KINDS[entry["dtype"]])
    if int(np.prod(shape, dtype=np.int64)) * kind.itemsize != end - begin:
        raise damaged(path, f"{name} of shape {shape}", f"{end - begin} bytes")
    return np.memmap(path, kind, mode="r", offset=start + begin, shape=shape)


def _native(kind: np.dtype[Any]) -> np.dtype[Any]:
    """A kind of number in this machine's byte order, that torch has."""
    wide = {"u2": "i4", "u4": "i8"}.get(kind.str[1:], kind.str[1:])
    return np.dtype(wide)
