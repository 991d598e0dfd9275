"""The nets of the benchmarks as one would write them in torch, without Poseidon: what it is measured against."""

from __future__ import annotations

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
