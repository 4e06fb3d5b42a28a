"""Execution modes of a task's clients: native code, ``torch.compile``, or several clients in one ``torch.func.vmap``.

All are compared with eager PyTorch on the task's example rows, never on earlier clients, so that workers agree: native
code when the task is created, ``vmap`` before a run, and compiled code for each batch signature (shapes, types and
strides), since it has one graph for each. Dynamic shapes are off: their code would depend on the first shape.

``vmap`` trains clients in one program over stacked parameters. The bits of a client's result do not depend on the other
clients or their number. Torch may use different kernels for one model and for several, and different functions (exp,
tanh, ...) for full vectors and for the tail of a tensor: so a program always has 32 models, which leave no tail. Unused
models are copies. Models that draw random numbers, such as dropout, are refused.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.func import functional_call, vmap

from hansa.algorithm import Algorithm
from hansa.core import native, trees
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.clients import ClientKernel
from hansa.core.native.network import AffineStep, Network
from hansa.core.native.tracing import NotEligible, stages_of
from hansa.core.object_state import bitwise_equal
from hansa.core.protocols import with_defaults
from hansa.core.types import Vector
from hansa.core.vectors.layout import Layout
from hansa.local.solvers import BaseSolver
from hansa.local.trainer import ClientJobs, LocalResults, train_by_steps
from hansa.training import random_state
from hansa.training.batch_sources import (
    Batch,
    convert_batch,
    count_rows,
    row_numbers,
    take_rows,
)
from hansa.training.modules import CPU, BoundModel, ModelLoss, ModuleState, Trial

if TYPE_CHECKING:
    from hansa.training.task import Task, TaskLike
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

Execution: TypeAlias = Literal["auto", "native", "vmap", "compiled", "eager"]
"""The execution modes, documented by `hansa.Task`."""
LossAndGradients: TypeAlias = "tuple[torch.Tensor, tuple[torch.Tensor, ...]]"

BACKEND = "inductor"
_OPTIONS = {"fallback_random": True, "cpp.threads": 1, "compile_threads": 1}
"""Random numbers as in eager torch, one thread as in workers, and no background processes."""
_MAX_GRAPHS = 1 << 20  # beyond torch's own limit, graphs would be eager
_ROWS = 8  # in a batch for the comparison of native code with eager
_LR = 0.05
_WIDE = 1 << 19  # weights of one convolution


def find_network(task: Task) -> Network:
    """Return the native form of a task's model and loss after a comparison on three batches; raise `NotEligible` if
    there is none, or if PyTorch is faster and native code was not requested."""
    required, (inputs, targets) = task.execution == "native", task.example
    single = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    reasons = {
        f"execution={task.execution!r}": task.execution not in ("auto", "native"),
        f"it uses autocast={task.autocast!r}": task.autocast is not None,
        "without vector instructions PyTorch is faster": not required and native.instruction_set() == "base",
        "it has frozen weights of fewer bits than float32": task.layout.own_dtypes,
        "its inputs or targets are several tensors": not single,
        str(native.unavailable_reason()): native.unavailable_reason() is not None,
    }
    _refuse(reasons)
    tokens = inputs.dtype == torch.int64
    if not (inputs.is_floating_point() or tokens) or targets.dtype != torch.int64 or targets.ndim != 1:
        raise NotEligible(f"its inputs are {inputs.dtype} and its targets {targets.dtype} with {targets.ndim} axes")
    for labels in (targets, getattr(task.data, "targets", None)):
        if isinstance(labels, torch.Tensor) and labels.numel() and int(labels.min()) < 0:
            raise NotEligible("there are negative targets, which cross-entropy ignores")
    with random_state.preserve_rng():
        module = task.example_model()
        stages = stages_of(module, inputs.shape[1:], task.loss, task.layout.channels_last, tokens)
        residual = any(stage.kind in (abi.GROUP_NORM, abi.IMAGE_ADD) for stage in stages)
        wide = any(stage.kind == abi.CONV and stage.dim > _WIDE for stage in stages)
        if residual and wide and not required:  # as measured with group normalisation
            raise NotEligible(f"PyTorch is faster for residual networks with {_WIDE:,} weights in a convolution")
        network = Network(stages, tuple(inputs.shape[1:]))
        _compare_native(network, task.trial(torch.float32, CPU), inputs, targets)
    if network.takes_tokens and (hasattr(task.data, "fetch") or task.augment.has_user_code):
        raise NotEligible("its tokens are loaded on demand or augmented, and rows may differ in length")
    if network.dropout_numbers and task.augment.has_user_code:
        raise NotEligible("it has dropout, and a user-defined augmentation may draw from the same generator")
    return network


def _refuse(reasons: Mapping[str, object]) -> None:
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise NotEligible(reason)


def native_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """Return examples in the form of native code: contiguous, float32 or int64 tokens."""
    return (inputs.float() if inputs.is_floating_point() else inputs).contiguous()


def describe_kernels(task: object) -> str:
    """Describe in one line the native kernels of a run, and whether they train the task's model.

    >>> describe_kernels(None).startswith("kernels: ")
    True
    """
    names = native.describe()
    if native.unavailable_reason() is not None:
        return f"kernels: {names}. PyTorch does all the work, several times slower for small models. {native.remedy()}"
    if getattr(task, "network", None) is not None:
        return f"kernels: {names}, for training, the server and compression"
    reason = getattr(task, "eager_reason", None)
    suffix = f": {reason}" if reason else ""
    return f"kernels: {names}, for the server and compression. PyTorch trains the model{suffix}"


def _compare_native(network: Network, trial: Trial, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Compare loss, gradient and a step on each of three batches with eager; raise `NotEligible` if they differ.

    Rounding may occasionally select another maximum, so one of the three has a larger tolerance.
    """
    start = trial.y.clone()
    native_y = start.clone()
    rows = torch.linspace(0, len(inputs) - 1, 3 * _ROWS).long().view(_ROWS, 3).T
    distances = []
    for step, batch in enumerate(rows):
        x, labels = native_inputs(inputs[batch]), targets[batch].contiguous()
        eager_batch = convert_batch(Batch(x, labels), torch.float32, CPU, trial.layout.channels_last)
        eager, keep = trial.gradient(eager_batch, Key(step)), None
        if network.dropout_numbers:
            generator, keep = torch.Generator(), torch.empty(_ROWS * network.dropout_numbers)
            random_state.seed_generator(generator, Key(step))
            network.draw(_ROWS, generator, keep)
        found = network.gradient(trial.y, x, labels, torch.arange(_ROWS), keep=keep)
        distances.append(_compare("native", found, eager, 1e-4, 2e-2))
        keep = None if keep is None else keep[None]
        ClientKernel(network, x, labels).steps(native_y, torch.arange(_ROWS)[None], AffineStep(_LR), keep)
        with torch.no_grad():
            trial.y.sub_(eager[1], alpha=_LR)
    change = _distance(native_y - start, trial.y - start)
    if not (sorted(distances)[1] < 1e-4 and change < 2e-2):
        raise NotEligible(f"the native gradient differs by {max(distances):.2g}, three steps by {change:.2g}")


def _compare(
    kind: str, found: tuple[float, torch.Tensor], eager: tuple[float, torch.Tensor], of_loss: float, of_gradient: float
) -> float:
    """Return the relative distance of a flat gradient from that of eager PyTorch; raise `NotEligible` if it, or that of
    the loss, exceeds a tolerance."""
    if not abs(found[0] - eager[0]) <= of_loss * (1 + abs(eager[0])):
        raise NotEligible(f"the {kind} loss is {found[0]:.6g}, the eager loss {eager[0]:.6g}")
    if not (distance := _distance(found[1], eager[1])) <= of_gradient:
        raise NotEligible(f"the {kind} gradient differs by {distance:.2g}")
    return distance


def impossible(execution: Execution, problem: str, reason: object) -> HansaError:
    """Return the error for a requested execution that a task does not allow."""
    return HansaError(f"Task(execution={execution!r}): {problem}: {reason}. Omit execution to train it otherwise.")


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def missing_compiler() -> str | None:
    """Return why ``torch.compile`` is unavailable, or None."""
    from torch._inductor import cpp_builder  # takes a second

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpp_builder.get_cpp_compiler()
    except Exception:
        return "no C++ compiler on the path: install g++ or clang"
    return None


def check_compiled(task: Task) -> None:
    """Trace forward, loss and backward on example rows; raise if the task's model cannot be compiled."""
    _require_compiler(task)
    if task.autocast is not None:
        raise _not_compiled(task, f"it uses autocast={task.autocast!r}")
    if not all(isinstance(leaf, torch.Tensor) for leaf in trees.tree_leaves(tuple(task.example))):
        raise _not_compiled(task, "its batches have values that are not tensors")
    _compare_compiled(task, task.dtype, CPU, _signature(task.example), "aot_eager")


def _not_compiled(task: Task, reason: object) -> HansaError:
    return impossible("compiled", f"{task.name} cannot be compiled", reason)


def _require_compiler(task: Task) -> None:
    if (reason := missing_compiler()) is not None:
        raise _not_compiled(task, reason)


class CompiledLoss:
    """The compiled loss of a trainer's module. Each batch signature is compared with eager before its first use."""

    def __init__(self, trainer: ModuleTrainer) -> None:
        _require_compiler(trainer.task)
        self._trainer, self._compared = trainer, set[Any]()
        self._loss = _compile(trainer.loss_of, BACKEND)

    def gradient(self, batch: Batch) -> LossAndGradients:
        """Return loss and gradient of a batch; raise if compiled code and eager differ."""
        trainer, signature = self._trainer, _signature(batch)
        with nullcontext() if signature in self._compared else _compilation_settings():
            if signature not in self._compared:
                _compare_compiled(trainer.task, trainer.dtype, trainer.device, signature, BACKEND)
                self._compared.add(signature)
            with torch.enable_grad():
                loss = self._loss(*batch)
                return loss.detach(), trainer.gradients_of(loss)


def _compare_compiled(task: Task, dtype: torch.dtype, device: torch.device, signature: Any, backend: str) -> None:
    """Raise if loss, gradient or buffers of compiled and eager code differ on two batches with a signature."""
    compiled, eager = task.trial(dtype, device), task.trial(dtype, device)
    with _compilation_settings(), random_state.preserve_rng():
        program = _compile(compiled.loss_of, backend)
        for step in range(2):
            try:
                batch = _batch_like(signature, task.example, step)
                found = compiled.gradient(batch, Key(step), program)
                _compare("compiled", found, eager.gradient(batch, Key(step)), 1e-4, 1e-3)
            except NotEligible as reason:
                raise _not_compiled(task, reason) from reason
            except Exception as error:
                message = str(error).strip().splitlines()[0] if str(error) else ""
                raise _not_compiled(task, f"{type(error).__name__}: {message}") from error
            for a, b in zip(compiled.module.buffers(), eager.module.buffers(), strict=True):
                if not a.is_complex() and not torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True):
                    raise _not_compiled(task, "the compiled code changes buffers differently")


def _signature(batch: Any) -> Any:
    """Return the structure, shapes, strides, types and devices of a batch."""
    leaves, spec = trees.tree_flatten(tuple(batch))
    return spec, tuple((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)


def _batch_like(signature: Any, example: Batch, step: int) -> Batch:
    """Return example rows as a batch with a signature."""
    leaves, spec = trees.tree_flatten(tuple(example))
    if spec != signature[0]:
        raise ValueError("its batches do not have one structure")
    tensors = []
    for leaf, (shape, stride, dtype, device) in zip(leaves, signature[1], strict=True):
        rows = (torch.arange(shape[0]) + step) % len(leaf)
        if tuple(leaf.shape[1:]) != tuple(shape[1:]):
            raise ValueError("its batches do not have one shape")
        tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(leaf[rows]))
    return Batch(*trees.tree_unflatten(tensors, spec))


def _compile(loss: ModelLoss, backend: str) -> ModelLoss:
    options = _OPTIONS if backend == "inductor" else None
    return torch.compile(loss, fullgraph=True, dynamic=False, backend=backend, options=options)  # type: ignore[arg-type]


@contextmanager
def _compilation_settings() -> Iterator[None]:
    """Allow any number of graphs, all with static shapes, and suppress torch's warnings."""
    from torch._dynamo import config as tracing

    settings = {
        "recompile_limit": _MAX_GRAPHS,
        "accumulated_recompile_limit": _MAX_GRAPHS,
        "automatic_dynamic_shapes": False,
    }
    with warnings.catch_warnings(), tracing.patch(settings), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


MODELS = 32
"""The models in one program: a tensor with one number per model is two full vectors of 16."""
_ALIGNMENT = 64  # rows of a matrix of models start at multiples of this many numbers, so that all have the same bits


def without_native(task: TaskLike, algorithm: Algorithm) -> TaskLike:
    """Return the task without native code if clients have a loop of their own, which is eager PyTorch on a module."""
    loop = algorithm.local.loop
    if loop is None:
        return task
    if getattr(task, "execution", None) not in ("auto", "eager") or getattr(task, "autocast", None) is not None:
        raise HansaError(
            f"{algorithm.name}(loop={loop!r}): a client loop is PyTorch code for a module, which {task.name} does not "
            "run as it is: expected hansa.Task(..., execution='auto' or 'eager') without autocast."
        )
    eager = copy.copy(cast("Task", task))
    eager.network = None
    return eager


def with_vmap(task: TaskLike, algorithm: Algorithm, dtype: torch.dtype, device: torch.device) -> TaskLike:
    """Return the task with ``vmap_batch_size`` for a method if its execution is "vmap"; otherwise the task itself."""
    if getattr(task, "execution", "") != "vmap":
        return task
    task, phase = copy.copy(cast("Task", task)), algorithm.local
    batch_size = phase.batch_size
    if batch_size is None:
        sizes = Counter(task.population.samples)
        batch_size = max(sizes, key=lambda size: (sizes[size], size))
    two_gradients = with_defaults(phase.solver, BaseSolver).ascent_offset is not None
    try:
        _refuse({
            "its clients gossip between the steps": phase.mixing is not None,
            f"{phase.solver!r} takes two gradients a step": two_gradients,
            "its clients keep blocks of the model": phase.private_blocks is not None,
            f"it uses autocast={task.autocast!r}": task.autocast is not None,
            "its model has buffers that training changes (BatchNorm? spectral norm?)": task.layout.buffer_dim,
            "its data is loaded batch by batch": hasattr(task.data, "fetch"),
            "a user-defined augmentation may draw random numbers": task.augment.has_user_code,
        })  # fmt: skip
        _compare_vmap(task, dtype, device, batch_size)
    except NotEligible as reason:
        problem = f"{task.name} with {algorithm.name}: clients cannot be trained together"
        raise impossible("vmap", problem, reason) from reason
    log.info("%s: trained by torch.func.vmap, up to %d clients in one program", task.name, MODELS)
    task.vmap_batch_size = batch_size
    return task


class BatchedTraining:
    """Trains the clients of a trainer together.

    A client's result does not depend on the other clients of its group. So clients are grouped in any order, and those
    with fewer steps leave the group early.
    """

    def __init__(self, trainer: ModuleTrainer, batch_size: int) -> None:
        self.trainer, self.batch_size = trainer, batch_size
        self._loss = BatchedLoss(trainer)

    @torch.no_grad()
    def train(self, jobs: ClientJobs) -> LocalResults:
        """Train clients whose batches have the planned size together, the others one by one."""
        results: dict[int, LocalResults] = {}
        groups: dict[object, list[int]] = {}
        batches = jobs.batches or [
            self.trainer.batches(client, work, jobs.key_of(index).child("batch"))
            for index, (client, work) in enumerate(zip(jobs.clients, jobs.works, strict=True))
        ]
        jobs = replace(jobs, batches=batches)
        for index, (work, step) in enumerate(zip(jobs.works, jobs.steps, strict=True)):
            rows = row_numbers(batches[index])
            if isinstance(rows, torch.Tensor) and work.batch_size == rows.shape[1] == self.batch_size:
                groups.setdefault((step.numbers, step.shift is None, step.is_affine), []).append(index)
            else:
                results[index] = train_by_steps(self.trainer, jobs.part([index]))
        for members in groups.values():
            members.sort(key=lambda index: -jobs.works[index].steps)
            for start in range(0, len(members), MODELS):
                group = members[start : start + MODELS]
                results.update(zip(group, self._train(jobs.part(group)), strict=True))
        self.trainer.read_buffers()  # checks what training must not change
        joined = LocalResults()
        for index in range(len(jobs)):
            joined.extend(results[index])
        return joined

    def _train(self, jobs: ClientJobs) -> list[LocalResults]:
        """Train a group. If it fails, the error is that of a single client, which names the client and the step."""
        try:
            return self._train_group(jobs)
        except Exception:
            train_by_steps(self.trainer, jobs)
            raise

    def _train_group(self, jobs: ClientJobs) -> list[LocalResults]:
        """Train clients with the same arithmetic, sorted by descending number of steps."""
        trainer, steps = self.trainer, [work.steps for work in jobs.works]
        trainer.module_state.restore()
        group, rows = _Group(trainer, jobs), None
        if not trainer.task.augment:
            own: list[Any] = [row_numbers(batches) for batches in jobs.batches or ()]
            rows = nn.utils.rnn.pad_sequence(own, batch_first=True)
        losses = torch.zeros(steps[0], len(jobs), dtype=trainer.dtype, device=trainer.device)
        for t in range(steps[0]):
            active = sum(count > t for count in steps)
            values, gradients = self._loss.gradients(group.views, self._batch(jobs, rows, t, active))
            group.step(active, gradients)
            losses[t, :active] = values[:active]
        group.keep_velocities()
        results = [LocalResults() for _ in steps]
        for index, (x, result) in enumerate(zip(jobs.models, results, strict=True)):
            values = losses[: steps[index], index]
            result.add_model(x, group.row(index), values.tolist(), keep_model=jobs.keep_models)
        return results

    def _batch(self, jobs: ClientJobs, rows: torch.Tensor | None, t: int, active: int) -> Batch:
        """Return a batch for each model in step t, gathered at once from the ``rows`` of all clients if they are given.
        Models beyond the active clients repeat the batch of the last one."""
        models = torch.arange(MODELS).clamp(max=active - 1)
        if rows is None:
            of_clients = zip(jobs.clients[:active], jobs.batches or (), strict=False)
            batches = [self.trainer.batch(client, batches[t]) for client, batches in of_clients]
            return stack_batches([batches[model] for model in models.tolist()])
        batch: Batch = self.trainer.source.batch(None, rows[models, t].reshape(-1))
        return trees.tree_map(lambda leaf: leaf.view(MODELS, -1, *leaf.shape[1:]), batch)  # type: ignore[no-any-return]


class _Group:
    """The models of a group as rows of a matrix, with `LocalStep` on matrices if it is affine.

    ``views`` are the parameters of all models, [models, ...] each.
    """

    def __init__(self, trainer: ModuleTrainer, jobs: ClientJobs) -> None:
        self._dim, self._steps = trainer.y.numel(), jobs.steps
        self._y = stacked_rows(jobs.models, MODELS, trainer.y)
        self.views = stacked_views(trainer.layout, self._y)
        step = jobs.steps[0]
        self._max_norm, self._step = step.max_grad_norm, replace(step, max_grad_norm=None) if step.is_affine else None
        if self._step is None:
            self._rows = [[view[index] for view in self.views] for index in range(len(jobs))]
            return
        stack = partial(stacked_rows, count=len(jobs), like=trainer.y)
        self._vectors = {
            "anchor": stack([step.anchor for step in jobs.steps]) if step.prox_weight else self._y,
            "shift": None if step.shift is None else stack([cast("Vector", step.shift) for step in jobs.steps]),
            "velocity": stack([step.init_velocity() for step in jobs.steps]) if step.momentum else None,
        }

    def row(self, index: int) -> torch.Tensor:
        """Return a client's model."""
        return self._y[index, : self._dim]

    def keep_velocities(self) -> None:
        """Store the rows of velocities in the clients' steps."""
        if self._step is not None and (velocity := self._vectors["velocity"]) is not None:
            for index, step in enumerate(self._steps):
                step.velocity = velocity[index, : self._dim]

    def step(self, active: int, gradients: Sequence[torch.Tensor]) -> None:
        """Take a step of the first ``active`` clients."""
        gradients = [gradient[:active] for gradient in gradients]
        if self._step is None:
            for index, step in enumerate(self._steps[:active]):
                step.step(self.row(index), self._rows[index], [gradient[index] for gradient in gradients])
            return
        if self._max_norm is not None:
            gradients = _clip(gradients, self._max_norm)
        for name, rows in self._vectors.items():
            setattr(self._step, name, None if rows is None else rows[:active])
        self._step.step(self._y[:active], [view[:active] for view in self.views], gradients)


def _clip(gradients: Sequence[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    """Return the gradients, [models, ...] each, clipped by the norm of each model."""
    norms_by_layer = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
    norms = torch.linalg.vector_norm(torch.stack(norms_by_layer, dim=1), dim=1)
    factors = torch.clamp(max_norm / (norms + 1e-12), max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


def _compare_vmap(task: Task, dtype: torch.dtype, device: torch.device, batch_size: int) -> None:
    """Compare steps of three models on example rows, single and in one program; raise `NotEligible` if joint results
    differ from single ones, or depend on the other models."""
    trial, layout = task.trial(dtype, device), task.layout
    trial.module.train()
    for module in trial.module.modules():
        for name in ("padding_idx", "max_norm", "sparse"):
            value = getattr(module, name, None)
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not (value is None or value is False):
                raise NotEligible(f"an embedding has {name}")
    if ModuleState(trial.module).generators:
        raise NotEligible("its model has a random generator of its own")
    program = BatchedLoss(trial)
    vectors, batches = [], []
    for model in range(3):
        noise = torch.from_numpy(Key(0).child("batched", model).numpy().standard_normal(trial.y.numel()))
        vectors.append(trial.y + 0.02 * noise.to(trial.y))
        rows = (torch.arange(batch_size) + 5 * model) % count_rows(task.example.targets)
        batches.append(convert_batch(take_rows(task.example, rows), dtype, device, layout.channels_last))
    with random_state.fixed_arithmetic(), torch.no_grad():
        single, joint = [], list[tuple[int, float, torch.Tensor]]()
        for model in range(3):
            trial.y.copy_(vectors[model])
            single.append(trial.gradient(batches[model], Key(0).child("noise", model)))
        rng_before = random_state.rng_state(device)
        for shift in range(3):
            models = [(index + shift) % 3 for index in range(MODELS)]
            rows = stacked_rows([vectors[model] for model in models], MODELS, trial.y)
            batch, flat = stack_batches([batches[model] for model in models]), torch.zeros_like(rows)
            try:
                losses, gradients = program.gradients(stacked_views(layout, rows), batch)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise NotEligible(f"torch.func.vmap does not support it: {reason}") from error
            for view, gradient in zip(stacked_views(layout, flat), gradients, strict=True):
                view.copy_(gradient)
            joint += zip(models, losses.tolist(), flat[:, : trial.y.numel()], strict=True)
        if random_state.rng_state(device) != rng_before:
            raise NotEligible("its model draws random numbers")
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for model, loss, flat in joint:
        _compare("joint", (loss, flat), single[model], tolerance, tolerance)
        if not bitwise_equal(flat, joint[model][2]):
            raise NotEligible("the last bits of a gradient depend on the other clients")


class BatchedLoss(nn.Module):
    """Losses and gradients of several models, each on a batch; the module of ``bound`` is in training mode."""

    def __init__(self, bound: BoundModel) -> None:
        super().__init__()
        self.model, self.forward = bound.module, bound.loss_of
        self._names = [f"model.{entry.name}" for entry in bound.layout.parameters]
        self._program: Callable[..., Any] = vmap(partial(functional_call, self), randomness="error")

    def gradients(self, parameters: Sequence[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the losses, [models], and the gradients, one [models, ...] per parameter, for the parameters of
        `stacked_views` and a batch of [models, rows, ...]."""
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        with torch.enable_grad():  # the gradient of a sum whose terms share no parameter
            losses = self._program(dict(zip(self._names, leaves, strict=True)), tuple(batch))
            gradients = torch.autograd.grad(
                losses, leaves, torch.ones_like(losses), allow_unused=True, materialize_grads=True
            )
        return losses.detach(), list(gradients)


def stacked_rows(vectors: Sequence[torch.Tensor], count: int, like: torch.Tensor) -> torch.Tensor:
    """Return ``count`` rows, the vectors and copies of the last one, padded with zeros to an aligned length.

    >>> stacked_rows([torch.zeros(70)], 3, torch.zeros(1)).shape
    torch.Size([3, 128])
    """
    dim = len(vectors[0])
    rows = like.new_zeros(count, -(-dim // _ALIGNMENT) * _ALIGNMENT)
    for index, row in enumerate(rows):
        row[:dim] = vectors[min(index, len(vectors) - 1)]
    return rows


def stacked_views(layout: Layout, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters in a matrix of models as views [models, ...].

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> [tuple(view.shape) for view in stacked_views(layout, stacked_rows([torch.zeros(8)], 5, torch.zeros(1)))]
    [(5, 2, 3), (5, 2)]
    """
    views = [entry.view(rows[0]) for entry in layout.parameters]
    return [
        rows.as_strided((len(rows), *view.shape), (rows.stride(0), *view.stride()), view.storage_offset())
        for view in views
    ]


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Stack batches of equal shapes along a new first axis."""
    stacked: Batch = trees.tree_map(lambda *leaves: torch.stack(leaves), *batches)
    return stacked
