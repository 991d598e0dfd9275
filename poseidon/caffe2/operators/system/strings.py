"""Tensors of strings: prefixes, suffixes, tests and joins; Print."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.runtime.values import strings_of


def _texts(x: Any) -> list[bytes]:
    """Return the strings of a tensor.

    Raises:
        ValueError: it has numbers.
    """
    if not isinstance(x, np.ndarray):
        raise ValueError("the input is a tensor of numbers, expected strings")
    return list(x.reshape(-1).tolist())


def _strings(x: Any, change: Callable[[bytes], bytes]) -> Any:
    texts = _texts(x)
    made = strings_of(list(map(change, texts)))
    return made.reshape(x.shape)


def _booleans(x: Any, test: Callable[[bytes], bool]) -> Tensor:
    return torch.tensor(list(map(test, _texts(x))), dtype=torch.bool).reshape(x.shape)


@operator("StringPrefix")
def string_prefix(x: Any, *, length: int = 3) -> Any:
    """Return the first bytes of each string."""
    return _strings(x, lambda text: text[:length])


@operator("StringSuffix")
def string_suffix(x: Any, *, length: int = 3) -> Any:
    """Return the last bytes of each string."""
    return _strings(x, lambda text: text[-length:] if length else b"")


@operator("StringStartsWith")
def string_starts_with(x: Any, *, prefix: bytes = b"") -> Tensor:
    return _booleans(x, lambda text: text.startswith(prefix))


@operator("StringEndsWith")
def string_ends_with(x: Any, *, suffix: bytes = b"") -> Tensor:
    return _booleans(x, lambda text: text.endswith(suffix))


@operator("StringEquals")
def string_equals(x: Any, *, text: bytes = b"") -> Tensor:
    return _booleans(x, lambda each: each == text)


@operator("StringJoin", expected="N *")
def string_join(x: Any, *, delimiter: str = ",", axis: int = 0) -> Any:
    """Return for each row (axis 0) or column (axis 1) one string: its values, each followed by a
    delimiter.
    """
    values = x if isinstance(x, np.ndarray) else x.cpu().numpy()
    rows = values.reshape(len(values), -1)
    made = [
        "".join(
            (item.decode() if isinstance(item, bytes) else f"{item:g}") + delimiter for item in row
        )
        for row in (rows if axis == 0 else rows.T).tolist()
    ]
    return strings_of([text.encode() for text in made])


@operator("Print")
def print_(x: Any, *, context: Context, to_file: bool = False, limit: int = 1000) -> None:
    """Print the first values of a tensor; with `to_file` add them to `<name>.log` in the root
    folder.
    """
    values = ",".join(_text(value) for value in x.reshape(-1)[:limit].tolist())
    if to_file:
        name = context.definition.input[0].replace("/", "_")
        with open(f"{context.workspace.root_folder}/{name}.log", "a", encoding="utf-8") as file:
            file.write(f"{values}\n")
        return
    shape = ",".join(str(size) for size in x.shape)
    sys.stderr.write(f"Tensor {context.definition.input[0]} ({shape}): {values}\n")


def _text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


@operator("WallClockTime")
def wall_clock_time() -> Tensor:
    """Return the time in nanoseconds, an int64 scalar."""
    return torch.tensor(time.time_ns())


@operator("Assert")
def assert_(condition: Tensor, *, error_msg: str = "") -> None:
    """Raise ValueError when a value of the condition is false."""
    if not bool(condition.bool().all()):
        raise ValueError(error_msg or "an assertion does not hold")


@operator("Conditional", gradient=NO_GRADIENT)
def conditional(condition: Tensor, x: Any, y: Any) -> Any:
    """Return the rows of x where the condition holds, else the rows of y."""
    if isinstance(x, np.ndarray):
        return np.where(condition.numpy().reshape((-1,) + (1,) * (x.ndim - 1)), x, y)
    return torch.where(condition.reshape((-1,) + (1,) * (x.dim() - 1)), x, y)
