"""Batch normalization (Ioffe and Szegedy, 2015), with Caffe's three blobs of statistics.

Law: only forward updates the blobs, m <- f m + mean, v <- f v + n / (n - 1) variance, s <- f s + 1,
with f the moving average fraction and n the number of values of a channel. The test phase uses the
estimates m / s and v / s.

BN: batch normalization with a slope and a bias, in the forms of three branches of Caffe.

Law: the fields choose the form.

* SegNet (Badrinarayanan et al., 2015): bn_mode, or scale_filler and
  shift_filler only. Two blobs; no running statistics.
* moving_average (hszhao/PSPNet): moving_average, decay, var_eps or axis; or the fillers only, with
  more than two `param` blocks or blobs in the layer. Four blobs; m <- (1 - decay) m + decay mean.
* yjxiong (TSN; the definitions of PSPNet): momentum, eps, frozen, slope_filler or bias_filler, or
  no field. Four blobs; m <- momentum m + (1 - momentum) mean.

The variance of a batch is divided by n, in the running statistics too. Only `forward` updates
these; solvers do not, whatever the layer's `param` blocks say.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.base import BlobSpec, Layer, LayerError, Shape, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import TEST, BNParameter, FillerParameter


@register("BatchNorm")
class BatchNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps), with statistics over every axis but the second.

    Bottom: N x C x ... ; a bottom of one axis is one channel. Top: the same; may be in place.

    Fields (batch_norm_param): use_global_stats, by default true in phase TEST, false in TRAIN;
    moving_average_fraction; eps.

    Blobs: sum of means C, sum of variances C, scale factor 1. Solvers do not update them.
    """

    takes_any_form = True
    TOPS_MAY_BE_OVERWRITTEN = True
    STATISTICS = True
    mean: nn.Parameter
    variance: nn.Parameter
    factor: nn.Parameter
    _frozen: tuple[Tensor, Tensor] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.batch_norm_param, bottoms[0]
        if not shape:
            raise LayerError("bottom is a scalar, expected at least 1 axis")
        in_test = self.context.phase == TEST
        self.reads_estimates = (
            param.use_global_stats if param.HasField("use_global_stats") else in_test
        )
        self.updates_statistics = not self.reads_estimates
        self.fraction, self.eps = param.moving_average_fraction, param.eps
        channels = 1 if len(shape) == 1 else shape[1]
        self.declare(
            *(
                BlobSpec(name=name, shape=(extent,), filler=FillerParameter(), learns=False)
                for name, extent in (("mean", channels), ("variance", channels), ("factor", 1))
            )
        )
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        return self.normalize(bottom, None, None)

    def normalize(self, bottom: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the top, multiplied by `weight` and plus `bias` of each channel
        unless None, in one pass over the memory.
        """
        if bottom.dim() == 1:
            return self.normalize(bottom.reshape(1, 1, -1), weight, bias).view(-1)
        if self.reads_estimates:
            mean, variance = self.estimates()
            return torch.batch_norm(
                bottom, weight, bias, mean, variance, False, 0.0, self.eps, True
            )
        # With a momentum of 1 torch's running statistics become the statistics of this batch.
        mean = torch.zeros_like(self.mean, requires_grad=False)
        variance = torch.zeros_like(mean)
        top = torch.batch_norm(bottom, weight, bias, mean, variance, True, 1.0, self.eps, True)
        if bottom.numel() == bottom.shape[1]:
            variance = torch.zeros_like(variance)  # a single value has variance 0, not 0 / 0
        self._accumulate(mean, variance)
        return top

    def freeze_estimates(self) -> None:
        """Compute the estimates now, once: the blobs do not change any more."""
        self._frozen = self.estimates()

    @torch.no_grad()
    def estimates(self) -> tuple[Tensor, Tensor]:
        """Return the accumulated mean and variance, initially zeros, without a wait for a GPU."""
        if self._frozen is not None:
            return self._frozen
        scale = torch.where(self.factor == 0, 0.0, 1 / self.factor)
        return self.mean * scale, self.variance * scale

    @torch.no_grad()
    def _accumulate(self, mean: Tensor, variance: Tensor) -> None:
        torch.add(mean, self.mean, alpha=self.fraction, out=self.mean)
        torch.add(variance, self.variance, alpha=self.fraction, out=self.variance)
        self.factor.mul_(self.fraction).add_(1)


SEGNET_EPS = 1e-9


class Form(Enum):
    """The branch whose layer is meant."""

    SEGNET = "SegNet's"
    """Statistics of the batch, or none."""
    AVERAGE = "the moving_average"
    """Statistics of the batch; in TEST running ones with moving_average."""
    MOMENTUM = "yjxiong's"
    """Statistics of the batch; in TEST, and if frozen, running ones."""


_FIELDS = {
    Form.SEGNET: {"bn_mode"},
    Form.AVERAGE: {"moving_average", "decay", "var_eps", "axis"},
    Form.MOMENTUM: {"momentum", "eps", "frozen", "slope_filler", "bias_filler"},
}
_FILLERS = {"scale_filler", "shift_filler"}
"""The fillers of the first two forms."""


def form_of(param: BNParameter, blobs: int = 0) -> Form:
    """Return the form that the fields choose.

    Args:
        blobs: the number of `param` blocks, or of blobs, of the layer.

    Raises:
        LayerError: fields of different forms are set.
    """
    names = {field.name for field, _ in param.ListFields()}
    chosen = [form for form, fields in _FIELDS.items() if names & fields]
    fillers = names & _FILLERS
    if len(chosen) > 1:
        forms = ", ".join(
            f"{', '.join(sorted(names & _FIELDS[form]))} of {form.value} form" for form in chosen
        )
        raise LayerError(f"bn_param has {forms}; expected the fields of one form")
    if fillers and names & {"slope_filler", "bias_filler"}:
        raise LayerError(
            f"bn_param has {', '.join(sorted(fillers))} and a slope_filler or bias_filler, "
            "expected one kind"
        )
    if chosen:
        return chosen[0]
    if not fillers:
        return Form.MOMENTUM
    return Form.AVERAGE if blobs > len(_FILLERS) else Form.SEGNET


@register("BN")
class BN(Layer):
    """y = slope (x - mean) / sqrt(variance + eps) + bias, statistics over every axis but `axis`.

    Bottom: N x C (x H x W). Tops: the same; may be in place. In SegNet's form with bn_mode LEARN
    optionally the mean and the variance of the batch, 1 x C x 1 x 1, without gradients.

    Fields (bn_param), by form: SegNet's: bn_mode (LEARN: statistics of the batch in both phases;
    INFERENCE: slope x + bias), scale_filler, shift_filler; eps is 1e-9. moving_average:
    scale_filler, shift_filler, moving_average (in TEST running statistics, else the batch's),
    decay, var_eps, axis (1 or 2). yjxiong's: slope_filler and bias_filler, or the other
    fillers in their place, momentum, eps, frozen (running statistics in both phases, and nothing
    learns). Without a filler slopes and biases are 0, as in the branches. `engine` has no effect.

    Blobs: slope, bias, and but for SegNet's form mean and variance: C values each.
    """

    TOPS = (1, 3)
    TOPS_MAY_BE_OVERWRITTEN = True
    STATISTICS = True
    slope: nn.Parameter
    bias: nn.Parameter
    mean: nn.Parameter
    variance: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.bn_param, bottoms[0]
        self.form = form_of(param, max(len(self.param.param), len(self.param.blobs)))
        self.axis = param.axis
        if self.axis not in (1, 2):
            raise LayerError(f"axis is {self.axis}, expected 1 or 2")
        if len(shape) <= self.axis or len(shape) > 4:
            raise LayerError(
                f"bottom of shape {times(shape)} has {len(shape)} axes, expected {self.axis + 1} "
                "to 4"
            )
        self._choose(param)
        extents = self._blob_shape(shape)
        tops = len(self.param.top)
        if tops > 1 and (self.form is not Form.SEGNET or self.infers):
            raise LayerError(
                f"has {tops} tops, expected 1: only SegNet's bn_mode: LEARN shows its statistics"
            )
        self._declare(param, extents)
        return [shape, (1, shape[1], 1, 1), (1, shape[1], 1, 1)][:tops]

    def _choose(self, param: BNParameter) -> None:
        """Choose between batch and running statistics, and how the latter are updated."""
        in_test = self.context.phase == TEST
        self.infers = self.form is Form.SEGNET and param.bn_mode == BNParameter.INFERENCE
        self.is_frozen = self.form is Form.MOMENTUM and param.frozen
        self.reads_running = self.is_frozen or (
            in_test
            and (self.form is Form.MOMENTUM or (self.form is Form.AVERAGE and param.moving_average))
        )
        self.updates_statistics = (
            self.form is not Form.SEGNET and not in_test and not self.is_frozen
        )
        self.eps = {Form.SEGNET: SEGNET_EPS, Form.AVERAGE: param.var_eps, Form.MOMENTUM: param.eps}[
            self.form
        ]
        self.new_weight = param.decay if self.form is Form.AVERAGE else 1 - param.momentum

    def _blob_shape(self, shape: Shape) -> Shape:
        channels = shape[self.axis]
        if self.form is Form.MOMENTUM:
            return (1, channels)
        return (1, channels, 1, 1) if self.axis == 1 else (1, 1, channels, 1)

    def _declare(self, param: BNParameter, extents: Shape) -> None:
        of_others = param.HasField("scale_filler") or param.HasField("shift_filler")
        first, second = ("scale", "shift") if of_others else ("slope", "bias")
        blobs = [
            ("slope", getattr(param, f"{first}_filler"), not self.is_frozen),
            ("bias", getattr(param, f"{second}_filler"), not self.is_frozen),
        ]
        if self.form is not Form.SEGNET:
            variance = FillerParameter(value=1.0 if self.is_frozen else 0.0)
            blobs += [("mean", FillerParameter(value=0.0), False), ("variance", variance, False)]
        self.declare(
            *(
                BlobSpec(name=name, shape=extents, filler=filler, learns=learns, fixes_rate=True)
                for name, filler, learns in blobs
            )
        )

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the top, and the statistics of the batch if they have tops."""
        wide = [1] * bottom.dim()
        wide[self.axis] = -1
        slope, bias = self.slope.view(wide), self.bias.view(wide)
        if self.infers:
            return bottom * slope + bias
        if self.reads_running:
            mean, variance = self.mean.detach(), self.variance.detach()
            return (bottom - mean.view(wide)) * (
                slope / (variance.view(wide) + self.eps).sqrt()
            ) + bias
        axes = [axis for axis in range(bottom.dim()) if axis != self.axis]
        variance, mean = torch.var_mean(bottom, axes, correction=0)
        if self.updates_statistics:
            self._accumulate(mean, variance)
        centred = bottom - mean.view(wide)
        top = centred * (slope / (variance.view(wide) + self.eps).sqrt()) + bias
        shown = (mean.detach().view(1, -1, 1, 1), variance.detach().view(1, -1, 1, 1))
        count = len(self.param.top)
        return top if count == 1 else (top, *shown)[:count]

    @torch.no_grad()
    def _accumulate(self, mean: Tensor, variance: Tensor) -> None:
        for running, new in ((self.mean, mean), (self.variance, variance)):
            running.mul_(1 - self.new_weight).add_(
                new.detach().view(running.shape), alpha=self.new_weight
            )
