"""Fillers: constants, given values and random values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.values import strings_of, torch_type

FLOAT, STRING = TensorProto.FLOAT, TensorProto.STRING


@dataclass(frozen=True, slots=True)
class Filled:
    """The arguments of a filler that say what shape it makes.

    Attributes:
        shape: where there is no input.
        extra_shape: appended to the input's.
        input_as_shape: whether the values of the input are the shape, not its own shape.
    """

    shape: tuple[int, ...] = ()
    extra_shape: tuple[int, ...] = ()
    input_as_shape: bool = False

    def sizes(self, inputs: Sequence[Tensor], context: Context) -> list[int]:
        """Return the shape; of the inputs at most the first counts.

        Raises:
            ValueError: an input and a shape are both given, or the shape is not a list.
        """
        if not inputs:
            given = context.definition.arg
            if any(argument.name == "shape" and argument.HasField("i") for argument in given):
                raise ValueError("the argument shape of a filler must be a list, not a number")
            return list(self.shape)
        if self.shape:
            raise ValueError("a filler has either an input or the argument shape")
        like = inputs[0]
        if self.input_as_shape and like.ndim != 1:
            raise ValueError(f"the input that is the shape has {like.ndim} dimensions, expected 1")
        return [*(like.tolist() if self.input_as_shape else like.shape), *self.extra_shape]


NO_SHAPE = Filled()


@operator("ConstantFill", gradient=NO_GRADIENT)
def constant_fill(
    *inputs: Tensor,
    context: Context,
    filled: Filled = NO_SHAPE,
    dtype: int = FLOAT,
    value: Argument | None = None,
) -> Any:
    """Return a tensor of one value; a string where `dtype` is STRING.

    A second input has the value, one element.
    """
    inputs, given = inputs[:1], inputs[1:]
    size = filled.sizes(inputs, context)
    if dtype == STRING:
        return np.full(size, b"" if value is None else value.s, dtype=object)
    number = 0 if value is None else value.f if value.HasField("f") else value.i
    if given and not given[0].is_meta:
        number = given[0].item()
    return torch.full(size, number, dtype=torch_type(dtype), device=context.device)


def _given(kind: str, dtype: torch.dtype | None) -> None:
    field = {torch.float32: "floats", torch.float64: "floats", None: "strings"}.get(dtype, "ints")

    @operator(f"GivenTensor{kind}Fill", gradient=NO_GRADIENT)
    def given_tensor_fill(*inputs: Tensor, context: Context, filled: Filled = NO_SHAPE) -> Any:
        size = filled.sizes(inputs, context)
        found = [argument for argument in context.definition.arg if argument.name == "values"]
        if not found:
            raise ValueError(f"the argument values of GivenTensor{kind}Fill is required")
        values = list(getattr(found[0], field)) or list(found[0].ints)
        if -1 not in size and len(values) != math.prod(size):
            raise ValueError(f"{len(values)} values are given for the shape {size}")
        if dtype is None:
            return strings_of(values).reshape(size)
        return torch.tensor(values, dtype=dtype, device=context.device).reshape(size)


for _kind, _dtype in {
    "": torch.float32,
    "Double": torch.float64,
    "Bool": torch.bool,
    "Int16": torch.int16,
    "Int": torch.int32,
    "Int64": torch.int64,
    "String": None,
}.items():
    _given(_kind, _dtype)


@operator("GivenTensorByteStringToUInt8Fill", gradient=NO_GRADIENT)
def given_tensor_byte_string_fill(
    *inputs: Tensor, context: Context, values: list[bytes], filled: Filled = NO_SHAPE
) -> Tensor:
    """Return the bytes of the first string of `values`, one a value of type uint8."""
    size = filled.sizes(inputs, context)
    given = (
        torch.frombuffer(bytearray(values[0]), dtype=torch.uint8) if values[0] else torch.empty(0)
    )
    return given.to(context.device, torch.uint8).reshape(size)


@operator("UniformFill", gradient=NO_GRADIENT, expected="?, one, one")
def uniform_fill(
    *inputs: Tensor,
    context: Context,
    filled: Filled = NO_SHAPE,
    min_: float = 0.0,
    max_: float = 1.0,
) -> Tensor:
    """Return values uniform between `min` and `max`; further inputs replace these."""
    size = filled.sizes(inputs[:1], context)
    if len(inputs) == 3:
        min_, max_ = inputs[1].item(), inputs[2].item()
        size = size if min_ <= max_ else [0, *size[1:]]
    return _empty(size, context).uniform_(min_, max(min_, max_), generator=context.generator)


@operator("UniformIntFill", gradient=NO_GRADIENT, expected="?, one, one")
def uniform_int_fill(
    *inputs: Tensor, context: Context, filled: Filled = NO_SHAPE, min_: int = 0, max_: int = 1
) -> Tensor:
    """Return integers uniform in `min` to `max`, inclusive; further inputs replace these."""
    size = filled.sizes(inputs[:1], context)
    if len(inputs) == 3:
        min_, max_ = int(inputs[1].item()), int(inputs[2].item())
        size = size if min_ <= max_ else [0, *size[1:]]
    made = torch.empty(size, dtype=torch.int32, device=context.device)
    return made.random_(min_, max(max_, min_) + 1, generator=context.generator)


@operator("GaussianFill", gradient=NO_GRADIENT)
def gaussian_fill(
    *inputs: Tensor,
    context: Context,
    filled: Filled = NO_SHAPE,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Return values of a normal distribution."""
    size = filled.sizes(inputs, context)
    return _empty(size, context).normal_(mean, std, generator=context.generator)


@operator("XavierFill", gradient=NO_GRADIENT)
def xavier_fill(*inputs: Tensor, context: Context, filled: Filled = NO_SHAPE) -> Tensor:
    """Return values uniform within sqrt(3 / fan_in), fan_in the size / the first dimension."""
    made = _empty(filled.sizes(inputs, context), context)
    limit = math.sqrt(3 / (made.numel() / made.shape[0]))
    return made.uniform_(-limit, limit, generator=context.generator)


@operator("MSRAFill", gradient=NO_GRADIENT)
def msra_fill(*inputs: Tensor, context: Context, filled: Filled = NO_SHAPE) -> Tensor:
    """Return normal values of spread sqrt(2 / fan_out), fan_out the size / the second dimension."""
    made = _empty(filled.sizes(inputs, context), context)
    spread = math.sqrt(2 / (made.numel() / made.shape[1]))
    return made.normal_(0, spread, generator=context.generator)


def _empty(size: Sequence[int], context: Context) -> Tensor:
    return torch.empty(list(size), device=context.device)
