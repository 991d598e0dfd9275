"""Losses of detectors by box and anchor, as in Detectron: smooth L1, cross entropy, focal loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import operator

SMALLEST = torch.finfo(torch.float32).tiny
"""The least probability whose logarithm is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smooth:
    """The arguments of smooth L1 losses (Girshick, Fast R-CNN, 2015).

    Attributes:
        beta: where the loss of a difference d changes from d^2 / (2 beta) to |d| - beta / 2; above 0.
        scale: what the loss is multiplied by.
    """

    beta: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}, it must be above 0")

    def values(self, d: Tensor) -> Tensor:
        """Return the loss of each difference."""
        square = d.square() / (2 * self.beta)
        return torch.where(d.abs() < self.beta, square, d.abs() - self.beta / 2)

    def slopes(self, d: Tensor) -> Tensor:
        """Return the derivative of each."""
        return (d / self.beta).clamp(-1, 1)


SMOOTH = Smooth()


def _differences(y: Tensor, target: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return the weighted differences in the shape of y, after a check of all inputs."""
    if y.dim() == 0 or y.shape[:1] != target.shape[:1]:
        raise ValueError(
            f"y and the target must have the same first extent, found {tuple(y.shape)} and {tuple(target.shape)}"
        )
    for name, value in (
        ("target", target),
        ("inside weights", inside),
        ("outside weights", outside),
    ):
        check_count(f"the input of the {name}", value, y.numel())
    return inside.reshape(y.shape) * (y - target.reshape(y.shape))


@operator("SmoothL1Loss", gradient="SmoothL1LossGradient(I0, I1, I2, I3, GO0) -> GI0")
def smooth_l1_loss(
    y: Tensor, target: Tensor, inside: Tensor, outside: Tensor, *, smooth: Smooth = SMOOTH
) -> Tensor:
    """Return scale / N sum of outside * smooth_L1(inside * (y - target)), a scalar.

    Args:
        y: predictions, N x any extents.
        target: what they should be; N first, and as many values.
        inside, outside: weights of the differences and of their losses, as many values.
        smooth: its arguments.
    """
    losses = outside.reshape(y.shape) * smooth.values(_differences(y, target, inside, outside))
    return smooth.scale / max(len(y), 1) * losses.sum()


@operator("SmoothL1LossGradient", expected="?, ?, ?, ?, one")
def smooth_l1_loss_gradient(
    y: Tensor,
    target: Tensor,
    inside: Tensor,
    outside: Tensor,
    dloss: Tensor,
    *,
    smooth: Smooth = SMOOTH,
) -> Tensor:
    slopes = smooth.slopes(_differences(y, target, inside, outside))
    weights = (inside * outside.reshape(inside.shape)).reshape(y.shape)
    return smooth.scale / max(len(y), 1) * dloss.reshape(()) * weights * slopes


def _selected(y: Tensor, target: Tensor, locations: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the selected predictions in y, flat, and their differences."""
    check_tensor("the input of the locations", locations, tuple(target.shape))
    _, channels, height, width = y.shape
    image, channel, row, column = locations.long().unbind(1)
    offset = torch.arange(4, device=y.device)
    place = ((image * channels + channel)[:, None] + offset) * height + row[:, None]
    place = place * width + column[:, None]
    return place, y.reshape(-1)[place] - target


@operator(
    "SelectSmoothL1Loss",
    gradient="SelectSmoothL1LossGradient(I0, I1, I2, I3, GO0) -> GI0",
    shapes="N C H W, M 4, M 4, one",
)
def select_smooth_l1_loss(
    y: Tensor, target: Tensor, locations: Tensor, count: Tensor, *, smooth: Smooth = SMOOTH
) -> Tensor:
    """Return scale / max(count, 1) sum of smooth_L1(y[n, c + j, h, w] - target[m, j]), a scalar.

    Args:
        y: predictions of boxes, N x C x H x W.
        target: the right values of the M selected boxes, M x 4.
        locations: n, c, h and w of each, M x 4; a box has the channels c to c + 3.
        count: what the sum is divided by.
        smooth: its arguments.
    """
    _, differences = _selected(y, target, locations)
    return smooth.scale * smooth.values(differences).sum() / count.reshape(()).clamp(min=1)


@operator("SelectSmoothL1LossGradient", shapes="N C H W, M 4, M 4, one, one")
def select_smooth_l1_loss_gradient(
    y: Tensor,
    target: Tensor,
    locations: Tensor,
    count: Tensor,
    dloss: Tensor,
    *,
    smooth: Smooth = SMOOTH,
) -> Tensor:
    place, differences = _selected(y, target, locations)
    factor = smooth.scale * dloss.reshape(()) / count.reshape(()).clamp(min=1)
    found = torch.zeros_like(y).reshape(-1)
    return found.index_add(
        0, place.reshape(-1), (factor * smooth.slopes(differences)).reshape(-1)
    ).reshape(y.shape)


def _counted(x: Tensor, target: Tensor) -> Tensor:
    """Return 1 where a target counts, 0 where it is -1."""
    check_count("the input of the targets", target, x.numel())
    return (target.reshape(x.shape) != -1).to(x.dtype)


@operator("SigmoidCrossEntropyLoss", gradient="SigmoidCrossEntropyLossGradient(I0, I1, GO0) -> GI0")
def sigmoid_cross_entropy_loss(
    x: Tensor, target: Tensor, *, scale: float = 1.0, normalize: bool = True
) -> Tensor:
    """Return the sum of the cross entropies of sigmoids, a scalar.

    Args:
        x: logits.
        target: 0 or 1, or -1 for a value that does not count; as many values.
        scale: what the loss is multiplied by.
        normalize: divide by the number of values that count.
    """
    counts = _counted(x, target)
    losses = functional.binary_cross_entropy_with_logits(
        x, target.reshape(x.shape).to(x.dtype), counts, reduction="sum"
    )
    return scale * losses / (counts.sum().clamp(min=1e-5) if normalize else 1)


@operator("SigmoidCrossEntropyLossGradient", expected="?, ?, one")
def sigmoid_cross_entropy_loss_gradient(
    x: Tensor, target: Tensor, dloss: Tensor, *, scale: float = 1.0, normalize: bool = True
) -> Tensor:
    counts = _counted(x, target)
    factor = scale * dloss.reshape(()) / (counts.sum().clamp(min=1e-5) if normalize else 1)
    return factor * counts * (torch.sigmoid(x) - target.reshape(x.shape))


def _by_anchor(x: Tensor, classes: int) -> Tensor:
    """Return N x (anchors classes) x H x W values as N x anchors x classes x H x W."""
    if classes < 1 or x.shape[1] % classes:
        raise ValueError(f"{x.shape[1]} channels are not a multiple of num_classes={classes}")
    return x.reshape(len(x), x.shape[1] // classes, classes, *x.shape[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Focal:
    """The arguments of focal losses (Lin et al., arXiv 1708.02002).

    Attributes:
        scale: what the loss is multiplied by.
        alpha: the weight of a label above 0; that of label 0 is 1 - alpha.
        gamma: the exponent of 1 - p, which lowers the losses of examples that are easy.
    """

    scale: float = 1.0
    alpha: float = 0.25
    gamma: float = 1.0

    def factor(self, count: Tensor) -> Tensor:
        """Return scale / max(count, 1)."""
        return self.scale / count.reshape(()).clamp(min=1)


FOCAL = Focal()


def _focal_targets(grouped: Tensor, labels: Tensor, focal: Focal) -> tuple[Tensor, Tensor]:
    """Return whether each class is the label of its anchor, and the weight of its loss."""
    n, anchors, classes, height, width = grouped.shape
    check_tensor("the input of the labels", labels, (n, anchors, height, width))
    label = labels.long()[:, :, None]
    own = label == torch.arange(1, classes + 1, device=labels.device)[:, None, None]
    return own, torch.where(own, focal.alpha, 1 - focal.alpha) * (label != -1)


@operator(
    "SigmoidFocalLoss",
    gradient="SigmoidFocalLossGradient(I0, I1, I2, GO0) -> GI0",
    expected="N C H W, N A H W, one",
)
def sigmoid_focal_loss(
    x: Tensor, labels: Tensor, count: Tensor, *, focal: Focal = FOCAL, num_classes: int = 80
) -> Tensor:
    """Return the focal loss of sigmoids, a scalar: the sum of -w (1 - p)^gamma log p, where p is the
    probability of the right answer for a class and w is alpha or 1 - alpha.

    Args:
        x: logits, N x (anchors num_classes) x H x W.
        labels: N x anchors x H x W: 1 to num_classes, 0 for the background, -1 to ignore a place.
        count: what the sum is divided by, at least 1.
        focal: its arguments.
        num_classes: without the background.
    """
    grouped = _by_anchor(x, num_classes)
    own, weights = _focal_targets(grouped, labels, focal)
    right = torch.where(own, grouped, -grouped)
    losses = -weights * torch.sigmoid(-right) ** focal.gamma * functional.logsigmoid(right)
    return focal.factor(count) * losses.sum()


@operator("SigmoidFocalLossGradient", expected="N C H W, N A H W, one, one")
def sigmoid_focal_loss_gradient(
    x: Tensor,
    labels: Tensor,
    count: Tensor,
    dloss: Tensor,
    *,
    focal: Focal = FOCAL,
    num_classes: int = 80,
) -> Tensor:
    """Return the gradient: with q = 1 - p, w q^gamma (gamma p log p - q) by the answer's logit."""
    grouped = _by_anchor(x, num_classes)
    own, weights = _focal_targets(grouped, labels, focal)
    right = torch.where(own, grouped, -grouped)
    p, q = torch.sigmoid(right), torch.sigmoid(-right)
    slope = weights * q**focal.gamma * (focal.gamma * p * functional.logsigmoid(right) - q)
    slope = torch.where(own, slope, -slope)
    return (focal.factor(count) * dloss.reshape(()) * slope).reshape(x.shape)


def _picked(p: Tensor, labels: Tensor, focal: Focal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels with 0 for -1, the probability of each anchor's label and its weight."""
    n, anchors, classes, height, width = p.shape
    check_tensor("the input of the labels", labels, (n, anchors, height, width))
    if not labels.is_meta and (wrong := labels[(labels < -1) | (labels >= classes)]).numel():
        raise ValueError(f"the label {int(wrong[0])} is not one of -1 to {classes - 1}")
    label = labels.long().clamp(min=0)[:, :, None]
    weights = torch.where(labels >= 1, focal.alpha, 1 - focal.alpha) * (labels >= 0)
    return label, p.gather(2, label).squeeze(2), weights


@operator(
    "SoftmaxFocalLoss",
    gradient="SoftmaxFocalLossGradient(I0, I1, I2, O1, GO0) -> GI0",
    outputs=(2, 2),
    expected="N C H W, N A H W, one",
)
def softmax_focal_loss(
    x: Tensor, labels: Tensor, count: Tensor, *, focal: Focal = FOCAL, num_classes: int = 81
) -> tuple[Tensor, Tensor]:
    """Return the focal loss of softmaxes, a scalar: the sum of -w (1 - p)^gamma log p, where p is
    the probability of an anchor's label and w is alpha or 1 - alpha; and all probabilities in the
    shape of x.

    Args:
        x: logits, N x (anchors num_classes) x H x W.
        labels: N x anchors x H x W: 0 (background) to num_classes - 1, -1 to ignore a place.
        count: what the sum is divided by, at least 1.
        focal: its arguments.
        num_classes: with the background.
    """
    p = torch.softmax(_by_anchor(x, num_classes), 2)
    _, own, weights = _picked(p, labels, focal)
    losses = -weights * (1 - own) ** focal.gamma * own.clamp(min=SMALLEST).log()
    return focal.factor(count) * losses.sum(), p.reshape(x.shape)


@operator("SoftmaxFocalLossGradient", expected="N C H W, N A H W, one, ?, one")
def softmax_focal_loss_gradient(
    x: Tensor,
    labels: Tensor,
    count: Tensor,
    p: Tensor,
    dloss: Tensor,
    *,
    focal: Focal = FOCAL,
    num_classes: int = 81,
) -> Tensor:
    """Return the gradient: w (gamma (1 - p)^(gamma - 1) p log p - (1 - p)^gamma) times 1 - p by the
    logit of the label, and times -p_c by that of any other class c.
    """
    check_count("the input of the probabilities", p, x.numel())
    p = _by_anchor(p.reshape(x.shape), num_classes)
    label, own, weights = _picked(p, labels, focal)
    rest = (1 - own).clamp(min=SMALLEST)
    logarithm = own.clamp(min=SMALLEST).log()
    slope = weights * (
        focal.gamma * rest ** (focal.gamma - 1) * own * logarithm - rest**focal.gamma
    )
    delta = torch.zeros_like(p).scatter_(2, label, 1) - p
    return (focal.factor(count) * dloss.reshape(()) * slope[:, :, None] * delta).reshape(x.shape)


@operator(
    "GroupSpatialSoftmax",
    gradient="GroupSpatialSoftmaxGradient(O0, GO0) -> GI0",
    expected="N C H W",
)
def group_spatial_softmax(x: Tensor, *, num_classes: int = 81) -> Tensor:
    """Return each anchor's softmax over num_classes channels, N x (anchors num_classes) x H x W."""
    return torch.softmax(_by_anchor(x, num_classes), 2).reshape(x.shape)


@operator("GroupSpatialSoftmaxGradient", expected="N C H W, N C H W")
def group_spatial_softmax_gradient(y: Tensor, dy: Tensor, *, num_classes: int = 81) -> Tensor:
    p, given = (_by_anchor(value, num_classes) for value in (y, dy))
    return (p * (given - (p * given).sum(2, keepdim=True))).reshape(y.shape)
