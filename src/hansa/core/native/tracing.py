"""Tracing: recognise modules that the native kernels can train, however they are written.

``forward()`` and the loss run on a small batch while every torch call is traced. Equivalent layers, functions and
tensor methods are treated alike. A module that is not a chain of stages with mean cross-entropy is refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, resolve_name

from hansa.core.native import abi
from hansa.core.native.network import DropoutKind, LayerStage, PoolWindow

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]


class NotEligible(Exception):
    """The reason why a module has no native form."""


def stages_of(
    module: nn.Module,
    input_shape: Sequence[int],
    loss: Loss = cross_entropy,
    channels_last: bool = True,
) -> tuple[LayerStage, ...]:
    """Return the module as stages, or raise `NotEligible` with the first unsupported operation.

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
            traced.append(watch.run(module, loss, batch))
    module.train(was)
    if traced[0] != traced[1]:
        raise NotEligible("its forward() depends on the size of the batch")
    if any(stage.drop is not None for stage in traced[2]):
        raise NotEligible("it drops out in evaluation too")
    if tuple(replace(stage, drop=None) for stage in traced[0]) != traced[2]:
        raise NotEligible("its forward() is another one in training")
    if sum(stage.dim for stage in traced[0]) != sum(p.numel() for p in module.parameters()):
        raise NotEligible("it has parameters that its forward() does not use")
    return traced[0]


class _Batch(int):
    """The batch size: it may be used in shapes, but no control flow may depend on it."""

    def _refuse(self, *_: object) -> Any:
        raise NotEligible("its forward() looks at the size of the batch")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mod__ = __floordiv__ = __truediv__ = __bool__ = _refuse
    __hash__ = int.__hash__


class _Watch(TorchFunctionMode):
    """Traces the tensor that passes from layer to layer."""

    def __init__(self, places: dict[int, tuple[Tensor, int]], input_shape: tuple[int, ...], planar: bool) -> None:
        super().__init__()
        self.places, self.input_shape, self.planar = places, input_shape, planar
        self.stages: list[LayerStage] = []
        self.used: set[int] = set()
        self.now, self.target, self.done = torch.empty(0), torch.empty(0), False
        self.shape: tuple[int, ...] = input_shape
        self.ended = False  # in log_softmax

    def run(self, module: nn.Module, loss: Loss, batch: int) -> tuple[LayerStage, ...]:
        self.now = inputs = torch.zeros(batch, *self.input_shape)
        self.target = torch.zeros(batch, dtype=torch.int64)
        try:
            with torch.enable_grad(), self:
                result = loss(module(inputs), self.target)
        except NotEligible:
            raise
        except Exception as error:
            raise NotEligible(f"its forward() fails on a small batch: {error}") from error
        if not self.done or result is not self.now:
            raise NotEligible("its loss is not plain cross-entropy")
        return tuple(self.stages)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        short = name.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("Tensor.")
        if short in _FACTS:
            return self._fact(short, func(*args, **kwargs), args)
        rule = _RULES.get(short)
        if rule is None:
            raise NotEligible(f"it calls {name}, which is not a native stage")
        if not args or args[0] is not self.now or self.done:
            raise NotEligible(f"{name} takes something else than what the layer before gave")
        out = self._call(short, func, args, kwargs)
        if not isinstance(out, Tensor) or out.dtype != torch.float32:
            raise NotEligible(f"{name} gives {getattr(out, 'dtype', type(out).__name__)}")
        rule(self, name, out, args[1:], kwargs)
        self.now = out
        return out

    def _call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call; for dropout, which would draw random numbers, a copy of its input."""
        if name not in _DROPOUTS:
            return func(*args, **kwargs)
        return args[0] if _dropout_of(args[1:], kwargs)[2] else args[0].clone()

    def _fact(self, name: str, fact: Any, args: Any) -> Any:
        """Return an attribute of a tensor to forward(), with the batch size wrapped so that nothing depends on it."""
        if not isinstance(args[0], Tensor) or not args[0].ndim or id(args[0]) in self.places or args[0] is self.target:
            return fact
        if name in ("size", "shape.__get__") and isinstance(fact, tuple):
            return _Size((_Batch(fact[0]), *fact[1:]))
        return _Batch(fact) if name == "size" and args[1:] in ((0,), (-args[0].ndim,)) else fact

    def _parameter(self, name: str, value: Any) -> int:
        if id(value) not in self.places:
            raise NotEligible(f"{name} has weights that are not a parameter of the module")
        if id(value) in self.used:
            raise NotEligible("a layer or a weight is used twice")
        self.used.add(id(value))
        return self.places[id(value)][1]

    def _layer(self, name: str, out: Tensor, weight: Any, bias: Any) -> tuple[int, int]:
        if self.ended or not out.requires_grad:
            raise NotEligible(f"{name} runs without gradients, or after the end")
        return self._parameter(name, weight), -1 if bias is None else self._parameter(name, bias)

    def linear(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, bias = _given(args, kwargs, weight=None, bias=None)
        if len(self.shape) != 1 or self.now.ndim != 2:
            raise NotEligible("a linear layer takes inputs that are not flat")
        at = self._layer(name, out, weight, bias)
        shape = self.stages[-1].out_shape if self.stages else self._image()
        self.stages.append(LayerStage(abi.LINEAR, shape, out.shape[1], weight=at[0], bias=at[1]))
        self.shape = (out.shape[1],)

    def conv2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        weight, bias, stride, padding, dilation, groups = _given(
            args, kwargs, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
        )
        if len(self.shape) != 3 or self.now.ndim != 4 or (self.stages and self.stages[-1].kind == abi.LINEAR):
            raise NotEligible("a convolution takes inputs that are not images")
        at = self._layer(name, out, weight, bias)
        kernel = weight.shape[2]
        if isinstance(padding, str) and (padding == "valid" or kernel % 2):
            padding = kernel // 2 if padding == "same" else 0
        if weight.shape[3] != kernel or not _both(padding) or not 0 <= _both(padding)[0] < kernel:
            raise NotEligible(f"a convolution has kernel {tuple(weight.shape[2:])} and padding {padding}")
        steps = _both(stride)
        if not steps or steps[0] > abi.MOST_STRIDE or _both(dilation) != (1, 1) or groups != 1:
            raise NotEligible(f"a convolution has stride {stride}, dilation {dilation}, groups {groups}")
        if not self.stages:
            self._image()
        shape = (self.shape[0], self.shape[1], self.shape[2])
        kind, pad = (abi.CONV, shape, out.shape[1], kernel), _both(padding)[0]
        self.stages.append(
            LayerStage(*kind, padding=pad, weight=at[0], bias=at[1], planar=self.planar, stride=steps[0])
        )
        self.shape = self.stages[-1].out_shape

    def _image(self) -> tuple[int, int, int]:
        """Return the shape of the first stage's input; images may only be used directly or flattened."""
        if len(self.input_shape) == 3:
            channels, height, width = self.input_shape
            if self.shape not in (self.input_shape, (math.prod(self.input_shape),)):
                raise NotEligible("it takes images in another shape")
            return channels, height, width
        if len(self.shape) == 3:
            channels, height, width = self.shape
            return channels, height, width
        return 1, 1, math.prod(self.shape)

    def relu(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        if not self.stages or self.ended:
            raise NotEligible("ReLU comes before a layer")
        last = self.stages[-1]
        mean = last.pool is not None and last.pool.kind == abi.MEAN
        self.stages[-1] = last if last.relu else replace(last, relu=True, relu_after_pool=mean)

    def max_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        size, stride, padding, dilation, up, indices = _given(
            args, kwargs, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
        )
        if _both(padding) != (0, 0) or _both(dilation) != (1, 1) or up or indices:
            raise NotEligible(f"{name} has padding {padding}, dilation {dilation}, ceil_mode {up} or gives its choices")
        self._pool(PoolWindow(abi.MAX, _two(size), _two(stride or size)))

    def avg_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        size, stride, padding, up, _border, divisor = _given(
            args,
            kwargs,
            kernel_size=None,
            stride=None,
            padding=0,
            ceil_mode=False,
            count_include_pad=True,
            divisor_override=None,
        )
        if _both(padding) != (0, 0) or up or divisor is not None:
            raise NotEligible(f"{name} has padding {padding}, ceil_mode {up}, divisor {divisor}")
        self._pool(PoolWindow(abi.MEAN, _two(size), _two(stride or size)))

    def adaptive_avg_pool2d(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        sides, wanted = self.shape[1:], tuple(out.shape[2:])
        if len(sides) != 2 or len(wanted) != 2 or any(side % want for side, want in zip(sides, wanted, strict=True)):
            raise NotEligible(f"{name} takes {sides} to {wanted}, whose windows are not all of one size")
        size = sides[0] // wanted[0], sides[1] // wanted[1]
        self._pool(PoolWindow(abi.MEAN, size, size))

    def mean(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        dim, _keep, _dtype = _given(args, kwargs, dim=None, keepdim=False, dtype=None)
        axes = sorted(axis % 4 for axis in dim) if isinstance(dim, (tuple, list)) and self.now.ndim == 4 else []
        if axes != [2, 3]:
            raise NotEligible(f"it calls {name}, which is not one over the sides of images")
        size = self.now.shape[2], self.now.shape[3]
        self._pool(PoolWindow(abi.MEAN, size, size))
        self.shape = tuple(out.shape[1:])

    def _pool(self, pool: PoolWindow) -> None:
        last = self.stages[-1] if self.stages else None
        if last is None or last.kind != abi.CONV or last.pool or len(self.shape) != 3 or self.now.ndim != 4:
            raise NotEligible("a pool does not follow a convolution")
        if last.drop is not None and last.drop.kind != abi.DROP_CHANNELS:
            raise NotEligible("a pool follows dropout")
        self.stages[-1] = replace(last, pool=pool)
        self.shape = self.stages[-1].out_shape

    def reshape(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Accept any reshape that keeps the order of each row's entries."""
        if out.ndim < 1 or out.shape[0] != self.now.shape[0] or out.numel() != self.now.numel() or self.ended:
            raise NotEligible(f"{name} mixes the rows of the batch")
        shape = tuple(out.shape[1:])
        if self.stages and shape not in (self.shape, (math.prod(self.shape),)):
            raise NotEligible(f"{name} gives {shape}, which is not what a layer gave")
        self.shape = shape

    def same(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        if out.shape != self.now.shape or out.device != self.now.device:
            raise NotEligible(f"{name} changes its tensor")

    def dropout(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        p, training, _inplace = _dropout_of(args, kwargs)
        if not p or not training:
            return
        last = self.stages[-1] if self.stages else None
        if last is None or last.drop is not None or self.ended or p >= 1:
            raise NotEligible(f"it drops out (p={p}) before a layer, twice or after the end")
        kind = abi.DROP_FLAT if len(self.shape) == 1 and last.kind == abi.CONV else abi.DROP
        if not name.endswith(".dropout"):
            if len(self.shape) != 3 or self.now.ndim != 4:
                raise NotEligible(f"{name} is of something else than images")
            kind = abi.DROP_CHANNELS
        self.stages[-1] = replace(last, drop=DropoutKind(kind, float(p)))

    def log_softmax(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        dim, _level, _dtype = _given(args, kwargs, dim=None, _stacklevel=3, dtype=None)
        if not self.stages or self.stages[-1].kind != abi.LINEAR or dim not in (1, -1):
            raise NotEligible(f"{name} does not end a stack of layers")
        self.ended = True

    def loss(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        target, *options = _given(
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
        if not self.stages or self.stages[-1].kind != abi.LINEAR:
            raise NotEligible("it does not end in a linear layer")
        self.done = True


class _Size(tuple[int, ...]):
    """The shape of a traced tensor."""

    __slots__ = ()

    def numel(self) -> int:
        return math.prod(self)


def _given(args: Any, kwargs: Any, **defaults: Any) -> list[Any]:
    """Return the arguments of a call after the first, positional or by keyword."""
    unknown = set(kwargs) - set(defaults)
    if unknown or len(args) > len(defaults):
        raise NotEligible(f"a call with {', '.join(sorted(unknown)) or 'more arguments'}")
    return list({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values())


def _dropout_of(args: Any, kwargs: Any) -> list[Any]:
    return _given(args, kwargs, p=0.5, training=True, inplace=False)


def _two(value: Any) -> tuple[int, int]:
    """Return a pair from one number or two."""
    if isinstance(value, int):
        return value, value
    sides = tuple(value)
    return (sides[0], sides[-1])


def _both(value: Any) -> tuple[int, ...]:
    """Return the pair if both sides are equal, otherwise (); also () for a string."""
    if isinstance(value, str):
        return ()
    sides = _two(value)
    return sides if sides[0] == sides[1] else ()


_FACTS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "__len__"),
        *("is_contiguous", "is_floating_point", "get_device"),
        *(f"{name}.__get__" for name in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout")),
    )
)
_DROPOUTS = ("dropout", "dropout2d", "feature_dropout")
_RULES: dict[str, Callable[[_Watch, str, Tensor, Any, Any], None]] = {
    "linear": _Watch.linear,
    "conv2d": _Watch.conv2d,
    "max_pool2d": _Watch.max_pool2d,
    "avg_pool2d": _Watch.avg_pool2d,
    "adaptive_avg_pool2d": _Watch.adaptive_avg_pool2d,
    "mean": _Watch.mean,
    "log_softmax": _Watch.log_softmax,
    "cross_entropy": _Watch.loss,
    "nll_loss": _Watch.loss,
    **dict.fromkeys(("relu", "relu_"), _Watch.relu),
    **dict.fromkeys(("view", "reshape", "flatten", "unsqueeze", "squeeze"), _Watch.reshape),
    **dict.fromkeys(("contiguous", "float", "to", "clone"), _Watch.same),
    **dict.fromkeys(_DROPOUTS, _Watch.dropout),
}


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
    """Refuse a forward() that writes to its module or draws random numbers, which native code would not do."""
    before = [(part, {name: (value, _size(value)) for name, value in vars(part).items()}) for part in module.modules()]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - it is only looked at
    yield
    for part, had in before:
        now = {name: value for name, value in vars(part).items() if name != "training"}
        for name, value in now.items():
            if name not in had or value is not had[name][0] or _size(value) != had[name][1]:
                raise NotEligible(f"its forward() writes to {type(part).__name__}.{name}")
    same = torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    state, after = drawn[2], np.random.get_state()  # noqa: NPY002
    if not same or any(not np.array_equal(a, b) for a, b in zip(state, after, strict=True)):
        raise NotEligible("its forward() draws random numbers")


def _size(value: object) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) and isinstance(value, Sized) else None
