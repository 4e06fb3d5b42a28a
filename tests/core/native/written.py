"""Models as people write them: classes with a forward() of their own, from papers, tutorials and public code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class TwoNN(nn.Module):
    """McMahan's 2NN."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 200), nn.Linear(200, 200), nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, start_dim=1)
        return self.fc3(F.relu(self.fc2(self.fc1(x).relu())))


class LayersInALoop(nn.Module):
    """Flat rows; layers defined out of order; a view that a colour image in channels-last order refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(75, 24), nn.Linear(24, 16)])
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)))
        return self.last(x)


class LeafFemnist(nn.Module):
    """LEAF's CNN for FEMNIST, on flat rows of pixels; its dense layer narrowed from 2,048 to 128."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=5, padding="same")
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding="same")
        self.fc1, self.fc2 = nn.Linear(7 * 7 * 64, 128), nn.Linear(128, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 1, 28, 28)
        x = F.max_pool2d(self.conv1(x).relu_(), 2, 2)
        x = F.max_pool2d(self.conv2(x).relu_(), 2, 2)
        return self.fc2(torch.relu(self.fc1(torch.flatten(x, 1))))


class LeNet5(nn.Module):
    """The network of the PyTorch tutorial, old style: pool outside of ReLU, flat features counted in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, self.num_flat_features(x))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))

    def num_flat_features(self, x: Tensor) -> int:
        features = 1
        for side in x.size()[1:]:
            features *= side
        return features


class OwnWeights(nn.Module):
    """Parameters without layers, images without a channel axis, a float() and a contiguous() that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(6, 1, 3, 3) / 3)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 54) / 7), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x.float().unsqueeze(1), self.filters)
        x = F.relu(F.max_pool2d(x, 2)).contiguous().flatten(1)
        return F.linear(x, self.weight, bias=self.bias)


class OldMnist(nn.Module):
    """PyTorch's MNIST example as it long was: channels dropped before pool and ReLU, a dropout called by its flag."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, kernel_size=5), nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop, self.fc1, self.fc2 = nn.Dropout2d(), nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


class DropsEverywhere(nn.Module):
    """Values of images of few and of many channels, values already flattened, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 7, 3), nn.Conv2d(7, 20, 3, stride=2)
        self.fc1, self.fc2 = nn.Linear(80, 11), nn.Linear(11, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.avg_pool2d(self.conv1(x), 2))
        x = self.drop(self.flat(F.relu(self.conv2(F.relu(x)))))
        return F.dropout(self.fc2(self.drop(F.relu(self.fc1(x)))), 0.1, self.training)

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class DropsAndViews(DropsEverywhere):
    """The same in torch's own order of images, in which its values are then drawn."""

    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class TabularResidual(nn.Module):
    """A tabular network with LayerNorm, SiLU, a residual sum and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 40), nn.Linear(40, 40)
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(40), nn.LayerNorm(40)]), nn.Linear(40, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        x = x + self.drop(F.silu(self.norms[1](self.second(x))))
        return self.head(x)


class PreActivation(nn.Module):
    """Blocks that normalise first, with a projection where the width changes, sums in place and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.fc1, self.fc2 = nn.LayerNorm(21), nn.Linear(21, 50), nn.Linear(50, 17)
        self.short, self.norm2, self.fc3 = nn.Linear(21, 17, bias=False), nn.LayerNorm(17, eps=1e-3), nn.Linear(17, 17)
        self.last = nn.Linear(17, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.short(x) + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        block = self.fc3(F.relu(self.norm2(x)))
        block += x
        return self.last(F.leaky_relu(block, 0.1)).log_softmax(-1)


class WordAverages(nn.Module):
    """The mean of word embeddings, of which one is for padding, and a hidden layer (Iyyer et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 18, padding_idx=0)
        self.drop, self.fc1, self.fc2 = nn.Dropout(0.2), nn.Linear(18, 25), nn.Linear(25, 4)

    def forward(self, text: Tensor) -> Tensor:
        x = self.drop(self.embedding(text).mean(dim=1))
        return self.fc2(F.relu(self.fc1(x)))


class BagOfWords(nn.Module):
    """PyTorch's tutorial on text classification, on rows of one length; the embedding is defined last."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 4)
        self.embedding = nn.EmbeddingBag(300, 32)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.embedding(text))


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


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


Case = tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor], Shape, int]
WRITTEN: dict[str, Case] = {
    "2NN": (TwoNN, nn.CrossEntropyLoss(), (1, 28, 28), 10),
    "layers in a loop": (LayersInALoop, own_loss, (3, 5, 5), 5),
    "LEAF's FEMNIST CNN": (LeafFemnist, F.cross_entropy, (784,), 62),
    "LeNet-5": (LeNet5, nn.CrossEntropyLoss(), (3, 32, 32), 10),
    "the old MNIST example": (OldMnist, F.nll_loss, (1, 28, 28), 10),
    "drops everywhere": (DropsEverywhere, F.cross_entropy, (3, 12, 12), 4),
    "drops and views": (DropsAndViews, own_loss, (3, 12, 12), 4),
    "tabular residual network": (TabularResidual, F.cross_entropy, (32,), 5),
    "pre-activation blocks": (PreActivation, F.nll_loss, (21,), 4),
    "small ResNet": (SmallResNet, F.cross_entropy, (3, 8, 8), 4),
    "ResNet with group norms": (GroupNormResNet, nn.CrossEntropyLoss(), (3, 16, 16), 10),
    "pre-activation of images": (PreActivationImages, own_loss, (1, 16, 16), 5),
    "averages of words": (WordAverages, F.cross_entropy, (11,), 4),
    "bag of words": (BagOfWords, nn.CrossEntropyLoss(), (11,), 4),
    "weights of its own": (OwnWeights, lambda out, y: F.nll_loss(F.log_softmax(out, 1), y), (8, 8), 4),
}
