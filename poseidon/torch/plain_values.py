"""Values that the workers of a group exchange by `gather`, `broadcast` and `all_reduce`.

Law: a value is made of tensors, numbers, strings, bytes, None, lists, tuples and dicts. It travels
in the format of a checkpoint, so reading one runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.engine.leaf import mapped, on_host, packed, unpacked
from poseidon.errors import UsageError
from poseidon.torch.process_group.worker_parts import ReduceRule

PLAIN = (bool, int, float, str, bytes, type(None))


_REDUCE: dict[ReduceRule, Callable[[Tensor], Tensor]] = {
    ReduceRule.SUM: lambda all_W: all_W.sum(0),
    ReduceRule.MEAN: lambda all_W: all_W.double().mean(0),
    ReduceRule.MIN: lambda all_W: all_W.amin(0),
    ReduceRule.MAX: lambda all_W: all_W.amax(0),
}
"""Whole numbers are added in 64 bits, others in float64, in the order of ranks."""
_REDUCE_WHOLE: dict[ReduceRule, Callable[[Sequence[int]], float]] = {
    ReduceRule.SUM: sum,
    ReduceRule.MEAN: lambda values: sum(values) / len(values),
    ReduceRule.MIN: min,
    ReduceRule.MAX: max,
}


def encode(value: object, call: str) -> bytes:
    """Return the bytes of a value.

    Raises:
        UsageError: a part of it is of a different type.
    """
    strange = next(
        (part for part in _parts(value) if not (isinstance(part, Tensor) or type(part) in PLAIN)),
        None,
    )
    if strange is not None:
        raise UsageError(
            f"{call}() was given a {type(strange).__name__}; expected tensors, numbers, strings, "
            "bytes, None, and lists, tuples and dicts of them"
        )
    return packed(on_host(value))


def check_number(value: object, call: str) -> None:
    """Refuse what is not a real number, or a tensor of real numbers."""
    if isinstance(value, Tensor):
        given = f"a tensor of {value.dtype}" if value.is_complex() else ""
    else:
        given = "" if isinstance(value, Real | np.bool_) else f"a {type(value).__name__}"
    if given:
        raise UsageError(
            f"{call}() was given {given}; expected a real number, or a tensor of real numbers "
            "(torch.view_as_real() of complex ones)"
        )


def decode(content: bytes, rank: int, device: torch.device | None) -> Any:
    """Return the value of bytes from a worker, its tensors on a device.

    Raises:
        SnapshotError: the bytes are not of `encode`.
    """
    value = unpacked(content, f"the value of worker {rank}")
    return value if device is None else mapped(value, lambda tensor: tensor.to(device))


def device_of(value: object) -> torch.device | None:
    """Return the device of the first tensor of a value; None where it has none."""
    return next((part.device for part in _parts(value) if isinstance(part, Tensor)), None)


def reduction(name: str) -> ReduceRule:
    """Return the reduction of a name.

    Raises:
        UsageError: there is none.
    """
    found = next((known for known in _REDUCE if known.value == name), None)
    if found is None:
        names = ", ".join(f"'{known.value}'" for known in _REDUCE)
        raise UsageError(f"op is {name!r}; expected one of {names}")
    return found


def reduce(values: Sequence[Any], how: ReduceRule) -> Tensor | float:
    """Reduce the numbers or tensors of all workers to one.

    Args:
        values: by rank: numbers, or tensors of one shape.

    Returns:
        A number of Python for numbers; else a tensor of the type of the first, or float64 for the
        mean of whole numbers.

    Raises:
        UsageError: the values do not fit each other.
    """
    if all(type(value) is int for value in values):  # of any size
        return _REDUCE_WHOLE[how](values)
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]
    first = tensors[0]
    for rank, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise UsageError(
                f"worker 0 gives all_reduce() {_describe(values[0])}, but worker {rank} gives "
                f"{_describe(values[rank])}; all workers must give the same type and shape"
            )
    whole = not first.dtype.is_floating_point
    result = _REDUCE[how](torch.stack(tensors).to(torch.int64 if whole else torch.float64))
    if not isinstance(values[0], Tensor):
        return result.item()
    return result if whole and how is ReduceRule.MEAN else result.to(first.dtype)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _parts(value: object) -> Iterator[object]:
    """Yield what a value is made of: keys of dicts, too."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value
