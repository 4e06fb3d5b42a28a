"""Build what a configuration describes: federated data, a task, options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.nn import functional

from hansa import data
from hansa.config import import_path
from hansa.config.sections import AUGMENT, LOSS, PARTITION, Config, MetricSection
from hansa.core import trees
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.training import Task, models, personalise
from hansa.training.losses import strip_weights
from hansa.training.metric_direction import higher, lower
from hansa.training.metrics import METRICS

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
"""Losses by name; bce takes logits."""


def load_data(config: Config, split: data.Split | None = None) -> data.FederatedData:
    """Load the data of a run and partition it, or take the ``split`` of an earlier run."""
    federated = _partition_data(config, split)
    seed = config.seed if config.data.seed is None else config.data.seed
    if getattr(federated, "redraw", None) is not None:  # of a factory
        federated = replace(federated.for_seed(seed), redraw=None)
    if config.data.test_clients is not None:
        federated = data.with_test_clients(federated, config.data.test_clients, seed)
    if config.data.noise is not None:
        federated = data.with_feature_noise(federated, config.data.noise, seed)
    if config.data.validation is not None:
        federated = data.with_validation(federated, config.data.validation, seed)
    return federated


def _partition_data(config: Config, split: data.Split | None) -> data.FederatedData:
    section = config.data
    partition = PARTITION.build(section.partition)
    seed = config.seed if section.seed is None else section.seed
    if section.factory is not None:
        try:
            dataset = _find_function("data.factory", section.factory)(**section.options)
        except TypeError as error:
            raise data.DataError(f"data.factory: {section.factory}: {error}.") from error
        if not isinstance(dataset, (data.Dataset, data.FederatedData, data.GeneratedData, data.CollatedData)):
            expected = "expected data, as from hansa.data.from_arrays(...)."
            raise data.DataError(f"data.factory: {section.factory} returns {short_repr(dataset)}: {expected}")
        if not isinstance(dataset, data.Dataset):
            if partition is not None or section.clients is not None:
                raise data.DataError(f"data.factory: {section.factory} returns data that has its clients: leave out "
                                     "partition and clients.")  # fmt: skip
            return cast("data.FederatedData", dataset)
    elif section.name in set(data.dataset_names()) - set(data.DATASETS):  # synthetic data has its own clients
        # which rows of one's own files are test rows does not depend on the run's seed
        own = None if section.name == data.loading.CSV_FOLDER else seed
        seed_of_data = own if section.seed is None else section.seed
        return data.federate(section.name, partition, section.clients, seed_of_data, section.folder, **section.options)
    else:
        options = json.dumps(section.options, sort_keys=True)
        dataset = _load_dataset(section.name, str(data.data_folder(section.folder)), options)
    if split is not None:
        return data.apply_split(dataset, split)
    if partition is None:
        partition = data.natural() if dataset.groups is not None else data.dirichlet(ALPHA)
    knows_clients = isinstance(partition, (data.natural, data.saved_split))
    clients = CLIENTS if section.clients is None and not knows_clients else section.clients
    return data.partition_dataset(dataset, partition, clients, seed)


@lru_cache(maxsize=1)
def _load_dataset(name: str, folder: str, options: str) -> data.Dataset:
    """Load a data set, or return the last one if it is the same: comparisons and sweeps read it once."""
    return data.load(name, folder, **json.loads(options))


def build_task(config: Config, federated: data.FederatedData) -> Task:
    """Build the task of a run: model, loss and metrics on its data."""
    section = config.model
    task = Task(
        model_factory(config, federated),
        _build_loss(section.loss, federated),
        federated,
        name=section.factory or f"{section.name or default_model(federated)} on {federated.name}",
        metric=None if section.metric is None else _find_function("model.metric", section.metric),
        metrics={name: _find_metric(name, metric) for name, metric in section.metrics.items()},
        main_metric=section.main_metric,
        augment=AUGMENT.build(config.data.augment) or (),
        autocast=section.autocast,
        execution=section.execution,
        reduction=section.reduction,
        ignored=section.ignored,
        evaluation_batch_size=section.evaluation_batch_size,
    )
    if task.dtype == torch.float64 and config.dtype != "float64":
        raise HansaError(
            f"model.factory: {section.factory} makes a model of float64 parameters, which dtype: {config.dtype} "
            "would round. Set dtype: float64, or leave .double() out of the factory."
        )
    return task


def model_factory(config: Config, federated: data.FederatedData) -> Callable[[], torch.nn.Module]:
    """Return the function that builds the model of a configuration for data of this shape and these classes."""
    section = config.model
    if section.factory is not None:
        return partial(_find_function("model.factory", section.factory), **section.options)
    if federated.classes is None:
        raise HansaError(f"{federated.name} has no classes, as Hansa's models need: name your own with model.factory.")
    name = section.name or default_model(federated)
    return partial(models.build, name, classes=federated.classes, shape=federated.shape, **section.options)


def default_model(federated: data.FederatedData) -> str:
    """Return the model that is used where none is named: a small one that fits the data."""
    if len(federated.shape) == 3:
        return "cnn_29k" if federated.shape[0] == 1 else "cifar_cnn"
    if not federated.inputs.is_floating_point() and len(federated.shape) == 1:
        return "lstm"
    return "logistic" if federated.shape != (2,) else "mlp"


def _find_metric(name: str, metric: str | MetricSection) -> Callable[..., Any]:
    """Return a metric with the direction that the configuration states."""
    if isinstance(metric, str):
        return _find_function(f"model.metrics.{name}", metric, METRICS)
    function = _find_function(f"model.metrics.{name}.function", metric.function, METRICS)
    return lower(function) if metric.better == "lower" else higher(function)


def _find_function(
    key: str, name: str, known: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Callable[..., Any]:
    """Return a known function by its name, or import MODULE:FUNCTION from the current folder or the environment."""
    if name in known:
        return known[name]
    if known and not import_path.is_import_path(name):
        raise HansaError(f"{key}: no {short_repr(name)}. {suggestion(name, known)} Or MODULE:FUNCTION of yours.")
    try:
        function = import_path.import_object(name)
    except HansaError as error:
        raise HansaError(f"{key}: {error}") from error
    if not callable(function):
        raise HansaError(f"{key}: {name!r}: expected a function, found {short_repr(function)}.")
    return cast("Callable[..., Any]", function)


def _build_loss(loss: str | Mapping[str, Any] | None, federated: data.FederatedData) -> Callable[..., torch.Tensor]:
    if loss is None:
        leaf = trees.tree_leaves(strip_weights(federated.targets))[0]
        return functional.mse_loss if leaf.is_floating_point() else functional.cross_entropy
    if isinstance(loss, str):
        return _find_function("model.loss", loss, LOSSES)
    if import_path.is_import_path(name := loss.get("kind")):
        options = {key: value for key, value in loss.items() if key != "kind"}
        return partial(_find_function("model.loss.kind", str(name)), **options)
    return cast("Callable[..., torch.Tensor]", LOSS.build(loss, ("model", "loss")))


def personalise_option(config: Config) -> personalise | None:
    """Return the steps that clients take before a second evaluation."""
    section = config.evaluate.personalise
    if section is None:
        return None
    return personalise(section.steps, section.lr, None if section.batch_size == "all" else section.batch_size)


def torch_dtype(config: Config) -> torch.dtype:
    """Return the dtype of all arithmetic."""
    return torch.float64 if config.dtype == "float64" else torch.float32
