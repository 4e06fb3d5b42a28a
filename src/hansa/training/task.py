"""Tasks: a model, a loss and federated data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hansa.core import native
from hansa.core.devices import Device, resolve_devices
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.network import Network
from hansa.core.native.tracing import NotEligible
from hansa.core.types import BUFFERS, MODEL, Population, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.layout import Layout, widen_module
from hansa.local.trainer import Trainer
from hansa.training import random_state
from hansa.training.augment import Augment, as_pipeline
from hansa.training.batch_sources import Batch, ClientData, all_client_rows, count_test_rows, example_batch
from hansa.training.client_evaluation import rows_by_owner
from hansa.training.compiled import CompiledLoss, compile_obstacle
from hansa.training.execution_mode import choose_layout, find_native_form
from hansa.training.losses import LossFunction, WeightedTargets, with_row_weights
from hansa.training.model_probe import ProbeResult, bitwise_equal, probe_model
from hansa.training.module_state import warn_if_stateful
from hansa.training.scoring import (
    Metric,
    PartialScore,
    check_classes,
    check_metric_names,
    compute_client_metrics,
    compute_metrics,
    default_metric,
    loss_sums,
    torch_class_loss,
)
from hansa.training.trainer import EVALUATION_BATCH, ModuleTrainer, fresh

log = logging.getLogger("hansa")

_PROBE_ROWS = 24
_CHUNK_ROWS = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers


class TaskLike(Protocol):
    """The interface of a task for engines: clients with samples, initial vectors, a trainer and an evaluation.

    >>> from hansa.training import quadratic
    >>> task: TaskLike = quadratic(torch.eye(2)[None], torch.ones(1, 2))
    >>> task.evaluate(task.trainer(torch.float32, torch.device("cpu")), task.start(Key(0), torch.float32))
    {'loss': 0.5}
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def population(self) -> Population: ...

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """Return the initial model, and the initial buffers if there are any."""
        ...

    def trainer(self, dtype: torch.dtype, device: torch.device) -> Trainer: ...

    def evaluate(self, trainer: Any, vectors: Vectors) -> dict[str, float]: ...


class _TrainingRowsAsTest:
    """Federated data whose test set is the training rows of all clients."""

    def __init__(self, data: ClientData) -> None:
        self.inputs, self.targets, self.population = data.inputs, data.targets, data.population
        self.test_inputs, self.test_targets = all_client_rows(data)
        self.rows, self.samples = data.rows, data.samples


class Task:
    """A model, a loss and federated data.

    Equal seeds give equal initial models. A model with float64 parameters is trained in float64. Buffers that training
    changes are averaged; constants, counters and masks keep their initial value. Other state of a module is restored
    before each client, and its random draws are seeded from the client's key.

    A model that is equivalent to a stack of convolutions and linear layers with cross-entropy, however its
    ``forward()`` is written, is trained by native code in float32 after three batches have agreed with PyTorch to float
    rounding. Any other model is trained by eager PyTorch, and one log line says why.

    Args:
        model: A function without arguments, or a module class, that returns the model.
        loss: A function of (output, target) that returns one number: a mean, a sum or a weighted mean over rows. See
            `hansa.training.scoring.loss_sums` for the test loss.
        data: Federated data, such as `hansa.data.federate` returns.
        metric: A function of (output, target) that returns the number of correct rows, one value per row, or a mean of
            these. It is reported as test_accuracy. Default: classification accuracy if targets are class numbers.
        metrics: Functions of the outputs and targets of all test rows: ``{"auc": roc_auc}`` is reported as test_auc.
        augment: Functions of (batch, generator) that every training batch passes through, such as
            ``[hansa.augment.crop(4), hansa.augment.flip()]``.
        name: Name of the task. Default: the class of the model.
        native: False always trains with eager PyTorch; True refuses a model without a native form.
        compile: Pass a model that is trained eagerly through ``torch.compile``, if the result agrees with eager.
        device: Where clients train, unless the run sets a device. Native code runs on the CPU only.

    >>> from hansa import data, models
    >>> clients = data.federate("fashion-mini", clients=5)
    >>> task = Task(models.cnn_29k, nn.functional.cross_entropy, clients)
    >>> task.population.count, task.layout.dim
    (5, 28938)
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: LossFunction,
        data: ClientData,
        *,
        metric: Metric | None = None,
        metrics: Mapping[str, Metric] | None = None,
        augment: Sequence[Augment] | Augment = (),
        name: str | None = None,
        native: bool | None = None,
        compile: bool = False,
        device: Device | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            raise HansaError(
                f"Task(model={type(model).__name__} object): expected a function that returns the model, because every "
                f"worker needs its own. Pass the class, or lambda: {type(model).__name__}(...)."
            )
        self.model, self.loss, self.data, self.augment = model, loss, data, as_pipeline(augment)
        self.device = None if device is None else resolve_devices(device, "Task")
        self.metrics = check_metric_names({} if metrics is None else metrics)
        self.population = Population(_samples(data))
        if min(self.population.samples, default=0) < 1:
            empty = next((i for i, samples in enumerate(self.population.samples) if samples < 1), 0)
            raise HansaError(f"client {empty} has no samples: give it some, or remove it from the data.")
        example = self.example_model()
        self.name = name if name is not None else type(example).__name__
        self.frozen = {name: each.detach() for name, each in example.named_parameters() if not each.requires_grad}
        self.example = inputs, targets = self._example_batch()
        if isinstance(targets, WeightedTargets):
            self.loss = loss = with_row_weights(loss)
        self.layout = Layout.of(example, channels_last=False)
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self.layout = choose_layout(self.name, self.example_model, loss, inputs, targets)
        double = any(entry.dtype == torch.float64 for entry in self.layout.parameters)
        self.dtype = torch.float64 if double else torch.float32
        probe = probe_model(self.example_model, loss, self.layout, self.dtype, inputs, targets)
        check_classes(probe, loss, getattr(data, "targets", None))
        self.constant_buffers = self._find_constant_buffers(example, probe)
        self.layout = self.layout.without(self.constant_buffers)
        self.metric = metric if metric is not None else default_metric(loss, probe, getattr(data, "targets", targets))
        self.loss_sums = loss_sums(loss, self._reduction(probe))
        self.network = self._find_network(inputs, targets, requested=native)
        self.compile = compile and self._can_compile()
        self._client_test_rows = rows_by_owner(getattr(data, "test_owners", None))
        self._checked_for_state = False
        allocator.trim()  # memory of the comparisons

    def _example_batch(self) -> Batch:
        """Return a few rows as the model sees them in training."""
        inputs, targets = example_batch(self.data, _PROBE_ROWS)
        if self.augment:
            with random_state.preserve_rng():
                random_state.seed_all(Key(0), torch.device("cpu"))
                inputs = self.augment(inputs, Key(0), torch.Generator())
        return Batch(inputs, targets)

    def __repr__(self) -> str:
        facts = [f"{self.layout.dim:,} parameters", *([f"{len(self.metrics)} metrics"] if self.metrics else [])]
        return f"Task({self.name}, {self.population.count} clients, {', '.join(facts)})"

    def example_model(self) -> nn.Module:
        """Return a new model with the same initial weights every time."""
        return fresh(self.model, Key(0))

    def _find_constant_buffers(self, example: nn.Module, probe: ProbeResult | None) -> set[str]:
        """Return the buffers that training does not change and that are equal for every seed; they are not sent."""
        if probe is None or not self.layout.buffers:
            return set()
        buffers, other = dict(example.named_buffers()), dict(fresh(self.model, Key(1)).named_buffers())
        unchanged = {entry.name for entry in self.layout.buffers} - probe.changed_buffers
        return {name for name in unchanged if bitwise_equal(buffers[name], other.get(name))}

    def _reduction(self, probe: ProbeResult | None) -> str:
        if probe is None or hasattr(self.loss, "sums"):
            return "mean"
        if probe.loss.ndim:
            raise HansaError(
                f"Task(loss): returned a tensor of shape {tuple(probe.loss.shape)}: expected one number for a batch, "
                "such as the mean over its rows."
            )
        if probe.reduction == "other" and torch_class_loss(self.loss) is None:
            log.info(
                "%s: the loss is neither a mean nor a sum over rows: the test loss is the mean of its values on "
                "batches of %d rows",
                self.name,
                EVALUATION_BATCH,
            )
        return probe.reduction

    def _find_network(self, inputs: Any, targets: Any, requested: bool | None) -> Network | None:
        """Return the native form of the model and its loss, if there is one."""
        if requested is False:
            return None
        if requested is None and native.instruction_set() == "base":  # without vector instructions eager is faster
            return None
        try:
            if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
                raise NotEligible("its inputs or targets are several tensors")
            if isinstance(labels := getattr(self.data, "targets", None), torch.Tensor) and _has_negative(labels):
                raise NotEligible("there are negative targets, which cross-entropy ignores")
            network = find_native_form(self.example_model, self.loss, self.layout, inputs, targets)
            if network.dropout_numbers and self.augment.has_user_code:
                raise NotEligible("it has dropout, and a user-defined augmentation may draw from the same generator")
        except NotEligible as reason:
            if requested:
                raise HansaError(
                    f"Task(native=True): {self.name} has no native form: {reason}. Omit native to train it eagerly."
                ) from None
            log.info("%s: trained by eager PyTorch: %s", self.name, reason)
            return None
        log.info("%s: trained by native code (%s)", self.name, native.instruction_set())
        return network

    def _can_compile(self) -> bool:
        """Return whether workers can compile the model; if not, log the reason."""
        reason = "native code trains it" if self.network is not None else compile_obstacle(self)
        if reason is not None:
            log.warning("%s: compile: true is ignored: %s", self.name, reason)
        return reason is None

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """Return the initial model and buffers."""
        model, buffers = self.layout.pack(fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def trainer(self, dtype: torch.dtype, device: torch.device) -> ModuleTrainer:
        """Return a worker's trainer of the model."""
        trainer = ModuleTrainer(self, dtype, device)
        if not self._checked_for_state and trainer.network is None and device.type == "cpu":
            self._checked_for_state = True  # once, not in every worker
            warn_if_stateful(self, trainer, ModuleTrainer(self, dtype, device, like=trainer))
        if self.compile:
            trainer.compiled = CompiledLoss(self, trainer.module, trainer.parameters)
        return trainer

    def test_chunks(self) -> list[tuple[int, int]]:
        """Return the test rows as fixed ranges, which workers share."""
        rows = count_test_rows(self.data)
        return [(first, min(first + _CHUNK_ROWS, rows)) for first in range(0, rows, _CHUNK_ROWS)]

    def compute_metrics(self, scores: Sequence[PartialScore]) -> dict[str, float]:
        """Return loss, accuracy and metrics of the test set from one score per chunk; empty without scores."""
        return compute_metrics(scores, self.test_chunks()[-1][1], self.metric, self.metrics) if scores else {}

    def evaluate(self, trainer: ModuleTrainer, vectors: Vectors) -> dict[str, float]:
        """Return test loss, accuracy and metrics of the given vectors; empty without a test set."""
        with random_state.preserve_rng():
            return self.compute_metrics([trainer.evaluate(vectors, *chunk) for chunk in self.test_chunks()])

    @property
    def client_test_sizes(self) -> dict[int, int]:
        """Number of test rows of each client that has its own."""
        return {client: len(rows) for client, rows in self._client_test_rows.items()}

    def evaluate_client(self, trainer: ModuleTrainer, client: int) -> dict[str, float]:
        """Return loss, accuracy and metrics of the trainer's model on a client's own test rows."""
        rows = self._client_test_rows[client]
        return compute_client_metrics(trainer.score(rows), len(rows), self.metric, self.metrics)

    def on_training_data(self) -> Task:
        """Return the task with all clients' training rows as test set: ``test_loss`` is the global training loss."""
        task = copy.copy(self)
        task.data = _TrainingRowsAsTest(self.data)
        task._client_test_rows = {}
        return task

    def module(self, vectors: Vectors) -> nn.Module:
        """Return a new module with the given vectors and their dtype, ready to use or to save."""
        module = self.example_model()
        widen_module(module, vectors[MODEL].dtype)
        module.load_state_dict(self.layout.unpack(vectors[MODEL], vectors.get(BUFFERS)), strict=False)
        return module


def _samples(data: ClientData) -> tuple[int, ...]:
    """Return the number of samples of each client, without a call per client if the data has ``sizes``."""
    sizes = getattr(data, "sizes", None)
    if isinstance(sizes, torch.Tensor) and sizes.shape == (data.population,):
        return tuple(sizes.tolist())
    return tuple(data.samples(client) for client in range(data.population))


def _has_negative(labels: torch.Tensor) -> bool:
    return not labels.is_floating_point() and bool(labels.numel()) and int(labels.min()) < 0
