"""Updates of whole parameters: momentum, Adagrad, Adam, RMSProp, Adadelta, FTRL, LARS."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import Context, operator

TILE = 1 << 17
"""Values of a tile: what is computed of it in between stays in the processor's cache."""


def tiles(x: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous tensor in parts of a tile, without a copy; one part on a GPU."""
    return x.view(-1).split(TILE) if x.numel() > TILE and x.device.type == "cpu" else (x,)


@dataclass(frozen=True, slots=True)
class Momentum:
    """The arguments of SGD with momentum; the learning rate is a part of the momentum."""

    momentum: float = 0.0
    nesterov: bool = False

    def step(self, g: Tensor, m: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step to subtract and the new momentum."""
        moved = m * self.momentum + g * lr
        if self.nesterov:
            return (1 + self.momentum) * moved - self.momentum * m, moved
        return moved, moved


NO_MOMENTUM = Momentum()


@operator("MomentumSGD", shapes="*S, *S, one")
def momentum_sgd(
    g: Tensor, m: Tensor, lr: Tensor, *, rule: Momentum = NO_MOMENTUM
) -> tuple[Tensor, Tensor]:
    """Return the step to subtract and the new momentum."""
    return rule.step(g, m, lr)


@operator("MomentumSGDUpdate", shapes="*S, *S, one, *S")
class MomentumSGDUpdate:
    """`MomentumSGD` and the step's subtraction; blobs of both sides are updated in place."""

    def __init__(self, *, context: Context, rule: Momentum = NO_MOMENTUM) -> None:
        definition = context.definition
        same = list(definition.output) == [definition.input[i] for i in (0, 1, 3)]
        self.in_place = same and context.device.type != "meta"
        self.rule = rule

    def __call__(
        self, g: Tensor, m: Tensor, lr: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step that was subtracted, the new momentum and the new parameter."""
        if self.in_place and not self.rule.nesterov:
            m.mul_(self.rule.momentum).add_(g * lr)
            return g.copy_(m), m, w.sub_(m)
        if self.in_place and all(x.is_contiguous() and x.dtype == lr.dtype for x in (g, m, w)):
            for part_of_g, part_of_m, part_of_w in zip(tiles(g), tiles(m), tiles(w), strict=True):
                self._update(part_of_g, part_of_m, part_of_w, lr)
            return g, m, w
        step, moved = self.rule.step(g, m, lr)
        return step, moved, w.sub_(step) if self.in_place else w - step

    def _update(self, g: Tensor, m: Tensor, w: Tensor, lr: Tensor) -> None:
        """Do the same in place, with Nesterov's momentum."""
        before = m * self.rule.momentum
        torch.add(before, g * lr, out=m)
        torch.mul(m, 1 + self.rule.momentum, out=g)
        w.sub_(g.sub_(before))


@operator("FP32MomentumSGDUpdate", shapes="*S, *S, one, *S")
def fp32_momentum_sgd_update(
    g: Tensor,
    m: Tensor,
    lr: Tensor,
    w: Tensor,
    *,
    rule: Momentum = NO_MOMENTUM,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return step, momentum and parameter; the weight decay is a part of the gradient."""
    step, moved = rule.step(g + weight_decay * w, m, lr)
    return step, moved, w - step


@operator("FP16MomentumSGDUpdate", shapes="*S, *S, one, *S")
def fp16_momentum_sgd_update(
    g: Tensor,
    m: Tensor,
    lr: Tensor,
    w: Tensor,
    *,
    rule: Momentum = NO_MOMENTUM,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return step, momentum and parameter of half precision, computed in single precision."""
    single = (tensor.float() for tensor in (g, m, lr, w))
    wide = fp32_momentum_sgd_update(*single, rule=rule, weight_decay=weight_decay)
    step, moved, updated = (tensor.to(w.dtype) for tensor in wide)
    return step, moved, updated


def adagrad_step(
    w: Tensor, h: Tensor, g: Tensor, lr: Tensor, epsilon: float, decay: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, history, effective learning rate and the update that was added."""
    history = decay * h + g * g
    effective = lr / (history.sqrt() + epsilon)
    update = effective * g
    return w + update, history, effective, update


@operator("Adagrad", outputs=(2, 4), shapes="*S, *S, *S, one")
def adagrad(
    w: Tensor,
    h: Tensor,
    g: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    decay: float = 1.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, sum of squares, effective learning rate and update."""
    return adagrad_step(w, h, g + weight_decay * w if weight_decay else g, lr, epsilon, decay)


@dataclass(frozen=True, slots=True)
class Adam:
    """The arguments of Adam: both moments' decay, and what is added to the second's root."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-5

    def step(
        self, m1: Tensor, m2: Tensor, g: Tensor, squares: Tensor, iteration: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments and the gradient that the learning rate multiplies.

        Args:
            m1, m2: the moments.
            g: the gradient.
            squares: its squares, or means of these.
            iteration: the counter; the correction of the moments' bias uses the next number.
        """
        t = iteration + 1
        correction = math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t)
        first = self.beta1 * m1 + (1 - self.beta1) * g
        second = self.beta2 * m2 + (1 - self.beta2) * squares
        root = second.sqrt() + self.epsilon
        root = root.reshape(root.shape + (1,) * (g.dim() - root.dim()))
        return first, second, correction * first / root

    def rectified(self, step: Tensor, first: Tensor, iteration: int) -> Tensor:
        """Return Adam's step as RAdam takes it (arXiv 1908.03265).

        Args:
            step: the gradient that Adam applies.
            first: the new first moment.
            iteration: the counter; as in `step` the next number counts.
        """
        t = iteration + 1
        limit = 2 / (1 - self.beta2) - 1
        length = limit - 2 * t * self.beta2**t / (1 - self.beta2**t)
        if length < 5:
            return first / (1 - self.beta1**t)
        share = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        return step * math.sqrt(share)


ADAM = Adam()


def counted(iteration: Tensor) -> int:
    """Return the value of a counter; 0 where tensors have no data."""
    return 0 if iteration.is_meta else int(iteration.reshape(-1)[0])


@operator("Adam", outputs=(3, 4), shapes="*S, *S, *S, *S, one, one")
def adam(
    w: Tensor,
    m1: Tensor,
    m2: Tensor,
    g: Tensor,
    lr: Tensor,
    iteration: Tensor,
    *,
    rule: Adam = ADAM,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, both moments and the gradient that was applied."""
    first, second, step = rule.step(m1, m2, g, g * g, counted(iteration))
    return w + lr * step, first, second, step


@operator("RmsProp", shapes="*S, *S, *S, one")
def rms_prop(
    g: Tensor,
    squares: Tensor,
    m: Tensor,
    lr: Tensor,
    *,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step, the mean of squares and the momentum."""
    mean = squares + (1 - decay) * (g * g - squares)
    moved = momentum * m + lr * g / (mean + epsilon).sqrt()
    return moved, mean, moved.clone()


def adadelta_step(
    w: Tensor, h: Tensor, d: Tensor, g: Tensor, lr: Tensor, epsilon: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean of squared gradients and mean of squared updates."""
    history = decay * h + (1 - decay) * g * g
    update = (d + epsilon).sqrt() / (history + epsilon).sqrt() * g
    return w + lr * update, history, decay * d + (1 - decay) * update * update


@operator("Adadelta", shapes="*S, *S, *S, *S, one")
def adadelta(
    w: Tensor,
    h: Tensor,
    d: Tensor,
    g: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    decay: float = 0.95,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean of squared gradients and mean of squared updates."""
    return adadelta_step(w, h, d, g, lr, epsilon, decay)


@dataclass(frozen=True, slots=True)
class Ftrl:
    """The arguments of FTRL: learning rate, what its divisor adds, and both penalties."""

    alpha: float = 0.005
    beta: float = 1.0
    lambda1: float = 0.001
    lambda2: float = 0.001

    def step(self, w: Tensor, nz: Tensor, g: Tensor, rate: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return parameter and the pair of sums (last dimension): squared gradients, adjusted
        gradients; a rate takes the place of `alpha`.
        """
        alpha: Any = self.alpha if rate is None else rate
        n, z = nz.unbind(-1)
        squares = n + g * g
        sums = z + g - (squares.sqrt() - n.sqrt()) / alpha * w
        divisor = (self.beta + squares.sqrt()) / alpha + self.lambda2
        solved = (self.lambda1 * sums.sign() - sums) / divisor
        return torch.where(sums.abs() > self.lambda1, solved, 0), torch.stack((squares, sums), -1)


FTRL = Ftrl()


@operator("Ftrl", shapes="*S, *S 2, *S, one")
def ftrl(
    w: Tensor, nz: Tensor, g: Tensor, rate: Tensor | None = None, *, rule: Ftrl = FTRL
) -> tuple[Tensor, Tensor]:
    """Return parameter and sums; a fourth input takes the place of `alpha`."""
    return rule.step(w, nz, g, rate)


@operator("Lars", shapes="*S, *S, one, one, one")
def lars(
    w: Tensor,
    g: Tensor,
    wd: Tensor,
    trust: Tensor,
    most: Tensor,
    *,
    offset: float = 0.5,
    lr_min: float = 0.02,
) -> Tensor:
    """Return the layer's rate factor: trust / (|g| / |w| + wd + offset), lr_min to `most`."""
    norm = w.norm()
    factor = torch.where(norm > 0, trust / (g.norm() / norm + wd + offset), 1.0)
    return torch.minimum(factor, most).clamp(min=lr_min).reshape(1)


@operator("WeightScale")
def weight_scale(
    w: Tensor,
    iteration: Tensor,
    *,
    stepsize: int = sys.maxsize,
    upper_bound_iter: int = sys.maxsize,
    scale: float = 1.0,
) -> Tensor:
    """Return the parameter times `scale` in each `stepsize`-th iteration up to the bound."""
    number = counted(iteration) + 1
    return w * scale if number % stepsize == 0 and number < upper_bound_iter else w.clone()


def _weighted_sum_rule(maker: GradientMaker) -> None:
    """Make the gradients of the terms, and with `grad_on_w` of the weights."""
    inputs = range(len(maker.forward.input))
    outputs = [maker.GI(index) for index in inputs if index % 2 == 0]
    if maker.argument("grad_on_w", 0):
        outputs += [maker.GI(index) for index in inputs if index % 2 == 1]
    maker.op("WeightedSumGradient", [maker.GO(0), *maker.forward.input], outputs)


@operator("WeightedSum", gradient=_weighted_sum_rule, shapes="*S, one, ...")
def weighted_sum(*pairs: Tensor) -> Tensor:
    """Return the sum of x_i * w_i over pairs of inputs; a weight is one number."""
    total = pairs[0] * pairs[1].reshape(())
    for x, weight in zip(pairs[2::2], pairs[3::2], strict=True):
        total.add_(x * weight.reshape(()))
    return total


@operator("WeightedSumGradient")
def weighted_sum_gradient(
    dy: Tensor, *pairs: Tensor, grad_on_w: bool = False
) -> tuple[Tensor, ...]:
    """Return the gradients of the terms, then the gradients of the weights."""
    weighted = list(zip(pairs[0::2], pairs[1::2], strict=True))
    for x, weight in weighted:
        check_count("a weight", weight, 1)
        check_tensor("a term", x, tuple(dy.shape))
    terms = tuple(dy * weight.reshape(()) for _, weight in weighted)
    if not grad_on_w:
        return terms
    return terms + tuple((dy * x).sum().reshape(weight.shape) for x, weight in weighted)
