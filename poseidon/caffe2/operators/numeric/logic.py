"""Comparisons, logic, choices, and the largest, least and mean of several inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import check_count
from poseidon.caffe2.operators.numeric.arithmetic import NUMPY, Broadcast, summed_to
from poseidon.caffe2.operators.numeric.elementwise import unary
from poseidon.caffe2.operators.numeric.functions import data_type
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.data_types import torch_type


def _binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name)
    def apply(a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY) -> Tensor:
        return function(a, rule.fit(a, b))


for _name, _function in {
    "LT": torch.lt,
    "LE": torch.le,
    "GT": torch.gt,
    "GE": torch.ge,
    "EQ": torch.eq,
    "NE": torch.ne,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}.items():
    _binary(_name, _function)


unary("Not", torch.logical_not, None, __name__)


@operator("SumReduceLike")
def sum_reduce_like(a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY) -> Tensor:
    """Return a summed to the shape of b, which would be broadcast to it."""
    fitted = replace(rule, broadcast=True).fit(a, b)
    return summed_to(a, fitted).reshape(b.shape)


@operator("Where", shapes="?, *S, *S")
def where(condition: Tensor, x: Any, y: Any, *, broadcast_on_rows: bool = False) -> Any:
    """Return x where the condition holds, else y; with `broadcast_on_rows` it has one value for
    each row.
    """
    expected = tuple(x.shape[:1] if broadcast_on_rows else x.shape)
    if tuple(condition.shape) != expected:
        raise ValueError(
            f"the condition has the shape {tuple(condition.shape)}, expected {expected}"
        )
    if isinstance(x, np.ndarray):
        chosen = condition.cpu().numpy()
        shape = chosen.shape + (1,) * (x.ndim - chosen.ndim) if broadcast_on_rows else chosen.shape
        return np.where(chosen.reshape(shape), x, y)
    if broadcast_on_rows:
        condition = condition.reshape(condition.shape + (1,) * (x.dim() - condition.dim()))
    return torch.where(condition, x, y)


@operator("IsMemberOf")
def is_member_of(x: Any, *, value: Argument, dtype: Argument | None = None) -> Tensor:
    """Return whether each element is one of the values of the argument `value`."""
    given: list[Any] = [*value.strings, *value.ints, *value.floats]
    kind = None if dtype is None else data_type(dtype.s if dtype.HasField("s") else dtype.i)
    if isinstance(x, np.ndarray) or kind == TensorProto.STRING:
        wanted = set(given)
        found = [item in wanted for item in x.reshape(-1).tolist()]
        return torch.tensor(found, dtype=torch.bool).reshape(x.shape)
    values = torch.tensor(given, device=x.device).to(x.dtype if kind is None else torch_type(kind))
    same: Tensor = x.unsqueeze(-1) == values.to(x.dtype)
    return same.any(-1)


@operator("Max", gradient="MaxGradient(O0, GO0, I*) -> GI*", shapes="*S, ...")
def max_(x: Tensor, *others: Tensor) -> Tensor:
    """Return the largest of all inputs, element by element."""
    most = x.clone()
    for other in others:
        most = torch.maximum(most, other)
    return most


@operator("Min", gradient="MinGradient(O0, GO0, I*) -> GI*", shapes="*S, ...")
def min_(x: Tensor, *others: Tensor) -> Tensor:
    """Return the least of all inputs, element by element."""
    least = x.clone()
    for other in others:
        least = torch.minimum(least, other)
    return least


@operator("MaxGradient", "MinGradient", expected="*S, ...")
def extreme_gradient(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `Max` or `Min`: the output's, where an input equals the output."""
    return tuple(torch.where(x == y, dy, 0) for x in inputs)


@operator("Mean", gradient="MeanGradient(GO0) -> GI*", shapes="*S, ...")
def mean(x: Tensor, *others: Tensor) -> Tensor:
    """Return the mean of all inputs, element by element."""
    total = x.clone()
    for other in others:
        total += other
    return total / (1 + len(others))


@operator("MeanGradient")
def mean_gradient(dy: Tensor, *, context: Context) -> tuple[Tensor, ...]:
    """Return the gradients of `Mean`, one tensor for each."""
    return tuple(dy / context.outputs for _ in range(context.outputs))


@operator("SquareRootDivide", gradient="SquareRootDivide(GO0, I1) -> GI0", shapes="N *")
def square_root_divide(x: Tensor, scale: Tensor) -> Tensor:
    """Return each row of x divided by the square root of its scale; a scale of 0 divides by 1."""
    check_count("the scale", scale, len(x))
    root = torch.where(scale > 0, scale, 1).to(x.dtype).sqrt()
    return x / root.reshape(-1, *[1] * (x.dim() - 1))
