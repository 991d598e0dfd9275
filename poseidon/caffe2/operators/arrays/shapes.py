"""Other shapes for the same values: reshape, flatten, transpose, tile, expand, slice, sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker, Sparse
from poseidon.caffe2.operators.input_shapes import axis_of, check_count, check_tensor
from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.errors import counted


def new_shape(old: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return a shape in which 0 stands for the old size of the same place, and -1 for what is left.

    For a tensor without values 0 is the size 0, and -1 stands for 0.

    Raises:
        ValueError: the numbers of values differ, or the size that -1 stands for does not follow.
    """
    total = int(np.prod(old, dtype=np.int64))
    sizes = list(wanted)
    if total:
        kept = dict(enumerate(old))
        sizes = [size or kept.get(place, 0) for place, size in enumerate(sizes)]
    if sizes.count(-1) > 1:
        raise ValueError("a shape can have one -1 only")
    if -1 in sizes:
        known = int(np.prod([size for size in sizes if size != -1], dtype=np.int64))
        if total and (known == 0 or total % known):
            raise ValueError(f"-1 in the shape {list(wanted)} does not follow from {list(old)}")
        return [total // max(known, 1) if size == -1 else size for size in sizes]
    if int(np.prod(sizes, dtype=np.int64)) != total:
        raise ValueError(f"a tensor of shape {list(old)} cannot have the shape {sizes}")
    return sizes


@operator("Reshape", gradient="Reshape(GO0, O1) -> GI0, _GI0_dims {}", expected="?, M")
def reshape(
    x: Any, shape_tensor: Tensor | None = None, *, context: Context, shape: list[int] | None = None
) -> tuple[Any, Tensor]:
    """Return x in a different shape, and its old shape; see `new_shape` for 0 and -1.

    In place, the tensor itself gets the shape: a torch tensor that was fed has it too.

    Raises:
        ValueError: no shape is given, or x cannot have it.
    """
    kind = torch.int64
    if shape_tensor is not None:
        shape = shape_tensor.tolist()
        kind = shape_tensor.dtype
    if shape is None:
        raise ValueError("Reshape needs a second input or the argument shape")
    device = x.device if isinstance(x, Tensor) and x.device.type == "meta" else None
    old = torch.tensor(list(x.shape), dtype=kind, device=device)
    made = x.reshape(new_shape(x.shape, shape))
    definition = context.definition
    if (
        isinstance(x, Tensor)
        and x.device.type != "meta"
        and definition.input[0] == definition.output[0]
    ):
        made = x.set_(made)
    return made, old


@operator("ResizeLike")
def resize_like(x: Any, like: Any) -> Any:
    """Return x in the shape of another tensor."""
    check_count("the input", x, math.prod(like.shape))
    return x.reshape(like.shape)


@operator("Flatten", gradient="ResizeLike(GO0, I0) -> GI0")
def flatten(x: Any, *, axis: int = 1) -> Any:
    """Return x as a matrix: dimensions before `axis` are its rows."""
    axis = axis % x.ndim if axis < 0 else axis
    rows = int(np.prod(x.shape[:axis], dtype=np.int64))
    return x.reshape((rows, int(np.prod(x.shape[axis:], dtype=np.int64))))


@operator("FlattenToVec", gradient="ResizeLike(GO0, I0) -> GI0")
def flatten_to_vec(x: Any) -> Any:
    return x.reshape((-1,))


@operator("ExpandDims", gradient="Squeeze(GO0) -> GI0")
def expand_dims(x: Any, *, dims: list[int]) -> Any:
    """Return x with a dimension of 1 at each place of the result that `dims` names."""
    sizes = list(x.shape)
    for place in sorted(set(dims)):
        sizes.insert(place, 1)
    return x.reshape(sizes)


@operator("Squeeze", gradient="ExpandDims(GO0) -> GI0")
def squeeze(x: Any, *, dims: list[int]) -> Any:
    """Return x without the dimensions that `dims` names.

    Raises:
        ValueError: one of these is not 1.
    """
    dims = [axis_of(place, x.ndim) for place in dims]
    for place in dims:
        if x.shape[place] != 1:
            raise ValueError(f"the dimension {place} of {list(x.shape)} is not 1")
    return x.reshape([size for place, size in enumerate(x.shape) if place not in dims])


def _transpose_rule(maker: GradientMaker) -> None:
    made = maker.op("Transpose", [maker.GO(0)], [maker.GI(0)])
    for argument in made.arg:
        if argument.name == "axes":
            inverse = np.argsort(list(argument.ints)).tolist()
            argument.ints[:] = inverse


@operator("Transpose", gradient=_transpose_rule)
def transpose(x: Any, *, axes: list[int] = []) -> Any:  # noqa: B006 (it is not changed)
    """Return x with its dimensions in the order of `axes`, by default reversed."""
    order = axes or list(range(x.ndim))[::-1]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(
            f"the axes {order} are not an order of the {counted(x.ndim, 'dimension')} of the input"
        )
    return x.transpose(order) if isinstance(x, np.ndarray) else x.permute(order).contiguous()


@operator("MergeDim", expected="N M *")
def merge_dim(x: Tensor) -> Tensor:
    """Return x with its first two dimensions as one."""
    return x.flatten(0, 1)


@operator("PrependDim", gradient="MergeDim(GO0) -> GI0 {}", expected="N *")
def prepend_dim(x: Tensor, *, dim_size: int) -> Tensor:
    """Return x with its first dimension split in two, the first of `dim_size`."""
    if x.shape[0] % dim_size:
        raise ValueError(
            f"the first dimension, {x.shape[0]}, is not a multiple of dim_size={dim_size}"
        )
    return x.reshape(dim_size, x.shape[0] // dim_size, *x.shape[1:])


def _repeats(x: Any, tiles: int, axis: int) -> list[int]:
    return [tiles if place == axis_of(axis, x.ndim) else 1 for place in range(x.ndim)]


@operator("Tile", gradient="TileGradient(GO0, I1?, I2?) -> GI0")
def tile(
    x: Any,
    tiles_tensor: Tensor | None = None,
    axis_tensor: Tensor | None = None,
    *,
    tiles: int = 1,
    axis: int = 0,
) -> Any:
    """Return x `tiles` times along an axis; inputs replace the arguments."""
    tiles = tiles if tiles_tensor is None else int(tiles_tensor.item())
    axis = axis if axis_tensor is None else int(axis_tensor.item())
    repeats = _repeats(x, tiles, axis)
    return np.tile(x, repeats) if isinstance(x, np.ndarray) else x.repeat(repeats)


@operator("TileGradient")
def tile_gradient(
    dy: Tensor,
    tiles_tensor: Tensor | None = None,
    axis_tensor: Tensor | None = None,
    *,
    tiles: int = 1,
    axis: int = 0,
) -> Tensor:
    tiles = tiles if tiles_tensor is None else int(tiles_tensor.item())
    axis = axis_of(axis if axis_tensor is None else int(axis_tensor.item()), dy.dim())
    size, rest = divmod(dy.shape[axis], tiles)
    if rest:
        raise ValueError(f"the gradient's size, {dy.shape[axis]}, is not a multiple of {tiles}")
    return dy.reshape(*dy.shape[:axis], tiles, size, *dy.shape[axis + 1 :]).sum(axis)


@operator("NumpyTile", expected="?, M")
def numpy_tile(x: Any, repeats: Tensor) -> Any:
    """Return x repeated along each axis, as often as the second input says.

    Raises:
        ValueError: there is not one number for each axis.
    """
    if len(repeats) != x.ndim:
        raise ValueError(f"{x.ndim} dimensions need {x.ndim} repeats, not {len(repeats)}")
    return np.tile(x, repeats.tolist()) if isinstance(x, np.ndarray) else x.repeat(repeats.tolist())


@operator("Expand", gradient="ExpandGradient(GO0, I0) -> GI0", expected="?, M")
def expand(x: Tensor, shape: Tensor) -> Tensor:
    """Return x broadcast to a shape, by NumPy's rule in both directions; -1 keeps a size."""
    wanted = [1 if size == -1 else size for size in shape.tolist()]
    return x.expand(torch.broadcast_shapes(x.shape, wanted)).contiguous()


@operator("ExpandGradient")
def expand_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.sum_to_size(x.shape)


def _slices(x: Any, starts: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    """Return Python's slices for starts and ends.

    A negative number counts from the end; -1 is the end itself.

    Raises:
        ValueError: a slice begins before the tensor, or behind its own end.
    """
    found = []
    for axis, (size, start, end) in enumerate(zip(x.shape, starts, ends, strict=False)):
        first, last = (_counted_from_the_end(number, size) for number in (start, end))
        if not 0 <= first <= last:
            raise ValueError(f"dimension {axis} ({size} values) has no slice {start} to {end}")
        found.append(slice(first, last))
    return tuple(found)


def _counted_from_the_end(number: int, size: int) -> int:
    return min(number + size + 1 if number < 0 else number, size) if size else 0


@operator("Slice", gradient="SliceGradient(I0, I1?, I2?, GO0) -> GI0", expected="?, M, M")
def slice_(
    x: Any,
    starts_tensor: Tensor | None = None,
    ends_tensor: Tensor | None = None,
    *,
    starts: list[int] = [],  # noqa: B006
    ends: list[int] = [],  # noqa: B006
) -> Any:
    """Return a part of x: from `starts` to before `ends`; see `_slices` for negative numbers."""
    if starts_tensor is not None and ends_tensor is not None:
        starts, ends = starts_tensor.tolist(), ends_tensor.tolist()
    part = x[_slices(x, starts, ends)]
    return part.copy() if isinstance(part, np.ndarray) else part.contiguous()


@operator("SliceGradient", inputs=(2, 4))
def slice_gradient(
    x: Tensor,
    *others: Tensor,
    starts: list[int] = [],  # noqa: B006
    ends: list[int] = [],  # noqa: B006
) -> Tensor:
    """Return the gradient of `Slice`; inputs after x are starts and ends, if any, and dy."""
    *limits, dy = others
    if limits:
        for name, value in zip(("starts", "ends"), limits, strict=False):
            if value.dim() != 1:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected a vector")
        starts, ends = limits[0].tolist(), limits[1].tolist()
    dx = torch.zeros(x.shape, dtype=dy.dtype, device=dy.device)
    part = dx[_slices(x, starts, ends)]
    check_tensor("the gradient", dy, tuple(part.shape))
    part.copy_(dy)
    return dx


def _on(x: Any, values: Any, dtype: torch.dtype) -> Tensor:
    meta = isinstance(x, Tensor) and x.device.type == "meta"
    return torch.tensor(values, dtype=dtype, device="meta" if meta else "cpu")


@operator("Shape")
def shape(x: Any, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    """Return the sizes of all dimensions, or of `axes`; int64, on the CPU."""
    sizes = list(x.shape)
    return _on(x, [sizes[axis_of(axis, x.ndim)] for axis in axes] if axes else sizes, torch.int64)


@operator("Size", gradient=NO_GRADIENT)
def size(x: Any) -> Tensor:
    """Return the number of values, an int64 scalar on the CPU."""
    return _on(x, int(np.prod(x.shape, dtype=np.int64)), torch.int64)


@operator("IsEmpty")
def is_empty(x: Any) -> Tensor:
    """Return whether x has no values, a scalar."""
    return _on(x, 0 in x.shape, torch.bool)


@operator("HasElements")
def has_elements(*xs: Any) -> Tensor:
    """Return whether one of the inputs has values, a scalar."""
    return _on(xs[0], any(0 not in x.shape for x in xs), torch.bool)


@operator("LengthsToShape", expected="N")
def lengths_to_shape(lengths: Tensor) -> Tensor:
    """Return (number of lengths, length) where all lengths are equal.

    Raises:
        ValueError: they are not.
    """
    values = lengths.tolist()
    if len(set(values)) != 1:
        raise ValueError("LengthsToShape needs equal lengths")
    return torch.tensor([len(values), values[0]], dtype=torch.int32)


def _ensure_dense_rule(maker: GradientMaker) -> None:
    given = maker.given[0]
    if isinstance(given, Sparse):
        maker.op("SparseToDense", [given.indices, given.values, maker.I(0)], [maker.GI(0)])
    else:
        maker.dense(0, maker.GO(0))


@operator("EnsureDense", gradient=_ensure_dense_rule)
def ensure_dense(x: Tensor) -> Tensor:
    """Return x; its gradient is dense."""
    return x.clone()
