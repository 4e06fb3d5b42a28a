"""Whose the test rows are: named with the data, dealt as the training labels are, or held out of each client's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.keys import Key
from hansa.data.federated import FederatedData
from hansa.data.owners import owners_of
from hansa.training.losses import unweighted

TestClients: TypeAlias = "Literal['labels'] | float"
"""How test rows get owners: ``"labels"`` deals them, a share holds some of each client's own rows out."""

_SHARE = "A share, such as 0.2, holds out some of each client's own rows."


def with_test_clients(data: FederatedData, how: TestClients, seed: int = 0) -> FederatedData:
    """The same data with owners of its test rows, so that every client can be evaluated on its own.

    ``"labels"`` deals each label's test rows to the clients as its training rows are dealt, what is left over by a draw
    of the seed: the test set stays what it is, and each client's part of it has about its own mixture.
    A share, such as 0.2, takes that part of each client's own rows, at least one and never its last, out of training;
    they are the test set then, in place of any other.

    >>> from hansa.data import federate
    >>> held = with_test_clients(federate("fashion-mini", clients=20), "labels")
    >>> len(held.test_owners) == len(held.test_targets), int(held.test_owners.max()) < 20
    (True, True)
    >>> with_test_clients(federate("fashion-mini", clients=20), 0.25).sizes.sum().item()
    7497
    """
    key = Key(seed).child("test clients")
    if isinstance(how, str):
        if how != "labels":
            raise invalid_argument("data", "test_clients", how, "'labels' or a share", suggestion(how, ["labels"]))
        return _by_label(data, key)
    if isinstance(how, bool) or not isinstance(how, (int, float)) or not 0 < how < 1:
        raise invalid_argument(
            "data", "test_clients", how, "'labels', or a share between 0 and 1 of each client's rows"
        )
    return _held_out(data, float(how), key)


def named_test_clients(data: FederatedData, clients: Any, test_clients: Any, seed: int = 0) -> FederatedData:
    """The same data with the owner of every test row given as the training rows' were: by number, or by name."""
    if isinstance(test_clients, (str, float, int)):
        return with_test_clients(data, test_clients, seed)  # type: ignore[arg-type]
    rows = 0 if data.test_targets is None else len(torch.utils._pytree.tree_leaves(data.test_targets)[0])
    if not rows:
        raise HansaError(f"{data.name}: test_clients says whose test rows are, but there are none: give test=(x, y).")
    known, found = owners_of(data.name, clients, "clients"), owners_of(data.name, test_clients, "test_clients")
    if found is None or found.shape != (rows,) or found.dtype.kind not in "iuU":
        raise HansaError(f"{data.name}: test_clients: expected the owner of each of {rows} test rows.")
    if found.dtype.kind != "U":
        return replace(data, test_owners=torch.from_numpy(found.astype(np.int64)))
    if known is None or known.dtype.kind != "U":
        raise HansaError(
            f"{data.name}: test rows belong to names, such as {str(found[0])!r}, training rows to numbers."
        )
    names = np.unique(known)
    place = np.minimum(np.searchsorted(names, found), len(names) - 1)
    if (strange := found[names[place] != found]).size:
        raise HansaError(
            f"{data.name}: test_clients names {str(strange[0])!r}, who has no training rows. "
            f"{suggestion(str(strange[0]), names.tolist())}"
        )
    return replace(data, test_owners=torch.from_numpy(place.astype(np.int64)))


def _by_label(data: FederatedData, key: Key) -> FederatedData:
    if data.test_targets is None:
        raise HansaError(f"{data.name}: there are no test rows to deal. {_SHARE}")
    targets, tested = unweighted(data.targets), unweighted(data.test_targets)
    if data.classes is None or targets.ndim != 1:
        raise HansaError(f"{data.name}: has no labels to deal test rows by. {_SHARE}")
    counts, labels = data.label_counts().numpy().astype(np.float64), tested.numpy()
    owners = np.full(len(labels), -1, np.int64)
    for label in np.unique(labels):
        if not (total := counts[:, label].sum()):
            continue  # nobody trains on it: nobody's
        draw = key.child(int(label)).numpy()
        rows = draw.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, label]) / total * len(rows)
        ends[-1] = len(rows)
        # systematic rounding: a count is its share of the rows rounded up or down, exact in expectation
        ends = np.minimum(np.floor(ends + draw.random()), len(rows)).astype(np.int64)
        owners[rows] = np.repeat(np.arange(data.population), np.diff(ends, prepend=0))
    return replace(data, test_owners=torch.from_numpy(owners))


def _held_out(data: FederatedData, share: float, key: Key) -> FederatedData:
    kept, held, owners = [], [], []
    for client in range(data.population):
        rows = data.rows(client)
        if len(rows) < 2:
            raise HansaError(f"{data.name}: client {client} has {len(rows)} row: too few to hold one out.")
        count = min(len(rows) - 1, max(1, round(share * len(rows))))
        away = np.zeros(len(rows), bool)
        away[key.child(client).numpy().permutation(len(rows))[:count]] = True
        mask = torch.from_numpy(away)
        kept.append(rows[~mask])
        held.append(rows[mask])
        owners += [client] * count
    tests = torch.cat(held)
    return replace(
        data,
        index=torch.cat(kept),
        offsets=torch.tensor([0, *np.cumsum([len(rows) for rows in kept]).tolist()]),
        test_inputs=_taken(data.inputs, tests),
        test_targets=_taken(data.targets, tests),
        test_owners=torch.tensor(owners),
    )


def _taken(tree: Any, rows: torch.Tensor) -> Any:
    """Some rows of every tensor; of files that are mapped, in memory."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.gather(rows) if hasattr(leaf, "path") else leaf[rows], tree)
