"""Blob: data and diff as numpy arrays that share torch's memory, as in pycaffe.

Law: an assignment to `blob.data[...]` or `blob.diff[...]` changes what the next layer reads. The
memory stays the same until `reshape` needs more, and an array of a user stays valid even then, and
after its net has been freed. On a GPU an access copies the newer of host and device copy to the
other side, so users must take the array from the blob again after each pass, as with Caffe.
"""

from __future__ import annotations

import math
from enum import Enum
from numbers import Real
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
    """The copy of a memory that was written last."""

    NEITHER = "both are equal"
    HOST = "the host's"
    DEVICE = "the device's"


def needs_host_copy(tensor: Tensor) -> bool:
    """Return whether numpy cannot access a tensor's memory, so that the host needs a copy."""
    return tensor.device.type != "cpu"


class BlobMemory:
    """A flat float32 array, with copies on the host and the device.

    Args:
        device: the device's copy; on a CPU it is the host's copy, too.
    """

    def __init__(self, device: Tensor) -> None:
        self._device = device
        self._host = None if needs_host_copy(device) else device
        self._newer = Newer.NEITHER

    @property
    def count(self) -> int:
        """The number of values that fit."""
        return self._device.numel()

    def host(self) -> Tensor:
        """Return the host's copy, for reading and writing."""
        if self._host is self._device:
            return self._device
        if self._host is None:
            self._host = self._device.to("cpu", copy=True)
        elif self._newer is Newer.DEVICE:
            self._host.copy_(self._device)
        self._newer = Newer.HOST
        return self._host

    def read(self) -> Tensor:
        """Return the device's copy, for reading only."""
        if self._newer is Newer.HOST and self._host is not None:
            self._device.copy_(self._host)
            self._newer = Newer.NEITHER
        return self._device

    def write(self) -> Tensor:
        """Return the device's copy, for reading and writing."""
        self.read()
        if self._host is not self._device:
            self._newer = Newer.DEVICE
        return self._device


class Blob:
    """An array of a net or a layer with its gradient.

    Args:
        shape: the extents; none for a scalar.
        device: the device of the layers that use it.
    """

    def __init__(self, *shape: int, device: torch.device = CPU) -> None:
        self._device = device
        self._shape: Shape = ()
        self._data: BlobMemory | None = None
        self._diff: BlobMemory | None = None
        self.reshape(*shape)

    @property
    def data(self) -> NDArray[np.float32]:
        """The values, as a view."""
        return self._as_numpy(self.data_memory().host())

    @property
    def diff(self) -> NDArray[np.float32]:
        """The gradient, as a view."""
        return self._as_numpy(self.diff_memory().host())

    @property
    def shape(self) -> Shape:
        """The extents."""
        return self._shape

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self._shape)

    @property
    def num(self) -> int:
        """The first of four extents; 1 if the blob has fewer axes."""
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
        """Change the shape. The memory stays the same unless it is too small.

        Raises:
            UsageError: an extent is negative, or not a whole number.
        """
        if not all(_is_extent(extent) for extent in shape):
            raise UsageError(
                f"a blob cannot have the shape {shape}: expected extents, whole numbers of 0 or "
                "more, as in reshape(2, 3)"
            )
        self._shape = tuple(int(extent) for extent in shape)
        if self._data is not None and self._data.count < self.count:
            self._data = None
        if self._diff is not None and self._diff.count < self.count:
            self._diff = None

    # For the code that runs layers:

    def data_memory(self) -> BlobMemory:
        """Return the memory of the values, initially zeros."""
        if self._data is None:
            self._data = BlobMemory(torch.zeros(self.count, device=self._device))
        return self._data

    def diff_memory(self) -> BlobMemory:
        """Return the memory of the gradient, initially zeros."""
        if self._diff is None:
            self._diff = BlobMemory(torch.zeros(self.count, device=self._device))
        return self._diff

    def read_data(self) -> Tensor:
        """Return the values on the device, for reading only."""
        return self._shaped(self.data_memory().read())

    def read_diff(self) -> Tensor:
        """Return the gradient on the device, for reading only."""
        return self._shaped(self.diff_memory().read())

    def write_data(self) -> Tensor:
        """Return the values on the device, for writing."""
        return self._shaped(self.data_memory().write())

    def write_diff(self) -> Tensor:
        """Return the gradient on the device, for writing."""
        return self._shaped(self.diff_memory().write())

    def bind(self, tensor: Tensor) -> None:
        """Use the memory and the shape of a tensor for the values."""
        self._shape = tuple(tensor.shape)
        self._device = tensor.device
        # `.data`, not `detach`: autograd must not count a write as an in-place change.
        self._data = BlobMemory(tensor.data.contiguous().reshape(-1))
        if self._diff is not None and self._diff.count < self.count:
            self._diff = None

    def share_data(self, other: Blob) -> None:
        """Use the memory of another blob's values from now on."""
        self._data = other.data_memory()

    def share_diff(self, other: Blob) -> None:
        """Use the memory of another blob's gradient from now on."""
        self._diff = other.diff_memory()

    def _as_numpy(self, flat: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._shaped(flat).numpy()
        return array

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat[: self.count].view(self._shape)

    def _legacy(self, axis: int) -> int:
        if len(self._shape) > LEGACY_AXES:
            raise UsageError(
                f"a blob of {len(self._shape)} axes has no num, channels, height and width; "
                "expected at most 4 axes"
            )
        return self._shape[axis] if axis < len(self._shape) else 1

    def __repr__(self) -> str:
        return f"Blob{self._shape}"


def _is_extent(value: Any) -> bool:
    """Return whether a value of a user's can be an extent. 2.0 can: `/` divides to such numbers."""
    is_number = isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return bool(is_number and value >= 0 and value % 1 == 0)


class BlobVec(list[Blob]):
    """A layer's learnable blobs, with pycaffe's `add_blob`."""

    def add_blob(self, *shape: int, **unknown: Any) -> None:
        """Add a learnable blob of zeros, from the `setup` of a Python layer.

        Raises:
            UsageError: it gets keyword arguments.
        """
        if unknown:
            raise UsageError(f"add_blob takes extents only, found {', '.join(unknown)}")
        self.append(Blob(*shape))


class RawBlobVec(list[Blob]):
    """The bottoms or the tops of a layer."""


class BoolVec(list[bool]):
    """A flag for each bottom of a layer: `propagate_down`."""
