"""The one gradient loop: every local method is this loop with another (a, s)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.keys import Key
from hansa.core.types import Population, RoundContext, State, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.local.blocks import blocks
from hansa.local.solvers import AscentOffset, Correction
from hansa.local.work import Work
from hansa.server import ServerTransform

if TYPE_CHECKING:
    from hansa.core.native.cohort_kernel import Together
    from hansa.core.native.lazy_cohort_kernel import Trail

_ALONE = RoundContext(0, Population(()), ())

Tensors: TypeAlias = "list[torch.Tensor] | tuple[torch.Tensor, ...]"
BatchRows: TypeAlias = Any
"""The batches of a round as a shell draws them, an entry a step: row numbers [steps, batch], or what knows more."""


class LocalResult(NamedTuple):
    """What a local phase came to: how far the model moved, the loss of each step, and whether the change is finite.

    >>> Moved(torch.ones(2), [0.5], True).finite
    True
    """

    delta: Vector
    losses: list[float]
    finite: bool


class ClientJob(NamedTuple):
    """What a client is to do in a round, from the model x.

    >>> Phase._fields
    ('x', 'client', 'work', 'descent', 'key')
    """

    x: Vector
    client: int
    work: Work
    descent: LocalStep
    key: Key


class Trainer(Protocol):
    """A worker's own place to train one model at a time. ``parameters`` are views of ``y``: a step copies nothing.

    >>> from hansa.core.protocols import lacking
    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> lacking(task.shell(torch.float32, torch.device("cpu")), Shell), lacking(print, Shell)
    ([], [])
    """

    y: Vector
    buffers: Vector | None

    @property
    def releases_gil(self) -> bool:
        """Whether its steps let other threads run: then workers are threads."""
        return False

    @property
    def draws_alone(self) -> bool:
        """Whether ``seed`` touches generators of its own alone: threads that share the common ones let it."""
        return False

    @property
    def parameters(self) -> Tensors: ...

    def load(self, model: Vector, buffers: Vector | None) -> None: ...

    def read_buffers(self) -> Vector | None: ...

    def rows(self, client: int, work: Work, key: Key) -> BatchRows | None: ...

    def seed(self, key: Key) -> None: ...

    def descend(self, rows: BatchRows | None, descent: LocalStep, y: Vector | None = None) -> torch.Tensor | None:
        """All steps of ``rows`` in one go where the shell knows a faster way, giving the losses; otherwise None. They
        are taken on ``y`` where it is given, on the shell's own vector otherwise. It draws nothing, and momentum goes
        on from the descent's velocity."""
        ...

    def phase(self, x: Vector, client: int, work: Work, descent: LocalStep, key: Key) -> LocalResult | None:
        """A client's whole round from x, batches and all, where the shell knows a faster way, leaving the model in y;
        otherwise None."""
        ...

    def phases(self, given: Sequence[ClientJob]) -> list[LocalResult] | None:
        """Several clients' whole rounds, with the bits of ``phase``; None where it knows no way. The models are not
        kept."""
        return None

    def together(
        self, rows: torch.Tensor, descent: LocalStep, *, later: bool = False, start: Vector | None = None
    ) -> Together | None:
        """A cohort's models [n, d] to be stepped and mixed natively in place where the shell knows how; otherwise None.
        The ``descent`` is everybody's, but for its velocity."""
        return None

    def trail(self, start: torch.Tensor, descent: LocalStep) -> Trail | None:
        """The same where only those who step have a model, made from the changes so far; otherwise None."""
        return None

    def gradient(self, client: int, rows: BatchRows | None) -> tuple[torch.Tensor, Tensors]: ...


@dataclass(slots=True)
class LocalStep:
    """One client's descent in one round: y <- y - lr d, with d = g + weight_decay y + a (y - x) + s, or with local
    momentum d <- momentum d + that sum, from zero each round unless it is kept. The raw gradient is clipped first. A
    local ``optimizer`` is any server transform, applied to -d; with ``decoupled_weight_decay`` the decay stays out of d:
    y <- (1 - lr weight_decay) y first. ``ahead`` says where else the gradient is taken, ``frozen_blocks`` blocks stay as they
    are.

    >>> import torch
    >>> from hansa.local.solvers import Correction
    >>> Descent(0.1, torch.zeros(2), Correction()).lr
    0.1
    """

    lr: float
    anchor: Vector
    correction: Correction
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    optimizer: ServerTransform | None = None
    decoupled_weight_decay: bool = False
    ascent_offset: AscentOffset | None = None
    frozen_blocks: blocks | None = None
    velocity: Vector | None = field(default=None)
    state: State = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether it is the affine step alone, which a shell may know a faster way for."""
        return (
            self.optimizer is None
            and self.ascent_offset is None
            and self.frozen_blocks is None
            and not self.decoupled_weight_decay
        )

    def step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """One step in place; no pass over y is made for a term that is absent."""
        if self.frozen_blocks is None:
            self._step(y, parameters, gradients)
            return
        kept = self.frozen_blocks.take(y)
        self._step(y, parameters, gradients)
        self.frozen_blocks.put(y, kept)

    def _step(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        if self.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            gradients = torch._foreach_mul(gradients, torch.clamp(self.max_grad_norm / (norm + 1e-12), max=1.0))
        if self.momentum or self.optimizer is not None:
            self._with_memory(y, parameters, gradients)
            return
        a, s = self.correction
        if self.weight_decay:  # decoupled or not, without momentum it is the same step
            y.mul_(1 - self.lr * (self.weight_decay + a))
            if a:
                y.add_(self.anchor, alpha=self.lr * a)
        elif a:
            y.lerp_(self.anchor, self.lr * a)
        if s is not None:
            y.sub_(s, alpha=self.lr)
        torch._foreach_add_(parameters, gradients, alpha=-self.lr)

    def _with_memory(self, y: Vector, parameters: Tensors, gradients: Tensors) -> None:
        """The same sum gathered into one vector, which momentum or an optimizer keeps."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(y)
        a, s = self.correction
        v = self.velocity.mul_(self.momentum)
        decay = 0.0 if self.decoupled_weight_decay else self.weight_decay
        if decay or a:
            v.add_(y, alpha=decay + a)
        if a:
            v.sub_(self.anchor, alpha=a)
        if s is not None:
            v.add_(s)
        offset = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            size = parameter.numel()
            v[offset : offset + size].as_strided(parameter.shape, parameter.stride()).add_(gradient)
            offset += size
        if self.decoupled_weight_decay:
            y.mul_(1 - self.lr * self.weight_decay)
        if self.optimizer is None:
            y.sub_(v, alpha=self.lr)
            return
        self.begin()
        step, self.state = self.optimizer.update(v.neg(), self.state, _ALONE)
        y.add_(step, alpha=self.lr)

    def moving(self) -> Vector:
        """The velocity, which starts from zero."""
        if self.velocity is None:
            self.velocity = allocator.like(self.anchor).zero_()
        return self.velocity

    def begin(self) -> None:
        """The optimizer's first state, where there is none yet."""
        if self.optimizer is not None and not self.state:
            self.state = self.optimizer.init(self.anchor)

    def kept(self) -> Vectors:
        """The optimizer's state and the velocity as rows of memory; numbers become tensors of one, marked by a #."""
        rows = _rows(self.state)
        if self.momentum and self.velocity is not None:
            rows["velocity"] = self.velocity
        return rows

    def restore(self, rows: Vectors, y: Vector) -> None:
        """Go on from the rows that `kept` gave; some of them are enough, the others start as in a first round."""
        if "velocity" in rows:
            self.velocity = rows["velocity"].clone()
        found = {name: row for name, row in rows.items() if name != "velocity"}
        if self.optimizer is not None and found:
            self.state = _merged(self.optimizer.init(y), _tree(found))


def _rows(state: State, above: str = "") -> Vectors:
    rows: Vectors = {}
    for name, value in state.items():
        if isinstance(value, dict):
            rows.update(_rows(value, f"{above}{name}/"))
        elif isinstance(value, torch.Tensor):
            rows[above + name] = value
        else:
            whole = isinstance(value, int)
            rows[f"{above}{name}#"] = torch.tensor([value], dtype=torch.int64 if whole else torch.float64)
    return rows


def _tree(rows: Vectors) -> State:
    state: State = {}
    for name, row in rows.items():
        *above, last = name.split("/")
        inside = state
        for part in above:
            inside = inside.setdefault(part, {})
        inside[last.removesuffix("#")] = row.item() if last.endswith("#") else row
    return state


def _merged(first: State, then: State) -> State:
    both = dict(first)
    for name, value in then.items():
        both[name] = _merged(first.get(name, {}), value) if isinstance(value, dict) else value
    return both


def train(
    shell: Trainer, x: Vector, buffers: Vector | None, client: int, work: Work, descent: LocalStep, key: Key
) -> LocalResult:
    """A client's round from the model it received. The shell's buffers are then those after it.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> shell = task.shell(torch.float32, torch.device("cpu"))
    >>> from hansa.local import Correction, Work
    >>> start = torch.zeros(2)
    >>> train(shell, start, None, 0, Work(1, 2), Descent(0.5, start, Correction()), hansa.Key(0)).change
    tensor([0.2500, 0.2500])
    """
    moved = shell.phase(x, client, work, descent, key) if descent.plain else None
    if moved is not None:
        return moved
    shell.load(x, buffers)
    losses = descend(shell, client, work, descent, key)
    change = torch.sub(shell.y, x, out=allocator.like(x))
    return LocalResult(change, losses.tolist(), all_finite(change))


def descend(shell: Trainer, client: int, work: Work, descent: LocalStep, key: Key) -> torch.Tensor:
    """All local steps of one client, on the model the shell holds; returns the loss of each step.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> shell = task.shell(torch.float32, torch.device("cpu"))
    >>> from hansa.local import Correction, Work
    >>> shell.load(torch.zeros(2), None)
    >>> len(descend(shell, 0, Work(3, 2), Descent(0.1, torch.zeros(2), Correction()), hansa.Key(0)))
    3
    """
    with torch.no_grad():
        return _descend(shell, client, work, descent, key)


def _descend(shell: Trainer, client: int, work: Work, descent: LocalStep, key: Key) -> torch.Tensor:
    rows = shell.rows(client, work, key.child("batch"))
    found = shell.descend(rows, descent) if descent.plain else None
    if found is not None:
        return found
    losses = torch.empty(work.steps, dtype=shell.y.dtype, device=shell.y.device)
    for t in range(work.steps):
        shell.seed(key.child("noise", t))
        losses[t], gradients = ahead_gradient(shell, client, None if rows is None else rows[t], descent)
        descent.step(shell.y, shell.parameters, gradients)
    return losses


def ahead_gradient(
    shell: Trainer, client: int, rows: BatchRows | None, descent: LocalStep
) -> tuple[torch.Tensor, Tensors]:
    """The loss at y and the gradient at y, or where the descent looks ahead at y + e, on the same batch."""
    loss, gradients = shell.gradient(client, rows)
    if descent.ascent_offset is None:
        return loss, gradients
    offset = descent.ascent_offset(gradients)
    kept = shell.y.clone()
    torch._foreach_add_(shell.parameters, offset)
    _, gradients = shell.gradient(client, rows)
    shell.y.copy_(kept)
    return loss, gradients


def effective_steps(steps: int, lr: float, momentum: float, a: float) -> float:
    """FedNova's tau: the total weight of the gradients in y - x, over lr. Plain SGD: the number of steps.

    >>> effective_steps(3, 0.1, 0.0, 0.0)
    3.0
    >>> effective_steps(2, 0.1, 0.5, 0.0)  # 1 + (1 + 0.5)
    2.5
    """
    if not momentum and not a:
        return float(steps)
    total, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - a * lr * total
        total += velocity
    return total
