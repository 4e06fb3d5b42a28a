"""Federated data from memory-mapped arrays, which stay in their files and are read row by row."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hansa.core.errors import HansaError
from hansa.data.federated import Dataset, FederatedData
from hansa.data.files import DataError, invalid_file, missing_file

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
_MAX_HEADER = 1 << 24
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # of a file, for its identity


class MemmapArray:
    """An array in a .npy or .safetensors file whose rows are read when a batch needs them.

    Workers receive the path, not the data. Bytes become float32 / 255, as everywhere.

    Args:
        path: The file.
        name: Name of the tensor in a .safetensors file; None for a .npy file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(6.0).reshape(3, 2))
    ...     MemmapArray(f"{folder}/x.npy").gather(torch.tensor([2])).tolist()
    [[4.0, 5.0]]
    """

    def __init__(self, path: Path | str, name: str | None = None) -> None:
        self.path, self.name = Path(path).resolve(), name
        if not self.path.is_file():
            raise missing_file(path, "Give a .npy or .safetensors file.")
        try:
            self.array: Any = _open_npy(self.path) if name is None else _open_safetensors(self.path, name)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise invalid_file(self.path, "a .npy or .safetensors file of numbers", problem) from problem
        if self.array.dtype.kind not in "iuf" or self.array.ndim < 1:
            raise invalid_file(self.path, "numbers, one entry per row", f"{self.array.dtype} {self.array.shape}")

    def __reduce__(self) -> tuple[Any, ...]:
        return MemmapArray, (self.path, self.name)

    def __repr__(self) -> str:
        return f"MemmapArray({str(self.path)!r}{'' if self.name is None else f', {self.name!r}'})"

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(self.array.ndim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows that `gather` returns."""
        if self.array.dtype == np.uint8 or self.array.dtype.kind == "f":
            return torch.float64 if self.array.dtype.itemsize == 8 else torch.float32
        return torch.int64

    def is_floating_point(self) -> bool:
        """Return whether rows are floating point."""
        return self.dtype.is_floating_point

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows as a tensor."""
        rows_read = torch.from_numpy(
            np.ascontiguousarray(self.array[rows.cpu().numpy()]).astype(_torch_compatible(self.array.dtype))
        )
        return rows_read.to(self.dtype).div_(255) if self.array.dtype == np.uint8 else rows_read.to(self.dtype)

    def identity(self) -> str:
        """Return a digest of size, type, shape and 64 blocks of the file, which identifies the data of a run."""
        state = hashlib.sha256(f"{self.path.name} {self.name} {self.array.dtype} {self.array.shape}".encode())
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            state.update(str(size).encode())
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                state.update(file.read(_BLOCK_BYTES))
        return state.hexdigest()


def from_memmap(
    folder: Path | str,
    *,
    clients: Any = None,
    partition: Any = None,
    seed: int | None = None,
    classes: int | None = None,
) -> FederatedData:
    """Federated data from arrays that stay on disk.

    The arrays are ``inputs`` and ``targets``, and optionally ``owners``, ``test_inputs`` and ``test_targets``. Arrays
    ``inputs.NAME`` form a dict. Inputs, and targets of several numbers per row, are read batch by batch and not checked
    beforehand.

    Args:
        folder: A folder of .npy files, or one .safetensors file.
        clients: As in `from_arrays`; by default the array ``owners``.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        classes: Number of classes; by default from the targets.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/inputs.npy", np.zeros((6, 2), np.float32))
    ...     np.save(f"{folder}/targets.npy", np.arange(6) % 2)
    ...     from_memmap(folder, clients=3).population
    3
    """
    from hansa.data.arrays import assign_clients

    arrays = _open_arrays(Path(folder))
    for name in ("inputs", "targets"):
        if name not in arrays:
            raise DataError(
                f"{folder}: no {name}: expected inputs and targets, found {', '.join(arrays) or 'nothing'}."
            )
    targets = _load_small(arrays["targets"])
    test_targets = arrays.get("test_targets")
    labelled = isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.ndim == 1
    if classes is None and labelled:
        classes = int(targets.max()) + 1
    data = Dataset(
        Path(folder).name,
        arrays["inputs"],
        targets,
        arrays.get("test_inputs"),
        None if test_targets is None else _load_small(test_targets),
        classes,
    )
    if clients is None:
        if "owners" not in arrays:
            raise HansaError(f"{folder}: expected clients=, or an array owners.")
        clients = arrays["owners"].array[:]
    return assign_clients(data, clients, partition, seed)


def _open_arrays(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        named = {name: MemmapArray(folder, name) for name in sorted(_read_header(folder)[0]) if name != "__metadata__"}
    elif folder.is_dir():
        named = {path.stem: MemmapArray(path) for path in sorted(folder.glob("*.npy"))}
    else:
        raise missing_file(folder, "Give a folder of .npy files, or a .safetensors file.")
    arrays: dict[str, Any] = {}
    for name, array in named.items():
        group, _, entry = name.partition(".")
        if entry:
            arrays.setdefault(group, {})[entry] = array
        else:
            arrays[group] = array
    return arrays


def _load_small(array: Any) -> Any:
    """Load class numbers and single values, which partitions need; all else stays on disk."""
    if isinstance(array, MemmapArray) and array.ndim == 1:
        return array.gather(torch.arange(len(array)))
    return array


def _open_npy(path: Path) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _MAX_HEADER:
            raise invalid_file(path, "a .safetensors file", f"a header of {size} bytes")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise invalid_file(path, "a .safetensors file", "another header")
    return header, 8 + size


def _open_safetensors(path: Path, name: str) -> Any:
    header, start = _read_header(path)
    if name not in header:
        raise DataError(f"{path}: no tensor {name!r}, there are {', '.join(sorted(header))}.")
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise DataError(f"{path}: {name} is {entry['dtype']}: expected one of {', '.join(_DTYPES)}.")
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != end - begin:
        raise invalid_file(path, f"{name} of shape {shape}", f"{end - begin} bytes")
    return np.memmap(path, dtype, mode="r", offset=start + begin, shape=shape)


def _torch_compatible(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in native byte order, wide enough for a type of torch."""
    return np.dtype({"u2": "i4", "u4": "i8"}.get(dtype.str[1:], dtype.str[1:]))
