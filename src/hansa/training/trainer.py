"""The trainer of a task's model: gradients by PyTorch, or whole steps by native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.client_kernel import ClientKernel, NativeJob, shuffled_batches, shuffles_like_numpy
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite, native_fits
from hansa.core.vectors.layout import convert_module
from hansa.local.cohort import Cohort, CohortOutcome
from hansa.local.native_cohort import train_cohort_natively
from hansa.local.trainer import BaseTrainer, ClientJob, LocalResult
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.batch_sources import (
    Batch,
    BatchSource,
    KeyedBatches,
    TensorSource,
    TransformedSource,
    client_row_index,
    count_test_rows,
    take_rows,
    test_source,
    train_source,
)
from hansa.training.compiled import CompiledLoss
from hansa.training.losses import strip_weights
from hansa.training.model_probe import model_caller
from hansa.training.module_state import ModuleState
from hansa.training.scoring import (
    BUILT_IN_METRICS,
    PartialScore,
    count_correct,
    count_labels,
    merge_scores,
    move_to_cpu,
    score_user_metric,
)

if TYPE_CHECKING:
    from hansa.training.task import Task

EVALUATION_BATCH = 500
_BATCH_NUMBERS = 1 << 22  # numbers copied for native code at a time if batches are augmented
_DROPOUT_NUMBERS = 1 << 20  # numbers drawn for dropout at a time


class ModuleTrainer(BaseTrainer):
    """One model whose parameters are views of one flat vector."""

    def __init__(
        self, task: Task, dtype: torch.dtype, device: torch.device, *, like: ModuleTrainer | None = None
    ) -> None:
        """``like`` is a trainer of the same task whose data this one shares."""
        self.task, self.layout, self.device = task, task.layout, device
        self.module = convert_module(fresh(task.model, Key(0)), dtype, device)
        self.y = torch.zeros(self.layout.dim, dtype=dtype, device=device)
        self.parameters: list[torch.Tensor] = [*self.layout.bind(self.module, self.y)]
        self._frozen = self._share_frozen_parameters()
        self.buffers = (
            torch.zeros(self.layout.buffer_dim, dtype=dtype, device=device) if self.layout.buffer_dim else None
        )
        self.dtype = dtype
        self.source: BatchSource = (
            train_source(task.data, dtype, device, self.layout.channels_last) if like is None else like.source
        )
        self._test: BatchSource | None = None
        self._generator, self._ask = torch.Generator(), model_caller(self.module, task.example[0])
        self.module.train()
        self.module_state = ModuleState(
            self.module, {entry.name for entry in self.layout.buffers}, task.constant_buffers
        )
        fits = dtype == torch.float32 and device.type == "cpu"
        self.network = task.network if fits else None
        self.kernel: ClientKernel | None = None
        self.compiled: CompiledLoss | None = None
        if self.network is not None:
            self.kernel = ClientKernel(self.network, *self._examples())
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)
            self._noise = torch.Generator()
            self.releases_gil = True
            self.seeds_own_generators = not task.augment.has_user_code  # user code may use the global generators

    def _share_frozen_parameters(self) -> list[tuple[str, torch.Tensor, int]]:
        """Share the task's frozen parameters among workers if dtype and device are equal."""
        frozen: list[tuple[str, torch.Tensor, int]] = []
        for name, parameter in self.module.named_parameters():
            common = self.task.frozen.get(name)
            if common is None:
                continue
            if common.dtype == parameter.dtype and common.device == parameter.device:
                parameter.data = common
            frozen.append((name, parameter, parameter._version))
        return frozen

    @property
    def _direct(self) -> bool:
        """Whether batches are unmodified rows of one tensor."""
        return self.source.native_inputs is not None and not self.task.augment

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the examples that native code reads: the data itself, or a few rows as a placeholder for batches."""
        if self._direct and isinstance(self.source, TensorSource) and self.source.native_inputs is not None:
            return self.source.native_inputs.logical, self.source.labels
        inputs, targets = self.task.example
        return inputs.float().contiguous(), targets

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)
        if self.network is None:
            self.module_state.restore()
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def read_buffers(self) -> Vector | None:
        self.module_state.check_constant_buffers()
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                raise HansaError(
                    f"parameter {name} is frozen, and the model changed it in training: workers share such. Register "
                    "what a client changes as a buffer."
                )
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def batches(self, client: int, work: Work, key: Key) -> torch.Tensor | KeyedBatches:
        """Return the batches of a round, [steps, batch]: passes over the client's rows, each shuffled."""
        own, length = self.task.data.rows(client), work.steps * work.batch_size
        if native.available() and shuffles_like_numpy():
            drawn = torch.from_numpy(shuffled_batches(key.digest(16), own.numel(), length, own=own.to(torch.int64)))
        else:
            drawn = own[torch.from_numpy(batch_stream(own.numel(), length, key))]
        rows = drawn.view(work.steps, work.batch_size).to(self.device)
        return rows if self._direct else KeyedBatches(client, rows, key)

    def seed(self, key: Key) -> None:
        """Seed the generators that a model may draw from; native code has its own generator for dropout."""
        if self.network is None or self.task.augment.has_user_code:
            random_state.seed_all(key, self.device)
            self.module_state.seed(key)
        elif self.network.dropout_numbers:
            random_state.seed_generator(self._noise, key)

    def batch(self, client: int, rows: torch.Tensor | KeyedBatches) -> Batch:
        """Return one batch, augmented if it has a key, otherwise prepared like test rows."""
        if not isinstance(rows, KeyedBatches):
            batch = self.source.batch(client, rows)
            return batch if self._direct else self._prepare_test_batch(batch)
        batch = self.source.batch(client, rows.rows)
        if not self.task.augment:
            return batch
        return Batch(self._to_layout(self.task.augment(batch.inputs, rows.address(), self._generator)), batch.targets)

    def _prepare_test_batch(self, batch: Batch) -> Batch:
        """Apply the test pipeline to a batch."""
        after = self.task.augment.test_pipeline()
        if not after:
            return batch
        return Batch(self._to_layout(after(batch.inputs, Key(0).child("evaluation"), self._generator)), batch.targets)

    def _to_layout(self, inputs: Any) -> Any:
        """Convert images to the model's memory layout after augmentation."""
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and self.layout.channels_last:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def train_clients(self, jobs: Sequence[ClientJob]) -> list[LocalResult] | None:
        """Train clients natively; None if the model or the step has no native form.

        Clients with a common model and step are trained in one call, which keeps the data of each step in the cache.
        """
        if self.kernel is None or not all(job.step.is_affine for job in jobs):
            return None
        if self._draws_batches_natively and all(job.batches is None for job in jobs):
            if self.kernel.network.dropout_numbers:
                return [self._train_with_dropout(self.kernel, job) for job in jobs]
            first = jobs[0].step
            apart = any(job.step.shift is not None or job.step.momentum != 0 for job in jobs)
            if apart or any(job.x is not jobs[0].x or job.step.numbers != first.numbers for job in jobs):
                return [self._train_bundle(self.kernel, [job])[0] for job in jobs]
            return self._train_bundle(self.kernel, jobs)
        if self.kernel.network.dropout_numbers:
            return None
        return [self._train_on_batches(self.kernel, job) for job in jobs]

    @property
    def _draws_batches_natively(self) -> bool:
        """Return whether native code can draw a client's batches."""
        return self._direct and shuffles_like_numpy()

    def _train_bundle(self, kernel: ClientKernel, jobs: Sequence[ClientJob]) -> list[LocalResult]:
        """Train clients with a common model and step in one call."""
        index, spans = client_row_index(self.task.data, [job.client for job in jobs])
        native_jobs = [
            NativeJob(allocator.empty_like(job.x), *span, *job.work, job.key.child("batch").digest(16), job.keep_model)
            for job, span in zip(jobs, spans, strict=True)
        ]
        step = jobs[0].step
        if step.momentum:
            step.init_velocity()
        results = kernel.train_clients(jobs[0].x, self.y, index, native_jobs, step)
        return [LocalResult(job.delta, *result) for job, result in zip(native_jobs, results, strict=True)]

    def _train_with_dropout(self, kernel: ClientKernel, job: ClientJob) -> LocalResult:
        """Train a model with dropout, with the same random numbers as eager training."""
        work, rows = job.work, self.batches(job.client, job.work, job.key.child("batch"))
        assert isinstance(rows, torch.Tensor)
        if job.step.momentum:
            job.step.init_velocity()
        self.y.copy_(job.x)
        width = work.batch_size * kernel.network.dropout_numbers
        most = min(work.steps, max(1, _DROPOUT_NUMBERS // width))
        keep, losses = torch.empty(most, width), []
        for first in range(0, work.steps, most):
            some = rows[first : first + most]
            for place in range(len(some)):
                self.seed(job.key.child("noise", first + place))
                kernel.network.draw(work.batch_size, self._noise, keep[place])
            losses.append(kernel.steps(self.y, some, job.step, keep[: len(some)]))
        return self._result(job, torch.cat(losses))

    def _train_on_batches(self, kernel: ClientKernel, job: ClientJob) -> LocalResult:
        """Train on batches drawn, and possibly augmented, in Python."""
        rows = job.batches
        if rows is None:
            rows = self.batches(job.client, job.work, job.key.child("batch"))
        if job.step.momentum:
            job.step.init_velocity()
        self.y.copy_(job.x)
        if isinstance(rows, torch.Tensor):
            return self._result(job, kernel.steps(self.y, rows, job.step))
        steps = max(1, _BATCH_NUMBERS // max(1, rows.rows.shape[1] * self.task.example[0][0].numel()))
        losses = []
        for first in range(0, len(rows), steps):
            index = self._copy_batches(kernel, rows[first : first + steps])
            losses.append(kernel.steps(self.y, index, job.step))
        return self._result(job, torch.cat(losses))

    def _copy_batches(self, kernel: ClientKernel, rows: KeyedBatches) -> torch.Tensor:
        """Pass the examples of some steps to native code; return their row numbers there."""
        batches = []
        for step in range(len(rows)):
            if self.task.augment.has_user_code:
                self.seed(rows.address(step))
            batches.append(self.batch(rows.client, rows[step]))
        inputs, labels = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
        kernel.use(self._to_layout(inputs), labels)
        return torch.arange(len(labels)).view(len(rows), -1)

    def _result(self, job: ClientJob, losses: torch.Tensor) -> LocalResult:
        delta = torch.sub(self.y, job.x, out=allocator.empty_like(job.x))
        return LocalResult(delta, losses.tolist(), all_finite(delta))

    def train_cohort(self, cohort: Cohort) -> CohortOutcome | None:
        """Train a gossiping cohort natively; None if the model, the step or the exchange has no native form."""
        if (
            self.kernel is None
            or self.kernel.network.dropout_numbers
            or not self._direct
            or not native_fits(cohort.start)
        ):
            return None
        if cohort.start.numel() != cohort.dim or not cohort.new_step(cohort.clients[0]).is_affine:
            return None
        return train_cohort_natively(cohort, self.kernel)

    def interrupt(self) -> None:
        if self.kernel is not None:
            self.kernel.stop = True

    def gradient(
        self, client: int, rows: torch.Tensor | KeyedBatches | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert rows is not None
        if self.network is not None:
            if isinstance(rows, torch.Tensor) and self._direct:
                examples = self._examples()
            else:
                examples = self.batch(client, rows)
                rows = torch.arange(len(examples[1]))
            mean, _ = self.network.gradient(
                self.y, *examples, rows, out=self._gradient, keep=self._draw_dropout(len(rows))
            )
            return torch.tensor(mean), self._gradients
        inputs, targets = self.batch(client, rows)
        if self.compiled is not None and (compiled_gradient := self.compiled.gradient(inputs, targets)) is not None:
            return compiled_gradient
        with torch.enable_grad():
            loss = self.task.loss(self._ask(inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients

    def _draw_dropout(self, rows: int) -> torch.Tensor | None:
        """Draw the dropout factors of the next batch."""
        if self.network is None or not self.network.dropout_numbers:
            return None
        keep = torch.empty(rows * self.network.dropout_numbers)
        self.network.draw(rows, self._noise, keep)
        return keep

    @torch.no_grad()
    def score(self, own: torch.Tensor) -> PartialScore:
        """Return the current model's score on some test rows."""
        task, source = self.task, self._test_rows()
        if (
            self.network is not None
            and task.metric is count_correct
            and not task.metrics
            and source.native_inputs is not None
        ):
            loss, hits = self.network.evaluate(self.y, *source.batch(None, own.to(self.device)))
            return PartialScore(loss, len(own), hits, labels=len(own))
        self.seed(Key(0).child("evaluation", int(own[0])))
        self.module.eval()
        score = merge_scores([self._score(source, rows) for rows in torch.split(own, EVALUATION_BATCH)])
        self.module.train()
        return score

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> PartialScore:
        """Return the score of the given vectors on a range of test rows."""
        task, source = self.task, self._test_rows()
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        if (
            self.network is not None
            and task.metric is count_correct
            and not task.metrics
            and source.native_inputs is not None
        ):
            assert isinstance(source, TensorSource)
            loss, hits = self.network.evaluate(self.y, source.native_inputs.logical, source.labels, start, stop)
            return PartialScore(loss, stop - start, hits, labels=stop - start)
        self.seed(Key(0).child("evaluation", start))
        self.module.eval()
        parts = []
        for first in range(start, stop, EVALUATION_BATCH):
            parts.append(self._score(source, torch.arange(first, min(first + EVALUATION_BATCH, stop))))
        self.module.train()
        return merge_scores(parts)

    def _score(self, source: BatchSource, rows: torch.Tensor) -> PartialScore:
        task = self.task
        inputs, target = source.batch(None, rows.to(self.device))
        output = self._ask(inputs)
        loss, weight = task.loss_sums(output, target)
        target = strip_weights(target)
        hits, own, count = None, None, 0.0
        if task.metric in BUILT_IN_METRICS:
            hits, count = float(task.metric(output, target)), count_labels(target)
        elif task.metric is not None:
            own = score_user_metric(task.metric, output, target, lambda some: self._ask(take_rows(inputs, some)))
        outputs = ((move_to_cpu(output), move_to_cpu(target)),) if task.metrics else ()
        return PartialScore(loss, weight, hits, own, count, outputs)

    def _test_rows(self) -> BatchSource:
        """Return the source of prepared test rows; a single tensor is prepared once."""
        if self._test is None:
            form = (self.dtype, self.device, self.layout.channels_last)
            source: Any = test_source(self.task.data, *form)
            if (
                self.task.augment.test_pipeline()
                and isinstance(source, TensorSource)
                and source.native_inputs is not None
            ):
                rows = torch.arange(count_test_rows(self.task.data), device=self.device)
                pieces = torch.split(rows, EVALUATION_BATCH)
                inputs = [self._prepare_test_batch(source.batch(None, piece)).inputs for piece in pieces]
                source = TensorSource(torch.cat(inputs), source.labels, *form)
            elif self.task.augment.test_pipeline():
                source = TransformedSource(source, self._prepare_test_batch)
            self._test = source
        return self._test


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``length`` positions from consecutive permutations of 0..samples-1.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


def fresh(model: Callable[[], nn.Module], key: Key) -> nn.Module:
    """Return a new module whose initial weights depend on the key only, whatever other threads do."""
    with random_state.LOCK, random_state.preserve_rng():
        random_state.seed_all(key, torch.device("cpu"))
        module = model()
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module
