"""A blob: a named slot of a workspace that holds a tensor, a string or an object."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Blob:
    """A slot.

    `value` is None while the blob is empty; see `operators.registry` for what it may hold.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value


def kind_of(value: Any) -> str:
    """Return the name of the type of a blob's value, in Caffe2's manner."""
    if value is None:
        return "nullptr (uninitialized)"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "Tensor"
    return "std::string" if isinstance(value, bytes) else type(value).__name__


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, of numbers or of strings."""
    return isinstance(value, (torch.Tensor, np.ndarray))
