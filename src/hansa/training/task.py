"""The usual task: any ``nn.Module``, any loss, on federated data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hansa.core import native
from hansa.core.devices import Device, devices
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.eligibility import Unfit
from hansa.core.native.network import Stack
from hansa.core.types import BUFFERS, MODEL, Population, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.layout import Layout, widened
from hansa.training import random_state
from hansa.training.augment.base import Augment, pipeline
from hansa.training.batch_sources import (
    Batch,
    ClientData,
    evaluation_rows,
    some,
    whole_data,
)
from hansa.training.client_evaluation import owned_rows
from hansa.training.compiled import Compiled, obstacle
from hansa.training.execution_mode import Loss, fitting_layout, native_form
from hansa.training.losses import Weighted, weighing
from hansa.training.model_probe import Seen, look, same_bits
from hansa.training.scoring import (
    Metric,
    Score,
    check_classes,
    check_names,
    default_metric,
    of_one_client,
    plain,
    summed,
    total,
)
from hansa.training.statefulness_check import warn_of_memory
from hansa.training.trainer import EVALUATION_BATCH, ModuleShell, fresh

log = logging.getLogger("hansa")

_LOOKED_AT = 24  # rows that a model is looked at with
_PIECE = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers


class _Everything:
    """Federated data whose test set is what all clients hold."""

    def __init__(self, data: ClientData) -> None:
        self.inputs, self.targets, self.population = data.inputs, data.targets, data.population
        self.test_inputs, self.test_targets = whole_data(data)
        self.rows, self.samples = data.rows, data.samples


class Task:
    """A model factory (or module class), a loss of (output, target), and federated data.

    ``model`` is called without arguments; equal seeds give equal first models. ``metric`` maps (output, target) to the
    number of hits, one value a row, or a mean of such, and is reported as test_accuracy; by default it is
    classification accuracy where targets are class numbers. ``metrics`` are functions of the outputs and targets of
    all test rows at once: ``{"auc": roc_auc}`` is reported as test_auc. The loss may be a mean or a sum over rows, or
    weighted: see `hansa.training.scoring.summed` for what the test loss is then. A model of float64 parameters is trained
    in float64. Buffers that clients change are averaged; constants, counters and masks keep their first value. What
    a model remembers otherwise is put back before each client, and what it draws is seeded from the client's key.

    ``augment`` is a list of functions of (batch, generator) that every training batch goes through, such as
    ``[hansa.augment.crop(4), hansa.augment.flip()]``, drawn at the address (seed, round, client, step).

    A model that amounts to a stack of convolutions and linear layers with cross-entropy, however its ``forward()`` is
    written, is trained by native code in float32: three batches are compared first, and the two agree to float
    rounding. Any other is trained by eager PyTorch, and one line of the log says why; ``native=False`` keeps to eager,
    ``native=True`` refuses a model that has no native form. With ``compile=True`` a model that is trained eagerly goes
    through ``torch.compile``, forwards and backwards, where what comes out agrees with eager. ``device`` is where
    clients train unless the run says another: native code is for the CPU, on any other device training is eager.

    >>> from hansa import data, models
    >>> clients = data.federate("fashion-mini", clients=5)
    >>> task = Task(models.cnn_29k, nn.functional.cross_entropy, clients)
    >>> task.population.count, task.layout.dim
    (5, 28938)
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Loss,
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
                f"Task(model={type(model).__name__} object): expected a function that makes the model, so that every "
                f"worker has its own. Pass the class, or lambda: {type(model).__name__}(...)."
            )
        self.model, self.loss, self.data, self.augment = model, loss, data, pipeline(augment)
        self.device = None if device is None else devices(device, "Task")
        self.metrics = check_names({} if metrics is None else metrics)
        self.population = Population(_samples(data))
        if min(self.population.samples, default=0) < 1:
            empty = next((i for i, samples in enumerate(self.population.samples) if samples < 1), 0)
            raise HansaError(f"client {empty} holds no samples: give it some, or leave it out of the data.")
        example = fresh(model, Key(0))
        self.name = name if name is not None else type(example).__name__
        self.frozen = {name: each.detach() for name, each in example.named_parameters() if not each.requires_grad}
        self.example = inputs, targets = self._some()
        if isinstance(targets, Weighted):
            self.loss = loss = weighing(loss)
        self.layout = Layout.of(example, channels_last=False)
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self.layout = fitting_layout(self.name, self._example, loss, inputs, targets)
        double = any(entry.dtype == torch.float64 for entry in self.layout.parameters)
        self.dtype = torch.float64 if double else torch.float32
        seen = look(self._example, loss, self.layout, self.dtype, inputs, targets)
        check_classes(seen, loss, getattr(data, "targets", None))
        self.still = self._constant(example, seen)
        self.layout = self.layout.without(self.still)
        self.metric = metric if metric is not None else default_metric(loss, seen, getattr(data, "targets", targets))
        self.summed = summed(loss, self._reduction(seen))
        self.stack = self._native_form(inputs, targets, wanted=native)
        self.compile = compile and self._compiles()
        self._owned = owned_rows(getattr(data, "test_owners", None))
        self._compared = False
        allocator.trim()  # what the comparisons took

    def _some(self) -> Batch:
        """A few rows as the model is to see them in training."""
        inputs, targets = some(self.data, _LOOKED_AT)
        if self.augment:
            with random_state.kept():
                random_state.seed_all(Key(0), torch.device("cpu"))
                inputs = self.augment(inputs, Key(0), torch.Generator())
        return Batch(inputs, targets)

    def __repr__(self) -> str:
        told = [f"{self.layout.dim:,} parameters", *([f"{len(self.metrics)} metrics"] if self.metrics else [])]
        return f"Task({self.name}, {self.population.count} clients, {', '.join(told)})"

    def _example(self) -> nn.Module:
        return fresh(self.model, Key(0))

    def _constant(self, example: nn.Module, seen: Seen | None) -> set[str]:
        """Buffers that training leaves alone and that are the same for every seed: they need not travel."""
        if seen is None or not self.layout.buffers:
            return set()
        here, other = dict(example.named_buffers()), dict(fresh(self.model, Key(1)).named_buffers())
        still = {entry.name for entry in self.layout.buffers} - seen.changed
        return {name for name in still if same_bits(here[name], other.get(name))}

    def _reduction(self, seen: Seen | None) -> str:
        if seen is None or hasattr(self.loss, "sums"):
            return "mean"
        if seen.value.ndim:
            raise HansaError(
                f"Task(loss): gave a tensor of shape {tuple(seen.value.shape)}: expected one number for a batch, such "
                "as the mean over its rows."
            )
        if seen.reduction == "other" and plain(self.loss) is None:
            log.info(
                "%s: its loss is neither a mean nor a sum over rows: the test loss is the mean of its values on "
                "batches of %d rows",
                self.name,
                EVALUATION_BATCH,
            )
        return seen.reduction

    def _native_form(self, inputs: Any, targets: Any, wanted: bool | None) -> Stack | None:
        """The native form of the model and its loss where there is one."""
        if wanted is False:
            return None
        if wanted is None and native.instruction_set() == "base":  # without vector units eager is the faster one
            return None
        try:
            if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
                raise Unfit("its inputs or targets are several tensors")
            if isinstance(labels := getattr(self.data, "targets", None), torch.Tensor) and _negative(labels):
                raise Unfit("there are targets below 0, which cross-entropy leaves out")
            stack = native_form(self._example, self.loss, self.layout, inputs, targets)
            if stack.keeps and self.augment.own:
                raise Unfit("it drops out, and an augmentation of your own may draw from the same generator")
        except Unfit as why:
            if wanted:
                raise HansaError(
                    f"Task(native=True): {self.name} has no native form: {why}. Leave native out to train it eagerly."
                ) from None
            log.info("%s: trained by eager PyTorch: %s", self.name, why)
            return None
        log.info("%s: trained by native code (%s)", self.name, native.instruction_set())
        return stack

    def _compiles(self) -> bool:
        """Whether workers are to compile the model; if not, one line of the log says why."""
        why = "native code trains it" if self.stack is not None else obstacle(self)
        if why is not None:
            log.warning("%s: compile: true is left out: %s", self.name, why)
        return why is None

    def fresh_model(self) -> nn.Module:
        """A model as the task has looked at one: its first weights are always the same."""
        return self._example()

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        model, buffers = self.layout.pack(fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def shell(self, dtype: torch.dtype, device: torch.device) -> ModuleShell:
        shell = ModuleShell(self, dtype, device)
        if not self._compared and shell.stack is None and device.type == "cpu":
            self._compared = True  # once: workers are told
            warn_of_memory(self, shell, ModuleShell(self, dtype, device, like=shell))
        if self.compile:
            shell.compiled = Compiled(self, shell.module, shell.parameters)
        return shell

    def pieces(self) -> list[tuple[int, int]]:
        """The test rows in fixed pieces, which workers share."""
        rows = evaluation_rows(self.data)
        return [(first, min(first + _PIECE, rows)) for first in range(0, rows, _PIECE)]

    def total(self, parts: Sequence[Score]) -> dict[str, float]:
        """Loss, accuracy and metrics of the test rows, from one part a piece in the pieces' order; of none, nothing."""
        return total(parts, self.pieces()[-1][1], self.metric, self.metrics) if parts else {}

    def evaluate(self, shell: ModuleShell, vectors: Vectors) -> dict[str, float]:
        """Mean test loss, accuracy and metrics of the given vectors, or nothing where there is no test set."""
        with random_state.kept():
            return self.total([shell.evaluate(vectors, *piece) for piece in self.pieces()])

    @property
    def examinees(self) -> dict[int, int]:
        """How many test rows each client has that owns some."""
        return {client: len(rows) for client, rows in self._owned.items()}

    def examine(self, shell: ModuleShell, client: int) -> dict[str, float]:
        """Loss, accuracy and metrics of the model that the shell holds, on a client's own test rows."""
        rows = self._owned[client]
        return of_one_client(shell.score(rows), len(rows), self.metric, self.metrics)

    def on_training_data(self) -> Task:
        """The same task evaluated on all clients' own samples: ``test_loss`` is then the global training loss."""
        whole = copy.copy(self)
        whole.data = _Everything(self.data)
        whole._owned = {}
        return whole

    def module(self, vectors: Vectors) -> nn.Module:
        """A module of its own holding the given vectors, ready to use or to save: its numbers are as wide as theirs."""
        module, wide = fresh(self.model, Key(0)), vectors[MODEL].dtype
        widened(module, wide)
        module.load_state_dict(self.layout.named(vectors[MODEL], vectors.get(BUFFERS)), strict=False)
        return module


def _samples(data: ClientData) -> tuple[int, ...]:
    """How many samples each client holds; all at once where the data knows them so, one by one otherwise."""
    sizes = getattr(data, "sizes", None)
    if isinstance(sizes, torch.Tensor) and sizes.shape == (data.population,):
        return tuple(sizes.tolist())
    return tuple(data.samples(client) for client in range(data.population))


def _negative(labels: torch.Tensor) -> bool:
    return not labels.is_floating_point() and bool(labels.numel()) and int(labels.min()) < 0
