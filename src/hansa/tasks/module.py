"""The usual task: any ``nn.Module``, any loss, on federated data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hansa import native
from hansa.devices import Device, devices
from hansa.errors import HansaError
from hansa.keys import Key
from hansa.local.descent import Descent, Moved
from hansa.local.work import Work
from hansa.native.recognise import Unfit
from hansa.native.solo import Settings, Solo, shuffles_like_numpy
from hansa.native.stack import Stack
from hansa.tasks import generators
from hansa.tasks.forms import Loss, fitting_layout, native_form
from hansa.tasks.private import Private
from hansa.tasks.probe import Seen, look, same_bits
from hansa.tasks.purity import warn_of_memory
from hansa.tasks.samples import ClientData, Store
from hansa.tasks.scores import (
    BUILT_IN,
    Metric,
    Score,
    accuracy_hits,
    check_names,
    default_metric,
    on_the_cpu,
    own_hits,
    plain,
    summed,
    together,
    total,
)
from hansa.types import BUFFERS, MODEL, Population, Vector, Vectors
from hansa.vectors import allocate
from hansa.vectors.layout import converted, widened

log = logging.getLogger("hansa")

_EVALUATION_BATCH = 500
_PIECE = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers


class _Everything:
    """Federated data whose test set is what all clients hold."""

    def __init__(self, data: ClientData) -> None:
        rows = torch.cat([data.rows(client) for client in range(data.population)])
        self.inputs, self.targets, self.population = data.inputs, data.targets, data.population
        self.test_inputs, self.test_targets = data.inputs[rows], data.targets[rows]
        self.rows, self.samples = data.rows, data.samples


class Task:
    """A model factory (or module class), a loss of (output, target), and federated data.

    ``model`` is called without arguments; equal seeds give equal first models. ``metric`` maps (output, target) to the
    number of hits, one value a row, or a mean of such, and is reported as test_accuracy; by default it is
    classification accuracy where targets are class numbers. ``metrics`` are functions of the outputs and targets of
    all test rows at once: ``{"auc": roc_auc}`` is reported as test_auc. The loss may be a mean or a sum over rows, or
    weighted: see `hansa.tasks.scores.summed` for what the test loss is then. A model of float64 parameters is trained
    in float64. Buffers that clients change are averaged; constants, counters and masks keep their first value. What
    a model remembers otherwise is put back before each client, and what it draws is seeded from the client's key.

    A model that amounts to a stack of convolutions and linear layers with cross-entropy, however its ``forward()`` is
    written, is trained by native code in float32: three batches are compared first, and the two agree to float
    rounding. Any other is trained by eager PyTorch, and one line of the log says why; ``native=False`` keeps to eager,
    ``native=True`` refuses a model that has no native form. ``device`` is where clients train unless the run says
    another: native code is for the CPU, on any other device training is eager.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Loss,
        data: ClientData,
        *,
        metric: Metric | None = None,
        metrics: Mapping[str, Metric] | None = None,
        name: str | None = None,
        native: bool | None = None,
        device: Device | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            raise HansaError(
                f"Task(model={type(model).__name__} object): expected a function that makes the model, so that every "
                f"worker has its own. Pass the class, or lambda: {type(model).__name__}(...)."
            )
        self.model, self.loss, self.data = model, loss, data
        self.device = None if device is None else devices(device, "Task")
        self.metrics = check_names({} if metrics is None else metrics)
        self.population = Population(_samples(data))
        if min(self.population.samples, default=0) < 1:
            empty = next((i for i, samples in enumerate(self.population.samples) if samples < 1), 0)
            raise HansaError(f"client {empty} holds no samples: give it some, or leave it out of the data.")
        example = _fresh(model, Key(0))
        self.name = name if name is not None else type(example).__name__
        self.layout = fitting_layout(self.name, self._example, loss, data.inputs, data.targets)
        double = any(entry.dtype == torch.float64 for entry in self.layout.parameters)
        self.dtype = torch.float64 if double else torch.float32
        seen = look(self._example, loss, self.layout, self.dtype, data.inputs, data.targets)
        self.still = self._constant(example, seen)
        self.layout = self.layout.without(self.still)
        self.metric = metric if metric is not None else default_metric(loss, seen, data.targets)
        self.summed = summed(loss, self._reduction(seen))
        self.stack = self._native_form(wanted=native)
        self._compared = False

    def _example(self) -> nn.Module:
        return _fresh(self.model, Key(0))

    def _constant(self, example: nn.Module, seen: Seen | None) -> set[str]:
        """Buffers that training leaves alone and that are the same for every seed: they need not travel."""
        if seen is None or not self.layout.buffers:
            return set()
        here, other = dict(example.named_buffers()), dict(_fresh(self.model, Key(1)).named_buffers())
        still = {entry.name for entry in self.layout.buffers} - seen.changed
        return {name for name in still if same_bits(here[name], other.get(name))}

    def _reduction(self, seen: Seen | None) -> str:
        if seen is None:
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
                _EVALUATION_BATCH,
            )
        return seen.reduction

    def _native_form(self, wanted: bool | None) -> Stack | None:
        """The native form of the model and its loss where there is one."""
        if wanted is False:
            return None
        if wanted is None and native.instruction_set() == "base":  # without vector units eager is the faster one
            return None
        try:
            stack = native_form(self._example, self.loss, self.layout, self.data.inputs, self.data.targets)
        except Unfit as why:
            if wanted:
                raise HansaError(
                    f"Task(native=True): {self.name} has no native form: {why}. Leave native out to train it eagerly."
                ) from None
            log.info("%s: trained by eager PyTorch: %s", self.name, why)
            return None
        log.info("%s: trained by native code (%s)", self.name, native.instruction_set())
        return stack

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        model, buffers = self.layout.pack(_fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def shell(self, dtype: torch.dtype, device: torch.device) -> ModuleShell:
        shell = ModuleShell(self, dtype, device)
        if not self._compared and shell.stack is None and device.type == "cpu":
            self._compared = True  # once: workers are told
            warn_of_memory(self, shell, ModuleShell(self, dtype, device, like=shell))
        return shell

    def pieces(self) -> list[tuple[int, int]]:
        """The test rows in fixed pieces, which workers share."""
        rows = 0 if self.data.test_inputs is None or self.data.test_targets is None else len(self.data.test_targets)
        return [(first, min(first + _PIECE, rows)) for first in range(0, rows, _PIECE)]

    def total(self, parts: Sequence[Score]) -> dict[str, float]:
        """Loss, accuracy and metrics of the test rows, from one part a piece in the pieces' order; of none, nothing."""
        return total(parts, self.pieces()[-1][1], self.metric, self.metrics) if parts else {}

    def evaluate(self, shell: ModuleShell, vectors: Vectors) -> dict[str, float]:
        """Mean test loss, accuracy and metrics of the given vectors, or nothing where there is no test set."""
        with generators.kept():
            return self.total([shell.evaluate(vectors, *piece) for piece in self.pieces()])

    def on_training_data(self) -> Task:
        """The same task evaluated on all clients' own samples: ``test_loss`` is then the global training loss."""
        whole = copy.copy(self)
        whole.data = _Everything(self.data)
        return whole

    def module(self, vectors: Vectors) -> nn.Module:
        """A module of its own holding the given vectors, ready to use or to save: its numbers are as wide as theirs."""
        module, wide = _fresh(self.model, Key(0)), vectors[MODEL].dtype
        widened(module, wide)
        module.load_state_dict(self.layout.named(vectors[MODEL], vectors.get(BUFFERS)), strict=False)
        return module


class ModuleShell:
    """One model whose parameters are views of one flat vector."""

    def __init__(
        self, task: Task, dtype: torch.dtype, device: torch.device, *, like: ModuleShell | None = None
    ) -> None:
        """``like`` is a shell of the same task that shares its data with this one."""
        self.task, self.layout, self.device = task, task.layout, device
        self.module = converted(_fresh(task.model, Key(0)), dtype, device)
        self.y = torch.zeros(self.layout.dim, dtype=dtype, device=device)
        self.parameters: list[torch.Tensor] = [*self.layout.bind(self.module, self.y)]
        self.buffers = (
            torch.zeros(self.layout.buffer_dim, dtype=dtype, device=device) if self.layout.buffer_dim else None
        )
        self.dtype = dtype
        self.inputs: Store = (
            Store(task.data.inputs, dtype, device, self.layout.channels_last) if like is None else like.inputs
        )
        self.targets: torch.Tensor = _cast(task.data.targets, dtype, device) if like is None else like.targets
        self._test: tuple[Store, torch.Tensor] | None = None
        self.module.train()
        self.private = Private(self.module, {entry.name for entry in self.layout.buffers}, task.still)
        fits = dtype == torch.float32 and device.type == "cpu" and self.targets.dtype == torch.int64
        self.stack = task.stack if fits else None
        self.solo: Solo | None = None
        if self.stack is not None:
            logical = self.inputs.logical
            self.solo = Solo(self.stack, logical, self.targets)
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)

    @property
    def releases_gil(self) -> bool:
        """Whether its steps run outside the interpreter's lock, so that threads serve as well as processes."""
        return self.stack is not None

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)
        if self.stack is None:
            self.private.restore()
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def read_buffers(self) -> Vector | None:
        self.private.refuse_change()
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def rows(self, client: int, work: Work, key: Key) -> torch.Tensor:
        """The batches of a round as a matrix [steps, batch]: pass after pass over the client's rows, each shuffled."""
        own = self.task.data.rows(client)
        stream = batch_stream(own.numel(), work.steps * work.batch_size, key)
        return own[torch.from_numpy(stream)].view(work.steps, work.batch_size).to(self.device)

    def seed(self, key: Key) -> None:
        """Set the generators a model may draw from; a native stack draws nothing."""
        if self.stack is None:
            generators.seed_all(key, self.device)
            self.private.seed(key)

    def descend(self, rows: torch.Tensor | None, descent: Descent, y: Vector | None = None) -> torch.Tensor | None:
        """All steps in one native call, on ``y`` where it is given; None where there is no such form of them."""
        if self.solo is None or descent.optimizer is not None or rows is None:
            return None
        return self.solo.steps(self.y if y is None else y, rows, self._settings(descent), descent.anchor)

    def _settings(self, descent: Descent) -> Settings:
        a, s = descent.correction
        if descent.momentum and descent.velocity is None:
            descent.velocity = allocate.like(self.y).zero_()
        velocity = descent.velocity if descent.momentum else None
        return Settings(descent.lr, a, s, descent.weight_decay, descent.momentum, descent.clip, velocity)

    def phase(self, x: Vector, client: int, work: Work, descent: Descent, key: Key) -> Moved | None:
        """A client's whole round in one native call, or None where there is no such form of it."""
        if self.solo is None or self.buffers is not None or not shuffles_like_numpy():
            return None
        change, own = allocate.like(x), self.task.data.rows(client).to(torch.int64).contiguous()
        digest = key.child("batch").digest(16)
        losses, finite = self.solo.run(
            x, self.y, change, own, work.steps, work.batch_size, digest, self._settings(descent)
        )
        return Moved(change, losses, finite)

    def gradient(self, client: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert rows is not None
        if self.stack is not None:
            mean, _ = self.stack.gradient(self.y, self.inputs.logical, self.targets, rows, out=self._gradient)
            return torch.tensor(mean), self._gradients
        with torch.enable_grad():
            loss = self.task.loss(self.module(self.inputs[rows]), self.targets.index_select(0, rows))
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> Score:
        """The score of a range of test rows."""
        task = self.task
        inputs, targets = self._test_rows()
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        if self.stack is not None and task.metric is accuracy_hits and not task.metrics:
            loss, hits = self.stack.evaluate(self.y, inputs.logical, targets, start, stop)
            return Score(loss, stop - start, hits)
        self.seed(Key(0).child("evaluation", start))
        self.module.eval()
        parts = []
        for first in range(start, stop, _EVALUATION_BATCH):
            rows = torch.arange(first, min(first + _EVALUATION_BATCH, stop), device=self.device)
            parts.append(self._score(inputs, rows, targets.index_select(0, rows)))
        self.module.train()
        return together(parts)

    def _score(self, inputs: Store, rows: torch.Tensor, target: torch.Tensor) -> Score:
        task = self.task
        output = self.module(inputs[rows])
        loss, weight = task.summed(output, target)
        hits, own = None, None
        if task.metric in BUILT_IN:
            hits = float(task.metric(output, target))
        elif task.metric is not None:
            own = own_hits(task.metric, output, target, lambda some: self.module(inputs[rows[some]]))
        outputs = ((on_the_cpu(output), target.cpu()),) if task.metrics else ()
        return Score(loss, weight, hits, own, outputs)

    def _test_rows(self) -> tuple[Store, torch.Tensor]:
        data = self.task.data
        if self._test is None:
            assert data.test_inputs is not None
            assert data.test_targets is not None
            self._test = (
                Store(data.test_inputs, self.dtype, self.device, self.layout.channels_last),
                _cast(data.test_targets, self.dtype, self.device),
            )
        return self._test


def _samples(data: ClientData) -> tuple[int, ...]:
    """How many samples each client holds; all at once where the data knows them so, one by one otherwise."""
    sizes = getattr(data, "sizes", None)
    if isinstance(sizes, torch.Tensor) and sizes.shape == (data.population,):
        return tuple(sizes.tolist())
    return tuple(data.samples(client) for client in range(data.population))


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``length`` positions: permutations of 0..samples-1 one after the other, as many as are needed.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


def _cast(targets: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (targets.to(dtype) if targets.is_floating_point() else targets).contiguous().to(device)


def _fresh(model: Callable[[], nn.Module], key: Key) -> nn.Module:
    """A new module, its first weights a function of the key alone."""
    with generators.kept():
        generators.seed_all(key, torch.device("cpu"))
        module = model()
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module
