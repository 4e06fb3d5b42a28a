"""Whether clients are trained together, several models in one program (`batched_loss`), or one after the other.

The choice counts operations and numbers instead of measuring time: it is a function of the task, the method and the
version of torch, so every run, worker and resume makes the same. The constants are fitted to a dozen models on one
core; ``make bench`` compares its choices with measured times.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.vectors.layout import convert_module
from hansa.local.solvers import BaseSolver
from hansa.pace.composition import participants_of
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch, count_rows, take_rows
from hansa.training.batched_loss import (
    MIN_MODELS,
    BatchedLoss,
    DropoutShape,
    draw_factors,
    record_dropout,
    stack_batches,
    stacked_rows,
    stacked_views,
)
from hansa.training.model_probe import bitwise_equal, model_caller
from hansa.training.module_state import ModuleState

if TYPE_CHECKING:
    from hansa.training.task import Task, TaskLike

log = logging.getLogger("hansa")

MAX_MODELS = 32
_CACHE_BYTES = 16 << 20  # of numbers that the models of a program touch: more gain nothing
_MIN_GAIN = 1.5
_MIN_CLIENTS = 8
_VECTORS = 32  # numbers that torch computes at a time: two vectors of 16
_EXACT = frozenset((
    "_index_put_impl_", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
    "_to_copy", "abs", "add", "add_", "addmm", "amax", "amin", "arange", "baddbmm", "bmm", "cat", "clamp",
    "clamp_min", "clone", "convolution", "convolution_backward", "copy_", "div", "div_", "embedding",
    "embedding_dense_backward", "empty", "empty_like", "eq", "fill", "fill_", "gather", "ge", "gt", "index",
    "index_put", "index_put_", "index_select", "le", "lt", "masked_fill", "maximum", "mean", "minimum", "mm", "mul",
    "mul_", "native_group_norm", "native_layer_norm", "ne", "neg", "new_ones", "new_zeros", "ones", "ones_like",
    "relu", "rsub", "scalar_tensor", "scatter", "scatter_", "scatter_add", "scatter_add_", "select_backward",
    "slice_backward", "sqrt", "stack", "sub", "sub_", "sum", "threshold_backward", "where", "zero_", "zeros",
    "zeros_like",
))  # fmt: skip
"""Operations with the same bits for numbers one by one and in vectors, or whose vectors never cross models."""
_STEP, _TOGETHER = 130.0, 575.0  # microseconds of a step alone and of several in one program, besides:
_OPERATION, _CALL = 4.3, 4.8  # an operation alone, and one of a program, views too
_NUMBER, _FLOP = 2.4e-4, 1.7e-5  # a number read or written, and a floating-point operation of a product

_planned: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""The tasks that `with_client_batching` returned, by task and method."""


@dataclass(frozen=True, slots=True)
class ClientBatching:
    """How clients are trained together.

    Args:
        batch_size: The batch size of the clients that are; those with other batches are trained alone.
        models: The most models in one program.
        multiple: The number of models is a multiple of this.
        dropout: The calls of dropout in a step.
        gain: The predicted ratio of the times one after the other and together.
        composed: Gradients are computed as in `BatchedLoss(composed=True)`.
    """

    batch_size: int
    models: int
    multiple: int = MIN_MODELS
    dropout: tuple[DropoutShape, ...] = ()
    gain: float = 0.0
    composed: bool = False

    def padded(self, clients: int) -> int:
        """Return the number of models for some clients.

        >>> ClientBatching(8, 32, 4).padded(5)
        8
        """
        return -(-clients // self.multiple) * self.multiple

    def __str__(self) -> str:
        return f"up to {self.models} clients in one program (torch.func.vmap), predicted {self.gain:.1f} times as fast"


class NotBatchable(Exception):
    """Clients cannot, or need not, be trained together; the message is the reason."""


def with_client_batching(
    task: TaskLike, algorithm: Algorithm, dtype: torch.dtype, device: torch.device, recorded: bool | None = None
) -> TaskLike:
    """Return the task as the engine of a run needs it, with ``client_batching`` set if clients are trained together.

    Args:
        task: The task.
        algorithm: The method of the run, bound to the task.
        dtype: The dtype of the run.
        device: The device on which clients train.
        recorded: What the run did before it was resumed; None for a new run.
    """
    requested = getattr(task, "batch_clients", False) if recorded is None else recorded
    if requested is False or not hasattr(task, "client_batching"):
        return task
    task = cast("Task", task)
    if requested is None and task.network is not None:
        return task
    known = _planned.setdefault(task, {})
    place = repr(algorithm.local), repr(algorithm.sampler), repr(algorithm.pace), requested, dtype, device
    if place not in known:
        try:
            planned = copy.copy(task)
            planned.client_batching = choose_client_batching(task, algorithm, dtype, device, required=bool(requested))
            log.info("%s: clients are trained together: %s", task.name, planned.client_batching)
            known[place] = planned
        except NotBatchable as reason:
            if requested:
                raise HansaError(
                    f"Task(batch_clients=True): {task.name} with {algorithm.name}: clients cannot be trained together: "
                    f"{reason}. Omit batch_clients to train them one after the other."
                ) from reason
            log.info("%s: clients are trained one after the other: %s", task.name, reason)
            known[place] = None
    planned_task = known[place]
    return task if planned_task is None else planned_task


def choose_client_batching(
    task: Task, algorithm: Algorithm, dtype: torch.dtype, device: torch.device, *, required: bool = False
) -> ClientBatching:
    """Return how the clients of a method are trained together; raise `NotBatchable` with the reason if they are not.

    Args:
        task: The task.
        algorithm: The method.
        dtype: The dtype of the run.
        device: The device on which clients train.
        required: Leave out the conditions that only concern speed.
    """
    _check(task, algorithm)
    samples = task.population.samples
    batch_size = _common_batch_size(algorithm.local.batch_size, samples, required)
    expected = _expected_clients(algorithm, samples, batch_size)
    if not required:
        if device.type != "cpu":
            raise NotBatchable(f"what is faster on {device.type} was not measured. batch_clients=True does it")
        if expected is None or expected < _MIN_CLIENTS:
            many = "an unknown number of" if expected is None else str(expected)
            raise NotBatchable(f"{many} clients with batches of {batch_size} take part in a round")
    trial = _Trial(task, dtype, device, batch_size)
    fitting = min(MAX_MODELS, _CACHE_BYTES // max(1, trial.bytes_alone))
    clients = max(1, fitting if expected is None else min(fitting, expected))
    multiple = trial.find_multiple()
    models = -(-clients // multiple) * multiple
    gain = trial.predict(models) * clients / models
    if gain < _MIN_GAIN and not required:
        raise NotBatchable(f"{clients} in one program are predicted to be {gain:.1f} times as fast")
    trial.compare({multiple, 2 * multiple, 3 * multiple, models})
    return ClientBatching(batch_size, models, multiple, tuple(trial.dropout), gain, trial.batched.composed)


def _check(task: Task, algorithm: Algorithm) -> None:
    """Raise `NotBatchable` for what needs one client after the other."""
    phase = algorithm.local
    if phase.mixing is not None:
        raise NotBatchable("its clients gossip between the steps")
    if with_defaults(phase.solver, BaseSolver).ascent_offset is not None:
        raise NotBatchable(f"{phase.solver!r} takes two gradients a step")
    if phase.private_blocks is not None:
        raise NotBatchable("its clients keep blocks of the model")
    if task.network is not None:
        raise NotBatchable("native code trains it")
    if task.compile or task.precision.reason is not None:
        raise NotBatchable("it is compiled" if task.compile else f"it uses {task.precision.reason}")
    if task.layout.buffer_dim:
        raise NotBatchable("its model has buffers that training changes (BatchNorm?)")
    if hasattr(task.data, "fetch"):
        raise NotBatchable("its data is loaded batch by batch")
    if task.augment.has_user_code:
        raise NotBatchable("a user-defined augmentation may draw random numbers")


def _common_batch_size(batch_size: int | None, samples: Sequence[int], required: bool) -> int:
    """Return the batch size of at least half of the clients; of the most clients if ``required``."""
    if batch_size is not None:
        if not required and 2 * sum(each >= batch_size for each in samples) < len(samples):
            raise NotBatchable(f"most clients have fewer than {batch_size} samples, the batch size")
        return batch_size
    sizes = Counter(samples)
    size = max(sizes, key=lambda each: (sizes[each], each))
    if not required and 2 * sizes[size] < len(samples):
        raise NotBatchable("batches are all samples of a client, and clients have different numbers of them")
    return size


def _expected_clients(algorithm: Algorithm, samples: Sequence[int], batch_size: int) -> int | None:
    """Return about how many clients with that batch size a round has; None if that is not known in advance."""
    count = participants_of(algorithm.sampler, len(samples))
    if algorithm.pace.asynchronous:
        count = size if isinstance(size := getattr(algorithm.pace, "size", None), int) else None
    share = sum(each >= batch_size for each in samples) / len(samples)
    return None if count is None else int(count * share + 0.5)


class _Trial:
    """Steps of a few models on example rows, alone and together."""

    def __init__(self, task: Task, dtype: torch.dtype, device: torch.device, batch_size: int) -> None:
        self.task, self.dtype, self.device, self.batch_size = task, dtype, device, batch_size
        self.module = convert_module(task.example_model(), dtype, device, task.kept_weights(dtype))
        self.start = task.layout.pack(self.module, dtype)[0].to(device)
        self.y = self.start.clone()
        self.parameters: list[torch.Tensor] = [*task.layout.bind(self.module, self.y)]
        self.module.train()
        if ModuleState(self.module, ()).generators:
            raise NotBatchable("its model has a random generator of its own")
        self.call = model_caller(self.module, task.example[0])
        self.batched = BatchedLoss(self.module, self.call, task.loss, task.layout)
        with random_state.preserve_rng(), _one_thread():
            self.dropout = record_dropout(lambda: self._alone(0))
            self._counted = _Counter()
            self._alone(0, self._counted)
        self.bytes_alone = self._counted.numbers * self.y.element_size()

    def find_multiple(self) -> int:
        """Return the smallest multiple of models of which no tensor leaves a rest that is computed one by one."""
        with random_state.preserve_rng(), _one_thread():
            try:
                self._together([*range(MIN_MODELS)], counter := _Counter())
            except NotBatchable:  # an operation without a form for several models
                self.batched = BatchedLoss(self.module, self.call, self.task.loss, self.task.layout, composed=True)
                self._together([*range(MIN_MODELS)], counter := _Counter())
        sizes = {size // MIN_MODELS for size in counter.inexact_sizes if size % MIN_MODELS == 0}
        multiple = MIN_MODELS
        while any(multiple * size % _VECTORS for size in sizes):
            multiple *= 2
        return multiple

    def predict(self, models: int) -> float:
        """Return the predicted ratio of the times of steps alone and together."""
        alone = _STEP + self._counted.microseconds(_OPERATION, 0.0)
        together = _Counter()
        with random_state.preserve_rng(), _one_thread():
            self._together([*range(models)], together)
        return models * alone / (_TOGETHER + together.microseconds(_CALL, _CALL))

    def compare(self, counts: Iterable[int]) -> None:
        """Raise `NotBatchable` if results together differ from those alone, or depend on the other models."""
        with random_state.preserve_rng(), _one_thread():
            alone = [self._alone(model) for model in range(3)]
            before = random_state.rng_state(self.device)
            together = [self._together([place % 3 for place in range(count)]) for count in sorted(counts)]
            if random_state.rng_changed(before, self.device):
                raise NotBatchable("its model draws random numbers other than dropout")
        for model, (loss, flat) in enumerate(alone):
            together_loss, gradient = together[-1][model]
            tolerance = 1e-4 if self.dtype == torch.float32 else 1e-9
            if not abs(together_loss - loss) <= tolerance * (1 + abs(loss)):
                raise NotBatchable(f"the loss together is {together_loss:.6g}, alone {loss:.6g}")
            distance = float((gradient - flat).double().norm() / flat.double().norm().clamp(min=1e-30))
            if not distance <= tolerance:
                raise NotBatchable(f"the gradient together differs from that alone by {distance:.2g}")
        for results in together:
            for place, (_, gradient) in enumerate(results):
                if not bitwise_equal(gradient, together[-1][place % 3][1]):
                    raise NotBatchable("the last bits of a gradient depend on the clients beside it")

    def _vector(self, model: int) -> torch.Tensor:
        """Return a model near the initial one."""
        noise = torch.from_numpy(Key(0).child("batched", model).numpy().standard_normal(self.start.numel()))
        return self.start + 0.02 * noise.to(self.start)

    def _batch(self, model: int) -> Batch:
        """Return example rows as a batch of the run's size, for each model others."""
        inputs, targets = self.task.example
        rows = (torch.arange(self.batch_size) + 5 * model) % count_rows(targets)
        batch = Batch(take_rows(inputs, rows), take_rows(targets, rows))
        return convert_batch(batch, self.dtype, self.device, self.task.layout.channels_last)

    def _alone(self, model: int, counter: AbstractContextManager[Any] | None = None) -> tuple[float, torch.Tensor]:
        """Return loss and flat gradient of a model by itself, computed inside the context ``counter``."""
        inputs, targets = self._batch(model)
        self.y.copy_(self._vector(model))
        random_state.seed_all(Key(0).child("noise", model), self.device)
        with torch.enable_grad(), counter or nullcontext():
            loss = self.task.loss(self.call(inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        flat = torch.empty_like(self.y)
        for entry, gradient in zip(self.task.layout.parameters, gradients, strict=True):
            entry.view(flat).copy_(gradient)
        return float(loss.detach()), flat

    def _together(
        self, models: Sequence[int], counter: AbstractContextManager[Any] | None = None
    ) -> list[tuple[float, torch.Tensor]]:
        """Return loss and flat gradient of each model, computed in one program inside the context ``counter``."""
        rows = stacked_rows(len(models), self.y.numel(), self.y)
        for row, model in zip(rows, models, strict=True):
            row[: self.y.numel()] = self._vector(model)
        batch = stack_batches([self._batch(model) for model in models])
        keys = [Key(0).child("noise", model) for model in models]
        factors = draw_factors(self.dropout, keys, torch.Generator(), self.device)
        try:
            with counter or nullcontext(), _without_fallback():
                losses, gradients = self.batched.gradients(stacked_views(self.task.layout, rows), batch, factors)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise NotBatchable(f"torch.func.vmap cannot take it: {reason}") from error
        flat = torch.zeros_like(rows)
        for view, gradient in zip(stacked_views(self.task.layout, flat), gradients, strict=True):
            view.copy_(gradient)
        return [(float(loss), row[: self.y.numel()]) for loss, row in zip(losses, flat, strict=True)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one intra-op thread, as workers do: their number changes the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _without_fallback() -> Iterator[None]:
    """Make operations that torch can only compute model by model raise: they gain nothing."""
    functions: Any = torch._C._functorch
    enabled = functions._is_vmap_fallback_enabled()
    functions._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functions._set_vmap_fallback_enabled(enabled)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, views, numbers read and written, and floating-point operations of products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.views = self.numbers = self.flops = 0
        self.inexact_sizes: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes a second

    def microseconds(self, operation: float, view: float) -> float:
        """Return the predicted time; an operation or a view alone takes so many microseconds."""
        return operation * self.operations + view * self.views + _NUMBER * self.numbers + _FLOP * self.flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            self.views += 1
            return out
        self.operations += 1
        leaves = trees.tree_leaves((args, kwargs, out))
        self.numbers += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        name = func.overloadpacket.__name__
        self.flops += _flops(name, args, out)
        if name not in _EXACT:
            self.inexact_sizes |= {leaf.numel() for leaf in trees.tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out


def _flops(name: str, args: Sequence[Any], out: Any) -> int:
    """Return the floating-point operations of a matrix product or a convolution, 0 for others."""
    if name in ("mm", "bmm"):
        return int(2 * args[0].numel() * args[1].shape[-1])
    if name in ("addmm", "baddbmm"):
        return int(2 * args[1].numel() * args[2].shape[-1])
    if name == "convolution":
        return int(2 * out.numel() * args[1][0].numel())
    if name == "convolution_backward":
        return int(4 * args[0].numel() * args[2][0].numel())
    return 0
