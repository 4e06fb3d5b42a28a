"""Bring your own: arrays, a torch Dataset, a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hansa.core.errors import HansaError, suggestion
from hansa.data.client_tests import named_test_clients
from hansa.data.federated import Dataset, FederatedData, partition, with_clients
from hansa.data.owners import split_of
from hansa.data.partitions import Partition, iid, natural
from hansa.data.split import Split
from hansa.training.losses import Weighted

IGNORED = -100
"""The label that torch's losses ignore by default; allowed where a row has several targets."""

Clients: TypeAlias = "int | Split | Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor"


def from_arrays(
    x: Any,
    y: Any,
    *,
    clients: Clients,
    how: Partition | None = None,
    seed: int = 0,
    test: tuple[Any, ...] | None = None,
    test_clients: Any = None,
    weights: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "arrays",
) -> FederatedData:
    """Federated data from a pair of arrays, NumPy or torch.

    ``clients`` is a number of clients dealt to by ``how`` (iid by default), the owner of every row (numbers from 0, or
    names, as an array, a list, a tuple or a pandas Series), or one list of row numbers a client. uint8 becomes
    ``dtype`` / 255, floats ``dtype``, other integers int64. Targets are class numbers, or any numbers: floats for
    regression, several a row for several labels or a sequence; there -100 marks what a loss is to ignore. ``x`` and
    ``y`` may be dicts or tuples of arrays of equal length, as a tokenizer gives them: see `hansa.training.model_call`.
    ``weights`` says how much each row counts in the loss; ``test`` is (x, y), or (x, y, weights).

    ``test_clients`` is the owner of every test row, as ``clients`` names them (-1 for nobody's): then each client is
    also evaluated on its own. Or ``"labels"``, which deals the test rows as the training labels are, or a share, such
    as 0.2, of each client's rows that is held out to be the test set.

    >>> from_arrays(np.zeros((6, 2)), np.array([0, 1, 0, 1, 0, 1]), clients=[[0, 1], [2, 3, 4]]).sizes.tolist()
    [2, 3]
    """
    data = dataset(x, y, test=test, weights=weights, classes=classes, dtype=dtype, name=name)
    held = dealt(data, clients, how, seed)
    return held if test_clients is None else named_test_clients(held, clients, test_clients, seed)


def dataset(
    x: Any,
    y: Any,
    *,
    test: tuple[Any, ...] | None = None,
    weights: Any = None,
    groups: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "arrays",
) -> Dataset:
    """A data set from a pair of arrays, checked: equal lengths, finite numbers, labels from 0.

    >>> dataset([[0.0], [1.0]], [0, 1]).classes
    2
    """
    inputs, targets = as_inputs(name, "x", x, dtype), as_targets(name, "y", y, dtype)
    held = (None, None) if test is None else test
    if len(held) not in (2, 3):
        raise HansaError(f"{name}: test has {len(held)} entries: expected (x, y), or (x, y, weights).")
    test_inputs = None if held[0] is None else as_inputs(name, "test x", held[0], dtype)
    test_targets = None if held[1] is None else as_targets(name, "test y", held[1], dtype)
    if (
        classes is None
        and isinstance(targets, torch.Tensor)
        and targets.ndim == 1
        and not targets.is_floating_point()
        and len(targets)
    ):
        both = [targets] if test_targets is None else [targets, test_targets]
        classes = max(int(found.max()) for found in both) + 1
    if weights is not None:
        targets = Weighted(targets, _weights(name, weights, dtype))
    if len(held) == 3:
        test_targets = Weighted(test_targets, _weights(name, held[2], dtype))
    elif weights is not None and test_targets is not None:
        test_targets = Weighted(test_targets, torch.ones(len(held[1]), dtype=dtype))
    owners = None if groups is None else torch.as_tensor(np.asarray(groups), dtype=torch.int64)
    return Dataset(name, inputs, targets, test_inputs, test_targets, classes, owners)


def from_dataset(
    data: Any,
    *,
    clients: Clients,
    how: Partition | None = None,
    seed: int = 0,
    test: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
) -> FederatedData:
    """Federated data from a ``torch.utils.data.Dataset`` of (input, target) pairs, read once and kept as tensors.

    Transforms are applied now, once: a random one is frozen. Images (PIL, or uint8 [H, W, C]) become [C, H, W] / 255.

    >>> from torch.utils.data import TensorDataset
    >>> from_dataset(TensorDataset(torch.rand(6, 2), torch.arange(6) % 2), clients=3).population
    3
    """
    title = name if name is not None else type(data).__name__
    x, y = _columns(title, data)
    held = None if test is None else _columns(f"{title} (test)", test)
    return from_arrays(x, y, clients=clients, how=how, seed=seed, test=held, classes=classes, dtype=dtype, name=title)


def from_hf(
    data: Any,
    input_column: str,
    label_column: str,
    *,
    clients: Clients | None = None,
    client_column: str | None = None,
    how: Partition | None = None,
    seed: int = 0,
    test: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "hf",
) -> FederatedData:
    """Federated data from a Hugging Face dataset, or anything with named columns.

    A dict of splits gives its ``train`` and, unless ``test`` is given, its ``test``. With ``client_column`` each value
    of that column is a client, and owns the test rows that have it too. Inputs are numbers, arrays or images of one
    shape: tokenize and pad text first.

    >>> columns = {"x": [[0.0], [1.0], [2.0]], "y": [0, 1, 1], "who": ["a", "b", "b"]}
    >>> from_hf(columns, "x", "y", client_column="who").population
    2
    """
    if hasattr(data, "keys") and "train" in data:
        held = data["test"] if test is None and "test" in data else test
        data = data["train"]
    else:
        held = test
    x, y = _hf_column(name, data, input_column), np.asarray(_hf_column(name, data, label_column))
    if y.dtype.kind in "UO":
        raise HansaError(
            f"{name}: column {label_column!r} holds {str(y[0])!r}: expected numbers. Use class_encode_column first."
        )
    pair = None
    if held is not None:
        pair = (
            _stack(name, _hf_column(name, held, input_column)),
            np.asarray(_hf_column(name, held, label_column)),
        )
    feature = getattr(data, "features", None) or {}
    classes = classes if classes is not None else getattr(feature.get(label_column), "num_classes", None)
    groups = test_groups = None
    if client_column is not None:
        owners, groups = np.unique(np.asarray(_hf_column(name, data, client_column)), return_inverse=True)
        how = natural() if how is None else how
        if held is not None and client_column in (getattr(held, "column_names", None) or ()):
            test_groups = _known_owners(owners, np.asarray(_hf_column(name, held, client_column)))
    elif clients is None:
        raise HansaError("from_hf: expected clients=, or client_column= where a column says who owns a row.")
    found = dataset(_stack(name, x), y, test=pair, groups=groups, classes=classes, dtype=dtype, name=name)
    if test_groups is not None:
        found = replace(found, test_groups=torch.from_numpy(test_groups))
    return partition(found, natural(), None, seed) if clients is None else dealt(found, clients, how, seed)


def _known_owners(owners: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The place of each value among sorted owners; -1 of those who are none."""
    place = np.minimum(np.searchsorted(owners, found), len(owners) - 1)
    return np.where(owners[place] == found, place, -1).astype(np.int64)


def dealt(data: Dataset, clients: Clients, how: Partition | None, seed: int) -> FederatedData:
    """A data set under its clients, however these are said."""
    if isinstance(clients, (int, np.integer)) and not isinstance(clients, bool):
        clients = int(clients)
        return partition(data, iid() if how is None else how, clients, seed)
    if how is not None:
        raise HansaError(f"{data.name}: clients already say who holds what; give their number to deal by {how!r}.")
    if isinstance(clients, Split):
        return with_clients(data, clients)
    return with_clients(data, split_of(data.name, clients, data.rows))


def _weights(name: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    found = _finite(name, "weights", _tensor(name, "weights", values).to(dtype))
    if found.ndim != 1 or bool((found < 0).any()) or not bool((found > 0).any()):
        raise HansaError(f"{name}: weights: expected one number of at least 0 a row, some above 0.")
    return found


def as_inputs(name: str, which: str, values: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Arrays, or dicts and tuples of arrays, as tensors that a model takes."""
    return _each(name, which, values, lambda at, value: _inputs(name, at, value, dtype))


def as_targets(name: str, which: str, values: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Arrays, or dicts and tuples of arrays, as tensors that a loss takes."""
    return _each(name, which, values, lambda at, value: _targets(name, at, value, dtype))


def _each(name: str, which: str, values: Any, make: Callable[[str, Any], torch.Tensor]) -> Any:
    if isinstance(values, Mapping):
        return {str(key): _each(name, f"{which}[{key!r}]", value, make) for key, value in values.items()}
    if isinstance(values, tuple) and values and all(hasattr(value, "shape") for value in values):
        return tuple(_each(name, f"{which}[{place}]", value, make) for place, value in enumerate(values))
    return make(which, values)


def _inputs(name: str, which: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    found = _tensor(name, which, values)
    if found.dtype == torch.uint8:
        return found.to(dtype).div_(255)
    if not found.is_floating_point():
        return found.to(dtype if found.dtype == torch.bool else torch.int64)
    return _finite(name, which, found.to(dtype))


def _targets(name: str, which: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    found = _tensor(name, which, values)
    if found.is_floating_point():
        return _finite(name, which, found.to(dtype))
    found = found.to(torch.int64)
    labels = found if found.ndim == 1 else found[found != IGNORED]
    if labels.numel() and int(labels.min()) < 0:
        raise HansaError(f"{name}: {which} holds the label {int(labels.min())}: expected labels from 0.")
    return found


def _tensor(name: str, which: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise HansaError(f"{name}: {which} is an array of {found.dtype}: expected numbers, all rows of one shape.")
    return torch.from_numpy(np.ascontiguousarray(found))


def _finite(name: str, which: str, values: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        row = int(
            torch.nonzero(~torch.isfinite(values).flatten(1).all(1) if values.ndim > 1 else ~torch.isfinite(values))[0]
        )
        raise HansaError(f"{name}: {which}, row {row}, holds a number that is NaN or infinite. Mend or drop it.")
    return values


def _columns(name: str, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All items of a dataset of pairs as two tensors."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    inputs, targets = [], []
    for position, item in enumerate(_items(data)):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise HansaError(f"{name}: item {position} is a {type(item).__name__}: expected a pair (input, target).")
        inputs.append(item[0])
        targets.append(item[1])
    if not inputs:
        raise HansaError(f"{name}: is empty.")
    return _stack(name, inputs), torch.stack([torch.as_tensor(target) for target in targets])


def _items(data: Any) -> Iterator[Any]:
    if hasattr(data, "__len__"):
        return (data[i] for i in range(len(data)))
    return iter(data)


def _stack(name: str, values: Iterable[Any]) -> torch.Tensor:
    """Rows of one shape as one tensor; images become channels first."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return _tensor(name, "x", values)
    rows = [_row(name, position, value) for position, value in enumerate(values)]
    for position, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise HansaError(
                f"{name}: input {position} has shape {tuple(row.shape)}, the first {tuple(rows[0].shape)}: "
                "expected one shape. Resize or pad first."
            )
    return torch.stack(rows)


def _row(name: str, position: int, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    image = hasattr(value, "getbands")  # PIL, without importing it
    found = np.array(value)
    if found.dtype.kind not in "biuf":
        raise HansaError(f"{name}: input {position} is {value!r}: expected numbers or an image. Tokenize text first.")
    if image and found.ndim == 2:
        found = found[None]
    elif found.dtype == np.uint8 and found.ndim == 3 and (image or found.shape[-1] in (1, 3)):
        found = np.ascontiguousarray(found.transpose(2, 0, 1))
    return torch.from_numpy(found)


def _hf_column(name: str, data: Any, column: str) -> Any:
    known = getattr(data, "column_names", None)
    if known is not None and column not in known:
        raise HansaError(f"{name}: no column {column!r}. {suggestion(column, known)}")
    try:
        found = data[column]
    except KeyError as problem:
        raise HansaError(f"{name}: no column {column!r}.") from problem
    return found if isinstance(found, (np.ndarray, torch.Tensor)) else list(found)
