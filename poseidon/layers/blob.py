"""Blob: data and diff as Caffe's Python users see them, numpy arrays that are the torch storage itself.

Law: writing into `blob.data[...]` or `blob.diff[...]` changes what the next layer reads. The memory stays the same until
`reshape` asks for more than there is, and an array that somebody holds stays valid even then, and after its net is
gone. On a GPU the newer of the two copies is fetched when the other side is asked for, so an array must be taken from
the blob again after each pass, as with Caffe.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import UsageError

Shape = tuple[int, ...]
CPU = torch.device("cpu")
LEGACY_AXES = 4


class Newer(Enum):
    """Which copy of a memory was written last."""

    NEITHER = "both are alike"
    HOST = "the host's"
    DEVICE = "the device's"


def lies_apart(tensor: Tensor) -> bool:
    """Return whether numpy cannot see a tensor's memory, so that the host needs a copy."""
    return tensor.device.type != "cpu"


class Memory:
    """Flat float32 numbers that a host and a device may both hold.

    Args:
        device: the numbers on the device; on a CPU that is the host's copy too.
    """

    def __init__(self, device: Tensor) -> None:
        self._device = device
        self._host = None if lies_apart(device) else device
        self._newer = Newer.NEITHER

    @property
    def count(self) -> int:
        """How many numbers there is room for."""
        return self._device.numel()

    def host(self) -> Tensor:
        """Return the numbers on the host, to be read or written."""
        if self._host is self._device:
            return self._device
        if self._host is None:
            self._host = self._device.to("cpu", copy=True)
        elif self._newer is Newer.DEVICE:
            self._host.copy_(self._device)
        self._newer = Newer.HOST
        return self._host

    def read(self) -> Tensor:
        """Return the numbers on the device, to be read only."""
        if self._newer is Newer.HOST and self._host is not None:
            self._device.copy_(self._host)
            self._newer = Newer.NEITHER
        return self._device

    def write(self) -> Tensor:
        """Return the numbers on the device, to be read or written."""
        self.read()
        if self._host is not self._device:
            self._newer = Newer.DEVICE
        return self._device


class Blob:
    """A named array of a net, or a learnable one of a layer, with its gradient.

    Args:
        shape: extents; none for a single number.
        device: where layers compute on it.
    """

    def __init__(self, *shape: int, device: torch.device = CPU) -> None:
        self._device = device
        self._shape: Shape = ()
        self._data: Memory | None = None
        self._diff: Memory | None = None
        self.reshape(*shape)

    @property
    def data(self) -> NDArray[np.float32]:
        """The values, live."""
        return self._shown(self.data_memory().host())

    @property
    def diff(self) -> NDArray[np.float32]:
        """The gradient, live."""
        return self._shown(self.diff_memory().host())

    @property
    def shape(self) -> Shape:
        """The extents."""
        return self._shape

    @property
    def count(self) -> int:
        """How many values."""
        return math.prod(self._shape)

    @property
    def num(self) -> int:
        """The first of four extents, 1 where the blob has fewer axes."""
        return self._legacy(0)

    @property
    def channels(self) -> int:
        """The second of four extents."""
        return self._legacy(1)

    @property
    def height(self) -> int:
        """The third of four extents."""
        return self._legacy(2)

    @property
    def width(self) -> int:
        """The last of four extents."""
        return self._legacy(3)

    def reshape(self, *shape: int) -> None:
        """Take other extents. Values stay where they are in memory unless there is not enough of it.

        Raises:
            UsageError: an extent is negative.
        """
        if min(shape, default=0) < 0:
            raise UsageError(f"a blob cannot have the shape {shape}: expected extents of 0 or more")
        self._shape = tuple(int(extent) for extent in shape)
        if self._data is not None and self._data.count < self.count:
            self._data = None
        if self._diff is not None and self._diff.count < self.count:
            self._diff = None

    # -- for what runs layers ------------------------------------------------------------------------------

    def data_memory(self) -> Memory:
        """Return the memory of the values, zeros when new."""
        if self._data is None:
            self._data = Memory(torch.zeros(self.count, device=self._device))
        return self._data

    def diff_memory(self) -> Memory:
        """Return the memory of the gradient, zeros when new."""
        if self._diff is None:
            self._diff = Memory(torch.zeros(self.count, device=self._device))
        return self._diff

    def read_data(self) -> Tensor:
        """Return the values on the device, in their shape; not to be written."""
        return self._shaped(self.data_memory().read())

    def read_diff(self) -> Tensor:
        """Return the gradient on the device, in its shape; not to be written."""
        return self._shaped(self.diff_memory().read())

    def write_data(self) -> Tensor:
        """Return the values on the device, in their shape, to be written."""
        return self._shaped(self.data_memory().write())

    def write_diff(self) -> Tensor:
        """Return the gradient on the device, in its shape, to be written."""
        return self._shaped(self.diff_memory().write())

    def bind(self, tensor: Tensor) -> None:
        """Make a tensor's memory the values, and its shape the shape."""
        self._shape = tuple(tensor.shape)
        self._device = tensor.device
        # `.data` and not `detach`: a write is not to count as a change that spoils a graph.
        self._data = Memory(tensor.data.contiguous().reshape(-1))
        if self._diff is not None and self._diff.count < self.count:
            self._diff = None

    def share_data(self, other: Blob) -> None:
        """Use the memory of another blob's values from now on."""
        self._data = other.data_memory()

    def share_diff(self, other: Blob) -> None:
        """Use the memory of another blob's gradient from now on."""
        self._diff = other.diff_memory()

    def _shown(self, flat: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._shaped(flat).numpy()
        return array

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat[: self.count].view(self._shape)

    def _legacy(self, axis: int) -> int:
        if len(self._shape) > LEGACY_AXES:
            raise UsageError(
                f"a blob of {len(self._shape)} axes has no num, channels, height and width; expected at most 4 axes"
            )
        return self._shape[axis] if axis < len(self._shape) else 1

    def __repr__(self) -> str:
        return f"Blob{self._shape}"


class Blobs(list[Blob]):
    """A layer's blobs, with Caffe's way to add one."""

    def add_blob(self, *shape: int, **unknown: Any) -> None:
        """Add a learnable blob of zeros; called from a Python layer's `setup`.

        Raises:
            UsageError: it is given anything but extents.
        """
        if unknown:
            raise UsageError(f"add_blob takes extents only, found {', '.join(unknown)}")
        self.append(Blob(*shape))
