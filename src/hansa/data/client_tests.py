"""Test rows of clients: given with the data, assigned by label, or held out of each client's rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.keys import Key
from hansa.data.federated import FederatedData
from hansa.data.owners import owner_column
from hansa.data.split import count_rows
from hansa.training.losses import strip_weights

TestClients: TypeAlias = "Literal['labels'] | float"
"""How test rows are assigned to clients: ``"labels"``, or the fraction of each client's rows to hold out."""

_HOLD_OUT_HINT = "A fraction, such as 0.2, holds out some of each client's rows."


def with_test_clients(data: FederatedData, test_clients: TestClients, seed: int | None = None) -> FederatedData:
    """Return the data with test rows assigned to clients, so that each client is evaluated on its own rows.

    Args:
        data: The federated data.
        test_clients: ``"labels"`` divides each label's test rows like its training rows, so that a client's test rows
            have about its distribution of labels. A fraction, such as 0.2, holds out that part of each client's rows
            (at least one, never all) as the test set, in place of any other.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import federate
    >>> data = with_test_clients(federate("fashion-mini", clients=20), "labels")
    >>> len(data.test_owners) == len(data.test_targets), int(data.test_owners.max()) < 20
    (True, True)
    >>> with_test_clients(federate("fashion-mini", clients=20), 0.25).sizes.sum().item()
    7497
    """
    if seed is None:
        return with_test_clients(data, test_clients, 0).following(partial(_redraw_test_clients, data, test_clients))
    key = Key(seed).child("test clients")
    if isinstance(test_clients, str):
        if test_clients != "labels":
            hint = suggestion(test_clients, ["labels"])
            raise invalid_argument("data", "test_clients", test_clients, "'labels' or a fraction", hint)
        return _assign_by_label(data, key)
    if isinstance(test_clients, bool) or not isinstance(test_clients, (int, float)) or not 0 < test_clients < 1:
        raise invalid_argument(
            "data", "test_clients", test_clients, "'labels', or a fraction between 0 and 1 of each client's rows"
        )
    return _hold_out(data, float(test_clients), key)


def _redraw_test_clients(data: FederatedData, test_clients: TestClients, seed: int) -> FederatedData:
    return with_test_clients(data.for_seed(seed), test_clients, seed)


def with_validation(data: FederatedData, fraction: float, seed: int | None = None) -> FederatedData:
    """Return the data with some rows of every client taken out of training, to score hyperparameters on.

    Every run reports its metrics on them as ``validation/test_accuracy`` and so on, and `hansa.search` and ``hansa
    sweep`` score these instead of the test rows.

    Args:
        data: The federated data.
        fraction: The part of each client's training rows: at least one row, never all; none of a client with one row.
        seed: Seed of the draw; by default it follows the seed of the run.

    >>> from hansa.data import federate
    >>> data = with_validation(federate("fashion-mini", clients=20), 0.1)
    >>> len(data.index) + len(data.validation_targets) == len(federate("fashion-mini", clients=20).index)
    True
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise invalid_argument("with_validation", "fraction", fraction, "a fraction between 0 and 1", "0.1 is common.")
    if not isinstance(data, FederatedData):
        raise HansaError(
            f"with_validation: {type(data).__name__} has no rows to take. Pass a test set of its own: "
            "Task(test={'validation': (inputs, targets)})."
        )
    if seed is None:
        return with_validation(data, fraction, 0).following(partial(_redraw_validation, data, fraction))
    train, taken, _ = _take_out(data, float(fraction), Key(seed).child("validation"), minimum=1)
    return replace(
        data,
        index=torch.cat(train),
        offsets=torch.tensor([0, *np.cumsum([len(rows) for rows in train]).tolist()]),
        validation_inputs=_take_rows(data.inputs, torch.cat(taken)),
        validation_targets=_take_rows(data.targets, torch.cat(taken)),
    )


def _redraw_validation(data: FederatedData, fraction: float, seed: int) -> FederatedData:
    return with_validation(data.for_seed(seed), fraction, seed)


def assign_test_clients(data: FederatedData, clients: Any, test_clients: Any, seed: int | None = None) -> FederatedData:
    """Return the data with the given client of every test row, by number or by name."""
    if isinstance(test_clients, (str, float, int)):
        return with_test_clients(data, test_clients, seed)  # type: ignore[arg-type]
    rows = 0 if data.test_targets is None else count_rows(data.test_targets)
    if not rows:
        raise HansaError(f"{data.name}: test_clients needs test rows: give test=(x, y).")
    return replace(data, test_owners=test_owner_numbers(data.name, clients, test_clients, rows))


def test_owner_numbers(name: str, clients: Any, test_clients: Any, rows: int) -> torch.Tensor:
    """Return the number of the client of every test row, given by number or by name."""
    train_owners = owner_column(name, clients, "clients")
    test_owners = owner_column(name, test_clients, "test_clients")
    if test_owners is None or test_owners.shape != (rows,) or test_owners.dtype.kind not in "iuU":
        raise HansaError(f"{name}: test_clients: expected the owner of each of {rows} test rows.")
    if test_owners.dtype.kind != "U":
        return torch.from_numpy(test_owners.astype(np.int64))
    if train_owners is None or train_owners.dtype.kind != "U":
        raise HansaError(
            f"{name}: test rows have client names, such as {str(test_owners[0])!r}, training rows have numbers."
        )
    names = np.unique(train_owners)
    position = np.minimum(np.searchsorted(names, test_owners), len(names) - 1)
    if (unknown := test_owners[names[position] != test_owners]).size:
        raise HansaError(
            f"{name}: test_clients has {str(unknown[0])!r}, who has no training rows. "
            f"{suggestion(str(unknown[0]), names.tolist())}"
        )
    return torch.from_numpy(position.astype(np.int64))


def _assign_by_label(data: FederatedData, key: Key) -> FederatedData:
    if data.test_targets is None:
        raise HansaError(f"{data.name}: there are no test rows to assign. {_HOLD_OUT_HINT}")
    targets, test_targets = strip_weights(data.targets), strip_weights(data.test_targets)
    if data.classes is None or targets.ndim != 1:
        raise HansaError(f"{data.name}: has no labels to assign test rows by. {_HOLD_OUT_HINT}")
    counts, labels = data.label_counts().numpy().astype(np.float64), test_targets.numpy()
    owners = np.full(len(labels), -1, np.int64)
    for label in np.unique(labels):
        if not (total := counts[:, label].sum()):
            continue  # no client trains on it
        draw = key.child(int(label)).numpy()
        rows = draw.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, label]) / total * len(rows)
        ends[-1] = len(rows)
        # systematic rounding: a count is its expectation rounded up or down, and unbiased
        ends = np.minimum(np.floor(ends + draw.random()), len(rows)).astype(np.int64)
        owners[rows] = np.repeat(np.arange(data.population), np.diff(ends, prepend=0))
    return replace(data, test_owners=torch.from_numpy(owners))


def _hold_out(data: FederatedData, fraction: float, key: Key) -> FederatedData:
    train_rows, test_rows, owners = _take_out(data, fraction, key, minimum=2)
    test_index = torch.cat(test_rows)
    return replace(
        data,
        index=torch.cat(train_rows),
        offsets=torch.tensor([0, *np.cumsum([len(rows) for rows in train_rows]).tolist()]),
        test_inputs=_take_rows(data.inputs, test_index),
        test_targets=_take_rows(data.targets, test_index),
        test_owners=torch.tensor(owners),
    )


def _take_out(
    data: FederatedData, fraction: float, key: Key, minimum: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Divide each client's rows into those that stay and those that are taken out, with the owners of these."""
    left, taken, owners = [], [], []
    for client in range(data.population):
        rows = data.rows(client)
        if len(rows) < minimum:
            raise HansaError(f"{data.name}: client {client} has {len(rows)} row: too few to hold one out.")
        count = min(len(rows) - 1, max(1, round(fraction * len(rows))))
        is_taken = np.zeros(len(rows), bool)
        is_taken[key.child(client).numpy().permutation(len(rows))[:count]] = True
        mask = torch.from_numpy(is_taken)
        left.append(rows[~mask])
        taken.append(rows[mask])
        owners += [client] * count
    return left, taken, owners


def _take_rows(tree: Any, rows: torch.Tensor) -> Any:
    """Return some rows of every tensor or mapped file, in memory."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.gather(rows) if hasattr(leaf, "path") else leaf[rows], tree)
