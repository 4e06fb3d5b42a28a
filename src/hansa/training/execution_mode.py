"""How a task's model is executed: by native code or by ``torch.compile``, if these compute the same as eager PyTorch.

Native code is chosen once, when the task is created, so that every worker does the same. Of compiled code there is one
graph per batch signature (shapes, types and strides). It depends only on that, and its comparison with eager only on
the task's example rows, never on earlier clients: any number of workers gives the same bits. There are no graphs of
dynamic shape, whose code would depend on the shape that came first.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.clients import ClientKernel
from hansa.core.native.network import AffineStep, Network
from hansa.core.native.tracing import NotEligible, stages_of
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch
from hansa.training.probe import CPU, ModelLoss, Trial, model_caller, model_loss

if TYPE_CHECKING:
    from hansa.training.task import Task

log = logging.getLogger("hansa")

Execution: TypeAlias = Literal["auto", "native", "vmap", "compiled", "eager"]
"""How clients are trained, as `hansa.Task` describes it."""
LossAndGradients: TypeAlias = "tuple[torch.Tensor, tuple[torch.Tensor, ...]]"

BACKEND = "inductor"
_OPTIONS = {"fallback_random": True, "cpp.threads": 1, "compile_threads": 1}
"""Random numbers as in eager torch, one thread as in workers, and no background processes."""
_MAX_GRAPHS = 1 << 20  # beyond torch's own limit graphs would be eager
_ROWS = 8  # of a batch for the comparison of native code with eager
_LR = 0.05
_WIDE = 1 << 19  # weights of one convolution


def find_network(task: Task) -> Network:
    """Return the native form of a task's model and loss after a comparison on three batches; raise `NotEligible` if
    there is none, or if PyTorch is faster and native code was not asked for."""
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
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise NotEligible(reason)
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
        if residual and wide and not required:  # as measured with group normalisation (docs/limits.md)
            raise NotEligible(f"PyTorch is faster for residual networks with {_WIDE:,} weights in a convolution")
        network = Network(stages, tuple(inputs.shape[1:]))
        _compare_native(network, task.trial(torch.float32, CPU), inputs, targets)
    if network.takes_tokens and (hasattr(task.data, "fetch") or task.augment.has_user_code):
        raise NotEligible("its tokens are loaded on demand or augmented, and rows may differ in length")
    if network.dropout_numbers and task.augment.has_user_code:
        raise NotEligible("it has dropout, and a user-defined augmentation may draw from the same generator")
    return network


def native_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """Return examples as native code reads them: contiguous, float32 or int64 tokens."""
    return (inputs.float() if inputs.is_floating_point() else inputs).contiguous()


def describe_kernels(task: object) -> str:
    """Return one line: which native kernels a run of a task uses, and whether they train its model.

    >>> describe_kernels(None).startswith("kernels: ")
    True
    """
    used = native.describe()
    if native.unavailable_reason() is not None:
        return f"kernels: {used}. PyTorch does all the work, several times slower for small models. {native.remedy()}"
    if getattr(task, "network", None) is not None:
        return f"kernels: {used}, for training, the server and compression"
    reason = getattr(task, "eager_reason", None)
    return f"kernels: {used}, for the server and compression. PyTorch trains the model{f': {reason}' if reason else ''}"


def _compare_native(network: Network, trial: Trial, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Compare loss, gradient and a step on each of three batches with eager; raise `NotEligible` if they differ.

    Rounding may occasionally select another maximum, so the tolerance for one of the three is larger.
    """
    start = trial.y.clone()
    native_y = start.clone()
    rows = torch.linspace(0, len(inputs) - 1, 3 * _ROWS).long().view(_ROWS, 3).T
    distances = []
    for step, batch in enumerate(rows):
        x, labels = native_inputs(inputs[batch]), targets[batch].contiguous()
        eager_batch = convert_batch(Batch(x, labels), torch.float32, CPU, trial.layout.channels_last)
        eager_loss, expected = trial.gradient(eager_batch, Key(step))
        keep = _dropout_mask(network, Key(step))
        native_loss, gradient = network.gradient(trial.y, x, labels, torch.arange(_ROWS), keep=keep)
        if not abs(native_loss - eager_loss) <= 1e-4 * (1 + abs(eager_loss)):
            raise NotEligible(f"its native loss is {native_loss:.6g}, its eager loss {eager_loss:.6g}")
        distances.append(_distance(gradient, expected))
        keep = None if keep is None else keep[None]
        ClientKernel(network, x, labels).steps(native_y, torch.arange(_ROWS)[None], AffineStep(_LR), keep)
        with torch.no_grad():
            trial.y.sub_(expected, alpha=_LR)
    change = _distance(native_y - start, trial.y - start)
    if not (sorted(distances)[1] < 1e-4 and max(*distances, change) < 2e-2):
        raise NotEligible(f"its native gradient differs by {max(distances):.2g}, three steps by {change:.2g}")


def _dropout_mask(network: Network, key: Key) -> torch.Tensor | None:
    """Return the factors that eager dropout draws for a batch."""
    if not network.dropout_numbers:
        return None
    generator, keep = torch.Generator(), torch.empty(_ROWS * network.dropout_numbers)
    random_state.seed_generator(generator, key)
    network.draw(_ROWS, generator, keep)
    return keep


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def missing_compiler() -> str | None:
    """Return why nothing can be compiled here, or None."""
    from torch._inductor import cpp_builder  # takes a second

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpp_builder.get_cpp_compiler()
    except Exception:
        return "no C++ compiler on the path: install g++ or clang"
    return None


def check_compiled(task: Task) -> None:
    """Raise if a task's model cannot be compiled; forward, loss and backward are traced on example rows."""
    if task.autocast is not None:
        raise _not_compiled(task, f"it uses autocast={task.autocast!r}")
    if (reason := missing_compiler()) is not None:
        raise _not_compiled(task, reason)
    _compare_compiled(task, task.dtype, CPU, _signature(task.example), "aot_eager")


def _not_compiled(task: Task, reason: str) -> HansaError:
    return HansaError(
        f"Task(execution='compiled'): {task.name} cannot be compiled: {reason}. Omit execution to train it as it is."
    )


class CompiledLoss:
    """The compiled loss of a trainer's module. Each batch signature is compared with eager before its first use."""

    def __init__(self, task: Task, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        if (reason := missing_compiler()) is not None:
            raise HansaError(f"execution='compiled': {reason}, as on the machine that created the run.")
        self.task, self._parameters = task, parameters
        self._loss = _compile(model_loss(model_caller(module, task.example[0]), task.loss), BACKEND)
        self._compared: set[Any] = set()

    def gradient(self, inputs: Any, targets: Any) -> LossAndGradients:
        """Return loss and gradient of a batch; raise if compiled code computes others than eager."""
        signature = _signature((inputs, targets))
        with nullcontext() if signature in self._compared else _compilation_settings():
            if signature not in self._compared:
                form = self._parameters[0]
                _compare_compiled(self.task, form.dtype, form.device, signature, BACKEND)
                self._compared.add(signature)
            with torch.enable_grad():
                loss = self._loss(inputs, targets)
                gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients


def _compare_compiled(task: Task, dtype: torch.dtype, device: torch.device, signature: Any, backend: str) -> None:
    """Raise if loss, gradient or buffers of compiled and eager code differ on two batches of example rows that have a
    signature."""
    compiled, eager = task.trial(dtype, device), task.trial(dtype, device)
    with _compilation_settings(), random_state.preserve_rng():
        program = _compile(model_loss(compiled.call, compiled.loss), backend)
        for step in range(2):
            try:
                batch = _batch_like(signature, task.example, step)
                loss, gradient = compiled.gradient(batch, Key(step), program)
                eager_loss, eager_gradient = eager.gradient(batch, Key(step), model_loss(eager.call, eager.loss))
            except Exception as error:
                said = str(error).strip().splitlines()[0] if str(error) else ""
                raise _not_compiled(task, f"{type(error).__name__}: {said}") from error
            if not abs(loss - eager_loss) <= 1e-4 * (1 + abs(eager_loss)):
                raise _not_compiled(task, f"the compiled loss is {loss:.6g}, the eager loss {eager_loss:.6g}")
            if not (distance := _distance(gradient, eager_gradient)) < 1e-3:
                raise _not_compiled(task, f"the compiled gradient differs by {distance:.2g}")
            for a, b in zip(compiled.module.buffers(), eager.module.buffers(), strict=True):
                if not a.is_complex() and not torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True):
                    raise _not_compiled(task, "the compiled code changes buffers otherwise")


def _signature(batch: Any) -> Any:
    """Return structure, shapes, strides, types and devices of a batch."""
    leaves, spec = trees.tree_flatten(tuple(batch))
    return spec, tuple((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)


def _batch_like(signature: Any, example: Batch, step: int) -> Batch:
    """Return example rows as a batch of the given signature."""
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
    """Allow any number of graphs, each of static shape, and silence torch's warnings."""
    from torch._dynamo import config as tracing

    settings = {
        "recompile_limit": _MAX_GRAPHS,
        "accumulated_recompile_limit": _MAX_GRAPHS,
        "automatic_dynamic_shapes": False,
    }
    with warnings.catch_warnings(), tracing.patch(settings), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
