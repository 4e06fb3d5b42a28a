"""``Task(execution="compiled")``: loss and gradient by ``torch.compile``, compared with eager first.

There is one graph per batch signature (shapes, types and strides). It depends only on that, and the comparison only on
the task's example rows, never on earlier clients: any number of workers gives the same bits. There are no graphs of
dynamic shape, whose code would depend on the shape that came first.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.vectors.layout import convert_module
from hansa.training import random_state
from hansa.training.model_probe import model_caller

if TYPE_CHECKING:
    from hansa.training.task import Task

log = logging.getLogger("hansa")

LossAndGradients: TypeAlias = "tuple[torch.Tensor, tuple[torch.Tensor, ...]]"
ModelLoss: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
BACKEND = "inductor"
_OPTIONS = {"fallback_random": True, "cpp.threads": 1, "compile_threads": 1}
"""Random numbers as in eager torch, one thread as in workers, and no background processes."""
_MAX_GRAPHS = 1 << 20  # beyond torch's own limit graphs would be eager
_LR = 0.05


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


def compile_obstacle(task: Task) -> str | None:
    """Return why a task's model cannot be compiled, or None; forward, loss and backward are traced on example rows."""
    if task.precision.reason is not None:
        return f"it uses {task.precision.reason}"
    if (reason := missing_compiler()) is not None:
        return reason
    return _Comparison(task, task.dtype, torch.device("cpu")).difference(_signature(task.example), "aot_eager")


class CompiledLoss:
    """The compiled loss of a trainer's module. Each batch signature is compared with eager before its first use."""

    def __init__(self, task: Task, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        if (reason := missing_compiler()) is not None:
            raise HansaError(f"execution='compiled': {reason}, as on the machine that created the run.")
        self.task, self._parameters = task, parameters
        self._device, self._dtype = parameters[0].device, parameters[0].dtype
        self._loss = _compile(_model_loss(model_caller(module, task.example[0]), task.loss), BACKEND)
        self._agrees: dict[Any, bool] = {}

    def gradient(self, inputs: Any, targets: Any) -> LossAndGradients | None:
        """Return loss and gradient of a batch, or None if batches of its signature stay eager."""
        signature = _signature((inputs, targets))
        agrees = self._agrees.get(signature)
        if agrees is None:
            with _compilation_settings():
                agrees = self._agrees[signature] = self._compare(signature)
                return _gradient(self._loss, self._parameters, inputs, targets) if agrees else None
        return _gradient(self._loss, self._parameters, inputs, targets) if agrees else None

    def _compare(self, signature: Any) -> bool:
        difference = _Comparison(self.task, self._dtype, self._device).difference(signature, BACKEND)
        if difference is not None:
            log.warning("%s: trained by eager PyTorch, not compiled: %s", self.task.name, difference)
        return difference is None


class _Comparison:
    """Compares compiled and eager steps of a separate model; the model in training is not touched."""

    def __init__(self, task: Task, dtype: torch.dtype, device: torch.device) -> None:
        self.task = task
        self.module = convert_module(task.example_model(), dtype, device, task.kept_weights(dtype))
        self.y = task.layout.pack(self.module, dtype)[0].to(device)
        self.parameters: list[torch.Tensor] = [*task.layout.bind(self.module, self.y)]
        self.eager = _model_loss(model_caller(self.module, task.example[0]), task.loss)

    def difference(self, signature: Any, backend: str) -> str | None:
        """Return where loss, gradient, model or buffers differ in two steps on such batches, or None."""
        with _compilation_settings(), random_state.preserve_rng():
            try:
                compiled, eager = (self._steps(signature, loss) for loss in (_compile(self.eager, backend), self.eager))
            except Exception as error:
                return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        for step, ((loss, *tensors), (eager_loss, *eager_tensors)) in enumerate(zip(compiled, eager, strict=True)):
            if not abs(loss - eager_loss) <= 1e-4 * (1 + abs(eager_loss)):
                return f"the compiled loss is {loss:.6g}, the eager loss {eager_loss:.6g}"
            for name, a, b in zip(("gradient", "model", "buffers"), tensors, eager_tensors, strict=True):
                distance = float((a - b).norm() / b.norm().clamp(min=1e-30))
                if not distance < (1e-3 if step == 0 else 2e-2):
                    return f"the compiled {name} differs by {distance:.2g} in step {step + 1}"
        return None

    def _steps(self, signature: Any, model_loss: ModelLoss) -> list[tuple[float, *tuple[torch.Tensor, ...]]]:
        """Take two steps from the initial model; return loss, gradient, change of the model and buffers of each."""
        start, buffers = self.y.clone(), [buffer.clone() for buffer in self.module.buffers()]
        results: list[tuple[float, *tuple[torch.Tensor, ...]]] = []
        for step in range(2):
            random_state.seed_all(Key(step), self.y.device)
            loss, gradients = _gradient(model_loss, self.parameters, *self._batch(signature, step))
            flat = torch.empty_like(self.y)
            for entry, gradient in zip(self.task.layout.parameters, gradients, strict=True):
                entry.view(flat).copy_(gradient)
            self.y.sub_(flat, alpha=_LR)
            real = [buffer.double().reshape(-1) for buffer in self.module.buffers() if not buffer.is_complex()]
            flat_buffers = torch.cat([torch.ones(1, device=self.y.device), *real])
            results.append((float(loss), flat.double(), (self.y - start).double(), flat_buffers))
        self.y.copy_(start)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return results

    def _batch(self, signature: Any, step: int) -> Any:
        """Return example rows as a batch of the given signature."""
        leaves, spec = trees.tree_flatten(tuple(self.task.example))
        if spec != signature[0]:
            raise ValueError("its batches do not have one structure")
        tensors = []
        for leaf, (shape, stride, dtype, device) in zip(leaves, signature[1], strict=True):
            rows = (torch.arange(shape[0]) + step) % len(leaf)
            if tuple(leaf.shape[1:]) != tuple(shape[1:]):
                raise ValueError("its batches do not have one shape")
            tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(leaf[rows]))
        return trees.tree_unflatten(tensors, spec)


def _signature(batch: Any) -> Any:
    """Return structure, shapes, strides, types and devices of a batch."""
    leaves, spec = trees.tree_flatten(tuple(batch))
    return spec, tuple((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)


def _model_loss(call: Callable[[Any], Any], loss: Callable[[Any, Any], torch.Tensor]) -> ModelLoss:
    def model_loss(inputs: Any, targets: Any) -> torch.Tensor:
        return loss(call(inputs), targets)

    return model_loss


def _compile(model_loss: ModelLoss, backend: str) -> ModelLoss:
    options = _OPTIONS if backend == "inductor" else None
    return torch.compile(model_loss, fullgraph=True, dynamic=False, backend=backend, options=options)  # type: ignore[arg-type]


def _gradient(model_loss: ModelLoss, parameters: list[torch.Tensor], inputs: Any, targets: Any) -> LossAndGradients:
    with torch.enable_grad():
        loss = model_loss(inputs, targets)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), gradients


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
