"""FEMNIST and Shakespeare by their natural owners, from the Hugging Face hub (the extra ``datasets``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import HansaError, check_decay, check_integer, invalid_argument, short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.errors import DataError
from hansa.data.federated import Dataset, FederatedData, partition
from hansa.data.loading import normalised
from hansa.data.partitions import natural
from hansa.data.readers.shakespeare import WINDOW, encode
from hansa.data.sources import SOURCES

_CHUNK = 20_000


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Where a set lies on the hub, and which columns say what."""

    place: str
    owner: str
    inputs: str
    targets: str
    read: Callable[[Any, _Recipe], tuple[torch.Tensor, torch.Tensor]]


def from_hub(
    name: str,
    *,
    owners: int | None = None,
    test: float = 0.1,
    source: Any = None,
) -> FederatedData:
    """``femnist`` by writer or ``shakespeare`` by role, as the hub has them.

    A share ``test`` of each owner's rows is for testing: the last windows of a role, of a writer those that a fixed key
    chooses.

    ``owners`` takes the first so many. ``source`` is where else the rows are: a data set of the package ``datasets``, a
    folder that its ``save_to_disk`` wrote, or another name on the hub with the same columns.
    """
    if name not in RECIPES:
        raise HansaError(f"from_hub({short_repr(name)}): no such set. {suggestion(str(name), RECIPES)}")
    check_decay("from_hub", "test", test)
    recipe = RECIPES[name]
    found = _opened(recipe, source)
    lacking = [word for word in (recipe.owner, recipe.inputs, recipe.targets) if word not in found.column_names]
    if lacking:
        raise DataError(f"{name}: no column {lacking[0]!r}. {suggestion(lacking[0], found.column_names)}")
    labels = np.asarray(found[recipe.owner][:]).astype(str)
    names, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(first)  # owners in the order in which they come
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    groups, names = place[numbers], names[order]
    if owners is not None:
        check_integer("from_hub", "owners", owners)
        if owners > len(names):
            raise invalid_argument("from_hub", "owners", owners, f"at most {len(names)}, which there are")
        kept = np.flatnonzero(groups < owners)
        found, groups, names = found.select(kept), groups[kept], names[:owners]
    x, y = recipe.read(found, recipe)
    held = _held(name, groups, names, test)
    entry, train, tested = SOURCES[name], torch.from_numpy(~held), torch.from_numpy(held)
    made = Dataset(
        name=name,
        inputs=x[train],
        targets=y[train],
        test_inputs=x[tested] if bool(held.any()) else None,
        test_targets=y[tested] if bool(held.any()) else None,
        classes=entry.classes,
        groups=torch.from_numpy(groups[~held]),
        test_groups=torch.from_numpy(groups[held]) if bool(held.any()) else None,
        group_names=tuple(map(str, names)),
        class_names=entry.class_names,
    )
    return partition(made, natural(), None, 0)


def _opened(recipe: _Recipe, source: Any) -> Any:
    if source is not None and not isinstance(source, (str, Path)):
        return _train(source)
    try:
        import datasets
    except ImportError as error:
        raise HansaError("data of the hub need a package: pip install 'hansa[datasets]'.") from error
    try:
        if source is not None and Path(source).is_dir():
            return _train(datasets.load_from_disk(str(source)))
        return _train(datasets.load_dataset(recipe.place if source is None else str(source)))
    except Exception as error:  # whatever the package, the network or the files do
        where = recipe.place if source is None else source
        raise DataError(f"{where}: cannot be opened ({type(error).__name__}: {str(error)[:300]}).") from error


def _train(found: Any) -> Any:
    return found["train"] if hasattr(found, "keys") and "train" in found else found


def _held(name: str, groups: npt.NDArray[np.int64], names: npt.NDArray[Any], share: float) -> npt.NDArray[np.bool_]:
    """The rows for testing, the share of every owner's rounded down."""
    held = np.zeros(len(groups), bool)
    order = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[order], np.arange(len(names) + 1))
    for owner, user in enumerate(names):
        rows = order[bounds[owner] : bounds[owner + 1]]
        count = int(share * len(rows))
        if name == "femnist":
            held[rows[Key(0).child("femnist test", str(user)).numpy().permutation(len(rows))[:count]]] = True
        else:
            held[rows[len(rows) - count :]] = True
    return held


def _images(found: Any, recipe: _Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.empty((len(found), 1, 28, 28), np.uint8)
    for at, image in enumerate(found[recipe.inputs]):
        array = np.asarray(image.convert("L") if hasattr(image, "convert") else image, dtype=np.uint8)
        if array.shape != (28, 28):
            raise DataError(f"femnist: image {at} has shape {array.shape}: expected (28, 28).")
        pixels[at, 0] = array
    entry = SOURCES["femnist"]
    labels = torch.from_numpy(np.asarray(found[recipe.targets][:], dtype=np.int64))
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < entry.classes:
        raise DataError(f"femnist: labels from {int(labels.min())} to {int(labels.max())}: expected 0 to 61.")
    return normalised(pixels, entry.mean, entry.std), labels


def _windows(found: Any, recipe: _Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    windows, following = [], []
    for first in range(0, len(found), _CHUNK):
        some = found[first : first + _CHUNK]
        x, y = some[recipe.inputs], some[recipe.targets]
        wrong = next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if (len(a), len(b)) != (WINDOW, 1)), None)
        if wrong is not None:
            raise DataError(
                f"shakespeare: row {first + wrong} has {len(x[wrong])} characters and {len(y[wrong])} to follow: "
                f"expected {WINDOW} and 1."
            )
        windows.append(encode("".join(x), "shakespeare").reshape(-1, WINDOW))
        following.append(encode("".join(y), "shakespeare").astype(np.int64))
    return torch.from_numpy(np.concatenate(windows)), torch.from_numpy(np.concatenate(following))


RECIPES = {
    "femnist": _Recipe("flwrlabs/femnist", "writer_id", "image", "character", _images),
    "shakespeare": _Recipe("flwrlabs/shakespeare", "character_id", "x", "y", _windows),
}
"""The sets by name."""
