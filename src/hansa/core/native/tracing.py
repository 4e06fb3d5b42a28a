"""Tracing: recognise modules that the native kernels can train, however they are written.

``forward()`` and the loss run on a small batch while every torch call is traced. Equivalent layers, functions and
tensor methods are treated alike. Stages on images or an embedding of tokens come first, then those on rows. What is
not made of stages with mean cross-entropy is refused, and so is what native code would not do: hooks, buffers, frozen
weights, side effects, and a control flow that depends on the batch.
"""

from __future__ import annotations

import dis
import inspect
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, resolve_name

from hansa.core.native import abi
from hansa.core.native.network import DropoutKind, LayerStage, PoolWindow
from hansa.core.object_state import ObjectState

__all__ = ["NotEligible", "stages_of"]

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
Rule: TypeAlias = Callable[[Any, str, Tensor, Any, Any], None]
SAME = ("contiguous", "float", "long", "to", "clone")
RESHAPES = ("view", "reshape", "flatten", "unsqueeze", "squeeze")
DROPOUTS = ("dropout", "dropout2d", "feature_dropout")


class NotEligible(Exception):
    """The reason why a module has no native form."""


def parameter_offsets(module: nn.Module) -> dict[int, tuple[Tensor, int]]:
    """Return each parameter with its offset in the flat vector, keyed by ``id``."""
    if any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        raise NotEligible("there are hooks for all modules")
    for part in module.modules():
        if any(getattr(part, name, None) for name in _HOOKS):
            raise NotEligible(f"{type(part).__name__} has a hook")
    if any(True for _ in module.buffers()):
        raise NotEligible("it has buffers")
    places: dict[int, tuple[Tensor, int]] = {}
    offset = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise NotEligible(f"{name} is frozen")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise NotEligible(f"{name} is {parameter.dtype} on {parameter.device}")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotEligible(f"{name} has a hook")
        places[id(parameter)] = (parameter, offset)
        offset += parameter.numel()
    return places


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@contextmanager
def check_pure(module: nn.Module) -> Iterator[None]:
    """Refuse a forward() that writes to its module, to objects that this holds, or to globals, or that draws random
    numbers: native code would not do so."""
    globals_before = referenced_globals(module)
    parameters = [id(parameter) for parameter in module.parameters()]
    state, outside = ObjectState(module, parameters), ObjectState(list(globals_before.values()), parameters)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - it is only looked at
    yield
    for path in state.changes():
        raise NotEligible(f"its forward() writes to {type(module).__name__}.{path}")
    after = referenced_globals(module)
    for name, value in globals_before.items():
        if after.get(name) is not value:
            raise NotEligible(f"its forward() writes to the global {name}")
    if any(True for _ in outside.changes()):
        raise NotEligible("its forward() writes to an object that is a global")
    same = torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    numbers, now = drawn[2], np.random.get_state()  # noqa: NPY002
    if not same or any(not np.array_equal(a, b) for a, b in zip(numbers, now, strict=True)):
        raise NotEligible("its forward() draws random numbers")


def referenced_globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals that the methods of a module's own classes name."""
    found: dict[str, Any] = {}
    for part in module.modules():
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            for method in vars(kind).values():
                if isinstance(function := inspect.unwrap(method) if callable(method) else method, types.FunctionType):
                    names = _names(function.__code__)
                    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    return found


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code refers to, those of inner functions too."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def given_arguments(args: Any, kwargs: Any, **defaults: Any) -> list[Any]:
    """Return the arguments of a call after the first, positional or by keyword."""
    unknown = set(kwargs) - set(defaults)
    if unknown or len(args) > len(defaults):
        raise NotEligible(f"a call with {', '.join(sorted(unknown)) or 'more arguments'}")
    return list({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values())


def activation_of(name: str, args: Any, kwargs: Any) -> tuple[int, float]:
    """Return the kind of an activation and its slope or scale."""
    word = name.rpartition(".")[2].removesuffix("_")
    if word == "leaky_relu":
        return abi.LEAKY_RELU, float(given_arguments(args, kwargs, negative_slope=0.01, inplace=False)[0])
    if word == "elu":
        return abi.ELU, float(given_arguments(args, kwargs, alpha=1.0, inplace=False)[0])
    if word == "gelu":
        form = given_arguments(args, kwargs, approximate="none")[0]
        return (abi.GELU_TANH if form == "tanh" else abi.GELU), 0.0
    given_arguments(args, kwargs, inplace=False)
    return {"relu": abi.RELU, "sigmoid": abi.SIGMOID, "tanh": abi.TANH, "silu": abi.SILU}[word], 0.0


def dropout_of(args: Any, kwargs: Any) -> list[Any]:
    return given_arguments(args, kwargs, p=0.5, training=True, inplace=False)


def pair_of(value: Any) -> tuple[int, int]:
    """Return a pair from one number or two."""
    if isinstance(value, int):
        return value, value
    sides = tuple(value)
    return (sides[0], sides[-1])


def equal_pair(value: Any) -> tuple[int, ...]:
    """Return the pair if both sides are equal, otherwise (); also () for a string."""
    if isinstance(value, str):
        return ()
    sides = pair_of(value)
    return sides if sides[0] == sides[1] else ()


class _Batch(int):
    """The batch size, or a multiple of it: it may be used in shapes, but no control flow may depend on it."""

    def _refuse(self, *_: object) -> Any:
        raise NotEligible("its forward() looks at the size of the batch")

    def _plain(self) -> int:
        _check_branches(sys._getframe(1))
        return int.__add__(self, 0)

    def _scaled(self, other: int) -> _Batch:
        return _Batch(int.__mul__(self, other))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mod__ = __floordiv__ = __truediv__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = __float__ = _refuse
    __int__ = _plain
    __mul__ = __rmul__ = _scaled
    __hash__ = int.__hash__


def _check_branches(frame: Any) -> None:
    """Refuse a function that has the size of the batch as a plain number and branches, perhaps on it."""
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch._tensor", "torch.overrides"):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        return
    jumps = ("POP_JUMP", "COMPARE", "FOR_ITER", "JUMP_IF")
    if any(each.opname.startswith(jumps) for each in dis.get_instructions(frame.f_code)):
        raise NotEligible("its forward() may branch on the size of the batch")


@dataclass(frozen=True, slots=True)
class Value:
    """A traced tensor, which is kept so that its ``id`` stays its own: the output of a stage, or the input (-1), in
    some shape. ``parts`` counts the ReLU, pool and dropout that the stage had when it gave this."""

    tensor: Tensor
    stage: int
    shape: tuple[int, ...]
    parts: int = 0
    ended: bool = False  # in log_softmax


class CallTrace(TorchFunctionMode):
    """Traces the tensors that pass from layer to layer. A subclass says which stages the calls are."""

    def __init__(self, places: dict[int, tuple[Tensor, int]], input_shape: tuple[int, ...], planar: bool) -> None:
        super().__init__()
        self.places, self.input_shape, self.planar = places, input_shape, planar
        self.stages: list[LayerStage] = []
        self.parts: Counter[int] = Counter()  # by stage
        self.used: set[int] = set()
        self.values: dict[int, Value] = {}
        self.target, self.done = torch.empty(0), False
        # The current call: what it takes, and the stage and shape of its result.
        self.value = Value(self.target, -1, input_shape)
        self.now, self.at, self.shape, self.ended = self.target, -1, input_shape, False

    def run(self, module: nn.Module, loss: Loss, batch: int, tokens: bool) -> tuple[LayerStage, ...]:
        inputs = torch.zeros(batch, *self.input_shape, dtype=torch.int64 if tokens else torch.float32)
        self.target = torch.zeros(batch, dtype=torch.int64)
        self.values[id(inputs)] = Value(inputs, -1, self.input_shape)
        try:
            with torch.enable_grad(), self:
                result = loss(module(inputs), self.target)
        except NotEligible:
            raise
        except Exception as error:
            raise NotEligible(f"its forward() fails on a small batch: {error}") from error
        if not self.done or result is not self.now:
            raise NotEligible("its loss is not plain cross-entropy")
        if any(stage.kind == abi.EMBED and stage.pool is None for stage in self.stages):
            raise NotEligible("it uses embeddings otherwise than by their mean or sum over each row")
        taken = {number for stage in self.stages for number in stage.inputs}
        if not taken.issuperset(range(len(self.stages) - 1)):
            raise NotEligible("its forward() computes something that it does not use")
        return tuple(self.stages)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        short = name.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("Tensor.")
        if short in _FACTS:
            return self._fact(short, func(*args, **kwargs), args)
        rule = self._rule(short)
        if rule is None:
            raise NotEligible(f"it calls {name}, which is not a native stage")
        value = self.value = self._traced(name, args[0] if args else None)
        if value.ended and short not in _AFTER_THE_END:
            raise NotEligible(f"{name} follows log_softmax")
        if not value.tensor.is_floating_point() and short not in _ON_TOKENS:
            raise NotEligible(f"{name} takes {value.tensor.dtype}")
        self.now, self.at, self.shape, self.ended = value.tensor, value.stage, value.shape, value.ended
        version = value.tensor._version
        out = self._call(short, func, args, kwargs)
        if not isinstance(out, Tensor) or out.dtype not in (torch.float32, value.tensor.dtype):
            raise NotEligible(f"{name} gives {getattr(out, 'dtype', type(out).__name__)}")
        if value.tensor.requires_grad and not out.requires_grad:
            raise NotEligible(f"{name} runs without gradients")
        rule(self, name, out, args[1:], kwargs)
        if value.tensor._version != version or (short in DROPOUTS and out is value.tensor):
            self._forget(value.tensor)
        self.now = out
        self.values[id(out)] = Value(out, self.at, self.shape, self.parts[self.at], self.ended)
        return out

    def _rule(self, name: str) -> Rule | None:
        """Return what a call adds to the stages; None if it is not native."""
        raise NotImplementedError

    def _traced(self, name: str, tensor: Any) -> Value:
        """Return what is known of a tensor, unless its stage has changed since."""
        value = self.values.get(id(tensor))
        if value is None or self.done or value.parts != self.parts[value.stage]:
            raise NotEligible(f"{name} takes something else than what a layer gave")
        return value

    def _forget(self, changed: Tensor) -> None:
        """Forget the tensors that share memory with one that was changed in place."""
        memory = changed.untyped_storage().data_ptr()
        for key, value in [*self.values.items()]:
            if value.tensor.untyped_storage().data_ptr() == memory:
                del self.values[key]

    def _append(self, stage: LayerStage) -> None:
        self.stages.append(stage)
        self.at, self.shape = len(self.stages) - 1, stage.out_shape if stage.on_images else (stage.out,)

    def _complete(self, name: str) -> LayerStage | None:
        """Return the stage that gave the current value, to be replaced by one with another part; None for the input."""
        if any(self.at in stage.inputs for stage in self.stages):
            raise NotEligible(f"a value is used both before and after {name}")
        self.parts[self.at] += 1
        return self.stages[self.at] if self.at >= 0 else None

    def _rows(self, name: str, value: Value) -> tuple[int, int, int]:
        """Return the shape of a value that a stage on rows takes, before it was flattened."""
        if len(value.shape) != 1 or value.tensor.ndim != 2 or not value.tensor.is_floating_point():
            raise NotEligible(f"{name} takes inputs that are not flat")
        if any(stage.on_images for stage in self.stages[value.stage + 1 :]):
            raise NotEligible(f"{name} takes something else than the last of the images")
        return self.stages[value.stage].out_shape if value.stage >= 0 else self._image(value.shape)

    def _call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call; for dropout, which would draw random numbers, a copy of its input."""
        if name not in DROPOUTS:
            return func(*args, **kwargs)
        return args[0] if dropout_of(args[1:], kwargs)[2] else args[0].clone()

    def _fact(self, name: str, fact: Any, args: Any) -> Any:
        """Return an attribute of a tensor to forward(), with the batch size wrapped so that nothing depends on it."""
        if not isinstance(args[0], Tensor) or not args[0].ndim or id(args[0]) in self.places or args[0] is self.target:
            return fact
        if name in ("size", "shape.__get__") and isinstance(fact, tuple):
            return _Size((_Batch(fact[0]), *fact[1:]))
        if name == "__len__":  # Python makes a plain number of it
            _check_branches(sys._getframe(1))
        if name in ("numel", "nelement"):
            return _Batch(fact)
        return _Batch(fact) if name == "size" and args[1:] in ((0,), (-args[0].ndim,)) else fact

    def _parameter(self, name: str, value: Any) -> int:
        if id(value) not in self.places:
            raise NotEligible(f"{name} has weights that are not a parameter of the module")
        if id(value) in self.used:
            raise NotEligible("a layer or a weight is used twice")
        self.used.add(id(value))
        return self.places[id(value)][1]

    def _layer(self, name: str, out: Tensor, weight: Any, bias: Any) -> tuple[int, int]:
        if not out.requires_grad:
            raise NotEligible(f"{name} runs without gradients")
        return self._parameter(name, weight), -1 if bias is None else self._parameter(name, bias)

    def _image(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the shape of the first stage's input; images may only be used directly or flattened."""
        if len(self.input_shape) == 3:
            channels, height, width = self.input_shape
            if shape not in (self.input_shape, (math.prod(self.input_shape),)):
                raise NotEligible("it takes images in another shape")
            return channels, height, width
        if len(shape) == 3:
            channels, height, width = shape
            return channels, height, width
        return 1, 1, math.prod(shape)


class _Size(tuple[int, ...]):
    """The shape of a traced tensor."""

    __slots__ = ()

    def numel(self) -> int:
        return _Batch(math.prod(map(int.__index__, self)))


_FACTS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "__len__"),
        *("is_contiguous", "is_floating_point", "get_device"),
        *(f"{name}.__get__" for name in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout")),
    )
)
_AFTER_THE_END = frozenset(("cross_entropy", "nll_loss", "log_softmax", *SAME))
_ON_TOKENS = frozenset(("embedding", "embedding_bag", *SAME, *RESHAPES))


def stages_of(
    module: nn.Module,
    input_shape: Sequence[int],
    loss: Loss = cross_entropy,
    channels_last: bool = True,
    tokens: bool = False,
) -> tuple[LayerStage, ...]:
    """Return the module as stages, or raise `NotEligible` with the first unsupported operation. With ``tokens`` its
    inputs are int64.

    >>> [stage.out for stage in stages_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))]
    [3, 2]
    """
    if len(input_shape) not in (1, 2, 3):
        raise NotEligible(f"its inputs have {len(input_shape)} axes")
    places = parameter_offsets(module)
    traced = []
    was = module.training
    with check_pure(module):
        for training, batch in ((True, 2), (True, 3), (False, 2)):
            module.train(training)
            watch = _Watch(places, tuple(input_shape), not channels_last)
            traced.append(watch.run(module, loss, batch, tokens))
    module.train(was)
    if traced[0] != traced[1]:
        raise NotEligible("its forward() depends on the size of the batch")
    if any(stage.drop is not None for stage in traced[2]):
        raise NotEligible("it drops out in evaluation too")
    if tuple(replace(stage, drop=None) for stage in traced[0]) != traced[2]:
        raise NotEligible("its forward() is another one in training")
    if sum(stage.dim for stage in traced[0]) != sum(p.numel() for p in module.parameters()):
        raise NotEligible("it has parameters that its forward() does not use")
    return _fuse_relu(traced[0])


def _fuse_relu(stages: Sequence[LayerStage]) -> tuple[LayerStage, ...]:
    """Merge each ReLU with the linear stage before it, unless that stage's own output is also used."""
    uses = Counter(number for stage in stages for number in stage.inputs)
    fused: list[LayerStage] = []
    places = {-1: -1}
    for number, stage in enumerate(stages):
        source = places[stage.source]
        last = fused[source] if source >= 0 else stage
        relu = stage.kind == abi.ACTIVATION and stage.activation == abi.RELU
        if relu and last.kind == abi.LINEAR and uses[stage.source] == 1 and None in (last.drop, stage.drop):
            fused[source] = replace(last, relu=True, drop=last.drop or stage.drop)
            places[number] = source
            continue
        places[number] = len(fused)
        fused.append(replace(stage, source=source, addend=places[stage.addend]))
    return tuple(fused)


class _Watch(CallTrace):
    """The native stages that torch calls are."""

    def _rule(self, name: str) -> Rule | None:
        return _RULES.get(name)

    def linear(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, bias = given_arguments(args, kwargs, weight=None, bias=None)
        rows = self._rows("a linear layer", self.value)
        at = self._layer(name, out, weight, bias)
        self._append(LayerStage(abi.LINEAR, rows, out.shape[1], weight=at[0], bias=at[1], source=self.at))

    def _images(self, name: str, value: Value) -> tuple[int, int, int]:
        """Return the shape of a value that a stage on images takes; such stages come before all others."""
        if len(value.shape) != 3 or value.tensor.ndim != 4 or any(not stage.on_images for stage in self.stages):
            raise NotEligible(f"{name} takes inputs that are not images, or follows a layer on rows")
        channels, height, width = value.shape
        return channels, height, width

    def conv2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, bias, stride, padding, dilation, groups = given_arguments(
            args, kwargs, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
        )
        shape = self._images("a convolution", self.value)
        if self.at < 0 and self.stages:
            raise NotEligible("two convolutions take the network's input")
        at = self._layer(name, out, weight, bias)
        kernel = weight.shape[2]
        if isinstance(padding, str) and (padding == "valid" or kernel % 2):
            padding = kernel // 2 if padding == "same" else 0
        if weight.shape[3] != kernel or not equal_pair(padding) or not 0 <= equal_pair(padding)[0] < kernel:
            raise NotEligible(f"a convolution has kernel {tuple(weight.shape[2:])} and padding {padding}")
        steps = equal_pair(stride)
        if not steps or steps[0] > abi.MOST_STRIDE or equal_pair(dilation) != (1, 1) or groups != 1:
            raise NotEligible(f"a convolution has stride {stride}, dilation {dilation}, groups {groups}")
        if not self.stages:
            self._image(self.shape)
        kind, pad = (abi.CONV, shape, out.shape[1], kernel), equal_pair(padding)[0]
        stage = LayerStage(*kind, padding=pad, weight=at[0], bias=at[1], planar=self.planar, source=self.at)
        self._append(replace(stage, stride=steps[0]))

    def activation(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        kind, alpha = activation_of(name, args, kwargs)
        if kind == abi.RELU and self.at >= 0 and self.stages[self.at].on_images:
            last = self._complete(name)
            assert last is not None
            if last.activation:
                raise NotEligible("ReLU follows another activation of an image")
            mean = last.pool is not None and last.pool.kind == abi.MEAN
            self.stages[self.at] = last if last.relu else replace(last, relu=True, relu_after_pool=mean)
            return
        if len(self.shape) == 3 and self.at >= 0 and self.stages[self.at].on_images:
            last = self._complete(name)
            if last is None or last.relu or last.activation or last.drop is not None:
                raise NotEligible(f"{name} follows ReLU, another activation or dropout of an image")
            after = last.pool is not None
            self.stages[self.at] = replace(last, activation=kind, alpha=alpha, activation_after_pool=after)
            return
        rows = self._rows(name, self.value)
        stage = LayerStage(abi.ACTIVATION, rows, math.prod(rows), weight=-1, source=self.at, activation=kind)
        self._append(replace(stage, alpha=alpha))

    def layer_norm(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        shape, weight, bias, eps, _cudnn = given_arguments(
            args, kwargs, normalized_shape=(), weight=None, bias=None, eps=1e-5, cudnn_enable=True
        )
        rows = self._rows(name, self.value)
        if tuple(shape) != self.shape:
            raise NotEligible(f"{name} normalises {tuple(shape)} of {self.shape}")
        at = [-1 if vector is None else self._parameter(name, vector) for vector in (weight, bias)]
        stage = LayerStage(abi.NORM, rows, math.prod(rows), weight=at[0], bias=at[1], source=self.at)
        self._append(replace(stage, eps=float(eps)))

    def group_norm(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        groups, weight, bias, eps, _cudnn = given_arguments(
            args, kwargs, num_groups=1, weight=None, bias=None, eps=1e-5, cudnn_enabled=True
        )
        shape = self._images(name, self.value)
        if self.at < 0:
            raise NotEligible(f"{name} takes the network's input")
        at = [-1 if vector is None else self._parameter(name, vector) for vector in (weight, bias)]
        stage = LayerStage(abi.GROUP_NORM, shape, shape[0], kernel=1, weight=at[0], bias=at[1], planar=self.planar)
        self._append(replace(stage, source=self.at, groups=int(groups), eps=float(eps)))

    def add(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        other, alpha = given_arguments(args, kwargs, other=None, alpha=1)
        addend = self._traced(name, other)
        if len(self.shape) == 3:
            shape = self._images(name, self.value)
            if alpha != 1 or self._images(name, addend) != shape or min(self.at, addend.stage) < 0:
                raise NotEligible(f"{name} adds something else than two images of one shape that layers gave")
            stage = LayerStage(abi.IMAGE_ADD, shape, shape[0], kernel=1, weight=-1, planar=self.planar)
            self._append(replace(stage, source=self.at, addend=addend.stage))
            return
        rows = self._rows(name, self.value)
        if alpha != 1 or math.prod(self._rows(name, addend)) != math.prod(rows) or addend.ended:
            raise NotEligible(f"{name} adds something else than two values of one shape")
        self._append(LayerStage(abi.ADD, rows, math.prod(rows), weight=-1, source=self.at, addend=addend.stage))

    def max_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        size, stride, padding, dilation, up, indices = given_arguments(
            args, kwargs, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
        )
        if equal_pair(padding) != (0, 0) or equal_pair(dilation) != (1, 1) or up or indices:
            raise NotEligible(f"{name} has padding {padding}, dilation {dilation}, ceil_mode {up} or gives its choices")
        self._pool(PoolWindow(abi.MAX, pair_of(size), pair_of(stride or size)))

    def avg_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        size, stride, padding, up, _border, divisor = given_arguments(
            args,
            kwargs,
            kernel_size=None,
            stride=None,
            padding=0,
            ceil_mode=False,
            count_include_pad=True,
            divisor_override=None,
        )
        if equal_pair(padding) != (0, 0) or up or divisor is not None:
            raise NotEligible(f"{name} has padding {padding}, ceil_mode {up}, divisor {divisor}")
        self._pool(PoolWindow(abi.MEAN, pair_of(size), pair_of(stride or size)))

    def adaptive_avg_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        sides, wanted = self.shape[1:], tuple(out.shape[2:])
        if len(sides) != 2 or len(wanted) != 2 or any(side % want for side, want in zip(sides, wanted, strict=True)):
            raise NotEligible(f"{name} takes {sides} to {wanted}, whose windows are not all of one size")
        size = sides[0] // wanted[0], sides[1] // wanted[1]
        self._pool(PoolWindow(abi.MEAN, size, size))

    def embedding(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, skip, *options = given_arguments(
            args,
            kwargs,
            weight=None,
            padding_idx=None,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            sparse=False,
        )
        if options[0] is not None or options[2] or options[3]:
            raise NotEligible(f"{name} has max_norm, scale_grad_by_freq or sparse gradients")
        self._table(name, out, weight, -1 if skip is None else skip % weight.shape[0])

    def embedding_bag(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, offsets, *options, mode, sparse, weights, _last, padding = given_arguments(
            args,
            kwargs,
            weight=None,
            offsets=None,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            mode="mean",
            sparse=False,
            per_sample_weights=None,
            include_last_offset=False,
            padding_idx=None,
        )
        if any(each is not None for each in (offsets, options[0], weights, padding)) or options[2] or sparse:
            raise NotEligible(f"{name} has offsets, weights, padding_idx, max_norm or sparse gradients")
        if mode not in _EMBEDDING_POOLS:
            raise NotEligible(f"{name} has mode {mode}")
        self._table(name, out, weight, -1)
        self._pool_embeddings(_EMBEDDING_POOLS[mode])

    def _table(self, name: str, out: Tensor, weight: Tensor, skip: int) -> None:
        """Add the embeddings of the network's tokens, whose pool follows."""
        if self.stages or self.now.ndim != 2 or not self.now.numel() or weight.ndim != 2 or len(weight) >= 1 << 31:
            raise NotEligible(f"{name} is not the first layer, or takes something else than rows of tokens")
        at, length = self._layer(name, out, weight, None)[0], self.now.shape[1]
        stage = LayerStage(abi.EMBED, (1, 1, length), weight.shape[1], weight=at, words=len(weight), skip=skip)
        self._append(stage)
        self.shape = (length, stage.out)

    def _pool_embeddings(self, kind: int) -> None:
        last = self._complete("a mean or sum of embeddings")
        assert last is not None
        window = 1, last.shape[2]
        self.stages[self.at] = replace(last, pool=PoolWindow(kind, window, window))
        self.shape = (last.out,)

    def mean(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        dim, _keep, _dtype = given_arguments(args, kwargs, dim=None, keepdim=False, dtype=None)
        axes = sorted(axis % self.now.ndim for axis in ((dim,) if isinstance(dim, int) else dim or ()))
        last = self.stages[self.at] if self.at >= 0 else None
        if last is not None and last.kind == abi.EMBED and last.pool is None and self.now.ndim == 3 and axes == [1]:
            self._pool_embeddings(_EMBEDDING_POOLS[name.rpartition(".")[2]])
            self.shape = tuple(out.shape[1:])
            return
        if self.now.ndim != 4 or not name.endswith("mean"):
            axes = []
        if axes != [2, 3]:
            raise NotEligible(f"it calls {name}, which is not one over the sides of images")
        size = self.now.shape[2], self.now.shape[3]
        self._pool(PoolWindow(abi.MEAN, size, size))
        self.shape = tuple(out.shape[1:])

    def _pool(self, pool: PoolWindow) -> None:
        last = self._complete("a pool")
        if last is None or not last.on_images or last.pool or len(self.shape) != 3 or self.now.ndim != 4:
            raise NotEligible("a pool does not follow a layer on images")
        if last.drop is not None and last.drop.kind != abi.DROP_CHANNELS:
            raise NotEligible("a pool follows dropout")
        rising = last.activation in (abi.SIGMOID, abi.TANH)
        rising |= last.activation in (abi.LEAKY_RELU, abi.ELU) and last.alpha >= 0
        after = rising and pool.kind == abi.MAX  # the maximum of f(x) is f of the maximum
        self.stages[self.at] = replace(last, pool=pool, activation_after_pool=after)
        self.shape = self.stages[self.at].out_shape

    def reshape(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Accept any reshape that keeps the order of each row's entries."""
        if out.ndim < 1 or out.shape[0] != self.now.shape[0] or out.numel() != self.now.numel():
            raise NotEligible(f"{name} mixes the rows of the batch")
        shape = tuple(out.shape[1:])
        if self.at >= 0 and shape not in (self.shape, (math.prod(self.shape),)):
            raise NotEligible(f"{name} gives {shape}, which is not what a layer gave")
        self.shape = shape

    def same(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        if out.shape != self.now.shape or out.dtype != self.now.dtype or out.device != self.now.device:
            raise NotEligible(f"{name} changes its tensor")

    def dropout(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        p, training, _inplace = dropout_of(args, kwargs)
        if not p or not training:
            return
        last = self._complete(name)
        if last is None or last.drop is not None or p >= 1:
            raise NotEligible(f"it drops out (p={p}) before a layer, twice or after the end")
        kind = abi.DROP_FLAT if len(self.shape) == 1 and last.on_images else abi.DROP
        if not name.endswith(".dropout"):
            if len(self.shape) != 3 or self.now.ndim != 4:
                raise NotEligible(f"{name} is of something else than images")
            kind = abi.DROP_CHANNELS
        self.stages[self.at] = replace(last, drop=DropoutKind(kind, float(p)))

    def log_softmax(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        dim, _level, _dtype = given_arguments(args, kwargs, dim=None, _stacklevel=3, dtype=None)
        if not self._last() or dim not in (1, -1):
            raise NotEligible(f"{name} does not end a stack of layers")
        self.ended = True

    def loss(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        target, *options = given_arguments(
            args,
            kwargs,
            target=None,
            weight=None,
            size_average=None,
            ignore_index=-100,
            reduce=None,
            reduction="mean",
            label_smoothing=0.0,
        )
        if target is not self.target or options != [None, None, -100, None, "mean", 0.0]:
            raise NotEligible("its loss is cross-entropy with options, or of other targets")
        if name.endswith("nll_loss") and not self.ended:
            raise NotEligible("its loss is nll_loss, but the model does not end in log_softmax")
        if not self._last():
            raise NotEligible("it does not end in a layer on rows")
        self.done = True

    def _last(self) -> bool:
        """Return whether the current value is what the last stage gives, one row per example."""
        last = self.stages[-1] if self.stages else None
        ends = last is not None and not last.on_images and self.shape == (last.out,) and self.now.ndim == 2
        return ends and self.at == len(self.stages) - 1


_ACTIVATIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh", "silu", "gelu")
_EMBEDDING_POOLS = {"mean": abi.MEAN, "sum": abi.SUM}
_RULES: dict[str, Rule] = {
    "linear": _Watch.linear,
    "conv2d": _Watch.conv2d,
    "max_pool2d": _Watch.max_pool2d,
    "avg_pool2d": _Watch.avg_pool2d,
    "adaptive_avg_pool2d": _Watch.adaptive_avg_pool2d,
    "mean": _Watch.mean,
    "log_softmax": _Watch.log_softmax,
    "cross_entropy": _Watch.loss,
    "nll_loss": _Watch.loss,
    "layer_norm": _Watch.layer_norm,
    "group_norm": _Watch.group_norm,
    "embedding": _Watch.embedding,
    "embedding_bag": _Watch.embedding_bag,
    "sum": _Watch.mean,
    **dict.fromkeys(("add", "add_"), _Watch.add),
    **dict.fromkeys((*_ACTIVATIONS, *(f"{name}_" for name in _ACTIVATIONS)), _Watch.activation),
    **dict.fromkeys(RESHAPES, _Watch.reshape),
    **dict.fromkeys(SAME, _Watch.same),
    **dict.fromkeys(DROPOUTS, _Watch.dropout),
}
