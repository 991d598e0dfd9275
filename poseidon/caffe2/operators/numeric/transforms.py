"""Functions with own parameters: Box-Cox, pieces of lines, thresholds, encodings, limits."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count
from poseidon.caffe2.operators.registry import NO_GRADIENT, operator

SMALLEST = 1e-6
"""The least value that `BatchBoxCox` takes the power of."""


@operator("BatchBoxCox", shapes="N *")
def batch_box_cox(x: Tensor, powers: Tensor, shifts: Tensor) -> Tensor:
    """Return ((x + shift)^power - 1) / power by column, and log(x + shift) where the power is 0."""
    columns = x.shape[1:]
    for name, value in (("powers", powers), ("shifts", shifts)):
        check_count(f"the input {name}", value, columns.numel())
    powers, shifts = powers.reshape(columns), shifts.reshape(columns)
    moved = (x + shifts).clamp(min=SMALLEST)
    divisor = torch.where(powers == 0, 1, powers)
    return torch.where(powers == 0, moved.log(), (moved.pow(powers) - 1) / divisor)


@operator("PiecewiseLinearTransform", inputs=(1, 4), expected="N *")
def piecewise_linear_transform(
    x: Tensor,
    bounds_tensor: Tensor | None = None,
    slopes_tensor: Tensor | None = None,
    intercepts_tensor: Tensor | None = None,
    *,
    bounds: list[float] = [],  # noqa: B006 (it is not changed)
    slopes: list[float] = [],  # noqa: B006
    intercepts: list[float] = [],  # noqa: B006
    binary: bool = False,
) -> Tensor:
    """Return slope * x + intercept of the piece of each value; outer ones move to a bound.

    Args:
        x: (examples, classes), or with `binary` one probability, or both, of each example.
        bounds_tensor, slopes_tensor, intercepts_tensor: in place of the arguments.
        bounds: for each class, one more than pieces.
        slopes, intercepts: for each class, one for each piece.
        binary: only the probability of the second class is changed; the first class gets the rest.

    Raises:
        ValueError: the numbers of bounds, slopes and intercepts do not fit.
    """
    given = [bounds_tensor, slopes_tensor, intercepts_tensor]
    limits, steep, begin = (
        torch.tensor(values, device=x.device) if tensor is None else tensor.reshape(-1)
        for tensor, values in zip(given, (bounds, slopes, intercepts), strict=True)
    )
    columns = x[:, -1:] if binary and x.dim() > 1 else x.reshape(len(x), -1)
    classes = columns.shape[1]
    if len(limits) != len(steep) + classes or len(steep) != len(begin):
        raise ValueError(
            f"{len(limits)} bounds, {len(steep)} slopes and {len(begin)} intercepts do not fit "
            f"{classes} classes"
        )
    limits, steep, begin = (part.reshape(classes, -1) for part in (limits, steep, begin))
    values = torch.minimum(torch.maximum(columns, limits[:, 0]), limits[:, -1]).t().contiguous()
    piece = (torch.searchsorted(limits, values, right=True) - 1).clamp(0, steep.shape[1] - 1)
    made = (steep.gather(1, piece) * values + begin.gather(1, piece)).t()
    if binary and x.dim() > 1 and x.shape[1] == 2:
        return torch.cat([1 - made, made], 1)
    return made.reshape(x.shape)


@operator("StumpFunc", gradient=NO_GRADIENT)
def stump_func(
    x: Tensor, *, threshold: float = 0.0, low_value: float = 0.0, high_value: float = 0.0
) -> Tensor:
    """Return `low_value` for values up to the threshold, `high_value` for those above."""
    return torch.where(x <= threshold, low_value, high_value).to(x.dtype)


@operator("StumpFuncIndex", gradient=NO_GRADIENT)
def stump_func_index(x: Tensor, *, threshold: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the places of the values up to the threshold, and of those above, int64."""
    low = x.reshape(-1) <= threshold
    return torch.nonzero(low).reshape(-1), torch.nonzero(~low).reshape(-1)


@operator("SinusoidPositionEncoding")
def sinusoid_position_encoding(
    positions: Tensor, *, embedding_size: int = 100, alpha: float = 10000.0, amplitude: float = 1.0
) -> Tensor:
    """Return sines (even places) and cosines (odd) of position / alpha^(place / size)."""
    place = torch.arange(embedding_size, device=positions.device)
    angle = positions[..., None].float() / alpha ** (place / embedding_size)
    return amplitude * torch.where(place % 2 == 0, angle.sin(), angle.cos())


def _quant_decode_rule(maker: GradientMaker) -> None:
    given = [maker.GO(index) for index in range(len(maker.forward.output))]
    maker.op("QuantDecodeGradient", [*maker.forward.input, *given], [maker.GI(0)])


@operator("QuantDecode", gradient=_quant_decode_rule)
def quant_decode(codebook: Tensor, *codes: Tensor) -> tuple[Tensor, ...]:
    """Return the entries of a codebook that the codes name, in the shape of the codes."""
    return tuple(codebook.reshape(-1)[code.long()] for code in codes)


@operator("QuantDecodeGradient")
def quant_decode_gradient(codebook: Tensor, *given: Tensor) -> Tensor:
    """Return the gradient of the codebook of codes, and of their values' gradients."""
    half = len(given) // 2
    made = torch.zeros_like(codebook).reshape(-1)
    for code, dy in zip(given[:half], given[half:], strict=True):
        check_count("the gradient", dy, code.numel())
        made.index_add_(0, code.reshape(-1).long(), dy.reshape(-1))
    return made.reshape(codebook.shape)


@operator("ClipTensorByScaling", inputs=(2, 3))
def clip_tensor_by_scaling(
    x: Tensor, value: Tensor, more: Tensor | None = None, *, threshold: float
) -> Tensor:
    """Return x scaled so that its norm is at most the threshold, times the third input."""
    limit = threshold if more is None else threshold * more.reshape(())
    return x * (limit / value.reshape(())).clamp(max=1)


@operator("EnsureClipped", inputs=(1, 3), expected="N *")
def ensure_clipped(
    w: Tensor,
    indices: Tensor | None = None,
    gradient: Tensor | None = None,
    *,
    min_: float = float("-inf"),
    max_: float = float("inf"),
) -> Tensor:
    """Return the parameter moved into [min, max], in place: all, or rows with a gradient."""
    if indices is None:
        return w.clamp_(min_, max_)
    rows = indices.reshape(-1).long()
    w[rows] = w[rows].clamp(min_, max_)
    return w


@operator("SparseNormalize", "Float16SparseNormalize", inputs=(2, 3), expected="N *, ?")
def sparse_normalize(
    w: Tensor,
    indices: Tensor,
    gradient: Tensor | None = None,
    *,
    use_max_norm: bool = True,
    norm: float = 1.0,
) -> Tensor:
    """Return the parameter, whose rows with a gradient are scaled to a norm, in place.

    With `use_max_norm` shorter rows stay as they are.
    """
    rows = torch.unique(indices.reshape(-1).long())
    part = w[rows].float().reshape(len(rows), w[:1].numel())
    length = part.norm(dim=1, keepdim=True)
    scaled = part * (norm / length.clamp(min=1e-12))
    kept = (length <= norm) if use_max_norm else torch.zeros_like(length, dtype=torch.bool)
    w[rows] = torch.where(kept, part, scaled).reshape(w[rows].shape).to(w.dtype)
    return w
