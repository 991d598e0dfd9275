"""Caffe's fillers, the initializers of blobs.

Law: the values of a blob depend only on its shape, its filler and the generator. The formulas come
from Caffe's include/caffe/filler.hpp; the random numbers are torch's, so values differ from Caffe's
but their distribution does not. fan_in = count / shape[0], fan_out = count / shape[1] (count for a
vector).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from google.protobuf.message import Message
from torch import Generator, Tensor

from poseidon.caffe.proto.caffe_pb2 import FillerParameter
from poseidon.errors import unknown

Filler = Callable[[Tensor, FillerParameter, Generator], None]


class FillerError(ValueError):
    """A filler is unknown or cannot fill a blob of this shape.

    The text is a clause that starts with the filler.
    """


def fill(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Fill `blob` in place.

    Args:
        blob: a float tensor on the generator's device.
        filler: the type and its parameters; an empty one is the constant 0.

    Raises:
        FillerError: the type is unknown or does not suit the blob's shape.
    """
    check(filler, tuple(blob.shape))
    with torch.no_grad():
        FILLERS[filler.type](blob, filler, generator)


def check(filler: FillerParameter, shape: tuple[int, ...]) -> None:
    """Raise FillerError unless `filler` can fill a blob of `shape`."""
    if filler.type not in FILLERS:
        raise FillerError(unknown("filler type", filler.type, FILLERS))
    if filler.HasField("sparse") and filler.sparse != -1 and filler.type != "gaussian":
        raise FillerError(f"filler '{filler.type}' cannot be sparse, only 'gaussian' can")
    if filler.type in ("positive_unitball", "xavier", "msra") and not shape:
        raise FillerError(f"filler '{filler.type}' needs a blob of at least one axis, not a scalar")
    if filler.type == "gaussian" and filler.std < 0:
        raise FillerError(f"filler 'gaussian' has std {filler.std:g}, expected at least 0")
    if filler.type == "uniform" and filler.min > filler.max:
        raise FillerError(f"filler 'uniform' has min {filler.min:g} above max {filler.max:g}")
    if filler.type == "gaussian" and filler.sparse >= 0 and not shape:
        raise FillerError("a sparse filler needs a blob of at least one axis, not a scalar")
    if filler.type == "bilinear" and (len(shape) != 4 or shape[2] != shape[3]):
        raise FillerError(
            f"filler 'bilinear' needs a blob of 4 axes with a square kernel, not {shape}"
        )


def filler_or(param: Message, name: str, value: float) -> FillerParameter:
    """Return the filler in field `name` of `param`, else a constant filler of `value`."""
    filler: FillerParameter = getattr(param, name)
    return filler if param.HasField(name) else FillerParameter(type="constant", value=value)


def fan(shape: tuple[int, ...], norm: int) -> float:
    """Return fan_in, fan_out or their mean, as `variance_norm` says."""
    count = math.prod(shape)
    fan_in = count / shape[0]
    fan_out = count / shape[1] if len(shape) > 1 else float(count)
    if norm == FillerParameter.AVERAGE:
        return (fan_in + fan_out) / 2
    return fan_out if norm == FillerParameter.FAN_OUT else fan_in


def constant(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Set every value to `value`."""
    blob.fill_(filler.value)


def uniform(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Draw values uniformly from [min, max)."""
    blob.copy_(torch.rand(blob.shape, generator=generator, device=blob.device))
    blob.mul_(filler.max - filler.min).add_(filler.min)


def gaussian(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Draw values from Normal(mean, std). With `sparse` s >= 0 a value is kept
    with probability s / shape[0], else 0.
    """
    blob.normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0:
        keep = min(1.0, filler.sparse / blob.shape[0])
        blob.mul_(torch.empty_like(blob).bernoulli_(keep, generator=generator))


def positive_unitball(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Draw values uniformly from [0, 1), and divide each row (first axis) by its sum."""
    blob.copy_(torch.rand(blob.shape, generator=generator, device=blob.device))
    rows = blob.view(blob.shape[0], -1)
    rows.div_(rows.sum(1, keepdim=True))


def xavier(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Draw values uniformly from [-a, a) with a = sqrt(3 / n), n the fan.

    Glorot and Bengio, 2010.
    """
    scale = math.sqrt(3.0 / fan(tuple(blob.shape), filler.variance_norm))
    blob.copy_(torch.rand(blob.shape, generator=generator, device=blob.device))
    blob.mul_(2 * scale).sub_(scale)


def msra(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Draw values from Normal(0, sqrt(2 / n)), n the fan. He et al., 2015."""
    blob.normal_(
        0.0, math.sqrt(2.0 / fan(tuple(blob.shape), filler.variance_norm)), generator=generator
    )


def bilinear(blob: Tensor, filler: FillerParameter, generator: Generator) -> None:
    """Set the kernel of bilinear upsampling, w(x, y) = (1 - |x/f - c|)(1 - |y/f - c|).

    f = ceil(k / 2), c = (k - 1) / 2f, k the kernel extent.
    """
    size = blob.shape[3]
    half = math.ceil(size / 2)
    centre = (size - 1) / (2.0 * half)
    line = 1 - (torch.arange(size, device=blob.device) / half - centre).abs()
    blob.copy_((line[:, None] * line[None, :]).expand(blob.shape))


FILLERS: Mapping[str, Filler] = MappingProxyType(
    {
        "constant": constant,
        "uniform": uniform,
        "gaussian": gaussian,
        "positive_unitball": positive_unitball,
        "xavier": xavier,
        "msra": msra,
        "bilinear": bilinear,
    }
)
