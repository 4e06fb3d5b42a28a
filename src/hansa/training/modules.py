"""A task's module: the properties found by a step on example rows, and the state that is not sent.

The layout and dtypes, the buffers that training changes, and the output size are determined once, when the task is
created, so that all workers agree.

Before each client a module is reset to its state after construction, with the parameters and buffers that the client
received: other buffers, attributes, containers, plain objects and hooks are restored in place, and generators are
seeded from the client's key. A module whose results still depend on earlier clients is refused (`check_repeatable`).

Frozen weights are parameters with ``requires_grad=False`` and buffers that training does not change. They keep a narrow
dtype, and the trainers of a process and device share one copy: so a base model in bfloat16 with a trained float32 part
(LoRA, a new head) uses as much memory as in PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import Parameter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hansa.core import trees
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.object_state import GENERATOR_TYPES, ObjectState, bitwise_equal
from hansa.core.types import BUFFERS, MODEL
from hansa.core.vectors.layout import Layout, convert_module
from hansa.local.trainer import ClientJobs, LocalStep, train_by_steps
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch, count_rows, describe_shapes, has_rows, spread_rows
from hansa.training.losses import LossFunction

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

ModelLoss: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
CPU = torch.device("cpu")
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16}
"""The dtypes of ``Task(autocast=...)``."""
SHARED_BYTES = 1 << 16
"""Constant buffers of at least this size are shared by trainers; smaller ones are copied for each."""
_ROWS = 12
_MAX_COUNT = 1 << 24  # float32 represents all smaller integers


def fresh(model: Callable[..., nn.Module], key: Key) -> nn.Module:
    """Return a new module whose initial weights depend only on the key, not on other threads.

    An unset parameter ``seed`` of the function receives the seed of the run.
    """
    signature, arguments = inspect.signature(model), {}
    if "seed" in signature.parameters and not (isinstance(model, functools.partial) and "seed" in model.keywords):
        arguments = {"seed": key.seed}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise HansaError(
            f"Task(model={name}): cannot be called without arguments: {error}. Set them with "
            f"functools.partial({name}, ...) or lambda: {name}(...)."
        ) from error
    with random_state.LOCK, random_state.preserve_rng():
        random_state.seed_all(key, CPU)
        module = model(**arguments)
    if not isinstance(module, nn.Module):
        raise HansaError(f"Task(model): the function gave {type(module).__name__}, expected an nn.Module.")
    return module


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state dict. Other extra state is not saved: it stays as after construction.

    >>> list(saved_tensors(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def model_caller(module: nn.Module, inputs: Any) -> Callable[[Any], Any]:
    """Return a function that calls the module with a batch like ``inputs``.

    A dict is passed by keyword, ``module(**batch)``, if ``forward()`` has parameters of all its names; a tuple by
    position, ``module(*batch)``, if ``forward()`` has as many. Otherwise the batch is one argument.

    >>> class Both(nn.Module):
    ...     def forward(self, a, b=0): return a + b
    >>> model_caller(Both(), {"a": 1, "b": 2})({"a": 1, "b": 2}), model_caller(Both(), (1, 2))((3, 4))
    (3, 7)
    """
    parameters: dict[str, Parameter] = {}
    with suppress(TypeError, ValueError):  # a forward() without a Python signature
        parameters |= inspect.signature(module.forward).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if isinstance(inputs, Mapping):
        named = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        if set(inputs) <= {name for name, parameter in parameters.items() if parameter.kind in named}:
            return lambda batch: module(**batch)
    elif isinstance(inputs, (tuple, list)):
        positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        if len(inputs) <= sum(kind in positional for kind in kinds) or Parameter.VAR_POSITIONAL in kinds:
            return lambda batch: module(*batch)
    return module


def autocast_caller(
    call: Callable[[Any], Any], autocast: str | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Any], Any]:
    """Return a function that calls a model under ``torch.autocast`` and returns its outputs in the dtype of the run.

    So the loss is computed in float32. Parameters are float32, and autograd converts their gradients. Torch's cache of
    converted weights is off: if another thread cleared it between two uses of a weight, their gradients would be added
    in float32 instead of the lower precision.

    >>> autocast_caller(torch.nn.Linear(2, 1), "bfloat16", torch.float32, torch.device("cpu"))(torch.ones(1, 2)).dtype
    torch.float32
    """
    if autocast is None:
        return call

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def call_under_autocast(batch: Any) -> Any:
        with torch.autocast(device.type, AUTOCAST_DTYPES[autocast], cache_enabled=False):
            output = call(batch)
        return trees.tree_map(convert, output)

    return call_under_autocast


class BoundModel:
    """A module, converted in place, whose parameters are views of one flat vector ``y``. ``keep`` names the frozen
    weights that keep their dtype."""

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        inputs: Any,
        *,
        keep: Collection[str],
        autocast: str | None = None,
    ) -> None:
        self.module = convert_module(module, dtype, device, keep)
        self.loss, self.layout, self.dtype, self.device = loss, layout, dtype, device
        self.y = layout.pack(self.module, dtype)[0].to(device)
        self.parameters: list[torch.Tensor] = [*layout.bind(self.module, self.y)]
        self.call_model = call = autocast_caller(model_caller(self.module, inputs), autocast, dtype, device)
        self.loss_of: ModelLoss = lambda inputs, targets: loss(call(inputs), targets)

    def gradients_of(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradient of each parameter."""
        return torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)


class Trial(BoundModel):
    """A separate model for eager gradients of example rows."""

    def gradient(self, batch: Batch, key: Key, value_of: ModelLoss | None = None) -> tuple[float, torch.Tensor]:
        """Return the loss of a batch and its gradient as a vector. The key seeds the model's random numbers;
        ``value_of`` replaces the function that computes the loss."""
        random_state.seed_all(key, self.device)
        with torch.enable_grad():
            value = (self.value if value_of is None else value_of)(*batch)
            gradients = self.gradients_of(value)
        flat = torch.empty_like(self.y)
        for entry, gradient in zip(self.layout.parameters, gradients, strict=True):
            entry.view(flat).copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return float(value.detach()), flat

    def value(self, x: Any, target: Any) -> torch.Tensor:
        """Return the loss of a batch; raise unless it is one number that depends on the parameters."""
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        shapes = f"inputs {describe_shapes(x)}"
        with naming(f"{type(self.module).__name__} cannot take a batch of the data, {shapes}"):
            output = self.call_model(x)
        shapes = f"outputs {describe_shapes(output)} and targets {describe_shapes(target)} (of {shapes})"
        with naming(f"the loss {name} cannot take {shapes}"):
            value: Any = self.loss(output, target)
        if not isinstance(value, torch.Tensor) or value.ndim or value.is_complex():
            raise HansaError(
                f"Task(loss={name}): returned {describe_shapes(value)}: expected one real number for a batch as a "
                "tensor, such as the mean over its rows."
            )
        if not value.requires_grad:
            raise HansaError(
                f"Task(loss={name}): has no gradient: it does not depend on the parameters, or was computed under "
                "no_grad(), or from detach() or item()."
            )
        known = set(map(id, self.parameters))
        if foreign := [list(leaf.shape) for leaf in _parameters_behind(value) if id(leaf) not in known]:
            raise HansaError(
                f"{type(self.module).__name__} and the loss {name} use parameters of shape {foreign[0]} that are not "
                "the model's, so they would not be trained. Register them in the model, change those that forward() "
                "replaces in place, and return those of a loss with its output; or freeze them: requires_grad_(False)."
            )
        return value


def _parameters_behind(value: torch.Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that a value was computed from and that require gradients."""
    pending, seen = [value.grad_fn], set[Any]()
    while pending:
        if (node := pending.pop()) is not None and node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf
            pending.extend(function for function, _ in node.next_functions)


@contextmanager
def naming(prefix: str) -> Iterator[None]:
    """Prefix the error of a user's function."""
    try:
        yield
    except HansaError:
        raise
    except Exception as error:
        raise HansaError(f"{prefix}: {type(error).__name__}: {error}") from error


class ModelFacts(NamedTuple):
    """The properties of a model that a step on a few rows shows."""

    layout: Layout
    """The positions of its parameters, and of the buffers that are sent, in the vectors."""
    dtype: torch.dtype
    """The dtype of the vectors: float64 if a parameter is, else float32."""
    constant: frozenset[str]
    """Names of averaged buffers that training does not change and that are equal for every seed."""
    frozen: dict[str, torch.Tensor]
    """The weights that trainers share: frozen parameters and large constant buffers."""
    output: Any
    """The output for the rows; None if the model fails in evaluation mode, which evaluation reports."""
    target: Any
    """The targets of the rows."""
    output_bytes: int
    """The bytes of a row of the output."""


def describe_model(
    name: str, model: Callable[..., nn.Module], loss: LossFunction, batch: Batch, autocast: str | None
) -> ModelFacts:
    """Return the properties of a model from a step on a few rows; raise if model or loss cannot take them.

    The first layout with which a step succeeds is chosen. Channels-last images are faster, but ``x.view(...)`` after a
    convolution requires torch's default order, in which group normalisation is up to four times as fast. Frozen weights
    in bfloat16 or float16 keep their dtype if the model converts its inputs.
    """
    module = fresh(model, Key(0))
    default = Layout.of(module, channels_last=False)
    layouts = [default]
    if isinstance(batch.inputs, torch.Tensor) and isinstance(batch.targets, torch.Tensor):
        images = batch.inputs.ndim == 4 or any(len(entry.shape) >= 4 for entry in default.parameters)
        if not (images and any(isinstance(part, nn.GroupNorm) for part in module.modules())):
            layouts = [Layout.of(module), default]
    frozen = (item for item in module.named_parameters() if not item[1].requires_grad)
    reals = ((name, tensor) for name, tensor in (*frozen, *module.named_buffers()) if tensor.is_floating_point())
    narrow = frozenset(name for name, tensor in reals if tensor.dtype.itemsize < torch.float32.itemsize)
    if narrow:
        layouts = [option for layout in layouts for option in (replace(layout, own_dtypes=narrow), layout)]
    if has_rows(batch, count_rows(batch.targets)):  # batches of a collate function may have no rows
        batch = spread_rows(batch, _ROWS)
    *preferred, fallback = layouts
    for layout in preferred:
        try:
            return _take_step(model, module, loss, layout, batch, autocast)
        except Exception as error:
            form = f"images and weights channels-{'last' if layout.channels_last else 'first'}"
            if layout.own_dtypes:
                form += " and frozen weights in fewer bits (convert their inputs in forward(): x.to(weight.dtype))"
            log.info("%s: takes no step with %s: %s", name, form, (str(error).strip() or repr(error)).splitlines()[0])
    return _take_step(model, module, loss, fallback, batch, autocast)


def _take_step(
    model: Callable[..., nn.Module],
    module: nn.Module,
    loss: LossFunction,
    layout: Layout,
    batch: Batch,
    autocast: str | None,
) -> ModelFacts:
    """Return the properties of a model from a step with a layout; ``module`` is the model before any step."""
    dtype = torch.float64 if any(entry.dtype == torch.float64 for entry in layout.parameters) else torch.float32
    batch = convert_batch(batch, dtype, CPU, layout.channels_last)
    with random_state.preserve_rng():
        mixed = autocast if layout.own_dtypes else None  # narrow weights may need it
        arguments = fresh(model, Key(0)), loss, layout, dtype, CPU, batch.inputs
        trial = Trial(*arguments, keep=layout.own_dtypes, autocast=mixed)
        initial = {name: buffer.clone() for name, buffer in trial.module.named_buffers()}
        trial.gradient(batch, Key(0))
        buffers = {name: buffer.detach().clone() for name, buffer in trial.module.named_buffers()}
        changed = {name: buffer for name, buffer in buffers.items() if not bitwise_equal(buffer, initial.get(name))}
        trial.module.eval()
        output = None
        with suppress(Exception), torch.no_grad():  # evaluation will report it
            output = trial.call_model(batch.inputs)
    persistent, other = set(module.state_dict(keep_vars=True)), dict(fresh(model, Key(1)).named_buffers())
    saved = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    layout = layout.sending(module, _counters(module, saved, changed))
    same = {n: b for n, b in saved.items() if n not in changed and bitwise_equal(b, other.get(n))}  # for any seed
    constant = frozenset(same.keys() & {entry.name for entry in layout.buffers})
    frozen = {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    frozen |= {name: buffer.detach() for name, buffer in same.items() if buffer.nbytes >= SHARED_BYTES}
    size = sum(leaf.nbytes for leaf in trees.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    facts = layout.without(constant), dtype, constant, frozen, output, batch.targets
    return ModelFacts(*facts, -(-size // max(1, count_rows(batch.targets))))


def _counters(module: nn.Module, saved: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the integer and boolean buffers that are sent: those of the ``saved`` that a training step only increases,
    or only decreases, such as counters and flags of the first batch. Their average is rounded to the nearest integer.

    BatchNorm's count of batches, which has no effect unless its momentum is None, and numbers from 2^24, which float32
    does not represent, are not sent. All other integer buffers keep their initial value.
    """
    unused = {
        f"{prefix}.num_batches_tracked".lstrip(".")
        for prefix, submodule in module.named_modules()
        if isinstance(submodule, _NormBase) and submodule.momentum is not None
    }
    counters = set()
    for name, buffer in saved.items():
        integral = not buffer.is_floating_point() and not buffer.is_complex()
        if not integral or name not in changed or name in unused:
            continue
        value = changed[name].to(torch.int64)
        if value.shape != buffer.shape or int(value.abs().max()) >= _MAX_COUNT:
            continue
        if bool((value >= buffer).all()) or bool((value <= buffer).all()):
            counters.add(name)
    return counters


class ModuleState:
    """A snapshot of a module's state, except its parameters and the buffers that are ``sent``.

    Weights in ``frozen`` are replaced by the shared ones, or by those of ``like``, the state of a trainer with the same
    dtype and device. Training must not change them, nor the buffers in ``constant``: of each, the dict of its module
    that contains it, its version, and a copy of a small one are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        sent: Collection[str] = (),
        constant: Collection[str] = (),
        frozen: Mapping[str, torch.Tensor] = MappingProxyType({}),
        like: ModuleState | None = None,
    ) -> None:
        self._constants: dict[str, tuple[dict[str, Any], torch.Tensor, int, torch.Tensor | None]] = {}
        for prefix, submodule in module.named_modules():
            for owner in (submodule._parameters, submodule._buffers):
                for key, tensor in owner.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is None or not (name in frozen or name in constant):
                        continue
                    if name in frozen:
                        common = (frozen[name] if like is None else like._constants[name][1]).detach()
                        if common.dtype == tensor.dtype and common.device == tensor.device:
                            if owner is submodule._parameters:
                                tensor.data = common
                            else:
                                owner[key] = tensor = common
                    saved = tensor.detach().clone() if tensor.nbytes < SHARED_BYTES else None
                    self._constants[name] = owner, tensor, tensor._version, saved
        large = {name for name, (_, _, _, saved) in self._constants.items() if saved is None}
        excluded = [buffer for name, buffer in module.named_buffers() if name in {*sent, *large}]
        self._state = ObjectState(module, map(id, [*module.parameters(), *excluded]))
        attributes = [value for submodule in module.modules() for value in vars(submodule).values()]
        direct = [value for value in attributes if isinstance(value, GENERATOR_TYPES)]
        ids = set(map(id, direct))
        self.generators = [*direct, *(generator for generator in self._state.generators if id(generator) not in ids)]
        self.unrestorable = self._state.unrestorable

    def restore(self) -> None:
        """Restore the snapshot."""
        self._state.restore()

    def check(self) -> None:
        """Raise if training has changed a weight that all clients share and that is neither sent nor restored."""
        for name, (owner, tensor, version, saved) in self._constants.items():
            current = owner.get(name.rpartition(".")[2])
            same = current is tensor or bitwise_equal(tensor, current)
            if not same or not (tensor._version == version if saved is None else bitwise_equal(saved, current)):
                raise HansaError(
                    f"{name} was left unchanged by the first batch, or is frozen, and a later one changed it: "
                    "it is not averaged, and workers share it. Make it a buffer that every training step writes to, or "
                    "one with persistent=False if it belongs to the client."
                )

    def seed(self, key: Key) -> None:
        """Seed the generators that belong to the module."""
        for position, generator in enumerate(self.generators):
            random_state.seed_generator(generator, key.child("own", position))


def check_repeatable(task: Task, used: ModuleTrainer, unused: ModuleTrainer) -> None:
    """Raise if a client's result depends on the clients trained before it.

    Client B is trained after client A on one trainer, and alone on another, from the same vectors with the same key.
    Both results must have equal bits. Otherwise results depend on the number of workers and on resumes.
    """
    samples, key = task.population.samples, Key(0).child("purity")
    vectors = task.start(Key(0), used.dtype)
    x, buffers = vectors[MODEL], None if BUFFERS not in vectors else [vectors[BUFFERS]]

    def train(trainer: ModuleTrainer, client: int) -> tuple[torch.Tensor, ...]:
        work, options = Work(1, min(4, samples[client])), {"buffers": buffers, "keep_models": True}
        results = train_by_steps(trainer, ClientJobs.of(x, client, work, LocalStep(0.01, x), key, **options))
        return (*results.models, torch.tensor(results.losses), *results.buffers)

    try:
        with random_state.preserve_rng():
            train(used, 0)
            second, single = (train(trainer, len(samples) - 1) for trainer in (used, unused))
    except Exception as error:  # the first round reports it with more context
        log.debug("%s: not compared on two trainers: %s", task.name, error)
        return
    if all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(second, single, strict=True)):
        return
    parameters = [(entry.name, entry.view(second[0]), entry.view(single[0])) for entry in task.layout.parameters]
    different = [name for name, a, b in parameters if not torch.equal(a, b)]
    names = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "") if different else "losses or buffers"
    places = ", ".join(used.module_state.unrestorable[:5]) or "a global object"
    raise HansaError(
        f"{task.name}: a client's result depends on who trained before it (its {names} differ): the model has state or "
        f"draws that cannot be restored, perhaps in {places}. Results would depend on the number of workers and on "
        "resumes. Keep such state in buffers or attributes of the module, and draw from torch's, NumPy's or Python's "
        "generators."
    )
