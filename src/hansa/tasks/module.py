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
from hansa.augment.base import Augment, pipeline
from hansa.devices import Device, devices
from hansa.errors import HansaError
from hansa.keys import Key
from hansa.local.descent import Descent, Moved
from hansa.local.work import Work
from hansa.native.recognise import Unfit
from hansa.native.solo import Settings, Solo, shuffles_like_numpy
from hansa.native.stack import Stack
from hansa.tasks import generators
from hansa.tasks.calling import caller
from hansa.tasks.forms import Loss, fitting_layout, native_form
from hansa.tasks.private import Private
from hansa.tasks.probe import Seen, look, same_bits
from hansa.tasks.purity import warn_of_memory
from hansa.tasks.samples import (
    Batch,
    Batches,
    ClientData,
    Held,
    Source,
    Through,
    evaluation_rows,
    evaluation_source,
    some,
    take_rows,
    train_source,
    whole_data,
)
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
from hansa.vectors.layout import Layout, converted, widened

log = logging.getLogger("hansa")

_EVALUATION_BATCH = 500
_LOOKED_AT = 24  # rows that a model is looked at with
_FED = 1 << 22  # numbers that native code is given at a time, where its batches are made one by one
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
    weighted: see `hansa.tasks.scores.summed` for what the test loss is then. A model of float64 parameters is trained
    in float64. Buffers that clients change are averaged; constants, counters and masks keep their first value. What
    a model remembers otherwise is put back before each client, and what it draws is seeded from the client's key.

    ``augment`` is a list of functions of (batch, generator) that every training batch goes through, such as
    ``[hansa.augment.crop(4), hansa.augment.flip()]``, drawn at the address (seed, round, client, step).

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
        augment: Sequence[Augment] | Augment = (),
        name: str | None = None,
        native: bool | None = None,
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
        example = _fresh(model, Key(0))
        self.name = name if name is not None else type(example).__name__
        self.example = inputs, targets = self._some()
        self.layout = Layout.of(example, channels_last=False)
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self.layout = fitting_layout(self.name, self._example, loss, inputs, targets)
        double = any(entry.dtype == torch.float64 for entry in self.layout.parameters)
        self.dtype = torch.float64 if double else torch.float32
        seen = look(self._example, loss, self.layout, self.dtype, inputs, targets)
        self.still = self._constant(example, seen)
        self.layout = self.layout.without(self.still)
        self.metric = metric if metric is not None else default_metric(loss, seen, getattr(data, "targets", targets))
        self.summed = summed(loss, self._reduction(seen))
        self.stack = self._native_form(inputs, targets, wanted=native)
        self._compared = False

    def _some(self) -> Batch:
        """A few rows as the model is to see them in training."""
        inputs, targets = some(self.data, _LOOKED_AT)
        if self.augment:
            with generators.kept():
                generators.seed_all(Key(0), torch.device("cpu"))
                inputs = self.augment(inputs, Key(0), torch.Generator())
        return Batch(inputs, targets)

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
        rows = evaluation_rows(self.data)
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
        self.source: Source = (
            train_source(task.data, dtype, device, self.layout.channels_last) if like is None else like.source
        )
        self._test: Source | None = None
        self._generator, self._ask = torch.Generator(), caller(self.module, task.example[0])
        self.module.train()
        self.private = Private(self.module, {entry.name for entry in self.layout.buffers}, task.still)
        fits = dtype == torch.float32 and device.type == "cpu"
        self.stack = task.stack if fits else None
        self.solo: Solo | None = None
        if self.stack is not None:
            self.solo = Solo(self.stack, *self._examples())
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)

    @property
    def _direct(self) -> bool:
        """Whether batches are rows of one tensor, as they are."""
        return self.source.one is not None and not self.task.augment

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What native code reads rows of: the data itself, or a few rows in place of the batches that are to come."""
        if self._direct and isinstance(self.source, Held) and self.source.one is not None:
            return self.source.one.logical, self.source.labels
        inputs, targets = self.task.example
        return inputs.float().contiguous(), targets

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

    def rows(self, client: int, work: Work, key: Key) -> torch.Tensor | Batches:
        """The batches of a round as a matrix [steps, batch]: pass after pass over the client's rows, each shuffled."""
        own = self.task.data.rows(client)
        stream = batch_stream(own.numel(), work.steps * work.batch_size, key)
        found = own[torch.from_numpy(stream)].view(work.steps, work.batch_size).to(self.device)
        return found if self._direct else Batches(client, found, key)

    def seed(self, key: Key) -> None:
        """Set the generators a model may draw from; a native stack draws nothing, code of the user's perhaps."""
        if self.stack is None or self.task.augment.own:
            generators.seed_all(key, self.device)
            self.private.seed(key)

    def batch(self, client: int, rows: torch.Tensor | Batches) -> Batch:
        """The inputs and targets of one batch; augmented where it has an address, otherwise as test rows are."""
        if not isinstance(rows, Batches):
            found = self.source.batch(client, rows)
            return found if self._direct else self._prepared(found)
        found = self.source.batch(client, rows.rows)
        if not self.task.augment:
            return found
        return Batch(self._laid(self.task.augment(found.inputs, rows.address(), self._generator)), found.targets)

    def _prepared(self, found: Batch) -> Batch:
        """Rows as test rows are."""
        after = self.task.augment.on_test()
        if not after:
            return found
        return Batch(self._laid(after(found.inputs, Key(0).child("evaluation"), self._generator)), found.targets)

    def _laid(self, inputs: Any) -> Any:
        """Images as the model's layout has them, whatever an augmentation left."""
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and self.layout.channels_last:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def descend(
        self, rows: torch.Tensor | Batches | None, descent: Descent, y: Vector | None = None
    ) -> torch.Tensor | None:
        """All steps in one native call, on ``y`` where it is given; None where there is no such form of them."""
        if self.solo is None or descent.optimizer is not None or rows is None:
            return None
        at, settings = self.y if y is None else y, self._settings(descent)
        if isinstance(rows, torch.Tensor):
            return self.solo.steps(at, rows, settings, descent.anchor)
        size = rows.rows.shape[1]
        steps = max(1, _FED // max(1, size * self.task.example[0][0].numel()))
        losses = []
        for first in range(0, len(rows), steps):
            index = self._feed(rows[first : first + steps])
            losses.append(self.solo.steps(at, index, settings, descent.anchor))
        return torch.cat(losses)

    def _feed(self, rows: Batches) -> torch.Tensor:
        """Give native code the batches of some steps; the rows that these are of what it was given."""
        assert self.solo is not None
        found = []
        for step in range(len(rows)):
            if self.task.augment.own:
                self.seed(rows.address(step))
            found.append(self.batch(rows.client, rows[step]))
        inputs, labels = (torch.cat([one[place] for one in found]) for place in (0, 1))
        self.solo.use(self._laid(inputs), labels)
        return torch.arange(len(labels)).view(len(rows), -1)

    def _settings(self, descent: Descent) -> Settings:
        a, s = descent.correction
        if descent.momentum and descent.velocity is None:
            descent.velocity = allocate.like(self.y).zero_()
        velocity = descent.velocity if descent.momentum else None
        return Settings(descent.lr, a, s, descent.weight_decay, descent.momentum, descent.clip, velocity)

    def phase(self, x: Vector, client: int, work: Work, descent: Descent, key: Key) -> Moved | None:
        """A client's whole round in one native call, or None where there is no such form of it."""
        if self.solo is None or self.buffers is not None or not self._direct or not shuffles_like_numpy():
            return None
        change, own = allocate.like(x), self.task.data.rows(client).to(torch.int64).contiguous()
        digest = key.child("batch").digest(16)
        losses, finite = self.solo.run(
            x, self.y, change, own, work.steps, work.batch_size, digest, self._settings(descent)
        )
        return Moved(change, losses, finite)

    def gradient(
        self, client: int, rows: torch.Tensor | Batches | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert rows is not None
        if self.stack is not None:
            if isinstance(rows, torch.Tensor) and self._direct:
                examples = self._examples()
            else:
                examples = self.batch(client, rows)
                rows = torch.arange(len(examples[1]))
            mean, _ = self.stack.gradient(self.y, *examples, rows, out=self._gradient)
            return torch.tensor(mean), self._gradients
        inputs, targets = self.batch(client, rows)
        with torch.enable_grad():
            loss = self.task.loss(self._ask(inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> Score:
        """The score of a range of test rows."""
        task, source = self.task, self._test_rows()
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        if self.stack is not None and task.metric is accuracy_hits and not task.metrics and source.one is not None:
            assert isinstance(source, Held)
            loss, hits = self.stack.evaluate(self.y, source.one.logical, source.labels, start, stop)
            return Score(loss, stop - start, hits)
        self.seed(Key(0).child("evaluation", start))
        self.module.eval()
        parts = []
        for first in range(start, stop, _EVALUATION_BATCH):
            parts.append(self._score(source, torch.arange(first, min(first + _EVALUATION_BATCH, stop))))
        self.module.train()
        return together(parts)

    def _score(self, source: Source, rows: torch.Tensor) -> Score:
        task = self.task
        inputs, target = source.batch(None, rows.to(self.device))
        output = self._ask(inputs)
        loss, weight = task.summed(output, target)
        hits, own = None, None
        if task.metric in BUILT_IN:
            hits = float(task.metric(output, target))
        elif task.metric is not None:
            own = own_hits(task.metric, output, target, lambda some: self._ask(take_rows(inputs, some)))
        outputs = ((on_the_cpu(output), target.cpu()),) if task.metrics else ()
        return Score(loss, weight, hits, own, outputs)

    def _test_rows(self) -> Source:
        """The test rows, through what they go through; where they are one tensor, once and for all."""
        if self._test is None:
            form = (self.dtype, self.device, self.layout.channels_last)
            found = evaluation_source(self.task.data, *form)
            if self.task.augment.on_test() and isinstance(found, Held) and found.one is not None:
                pieces = torch.arange(evaluation_rows(self.task.data), device=self.device).split(_EVALUATION_BATCH)
                inputs = [self._prepared(found.batch(None, rows)).inputs for rows in pieces]
                found = Held(torch.cat(inputs), found.labels, *form)
            elif self.task.augment.on_test():
                found = Through(found, self._prepared)
            self._test = found
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


def _negative(labels: torch.Tensor) -> bool:
    return not labels.is_floating_point() and bool(labels.numel()) and int(labels.min()) < 0


def _fresh(model: Callable[[], nn.Module], key: Key) -> nn.Module:
    """A new module, its first weights a function of the key alone."""
    with generators.kept():
        generators.seed_all(key, torch.device("cpu"))
        module = model()
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module
