"""Which modules are stacks that the native kernels can train, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from hansa.native import abi


@dataclass(frozen=True, slots=True)
class Stage:
    """One convolution or linear layer with what follows it. ``shape`` is its input as (channels, height, width)."""

    kind: int
    shape: tuple[int, int, int]
    out: int
    kernel: int = 0
    padding: int = 0
    relu: bool = False
    pool: bool = False
    bias: bool = True

    @property
    def out_shape(self) -> tuple[int, int, int]:
        if self.kind == abi.LINEAR:
            return self.out, 1, 1
        height, width = (side + 2 * self.padding - self.kernel + 1 for side in self.shape[1:])
        return (self.out, height // 2, width // 2) if self.pool else (self.out, height, width)

    @property
    def dim(self) -> int:
        inputs = self.kernel**2 * self.shape[0] if self.kind == abi.CONV else math.prod(self.shape)
        return self.out * (inputs + self.bias)


def stages_of(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[Stage, ...] | None:
    """The module as stages, or None at the first thing that is not one."""
    layers = _layers(module)
    if layers is None or len(input_shape) not in (1, 3):
        return None
    parameters = [p for layer in layers for p in layer.parameters()]
    usable = all(p.requires_grad and p.dtype == torch.float32 and not p.is_cuda for p in parameters)
    if not usable or len({id(p) for p in parameters}) < len(parameters):
        return None
    flat = len(input_shape) == 1
    shape = (1, 1, input_shape[0]) if flat else (input_shape[0], input_shape[1], input_shape[2])
    stages: list[Stage] = []
    for layer in layers:
        last = stages[-1] if stages else None
        if type(layer) is nn.Identity:
            continue
        if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
            flat = True
        elif type(layer) is nn.Linear and flat and layer.in_features == math.prod(shape):
            stages.append(Stage(abi.LINEAR, shape, layer.out_features, bias=layer.bias is not None))
        elif type(layer) is nn.Conv2d and not flat and _plain_conv(layer) and layer.in_channels == shape[0]:
            padding = _padding(layer)
            stages.append(
                Stage(abi.CONV, shape, layer.out_channels, layer.kernel_size[0], padding, bias=layer.bias is not None)
            )
        elif type(layer) is nn.ReLU and last is not None:
            stages[-1] = replace(last, relu=True)
        elif type(layer) is nn.MaxPool2d and _plain_pool(layer) and _poolable(last) and not flat:
            assert last is not None
            stages[-1] = replace(last, pool=True)
        else:
            return None
        shape = stages[-1].out_shape if stages else shape
        if min(shape) < 1:
            return None
    return tuple(stages) if stages and stages[-1].kind == abi.LINEAR else None


def _layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a possibly nested Sequential in order; None where hooks or another forward intervene."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if not isinstance(module, nn.Sequential):
        return [module]
    if type(module).forward is not nn.Sequential.forward:
        return None
    layers: list[nn.Module] = []
    for child in module:
        inner = _layers(child)
        if inner is None:
            return None
        layers += inner
    return layers


def _padding(layer: nn.Conv2d) -> int:
    if isinstance(layer.padding, str):
        return layer.kernel_size[0] // 2 if layer.padding == "same" else 0
    return int(layer.padding[0])


def _plain_conv(layer: nn.Conv2d) -> bool:
    size, padding = layer.kernel_size, layer.padding
    return (
        size[0] == size[1]
        and size[0] % 2 == 1
        and (isinstance(padding, str) or padding[0] == padding[1])
        and _padding(layer) < size[0]
        and layer.stride == (1, 1)
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )


def _plain_pool(layer: nn.MaxPool2d) -> bool:
    sides = (layer.kernel_size, layer.stride)
    return (
        all(side in (2, (2, 2)) for side in sides)
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _poolable(stage: Stage | None) -> bool:
    return stage is not None and stage.kind == abi.CONV and not stage.pool
