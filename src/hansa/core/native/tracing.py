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
    offsets: dict[int, tuple[Tensor, int]] = {}
    offset = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise NotEligible(f"{name} is frozen")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise NotEligible(f"{name} is {parameter.dtype} on {parameter.device}")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotEligible(f"{name} has a hook")
        offsets[id(parameter)] = (parameter, offset)
        offset += parameter.numel()
    return offsets


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
    globals_after = referenced_globals(module)
    for name, value in globals_before.items():
        if globals_after.get(name) is not value:
            raise NotEligible(f"its forward() writes to the global {name}")
    if any(True for _ in outside.changes()):
        raise NotEligible("its forward() writes to an object that is a global")
    unchanged = torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    numbers, numbers_after = drawn[2], np.random.get_state()  # noqa: NPY002
    if not unchanged or any(not np.array_equal(a, b) for a, b in zip(numbers, numbers_after, strict=True)):
        raise NotEligible("its forward() draws random numbers")


def referenced_globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals that the methods of a module's own classes name."""
    named: dict[str, Any] = {}
    for part in module.modules():
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            for method in vars(kind).values():
                if isinstance(function := inspect.unwrap(method) if callable(method) else method, types.FunctionType):
                    names = _names(function.__code__)
                    named |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    return named


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code refers to, those of inner functions too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


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
    if any(instruction.opname.startswith(jumps) for instruction in dis.get_instructions(frame.f_code)):
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


class _Trace(TorchFunctionMode):
    """Traces the tensors that pass from layer to layer, and makes stages of the calls.

    A rule is the method for a torch function: it takes the arguments after the first by their names in torch, and
    reads the current call from the attributes.
    """

    def __init__(self, offsets: dict[int, tuple[Tensor, int]], input_shape: tuple[int, ...], planar: bool) -> None:
        super().__init__()
        self.offsets, self.input_shape, self.planar = offsets, input_shape, planar
        self.stages: list[LayerStage] = []
        self.parts: Counter[int] = Counter()  # by stage
        self.used: set[int] = set()
        self.values: dict[int, Value] = {}
        self.target, self.finished = torch.empty(0), False
        # The current call: its name, what it takes and gives, and the stage and shape of its result.
        self.name, self.value, self.out = "", Value(self.target, -1, input_shape), self.target
        self.input, self.stage, self.shape, self.ended = self.target, -1, input_shape, False

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
        if not self.finished or result is not self.input:
            raise NotEligible("its loss is not plain cross-entropy")
        if any(stage.kind == abi.EMBED and stage.pool is None for stage in self.stages):
            raise NotEligible("it uses embeddings otherwise than by their mean or sum over each row")
        used_stages = {number for stage in self.stages for number in stage.inputs}
        if not used_stages.issuperset(range(len(self.stages) - 1)):
            raise NotEligible("its forward() computes something that it does not use")
        return tuple(self.stages)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        short_name = name.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("Tensor.")
        if short_name in _FACTS:
            return self._fact(short_name, func(*args, **kwargs), args)
        rule = _RULES.get(short_name)
        if rule is None:
            raise NotEligible(f"it calls {name}, which is not a native stage")
        self.name = name
        value = self.value = self._traced(args[0] if args else None)
        if value.ended and short_name not in _AFTER_THE_END:
            raise NotEligible(f"{name} follows log_softmax")
        if not value.tensor.is_floating_point() and short_name not in _ON_TOKENS:
            raise NotEligible(f"{name} takes {value.tensor.dtype}")
        self.input, self.stage, self.shape, self.ended = value.tensor, value.stage, value.shape, value.ended
        version = value.tensor._version
        if short_name in DROPOUTS:  # would draw random numbers: its result is a copy of its input
            out = args[0] if _dropout(*args[1:], **kwargs)[2] else args[0].clone()
        else:
            out = func(*args, **kwargs)
        self.out = out
        if not isinstance(out, Tensor) or out.dtype not in (torch.float32, value.tensor.dtype):
            raise NotEligible(f"{name} gives {getattr(out, 'dtype', type(out).__name__)}")
        if value.tensor.requires_grad and not out.requires_grad:
            raise NotEligible(f"{name} runs without gradients")
        try:
            rule(self, *args[1:], **kwargs)
        except TypeError as error:
            raise NotEligible(f"{name} has other arguments: {error}") from error
        if value.tensor._version != version or (short_name in DROPOUTS and out is value.tensor):
            self._forget(value.tensor)
        self.input = out
        self.values[id(out)] = Value(out, self.stage, self.shape, self.parts[self.stage], self.ended)
        return out

    def _traced(self, tensor: Any) -> Value:
        """Return what is known of a tensor, unless its stage has changed since."""
        value = self.values.get(id(tensor))
        if value is None or self.finished or value.parts != self.parts[value.stage]:
            raise NotEligible(f"{self.name} takes something else than what a layer gave")
        return value

    def _forget(self, changed: Tensor) -> None:
        """Forget the tensors that share memory with one that was changed in place."""
        memory = changed.untyped_storage().data_ptr()
        for key, value in [*self.values.items()]:
            if value.tensor.untyped_storage().data_ptr() == memory:
                del self.values[key]

    def _append(self, stage: LayerStage) -> None:
        self.stages.append(stage)
        self.stage, self.shape = len(self.stages) - 1, stage.out_shape if stage.on_images else (stage.out,)

    def _complete(self) -> LayerStage | None:
        """Return the stage that gave the current value, to be replaced by one with another part; None for the input."""
        if any(self.stage in stage.inputs for stage in self.stages):
            raise NotEligible(f"a value is used both before and after {self.name}")
        self.parts[self.stage] += 1
        return self.stages[self.stage] if self.stage >= 0 else None

    def _rows(self, value: Value) -> tuple[int, int, int]:
        """Return the shape of a value that a stage on rows takes, before it was flattened."""
        name = self.name
        if len(value.shape) != 1 or value.tensor.ndim != 2 or not value.tensor.is_floating_point():
            raise NotEligible(f"{name} takes inputs that are not flat")
        if any(stage.on_images for stage in self.stages[value.stage + 1 :]):
            raise NotEligible(f"{name} takes something else than the last of the images")
        return self.stages[value.stage].out_shape if value.stage >= 0 else self._image(value.shape)

    def _fact(self, name: str, fact: Any, args: Any) -> Any:
        """Return an attribute of a tensor to forward(), with the batch size wrapped so that nothing depends on it."""
        if not isinstance(args[0], Tensor) or not args[0].ndim or id(args[0]) in self.offsets or args[0] is self.target:
            return fact
        if name in ("size", "shape.__get__") and isinstance(fact, tuple):
            return _Size((_Batch(fact[0]), *fact[1:]))
        if name == "__len__":  # Python makes a plain number of it
            _check_branches(sys._getframe(1))
        if name in ("numel", "nelement"):
            return _Batch(fact)
        return _Batch(fact) if name == "size" and args[1:] in ((0,), (-args[0].ndim,)) else fact

    def _parameter(self, value: Any) -> int:
        """Return the offset of a parameter; -1 for None."""
        if value is None:
            return -1
        if id(value) not in self.offsets:
            raise NotEligible(f"{self.name} has weights that are not a parameter of the module")
        if id(value) in self.used:
            raise NotEligible("a layer or a weight is used twice")
        self.used.add(id(value))
        return self.offsets[id(value)][1]

    def _layer(self, weight: Any, bias: Any) -> dict[str, Any]:
        """Return the source of a layer and the offsets of its parameters."""
        if weight is None or not self.out.requires_grad:
            raise NotEligible(f"{self.name} runs without gradients")
        return self._offsets(weight, bias)

    def _offsets(self, weight: Any, bias: Any) -> dict[str, Any]:
        return {"weight": self._parameter(weight), "bias": self._parameter(bias), "source": self.stage}

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

    def linear(self, weight: Any, bias: Any = None) -> None:
        rows = self._rows(self.value)
        self._append(LayerStage(abi.LINEAR, rows, self.out.shape[1], **self._layer(weight, bias)))

    def _images(self, value: Value) -> tuple[int, int, int]:
        """Return the shape of a value that a stage on images takes; such stages come before all others."""
        if len(value.shape) != 3 or value.tensor.ndim != 4 or any(not stage.on_images for stage in self.stages):
            raise NotEligible(f"{self.name} takes inputs that are not images, or follows a layer on rows")
        channels, height, width = value.shape
        return channels, height, width

    def conv2d(
        self, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> None:
        shape = self._images(self.value)
        if self.stage < 0 and self.stages:
            raise NotEligible("two convolutions take the network's input")
        offsets, kernel = self._layer(weight, bias), weight.shape[2]
        if isinstance(padding, str) and (padding == "valid" or kernel % 2):
            padding = kernel // 2 if padding == "same" else 0
        if weight.shape[3] != kernel or not equal_pair(padding) or not 0 <= equal_pair(padding)[0] < kernel:
            raise NotEligible(f"a convolution has kernel {tuple(weight.shape[2:])} and padding {padding}")
        steps = equal_pair(stride)
        if not steps or steps[0] > abi.MOST_STRIDE or equal_pair(dilation) != (1, 1) or groups != 1:
            raise NotEligible(f"a convolution has stride {stride}, dilation {dilation}, groups {groups}")
        if not self.stages:
            self._image(self.shape)
        sizes: dict[str, Any] = {
            "kernel": kernel,
            "padding": equal_pair(padding)[0],
            "stride": steps[0],
            "planar": self.planar,
        }
        self._append(LayerStage(abi.CONV, shape, self.out.shape[1], **sizes, **offsets))

    def activation(self, *args: Any, **kwargs: Any) -> None:
        kind, alpha = _ACTIVATIONS[self.name.rpartition(".")[2].removesuffix("_")](*args, **kwargs)
        on_images = self.stage >= 0 and self.stages[self.stage].on_images
        if on_images and (kind == abi.RELU or len(self.shape) == 3):
            stage = self._complete()
            if stage is None or stage.activation or (kind != abi.RELU and (stage.relu or stage.drop is not None)):
                raise NotEligible(f"{self.name} follows another activation or dropout of an image")
            if kind == abi.RELU:
                mean = stage.pool is not None and stage.pool.kind == abi.MEAN
                self.stages[self.stage] = stage if stage.relu else replace(stage, relu=True, relu_after_pool=mean)
            else:
                after_pool = stage.pool is not None
                self.stages[self.stage] = replace(stage, activation=kind, alpha=alpha, activation_after_pool=after_pool)
            return
        self._append_on_rows(abi.ACTIVATION, activation=kind, alpha=alpha)

    def _append_on_rows(self, kind: int, weight: Any = None, bias: Any = None, **facts: Any) -> None:
        """Add a stage whose output has the shape of its input, a value on rows."""
        rows, offsets = self._rows(self.value), self._offsets(weight, bias)
        self._append(LayerStage(kind, rows, math.prod(rows), **offsets, **facts))

    def _append_on_images(self, kind: int, weight: Any = None, bias: Any = None, **facts: Any) -> None:
        """Add a stage whose output has the shape of its input, an image that a stage gave."""
        shape, offsets = self._images(self.value), self._offsets(weight, bias)
        if self.stage < 0:
            raise NotEligible(f"{self.name} takes the network's input")
        self._append(LayerStage(kind, shape, shape[0], kernel=1, planar=self.planar, **offsets, **facts))

    def layer_norm(
        self, normalized_shape: Any = (), weight: Any = None, bias: Any = None, eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> None:  # fmt: skip
        if tuple(normalized_shape) != self.shape:
            raise NotEligible(f"{self.name} normalises {tuple(normalized_shape)} of {self.shape}")
        self._append_on_rows(abi.NORM, weight, bias, eps=float(eps))

    def group_norm(
        self, num_groups: int = 1, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
    ) -> None:
        self._append_on_images(abi.GROUP_NORM, weight, bias, groups=int(num_groups), eps=float(eps))

    def add(self, other: Any, alpha: Any = 1) -> None:
        addend, on_images = self._traced(other), len(self.shape) == 3
        for value in (self.value, addend):
            (self._images if on_images else self._rows)(value)
        same_shape = addend.shape == self.value.shape
        if alpha != 1 or not same_shape or addend.ended or (on_images and addend.stage < 0):
            raise NotEligible(f"{self.name} adds something else than two values of one shape that layers gave")
        append = self._append_on_images if on_images else self._append_on_rows
        append(abi.IMAGE_ADD if on_images else abi.ADD, addend=addend.stage)

    def max_pool2d(
        self, kernel_size: Any = None, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> None:  # fmt: skip
        if equal_pair(dilation) != (1, 1) or return_indices:
            raise NotEligible(f"{self.name} has dilation {dilation} or gives its choices")
        self._pool(abi.MAX, kernel_size, stride, padding, ceil_mode)

    def avg_pool2d(
        self, kernel_size: Any = None, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: Any = None,
    ) -> None:  # fmt: skip
        if divisor_override is not None:
            raise NotEligible(f"{self.name} has divisor {divisor_override}")
        self._pool(abi.MEAN, kernel_size, stride, padding, ceil_mode)

    def adaptive_avg_pool2d(self, output_size: Any) -> None:
        sides, target = self.shape[1:], tuple(self.out.shape[2:])
        if len(sides) != 2 or len(target) != 2 or any(side % size for side, size in zip(sides, target, strict=True)):
            raise NotEligible(f"{self.name} takes {sides} to {target}, whose windows are not all of one size")
        self._pool(abi.MEAN, (sides[0] // target[0], sides[1] // target[1]))

    def embedding(
        self, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> None:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise NotEligible(f"{self.name} has max_norm, scale_grad_by_freq or sparse gradients")
        if self.stages or self.input.ndim != 2 or not self.input.numel() or weight.ndim != 2 or len(weight) >= 1 << 31:
            raise NotEligible(f"{self.name} is not the first layer, or takes something else than rows of tokens")
        length, skip = self.input.shape[1], -1 if padding_idx is None else padding_idx % len(weight)
        offsets = self._layer(weight, None)
        self._append(LayerStage(abi.EMBED, (1, 1, length), weight.shape[1], words=len(weight), skip=skip, **offsets))
        self.shape = (length, weight.shape[1])

    def embedding_bag(
        self, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
        include_last_offset: bool = False, padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        if any(item is not None for item in (offsets, per_sample_weights, padding_idx)) or mode not in _EMBEDDING_POOLS:
            raise NotEligible(f"{self.name} has offsets, weights, padding_idx or mode {mode}")
        self.embedding(weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
        self._pool_embeddings(_EMBEDDING_POOLS[mode])

    def _pool_embeddings(self, kind: int) -> None:
        stage = self._complete()
        assert stage is not None
        window = 1, stage.shape[2]
        self.stages[self.stage] = replace(stage, pool=PoolWindow(kind, window, window))
        self.shape = (stage.out,)

    def mean(self, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> None:
        axes = sorted(axis % self.input.ndim for axis in ((dim,) if isinstance(dim, int) else dim or ()))
        stage = self.stages[self.stage] if self.stage >= 0 else None
        unpooled = stage is not None and stage.kind == abi.EMBED and stage.pool is None
        if unpooled and self.input.ndim == 3 and axes == [1]:
            self._pool_embeddings(_EMBEDDING_POOLS[self.name.rpartition(".")[2]])
        elif self.input.ndim == 4 and self.name.endswith("mean") and axes == [2, 3]:
            self._pool(abi.MEAN, tuple(self.input.shape[2:]))
        else:
            raise NotEligible(f"it calls {self.name}, which is not one over the sides of images")
        self.shape = tuple(self.out.shape[1:])

    def _pool(self, kind: int, size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False) -> None:
        if equal_pair(padding) != (0, 0) or ceil_mode:
            raise NotEligible(f"{self.name} has padding {padding} or ceil_mode {ceil_mode}")
        stage = self._complete()
        if stage is None or not stage.on_images or stage.pool or len(self.shape) != 3 or self.input.ndim != 4:
            raise NotEligible("a pool does not follow a layer on images")
        if stage.drop is not None and stage.drop.kind != abi.DROP_CHANNELS:
            raise NotEligible("a pool follows dropout")
        rising = stage.activation in (abi.SIGMOID, abi.TANH)
        rising |= stage.activation in (abi.LEAKY_RELU, abi.ELU) and stage.alpha >= 0
        after_pool = rising and kind == abi.MAX  # the maximum of f(x) is f of the maximum
        pool = PoolWindow(kind, pair_of(size), pair_of(stride or size))
        self.stages[self.stage] = replace(stage, pool=pool, activation_after_pool=after_pool)
        self.shape = self.stages[self.stage].out_shape

    def reshape(self, *args: Any, **kwargs: Any) -> None:
        """Accept any reshape that keeps the order of each row's entries."""
        if self.out.ndim < 1 or self.out.shape[0] != self.input.shape[0] or self.out.numel() != self.input.numel():
            raise NotEligible(f"{self.name} mixes the rows of the batch")
        shape = tuple(self.out.shape[1:])
        if self.stage >= 0 and shape not in (self.shape, (math.prod(self.shape),)):
            raise NotEligible(f"{self.name} gives {shape}, which is not what a layer gave")
        self.shape = shape

    def keep_tensor(self, *args: Any, **kwargs: Any) -> None:
        if any(getattr(self.out, fact) != getattr(self.input, fact) for fact in ("shape", "dtype", "device")):
            raise NotEligible(f"{self.name} changes its tensor")

    def dropout(self, *args: Any, **kwargs: Any) -> None:
        p, training, _ = _dropout(*args, **kwargs)
        if not p or not training:
            return
        stage = self._complete()
        if stage is None or stage.drop is not None or p >= 1:
            raise NotEligible(f"it drops out (p={p}) before a layer, twice or after the end")
        kind = abi.DROP_FLAT if len(self.shape) == 1 and stage.on_images else abi.DROP
        if not self.name.endswith(".dropout"):
            if len(self.shape) != 3 or self.input.ndim != 4:
                raise NotEligible(f"{self.name} is of something else than images")
            kind = abi.DROP_CHANNELS
        self.stages[self.stage] = replace(stage, drop=DropoutKind(kind, float(p)))

    def log_softmax(self, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> None:
        if not self._is_last_stage() or dim not in (1, -1):
            raise NotEligible(f"{self.name} does not end a stack of layers")
        self.ended = True

    def loss(
        self, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
        reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        options = [weight, size_average, ignore_index, reduce, reduction, label_smoothing]
        if target is not self.target or options != [None, None, -100, None, "mean", 0.0]:
            raise NotEligible("its loss is cross-entropy with options, or of other targets")
        if self.name.endswith("nll_loss") and not self.ended:
            raise NotEligible("its loss is nll_loss, but the model does not end in log_softmax")
        if not self._is_last_stage():
            raise NotEligible("it does not end in a layer on rows")
        self.finished = True

    def _is_last_stage(self) -> bool:
        """Return whether the current value is what the last stage gives, one row per example."""
        last = self.stages[-1] if self.stages else None
        ends = last is not None and not last.on_images and self.shape == (last.out,) and self.input.ndim == 2
        return ends and self.stage == len(self.stages) - 1


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
    offsets = parameter_offsets(module)
    traced = []
    was_training = module.training
    with check_pure(module):
        for training, batch in ((True, 2), (True, 3), (False, 2)):
            module.train(training)
            trace = _Trace(offsets, tuple(input_shape), not channels_last)
            traced.append(trace.run(module, loss, batch, tokens))
    module.train(was_training)
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
    fused_number = {-1: -1}
    for number, stage in enumerate(stages):
        source = fused_number[stage.source]
        previous = fused[source] if source >= 0 else stage
        relu = stage.kind == abi.ACTIVATION and stage.activation == abi.RELU
        if relu and previous.kind == abi.LINEAR and uses[stage.source] == 1 and None in (previous.drop, stage.drop):
            fused[source] = replace(previous, relu=True, drop=previous.drop or stage.drop)
            fused_number[number] = source
            continue
        fused_number[number] = len(fused)
        fused.append(replace(stage, source=source, addend=fused_number[stage.addend]))
    return tuple(fused)


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    return p, training, inplace


_ACTIVATIONS: dict[str, Callable[..., tuple[int, float]]] = {
    "relu": lambda inplace=False: (abi.RELU, 0.0),
    "leaky_relu": lambda negative_slope=0.01, inplace=False: (abi.LEAKY_RELU, float(negative_slope)),
    "elu": lambda alpha=1.0, inplace=False: (abi.ELU, float(alpha)),
    "sigmoid": lambda: (abi.SIGMOID, 0.0),
    "tanh": lambda: (abi.TANH, 0.0),
    "silu": lambda inplace=False: (abi.SILU, 0.0),
    "gelu": lambda approximate="none": (abi.GELU_TANH if approximate == "tanh" else abi.GELU, 0.0),
}
_EMBEDDING_POOLS = {"mean": abi.MEAN, "sum": abi.SUM}
_NAMED = (
    _Trace.linear, _Trace.conv2d, _Trace.max_pool2d, _Trace.avg_pool2d, _Trace.adaptive_avg_pool2d, _Trace.mean,
    _Trace.log_softmax, _Trace.layer_norm, _Trace.group_norm, _Trace.embedding, _Trace.embedding_bag, _Trace.add,
)  # fmt: skip
_RULES: dict[str, Callable[..., None]] = {
    **{rule.__name__: rule for rule in _NAMED},
    "add_": _Trace.add,
    "sum": _Trace.mean,
    **dict.fromkeys(("cross_entropy", "nll_loss"), _Trace.loss),
    **dict.fromkeys((*_ACTIVATIONS, *(f"{name}_" for name in _ACTIVATIONS)), _Trace.activation),
    **dict.fromkeys(RESHAPES, _Trace.reshape),
    **dict.fromkeys(SAME, _Trace.keep_tensor),
    **dict.fromkeys(DROPOUTS, _Trace.dropout),
}
