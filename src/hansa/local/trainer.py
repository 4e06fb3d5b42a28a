"""The local step y <- y - lr d of one client, named blocks of the model, and trainers, which take steps one at
a time or through an optional fast path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError, add_step
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.local.work import PassPosition, Positions, Work, batching

if TYPE_CHECKING:
    from hansa.core.native.clients import ClientKernel
    from hansa.local.loops import ClientLoop, LoopResult


from fnmatch import fnmatchcase

from hansa.core.errors import invalid_argument, suggestion
from hansa.core.native.network import AffineStep
from hansa.core.types import Population, RoundContext, State
from hansa.core.vectors.layout import Layout, TensorEntry
from hansa.local.solvers import AscentOffset
from hansa.server import ServerTransform

_ALONE = Population((1,))

Tensors: TypeAlias = "list[torch.Tensor] | tuple[torch.Tensor, ...]"


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, init=False)
class blocks:
    """The parameters and buffers whose names match one of the patterns: ``blocks("bn*", "*.norm.*", "head.*")``.

    Binding to a model's layout determines their positions in the flat vectors.

    >>> from torch import nn
    >>> found = blocks("1.*").bind(Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    >>> found.parameters, found.take(torch.arange(13.0))
    (((9, 13),), tensor([ 9., 10., 11., 12.]))
    """

    patterns: tuple[str, ...]
    parameters: Ranges | None
    buffers: Ranges

    def __init__(self, *patterns: str, parameters: Ranges | None = None, buffers: Ranges = ()) -> None:
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise invalid_argument(
                "blocks", "patterns", patterns, "names or patterns of them", 'blocks("bn*", "head.*").'
            )
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "buffers", buffers)

    def __repr__(self) -> str:
        return f"blocks({', '.join(map(repr, self.patterns))})"

    def bind(self, layout: Layout | None) -> blocks:
        """Return the blocks with their positions; raise if a pattern matches no parameter."""
        if layout is None:
            raise HansaError(f"{self!r}: this task is a function of a flat vector, without parameter names.")
        names = [entry.name for entry in layout.parameters]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise HansaError(f"{self!r}: no parameter matches {pattern!r}. {suggestion(pattern, names)}")
        bound = blocks(*self.patterns, parameters=self._ranges(layout.parameters), buffers=self._ranges(layout.buffers))
        if bound.parameters == ((0, layout.dim),):
            raise HansaError(f"{self!r}: matches every parameter, so that none is shared.")
        return bound

    def _ranges(self, entries: Sequence[TensorEntry]) -> Ranges:
        joined: list[tuple[int, int]] = []
        for entry in entries:
            if any(fnmatchcase(entry.name, pattern) for pattern in self.patterns):
                start, stop = entry.offset, entry.offset + entry.size
                if joined and joined[-1][1] == start:
                    start = joined.pop()[0]
                joined.append((start, stop))
        return tuple(joined)

    def outside(self, dim: int, *, of_buffers: bool = False) -> Ranges:
        """Return the ranges of a vector of ``dim`` entries that are not in the blocks.

        >>> blocks("b", parameters=((2, 4),)).outside(6)
        ((0, 2), (4, 6))
        """
        ends = [0, *(end for bounds in self._bound(of_buffers) for end in bounds), dim]
        return tuple((start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop)

    def take(self, x: Vector, *, of_buffers: bool = False) -> Vector:
        """Return the entries of the blocks, concatenated."""
        ranges = self._bound(of_buffers)
        return torch.cat([x[start:stop] for start, stop in ranges]) if ranges else x.new_empty(0)

    def put(self, x: Vector, values: Vector | float, *, of_buffers: bool = False) -> Vector:
        """Write the entries of the blocks in place."""
        offset = 0
        for start, stop in self._bound(of_buffers):
            x[start:stop] = values[offset : offset + stop - start] if isinstance(values, torch.Tensor) else values
            offset += stop - start
        return x

    def without(self, parameters: Sequence[Vector], gradients: Sequence[Vector]) -> list[Vector]:
        """Return the gradients with those of the blocks' parameters, which are whole, set to zero."""
        ranges, shared, offset = self._bound(of_buffers=False), [], 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            inside = any(start <= offset < stop for start, stop in ranges)
            shared.append(torch.zeros_like(gradient) if inside else gradient)
            offset += parameter.numel()
        return shared

    def _bound(self, of_buffers: bool) -> Ranges:
        if self.parameters is None:
            raise HansaError(f"{self!r}: not bound to a model yet. Bind the algorithm with `bind`.")
        return self.buffers if of_buffers else self.parameters


@dataclass(slots=True, eq=False)
class LocalStep(AffineStep):
    """One client's step in one round: y <- y - lr d, with d = g + weight_decay y + prox_weight (y - anchor) + shift.

    With momentum d <- momentum d + that sum, from zero each round unless ``velocity`` is restored. ``max_grad_norm``
    clips g first. ``optimizer`` is any server transform, applied to -d. With ``decoupled_weight_decay`` the decay is
    not part of d: y <- (1 - lr weight_decay) y comes first. ``ascent_offset`` gives the offset at which the gradient is
    taken; ``frozen_blocks`` keep their values and do not count in the norm that is clipped. ``round`` is that of
    schedules inside the optimizer.

    >>> LocalStep(0.1, torch.zeros(2), momentum=0.9).is_affine
    True
    """

    anchor: Vector
    optimizer: ServerTransform | None = None
    decoupled_weight_decay: bool = False
    ascent_offset: AscentOffset | None = None
    frozen_blocks: blocks | None = None
    state: State = field(default_factory=dict)
    round: int = 0

    @property
    def is_affine(self) -> bool:
        """Whether this is a plain affine step, which native code supports."""
        parts = (self.optimizer, self.ascent_offset, self.frozen_blocks)
        return not self.decoupled_weight_decay and all(part is None for part in parts)

    def step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """Take one step in place; absent terms cost no pass over y. The parameters are views of y; y and all vectors of
        the step may be matrices with a row for each of several models."""
        if self.frozen_blocks is None:
            self._step(y, parameters, gradients)
            return
        frozen = self.frozen_blocks.take(y)
        if self.max_grad_norm is not None:
            gradients = self.frozen_blocks.without(parameters, gradients)
        self._step(y, parameters, gradients)
        self.frozen_blocks.put(y, frozen)

    def _step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        if self.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            gradients = torch._foreach_mul(gradients, torch.clamp(self.max_grad_norm / (norm + 1e-12), max=1.0))
        if self.momentum or self.optimizer is not None:
            self._step_with_state(y, parameters, gradients)
            return
        a, s = self.prox_weight, self.shift
        if self.weight_decay:  # decoupled or not, without momentum it is the same step
            y.mul_(1 - self.lr * (self.weight_decay + a))
            if a:
                y.add_(self.anchor, alpha=self.lr * a)
        elif a:
            y.lerp_(self.anchor, self.lr * a)
        if s is not None:
            y.sub_(s, alpha=self.lr)
        torch._foreach_add_(parameters, gradients, alpha=-self.lr)

    def _step_with_state(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """Take the step with d as one vector, for momentum or an optimizer."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(y)
        a, s = self.prox_weight, self.shift
        v = self.velocity.mul_(self.momentum)
        decay = 0.0 if self.decoupled_weight_decay else self.weight_decay
        if decay or a:
            v.add_(y, alpha=decay + a)
        if a:
            v.sub_(self.anchor, alpha=a)
        if s is not None:
            v.add_(s)
        offset = v.storage_offset() - y.storage_offset()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            v.as_strided(parameter.shape, parameter.stride(), offset + parameter.storage_offset()).add_(gradient)
        if self.decoupled_weight_decay:
            y.mul_(1 - self.lr * self.weight_decay)
        if self.optimizer is None:
            y.sub_(v, alpha=self.lr)
            return
        self.init_state()
        step, self.state = self.optimizer.update(v.neg(), self.state, RoundContext(self.round, _ALONE, (0,)))
        y.add_(step, alpha=self.lr)

    def init_velocity(self) -> Vector:
        """Return the velocity, zero at first."""
        if self.velocity is None:
            self.velocity = allocator.empty_like(self.anchor).zero_()
        return self.velocity

    def init_state(self) -> None:
        """Initialize the optimizer's state if there is none."""
        if self.optimizer is not None and not self.state:
            self.state = self.optimizer.init(self.anchor)

    def memory_rows(self) -> Vectors:
        """Return the optimizer's state and the velocity as memory rows; numbers become tensors, marked by #."""
        rows = _flatten_state(self.state)
        if self.momentum and self.velocity is not None:
            rows["velocity"] = self.velocity
        return rows

    def restore(self, rows: Vectors, y: Vector) -> None:
        """Restore the state from `memory_rows`; state without a row starts as in the first round."""
        if "velocity" in rows:
            self.velocity = rows["velocity"].clone()
        rows = {name: row for name, row in rows.items() if name != "velocity"}
        if self.optimizer is None or not rows:
            return
        self.state = self.optimizer.init(y)
        for name, row in rows.items():
            *folders, leaf = name.split("/")
            branch = self.state
            for part in folders:
                branch = branch.setdefault(part, {})
            branch[leaf.removesuffix("#")] = row.item() if leaf.endswith("#") else row


def _flatten_state(state: State, prefix: str = "") -> Vectors:
    rows: Vectors = {}
    for name, value in state.items():
        if isinstance(value, dict):
            rows.update(_flatten_state(value, f"{prefix}{name}/"))
        elif isinstance(value, torch.Tensor):
            rows[prefix + name] = value
        else:
            is_integer = isinstance(value, int)
            rows[f"{prefix}{name}#"] = torch.tensor([value], dtype=torch.int64 if is_integer else torch.float64)
    return rows


def effective_steps(steps: int, lr: float, momentum: float, prox_weight: float) -> float:
    """Return FedNova's tau: the total weight of the gradients in y - x, divided by lr. Plain SGD: the number of steps.

    >>> effective_steps(3, 0.1, 0.0, 0.0)
    3.0
    >>> effective_steps(2, 0.1, 0.5, 0.0)  # 1 + (1 + 0.5)
    2.5
    """
    if not momentum and not prox_weight:
        return float(steps)
    total, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - prox_weight * lr * total
        total += velocity
    return total


DrawRows: TypeAlias = Callable[[Sequence[int], Sequence[bytes], Any], Any]
"""From clients, the keys of their batches and the rows that each needs: the row numbers, one client after the other."""
BatchRows: TypeAlias = Any
"""The batches of a round, one entry per step: row numbers [steps, batch], or a trainer-defined object."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientJobs:
    """The local training of clients in a round; each column has an entry for every client.

    Args:
        clients: The clients.
        works: The number of steps and the batch size of each.
        models: The model that each starts from, often one object for all.
        steps: The local step of each, one object for all that have the same.
        key: The key above those of the clients: client c draws from ``key.child(c)``.
        buffers: The buffers that each starts from; None if the model has none.
        batches: The batches of each; None lets the trainer draw them with the keys.
        keep_models: Whether the results contain the models and buffers.
        first_step: The number of the first step, for the keys of noise.

    >>> x = torch.zeros(2)
    >>> ClientJobs.of(x, 3, Work(5, 32), LocalStep(0.1, x), Key(0)).clients
    (3,)
    """

    clients: Sequence[int]
    works: Sequence[Work]
    models: Sequence[Vector]
    steps: Sequence[LocalStep]
    key: Key
    buffers: Sequence[Vector] | None = None
    batches: Sequence[BatchRows] | None = None
    keep_models: bool = False
    first_step: int = 0

    @classmethod
    def of(cls, x: Vector, client: int, work: Work, step: LocalStep, key: Key, **columns: Any) -> ClientJobs:
        """Return the job of one client."""
        return cls((client,), (work,), (x,), (step,), key, **columns)

    def __len__(self) -> int:
        return len(self.clients)

    def key_of(self, index: int) -> Key:
        """Return the key of one client."""
        return self.key.child(self.clients[index])

    def batches_of(self, index: int) -> BatchRows | None:
        """Return the given batches of one client, if any."""
        return None if self.batches is None else self.batches[index]

    def buffers_of(self, index: int) -> Vector | None:
        """Return the buffers of one client, if the model has any."""
        return None if self.buffers is None else self.buffers[index]

    def part(self, indices: Sequence[int]) -> ClientJobs:
        """Return the jobs of the clients at these indices."""
        columns = {name: getattr(self, name) for name in ("clients", "works", "models", "steps", "buffers", "batches")}
        chosen: dict[str, Any] = {
            name: [column[index] for index in indices] for name, column in columns.items() if column is not None
        }
        return replace(self, **chosen)


@dataclass(slots=True, eq=False)
class LocalResults:
    """The results of `ClientJobs`, in their order.

    Args:
        changes: The change y - x of each model: a matrix with a row of each, or a vector of each.
        losses: The mean loss of each client's steps.
        failures: Why a change is not finite, by index; such a client drops out.
        models: The trained models, if requested.
        buffers: The trained buffers; empty if the model has none.

    >>> LocalResults(torch.ones(2, 3), [0.5, 0.25]).failures
    {}
    """

    changes: list[Vector] | Vector = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    models: list[Vector] = field(default_factory=list)
    buffers: list[Vector] = field(default_factory=list)

    def add_model(
        self, x: Vector, y: Vector, losses: list[float], buffers: Vector | None = None, *, keep_model: bool = False
    ) -> None:
        """Add the result of one client, whose model has become ``y``, to lists of results. What is kept is copied."""
        assert isinstance(self.changes, list)
        change = torch.sub(y, x, out=allocator.empty_like(x))
        finite = all_finite(change)
        if not finite:
            step = next((t for t, loss in enumerate(losses) if not math.isfinite(loss)), None)
            cause = "an overflow" if step is None else f"the loss was {losses[step]} at step {step}"
            self.failures[len(self.losses)] = f"{cause}; a smaller local learning rate or max_grad_norm= may help"
        self.changes.append(change)
        self.losses.append(math.fsum(losses) / len(losses) if finite else math.nan)
        if keep_model:
            self.models.append(y.clone())
        if buffers is not None:
            self.buffers.append(buffers.clone())

    def extend(self, results: LocalResults) -> None:
        """Add the results of further clients."""
        assert isinstance(self.changes, list)
        self.failures.update({len(self.losses) + index: reason for index, reason in results.failures.items()})
        self.changes.extend(results.changes)
        self.losses.extend(results.losses)
        self.models.extend(results.models)
        self.buffers.extend(results.buffers)


class NativeSteps(NamedTuple):
    """The native code of gossiping clients' steps, and the function that draws several clients' batches, if any."""

    kernel: ClientKernel
    draw_rows: DrawRows | None


class Trainer(Protocol):
    """Trains one model at a time for one worker. ``parameters`` are views of ``y``, so a step copies nothing.

    A trainer that also has the fast paths of `BaseTrainer` trains several clients, or a gossiping cohort, in one call.
    """

    @property
    def y(self) -> Vector: ...

    @property
    def parameters(self) -> Tensors: ...

    def load(self, model: Vector, buffers: Vector | None) -> None:
        """Copy a model and its buffers into the trainer."""
        ...

    def batches(self, client: int, work: Work, key: Key) -> BatchRows | None:
        """Draw the batches of a client's round; None if the trainer uses full gradients."""
        ...

    def seed(self, key: Key) -> None:
        """Seed the generators that a step may draw from."""
        ...

    def gradient(self, client: int, rows: BatchRows | None) -> tuple[torch.Tensor, Tensors]:
        """Return the loss of one batch and its gradient at ``y``."""
        ...

    def read_buffers(self) -> Vector | None:
        """Return the buffers as one vector; None if the model has none."""
        ...


class BaseTrainer:
    """The optional traits of trainers: two fast paths, bit-identical to the plain loop and off by default.

    >>> BaseTrainer().releases_gil, BaseTrainer().train_clients([])
    (False, None)
    """

    releases_gil: bool = False
    """Whether its steps release the GIL, so that workers can be threads."""

    seeds_own_generators: bool = False
    """Whether ``seed`` touches no generator that other threads share."""

    clients_per_call: int = 1
    """How many clients `train_clients` trains at once without native code."""

    def batches_at(self, client: int, positions: Sequence[Positions], key: Key) -> BatchRows | None:
        """Return batches of the client's rows at these positions, one array per step; None if the trainer uses full
        gradients. ``key`` is the address of their augmentation."""
        raise HansaError(
            f"{type(self).__name__}: draws full batches only. Give the trainer a method batches_at(client, positions, "
            "key), or use batches='full'."
        )

    def train_clients(self, jobs: ClientJobs) -> LocalResults | None:
        """Train clients in one call, with the results of single steps; None if there is no fast path for these jobs."""
        return None

    def native_steps(self) -> NativeSteps | None:
        """Return the native code of gossiping clients' steps; None if there is none."""
        return None

    def run_loop(
        self, loop: ClientLoop, client: int, rows: BatchRows | None, lr: float, got: Vectors, memory: Vectors, key: Key
    ) -> LoopResult:
        """Run a client's own loop on the model that is loaded; ``rows`` are its batches."""
        raise HansaError(f"{type(self).__name__}: has no module that a client loop could train.")

    def interrupt(self) -> None:
        """Interrupt a fast path that runs in another thread; it raises there."""


def train(trainer: Trainer, jobs: ClientJobs) -> LocalResults:
    """Train clients by the trainer's fast path if it has one for these jobs, otherwise by single steps.

    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> trainer, start = task.trainer(torch.float32, torch.device("cpu")), torch.zeros(2)
    >>> train(trainer, ClientJobs.of(start, 0, Work(1, 2), LocalStep(0.5, start), hansa.Key(0))).changes
    [tensor([0.2500, 0.2500])]
    """
    results = with_defaults(trainer, BaseTrainer).train_clients(jobs)
    return train_by_steps(trainer, jobs) if results is None else results


def train_by_steps(trainer: Trainer, jobs: ClientJobs) -> LocalResults:
    """Train clients one after the other by single steps. The last one's model and buffers stay in the trainer."""
    results = LocalResults()
    for index, (client, x) in enumerate(zip(jobs.clients, jobs.models, strict=True)):
        trainer.load(x, jobs.buffers_of(index))
        rows, first = jobs.batches_of(index), jobs.first_step
        losses = take_steps(trainer, client, jobs.works[index], jobs.steps[index], jobs.key_of(index), rows, first)
        results.add_model(x, trainer.y, losses.tolist(), trainer.read_buffers(), keep_model=jobs.keep_models)
    return results


def draw_batches(
    trainer: Trainer,
    division: batching,
    client: int,
    samples: int,
    work: Work,
    key: Key,
    run_key: Key,
    position: PassPosition,
) -> BatchRows | None:
    """Draw a client's batches of a round; ``key`` is their address, ``position`` the client's in its passes."""
    if division.is_default:
        return trainer.batches(client, work, key)
    positions = division.draw(client, samples, work.batch_size, work.steps, key, run_key, position)
    return with_defaults(trainer, BaseTrainer).batches_at(client, positions, key)


def take_steps(
    trainer: Trainer,
    client: int,
    work: Work,
    step: LocalStep,
    key: Key,
    batches: BatchRows | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Take all local steps of one client on the trainer's model, on the given batches or on those that the trainer
    draws; return the loss of each. ``first`` is the number of the first step.

    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> trainer = task.trainer(torch.float32, torch.device("cpu"))
    >>> trainer.load(torch.zeros(2), None)
    >>> len(take_steps(trainer, 0, Work(3, 2), LocalStep(0.1, torch.zeros(2)), hansa.Key(0)))
    3
    """
    rows = trainer.batches(client, work, key.child("batch")) if batches is None else batches
    losses = torch.empty(work.steps, dtype=trainer.y.dtype, device=trainer.y.device)
    t = 0
    try:
        with torch.no_grad():
            for t in range(work.steps):
                batch = None if rows is None else rows[t]
                losses[t] = take_step(trainer, client, batch, step, key.child("noise", first + t))
    except Exception as error:
        add_step(error, client, t)
        raise
    return losses


def take_step(trainer: Trainer, client: int, rows: BatchRows | None, step: LocalStep, key: Key) -> torch.Tensor:
    """Take one step on the trainer's model, with the gradient at y, or at y + e with an ascent offset."""
    trainer.seed(key)
    loss, gradients = trainer.gradient(client, rows)
    if step.ascent_offset is not None:
        offset, y = step.ascent_offset(gradients), trainer.y.clone()
        torch._foreach_add_(trainer.parameters, offset)
        _, gradients = trainer.gradient(client, rows)
        trainer.y.copy_(y)
    step.step(trainer.y, trainer.parameters, gradients)
    return loss
