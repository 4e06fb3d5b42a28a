"""Tracing of torch calls: the tensors that forward() passes from call to call, and what depends on the batch."""

from __future__ import annotations

import dis
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from hansa.core.native import abi
from hansa.core.native.call_arguments import dropout_of
from hansa.core.native.eligibility import NotEligible
from hansa.core.native.layer_stage import LayerStage

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
Rule: TypeAlias = Callable[[Any, str, Tensor, Any, Any], None]
SAME = ("contiguous", "float", "long", "to", "clone")
RESHAPES = ("view", "reshape", "flatten", "unsqueeze", "squeeze")
DROPOUTS = ("dropout", "dropout2d", "feature_dropout")


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
