"""Local training of several clients in one program; `client_batching` decides for whom."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as trees

from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.local.trainer import ClientJob, LocalResult, train_by_steps
from hansa.training.batch_sources import Batch, KeyedBatches, TensorSource
from hansa.training.batched_loss import (
    BatchedLoss,
    draw_factors,
    stack_batches,
    stacked_rows,
    stacked_views,
)
from hansa.training.client_batching import ClientBatching

if TYPE_CHECKING:
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")


class BatchedTraining:
    """Trains the clients of a trainer together.

    A client's result depends neither on the clients beside it nor on their number. So clients are put together in any
    order, and those with fewer steps leave the group early.

    Args:
        trainer: The trainer, whose model and data are used.
        plan: Which clients are trained together, and how many.
    """

    def __init__(self, trainer: ModuleTrainer, plan: ClientBatching) -> None:
        self.trainer, self.plan = trainer, plan
        self._loss = BatchedLoss(
            trainer.module, trainer.call_model, trainer.task.loss, trainer.layout, composed=plan.composed
        )
        self._generator = torch.Generator()

    @torch.no_grad()
    def train(self, jobs: Sequence[ClientJob]) -> list[LocalResult]:
        """Train clients together where their batches have the size of the plan, the others one by one."""
        results: dict[int, LocalResult] = {}
        groups: dict[object, list[int]] = {}
        batches = [self._batches(job) for job in jobs]
        for place, job in enumerate(jobs):
            if batches[place] is None:
                results[place] = train_by_steps(self.trainer, job)
            else:
                groups.setdefault(_arithmetic(job), []).append(place)
        for places in groups.values():
            places.sort(key=lambda place: -jobs[place].work.steps)
            for first in range(0, len(places), self.plan.models):
                some = places[first : first + self.plan.models]
                rows = [rows for place in some if (rows := batches[place]) is not None]
                results.update(zip(some, self._train([jobs[place] for place in some], rows), strict=True))
        return [results[place] for place in range(len(jobs))]

    def _batches(self, job: ClientJob) -> torch.Tensor | KeyedBatches | None:
        """Return a client's batches; None if one of them has another size than the plan's."""
        if job.work.batch_size != self.plan.batch_size:
            return None
        if job.batches is None:
            return self.trainer.batches(job.client, job.work, job.key.child("batch"))
        rows = job.batches.rows if isinstance(job.batches, KeyedBatches) else job.batches
        equal = isinstance(rows, torch.Tensor) and rows.shape == (job.work.steps, self.plan.batch_size)
        return job.batches if equal else None

    def _train(self, jobs: Sequence[ClientJob], batches: Sequence[torch.Tensor | KeyedBatches]) -> list[LocalResult]:
        """Train a group. If that fails, train each of its clients alone, so that the error names its client and step,
        and the others do not depend on it."""
        try:
            return self._train_group(jobs, batches)
        except Exception as error:
            if len(jobs) == 1:
                log.debug("client %d is trained by single steps: %s", jobs[0].client, error)
                return [train_by_steps(self.trainer, jobs[0])]
        return [self._train([job], [rows])[0] for job, rows in zip(jobs, batches, strict=True)]

    def _train_group(
        self, jobs: Sequence[ClientJob], batches: Sequence[torch.Tensor | KeyedBatches]
    ) -> list[LocalResult]:
        """Train clients in descending order of their steps, with the same arithmetic."""
        trainer, steps = self.trainer, [job.work.steps for job in jobs]
        trainer.module_state.restore()
        group = _Group(trainer, jobs, self.plan.padded(len(jobs)))
        source = _GroupBatches(trainer, jobs, batches)
        losses = torch.zeros(steps[0], len(jobs), dtype=trainer.dtype, device=trainer.device)
        for t in range(steps[0]):
            active = sum(each > t for each in steps)
            models = self.plan.padded(active)
            keys = [jobs[min(place, active - 1)].key.child("noise", t) for place in range(models)]
            factors = draw_factors(self.plan.dropout, keys, self._generator, trainer.device)
            values, gradients = self._loss.gradients(group.parameters(models), source[t, models, active], factors)
            group.step(active, gradients)
            losses[t, :active] = values[:active]
        group.keep_state()
        if jobs[0].keep_model:
            trainer.y.copy_(group.row(0))
        results = []
        for place, job in enumerate(jobs):
            delta = torch.sub(group.row(place), job.x, out=allocator.empty_like(job.x))
            results.append(LocalResult(delta, losses[: steps[place], place].tolist(), all_finite(delta)))
        return results


def _arithmetic(job: ClientJob) -> object:
    """Return a key that is equal for clients whose steps are taken on all rows of a matrix at once."""
    step = job.step
    return step.numbers, step.shift is None, step.is_affine, id(job) if job.keep_model else None


class _GroupBatches:
    """The batches of a group: ``batches[t, models, active]`` has one for each model in step t. Models beyond the
    active clients repeat the last one's."""

    def __init__(
        self, trainer: ModuleTrainer, jobs: Sequence[ClientJob], batches: Sequence[torch.Tensor | KeyedBatches]
    ) -> None:
        self._trainer, self._jobs, self._batches = trainer, jobs, batches
        self._rows: torch.Tensor | None = None
        if isinstance(trainer.source, TensorSource) and not trainer.task.augment:
            rows = [each.rows if isinstance(each, KeyedBatches) else each for each in batches]
            self._rows = rows[0].new_zeros(len(rows), *rows[0].shape)
            for place, each in enumerate(rows):
                self._rows[place, : len(each)] = each

    def __getitem__(self, place: tuple[int, int, int]) -> Batch:
        t, models, active = place
        if self._rows is None:
            some = [self._trainer.batch(job.client, each[t]) for job, each in self._first(active)]
            return stack_batches([some[min(model, active - 1)] for model in range(models)])
        rows = self._rows[:active, t]
        if models > active:
            rows = torch.cat([rows, rows[-1:].expand(models - active, -1)])
        flat = self._trainer.source.batch(None, rows.reshape(-1))
        return Batch(*trees.tree_map(lambda leaf: leaf.view(models, -1, *leaf.shape[1:]), tuple(flat)))

    def _first(self, count: int) -> list[tuple[ClientJob, torch.Tensor | KeyedBatches]]:
        return list(zip(self._jobs[:count], self._batches[:count], strict=True))


class _Group:
    """The models of a group as rows of a matrix, and the local step of all: that of `LocalStep`, on matrices."""

    def __init__(self, trainer: ModuleTrainer, jobs: Sequence[ClientJob], models: int) -> None:
        self._layout, self._dim, self._jobs = trainer.layout, trainer.y.numel(), jobs
        self._like, step = trainer.y, jobs[0].step
        self._affine = step.is_affine
        self._y = self._stack([job.x for job in [*jobs, *[jobs[-1]] * (models - len(jobs))]])
        self._views = stacked_views(self._layout, self._y)
        if not self._affine:
            self._rows = [[view[place] for view in self._views] for place in range(len(jobs))]
            self._steps = [copy.deepcopy(job.step, {id(job.step.anchor): job.step.anchor}) for job in jobs]
            return
        self._numbers = step.numbers
        self._anchor = self._stack([job.step.anchor for job in jobs]) if step.prox_weight else None
        self._shift = None
        if step.shift is not None:
            self._shift = self._stack([shift for job in jobs if (shift := job.step.shift) is not None])
        self._velocity = None
        if step.momentum:
            self._velocity = self._stack([job.step.init_velocity() for job in jobs])
            self._velocity_views = stacked_views(self._layout, self._velocity)

    def _stack(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = stacked_rows(len(vectors), self._dim, self._like)
        for row, vector in zip(rows, vectors, strict=True):
            row[: self._dim] = vector
        return rows

    def parameters(self, models: int) -> list[torch.Tensor]:
        """Return the parameters of the first models, [models, ...] each."""
        return self._views if models == len(self._y) else [view[:models] for view in self._views]

    def row(self, place: int) -> torch.Tensor:
        """Return a client's model."""
        return self._y[place, : self._dim]

    def keep_state(self) -> None:
        """Store velocities and the state of optimizers in the clients' steps, once all steps have succeeded."""
        for place, job in enumerate(self._jobs):
            if not self._affine:
                job.step.state, job.step.velocity = self._steps[place].state, self._steps[place].velocity
            elif self._velocity is not None:
                job.step.velocity = self._velocity[place, : self._dim]

    def step(self, active: int, gradients: Sequence[torch.Tensor]) -> None:
        """Take the step of the first clients."""
        gradients = [gradient[:active] for gradient in gradients]
        if not self._affine:
            for place, step in enumerate(self._steps[:active]):
                step.step(self.row(place), self._rows[place], [gradient[place] for gradient in gradients])
            return
        lr, a, decay, momentum, max_norm = (0.0 if number is None else number for number in self._numbers)
        if max_norm:
            gradients = _clip(gradients, max_norm)
        y, views = self._y[:active], [view[:active] for view in self._views]
        anchor = None if self._anchor is None else self._anchor[:active]
        shift = None if self._shift is None else self._shift[:active]
        if self._velocity is not None:
            v = self._velocity[:active].mul_(momentum)
            if decay or a:
                v.add_(y, alpha=decay + a)
            if anchor is not None:
                v.sub_(anchor, alpha=a)
            if shift is not None:
                v.add_(shift)
            torch._foreach_add_([view[:active] for view in self._velocity_views], gradients)
            y.sub_(v, alpha=lr)
            return
        if decay:
            y.mul_(1 - lr * (decay + a))
            if anchor is not None:
                y.add_(anchor, alpha=lr * a)
        elif anchor is not None:
            y.lerp_(anchor, lr * a)
        if shift is not None:
            y.sub_(shift, alpha=lr)
        torch._foreach_add_(views, gradients, alpha=-lr)


def _clip(gradients: Sequence[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    """Return the gradients, [models, ...] each, clipped to a norm for each model."""
    parts = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
    norms = torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1)
    factors = torch.clamp(max_norm / (norms + 1e-12), max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]
