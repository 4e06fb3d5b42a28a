"""Federated data from arrays or a torch Dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hansa.core.errors import HansaError
from hansa.data.client_tests import assign_test_clients
from hansa.data.federated import Dataset, FederatedData, apply_split, partition_dataset
from hansa.data.owners import owner_column, parse_clients
from hansa.data.partitions import Partition, iid
from hansa.data.split import Split
from hansa.training.losses import WeightedTargets

IGNORED = -100
"""The label that torch's losses ignore by default; allowed if a row has several targets."""

Clients: TypeAlias = "int | Split | Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor"


def from_arrays(
    x: Any,
    y: Any,
    *,
    clients: Clients,
    partition: Partition | None = None,
    seed: int | None = None,
    test: tuple[Any, ...] | None = None,
    test_clients: Any = None,
    weights: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "arrays",
) -> FederatedData:
    """Federated data from a pair of NumPy or torch arrays.

    Args:
        x: Inputs: an array, or a dict or tuple of arrays of equal length, as a tokenizer returns them. uint8 becomes
            ``dtype`` / 255, floats ``dtype``, other integers int64.
        y: Targets: class numbers, floats for regression, or several numbers per row for several labels or a sequence,
            of which -100 is ignored by losses. Also a dict or tuple of arrays.
        clients: The number of clients, the client of every row (numbers from 0 or names, as an array, a list, a tuple
            or a pandas Series), or one list of row numbers per client.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        test: The test set, (x, y) or (x, y, weights).
        test_clients: The client of every test row, as in ``clients`` (-1 for none), for per-client evaluation; or
            ``"labels"`` or a fraction, as in `with_test_clients`.
        weights: The weight of every row in the loss.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> from_arrays(np.zeros((6, 2)), np.array([0, 1, 0, 1, 0, 1]), clients=[[0, 1], [2, 3, 4]]).sizes.tolist()
    [2, 3]
    """
    data = dataset(x, y, test=test, weights=weights, classes=classes, dtype=dtype, name=name)
    federated = assign_clients(data, clients, partition, seed)
    return federated if test_clients is None else assign_test_clients(federated, clients, test_clients, seed)


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
    """A data set from a pair of arrays; raises for unequal lengths, non-finite numbers and negative labels.

    Args:
        x: Inputs, as in `from_arrays`.
        y: Targets, as in `from_arrays`.
        test: The test set, (x, y) or (x, y, weights).
        weights: The weight of every row in the loss.
        groups: The natural owner of every row, a number.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages.

    >>> dataset([[0.0], [1.0]], [0, 1]).classes
    2
    """
    inputs, targets = as_inputs(name, "x", x, dtype), as_targets(name, "y", y, dtype)
    test = (None, None) if test is None else test
    if len(test) not in (2, 3):
        raise HansaError(f"{name}: test has {len(test)} entries: expected (x, y), or (x, y, weights).")
    test_inputs = None if test[0] is None else as_inputs(name, "test x", test[0], dtype)
    test_targets = None if test[1] is None else as_targets(name, "test y", test[1], dtype)
    if (
        classes is None
        and isinstance(targets, torch.Tensor)
        and targets.ndim == 1
        and not targets.is_floating_point()
        and len(targets)
    ):
        both = [targets] if test_targets is None else [targets, test_targets]
        classes = max(int(labels.max()) for labels in both) + 1
    if weights is not None:
        targets = WeightedTargets(targets, _check_weights(name, weights, dtype))
    if len(test) == 3:
        test_targets = WeightedTargets(test_targets, _check_weights(name, test[2], dtype))
    elif weights is not None and test_targets is not None:
        test_targets = WeightedTargets(test_targets, torch.ones(len(test[1]), dtype=dtype))
    owners = None if groups is None else torch.as_tensor(np.asarray(groups), dtype=torch.int64)
    return Dataset(name, inputs, targets, test_inputs, test_targets, classes, owners)


def from_dataset(
    data: Any,
    *,
    clients: Clients,
    partition: Partition | None = None,
    seed: int | None = None,
    test: Any = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
) -> FederatedData:
    """Federated data from a ``torch.utils.data.Dataset`` of (input, target) pairs, read once into tensors.

    Transforms are applied once, so random ones are frozen. Images (PIL, or uint8 [H, W, C]) become [C, H, W] / 255.

    Args:
        data: The dataset.
        clients: As in `from_arrays`.
        partition: How rows are assigned to a number of clients; default iid.
        seed: Seed of the partition; by default it follows the seed of the run.
        test: The test set, a dataset of pairs.
        classes: Number of classes; by default from the targets.
        dtype: Floating-point type of inputs and targets.
        name: Name for messages; by default the class of the dataset.

    >>> from torch.utils.data import TensorDataset
    >>> from_dataset(TensorDataset(torch.rand(6, 2), torch.arange(6) % 2), clients=3).population
    3
    """
    title = name if name is not None else type(data).__name__
    x, y = _columns(title, data)
    test_pair = None if test is None else _columns(f"{title} (test)", test)
    return from_arrays(
        x, y, clients=clients, partition=partition, seed=seed, test=test_pair, classes=classes, dtype=dtype, name=title
    )


def assign_clients(data: Dataset, clients: Clients, partition: Partition | None, seed: int | None) -> FederatedData:
    """Return the data set assigned to clients, in any form of `from_arrays`."""
    if isinstance(clients, (int, np.integer)) and not isinstance(clients, bool):
        clients = int(clients)
        return partition_dataset(data, iid() if partition is None else partition, clients, seed)
    if partition is not None:
        raise HansaError(
            f"{data.name}: clients already assign the rows; give a number of clients to use {partition!r}."
        )
    if isinstance(clients, Split):
        return apply_split(data, clients)
    federated = apply_split(data, parse_clients(data.name, clients, data.rows))
    owners = owner_column(data.name, clients, "clients")
    if owners is None or owners.dtype.kind != "U":
        return federated
    return replace(federated, client_names=tuple(map(str, np.unique(owners))))


def _check_weights(name: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    weights = _check_finite(name, "weights", _tensor(name, "weights", values).to(dtype))
    if weights.ndim != 1 or bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise HansaError(f"{name}: weights: expected one non-negative number per row, some above 0.")
    return weights


def as_inputs(name: str, which: str, values: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Convert arrays, or dicts and tuples of arrays, to input tensors."""
    return _map_arrays(name, which, values, lambda argument, value: _inputs(name, argument, value, dtype))


def as_targets(name: str, which: str, values: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Convert arrays, or dicts and tuples of arrays, to target tensors."""
    return _map_arrays(name, which, values, lambda argument, value: _targets(name, argument, value, dtype))


def _map_arrays(name: str, which: str, values: Any, make: Callable[[str, Any], torch.Tensor]) -> Any:
    if isinstance(values, Mapping):
        return {str(key): _map_arrays(name, f"{which}[{key!r}]", value, make) for key, value in values.items()}
    if isinstance(values, tuple) and values and all(hasattr(value, "shape") for value in values):
        return tuple(_map_arrays(name, f"{which}[{position}]", value, make) for position, value in enumerate(values))
    return make(which, values)


def _inputs(name: str, which: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = _tensor(name, which, values)
    if tensor.dtype == torch.uint8:
        return tensor.to(dtype).div_(255)
    if not tensor.is_floating_point():
        return tensor.to(dtype if tensor.dtype == torch.bool else torch.int64)
    return _check_finite(name, which, tensor.to(dtype))


def _targets(name: str, which: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = _tensor(name, which, values)
    if tensor.is_floating_point():
        return _check_finite(name, which, tensor.to(dtype))
    tensor = tensor.to(torch.int64)
    labels = tensor if tensor.ndim == 1 else tensor[tensor != IGNORED]
    if labels.numel() and int(labels.min()) < 0:
        raise HansaError(f"{name}: {which} contains the label {int(labels.min())}: expected labels from 0.")
    return tensor


def _tensor(name: str, which: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise HansaError(f"{name}: {which} is an array of {array.dtype}: expected numbers, all rows of one shape.")
    return torch.from_numpy(np.ascontiguousarray(array))


def _check_finite(name: str, which: str, values: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        row = int(
            torch.nonzero(~torch.isfinite(values).flatten(1).all(1) if values.ndim > 1 else ~torch.isfinite(values))[0]
        )
        raise HansaError(f"{name}: {which}, row {row}, has a NaN or infinite number. Fix or drop the row.")
    return values


def _columns(name: str, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all items of a dataset of pairs as two tensors."""
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
    return stack_rows(name, inputs), torch.stack([torch.as_tensor(target) for target in targets])


def _items(data: Any) -> Iterator[Any]:
    if hasattr(data, "__len__"):
        return (data[i] for i in range(len(data)))
    return iter(data)


def stack_rows(name: str, values: Iterable[Any]) -> torch.Tensor:
    """Stack rows of one shape; images become channels-first."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return _tensor(name, "x", values)
    values = list(values)
    if values and isinstance(values[0], (int, float)):
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
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        raise HansaError(f"{name}: input {position} is {value!r}: expected numbers or an image. Tokenize text first.")
    if image and array.ndim == 2:
        array = array[None]
    elif array.dtype == np.uint8 and array.ndim == 3 and (image or array.shape[-1] in (1, 3)):
        array = np.ascontiguousarray(array.transpose(2, 0, 1))
    return torch.from_numpy(array)
