"""The trainer of a task's model: gradients by PyTorch, or whole steps by native code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hansa.core import native
from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native.clients import ClientKernel
from hansa.core.native.random_draws import draws_like_numpy, shuffled_rows
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import native_fits
from hansa.local.loops import ClientLoop, LoopResult
from hansa.local.trainer import BaseTrainer, ClientJobs, LocalResults, LocalStep, NativeSteps
from hansa.local.work import Positions, Work
from hansa.training import random_state
from hansa.training.augment import Pipeline
from hansa.training.batch_sources import (
    Batch,
    Batches,
    BatchSource,
    KeyedBatches,
    client_row_index,
    row_numbers,
)
from hansa.training.evaluation import PartialScore, score_rows
from hansa.training.execution_mode import MODELS, BatchedTraining, CompiledLoss, native_inputs
from hansa.training.modules import BoundModel, ModuleState

if TYPE_CHECKING:
    from hansa.training.task import Task

_BATCH_NUMBERS = 1 << 22  # numbers copied for native code at a time if batches are augmented
_DROPOUT_NUMBERS = 1 << 20  # numbers drawn for dropout at a time


class ModuleTrainer(BoundModel, BaseTrainer):
    """A model whose parameters are views of one flat vector."""

    def __init__(
        self, task: Task, dtype: torch.dtype, device: torch.device, *, like: ModuleTrainer | None = None
    ) -> None:
        """Share data and frozen weights with ``like``, a trainer of the same task, dtype and device."""
        if task.autocast is not None and dtype != torch.float32:
            raise HansaError(f"Task(autocast={task.autocast!r}): the run is in {dtype}. This needs torch.float32.")
        arguments = task.example_model(), task.loss, task.layout, dtype, device, task.example.inputs
        super().__init__(*arguments, keep=task.kept_weights(dtype), autocast=task.autocast)
        self.task = task
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.buffers = (
            torch.zeros(self.layout.buffer_dim, dtype=dtype, device=device) if self.layout.buffer_dim else None
        )
        form = dtype, device, task.layout.channels_last
        self.source: BatchSource = BatchSource(task.data, *form) if like is None else like.source
        self.test_sources: dict[str, tuple[BatchSource, bool]] = {} if like is None else like.test_sources
        """The test sets by name as batches, and whether native code evaluates them."""
        self._generator = torch.Generator()
        self.module.train()
        sent, shared = [entry.name for entry in self.layout.buffers], None if like is None else like.module_state
        self.module_state: ModuleState = ModuleState(self.module, sent, task.constant_buffers, task.frozen, shared)
        fits = dtype == torch.float32 and device.type == "cpu"
        self.network = task.network if fits else None
        self.kernel: ClientKernel | None = None
        self.compiled: CompiledLoss | None = None
        self.batched: BatchedTraining | None = None
        if task.vmap_batch_size is not None:
            self.batched = BatchedTraining(self, task.vmap_batch_size)
            self.clients_per_call = MODELS
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
        """Return the examples for native code: the data itself, or a few rows as a placeholder for batches."""
        if self._direct and self.source.native_inputs is not None:
            return self.source.native_inputs.logical, self.source.labels
        inputs, targets = self.task.example
        return native_inputs(inputs), targets

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self._restore_views()
        self.y.copy_(model)
        if self.network is None:
            self.module_state.restore()
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def _restore_views(self) -> None:
        """Make parameters whose ``data`` the module has replaced views of ``y`` again, with their new values."""
        for entry, parameter, address in zip(self.layout.parameters, self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                entry.view(self.y).copy_(parameter.detach())
                parameter.data = entry.view(self.y)

    def read_buffers(self) -> Vector | None:
        named = dict(self.module.named_parameters())
        for entry, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            if named.get(entry.name) is not parameter:
                raise HansaError(
                    f"{entry.name}: training replaced this parameter by another object, which is not trained: change "
                    f"it in place, as {entry.name}.data.copy_(...) does."
                )
        self.module_state.check()
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def batches(self, client: int, work: Work, key: Key) -> torch.Tensor | KeyedBatches:
        """Return the batches of a round, [steps, batch]: passes over the client's rows, each shuffled."""
        client_rows, length = self.task.data.rows(client), work.steps * work.batch_size
        if native.available() and draws_like_numpy():
            index, spans = client_rows.to(torch.int64).contiguous(), np.array([[0, client_rows.numel()]])
            numbers = torch.from_numpy(shuffled_rows([key.digest(16)], index, spans, np.array([length])))
        else:
            numbers = client_rows[torch.from_numpy(batch_stream(client_rows.numel(), length, key))]
        rows = copy_to_device(numbers.view(work.steps, work.batch_size), self.source.index_device)
        return rows if self._direct else KeyedBatches(client, rows, key)

    def batches_at(self, client: int, positions: Sequence[Positions], key: Key) -> Batches:
        """Return batches of the client's rows at these positions; one tensor if all have one size."""
        client_rows, sizes = self.task.data.rows(client).to(torch.int64), list(map(len, positions))
        numbers = copy_to_device(client_rows[torch.from_numpy(np.concatenate(positions))], self.source.index_device)
        rows = numbers.view(len(sizes), -1) if len(set(sizes)) == 1 else list(torch.split(numbers, sizes))
        return rows if self._direct else KeyedBatches(client, rows, key)

    def seed(self, key: Key) -> None:
        """Seed the generators that a model may use; native code has its own generator for dropout."""
        if self.network is None or self.task.augment.has_user_code:
            self._seed_all(key)
        elif self.network.dropout_numbers:
            random_state.seed_generator(self._noise, key)

    def _seed_all(self, key: Key) -> None:
        random_state.seed_all(key, self.device)
        self.module_state.seed(key)

    def batch(self, client: int, rows: torch.Tensor | KeyedBatches) -> Batch:
        """Return one batch, augmented if it has a key, otherwise prepared like test rows."""
        if not isinstance(rows, KeyedBatches):
            batch = self.source.batch(client, rows)
            return batch if self._direct else self.prepare_test_batch(batch)
        assert isinstance(rows.rows, torch.Tensor)
        return self._apply(self.task.augment, self.source.batch(client, rows.rows), rows.address())

    def prepare_test_batch(self, batch: Batch) -> Batch:
        """Apply the test pipeline to a batch."""
        return self._apply(self.task.augment.test_pipeline(), batch, Key(0).child("evaluation"))

    def _apply(self, pipeline: Pipeline, batch: Batch, key: Key) -> Batch:
        if not pipeline:
            return batch
        return Batch(self._to_layout(pipeline(batch.inputs, key, self._generator)), batch.targets)

    def _to_layout(self, inputs: Any) -> Any:
        """Convert images to the model's memory layout after augmentation."""
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and self.layout.channels_last:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def train_clients(self, jobs: ClientJobs) -> LocalResults | None:
        """Train clients by native code, or together by vmap; return None if neither applies.

        Clients with a common start and step are trained in one call, which writes each change to a row of a matrix.
        """
        if self.batched is not None:
            return self.batched.train(jobs)
        kernel, steps = self.kernel, jobs.steps[:1] if len(set(map(id, jobs.steps))) == 1 else jobs.steps
        if kernel is None or not all(step.is_affine for step in steps):
            return None
        draws_natively = self._direct and draws_like_numpy() and not kernel.network.dropout_numbers
        x, reference = jobs.models[0], steps[0]
        same_start = len(set(map(id, jobs.models))) == 1 and not jobs.keep_models and native_fits(x)
        same_step = all(step.shift is None and step.numbers == reference.numbers for step in steps)
        if jobs.batches is None and draws_natively and same_start and same_step and not reference.momentum:
            index, spans = client_row_index(self.task.data, jobs.clients)
            changes = allocator.empty(len(jobs) * x.numel(), x.dtype).view(len(jobs), -1)
            keys = jobs.key.digests(jobs.clients, "batch")
            works = np.fromiter(chain.from_iterable(jobs.works), np.int64, 2 * len(jobs)).reshape(-1, 2)
            losses = kernel.train_rows(x, self.y, changes, index, spans, works, keys, reference)
            if losses is not None:  # otherwise a change is not finite
                return LocalResults(changes, losses)
        return self._train_each(kernel, jobs)

    def _train_each(self, kernel: ClientKernel, jobs: ClientJobs) -> LocalResults:
        """Train clients one after the other, on batches drawn, and possibly augmented, in Python. Dropout uses the
        random numbers of eager training."""
        results = LocalResults()
        for index, (x, step) in enumerate(zip(jobs.models, jobs.steps, strict=True)):
            if step.momentum:
                step.init_velocity()
            self.y.copy_(x)
            key, batches = jobs.key_of(index), jobs.batches_of(index)
            if batches is None:
                batches = self.batches(jobs.clients[index], jobs.works[index], key.child("batch"))
            losses = [
                self._take_steps(kernel, batches[steps], step, key, jobs.first_step + steps.start)
                for steps in self._groups(kernel.network.dropout_numbers, batches)
            ]
            results.add_model(x, self.y, torch.cat(losses).tolist(), keep_model=jobs.keep_models)
        return results

    def _groups(self, dropout_numbers: int, batches: Batches) -> Iterator[slice]:
        """Yield ranges of consecutive batches of one size that fit into memory with dropout or augmentation."""
        rows, stop = row_numbers(batches), 0
        for width, group in groupby([rows.shape[1]] * len(rows) if isinstance(rows, torch.Tensor) else map(len, rows)):
            start, stop = stop, stop + len(list(group))
            length = stop - start
            if dropout_numbers:
                length = min(length, max(1, _DROPOUT_NUMBERS // (width * dropout_numbers)))
            if isinstance(batches, KeyedBatches):
                length = min(length, max(1, _BATCH_NUMBERS // max(1, width * self.task.example[0][0].numel())))
            yield from (slice(first, min(first + length, stop)) for first in range(start, stop, length))

    def _take_steps(self, kernel: ClientKernel, rows: Batches, step: LocalStep, key: Key, first: int) -> torch.Tensor:
        """Take steps on batches of one size, numbered from ``first``; return the losses."""
        keep, numbers = None, kernel.network.dropout_numbers
        if numbers:
            width = len(row_numbers(rows)[0])
            keep = torch.empty(len(rows), width * numbers)
            for t in range(len(rows)):
                self.seed(key.child("noise", first + t))
                kernel.network.draw(width, self._noise, keep[t])
        if not isinstance(rows, KeyedBatches):
            return kernel.steps(self.y, torch.stack(rows) if isinstance(rows, list) else rows, step, keep)
        batches, losses = [], []
        for step_rows in (rows[t] for t in range(len(rows))):
            if self.task.augment.has_user_code:
                self.seed(step_rows.address())
            batches.append(self.batch(rows.client, step_rows))
        if any(map(_has_ignored_labels, batches)):
            for batch in batches:
                loss, gradients = self._eager_gradient(batch)
                step.step(self.y, self.parameters, gradients)
                losses.append(loss)
            return torch.stack(losses)
        inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        kernel.use(self._to_layout(inputs), labels)
        return kernel.steps(self.y, torch.arange(len(labels)).view(len(batches), -1), step, keep)

    def native_steps(self) -> NativeSteps | None:
        """Return the kernel, if the steps of gossiping clients have a native form."""
        if self.kernel is None or self.kernel.network.dropout_numbers or not self._direct:
            return None

        def draw_rows(clients: Sequence[int], keys: Sequence[bytes], lengths: Any) -> Any:
            return shuffled_rows(keys, *client_row_index(self.task.data, clients), lengths)

        return NativeSteps(self.kernel, draw_rows if draws_like_numpy() else None)

    @torch.enable_grad()
    def run_loop(
        self, loop: ClientLoop, client: int, rows: Any, lr: float, got: Vectors, memory: Vectors, key: Key
    ) -> LoopResult:
        """Run a client's own loop on the module."""
        self.module_state.restore()
        self._seed_all(key.child("loop"))
        result = loop.train(self.module.train(), _LoopBatches(self, client, rows, key), lr, got, memory, key)
        self._restore_views()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.requires_grad_(True)
        self.module.train()
        return result

    def interrupt(self) -> None:
        if self.kernel is not None:
            self.kernel.stop = True

    def gradient(
        self, client: int, rows: torch.Tensor | KeyedBatches | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert rows is not None
        if self.network is None:
            batch = self.batch(client, rows)
            return self._eager_gradient(batch) if self.compiled is None else self.compiled.gradient(batch)
        if isinstance(rows, torch.Tensor) and self._direct:
            examples = self._examples()
        else:
            examples = batch = self.batch(client, rows)
            if _has_ignored_labels(batch):
                return self._eager_gradient(batch)
            rows = torch.arange(len(batch.targets))
        keep = self._draw_dropout(len(rows))
        mean, _ = self.network.gradient(self.y, *examples, rows, out=self._gradient, keep=keep)
        return torch.tensor(mean), self._gradients

    def _eager_gradient(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if self.network is not None and self.network.dropout_numbers and self.module.training:
            raise HansaError(
                f"{self.task.name}: a batch has a negative label, which native code with dropout does not support. Use "
                "Task(execution='eager')."
            )
        return self._differentiate(batch)[1:]

    @torch.enable_grad()
    def _differentiate(self, batch: Batch) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the output and the loss of a batch, and the gradients."""
        output = self.call_model(batch.inputs)
        loss = self.loss(output, batch.targets)
        gradients = self.gradients_of(loss)
        self._restore_views()
        return output, loss.detach(), gradients

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
        """Return the weight and the gradient of the loss on some rows: the gradient on all rows is the mean of the
        gradients on disjoint parts with these weights.

        A summed loss is divided by the number of rows. The weight of a loss that needs all rows at once is its number
        of rows.
        """
        task = self.task
        if self.network is not None or task.loss_sums is None:
            return float(len(rows)), self.gradient(client, rows)[1]
        batch = self.batch(client, rows)
        output, _, gradients = self._differentiate(batch)
        weight = float(task.loss_sums(output, batch.targets)[1])
        if weight and task.sums_rows:
            gradients = tuple(gradient / weight for gradient in gradients)
        return weight, gradients

    @torch.no_grad()
    def score(self, name: str, rows: torch.Tensor, seed: int) -> PartialScore:
        """Return the current model's score on some rows of a test set."""
        return score_rows(self, name, rows, seed)

    def evaluate(self, vectors: Vectors, start: int, stop: int, name: str, seed: int) -> PartialScore:
        """Return the score of the given vectors on a chunk of test rows."""
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        return self.score(name, torch.arange(start, stop), seed)


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``length`` positions from consecutive permutations of 0..samples-1.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


class _LoopBatches(Sequence[Batch]):
    """The batches of a client's own loop. The n-th one that is read has the draws of an ordinary n-th step."""

    def __init__(self, trainer: ModuleTrainer, client: int, rows: Any, key: Key) -> None:
        self._batch, self._seed, self._rows = partial(trainer.batch, client), trainer._seed_all, rows
        self._steps, self._keys = range(len(rows)), map(partial(key.child, "noise"), itertools.count())

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            part = copy.copy(self)
            part._steps = self._steps[at]
            return part
        rows = self._rows[self._steps[at]]
        self._seed(next(self._keys))
        return self._batch(rows)


def _has_ignored_labels(batch: Batch) -> bool:
    """Return whether a batch has negative labels, which cross-entropy ignores and native code does not support."""
    return int(batch.targets.min()) < 0
