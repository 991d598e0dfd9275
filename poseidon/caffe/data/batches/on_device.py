"""Batches on their way to a GPU: bytes of pixels are copied, and become floats there.

Law: the floats are those of `Transform.batch`, to the bit: (pixel - mean) * scale, then the mirror,
each an operation of its own in float32. The host crops, which it does while it copies a record to
pinned memory, so that only these pixels travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.data.batches.transform import Transform
from poseidon.exchange.device import Device, device_of


class BatchSender:
    """Copies batches to a device on a stream of its own, in the thread that makes them.

    Args:
        device: where they are wanted; not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = device
        self._device: Device = device_of(device)
        self._stream = self._device.stream()

    def send(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a batch on the device. Its memory on the host is free again."""
        with self._device.on(self._stream):
            there = tuple(
                torch.empty(part.shape, dtype=part.dtype, device=self._torch).copy_(
                    part, non_blocking=True
                )
                for part in batch
            )
            copied = self._device.event()
        copied.synchronize()
        return there


class DeviceTransform:
    """Makes floats of the bytes of a batch, on their device. No operation waits for it."""

    def __init__(self, transform: Transform, device: torch.device) -> None:
        mean = transform.mean
        self._mean = None if mean is None else torch.from_numpy(mean).to(device)
        extent = max(mean.shape[1:]) if mean is not None and transform.has_window_of_mean else 0
        self._steps = torch.arange(extent).to(device) if extent else None
        self._scale, self._mirrors = float(transform.scale), transform.mirrors

    def __call__(self, pixels_NChw: Tensor, places_N3: Tensor) -> Tensor:
        """Return the floats of cropped bytes.

        Args:
            places_N3: row and column of each crop in the image, and whether it is mirrored
                (`Transform.crop_into`).
        """
        out = pixels_NChw.float()
        if self._mean is not None:
            out.sub_(self._mean_of(pixels_NChw.shape[2:], places_N3))
        if self._scale != 1:
            out.mul_(self._scale)
        if self._mirrors:
            mirrored = places_N3[:, 2].ne(0).view(-1, 1, 1, 1)
            out = torch.where(mirrored, out.flip(3), out)
        return out

    def _mean_of(self, size: Sequence[int], places_N3: Tensor) -> Tensor:
        """Return the mean at the pixels of each crop."""
        assert self._mean is not None
        if self._steps is None:
            return self._mean
        rows = places_N3[:, 0:1] + self._steps[: size[0]]
        columns = places_N3[:, 1:2] + self._steps[: size[1]]
        return self._mean[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)
