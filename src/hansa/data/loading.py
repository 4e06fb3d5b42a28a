"""From a name to tensors: read, verify, normalise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import HansaError
from hansa.data.embedded import ASSET, read_embedded
from hansa.data.errors import DataError, MissingError, damaged
from hansa.data.federated import Dataset, FederatedData, partition
from hansa.data.folder import data_folder
from hansa.data.partitions import Partition, dirichlet, natural
from hansa.data.readers.cifar import read_cifar
from hansa.data.readers.idx import read_idx
from hansa.data.readers.leaf import read_femnist
from hansa.data.readers.shakespeare import read_shakespeare
from hansa.data.sources import SOURCES, Member, Source, source
from hansa.data.synthetic import synthetic, two_gaussians

Bytes = npt.NDArray[np.uint8]
_CHUNK = 500
SYNTHETIC: dict[str, Callable[..., FederatedData]] = {"two-gaussians": two_gaussians, "synthetic": synthetic}
OWNED = {
    "csv-folder": "A folder of CSV files, one a client: folder, and as options target, test, drop, kind, ...",
    "hub-femnist": "FEMNIST by writer from the Hugging Face hub (hansa[datasets]): options owners, test, source",
    "hub-shakespeare": "Shakespeare by role from the Hugging Face hub (hansa[datasets]): options owners, test, source",
}
"""Data of which every row has its owner already, and what they are."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What `check` found of one file: ``ok``, ``missing`` or ``damaged``, and why.

    >>> FileState("train.bin", "missing").state
    'missing'
    """

    path: str
    state: str
    detail: str = ""


def load(name: str | Source, folder: Path | str | None = None, **options: Any) -> Dataset:
    """A data set by name, its files verified by SHA-256 where one is known, images scaled and normalised.

    ``normalize=False`` leaves images within 0 and 1, for augmentations that come before the normalisation.

    >>> data = load("fashion-mini")
    >>> tuple(data.inputs.shape), tuple(data.test_inputs.shape), data.classes
    ((10000, 1, 28, 28), (2000, 1, 28, 28), 10)
    """
    entry = source(name) if isinstance(name, str) else name
    if entry.layout != "shakespeare":
        entry = _as_asked(entry, options)
    root = data_folder(folder)
    if entry.layout == "embedded":
        return _images(entry, *read_embedded())
    if entry.layout == "idx":
        return _images(entry, *(_read_idx(root, entry, member) for member in entry.members))
    if entry.layout == "cifar":
        return _images(entry, *_read_cifar(root, entry))
    if entry.layout == "femnist":
        return _femnist(root, entry)
    return _shakespeare(root, entry, options)


def _as_asked(entry: Source, options: dict[str, Any]) -> Source:
    """An image set, with the numbers to normalise by that were asked for."""
    normalize = options.get("normalize", True)
    if set(options) - {"normalize"} or not isinstance(normalize, bool):
        told = ", ".join(f"{name}: {value!r}" for name, value in sorted(options.items()))
        raise HansaError(f"{entry.name}: takes normalize: true or false and no other options, found {told}.")
    if normalize:
        return entry
    return replace(entry, mean=(0.0,) * len(entry.mean), std=(1.0,) * len(entry.std))


def federate(
    name: str,
    how: Partition | None = None,
    clients: int | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    **options: Any,
) -> FederatedData:
    """Federated data by name: a data set dealt by ``how``, or a synthetic one, which brings its own clients.

    By default data with natural owners are theirs, other data are dealt by ``dirichlet(0.3)``.

    >>> federate("fashion-mini", clients=50).population
    50
    >>> federate("synthetic", clients=3, alpha=0.5, beta=0.5).population
    3
    """
    if name in SYNTHETIC:
        if how is not None and not isinstance(how, natural):
            raise HansaError(f"{name}: brings its own clients and cannot be dealt by {how!r}.")
        given = options if clients is None else {**options, "clients": clients}
        try:
            return SYNTHETIC[name](seed=seed, **given)
        except TypeError as problem:
            raise HansaError(f"{name}: {problem}.") from None
    if name in OWNED:
        if (how is not None and not isinstance(how, natural)) or clients is not None:
            raise HansaError(f"{name}: its rows have owners already: leave out how and clients.")
        return _owned(name, folder, seed, options)
    data = load(source(name, also=[*SYNTHETIC, *OWNED]), folder, **options)
    if how is None:
        how = natural() if data.groups is not None else dirichlet(0.3)
    return partition(data, how, clients, seed)


def names() -> list[str]:
    """All data sets that `federate` knows.

    >>> "cifar10" in names()
    True
    """
    return [*SOURCES, *SYNTHETIC, *OWNED]


def check(name: str | Source, folder: Path | str | None = None) -> tuple[FileState, ...]:
    """The state of every file of a data set: read, and compared with its SHA-256 where one is known.

    >>> check("fashion-mini")[0].state
    'ok'
    """
    entry = source(name) if isinstance(name, str) else name
    root = data_folder(folder)
    if entry.layout == "embedded":
        return (_state(ASSET, read_embedded),)
    if entry.layout == "idx":
        return tuple(_state(root / m.path, partial(_read_idx, root, entry, m)) for m in entry.members)
    if entry.layout == "cifar":
        return tuple(_state(root / m.path, partial(_read_batch, root, entry, m)) for m in entry.members)
    return (_state(root / entry.folder, partial(load, entry, folder)),)


def present(name: str | Source, folder: Path | str | None = None) -> bool:
    """Whether the files seem to be there, without reading them.

    >>> present("fashion-mini")
    True
    """
    entry = source(name) if isinstance(name, str) else name
    root = data_folder(folder)
    if entry.members:
        paths = [root / member.path for member in entry.members]
        return all(path.is_file() or path.with_name(path.name + ".gz").is_file() for path in paths)
    place = root / entry.folder
    return entry.layout == "embedded" or (place.is_dir() and any(place.iterdir()))


def _state(path: Path | str, read: Callable[[], object]) -> FileState:
    try:
        read()
    except MissingError as problem:
        return FileState(str(path), "missing", str(problem))
    except DataError as problem:
        return FileState(str(path), "damaged", str(problem))
    return FileState(str(path), "ok")


def _verified(path: Path, entry: Source, member: Member, rows: int, digest: str) -> None:
    if rows != member.rows:
        raise damaged(path, f"{member.rows} rows", f"{rows}", entry.remedy)
    if digest != member.sha256:
        raise damaged(path, f"contents of SHA-256 {member.sha256}", digest, entry.remedy)


def _read_idx(root: Path, entry: Source, member: Member) -> Bytes:
    path = root / member.path
    images = "images" in path.name
    array, digest = read_idx(path, axes=3 if images else 1, remedy=entry.remedy)
    if images and array.shape[1:] != entry.shape[1:]:
        raise damaged(path, f"images of {entry.shape[1:]}", f"{array.shape[1:]}")
    _verified(path, entry, member, len(array), digest)
    return array


def _read_batch(root: Path, entry: Source, member: Member) -> tuple[Bytes, Bytes]:
    path = root / member.path
    images, labels, digest = read_cifar(path, entry.classes, entry.remedy)
    _verified(path, entry, member, len(images), digest)
    return images, labels


def _read_cifar(root: Path, entry: Source) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    batches = [(member.train, *_read_batch(root, entry, member)) for member in entry.members]
    images, labels, tests, test_labels = (
        np.concatenate([batch[place] for batch in batches if batch[0] is train])
        for train, place in ((True, 1), (True, 2), (False, 1), (False, 2))
    )
    return images, labels, tests, test_labels


def _images(entry: Source, images: Bytes, labels: Bytes, tests: Bytes, test_labels: Bytes) -> Dataset:
    for rows, marks in ((images, labels), (tests, test_labels)):
        if len(rows) != len(marks):
            raise DataError(f"{entry.name}: {len(rows)} images but {len(marks)} labels.")
    return Dataset(
        name=entry.name,
        inputs=normalised(images.reshape(-1, *entry.shape), entry.mean, entry.std),
        targets=torch.from_numpy(labels.astype(np.int64)),
        test_inputs=normalised(tests.reshape(-1, *entry.shape), entry.mean, entry.std),
        test_targets=torch.from_numpy(test_labels.astype(np.int64)),
        classes=entry.classes,
        class_names=entry.class_names,
    )


def _owned(name: str, folder: Path | str | None, seed: int, options: dict[str, Any]) -> FederatedData:
    from hansa.data.csv_folder import from_csv_folder
    from hansa.data.hub import from_hub

    try:
        if name == "csv-folder":
            if folder is None:
                raise HansaError("csv-folder: expected the folder that the files are in (data.folder).")
            return from_csv_folder(folder, seed=seed, **options)
        return from_hub(name.removeprefix("hub-"), **options)
    except TypeError as problem:
        raise HansaError(f"{name}: {problem}.") from None


def _femnist(root: Path, entry: Source) -> Dataset:
    found = read_femnist(root / entry.folder, entry.remedy)
    tested = len(found.test_targets) > 0
    return Dataset(
        name=entry.name,
        inputs=normalised(found.inputs, entry.mean, entry.std),
        targets=torch.from_numpy(found.targets),
        test_inputs=normalised(found.test_inputs, entry.mean, entry.std) if tested else None,
        test_targets=torch.from_numpy(found.test_targets) if tested else None,
        classes=entry.classes,
        groups=torch.from_numpy(found.groups),
        group_names=found.names,
        class_names=entry.class_names,
        test_groups=torch.from_numpy(found.test_groups) if tested else None,
    )


def _shakespeare(root: Path, entry: Source, options: dict[str, Any]) -> Dataset:
    try:
        found = read_shakespeare(root / entry.folder, entry.remedy, **options)
    except TypeError as problem:
        raise HansaError(f"shakespeare: {problem}. It takes stride, test_stride and test_fraction.") from None
    return Dataset(
        name=entry.name,
        inputs=found.inputs,
        targets=found.targets,
        test_inputs=found.test_inputs if len(found.test_inputs) else None,
        test_targets=found.test_targets if len(found.test_targets) else None,
        classes=entry.classes,
        groups=found.groups,
        group_names=found.names,
        test_groups=found.test_groups if len(found.test_targets) else None,
    )


def normalised(images: Bytes, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """(x / 255 - mean) / std as float32, of shape [n, C, H, W] and channels-last in memory.

    >>> normalised(np.full((1, 1, 1, 2), 255, np.uint8), (0.5,), (0.25,)).tolist()
    [[[[2.0, 2.0]]]]
    """
    count, channels, height, width = images.shape
    rows = torch.empty(count, height, width, channels)
    shift, scale = torch.tensor(mean), torch.tensor(std)
    for first in range(0, count, _CHUNK):  # small enough to stay in the cache: four times as fast as all at once
        part = rows[first : first + _CHUNK]
        part.copy_(torch.from_numpy(images[first : first + _CHUNK].astype(np.float32)).permute(0, 2, 3, 1))
        part.div_(255).sub_(shift).div_(scale)
    return rows.permute(0, 3, 1, 2)
