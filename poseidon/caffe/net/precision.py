"""The form in which each layer of a net gets its bottoms: type, and order in memory.

Law: products, and the layers between them that keep a type, may run in 16 bits and with channels
last. Every other layer gets contiguous float32: losses, softmax, LRN, sums of many values, indices,
and layers of users. Parameters, statistics, their gradients, the loss and the outputs of a net are
float32 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerContext
from poseidon.caffe.layers.convolution import BaseConvolution
from poseidon.caffe.net.fuse import Run


def in_form(layer: Layer, run: Run) -> Run:
    """Return the function of a layer that brings its bottoms to their form first."""
    context = layer.context
    if context.autocast is None and not context.channels_last:
        return run
    if not layer.takes_any_form:
        return lambda *bottoms: run(*map(plain, bottoms))
    moves = context.channels_last and isinstance(layer, BaseConvolution)

    def compute(*bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        if moves:
            bottoms = tuple(map(_channels_last, bottoms))
        with _autocast(context):
            return run(*bottoms)

    return compute


def plain(value: Tensor) -> Tensor:
    """Return a blob as contiguous float32, unless it is no blob of numbers."""
    return (value.float() if value.is_floating_point() else value).contiguous()


def _channels_last(image: Tensor) -> Tensor:
    if image.dim() != 4:
        return image
    return image.contiguous(memory_format=torch.channels_last)


def _autocast(context: LayerContext) -> torch.autocast:
    kind, of_16_bits = context.device.type, context.autocast
    return torch.autocast(kind, of_16_bits or torch.bfloat16, enabled=of_16_bits is not None)
