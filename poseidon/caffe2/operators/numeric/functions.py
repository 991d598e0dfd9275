"""Elementwise functions, comparisons and logic."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count
from poseidon.caffe2.operators.numeric.arithmetic import (
    NUMPY,
    Broadcast,
    binary,
    differentiable,
    summed_to,
    unary,
)
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.values import strings_of, torch_type

differentiable("Abs", torch.abs, "I0, GO0", lambda x, dy: dy * torch.sign(x))
differentiable("Acos", torch.acos, "I0, GO0", lambda x, dy: -dy * torch.rsqrt(1 - x * x))
differentiable("Asin", torch.asin, "I0, GO0", lambda x, dy: dy * torch.rsqrt(1 - x * x))
differentiable("Atan", torch.atan, "I0, GO0", lambda x, dy: dy / (1 + x * x))
differentiable("Cos", torch.cos, "I0, GO0", lambda x, dy: -dy * torch.sin(x))
differentiable("Sin", torch.sin, "I0, GO0", lambda x, dy: dy * torch.cos(x))
differentiable("Tan", torch.tan, "I0, GO0", lambda x, dy: dy / torch.cos(x).square())
differentiable("Cosh", torch.cosh, "GO0, I0", lambda dy, x: dy * torch.sinh(x))
differentiable("Sinh", torch.sinh, "GO0, I0", lambda dy, x: dy * torch.cosh(x))
differentiable(
    "Erf", torch.erf, "I0, GO0", lambda x, dy: dy * (2 / math.sqrt(math.pi)) * torch.exp(-x * x)
)
differentiable("Log1p", torch.log1p, "I0, GO0", lambda x, dy: dy / (1 + x))
differentiable("Cube", lambda x: x * x * x, "GO0, I0", lambda dy, x: 3 * dy * x * x)
differentiable(
    "Cbrt",
    lambda x: torch.sign(x) * torch.abs(x).pow(1 / 3),  # of a negative number: negative
    "GO0, O0",
    lambda dy, y: dy / (3 * y * y),
)
differentiable("Rsqrt", torch.rsqrt, "GO0, O0", lambda dy, y: -0.5 * dy * y * y * y)
differentiable("Reciprocal", torch.reciprocal, "O0, GO0", lambda y, dy: -dy * y * y)

unary("RSqrt", torch.rsqrt, "RsqrtGradient(GO0, O0) -> GI0", __name__)  # Caffe2 has both names
unary("Ceil", torch.ceil, None, __name__)
unary("Floor", torch.floor, None, __name__)
unary("NegateGradient", torch.clone, "Negative(GO0) -> GI0", __name__)


@operator("Logit", gradient="LogitGradient(I0, GO0) -> GI0")
def logit(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return log(x / (1 - x)), x first moved into [eps, 1 - eps]."""
    return torch.logit(x, eps)


@operator("LogitGradient", expected="*S, *S")
def logit_gradient(x: Tensor, dy: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return the gradient of `Logit`; 0 outside [eps, 1 - eps]."""
    result: Tensor = torch.ops.aten.logit_backward(dy, x, eps)
    return result


@operator("Clip", gradient="ClipGradient(O0, GO0) -> GI0")
def clip(x: Tensor, *, min_: float | None = None, max_: float | None = None) -> Tensor:
    """Return x moved into [min, max]; without a limit there is none."""
    return x.clone() if min_ is None and max_ is None else torch.clamp(x, min_, max_)


@operator("ClipGradient", expected="*S, *S")
def clip_gradient(
    y: Tensor, dy: Tensor, *, min_: float | None = None, max_: float | None = None
) -> Tensor:
    """Return the gradient of `Clip`: 0 where a limit is reached."""
    if min_ is not None:
        dy = torch.where(y > min_, dy, 0)
    return dy if max_ is None else torch.where(y < max_, dy, 0)


@operator("Mod")
def mod(x: Tensor, *, divisor: int, sign_follow_divisor: bool = False) -> Tensor:
    """Return the remainder of x / divisor for integers, with the sign of x, or of the divisor.

    Raises:
        ValueError: the divisor is 0.
    """
    if divisor == 0:
        raise ValueError("the divisor must not be 0")
    return torch.remainder(x, divisor) if sign_follow_divisor else torch.fmod(x, divisor)


def _pow_rule(maker: GradientMaker) -> None:
    exponent = maker.argument("exponent")
    x, dy, dx = maker.I(0), maker.GO(0), maker.GI(0)
    if exponent is None:
        _pow_blob_rule(maker)
    else:
        maker.op("Pow", [x], [dx], {"exponent": float(exponent) - 1})
        maker.op("Mul", [dx, dy], [dx], copy=False)
        maker.op("Scale", [dx], [dx], {"scale": float(exponent)})


def _pow_blob_rule(maker: GradientMaker) -> None:
    """Make d(x^e)/dx = e x^(e - 1), then d(x^e)/de = x^e log x, summed where e was broadcast."""
    x, e, y, dy = maker.I(0), maker.I(1), maker.O(0), maker.GO(0)
    dx, de = maker.GI(0), maker.GI(1)
    full = f"{de}_autogen_pre_red"
    defaults = {"axis": -1, "axis_str": "", "order": "NCHW"}
    places = {name: maker.argument(name, default) for name, default in defaults.items()}
    broadcast = maker.argument("broadcast", 0)
    spread = {"broadcast": broadcast, **places} if broadcast else None
    maker.op("ConstantFill", [e], [de], {"value": 1.0})
    maker.op("Sub", [e, de], [de], copy=False)
    maker.op("Pow", [x, de], [dx], spread, copy=False)
    maker.op("Mul", [dx, dy], [dx], copy=False)
    maker.op("Mul", [dx, e], [dx], spread, copy=False)
    maker.op("Log", [x], [full], copy=False)
    maker.op("Mul", [full, y], [full], copy=False)
    maker.op("Mul", [full, dy], [full if broadcast else de], copy=False)
    if broadcast:
        maker.op("SumReduceLike", [full, e], [de], places)


@operator("Pow", gradient=_pow_rule, inputs=(1, 2))
def pow_(
    x: Tensor, e: Tensor | None = None, *, exponent: float | None = None, rule: Broadcast = NUMPY
) -> Tensor:
    """Return x to the power of the argument `exponent`, or of the second input."""
    if e is None:
        return torch.pow(x, 0.0 if exponent is None else exponent)
    return torch.pow(x, rule.fit(x, e))


@operator("Alias", gradient="GI0 = GO0")
def alias(x: Any) -> Any:
    """Return x itself: the output shares its memory."""
    return x


@operator("AliasWithName")
def alias_with_name(x: Any, *, name: str = "", is_backward: bool = False) -> Any:
    """Return x itself under a second name, which other frameworks read."""
    return x


@operator("DataCouple")
def data_couple(*xs: Any) -> tuple[Any, ...]:
    """Return the inputs: an output comes into being when all of them have."""
    return xs


@operator("NanCheck", gradient="NanCheck(GO0) -> GI0")
def nan_check(x: Tensor, *others: Tensor) -> Tensor:
    """Return x.

    Raises:
        ValueError: x has a value that is not finite.
    """
    enforce_finite(x)
    return x.clone()


@operator("EnforceFinite")
def enforce_finite(x: Tensor) -> None:
    """Raise ValueError when x has a value that is not finite."""
    if x.device.type != "meta" and not bool(torch.isfinite(x).all()):
        index = int(torch.nonzero(~torch.isfinite(x.reshape(-1)))[0])
        raise ValueError(f"Index {index} is not finite: {x.reshape(-1)[index].item()}")


@operator("ReplaceNaN")
def replace_nan(x: Tensor, *, value: float = 0.0) -> Tensor:
    """Return x with `value` in the place of each NaN."""
    return torch.where(torch.isnan(x), value, x)


def _cast_rule(maker: GradientMaker) -> None:
    from_type = maker.argument("from_type")
    if from_type is None:
        raise ValueError("the gradient of Cast needs the argument from_type")
    arguments = {"to": data_type(from_type), "from_type": data_type(maker.argument("to"))}
    maker.op("Cast", [maker.GO(0)], [maker.GI(0)], arguments)


def data_type(given: Any) -> int:
    """Return the number of a `TensorProto.DataType` that is given as a number or as a name."""
    if isinstance(given, (str, bytes)):
        name = given.decode() if isinstance(given, bytes) else given
        try:
            return int(TensorProto.DataType.Value(name.upper()))
        except ValueError:
            raise ValueError(
                f"there is no data type {name}; expected a name such as FLOAT"
            ) from None
    return int(given)


@operator("Cast", gradient=_cast_rule)
def cast(x: Any, *, to: Argument) -> Any:
    """Return x as a different data type; fractions are cut off.

    As STRING, integers and booleans are decimal, other numbers have six decimals.

    Raises:
        ValueError: x has strings, or there are no tensors of the data type.
    """
    kind = data_type(to.s if to.HasField("s") else to.i)
    if isinstance(x, np.ndarray):
        raise ValueError("a tensor of strings cannot be cast")
    if kind == TensorProto.STRING:
        return _as_strings(x)
    return x.to(torch_type(kind), copy=True)


def _as_strings(x: Tensor) -> Any:
    form = "%.6f" if x.is_floating_point() else "%d"
    made = strings_of([(form % value).encode() for value in x.reshape(-1).tolist()])
    return made.reshape(tuple(x.shape))


@operator("FloatToHalf", gradient="HalfToFloat(GO0) -> GI0")
def float_to_half(x: Tensor) -> Tensor:
    return x.to(torch.float16)


@operator("HalfToFloat", gradient="FloatToHalf(GO0) -> GI0")
def half_to_float(x: Tensor) -> Tensor:
    return x.to(torch.float32)


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
    binary(_name, _function, None, __name__)


unary("Not", torch.logical_not, None, __name__)


@operator("SumReduceLike")
def sum_reduce_like(a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY) -> Tensor:
    """Return a summed to the shape of b, which would be broadcast to it."""
    fitted = replace(rule, broadcast=True).fit(a, b)
    return summed_to(a, fitted).reshape(b.shape)


@operator("Where", shapes="?, *S, *S")
def where(condition: Tensor, x: Any, y: Any, *, broadcast_on_rows: bool = False) -> Any:
    """Return x where the condition holds, else y; `broadcast_on_rows` takes one value a row."""
    expected = tuple(x.shape[:1] if broadcast_on_rows else x.shape)
    if tuple(condition.shape) != expected:
        raise ValueError(f"the condition has the shape {tuple(condition.shape)}, not {expected}")
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


def _register_extreme(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register the largest or the least of all inputs, element by element."""

    @operator(name, gradient=f"{name}Gradient(O0, GO0, I*) -> GI*", shapes="*S, ...")
    def extreme(x: Tensor, *others: Tensor) -> Tensor:
        return functools.reduce(function, others, x.clone())


_register_extreme("Max", torch.maximum)
_register_extreme("Min", torch.minimum)


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
