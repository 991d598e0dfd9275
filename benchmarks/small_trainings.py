"""Small real trainings whose loss is compared between ways to exchange gradients: nets, data and
evaluation.

    lenet        LeNet on MNIST
    quick        cifar10_quick on CIFAR-10
    resnet       a residual net of 8 layers with batch normalization, on CIFAR-10
    transformer  a transformer on the bytes of Python's own library (`local_steps.py`)

Law: two workers; the initial weights and the order of the data follow from the seed, so every way
trains on equal samples.
"""

from __future__ import annotations

import gzip
import math
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.local_steps import CONTEXT, Transformer, corpus, loss_at

WORKERS = 2
CIFAR, MNIST = "cifar-10-binary.tar.bz2", "train-images-idx3-ubyte.gz"
TESTED = 4000
"""Images of the test set that the final loss is of."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Images as float32 with their classes, of both parts."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training.

    Attributes:
        batch: records of a worker in an iteration.
        steps: iterations unless others are asked for.
        rate: the largest rate.
        momentum: of SGD; None: AdamW.
        decay: weight decay.
        module: returns the net.
    """

    batch: int
    steps: int
    rate: float
    momentum: float | None
    decay: float
    module: Callable[[], nn.Module]

    def rate_at(self, step: int, steps: int) -> float:
        """Return the rate of a step: a short rise, then a half cosine."""
        rise = min(1.0, (step + 1) / (steps / 16))
        return self.rate * rise * 0.5 * (1 + math.cos(math.pi * step / steps))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.short(x))


def resnet() -> nn.Module:
    """Return a residual net of 8 layers: 16, 32 and 64 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def quick() -> nn.Module:
    """Return cifar10_quick with torch's initial weights."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
        *(nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10)),
    )


def lenet() -> nn.Module:
    """Return Caffe's LeNet with torch's initial weights."""
    return nn.Sequential(
        *(
            nn.Conv2d(1, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        *(nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


TRAININGS = {
    "lenet": Training(batch=32, steps=200, rate=0.02, momentum=0.9, decay=5e-4, module=lenet),
    "quick": Training(batch=50, steps=300, rate=0.02, momentum=0.9, decay=4e-3, module=quick),
    "resnet": Training(batch=50, steps=300, rate=0.1, momentum=0.9, decay=5e-4, module=resnet),
    "transformer": Training(
        batch=12, steps=300, rate=3e-3, momentum=None, decay=0.1, module=Transformer
    ),
}


def load(name: str, data: Path, cache: Path) -> Samples | None:
    """Return the images of a training, from the published files in `data`; None for the text."""
    if name == "transformer":
        return None
    kept = cache / ("mnist.npz" if name == "lenet" else "cifar10.npz")
    if not kept.exists():
        arrays = _mnist(data) if name == "lenet" else _cifar(data)
        np.savez(kept, *arrays)
    found = np.load(kept)
    x, y, test_x, test_y = (torch.from_numpy(found[key]) for key in found.files)
    mean, scale = x[:10_000].float().mean(0), x[:10_000].float().std()
    return Samples(x, y.long(), ((test_x.float() - mean) / scale)[:TESTED], test_y.long()[:TESTED])


def _cifar(data: Path) -> list[np.ndarray]:
    with tarfile.open(next(data.rglob(CIFAR))) as archive:
        files = {
            Path(member.name).name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive
            if member.name.endswith(".bin")
        }
    parts = [
        [files[f"data_batch_{number}.bin"] for number in range(1, 6)],
        [files["test_batch.bin"]],
    ]
    found = []
    for part in parts:
        rows = np.frombuffer(b"".join(part), np.uint8).reshape(-1, 3073)
        found += [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]]
    return found


def _mnist(data: Path) -> list[np.ndarray]:
    folder = next(data.rglob(MNIST)).parent
    found = []
    for part in ("train", "t10k"):
        images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        found += [np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)]
        found += [np.frombuffer(labels, np.uint8, offset=8)]
    return found


class Task:
    """One training with its data on one worker.

    Args:
        name: of the training.
        samples: its images; None: the text.
        seed: of the initial weights and of the order.
        rank: of this worker.
    """

    def __init__(self, name: str, samples: Samples | None, seed: int, rank: int) -> None:
        self.training = TRAININGS[name]
        torch.manual_seed(seed)
        self.module = self.training.module()
        self._samples = samples
        self._order = torch.Generator().manual_seed(1000 * seed + rank)
        self._text = corpus() if samples is None else None
        if samples is not None:
            first = samples.x[:10_000].float()
            self._mean, self._scale = first.mean(0), first.std()

    def loss(self, module: nn.Module) -> Tensor:
        """Return the loss of the next batch."""
        if self._text is not None:
            last = len(self._text[0]) - CONTEXT
            starts = torch.randint(last, (self.training.batch,), generator=self._order)
            return loss_at(module, self._text[0], starts)
        assert self._samples is not None
        rows = torch.randint(len(self._samples.x), (self.training.batch,), generator=self._order)
        x = (self._samples.x[rows].float() - self._mean) / self._scale
        return nn.functional.cross_entropy(module(x), self._samples.y[rows])

    @torch.no_grad()
    def test(self) -> float:
        """Return the loss on data that was not trained on."""
        self.module.eval()
        return sum(self._test_losses()) / sum(1 for _ in self._parts())

    def _parts(self) -> Iterator[Tensor]:
        if self._text is not None:
            last = len(self._text[1]) - CONTEXT - 1
            return iter(torch.arange(0, last, 24).split(256)[:-1])
        return iter(torch.arange(TESTED).split(500))

    def _test_losses(self) -> Iterator[float]:
        for rows in self._parts():
            if self._text is not None:
                yield float(loss_at(self.module, self._text[1], rows))
            elif self._samples is not None:
                scores = self.module(self._samples.test_x[rows])
                yield float(nn.functional.cross_entropy(scores, self._samples.test_y[rows]))
