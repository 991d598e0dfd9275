"""Softmax, losses and averages."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator


@operator("Softmax", gradient="SoftmaxGradient(O0, GO0) -> GI0")
def softmax(x: Tensor, *, axis: int = 1) -> Tensor:
    """Return the softmax over all dimensions from `axis` on."""
    axis = axis % x.dim() if x.dim() else 0
    return torch.softmax(x.flatten(axis), -1).reshape(x.shape)


@operator("SoftmaxGradient")
def softmax_gradient(y: Tensor, dy: Tensor, *, axis: int = 1) -> Tensor:
    """Return the gradient of `Softmax`."""
    axis = axis % y.dim() if y.dim() else 0
    probabilities, given = y.flatten(axis), dy.flatten(axis)
    inner = (probabilities * given).sum(-1, keepdim=True)
    return (probabilities * (given - inner)).reshape(y.shape)


@operator("AveragedLoss", gradient="AveragedLossGradient(I0, GO0) -> GI0")
def averaged_loss(x: Tensor) -> Tensor:
    """Return the mean of all values, a scalar."""
    return x.mean() if x.numel() else x.new_zeros(())


@operator("AveragedLossGradient")
def averaged_loss_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `AveragedLoss`."""
    return (dy / max(x.numel(), 1)).expand(x.shape)
