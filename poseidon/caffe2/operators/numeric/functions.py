"""Functions of single elements that are no activations: powers, angles, rounding, casts and
checks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.numeric.arithmetic import aligned
from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.data_types import torch_type


@operator("Abs", gradient="AbsGradient(I0, GO0) -> GI0", plain=torch.abs)
def abs_(x: Tensor) -> Tensor:
    """Return |x|."""
    return torch.abs(x)


@operator("AbsGradient", expected="*S, *S")
def abs_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Abs`."""
    return dy * torch.sign(x)


@operator("Acos", gradient="AcosGradient(I0, GO0) -> GI0", plain=torch.acos)
def acos(x: Tensor) -> Tensor:
    """Return the arc cosine."""
    return torch.acos(x)


@operator("AcosGradient", expected="*S, *S")
def acos_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Acos`."""
    return -dy * torch.rsqrt(1 - x * x)


@operator("Asin", gradient="AsinGradient(I0, GO0) -> GI0", plain=torch.asin)
def asin(x: Tensor) -> Tensor:
    """Return the arc sine."""
    return torch.asin(x)


@operator("AsinGradient", expected="*S, *S")
def asin_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Asin`."""
    return dy * torch.rsqrt(1 - x * x)


@operator("Atan", gradient="AtanGradient(I0, GO0) -> GI0", plain=torch.atan)
def atan(x: Tensor) -> Tensor:
    """Return the arc tangent."""
    return torch.atan(x)


@operator("AtanGradient", expected="*S, *S")
def atan_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Atan`."""
    return dy / (1 + x * x)


@operator("Cos", gradient="CosGradient(I0, GO0) -> GI0", plain=torch.cos)
def cos(x: Tensor) -> Tensor:
    """Return the cosine."""
    return torch.cos(x)


@operator("CosGradient", expected="*S, *S")
def cos_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Cos`."""
    return -dy * torch.sin(x)


@operator("Sin", gradient="SinGradient(I0, GO0) -> GI0", plain=torch.sin)
def sin(x: Tensor) -> Tensor:
    """Return the sine."""
    return torch.sin(x)


@operator("SinGradient", expected="*S, *S")
def sin_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Sin`."""
    return dy * torch.cos(x)


@operator("Tan", gradient="TanGradient(I0, GO0) -> GI0", plain=torch.tan)
def tan(x: Tensor) -> Tensor:
    """Return the tangent."""
    return torch.tan(x)


@operator("TanGradient", expected="*S, *S")
def tan_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Tan`."""
    return dy / torch.cos(x).square()


@operator("Cosh", gradient="CoshGradient(GO0, I0) -> GI0", plain=torch.cosh)
def cosh(x: Tensor) -> Tensor:
    """Return the hyperbolic cosine."""
    return torch.cosh(x)


@operator("CoshGradient", expected="*S, *S")
def cosh_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `Cosh`."""
    return dy * torch.sinh(x)


@operator("Sinh", gradient="SinhGradient(GO0, I0) -> GI0", plain=torch.sinh)
def sinh(x: Tensor) -> Tensor:
    """Return the hyperbolic sine."""
    return torch.sinh(x)


@operator("SinhGradient", expected="*S, *S")
def sinh_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `Sinh`."""
    return dy * torch.cosh(x)


@operator("Cube", gradient="CubeGradient(GO0, I0) -> GI0")
def cube(x: Tensor) -> Tensor:
    """Return x^3."""
    return x * x * x


@operator("CubeGradient", expected="*S, *S")
def cube_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `Cube`."""
    return 3 * dy * x * x


@operator("Cbrt", gradient="CbrtGradient(GO0, O0) -> GI0")
def cbrt(x: Tensor) -> Tensor:
    """Return the cube root; that of a negative number is negative."""
    return torch.sign(x) * torch.abs(x).pow(1 / 3)


@operator("CbrtGradient", expected="*S, *S")
def cbrt_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of `Cbrt`."""
    return dy / (3 * y * y)


@operator("Rsqrt", "RSqrt", gradient="RsqrtGradient(GO0, O0) -> GI0", plain=torch.rsqrt)
def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    return torch.rsqrt(x)


@operator("RsqrtGradient", expected="*S, *S")
def rsqrt_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of `Rsqrt`."""
    return -0.5 * dy * y * y * y


@operator("Reciprocal", gradient="ReciprocalGradient(O0, GO0) -> GI0", plain=torch.reciprocal)
def reciprocal(x: Tensor) -> Tensor:
    """Return 1 / x."""
    return torch.reciprocal(x)


@operator("ReciprocalGradient", expected="*S, *S")
def reciprocal_gradient(y: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Reciprocal`."""
    return -dy * y * y


@operator("Erf", gradient="ErfGradient(I0, GO0) -> GI0", plain=torch.erf)
def erf(x: Tensor) -> Tensor:
    """Return the error function."""
    return torch.erf(x)


@operator("ErfGradient", expected="*S, *S")
def erf_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Erf`."""
    return dy * (2 / math.sqrt(math.pi)) * torch.exp(-x * x)


@operator("Log1p", gradient="Log1pGradient(I0, GO0) -> GI0", plain=torch.log1p)
def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x)."""
    return torch.log1p(x)


@operator("Log1pGradient", expected="*S, *S")
def log1p_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `Log1p`."""
    return dy / (1 + x)


@operator("Logit", gradient="LogitGradient(I0, GO0) -> GI0")
def logit(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return log(x / (1 - x)), x first moved into [eps, 1 - eps]."""
    return torch.logit(x, eps)


@operator("LogitGradient", expected="*S, *S")
def logit_gradient(x: Tensor, dy: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return the gradient of `Logit`; 0 outside [eps, 1 - eps]."""
    return torch.where((x < eps) | (x > 1 - eps), 0, dy / (x * (1 - x)))


@operator("Ceil", plain=torch.ceil)
def ceil(x: Tensor) -> Tensor:
    """Return the least whole number that is not below x."""
    return torch.ceil(x)


@operator("Floor", plain=torch.floor)
def floor(x: Tensor) -> Tensor:
    """Return the largest whole number that is not above x."""
    return torch.floor(x)


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
    x: Tensor,
    e: Tensor | None = None,
    *,
    exponent: float | None = None,
    broadcast: bool = False,
    axis: int = -1,
    axis_str: str = "",
    order: str = "NCHW",
) -> Tensor:
    """Return x to the power of the argument `exponent`, or of the second input."""
    if e is None:
        return torch.pow(x, 0.0 if exponent is None else exponent)
    return torch.pow(x, aligned(x, e, broadcast, axis, axis_str, order))


@operator("NegateGradient", gradient="Negative(GO0) -> GI0", plain=torch.clone)
def negate_gradient(x: Tensor) -> Tensor:
    """Return x; its gradient changes its sign."""
    return x.clone()


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
                f"there is no data type {name}; expected a name such as FLOAT or INT32"
            ) from None
    return int(given)


@operator("Cast", gradient=_cast_rule)
def cast(x: Any, *, to: Argument) -> Any:
    """Return x as another data type; fractions are cut off.

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
    made = np.empty(x.numel(), dtype=object)
    made[:] = [(form % value).encode() for value in x.reshape(-1).tolist()]
    return made.reshape(tuple(x.shape))


@operator("FloatToHalf", gradient="HalfToFloat(GO0) -> GI0")
def float_to_half(x: Tensor) -> Tensor:
    """Return x as 16-bit numbers."""
    return x.to(torch.float16)


@operator("HalfToFloat", gradient="FloatToHalf(GO0) -> GI0")
def half_to_float(x: Tensor) -> Tensor:
    """Return x as 32-bit numbers."""
    return x.to(torch.float32)
