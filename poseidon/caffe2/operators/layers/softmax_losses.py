"""Softmax, alone and with a loss; cross entropies; the mean of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import axis_of, check_count, check_tensor
from poseidon.caffe2.operators.layers.windows import in_nchw, in_order
from poseidon.caffe2.operators.numeric.products import matrix
from poseidon.caffe2.operators.registry import operator

SMALLEST = 1e-20
"""The least probability whose logarithm is taken."""


@operator("Softmax", gradient="SoftmaxGradient(O0, GO0) -> GI0")
def softmax(x: Tensor, *, axis: int = 1) -> Tensor:
    """Return the softmax over all dimensions from `axis` on."""
    axis = axis_of(axis, x.dim()) if x.dim() else 0
    return torch.softmax(x.flatten(axis), -1).reshape(x.shape)


@operator("SoftmaxGradient", expected="*S, *S")
def softmax_gradient(y: Tensor, dy: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis_of(axis, y.dim()) if y.dim() else 0
    probabilities, given = y.flatten(axis), dy.flatten(axis)
    inner = (probabilities * given).sum(-1, keepdim=True)
    return (probabilities * (given - inner)).reshape(y.shape)


@operator("AveragedLoss", gradient="AveragedLossGradient(I0, GO0) -> GI0")
def averaged_loss(x: Tensor) -> Tensor:
    """Return the mean of all values, a scalar."""
    return x.mean() if x.numel() else x.new_zeros(())


@operator("AveragedLossGradient", expected="?, one")
def averaged_loss_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return (dy.reshape(()) / max(x.numel(), 1)).expand(x.shape)


def _divisor(weights: Tensor, by_batch_size: bool) -> Tensor:
    """Return the divisor of the losses' sum: the number of examples, or their weights' sum."""
    total = weights.sum()
    if by_batch_size:
        return torch.full_like(total, weights.numel())
    return torch.where(total == 0, 1, total)


def _of_labels(logarithms: Tensor, labels: Tensor) -> Tensor:
    """Return the value of each row's label.

    Raises:
        ValueError: there is not one label for each row, or a label is not the number of a class.
    """
    picked = labels.reshape(-1, 1).long()
    if len(picked) != len(logarithms):
        raise ValueError(f"{len(picked)} labels are given for {len(logarithms)} examples")
    try:
        return logarithms.gather(1, picked).squeeze(1)
    except RuntimeError as error:
        classes = logarithms.shape[1]
        wrong = picked[(picked < 0) | (picked >= classes)]
        if not wrong.numel():
            raise
        raise ValueError(f"the label {wrong[0]} is not one of 0 to {classes - 1}") from error


@operator("SoftmaxWithLoss", gradient="@Gradient(I*, O0, GO1) -> GI0", outputs=(1, 3))
def softmax_with_loss(
    x: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    axis: int = 1,
    label_prob: bool = False,
    scale: float = 1.0,
    average_by_batch_size: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the softmax over the dimensions from `axis` on, and the mean cross entropy.

    Args:
        x: logits.
        labels: the class of each example, or with `label_prob` the probability of each class.
        weights: a weight of each example; the mean is weighted.
        axis: the first dimension of the classes.
        label_prob: see labels.
        scale: what the loss is multiplied by.
        average_by_batch_size: divide by the number of examples, not by the sum of the weights.
    """
    rows = matrix(x, axis)
    logarithms = torch.log_softmax(rows, 1)
    if weights is not None:
        check_count("the input of the weights", weights, rows.shape[0])
    if label_prob:
        check_count("the input of the labels", labels, rows.numel())
        losses = -(logarithms * labels.reshape(rows.shape)).sum(1)
    else:
        losses = -_of_labels(logarithms, labels)
    importance = torch.ones_like(losses) if weights is None else weights.reshape(-1)
    if rows.shape[0] == 0:
        return torch.softmax(rows, 1).reshape(x.shape), x.new_zeros(())
    loss = scale * (losses * importance).sum() / _divisor(importance, average_by_batch_size)
    return logarithms.exp().reshape(x.shape), loss


@operator("SoftmaxWithLossGradient")
def softmax_with_loss_gradient(
    x: Tensor,
    labels: Tensor,
    *rest: Tensor,
    axis: int = 1,
    label_prob: bool = False,
    scale: float = 1.0,
    average_by_batch_size: bool = False,
) -> Tensor:
    """Return the gradient of the logits; `rest` is the weights, if any, the softmax and dy."""
    *weights, softmax, dy = rest
    rows = matrix(softmax, axis)
    if rows.shape[0] == 0:
        return torch.zeros_like(x)
    check_tensor("the softmax", softmax, tuple(x.shape))
    check_count("the input of the labels", labels, rows.numel() if label_prob else rows.shape[0])
    for value in weights:
        check_count("the input of the weights", value, rows.shape[0])
    importance = weights[0].reshape(-1) if weights else rows.new_ones(rows.shape[0])
    if label_prob:
        dx = rows - labels.reshape(rows.shape)
    else:
        picked = labels.reshape(-1, 1).long()
        dx = rows.scatter_add(1, picked, rows.new_full(picked.shape, -1.0))
    factor = dy.reshape(()) * scale / _divisor(importance, average_by_batch_size)
    return (dx * (importance * factor).unsqueeze(1)).reshape(x.shape)


@operator(
    "SpatialSoftmaxWithLoss", gradient="@Gradient(I*, O0, GO1) -> GI0", shapes="N C *S, N *S, N *S"
)
def spatial_softmax_with_loss(
    x: Tensor, labels: Tensor, weights: Tensor | None = None, *, order: str = "NCHW"
) -> tuple[Tensor, Tensor]:
    """Return the channels' softmax, and the mean cross entropy of pixels whose label is not -1.

    The argument `scale` multiplies the gradient only, as in Caffe2 on the CPU.
    """
    (images,) = in_nchw(order, x)
    logarithms = torch.log_softmax(images, 1)
    counted = labels >= 0
    losses = -logarithms.gather(1, labels.clamp(min=0).long().unsqueeze(1)).squeeze(1)
    importance = counted.to(x.dtype) if weights is None else weights.reshape(labels.shape) * counted
    loss = (losses * importance).sum() / _divisor(importance, False)
    softmax = logarithms.exp()
    return in_order(order, softmax), loss


@operator("SpatialSoftmaxWithLossGradient", expected="N C *S, N *S")
def spatial_softmax_with_loss_gradient(
    x: Tensor, labels: Tensor, *rest: Tensor, scale: float = 1.0, order: str = "NCHW"
) -> Tensor:
    """Return the gradient of the logits; `rest` is as in `SoftmaxWithLossGradient`."""
    *weights, softmax, dy = rest
    check_tensor("the softmax", softmax, tuple(x.shape))
    for value in weights:
        check_count("the input of the weights", value, labels.numel())
    (images,) = in_nchw(order, softmax)
    counted = labels >= 0
    importance = weights[0].reshape(labels.shape) * counted if weights else counted.to(x.dtype)
    picked = labels.clamp(min=0).long().unsqueeze(1)
    dx = images.scatter_add(1, picked, images.new_full(picked.shape, -1.0))
    factor = dy.reshape(()) * scale / _divisor(importance, False)
    dx = dx * (importance * factor).unsqueeze(1)
    return in_order(order, dx)


@operator("CrossEntropy", gradient="CrossEntropyGradient(I0, I1, GO0) -> GI0", shapes="N D, N D")
def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """Return -sum of label * log(x) by row."""
    return -(labels * x.clamp(min=SMALLEST).log()).flatten(1).sum(1)


@operator("CrossEntropyGradient", expected="N *S, N *S, N")
def cross_entropy_gradient(x: Tensor, labels: Tensor, dy: Tensor) -> Tensor:
    return -dy.reshape(-1, *[1] * (x.dim() - 1)) * labels / x.clamp(min=SMALLEST)


@operator(
    "LabelCrossEntropy",
    gradient="LabelCrossEntropyGradient(I0, I1, GO0) -> GI0",
    shapes="N *, N *",
    expected="N D *, N *",
)
def label_cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """Return -log of the probability of each row's class."""
    rows = x.flatten(1)
    return -rows.gather(1, labels.reshape(-1, 1).long()).squeeze(1).clamp(min=SMALLEST).log()


@operator("LabelCrossEntropyGradient", expected="N D *, N *, N")
def label_cross_entropy_gradient(x: Tensor, labels: Tensor, dy: Tensor) -> Tensor:
    rows, picked = x.flatten(1), labels.reshape(-1, 1).long()
    values = -dy.reshape(-1, 1) / rows.gather(1, picked).clamp(min=SMALLEST)
    return torch.zeros_like(rows).scatter(1, picked, values).reshape(x.shape)


@operator("MakeTwoClass", gradient="MakeTwoClassGradient(GO0) -> GI0")
def make_two_class(x: Tensor) -> Tensor:
    """Return the probabilities (1 - x, x) of both classes."""
    return torch.stack((1 - x, x), -1)


@operator("MakeTwoClassGradient", expected="* 2")
def make_two_class_gradient(dy: Tensor) -> Tensor:
    return dy[..., 1] - dy[..., 0]


def _log_likelihood(x: Tensor, targets: Tensor, log_d: bool, unjoined: bool) -> Tensor:
    """Return the logarithm of the likelihood of targets by element of the logits."""
    if log_d:
        return (2 * targets - 1) * torch.nn.functional.logsigmoid(x)
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    return x * targets - (1 - targets) * softplus if unjoined else x * targets - softplus


def _log_likelihood_gradient(x: Tensor, targets: Tensor, log_d: bool, unjoined: bool) -> Tensor:
    if log_d:
        return (2 * targets - 1) * torch.sigmoid(-x)
    return targets - ((1 - targets) * torch.sigmoid(x) if unjoined else torch.sigmoid(x))


def _by_row(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradients of means of the last dimension, spread over it."""
    return dy.unsqueeze(-1) / x.shape[-1] if x.dim() > 1 else dy / x.shape[-1]


@operator(
    "SigmoidCrossEntropyWithLogits",
    gradient="SigmoidCrossEntropyWithLogitsGradient(GO0, I0, I1) -> GI0",
    shapes="*S, *S",
)
def sigmoid_cross_entropy_with_logits(
    x: Tensor, targets: Tensor, *, log_D_trick: bool = False, unjoined_lr_loss: bool = False
) -> Tensor:
    """Return the mean cross entropy of the last dimension, of logits and probabilities."""
    return -_log_likelihood(x, targets, log_D_trick, unjoined_lr_loss).mean(-1)


@operator("SigmoidCrossEntropyWithLogitsGradient", expected="*S, *S D, *S D")
def sigmoid_cross_entropy_with_logits_gradient(
    dy: Tensor,
    x: Tensor,
    targets: Tensor,
    *,
    log_D_trick: bool = False,
    unjoined_lr_loss: bool = False,
) -> Tensor:
    return -_by_row(dy, x) * _log_likelihood_gradient(x, targets, log_D_trick, unjoined_lr_loss)


@operator(
    "WeightedSigmoidCrossEntropyWithLogits",
    gradient="WeightedSigmoidCrossEntropyWithLogitsGradient(GO0, I0, I1, I2) -> GI0",
    shapes="*S, *S, *S",
)
def weighted_sigmoid_cross_entropy_with_logits(
    x: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Return the mean of the weighted cross entropies of the last dimension."""
    return -(weights * _log_likelihood(x, targets, False, False)).mean(-1)


@operator("WeightedSigmoidCrossEntropyWithLogitsGradient", expected="*S, *S D, *S D, *S D")
def weighted_sigmoid_cross_entropy_with_logits_gradient(
    dy: Tensor, x: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    return -_by_row(dy, x) * weights * _log_likelihood_gradient(x, targets, False, False)
