"""Means over virtual workers and iterations: losses and outputs, packed for a collection and
unpacked again.

Law: a sum over virtual workers is computed in their order, whichever processes they belong to. The
payload of a process has a part for each of its virtual workers (`join`), so all payloads, by rank,
have the parts of all virtual workers in order (`parts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.layers.base import times
from poseidon.caffe.net.net import Net
from poseidon.errors import DataError
from poseidon.observe.metrics.record import Output

HIDE = "an output whose shape changes can be hidden with a Silence layer"
"""The remedy where outputs have no mean."""


class SmoothedLoss:
    """Caffe's UpdateSmoothedLoss: the mean of the last `window` iterations' losses.

    Losses stay on their device until they are read, so that the loop does not wait for a GPU in
    each iteration.
    """

    def __init__(self, window: int, start: Sequence[float] = ()) -> None:
        self._losses: deque[Tensor | float] = deque(start, maxlen=window)

    def add(self, loss: Tensor) -> None:
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


def join(payloads: Iterable[bytes]) -> bytes:
    """Join several payloads into one."""
    joined: bytes = msgpack.packb(list(payloads))
    return joined


def split(joined: bytes) -> list[bytes]:
    """Split what `join` has joined."""
    payloads: list[bytes] = msgpack.unpackb(joined)
    return payloads


def pack(loss: float, outputs: Mapping[str, Tensor]) -> bytes:
    """Return a loss and every number of the outputs as bytes of float64."""
    parts = [np.array([loss])]
    parts.extend(tensor.detach().double().reshape(-1).cpu().numpy() for tensor in outputs.values())
    return np.concatenate(parts).astype("<f8").tobytes()


def parts(payloads: Iterable[bytes]) -> list[bytes]:
    """Return the parts of all virtual workers from the payloads of all processes by rank."""
    return [part for payload in payloads for part in split(payload)]


def total(payloads: Sequence[bytes]) -> NDArray[np.float64]:
    """Return the sum of what `pack` has packed for each virtual worker, in their order.

    Raises:
        DataError: the outputs of one iteration have different sizes, so they have no mean.
    """
    if len({len(payload) for payload in payloads}) > 1:
        counts = ", ".join(str(len(payload) // 8 - 1) for payload in payloads)
        raise DataError(
            f"the net's outputs have {counts} numbers on the workers, expected the same number on "
            f"each; {HIDE}"
        )
    numbers: NDArray[np.float64] = np.stack(
        [np.frombuffer(payload, dtype="<f8") for payload in payloads]
    )
    return np.asarray(numbers.sum(axis=0))


class StatisticsOfTurns:
    """The statistics that a net changes in passes beside training, such as those of a test.

    Each virtual worker begins its passes with the same values. Afterwards all workers have the mean
    over the virtual workers, on any number of processes.

    Args:
        net: of one of the virtual workers of this process, which share the tensors.
    """

    def __init__(self, net: Net) -> None:
        self._tensors = [i.parameter.detach().view(-1) for i in net.parameters_info if i.statistics]
        self._first = [tensor.clone() for tensor in self._tensors]
        self._last: list[bytes] = []

    def restore(self) -> None:
        """Set the first values."""
        for tensor, value in zip(self._tensors, self._first, strict=True):
            tensor.copy_(value)

    def end_turn(self) -> None:
        """Let the next virtual worker begin."""
        self._last.append(pack(0.0, {str(n): tensor for n, tensor in enumerate(self._tensors)}))
        self.restore()

    def take_mean(self, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Set the mean over all virtual workers. All workers call it together."""
        if not self._tensors:
            return
        of_each = parts(gather(join(self._last)))
        means = torch.from_numpy(total(of_each)[1:] / len(of_each))
        for tensor, mean in zip(
            self._tensors, means.split([t.numel() for t in self._tensors]), strict=True
        ):
            tensor.copy_(mean)


def as_outputs(
    numbers: Sequence[float], shapes: Mapping[str, int], weights: Mapping[str, float]
) -> tuple[Output, ...]:
    """Return numbers as named outputs.

    Args:
        numbers: as packed, without the loss.
        shapes: number of values of each output, in order.
        weights: loss weight by name; 0 for the others.

    Raises:
        DataError: there are more or fewer numbers than the outputs have here.
    """
    names = [name for name, count in shapes.items() for _ in range(count)]
    if len(names) != len(numbers):
        raise DataError(
            f"the net's outputs have {len(numbers)} numbers, expected {len(names)} as here; {HIDE}"
        )
    return tuple(
        Output(name=name, value=float(value), loss_weight=weights.get(name, 0.0))
        for name, value in zip(names, numbers, strict=True)
    )


def named_values(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[Output, ...]:
    """Return every number of some blobs as named outputs, in order.

    Args:
        weights: loss weight by name; 0 for the others.
    """
    numbers = [
        number for value in values.values() for number in value.double().reshape(-1).tolist()
    ]
    return as_outputs(numbers, {name: value.numel() for name, value in values.items()}, weights)


def output_sizes(net: Net) -> dict[str, int]:
    """Return the number of values of each output of a net, in Caffe's order."""
    return {name: prod(net.blob_shapes[name]) for name, _ in net.plan.outputs}


def accumulate(into: dict[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Add one pass's outputs to a running sum.

    Raises:
        DataError: an output has a different shape than in the passes before it.
    """
    for name, tensor in outputs.items():
        value = tensor.detach().to(torch.float64)
        if name in into and into[name].shape != value.shape:
            raise DataError(
                f"output '{name}' has shape {times(value.shape)} after {times(into[name].shape)}, "
                f"expected one shape in all batches of a test; {HIDE}"
            )
        into[name] = into[name] + value if name in into else value
