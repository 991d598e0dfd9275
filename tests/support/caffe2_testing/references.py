"""Arrays for reference functions that were written for the NumPy of Caffe2's time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


class ReferenceArray(np.ndarray):
    """An array that still does what NumPy gave up.

    One element is a number (`float(x)`, `table[3] = x`), as before NumPy 2.4. A list with slices is
    an index (`x[[slice(0, 2), slice(None)]]`), as before NumPy 1.23.
    """

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __getitem__(self, key: Any) -> Any:
        several = isinstance(key, list) and any(isinstance(part, slice) for part in key)
        return super().__getitem__(tuple(key) if several else key)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return a result: a number where it has no dimensions, as for a plain array."""
        return array.view(type(self)) if array.ndim else array[()]


def as_reference_arrays(values: Iterable[Any]) -> list[Any]:
    """Return values with their arrays as `ReferenceArray`, over the same memory."""
    return [value.view(ReferenceArray) if type(value) is np.ndarray else value for value in values]
