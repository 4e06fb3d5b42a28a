"""Loss and gradient of a model by ``torch.compile``: one graph for each form of batch, compared with eager first.

What is compiled depends on the form of a batch alone (its shapes, types and strides), and whether it is used on rows
that the task has looked at, never on who trained before: so any number of workers gives the same bits. Forms are not
merged into graphs of any size, whose code would depend on the size that came first.
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
from hansa.core.vectors.layout import converted
from hansa.training import random_state
from hansa.training.model_call import caller

if TYPE_CHECKING:
    from hansa.training.task import Task

log = logging.getLogger("hansa")

Found: TypeAlias = "tuple[torch.Tensor, tuple[torch.Tensor, ...]]"
Whole: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
BACKEND = "inductor"
_OPTIONS = {"fallback_random": True, "cpp.threads": 1, "compile_threads": 1}
"""Random numbers are those of eager torch, one thread is that of workers, and no process is left behind."""
_FORMS = 1 << 20  # no end to the number of forms: graphs beyond torch's own limit would be eager ones
_LR = 0.05


def why_not() -> str | None:
    """Why nothing can be compiled here, or None."""
    from torch._inductor import cpp_builder  # it takes a second

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpp_builder.get_cpp_compiler()
    except Exception:
        return "there is no C++ compiler on the path: install g++ or clang"
    return None


def obstacle(task: Task) -> str | None:
    """Why a task's model cannot be compiled, or None: forward() and loss are traced on some rows, and backwards."""
    if (why := why_not()) is not None:
        return why
    twin = _Twin(task, task.dtype, torch.device("cpu"))
    return twin.differs(_form(task.example), "aot_eager")


class Compiled:
    """The compiled loss of a shell's module; each form of batch is compared with eager before it is first used."""

    def __init__(self, task: Task, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        if (why := why_not()) is not None:
            raise HansaError(f"compile: {why}, as there was where the run was made; or set compile: false.")
        self.task, self._parameters = task, parameters
        self._device, self._dtype = parameters[0].device, parameters[0].dtype
        self._whole = _compiled(_whole(caller(module, task.example[0]), task.loss), BACKEND)
        self._fits: dict[Any, bool] = {}

    def gradient(self, inputs: Any, targets: Any) -> Found | None:
        """Loss and gradient of a batch, or None where its form stays with eager."""
        form = _form((inputs, targets))
        fits = self._fits.get(form)
        if fits is None:
            with _compiling():
                fits = self._fits[form] = self._compare(form)
                return _gradient(self._whole, self._parameters, inputs, targets) if fits else None
        return _gradient(self._whole, self._parameters, inputs, targets) if fits else None

    def _compare(self, form: Any) -> bool:
        why = _Twin(self.task, self._dtype, self._device).differs(form, BACKEND)
        if why is not None:
            log.warning("%s: trained by eager PyTorch, not compiled: %s", self.task.name, why)
        return why is None


class _Twin:
    """A model of its own, to compare its compiled form with: the one that trains is left alone."""

    def __init__(self, task: Task, dtype: torch.dtype, device: torch.device) -> None:
        self.task = task
        self.module = converted(task.fresh_model(), dtype, device)
        self.y = task.layout.pack(self.module, dtype)[0].to(device)
        self.parameters: list[torch.Tensor] = [*task.layout.bind(self.module, self.y)]
        self.eager = _whole(caller(self.module, task.example[0]), task.loss)

    def differs(self, form: Any, backend: str) -> str | None:
        """Where loss, gradient, buffers or two steps on batches of this form are not those of eager; or None."""
        with _compiling(), random_state.kept():
            try:
                ours, theirs = (self._steps(form, whole) for whole in (_compiled(self.eager, backend), self.eager))
            except Exception as problem:
                return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}"
        for place, ((loss, *found), (wanted, *true)) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(loss - wanted) <= 1e-4 * (1 + abs(wanted)):
                return f"its compiled loss is {loss:.6g}, its own {wanted:.6g}"
            for name, a, b in zip(("gradient", "model", "buffers"), found, true, strict=True):
                apart = float((a - b).norm() / b.norm().clamp(min=1e-30))
                if not apart < (1e-3 if place == 0 else 2e-2):
                    return f"its compiled {name} differs by {apart:.2g} in step {place + 1}"
        return None

    def _steps(self, form: Any, whole: Whole) -> list[tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Two steps from the first model; after each the loss, the gradient, how far the model is, and the buffers."""
        first, buffers = self.y.clone(), [buffer.clone() for buffer in self.module.buffers()]
        told = []
        for step in range(2):
            random_state.seed_all(Key(step), self.y.device)
            loss, pieces = _gradient(whole, self.parameters, *self._batch(form, step))
            flat = torch.empty_like(self.y)
            for entry, piece in zip(self.task.layout.parameters, pieces, strict=True):
                entry.view(flat).copy_(piece)
            self.y.sub_(flat, alpha=_LR)
            after = [buffer.double().reshape(-1) for buffer in self.module.buffers() if not buffer.is_complex()]
            held = torch.cat([torch.ones(1, device=self.y.device), *after])
            told.append((float(loss), flat.double(), (self.y - first).double(), held))
        self.y.copy_(first)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return told

    def _batch(self, form: Any, step: int) -> Any:
        """Rows of the task's examples in a given form."""
        leaves, spec = trees.tree_flatten(tuple(self.task.example))
        if spec != form[0]:
            raise ValueError("its batches are not of one structure")
        made = []
        for leaf, (shape, stride, dtype, device) in zip(leaves, form[1], strict=True):
            rows = (torch.arange(shape[0]) + step) % len(leaf)
            if tuple(leaf.shape[1:]) != tuple(shape[1:]):
                raise ValueError("its batches are not of one shape")
            like = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            made.append(like.copy_(leaf[rows]))
        return trees.tree_unflatten(made, spec)


def _form(batch: Any) -> Any:
    """Structure, shapes, strides, types and devices of a batch."""
    leaves, spec = trees.tree_flatten(tuple(batch))
    return spec, tuple((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)


def _whole(ask: Callable[[Any], Any], loss: Callable[[Any, Any], torch.Tensor]) -> Whole:
    def whole(inputs: Any, targets: Any) -> torch.Tensor:
        return loss(ask(inputs), targets)

    return whole


def _compiled(whole: Whole, backend: str) -> Whole:
    options = _OPTIONS if backend == "inductor" else None
    return torch.compile(whole, fullgraph=True, dynamic=False, backend=backend, options=options)  # type: ignore[arg-type]


def _gradient(whole: Whole, parameters: list[torch.Tensor], inputs: Any, targets: Any) -> Found:
    with torch.enable_grad():
        loss = whole(inputs, targets)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), gradients


@contextmanager
def _compiling() -> Iterator[None]:
    """Any number of forms, each a graph of its own; what torch warns of meanwhile is not the user's doing."""
    from torch._dynamo import config as tracing

    settings = {"recompile_limit": _FORMS, "accumulated_recompile_limit": _FORMS, "automatic_dynamic_shapes": False}
    with warnings.catch_warnings(), tracing.patch(settings), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
