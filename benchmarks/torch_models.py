"""The nets of the benchmarks as one would write them in torch, without Poseidon: what it is
measured against.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CifarQuick(nn.Module):
    """cifar10_quick as one would write it in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.ip1 = nn.Linear(1024, 64)
        self.ip2 = nn.Linear(64, 10)
        self.max_pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.mean_pool = nn.AvgPool2d(3, 2, ceil_mode=True)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.relu(self.max_pool(self.conv1(x)))
        x = self.mean_pool(self.relu(self.conv2(x)))
        x = self.mean_pool(self.relu(self.conv3(x)))
        return functional.cross_entropy(self.ip2(self.ip1(x.flatten(1))), label)


class AlexNet(nn.Module):
    """AlexNet with groups and local response normalization, as in Caffe's bvlc_alexnet."""

    def __init__(self) -> None:
        super().__init__()
        norm, pool = nn.LocalResponseNorm(5, 1e-4, 0.75), nn.MaxPool2d(3, 2, ceil_mode=True)
        relu = nn.ReLU(inplace=True)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 96, 11, 4), relu, norm, pool),
            *(nn.Conv2d(96, 256, 5, padding=2, groups=2), relu, norm, pool),
            *(nn.Conv2d(256, 384, 3, padding=1), relu),
            *(nn.Conv2d(384, 384, 3, padding=1, groups=2), relu),
            *(nn.Conv2d(384, 256, 3, padding=1, groups=2), relu, pool),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.classifier(self.features(x).flatten(1)), label)


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0
) -> nn.Sequential:
    """Return a biased convolution and its ReLU, as GoogLeNet is made of."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """GoogLeNet's module: four ways side by side, joined along the channels.

    Args:
        inputs: channels in.
        outputs: channels of 1x1, 3x3_reduce, 3x3, 5x5_reduce, 5x5, pool_proj.
    """

    def __init__(self, inputs: int, outputs: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce_three, three, reduce_five, five, pool = outputs
        self.one = convolution(inputs, one, 1)
        self.three = nn.Sequential(
            convolution(inputs, reduce_three, 1), convolution(reduce_three, three, 3, padding=1)
        )
        self.five = nn.Sequential(
            convolution(inputs, reduce_five, 1), convolution(reduce_five, five, 5, padding=2)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(inputs, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pool(x)), 1)


class SideLoss(nn.Module):
    """One of GoogLeNet's two losses half way."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, 3, ceil_mode=True)
        self.reduce = convolution(inputs, 128, 1)
        self.hidden = nn.Linear(2048, 1024)
        self.dropout = nn.Dropout(0.7)
        self.classifier = nn.Linear(1024, 1000)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = functional.relu(self.hidden(self.reduce(self.pool(x)).flatten(1)), inplace=True)
        return 0.3 * functional.cross_entropy(self.classifier(self.dropout(x)), label)


class GoogLeNet(nn.Module):
    """GoogLeNet with its three losses, as in Caffe's bvlc_googlenet."""

    def __init__(self) -> None:
        super().__init__()
        pool, norm = nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5, 1e-4, 0.75)
        self.stem = nn.Sequential(
            *(convolution(3, 64, 7, 2, 3), pool, norm),
            *(convolution(64, 64, 1), convolution(64, 192, 3, padding=1), norm, pool),
            Inception(192, (64, 96, 128, 16, 32, 32)),
            Inception(256, (128, 128, 192, 32, 96, 64)),
            pool,
            Inception(480, (192, 96, 208, 16, 48, 64)),
        )
        self.loss1 = SideLoss(512)
        self.middle = nn.Sequential(
            Inception(512, (160, 112, 224, 24, 64, 64)),
            Inception(512, (128, 128, 256, 24, 64, 64)),
            Inception(512, (112, 144, 288, 32, 64, 64)),
        )
        self.loss2 = SideLoss(528)
        self.head = nn.Sequential(
            Inception(528, (256, 160, 320, 32, 128, 128)),
            pool,
            Inception(832, (256, 160, 320, 32, 128, 128)),
            Inception(832, (384, 192, 384, 48, 128, 128)),
            *(nn.AvgPool2d(7, 1), nn.Dropout(0.4), nn.Flatten(), nn.Linear(1024, 1000)),
        )

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.stem(x)
        loss: Tensor = self.loss1(x, label)
        x = self.middle(x)
        loss = loss + self.loss2(x, label)
        return loss + functional.cross_entropy(self.head(x), label)


def normalized(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its batch normalization, as ResNet is made of."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 beside the identity, the stride in the first as in the
    paper's own Caffe nets.
    """

    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.project = normalized(inputs, outputs, 1, stride) if project else nn.Identity()
        self.one = normalized(inputs, width, 1, stride)
        self.three = normalized(width, width, 3)
        self.back = normalized(width, outputs, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(self.relu(self.three(self.relu(self.one(x)))))
        y += self.project(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """ResNet of 50 layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for place in range(count):
                blocks.append(Bottleneck(inputs, width, 1 if place else stride, project=place == 0))
                inputs = 4 * width
        self.features = nn.Sequential(
            *(
                nn.Conv2d(3, 64, 7, 2, 3),
                nn.BatchNorm2d(64),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, 2, ceil_mode=True),
            ),
            *blocks,
            *(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(2048, 1000)),
        )

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.features(x), label)
