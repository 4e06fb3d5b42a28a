"""Residual networks on images as people write them, with group normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallResNet(nn.Module):
    """Residual sums, group normalisation, strides with a shortcut and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.short, self.head = nn.Conv2d(8, 8, 1, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.conv1(x))
        return self.head(F.relu(self.short(x) + self.conv2(x)).mean((2, 3)))


class BasicBlock(nn.Module):
    """The block of ResNet (He et al. 2016) as torchvision writes it, with sums in place and its own downsampling."""

    def __init__(self, channels: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, planes), nn.GroupNorm(2, planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != planes:
            self.downsample = nn.Sequential(nn.Conv2d(channels, planes, 1, stride, bias=False), nn.GroupNorm(2, planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class GroupNormResNet(nn.Module):
    """A ResNet for CIFAR-10 with group normalisation (Hsieh et al. 2020), made small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(4, 8)
        self.layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 12, 2), BasicBlock(12, 18, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(18, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.relu(self.norm1(self.conv1(x))))
        return self.fc(torch.flatten(self.pool(x), 1))


class PreActivationImages(nn.Module):
    """A pre-activation block with channels that are dropped, and a maximum, in the order of images that views need."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.conv = (
            nn.Conv2d(1, 6, 5, padding=2),
            nn.GroupNorm(3, 6),
            nn.Conv2d(6, 6, 3, padding=1),
        )
        self.drop, self.head = nn.Dropout2d(0.2), nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = x + self.drop(self.conv(F.silu(self.norm(x))))
        return self.head(F.dropout(F.max_pool2d(x, 2), 0.1, self.training).view(x.size(0), -1))
