"""Numbers that all workers average: losses and outputs, packed for a gathering and put together again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.metrics.record import Output
from poseidon.net.net import Net


class SmoothedLoss:
    """Caffe's UpdateSmoothedLoss: the mean of the last `window` iterations' losses.

    Losses stay on their device until they are looked at, so that a GPU is not waited for each iteration.
    """

    def __init__(self, window: int, start: Sequence[float] = ()) -> None:
        self._losses: deque[Tensor | float] = deque(start, maxlen=window)

    def add(self, loss: Tensor) -> None:
        """The loss of one more iteration."""
        self._losses.append(loss)

    @property
    def losses(self) -> list[float]:
        """The losses in the window, oldest first."""
        return [float(loss) for loss in self._losses]

    @property
    def value(self) -> float:
        """The mean; NaN before the first iteration."""
        losses = self.losses
        return sum(losses) / len(losses) if losses else float("nan")


def pack(loss: float, outputs: Mapping[str, Tensor]) -> bytes:
    """A loss and every number of the outputs, as float64."""
    parts = [np.array([loss])]
    parts.extend(tensor.detach().double().reshape(-1).cpu().numpy() for tensor in outputs.values())
    return np.concatenate(parts).astype("<f8").tobytes()


def total(payloads: Sequence[bytes]) -> NDArray[np.float64]:
    """The sum over workers of what `pack` made, in worker order."""
    numbers: NDArray[np.float64] = np.stack([np.frombuffer(payload, dtype="<f8") for payload in payloads])
    return np.asarray(numbers.sum(axis=0))


def as_outputs(
    numbers: Sequence[float], shapes: Mapping[str, int], weights: Mapping[str, float]
) -> tuple[Output, ...]:
    """Numbers to named outputs.

    Args:
        numbers: as packed, without the loss.
        shapes: how many numbers each output has, in order.
        weights: loss weight by name; 0 for the others.
    """
    names = [name for name, count in shapes.items() for _ in range(count)]
    return tuple(
        Output(name=name, value=float(value), loss_weight=weights.get(name, 0.0))
        for name, value in zip(names, numbers, strict=True)
    )


def output_sizes(net: Net) -> dict[str, int]:
    """How many numbers each output of a net has, in Caffe's order."""
    return {name: prod(net.blob_shapes[name]) for name, _ in net.plan.outputs}


def accumulate(into: dict[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Add one pass's outputs to a running sum."""
    for name, tensor in outputs.items():
        value = tensor.detach().to(torch.float64)
        into[name] = into[name] + value if name in into else value
