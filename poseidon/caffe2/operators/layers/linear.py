"""Fully connected layers."""

from __future__ import annotations

from torch import Tensor

from poseidon.caffe2.operators.registry import operator


@operator("FC", gradient="FCGradient(I0, I1, GO0) -> GI1, GI2, GI0")
def fc(x: Tensor, w: Tensor, b: Tensor, *, axis: int = 1, axis_w: int = 1) -> Tensor:
    """Return x w^T + b: x is flattened from `axis` on, w from `axis_w` on (outputs first)."""
    rows, weights = x.flatten(axis) if axis < x.dim() else x, w.reshape(w.shape[:axis_w].numel(), -1)
    return (rows.reshape(-1, weights.shape[1]) @ weights.t() + b).reshape(*x.shape[:axis], weights.shape[0])


@operator("FCGradient", outputs=(2, 3))
def fc_gradient(
    x: Tensor, w: Tensor, dy: Tensor, *, axis: int = 1, axis_w: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of w, b and x."""
    weights = w.reshape(w.shape[:axis_w].numel(), -1)
    dy = dy.reshape(-1, weights.shape[0])
    rows = x.reshape(-1, weights.shape[1])
    return (dy.t() @ rows).reshape(w.shape), dy.sum(0), (dy @ weights).reshape(x.shape)
