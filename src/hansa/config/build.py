"""From a configuration to the things it describes: federated data, a task, a run that has not begun."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as trees

from hansa import data
from hansa.config import parts
from hansa.config.registry import Misfit, import_path
from hansa.config.sections import Config
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.training import Task, models, personalise
from hansa.training.losses import unweighted

CLIENTS = 50
ALPHA = 0.3
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "bce": functional.binary_cross_entropy_with_logits,
    "cross_entropy": functional.cross_entropy,
    "huber": functional.huber_loss,
    "l1": functional.l1_loss,
    "mse": functional.mse_loss,
    "nll": functional.nll_loss,
}
"""Losses by name; bce is of logits."""


def federated(config: Config, split: data.Split | None = None) -> data.FederatedData:
    """The data of a run, dealt as it says, or as an earlier run's ``split`` has it."""
    held, how = _dealt(config, split), config.data.test_clients
    if how is None:
        return held
    return data.with_test_clients(held, how, config.seed if config.data.seed is None else config.data.seed)


def _dealt(config: Config, split: data.Split | None) -> data.FederatedData:
    asked = config.data
    how = parts.PARTITION.build(asked.partition)
    seed = config.seed if asked.seed is None else asked.seed
    if asked.factory is not None:
        made: Any = _own_data(asked.factory, asked.options)
        if not isinstance(made, data.Dataset):
            if how is not None or asked.clients is not None:
                raise data.DataError(f"data.factory: {asked.factory} gives data that has its clients: leave out "
                                     "partition and clients.")  # fmt: skip
            whole: data.FederatedData = made
            return whole
        found = made
    elif asked.name in set(data.names()) - set(data.SOURCES):  # synthetic: it brings its own clients
        return data.federate(asked.name, how, asked.clients, seed, asked.folder, **asked.options)
    else:
        known = {name.replace("-", "").replace("_", ""): name for name in data.names()}
        plain = asked.name.lower().replace("-", "").replace("_", "")
        if plain not in known:
            raise data.DataError(f"data.name: no data set {asked.name!r}. {suggestion(asked.name, data.names())}")
        found = _loaded(known[plain], str(data.data_folder(asked.folder)), json.dumps(asked.options, sort_keys=True))
    if split is not None:
        return data.with_clients(found, split)
    if how is None:
        how = data.natural() if found.groups is not None else data.dirichlet(ALPHA)
    knows_clients = isinstance(how, (data.natural, data.saved))
    clients = CLIENTS if asked.clients is None and not knows_clients else asked.clients
    return data.partition(found, how, clients, seed)


def _own_data(place: str, options: Mapping[str, Any]) -> Any:
    """What a function of the user's gives, called with the options."""
    try:
        made = own_function("data.factory", place)(**options)
    except TypeError as error:
        raise data.DataError(f"data.factory: {place}: {error}.") from error
    if not isinstance(made, (data.Dataset, data.FederatedData, data.Made, data.Collated)):
        raise data.DataError(
            f"data.factory: {place} gives {short_repr(made)}: expected data, as from hansa.data.from_arrays(...)."
        )
    return made


@lru_cache(maxsize=1)
def _loaded(name: str, folder: str, options: str) -> data.Dataset:
    """The data set that the last run had, if this one has the same: comparisons and sweeps read it once."""
    return data.load(name, folder, **json.loads(options))


def task(config: Config, held: data.FederatedData) -> Task:
    """The model, loss and metrics of a run on its data."""
    asked = config.model
    metric = None if asked.metric is None else own_function("model.metric", asked.metric)
    metrics = {name: own_function(f"model.metrics.{name}", place) for name, place in asked.metrics.items()}
    augment = parts.AUGMENT.build(config.data.augment) or ()
    build = partial(
        Task,
        loss=_loss(asked.loss, held),
        data=held,
        metric=metric,
        metrics=metrics,
        augment=augment,
        compile=asked.compile,
    )
    if asked.factory is not None:
        made = build(partial(own_function("model.factory", asked.factory), **asked.options), name=asked.factory)
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
    return build(make, name=f"{name} on {held.name}")


def suited(held: data.FederatedData) -> str:
    """The model that is taken where none is named: a small one of the kind that the data call for."""
    if len(held.shape) == 3:
        return "cnn_29k" if held.shape[0] == 1 else "cifar_cnn"
    if not held.inputs.is_floating_point() and len(held.shape) == 1:
        return "lstm"
    return "logistic" if held.shape != (2,) else "mlp"


def own_function(key: str, place: str) -> Callable[..., Any]:
    """MODULE:FUNCTION, imported from the current folder or the environment."""
    try:
        made = import_path.find(place)
    except HansaError as error:
        raise HansaError(f"{key}: {error}") from error
    if not callable(made):
        raise HansaError(f"{key}: {place!r}: expected a function, found {short_repr(made)}.")
    return made  # type: ignore[no-any-return]


def _loss(asked: str | Mapping[str, Any] | None, held: data.FederatedData) -> Callable[..., torch.Tensor]:
    if asked is None:
        leaf = trees.tree_leaves(unweighted(held.targets))[0]
        return functional.mse_loss if leaf.is_floating_point() else functional.cross_entropy
    if isinstance(asked, str):
        if import_path.is_place(asked):
            return own_function("model.loss", asked)
        if asked not in LOSSES:
            raise HansaError(
                f"model.loss: no loss {short_repr(asked)}. {suggestion(asked, LOSSES)} Or MODULE:FUNCTION of yours."
            )
        return LOSSES[asked]
    name = asked.get("kind")
    if isinstance(name, str) and import_path.is_place(name):
        return partial(
            own_function("model.loss.kind", name), **{key: value for key, value in asked.items() if key != "kind"}
        )
    try:
        made: Callable[..., torch.Tensor] = parts.LOSS.build(asked)
    except Misfit as misfit:
        raise misfit.under("model", "loss") from misfit
    return made


def personalised(config: Config) -> personalise | None:
    """What clients do before they are tested."""
    asked = config.evaluate.personalise
    if asked is None:
        return None
    return personalise(asked.steps, asked.lr, None if asked.batch_size == "all" else asked.batch_size)


def dtype(config: Config) -> torch.dtype:
    """The arithmetic of a run."""
    return torch.float64 if config.dtype == "float64" else torch.float32
