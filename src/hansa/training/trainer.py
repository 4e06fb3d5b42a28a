"""The trainer of a task's model: gradients by PyTorch, or whole steps by native code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hansa.core import native
from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.client_kernel import (
    ClientKernel,
    NativeJob,
    shuffled_batches,
    shuffled_rows,
    shuffles_like_numpy,
)
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import native_fits
from hansa.core.vectors.layout import convert_module
from hansa.local.batching import Positions
from hansa.local.step import LocalStep
from hansa.local.trainer import BaseTrainer, ClientJobs, LocalResults, NativeSteps
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.batch_sources import (
    Batch,
    BatchSource,
    KeyedBatches,
    Run,
    TensorSource,
    UnequalBatches,
    client_row_index,
    train_source,
)
from hansa.training.compiled import CompiledLoss
from hansa.training.evaluation import Evaluator, PartialScore
from hansa.training.execution_mode import native_inputs
from hansa.training.mixed_precision import ModelPrecision
from hansa.training.model_probe import model_caller
from hansa.training.module_state import ModuleState, SharedWeights
from hansa.training.vmap import BatchedTraining

if TYPE_CHECKING:
    from hansa.training.task import Task

_BATCH_NUMBERS = 1 << 22  # numbers copied for native code at a time if batches are augmented
_DROPOUT_NUMBERS = 1 << 20  # numbers drawn for dropout at a time


class ModuleTrainer(BaseTrainer):
    """One model whose parameters are views of one flat vector."""

    def __init__(
        self, task: Task, dtype: torch.dtype, device: torch.device, *, like: ModuleTrainer | None = None
    ) -> None:
        """``like`` is a trainer of the same task, dtype and device, whose data and frozen weights it shares."""
        self.task, self.layout, self.device = task, task.layout, device
        self.module = convert_module(fresh(task.model, Key(0)), dtype, device, task.kept_weights(dtype))
        self.y = torch.zeros(self.layout.dim, dtype=dtype, device=device)
        self.precision = ModelPrecision(task.precision, self.module, self.layout, self.y)
        self.parameters: list[torch.Tensor] = self.precision.parameters
        self._shared = SharedWeights(task, self.module, like)
        self.buffers = (
            torch.zeros(self.layout.buffer_dim, dtype=dtype, device=device) if self.layout.buffer_dim else None
        )
        self.dtype = dtype
        self.source: BatchSource = (
            train_source(task.data, dtype, device, self.layout.channels_last) if like is None else like.source
        )
        self.evaluator: Evaluator = Evaluator(self, None if like is None else like.evaluator)
        self._generator = torch.Generator()
        self.call_model: Callable[[Any], Any] = self.precision.wrap(model_caller(self.module, task.example[0]))
        self.module.train()
        self.module_state = ModuleState(
            self.module, {entry.name for entry in self.layout.buffers}, task.constant_buffers, self._shared.buffers
        )
        fits = dtype == torch.float32 and device.type == "cpu"
        self.network = task.network if fits else None
        self.kernel: ClientKernel | None = None
        self.compiled: CompiledLoss | None = None
        self.batched: BatchedTraining | None = None
        if task.client_batching is not None:
            self.batched = BatchedTraining(self, task.client_batching)
            self.clients_per_call = task.client_batching.models
        if self.network is not None:
            self.kernel = ClientKernel(self.network, *self._examples())
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)
            self._noise = torch.Generator()
            self.releases_gil = True
            self.seeds_own_generators = not task.augment.has_user_code  # user code may use the global generators

    @property
    def _direct(self) -> bool:
        """Whether batches are unmodified rows of one tensor."""
        return self.source.native_inputs is not None and not self.task.augment

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the examples that native code reads: the data itself, or a few rows as a placeholder for batches."""
        if self._direct and isinstance(self.source, TensorSource) and self.source.native_inputs is not None:
            return self.source.native_inputs.logical, self.source.labels
        inputs, targets = self.task.example
        return native_inputs(inputs), targets

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)
        self.precision.start_client()
        if self.network is None:
            self.module_state.restore()
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def read_buffers(self) -> Vector | None:
        self.module_state.check_constant_buffers()
        self._shared.check()
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def batches(self, client: int, work: Work, key: Key) -> torch.Tensor | KeyedBatches:
        """Return the batches of a round, [steps, batch]: passes over the client's rows, each shuffled."""
        own, length = self.task.data.rows(client), work.steps * work.batch_size
        if native.available() and shuffles_like_numpy():
            drawn = torch.from_numpy(shuffled_batches(key.digest(16), own.numel(), length, own=own.to(torch.int64)))
        else:
            drawn = own[torch.from_numpy(batch_stream(own.numel(), length, key))]
        rows = copy_to_device(drawn.view(work.steps, work.batch_size), self.source.index_device)
        return rows if self._direct else KeyedBatches(client, rows, key)

    def batches_at(
        self, client: int, positions: Sequence[Positions], key: Key
    ) -> torch.Tensor | KeyedBatches | UnequalBatches:
        """Return batches of the client's rows at these positions; consecutive ones of a size are one tensor."""
        own = self.task.data.rows(client).to(torch.int64)
        runs: list[Run] = []
        first = 0
        for _, same in groupby(positions, key=len):
            rows = copy_to_device(own[torch.from_numpy(np.stack(list(same)))], self.source.index_device)
            runs.append(rows if self._direct else KeyedBatches(client, rows, key, first))
            first += len(rows)
        return runs[0] if len(runs) == 1 else UnequalBatches(runs)

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
            return batch if self._direct else self.prepare_test_batch(batch)
        batch = self.source.batch(client, rows.rows)
        if not self.task.augment:
            return batch
        return Batch(self._to_layout(self.task.augment(batch.inputs, rows.address(), self._generator)), batch.targets)

    def prepare_test_batch(self, batch: Batch) -> Batch:
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

    def train_clients(self, jobs: ClientJobs) -> LocalResults | None:
        """Train clients natively, or together as the task's plan says; None if there is no fast path for them.

        Clients with a common step are trained in one call, which keeps the data of each step in the cache.
        """
        if self.batched is not None:
            return self.batched.train(jobs)
        kernel, steps = self.kernel, list({id(step): step for step in jobs.steps}.values())
        if kernel is None or not all(step.is_affine for step in steps):
            return None
        if jobs.batches is None and self._draws_batches_natively:
            if kernel.network.dropout_numbers:
                return self._train_each(jobs, partial(self._train_with_dropout, kernel))
            first, one_start = steps[0], len(set(map(id, jobs.models))) == 1
            common = all(step.shift is None and step.numbers == first.numbers for step in steps) and not first.momentum
            if common and (one_start or not first.prox_weight) and not jobs.keep_models:
                rows = self._train_rows(kernel, jobs) if one_start else None
                return self._train_bundle(kernel, jobs) if rows is None else rows
            apart = LocalResults()
            for place in range(len(jobs)):
                apart.extend(self._train_bundle(kernel, jobs.part([place])))
            return apart
        if kernel.network.dropout_numbers:
            return None
        return self._train_each(jobs, partial(self._train_on_batches, kernel))

    def _train_each(self, jobs: ClientJobs, losses_of: Callable[[ClientJobs, int], torch.Tensor]) -> LocalResults:
        """Train clients one after the other by a function that takes a client's steps and returns their losses."""
        results = LocalResults()
        for place, (x, step) in enumerate(zip(jobs.models, jobs.steps, strict=True)):
            if step.momentum:
                step.init_velocity()
            self.y.copy_(x)
            results.add_model(x, self.y, losses_of(jobs, place).tolist(), keep_model=jobs.keep_models)
        return results

    @property
    def _draws_batches_natively(self) -> bool:
        """Return whether native code can draw a client's batches."""
        return self._direct and shuffles_like_numpy()

    def _train_rows(self, kernel: ClientKernel, jobs: ClientJobs) -> LocalResults | None:
        """Train clients from one model with one step, each change into a row of a matrix; None if a change is not
        finite."""
        x = jobs.models[0]
        if not native_fits(x):
            return None
        index, spans = client_row_index(self.task.data, jobs.clients)
        changes = allocator.empty(len(jobs) * x.numel(), x.dtype).view(len(jobs), -1)
        keys = jobs.key.digests(jobs.clients, "batch")
        works = np.fromiter(chain.from_iterable(jobs.works), np.int64, 2 * len(jobs)).reshape(-1, 2)
        losses = kernel.train_rows(x, self.y, changes, index, spans, works, keys, jobs.steps[0])
        return None if losses is None else LocalResults(changes, losses)

    def _train_bundle(self, kernel: ClientKernel, jobs: ClientJobs) -> LocalResults:
        """Train clients with one step in one call."""
        index, spans = client_row_index(self.task.data, jobs.clients)
        keys = jobs.key.digests(jobs.clients, "batch")
        native_jobs = [
            NativeJob(allocator.empty_like(x), first, stop, *work, key, jobs.keep_models)
            for x, work, key, (first, stop) in zip(jobs.models, jobs.works, keys, spans.tolist(), strict=True)
        ]
        step = jobs.steps[0]
        if step.momentum:
            step.init_velocity()
        results = LocalResults()
        trained = kernel.train_clients(jobs.models, self.y, index, native_jobs, step)
        for job, (losses, finite) in zip(native_jobs, trained, strict=True):
            results.add(job.delta, losses, finite, self.y if jobs.keep_models else None)
        return results

    def _train_with_dropout(self, kernel: ClientKernel, jobs: ClientJobs, place: int) -> torch.Tensor:
        """Train a model with dropout, with the same random numbers as eager training."""
        work, key, step = jobs.works[place], jobs.key_of(place), jobs.steps[place]
        rows = self.batches(jobs.clients[place], work, key.child("batch"))
        assert isinstance(rows, torch.Tensor)
        width = work.batch_size * kernel.network.dropout_numbers
        most = min(work.steps, max(1, _DROPOUT_NUMBERS // width))
        keep, losses = torch.empty(most, width), []
        for first in range(0, work.steps, most):
            some = rows[first : first + most]
            for at in range(len(some)):
                self.seed(key.child("noise", jobs.first_step + first + at))
                kernel.network.draw(work.batch_size, self._noise, keep[at])
            losses.append(kernel.steps(self.y, some, step, keep[: len(some)]))
        return torch.cat(losses)

    def _train_on_batches(self, kernel: ClientKernel, jobs: ClientJobs, place: int) -> torch.Tensor:
        """Train on batches drawn, and possibly augmented, in Python."""
        rows, step = jobs.batches_of(place), jobs.steps[place]
        if rows is None:
            rows = self.batches(jobs.clients[place], jobs.works[place], jobs.key_of(place).child("batch"))
        if isinstance(rows, torch.Tensor):
            return kernel.steps(self.y, rows, step)
        runs = rows.runs if isinstance(rows, UnequalBatches) else [rows]
        return torch.cat([loss for run in runs for loss in self._train_run(kernel, run, step)])

    def _train_run(self, kernel: ClientKernel, run: Run, step: LocalStep) -> Iterator[torch.Tensor]:
        """Take steps on batches of one size, some at a time if they are augmented; yield the losses."""
        if isinstance(run, torch.Tensor):
            yield kernel.steps(self.y, run, step)
            return
        steps = max(1, _BATCH_NUMBERS // max(1, run.rows.shape[1] * self.task.example[0][0].numel()))
        for first in range(0, len(run), steps):
            batches = self._read_batches(run[first : first + steps])
            if any(_has_ignored_labels(batch) for batch in batches):
                yield self._step_eagerly(batches, step)
                continue
            inputs, labels = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
            kernel.use(self._to_layout(inputs), labels)
            yield kernel.steps(self.y, torch.arange(len(labels)).view(len(batches), -1), step)

    def _read_batches(self, rows: KeyedBatches) -> list[Batch]:
        """Return the batches of some steps."""
        batches = []
        for step in range(len(rows)):
            if self.task.augment.has_user_code:
                self.seed(rows.address(step))
            batches.append(self.batch(rows.client, rows[step]))
        return batches

    def _step_eagerly(self, batches: Sequence[Batch], step: LocalStep) -> torch.Tensor:
        """Take steps by PyTorch on batches whose labels native code does not take."""
        losses = []
        for batch in batches:
            loss, gradients = self._eager_gradient(batch)
            step.step(self.y, self.parameters, gradients)
            losses.append(loss)
        return torch.stack(losses)

    def native_steps(self) -> NativeSteps | None:
        """Return the kernel, if the steps of gossiping clients have a native form."""
        if self.kernel is None or self.kernel.network.dropout_numbers or not self._direct:
            return None
        return NativeSteps(self.kernel, self._draw_rows if shuffles_like_numpy() else None)

    def _draw_rows(
        self, clients: Sequence[int], keys: Sequence[bytes], lengths: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Draw the row numbers of several clients' batches, as `batches` does for one."""
        index, spans = client_row_index(self.task.data, clients)
        return shuffled_rows(keys, index, spans, lengths)

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
                if _has_ignored_labels(examples):
                    return self._eager_gradient(examples)
                rows = torch.arange(len(examples[1]))
            mean, _ = self.network.gradient(
                self.y, *examples, rows, out=self._gradient, keep=self._draw_dropout(len(rows))
            )
            return torch.tensor(mean), self._gradients
        batch = self.batch(client, rows)
        if self.compiled is not None and (compiled_gradient := self.compiled.gradient(*batch)) is not None:
            return compiled_gradient
        return self._eager_gradient(batch)

    def _eager_gradient(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if self.network is not None and self.network.dropout_numbers and self.module.training:
            raise HansaError(
                f"{self.task.name}: a batch has a negative label, which native code with dropout does not take. Use "
                "Task(execution='eager')."
            )
        _, loss, gradients = self._differentiate(batch)
        return loss, gradients

    @torch.enable_grad()
    def _differentiate(self, batch: Batch) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the output and the loss of a batch, and the gradients."""
        output = self.call_model(batch.inputs)
        loss = self.task.loss(output, batch.targets)
        return output, loss.detach(), self.precision.gradients(loss)

    def _draw_dropout(self, rows: int) -> torch.Tensor | None:
        """Draw the dropout factors of the next batch."""
        if self.network is None or not self.network.dropout_numbers:
            return None
        if not self.module.training:
            return torch.ones(rows * self.network.dropout_numbers)
        keep = torch.empty(rows * self.network.dropout_numbers)
        self.network.draw(rows, self._noise, keep)
        return keep

    @torch.no_grad()
    def weighted_gradient(self, client: int, rows: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return the gradient of the loss on some rows, and its weight in the gradient on more rows: the gradient on
        all rows is the mean of those of disjoint parts with these weights.

        A loss that sums is divided by the number of rows. A loss that needs all rows at once has the weight of its
        rows.
        """
        task = self.task
        if self.network is not None or task.loss_sums is None:
            return float(len(rows)), self.gradient(client, rows)[1]
        batch = self.batch(client, rows)
        output, _, gradients = self._differentiate(batch)
        weight = task.loss_sums(output, batch.targets)[1]
        if weight and task.sums_rows:
            gradients = tuple(gradient / weight for gradient in gradients)
        return weight, gradients

    @torch.no_grad()
    def score(self, own: torch.Tensor) -> PartialScore:
        """Return the current model's score on some rows of the main test set."""
        return self.evaluator.score(self.task.main_test_set, own, int(own[0]))

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> PartialScore:
        """Return the score of the given vectors on a range of test rows."""
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        name, first = self.task.locate_test_rows(start)
        return self.evaluator.score(name, torch.arange(start - first, stop - first), start)


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``length`` positions from consecutive permutations of 0..samples-1.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


def fresh(model: Callable[..., nn.Module], key: Key) -> nn.Module:
    """Return a new module whose initial weights depend on the key only, whatever other threads do.

    A function with a parameter ``seed`` receives the seed of the run.
    """
    arguments = {"seed": key.seed} if _asks_for_seed(model) else {}
    _check_call(model, arguments)
    with random_state.LOCK, random_state.preserve_rng():
        random_state.seed_all(key, torch.device("cpu"))
        module = model(**arguments)
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module


def _check_call(model: Any, arguments: dict[str, Any]) -> None:
    """Raise if a function that builds a model needs arguments."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # a built-in
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise HansaError(
            f"Task(model={name}): cannot be called without arguments: {error}. Set them with functools.partial({name}, "
            f"...) or lambda: {name}(...)."
        ) from error


def _has_ignored_labels(batch: Sequence[Any]) -> bool:
    """Return whether a batch has negative labels, which cross-entropy ignores and native code does not take."""
    return int(batch[1].min()) < 0


def _asks_for_seed(model: Callable[..., nn.Module]) -> bool:
    """Return whether a function that builds a model has a parameter ``seed`` that nobody has set."""
    if isinstance(model, functools.partial) and "seed" in model.keywords:
        return False
    try:
        return "seed" in inspect.signature(model).parameters
    except (TypeError, ValueError):  # a built-in
        return False
