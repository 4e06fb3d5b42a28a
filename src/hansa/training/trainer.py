"""A worker's place to train a task's model: batches in, gradients or whole native steps out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.client_kernel import Errand, Settings, Solo, draws, shuffles_like_numpy
from hansa.core.native.cohort_kernel import Together
from hansa.core.native.lazy_cohort_kernel import Trail
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite, fits
from hansa.core.vectors.layout import converted
from hansa.local.descent import ClientJob, LocalResult, LocalStep
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.batch_sources import (
    Batch,
    Batches,
    Held,
    Source,
    Through,
    evaluation_rows,
    evaluation_source,
    own_rows,
    take_rows,
    train_source,
)
from hansa.training.compiled import Compiled
from hansa.training.losses import unweighted
from hansa.training.model_call import caller
from hansa.training.module_state import Private
from hansa.training.scoring import BUILT_IN, Score, accuracy_hits, counted, on_the_cpu, own_hits, together

if TYPE_CHECKING:
    from hansa.training.task import Task

EVALUATION_BATCH = 500
_FED = 1 << 22  # numbers that native code is given at a time, where its batches are made one by one
_KEPT = 1 << 20  # numbers drawn for dropout at a time


class ModuleShell:
    """One model whose parameters are views of one flat vector."""

    def __init__(
        self, task: Task, dtype: torch.dtype, device: torch.device, *, like: ModuleShell | None = None
    ) -> None:
        """``like`` is a shell of the same task that shares its data with this one."""
        self.task, self.layout, self.device = task, task.layout, device
        self.module = converted(fresh(task.model, Key(0)), dtype, device)
        self.y = torch.zeros(self.layout.dim, dtype=dtype, device=device)
        self.parameters: list[torch.Tensor] = [*self.layout.bind(self.module, self.y)]
        self._frozen = self._shared()
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
        self.compiled: Compiled | None = None
        if self.stack is not None:
            self.solo = Solo(self.stack, *self._examples())
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)
            self._noise = torch.Generator()

    def _shared(self) -> list[tuple[str, torch.Tensor, int]]:
        """Let frozen parameters be those of the task, which all workers share, where they are of the same kind."""
        found: list[tuple[str, torch.Tensor, int]] = []
        for name, parameter in self.module.named_parameters():
            common = self.task.frozen.get(name)
            if common is None:
                continue
            if common.dtype == parameter.dtype and common.device == parameter.device:
                parameter.data = common
            found.append((name, parameter, parameter._version))
        return found

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

    @property
    def draws_alone(self) -> bool:
        """Native code leaves the common generators alone, unless an augmentation of the user's draws from them."""
        return self.stack is not None and not self.task.augment.own

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)
        if self.stack is None:
            self.private.restore()
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def read_buffers(self) -> Vector | None:
        self.private.refuse_change()
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                raise HansaError(
                    f"parameter {name} is frozen, and the model changed it in training: workers share such. Register "
                    "what a client changes as a buffer."
                )
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def rows(self, client: int, work: Work, key: Key) -> torch.Tensor | Batches:
        """The batches of a round as a matrix [steps, batch]: pass after pass over the client's rows, each shuffled."""
        own, length = self.task.data.rows(client), work.steps * work.batch_size
        if native.available() and shuffles_like_numpy():
            drawn = torch.from_numpy(draws(key.digest(16), own.numel(), length, own=own.to(torch.int64)))
        else:
            drawn = own[torch.from_numpy(batch_stream(own.numel(), length, key))]
        found = drawn.view(work.steps, work.batch_size).to(self.device)
        return found if self._direct else Batches(client, found, key)

    def seed(self, key: Key) -> None:
        """Set the generators a model may draw from; a native stack has one of its own, for what eager dropout draws."""
        if self.stack is None or self.task.augment.own:
            random_state.seed_all(key, self.device)
            self.private.seed(key)
        elif self.stack.keeps:
            random_state.seed_own(self._noise, key)

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
        self, rows: torch.Tensor | Batches | None, descent: LocalStep, y: Vector | None = None
    ) -> torch.Tensor | None:
        """All steps in one native call, on ``y`` where it is given; None where there is no such form of them."""
        if self.solo is None or self.solo.stack.keeps or descent.optimizer is not None or rows is None:
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

    def _settings(self, descent: LocalStep) -> Settings:
        a, s = descent.correction
        velocity = descent.moving() if descent.momentum else None
        return Settings(descent.lr, a, s, descent.weight_decay, descent.momentum, descent.max_grad_norm, velocity)

    def phase(self, x: Vector, client: int, work: Work, descent: LocalStep, key: Key) -> LocalResult | None:
        """A client's whole round in one native call, or None where there is no such form of it."""
        if not self._whole:
            return None
        assert self.solo is not None
        if self.solo.stack.keeps:
            return self._dropping(self.solo, x, client, work, descent, key)
        return self._moved([ClientJob(x, client, work, descent, key)], self._settings(descent), keep=True)[0]

    def _dropping(self, solo: Solo, x: Vector, client: int, work: Work, descent: LocalStep, key: Key) -> LocalResult:
        """The same for a model that drops out: for each step the generator's numbers are those of eager training."""
        rows, settings = self.rows(client, work, key.child("batch")), self._settings(descent)
        assert isinstance(rows, torch.Tensor)
        self.y.copy_(x)
        width = work.batch_size * solo.stack.keeps
        many = min(work.steps, max(1, _KEPT // width))
        keep, losses = torch.empty(many, width), []
        for first in range(0, work.steps, many):
            some = rows[first : first + many]
            for place in range(len(some)):
                self.seed(key.child("noise", first + place))
                solo.stack.draw(work.batch_size, self._noise, keep[place])
            losses.append(solo.steps(self.y, some, settings, descent.anchor, keep[: len(some)]))
        change = torch.sub(self.y, x, out=allocator.like(x))
        return LocalResult(change, torch.cat(losses).tolist(), all_finite(change))

    def phases(self, given: Sequence[ClientJob]) -> list[LocalResult] | None:
        """The same for several clients: first all that is Python's, then all steps, so that each finds its own near."""
        if not self._whole or not all(one.descent.plain for one in given):
            return None
        assert self.solo is not None
        if self.solo.stack.keeps:
            return [self._dropping(self.solo, *one) for one in given]
        settings = [self._settings(one.descent) for one in given]
        alone = settings[0].shift is not None or settings[0].velocity is not None
        if alone or any(one.x is not given[0].x for one in given) or any(one != settings[0] for one in settings):
            return [self._moved([one], each)[0] for one, each in zip(given, settings, strict=True)]
        return self._moved(given, settings[0])

    @property
    def _whole(self) -> bool:
        """Whether native code knows a client's round as a whole."""
        return self.solo is not None and self.buffers is None and self._direct and shuffles_like_numpy()

    def _moved(self, given: Sequence[ClientJob], settings: Settings, *, keep: bool = False) -> list[LocalResult]:
        """Clients' rounds from one model in one native call; the last one's stays in y if it is to be kept."""
        assert self.solo is not None
        index, spans = own_rows(self.task.data, [one.client for one in given])
        errands = [
            Errand(allocator.like(one.x), *span, *one.work, one.key.child("batch").digest(16))
            for one, span in zip(given, spans, strict=True)
        ]
        found = self.solo.runs(given[0].x, self.y, index, errands, settings, keep=keep)
        return [LocalResult(errand.change, *each) for errand, each in zip(errands, found, strict=True)]

    def together(
        self, rows: torch.Tensor, descent: LocalStep, *, later: bool = False, start: Vector | None = None
    ) -> Together | None:
        """A cohort's rows for native code, which begin as ``start`` where that is given, or None where there is no such
        form of their steps."""
        settings = self._marching(rows, descent)
        if settings is None or self.solo is None:
            return None
        return Together(self.solo, rows, settings, descent.anchor, later=later, start=start)

    def trail(self, start: torch.Tensor, descent: LocalStep) -> Trail | None:
        """The changes of a cohort for native code, or None where there is no such form of its steps."""
        settings = self._marching(start, descent)
        return None if settings is None or self.solo is None else Trail(self.solo, start, settings, descent.anchor)

    def _marching(self, x: torch.Tensor, descent: LocalStep) -> Settings | None:
        """The settings of a native step on vectors such as this, or None."""
        if self.solo is None or self.buffers is not None or not (self._direct and descent.plain and fits(x)):
            return None
        if self.solo.stack.keeps:
            return None
        a, s = descent.correction
        return Settings(descent.lr, a, s, descent.weight_decay, descent.momentum, descent.max_grad_norm)

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
            mean, _ = self.stack.gradient(self.y, *examples, rows, out=self._gradient, keep=self._drawn(len(rows)))
            return torch.tensor(mean), self._gradients
        inputs, targets = self.batch(client, rows)
        if self.compiled is not None and (found := self.compiled.gradient(inputs, targets)) is not None:
            return found
        with torch.enable_grad():
            loss = self.task.loss(self._ask(inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients

    def _drawn(self, rows: int) -> torch.Tensor | None:
        """What dropout multiplies the next batch by."""
        if self.stack is None or not self.stack.keeps:
            return None
        keep = torch.empty(rows * self.stack.keeps)
        self.stack.draw(rows, self._noise, keep)
        return keep

    @torch.no_grad()
    def score(self, own: torch.Tensor) -> Score:
        """The score of some test rows by the model as it is."""
        task, source = self.task, self._test_rows()
        if self.stack is not None and task.metric is accuracy_hits and not task.metrics and source.one is not None:
            loss, hits = self.stack.evaluate(self.y, *source.batch(None, own.to(self.device)))
            return Score(loss, len(own), hits, counted=len(own))
        self.seed(Key(0).child("evaluation", int(own[0])))
        self.module.eval()
        found = together([self._score(source, rows) for rows in torch.split(own, EVALUATION_BATCH)])
        self.module.train()
        return found

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> Score:
        """The score of a range of test rows."""
        task, source = self.task, self._test_rows()
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        if self.stack is not None and task.metric is accuracy_hits and not task.metrics and source.one is not None:
            assert isinstance(source, Held)
            loss, hits = self.stack.evaluate(self.y, source.one.logical, source.labels, start, stop)
            return Score(loss, stop - start, hits, counted=stop - start)
        self.seed(Key(0).child("evaluation", start))
        self.module.eval()
        parts = []
        for first in range(start, stop, EVALUATION_BATCH):
            parts.append(self._score(source, torch.arange(first, min(first + EVALUATION_BATCH, stop))))
        self.module.train()
        return together(parts)

    def _score(self, source: Source, rows: torch.Tensor) -> Score:
        task = self.task
        inputs, target = source.batch(None, rows.to(self.device))
        output = self._ask(inputs)
        loss, weight = task.summed(output, target)
        target = unweighted(target)
        hits, own, count = None, None, 0.0
        if task.metric in BUILT_IN:
            hits, count = float(task.metric(output, target)), counted(target)
        elif task.metric is not None:
            own = own_hits(task.metric, output, target, lambda some: self._ask(take_rows(inputs, some)))
        outputs = ((on_the_cpu(output), on_the_cpu(target)),) if task.metrics else ()
        return Score(loss, weight, hits, own, count, outputs)

    def _test_rows(self) -> Source:
        """The test rows, through what they go through; where they are one tensor, once and for all."""
        if self._test is None:
            form = (self.dtype, self.device, self.layout.channels_last)
            found: Any = evaluation_source(self.task.data, *form)
            if self.task.augment.on_test() and isinstance(found, Held) and found.one is not None:
                rows = torch.arange(evaluation_rows(self.task.data), device=self.device)
                pieces = torch.split(rows, EVALUATION_BATCH)
                inputs = [self._prepared(found.batch(None, piece)).inputs for piece in pieces]
                found = Held(torch.cat(inputs), found.labels, *form)
            elif self.task.augment.on_test():
                found = Through(found, self._prepared)
            self._test = found
        return self._test


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``length`` positions: permutations of 0..samples-1 one after the other, as many as are needed.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


def fresh(model: Callable[[], nn.Module], key: Key) -> nn.Module:
    """A new module, its first weights a function of the key alone, whatever other threads make or train meanwhile."""
    with random_state.LOCK, random_state.kept():
        random_state.seed_all(key, torch.device("cpu"))
        module = model()
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module
