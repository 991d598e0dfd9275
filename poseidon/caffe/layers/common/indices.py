"""Values of blobs that are indices: labels, items of a batch, images of regions.

Law: a value is truncated to an integer, as by Caffe's cast. It must be finite: C leaves the cast of
other values undefined. Values are checked on the CPU only, because a GPU would have to be
synchronized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.errors import DataError

INTEGERS = range(-(2**31), 2**31)
"""The values of Caffe's int."""


def to_indices(values: Tensor, count: int) -> Tensor:
    """Convert values to indices.

    Raises:
        DataError: a value is outside 0 .. count - 1.
    """
    if wrong := outside(values, range(count)):
        raise DataError(f"index {wrong} is outside 0..{count - 1}")
    return values.detach().long()


def outside(values: Tensor, within: range) -> str:
    """Return a value, for messages, whose integer is outside a range or that is not finite.

    Returns:
        "" if there is none, or if the values are not on the CPU.
    """
    if values.device.type != "cpu" or not values.numel():
        return ""
    low, high = (float(value) for value in torch.aminmax(values.detach()))
    # Both are NaN if any value is.
    if low > within.start - 1 and high < within.stop:
        return ""
    wrong = high if high >= within.stop else low
    return f"{wrong:.0f}" if wrong.is_integer() else f"{wrong:g}"
