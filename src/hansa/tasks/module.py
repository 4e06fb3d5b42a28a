"""The usual task: any ``nn.Module``, any loss, on federated data."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hansa import native
from hansa.errors import HansaError
from hansa.keys import Key
from hansa.local.descent import Descent
from hansa.local.work import Work
from hansa.native.recognise import Unfit
from hansa.native.stack import Stack
from hansa.tasks.forms import Loss, fitting_layout, native_form
from hansa.types import BUFFERS, MODEL, Population, Vector, Vectors

log = logging.getLogger("hansa")

_EVALUATION_BATCH = 500
_PIECE = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers


class ClientData(Protocol):
    """What a task asks of federated data: one tensor of inputs, one of targets, and each client's rows of them."""

    @property
    def inputs(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def test_inputs(self) -> torch.Tensor | None: ...
    @property
    def test_targets(self) -> torch.Tensor | None: ...
    @property
    def population(self) -> int: ...
    def rows(self, client: int) -> torch.Tensor: ...
    def samples(self, client: int) -> int: ...


class Store:
    """Inputs as a worker keeps them: images lie channels-last, so that a gathered batch is channels-last for free,
    unless the model cannot work with it."""

    def __init__(
        self, inputs: torch.Tensor, dtype: torch.dtype, device: torch.device, channels_last: bool = True
    ) -> None:
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        self.image = inputs.ndim == 4 and channels_last
        if self.image:
            inputs = inputs.permute(0, 2, 3, 1)
        self.values = inputs.contiguous().to(device)

    @property
    def logical(self) -> torch.Tensor:
        """All inputs in the shape the model knows, whatever their order in memory."""
        return self.values.permute(0, 3, 1, 2) if self.image else self.values

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        batch = self.values.index_select(0, rows)
        return batch.permute(0, 3, 1, 2) if self.image else batch


class _Everything:
    """Federated data whose test set is what all clients hold."""

    def __init__(self, data: ClientData) -> None:
        rows = torch.cat([data.rows(client) for client in range(data.population)])
        self.inputs, self.targets, self.population = data.inputs, data.targets, data.population
        self.test_inputs, self.test_targets = data.inputs[rows], data.targets[rows]
        self.rows, self.samples = data.rows, data.samples


class Task:
    """A model factory (or module class), a loss of (output, target), and federated data.

    ``model`` is called without arguments; equal seeds give equal first models. ``metric`` maps (output, target) to the
    number of hits, by default classification accuracy where targets are class numbers. A model that amounts to a stack
    of convolutions and linear layers with cross-entropy, however its ``forward()`` is written, is trained by native
    code in float32: three batches are compared first, and the two agree to float rounding. Any other is trained by
    eager PyTorch, and one line of the log says why; ``native=False`` keeps to eager, ``native=True`` refuses a model
    that has no native form.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Loss,
        data: ClientData,
        *,
        metric: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        name: str | None = None,
        native: bool | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            raise HansaError(
                f"Task(model={type(model).__name__} object): expected a function that makes the model, so that every "
                f"worker has its own. Pass the class, or lambda: {type(model).__name__}(...)."
            )
        self.model, self.loss, self.data = model, loss, data
        self.metric = metric if metric is not None else default_metric(data.targets)
        self.dtype = torch.float32
        self.population = Population(tuple(data.samples(i) for i in range(data.population)))
        for client, samples in enumerate(self.population.samples):
            if samples < 1:
                raise HansaError(f"client {client} holds no samples: give it some, or leave it out of the data.")
        example = _fresh(model, Key(0))
        self.name = name if name is not None else type(example).__name__
        self.layout = fitting_layout(self.name, self._example, loss, data.inputs, data.targets)
        self.stack = self._native_form(wanted=native)

    def _example(self) -> nn.Module:
        return _fresh(self.model, Key(0))

    def _native_form(self, wanted: bool | None) -> Stack | None:
        """The native form of the model and its loss where there is one."""
        if wanted is False:
            return None
        if wanted is None and native.instruction_set() == "base":  # without vector units eager is the faster one
            return None
        try:
            stack = native_form(self._example, self.loss, self.layout, self.data.inputs, self.data.targets)
        except Unfit as why:
            if wanted:
                raise HansaError(
                    f"Task(native=True): {self.name} has no native form: {why}. Leave native out to train it eagerly."
                ) from None
            log.info("%s: trained by eager PyTorch: %s", self.name, why)
            return None
        log.info("%s: trained by native code (%s)", self.name, native.instruction_set())
        return stack

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        model, buffers = self.layout.pack(_fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def shell(self, dtype: torch.dtype, device: torch.device) -> ModuleShell:
        return ModuleShell(self, dtype, device)

    def pieces(self) -> list[tuple[int, int]]:
        """The test rows in fixed pieces, which workers share."""
        rows = 0 if self.data.test_inputs is None or self.data.test_targets is None else len(self.data.test_targets)
        return [(first, min(first + _PIECE, rows)) for first in range(0, rows, _PIECE)]

    def total(self, parts: Sequence[tuple[float, float | None]]) -> dict[str, float]:
        """Mean loss and accuracy over the test rows, from one part a piece in the pieces' order; nothing from none."""
        if not parts:
            return {}
        rows = self.pieces()[-1][1]
        found = {"test_loss": math.fsum(loss for loss, _ in parts) / rows}
        hits = [hits for _, hits in parts if hits is not None]
        return {**found, "test_accuracy": math.fsum(hits) / rows} if hits else found

    def evaluate(self, shell: ModuleShell, vectors: Vectors) -> dict[str, float]:
        """Mean test loss and accuracy of the given vectors, or nothing where there is no test set."""
        return self.total([shell.evaluate(vectors, *piece) for piece in self.pieces()])

    def on_training_data(self) -> Task:
        """The same task evaluated on all clients' own samples: ``test_loss`` is then the global training loss."""
        whole = copy.copy(self)
        whole.data = _Everything(self.data)
        return whole

    def module(self, vectors: Vectors) -> nn.Module:
        """A module of its own holding the given vectors, ready to use or to save."""
        module = _fresh(self.model, Key(0))
        module.load_state_dict(self.layout.named(vectors[MODEL].float(), vectors.get(BUFFERS)), strict=False)
        return module


class ModuleShell:
    """One model whose parameters are views of one flat vector."""

    def __init__(self, task: Task, dtype: torch.dtype, device: torch.device) -> None:
        self.task, self.layout, self.device = task, task.layout, device
        self.module = _fresh(task.model, Key(0)).to(device=device, dtype=dtype)
        self.y = torch.zeros(self.layout.dim, dtype=dtype, device=device)
        self.parameters: list[torch.Tensor] = [*self.layout.bind(self.module, self.y)]
        self.buffers = (
            torch.zeros(self.layout.buffer_dim, dtype=dtype, device=device) if self.layout.buffer_dim else None
        )
        self.dtype = dtype
        self.inputs = Store(task.data.inputs, dtype, device, self.layout.channels_last)
        self.targets = _cast(task.data.targets, dtype, device)
        self._test: tuple[Store, torch.Tensor] | None = None
        self.module.train()
        fits = dtype == torch.float32 and device.type == "cpu" and self.targets.dtype == torch.int64
        self.stack = task.stack if fits else None
        if self.stack is not None:
            self._gradient = torch.zeros_like(self.y)
            self._gradients = tuple(entry.view(self._gradient) for entry in self.layout.parameters)

    @property
    def releases_gil(self) -> bool:
        """Whether its steps run outside the interpreter's lock, so that threads serve as well as processes."""
        return self.stack is not None

    def load(self, model: Vector, buffers: Vector | None) -> None:
        self.y.copy_(model)
        if self.buffers is not None and buffers is not None:
            self.layout.write_buffers(self.module, buffers)

    def read_buffers(self) -> Vector | None:
        return None if self.buffers is None else self.layout.read_buffers(self.module, self.buffers)

    def rows(self, client: int, work: Work, key: Key) -> torch.Tensor:
        """The batches of a round as a matrix [steps, batch]: pass after pass over the client's rows, each shuffled."""
        own = self.task.data.rows(client)
        stream = batch_stream(own.numel(), work.steps * work.batch_size, key)
        return own[torch.from_numpy(stream)].view(work.steps, work.batch_size).to(self.device)

    def seed(self, key: Key) -> None:
        """Set the generators a model may draw from; a native stack draws nothing."""
        if self.stack is None:
            _seed(key, self.device)

    def descend(self, rows: torch.Tensor | None, descent: Descent) -> torch.Tensor | None:
        """All steps in one native call, or None where there is no such form of them."""
        if self.stack is None or descent.optimizer is not None or rows is None:
            return None
        a, s = descent.correction
        if descent.momentum and descent.velocity is None:
            descent.velocity = torch.zeros_like(self.y)
        return self.stack.train(
            self.y,
            self.inputs.logical,
            self.targets,
            rows,
            lr=descent.lr,
            a=a,
            anchor=descent.anchor,
            s=s,
            weight_decay=descent.weight_decay,
            momentum=descent.momentum,
            velocity=descent.velocity if descent.momentum else None,
            clip=descent.clip,
        )

    def gradient(self, client: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert rows is not None
        if self.stack is not None:
            mean, _ = self.stack.gradient(self.y, self.inputs.logical, self.targets, rows, out=self._gradient)
            return torch.tensor(mean), self._gradients
        with torch.enable_grad():
            loss = self.task.loss(self.module(self.inputs[rows]), self.targets.index_select(0, rows))
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return loss.detach(), gradients

    @torch.no_grad()
    def evaluate(self, vectors: Vectors, start: int, stop: int) -> tuple[float, float | None]:
        """Summed loss and hits over a range of test rows."""
        data = self.task.data
        if self._test is None:
            assert data.test_inputs is not None
            assert data.test_targets is not None
            self._test = (
                Store(data.test_inputs, self.dtype, self.device, self.layout.channels_last),
                _cast(data.test_targets, self.dtype, self.device),
            )
        inputs, targets = self._test
        self.load(vectors[MODEL], vectors.get(BUFFERS))
        if self.stack is not None and self.task.metric is accuracy_hits:
            return self.stack.evaluate(self.y, inputs.logical, targets, start, stop)
        self.module.eval()
        losses, hits = [], []
        for first in range(start, stop, _EVALUATION_BATCH):
            rows = torch.arange(first, min(first + _EVALUATION_BATCH, stop), device=self.device)
            output, target = self.module(inputs[rows]), targets.index_select(0, rows)
            losses.append(float(self.task.loss(output, target)) * len(rows))
            if self.task.metric is not None:
                hits.append(float(self.task.metric(output, target)))
        self.module.train()
        return math.fsum(losses), math.fsum(hits) if self.task.metric is not None else None


def batch_stream(samples: int, length: int, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``length`` positions: permutations of 0..samples-1 one after the other, as many as are needed.

    >>> sorted(batch_stream(3, 6, Key(0))[:3].tolist())
    [0, 1, 2]
    """
    draw = key.numpy()
    passes = [draw.permutation(samples) for _ in range(-(-length // samples))]
    return (passes[0] if len(passes) == 1 else np.concatenate(passes))[:length]


def default_metric(targets: torch.Tensor) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """Hits of the most likely class where targets are class numbers; nothing for other targets."""
    return None if targets.is_floating_point() else accuracy_hits


def accuracy_hits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """How many rows have their target as the largest output; for targets with more axes, a mean over a row's own."""
    found: torch.Tensor = (output.argmax(dim=1) == target).double()
    return found.flatten(1).mean(dim=1).sum() if found.ndim > 1 else found.sum()


def _cast(targets: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (targets.to(dtype) if targets.is_floating_point() else targets).contiguous().to(device)


def _fresh(model: Callable[[], nn.Module], key: Key) -> nn.Module:
    """A new module, its first weights a function of the key alone."""
    with torch.random.fork_rng(devices=[]):
        _seed(key, torch.device("cpu"))
        module = model()
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module


def _seed(key: Key, device: torch.device) -> None:
    """Seed the device's generator and the CPU's. `torch.manual_seed` would also note a traceback for every kind of
    device that is not there, at 0.3 ms and some memory a call."""
    seed = int.from_bytes(key.digest(8), "little") >> 1
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
