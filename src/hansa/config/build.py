"""From a configuration to the things it describes: federated data, a task, a run that has not begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hansa import data, models
from hansa.config import parts
from hansa.config.sections import Config
from hansa.errors import HansaError, near
from hansa.registry import user_code
from hansa.tasks import Task

CLIENTS = 50
ALPHA = 0.3


def federated(config: Config, split: data.Split | None = None) -> data.FederatedData:
    """The data of a run, dealt as it says, or as an earlier run's ``split`` has it."""
    asked = config.data
    how = parts.PARTITION.build(asked.partition)
    seed = config.seed if asked.seed is None else asked.seed
    if asked.name in set(data.names()) - set(data.SOURCES):  # synthetic: it brings its own clients
        return data.federate(asked.name, how, asked.clients, seed, **asked.options)
    known = {name.replace("-", "").replace("_", ""): name for name in data.names()}
    plain = asked.name.lower().replace("-", "").replace("_", "")
    if plain not in known:
        raise data.DataError(f"data.name: no data set {asked.name!r}. {near(asked.name, data.names())}")
    found = _loaded(known[plain], str(data.data_folder(asked.folder)), json.dumps(asked.options, sort_keys=True))
    if split is not None:
        return data.with_clients(found, split)
    if how is None:
        how = data.natural() if found.groups is not None else data.dirichlet(ALPHA)
    knows_clients = isinstance(how, (data.natural, data.saved))
    clients = CLIENTS if asked.clients is None and not knows_clients else asked.clients
    return data.partition(found, how, clients, seed)


@lru_cache(maxsize=1)
def _loaded(name: str, folder: str, options: str) -> data.Dataset:
    """The data set that the last run had, if this one has the same: comparisons and sweeps read it once."""
    return data.load(name, folder, **json.loads(options))


def task(config: Config, held: data.FederatedData) -> Task:
    """The model and loss of a run on its data: cross-entropy on class numbers, squared error on others."""
    loss = functional.mse_loss if held.targets.is_floating_point() else functional.cross_entropy
    asked = config.model
    if asked.factory is not None:
        made = Task(partial(user_factory(asked.factory), **asked.options), loss, held, name=asked.factory)
        if made.dtype == torch.float64 and config.dtype != "float64":
            raise HansaError(
                f"model.factory: {asked.factory} makes a model of float64 parameters, which dtype: {config.dtype} "
                "would round. Set dtype: float64, or leave .double() out of the factory."
            )
        return made
    if held.classes is None:
        raise HansaError(f"{held.name} has no classes, as Hansa's models need: name your own with model.factory.")
    name = asked.name if asked.name is not None else suited(held)
    make = partial(models.build, name, classes=held.classes, shape=held.shape, **asked.options)
    return Task(make, loss, held, name=f"{name} on {held.name}")


def suited(held: data.FederatedData) -> str:
    """The model that is taken where none is named: a small one of the kind that the data call for."""
    if len(held.shape) == 3:
        return "cnn_29k" if held.shape[0] == 1 else "cifar_cnn"
    if not held.inputs.is_floating_point() and len(held.shape) == 1:
        return "lstm"
    return "logistic" if held.shape != (2,) else "mlp"


def user_factory(place: str) -> Callable[..., nn.Module]:
    """MODULE:FUNCTION that makes a model, imported from the current folder or the environment."""
    try:
        made: Any = user_code.find(place)
        if not callable(made):
            raise HansaError(f"{place!r}: expected a function that makes a model, found {made!r}.")
    except HansaError as error:
        raise HansaError(f"model.factory: {error}") from error
    return made  # type: ignore[no-any-return]


def dtype(config: Config) -> torch.dtype:
    """The arithmetic of a run."""
    return torch.float64 if config.dtype == "float64" else torch.float32
