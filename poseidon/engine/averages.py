"""Numbers that all workers average: losses and outputs, packed for a gathering and put together again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import DataError
from poseidon.layers.base import times
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
    """The sum over workers of what `pack` made, in worker order.

    Raises:
        DataError: the outputs of one iteration have different sizes, so there is no mean of them.
    """
    if len({len(payload) for payload in payloads}) > 1:
        counts = ", ".join(str(len(payload) // 8 - 1) for payload in payloads)
        raise DataError(
            f"the net's outputs have {counts} numbers on the workers, expected as many on each; "
            "an output whose shape changes can be hidden with a Silence layer"
        )
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
    """Add one pass's outputs to a running sum.

    Raises:
        DataError: an output has another shape than in the passes before.
    """
    for name, tensor in outputs.items():
        value = tensor.detach().to(torch.float64)
        if name in into and into[name].shape != value.shape:
            raise DataError(
                f"output '{name}' has shape {times(value.shape)} after {times(into[name].shape)}, expected one shape in "
                "all batches of a test; an output whose shape changes can be hidden with a Silence layer"
            )
        into[name] = into[name] + value if name in into else value
