"""Normalization of single examples: by instance, group, layer or vector."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import axis_of, check_count, check_tensor
from poseidon.caffe2.operators.layers.windows import in_nchw, in_order
from poseidon.caffe2.operators.registry import operator


def _statistics(rows: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return mean and sqrt(variance + epsilon) over the last dimension, which stays."""
    mean = rows.mean(-1, keepdim=True)
    if not rows.numel():  # torch warns of the variance of nothing
        return mean, mean.clone()
    return mean, (rows.var(-1, unbiased=False, keepdim=True) + epsilon).sqrt()


def _centred(rows: Tensor, drows: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of rows through (rows - mean) * inverse, both their statistics."""
    normal = (rows - mean) * inverse
    inner = (drows * normal).mean(-1, keepdim=True)
    return inverse * (drows - drows.mean(-1, keepdim=True) - normal * inner)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return images as N x groups x elements."""
    result: Tensor = x.unflatten(1, (groups, -1)).flatten(2)
    return result


def _grouped(
    x: Tensor, s: Tensor, b: Tensor, groups: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize NCHW images by groups of channels; return y, means, 1 / deviations, N x groups."""
    mean, deviation = _statistics(_by_group(x, groups), epsilon)
    normal = ((_by_group(x, groups) - mean) / deviation).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = normal * s.reshape(shape) + b.reshape(shape)
    return y, mean.squeeze(-1), 1 / deviation.squeeze(-1)


def _grouped_gradients(
    x: Tensor, s: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    groups = mean.shape[1]
    rows, mean, inverse = _by_group(x, groups), mean.unsqueeze(-1), inverse.unsqueeze(-1)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    normal = ((rows - mean) * inverse).reshape(x.shape)
    scaled = (dy * s.reshape(1, -1, *[1] * (x.dim() - 2))).reshape(rows.shape)
    dx = _centred(rows, scaled, mean, inverse).reshape(x.shape)
    return dx, (dy * normal).sum(axes), dy.sum(axes)


@operator(
    "InstanceNorm",
    gradient="InstanceNormGradient(I0, I1, I2, GO0, O1?, O2?) -> GI0, GI1, GI2",
    shapes="N C *S, C, C",
)
def instance_norm(
    x: Tensor, s: Tensor, b: Tensor, *, epsilon: float = 1e-5, order: str = "NCHW"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and 1 / deviation of each channel of each image."""
    (images,) = in_nchw(order, x)
    y, mean, inverse = _grouped(images, s, b, images.shape[1], epsilon)
    return in_order(order, y), mean, inverse


@operator("InstanceNormGradient", inputs=(4, 6), expected="N *S, C, C, N *S, N C, N C")
def instance_norm_gradient(
    x: Tensor,
    s: Tensor,
    b: Tensor,
    dy: Tensor,
    mean: Tensor | None = None,
    inverse: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    order: str = "NCHW",
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = in_nchw(order, x, dy)
    if mean is None or inverse is None:
        found, deviation = _statistics(x.flatten(2), epsilon)
        mean, inverse = found.squeeze(-1), 1 / deviation.squeeze(-1)
    dx, ds, db = _grouped_gradients(x, s, dy, mean, inverse)
    return in_order(order, dx), ds, db


@operator(
    "GroupNorm",
    gradient="GroupNormGradient(GO0, I0, I1, I2, O1, O2) -> GI0, GI1, GI2",
    shapes="N C *S, C, C",
)
def group_norm(
    x: Tensor, s: Tensor, b: Tensor, *, group: int = 32, epsilon: float = 1e-5, order: str = "NCHW"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and 1 / deviation of each group of channels of each image."""
    (images,) = in_nchw(order, x)
    if images.shape[1] % group:
        raise ValueError(f"{images.shape[1]} channels do not make {group} groups")
    y, mean, inverse = _grouped(images, s, b, group, epsilon)
    return in_order(order, y), mean, inverse


@operator("GroupNormGradient", expected="N *S, N *S, C, C, N G, N G")
def group_norm_gradient(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    b: Tensor,
    mean: Tensor,
    inverse: Tensor,
    *,
    order: str = "NCHW",
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = in_nchw(order, x, dy)
    dx, ds, db = _grouped_gradients(x, s, dy, mean, inverse)
    return in_order(order, dx), ds, db


def _check_elements(s: Tensor, b: Tensor, rows: Tensor) -> None:
    """Raise ValueError for a scale or a bias without one value for each element of a row."""
    check_count("the scale", s, rows.shape[-1])
    check_count("the bias", b, rows.shape[-1])


@operator("C10LayerNorm_DontUseThisOpYet")  # Caffe2 gives it no gradient
@operator(
    "LayerNorm",
    gradient="elementwise_affine: @Gradient(GO0, O0, O1, O2, I0, I1) -> GI0, GI1, GI2"
    " | @Gradient(GO0, O0, O1, O2, I0) -> GI0",
)
def layer_norm(
    x: Tensor,
    s: Tensor | None = None,
    b: Tensor | None = None,
    *,
    axis: int = 1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and deviation over the dimensions from `axis` on; scale, bias by element."""
    rows = x.flatten(axis_of(axis, x.dim()))
    mean, deviation = _statistics(rows, epsilon)
    y = (rows - mean) / deviation
    if s is not None and b is not None:
        _check_elements(s, b, rows)
        y = y * s.reshape(-1) + b.reshape(-1)
    return y.reshape(x.shape), mean, deviation


@operator("LayerNormGradient", outputs=(1, 3), expected="*S, *S, *M, *M, *S")
def layer_norm_gradient(
    dy: Tensor,
    y: Tensor,
    mean: Tensor,
    deviation: Tensor,
    x: Tensor,
    s: Tensor | None = None,
    *,
    axis: int = 1,
) -> tuple[Tensor, ...]:
    """Return the gradient of x, and of scale and bias where these are inputs."""
    axis %= x.dim()
    rows, given = x.flatten(axis), dy.flatten(axis)
    mean, inverse = mean.reshape(*rows.shape[:-1], 1), 1 / deviation.reshape(*rows.shape[:-1], 1)
    if s is None:
        return (_centred(rows, given, mean, inverse).reshape(x.shape),)
    check_count("the scale", s, rows.shape[-1])
    scaled = (given * (rows - mean) * inverse).reshape(mean.numel(), rows.shape[-1])
    dx = _centred(rows, given * s.reshape(-1), mean, inverse).reshape(x.shape)
    return dx, scaled.sum(0).reshape(s.shape), given.reshape(scaled.shape).sum(0).reshape(s.shape)


@operator("RMSNorm", gradient="RMSNormGradient(GO0, I0, I1, O1) -> GI0, GI1, GI2")
def rms_norm(
    x: Tensor, s: Tensor, b: Tensor, *, axis: int = 1, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return y, and 1 / root of the mean square from `axis` on (arXiv 1910.07467)."""
    rows = x.flatten(axis_of(axis, x.dim()))
    _check_elements(s, b, rows)
    inverse = torch.rsqrt((rows * rows).mean(-1) + eps)
    return (rows * inverse[..., None] * s.reshape(-1) + b.reshape(-1)).reshape(x.shape), inverse


@operator("RMSNormGradient", expected="*S, *S")
def rms_norm_gradient(
    dy: Tensor, x: Tensor, s: Tensor, inverse: Tensor, *, axis: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and bias of `RMSNorm`."""
    rows, given = x.flatten(axis % x.dim()), dy.flatten(axis % x.dim())
    check_count("the scale", s, rows.shape[-1])
    check_tensor("the inverse of the norms", inverse, tuple(rows.shape[:-1]))
    unit = rows * inverse[..., None]
    scaled = given * s.reshape(-1)
    dx = inverse[..., None] * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    over = list(range(rows.dim() - 1))
    ds, db = (
        (value.sum(over) if over else value).reshape(s.shape) for value in (given * unit, given)
    )
    return dx.reshape(x.shape), ds, db


def _norm(x: Tensor, axis: int) -> Tensor:
    norms = torch.linalg.vector_norm(x, dim=axis_of(axis, x.dim()), keepdim=True)
    result: Tensor = norms.clamp(min=1e-12)
    return result


@operator("Normalize", gradient="NormalizeGradient(I0, GO0) -> GI0")
def normalize(x: Tensor, *, axis: int = -1) -> Tensor:
    """Return x divided by its Euclidean norm along an axis."""
    return x / _norm(x, axis)


@operator("NormalizeGradient", expected="*S, *S")
def normalize_gradient(x: Tensor, dy: Tensor, *, axis: int = -1) -> Tensor:
    norm = _norm(x, axis)
    return dy / norm - x * (x * dy).sum(axis, keepdim=True) / norm**3


@operator("NormalizeL1")
def normalize_l1(x: Tensor, *, axis: int = -1) -> Tensor:
    """Return x divided by the sum of its magnitudes along an axis; where this is 0, x."""
    norm = x.abs().sum(axis_of(axis, x.dim()), keepdim=True)
    return x / torch.where(norm == 0, 1, norm)
