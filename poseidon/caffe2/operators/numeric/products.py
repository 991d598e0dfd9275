"""Fully connected layers, matrix products, affine functions by channel or element, Dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of, check_count, check_tensor
from poseidon.caffe2.operators.layers.normalization import by_channel
from poseidon.caffe2.operators.layers.windows import in_nchw, in_order
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.errors import counted


def matrix(x: Tensor, axis: int) -> Tensor:
    """Return x as a matrix: the dimensions before an axis are the rows, the others the columns."""
    if axis != x.dim():
        axis = axis_of(axis, x.dim())
    return x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel())


def _check_columns(x: Tensor, axis: int, columns: int) -> None:
    """Raise ValueError for inputs that have not so many values from an axis on."""
    found = x.shape[axis:].numel()
    if x.numel() and found != columns:
        raise ValueError(
            f"Dimension mismatch: X {list(x.shape)} has {counted(found, 'value')} from axis {axis} "
            f"on, W takes {columns}"
        )


def _check_bias(b: Tensor, outputs: int) -> None:
    """Raise ValueError for a bias that is not one value for each output."""
    if tuple(b.shape) != (outputs,):
        raise ValueError(
            f"Dimension mismatch: the bias has the shape {tuple(b.shape)}, expected ({outputs},) "
            "as W"
        )


@operator("FC", gradient="FCGradient(I0, I1, GO0) -> GI1, GI2, GI0")
def fc(x: Tensor, w: Tensor, b: Tensor, *, axis: int = 1, axis_w: int = 1) -> Tensor:
    """Return x w^T + b: x is flattened from `axis` on, w from `axis_w` on (outputs first)."""
    rows = x.flatten(axis) if axis < x.dim() else x
    weights = w.reshape(w.shape[:axis_w].numel(), -1)
    _check_columns(x, axis, weights.shape[1])
    _check_bias(b, weights.shape[0])
    y = rows.reshape(-1, weights.shape[1]) @ weights.t() + b
    return y.reshape(*x.shape[:axis], weights.shape[0])


@operator("FCGradient", outputs=(2, 3))
def fc_gradient(
    x: Tensor, w: Tensor, dy: Tensor, *, axis: int = 1, axis_w: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of w, b and x."""
    weights = w.reshape(w.shape[:axis_w].numel(), -1)
    _check_columns(x, axis, weights.shape[1])
    check_count("the gradient", dy, x.shape[:axis].numel() * weights.shape[0])
    dy = dy.reshape(-1, weights.shape[0])
    rows = x.reshape(-1, weights.shape[1])
    return (dy.t() @ rows).reshape(w.shape), dy.sum(0), (dy @ weights).reshape(x.shape)


@operator("FCTransposed", gradient="FCTransposedGradient(I0, I1, GO0) -> GI1, GI2, GI0")
def fc_transposed(x: Tensor, w: Tensor, b: Tensor, *, axis: int = 1, axis_w: int = 1) -> Tensor:
    """Return x w + b: x is flattened from `axis` on, w (inputs first) from `axis_w` on."""
    weights = matrix(w, axis_w)
    _check_columns(x, axis, weights.shape[0])
    _check_bias(b, weights.shape[1])
    y = x.reshape(-1, weights.shape[0]) @ weights + b
    return y.reshape(*x.shape[:axis], weights.shape[1])


@operator("FCTransposedGradient", outputs=(2, 3))
def fc_transposed_gradient(
    x: Tensor, w: Tensor, dy: Tensor, *, axis: int = 1, axis_w: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of w, b and x."""
    weights = matrix(w, axis_w)
    _check_columns(x, axis, weights.shape[0])
    check_count("the gradient", dy, x.shape[:axis].numel() * weights.shape[1])
    rows, given = x.reshape(-1, weights.shape[0]), dy.reshape(-1, weights.shape[1])
    return (rows.t() @ given).reshape(w.shape), given.sum(0), (given @ weights.t()).reshape(x.shape)


def _product_rule(maker: GradientMaker) -> None:
    """Make the gradients of a product as products, with each case's transposed factors."""
    a, b, given = maker.I(0), maker.I(1), maker.GO(0)
    first, second = bool(maker.argument("trans_a", 0)), bool(maker.argument("trans_b", 0))
    kind = maker.forward.type
    if kind == "BatchMatMul" and maker.argument("broadcast", 0):
        raise ValueError("BatchMatMul with broadcast has no gradient")
    matrices = kind == "MatMul"
    axis_a, axis_b = maker.argument("axis_a", 1), maker.argument("axis_b", 1)
    left = [b, given] if first else [given, b]
    right = [given, a] if second else [a, given]
    arguments = {"trans_a": int(first and second), "trans_b": int(first or not second)}
    arguments = {name: value for name, value in arguments.items() if value}
    own = {("axis_a" if first else "axis_b"): axis_b} if matrices else {}
    maker.op(
        kind, [*left, a] if matrices else left, [maker.GI(0)], {**arguments, **own}, copy=False
    )
    arguments = {"trans_a": int(second or not first), "trans_b": int(first and second)}
    arguments = {name: value for name, value in arguments.items() if value}
    own = {("axis_b" if second else "axis_a"): axis_a} if matrices else {}
    maker.op(
        kind, [*right, b] if matrices else right, [maker.GI(1)], {**arguments, **own}, copy=False
    )


@operator("MatMul", gradient=_product_rule)
def mat_mul(
    a: Tensor,
    b: Tensor,
    like: Tensor | None = None,
    *,
    axis_a: int = 1,
    axis_b: int = 1,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """Return a matrix product: a and b flattened at an axis; a third input gives the shape."""
    left = matrix(a, axis_a)
    right = matrix(b, axis_b)
    left, right = left.t() if trans_a else left, right.t() if trans_b else right
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"matrices {tuple(left.shape)} and {tuple(right.shape)} cannot be multiplied"
        )
    product = left @ right
    if like is None:
        return product
    check_count("the input that gives the shape", like, product.numel())
    return product.reshape(like.shape)


@operator("BatchMatMul", gradient=_product_rule)
def batch_mat_mul(
    a: Tensor, b: Tensor, *, trans_a: bool = False, trans_b: bool = False, broadcast: bool = False
) -> Tensor:
    """Return the products of the last two dimensions; earlier ones broadcast as NumPy's do.

    The product of two vectors has the shape (1).

    Raises:
        ValueError: they differ without `broadcast`.
    """
    if not broadcast and a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"batches {list(a.shape[:-2])} and {list(b.shape[:-2])} need broadcast=1")
    left = a.transpose(-1, -2) if trans_a and a.dim() > 1 else a
    product = left @ (b.transpose(-1, -2) if trans_b and b.dim() > 1 else b)
    return product.reshape(1) if a.dim() == b.dim() == 1 else product


@operator(
    "AffineChannel",
    gradient="is_learnable: @Gradient(GO0, I0, I1) -> GI0, GI1, GI2 | @Gradient(GO0, I1) -> GI0",
    shapes="N C *S, C, C",
)
def affine_channel(x: Tensor, s: Tensor, b: Tensor, *, order: str = "NCHW") -> Tensor:
    """Return s * x + b with numbers by channel."""
    return x * s + b if order == "NHWC" else x * by_channel(s, x) + by_channel(b, x)


@operator("AffineChannelGradient", inputs=(2, 3), outputs=(1, 3), expected="N C *S")
def affine_channel_gradient(
    dy: Tensor,
    x: Tensor,
    s: Tensor | None = None,
    *,
    order: str = "NCHW",
    is_learnable: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of x and of learned s and b; else the second input is s."""
    (images,) = in_nchw(order, dy)
    factor = x if s is None else s
    check_count("the scale", factor, images.shape[1])
    dx = in_order(order, images * by_channel(factor, images))
    if s is None or not is_learnable:
        return (dx,)
    check_tensor("x", x, tuple(dy.shape))
    axes = [axis for axis in range(images.dim()) if axis != 1]
    (given,) = in_nchw(order, x)
    return dx, (images * given).sum(axes), images.sum(axes)


@operator(
    "ElementwiseLinear",
    gradient="ElementwiseLinearGradient(GO0, I0, I1) -> GI0, GI1, GI2",
    shapes="?, *S, *S",
)
def elementwise_linear(x: Tensor, w: Tensor, b: Tensor, *, axis: int = 1) -> Tensor:
    """Return w * x + b, where w and b are by element from `axis` on."""
    rows = matrix(x, axis)
    check_count("w", w, rows.shape[1])
    return (rows * w.reshape(-1) + b.reshape(-1)).reshape(x.shape)


@operator("ElementwiseLinearGradient", expected="*S, *S")
def elementwise_linear_gradient(
    dy: Tensor, x: Tensor, w: Tensor, *, axis: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, w and b."""
    rows, given = matrix(x, axis), matrix(dy, axis)
    check_count("w", w, rows.shape[1])
    dw, db = (given * rows).sum(0).reshape(w.shape), given.sum(0).reshape(w.shape)
    return (given * w.reshape(-1)).reshape(x.shape), dw, db


def _row_mul_rule(maker: GradientMaker) -> None:
    dx, dw = maker.GI(0), maker.GI(1)
    maker.op("RowMul", [maker.GO(0), maker.I(1)], [dx])
    maker.op("Mul", [maker.GO(0), maker.I(0)], [f"{dw}before_aggregate"])
    maker.op("ReduceTailSum", [f"{dw}before_aggregate"], [dw])


@operator("RowMul", gradient=_row_mul_rule, shapes="N *")
def row_mul(x: Tensor, w: Tensor) -> Tensor:
    """Return x with each row multiplied by its weight."""
    check_count("w", w, len(x))
    return x * w.reshape(-1, *[1] * (x.dim() - 1))


@operator("ReduceTailSum")
def reduce_tail_sum(x: Tensor) -> Tensor:
    """Return the sum of each row, over all dimensions but the first."""
    return x.flatten(1).sum(1) if x.dim() > 1 else x.clone()


@operator("Dropout", gradient="is_test: DropoutGrad(GO0) -> GI0 | DropoutGrad(GO0, O1) -> GI0")
def dropout(
    x: Tensor, *, context: Context, ratio: float = 0.5, is_test: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return x, a part of it zero and the rest divided by 1 - ratio, and the mask of the rest."""
    if is_test:
        # The mask is not made, but its shape is inferred, as in Caffe2.
        return x.clone(), torch.empty_like(x, dtype=torch.bool) if x.is_meta else None
    if not 0 <= ratio < 1:
        raise ValueError(f"the ratio {ratio} is not between 0 and 1")
    mask = torch.rand(x.shape, generator=context.generator, device=x.device) >= ratio
    return x * mask / (1 - ratio), mask


@operator("DropoutGrad", inputs=(1, 2))
def dropout_grad(
    dy: Tensor, mask: Tensor | None = None, *, ratio: float = 0.5, is_test: bool = False
) -> Tensor:
    return dy.clone() if is_test or mask is None else dy * mask / (1 - ratio)


@operator("TT")
def tensor_train(
    x: Tensor,
    b: Tensor,
    cores: Tensor,
    *,
    inp_sizes: list[int],
    out_sizes: list[int],
    tt_ranks: list[int],
) -> Tensor:
    """Return FC by weights as a tensor train (arXiv 1509.06569), shape (batch, outputs).

    Args:
        x: a batch, shape (batch, product of inp_sizes).
        b: biases.
        cores: all cores as a vector, the last one first; core k has the shape
            (inp_sizes[k] * tt_ranks[k + 1], tt_ranks[k] * out_sizes[k]).
        inp_sizes, out_sizes: the sizes into which inputs and outputs are factored.
        tt_ranks: the ranks between the cores, one more than sizes; the first and the last are 1.
    """
    if len(inp_sizes) != len(out_sizes) or len(tt_ranks) != len(inp_sizes) + 1:
        raise ValueError("TT: inp_sizes and out_sizes must be equally long, tt_ranks longer by 1")
    check_tensor("the batch", x, (len(x) if x.dim() else 0, math.prod(inp_sizes)))
    sizes = zip(inp_sizes, tt_ranks[1:], tt_ranks[:-1], out_sizes, strict=True)
    check_tensor("the input of the cores", cores, (sum(map(math.prod, sizes)),))
    check_tensor("the bias", b, (math.prod(out_sizes),))
    y, start = x, 0
    for k in reversed(range(len(inp_sizes))):
        rows, columns = inp_sizes[k] * tt_ranks[k + 1], tt_ranks[k] * out_sizes[k]
        core = cores[start : start + rows * columns].reshape(rows, columns)
        y = (y.reshape(-1, rows) @ core).reshape(-1, out_sizes[k]).T
        start += rows * columns
    return y.reshape(-1, len(x)).T + b
