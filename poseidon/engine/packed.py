"""Values as bytes: tensors, numbers, strings, lists, tuples and dicts, nothing else.

Law: they are read with `torch.load(weights_only=True)`, so reading them runs no code.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import SnapshotError


def packed(value: object) -> bytes:
    """Return a value as the bytes of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes | bytearray, source: str) -> Any:
    """Return the value of such bytes, with all tensors on the CPU.

    Args:
        source: their origin, for messages.

    Raises:
        SnapshotError: they are not such a file, or one that would run code when it is read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of other protocols
            return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
        TypeError,
        OSError,
    ) as error:
        # torch's own sentence advises to load the file without this protection
        raise SnapshotError(
            f"{source} is not a checkpoint of a group; expected a file of group.save(), which "
            "torch.load(weights_only=True) reads"
        ) from error


def on_host(value: Any) -> Any:
    """Return a copy of a value of dicts, lists, tuples and tensors, with all
    tensors on the CPU; others stay as they are.
    """
    return mapped(value, lambda tensor: tensor.detach().cpu().clone())


def mapped(value: Any, change: Callable[[Tensor], object]) -> Any:
    """Return a value of dicts, lists, tuples and tensors with something in place of each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
