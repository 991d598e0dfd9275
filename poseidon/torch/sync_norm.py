"""torch.nn.SyncBatchNorm over all workers of a group, on any device.

With n_g elements a channel on worker g, their mean m_g and variance v_g:

    N = sum(n_g)   m = sum(n_g m_g) / N   v = sum(n_g (v_g + m_g^2)) / N - m^2
    y = (x - m) / sqrt(v + eps) * weight + bias

Sums over the workers are float64, in the order of ranks, so all workers have the same bits. Their
gradient is the sum of all workers' gradients: what one process with the whole batch has.

Law: the layers of a group run in the same order on all workers, in both directions. A copy of the
module has torch's own layers.

Shape suffixes: C channels; N... records and further axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.broadcast import Gather
from poseidon.exchange.membership import Membership


def check_norms(module: nn.Module, member: Membership) -> None:
    """Refuse layers that normalize over all workers, where these do not wait for each other."""
    quorum, virtual, reason = member.options.quorum, member.by_worker, ""
    if quorum:
        reason = f"with a quorum of {quorum} they do not wait for each other"
    elif member.takes_turns:
        reason = f"{virtual.processes} of them compute for {virtual.count} virtual workers in turn"
    if reason and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise UsageError(
            "torch.nn.SyncBatchNorm normalizes over all workers in each forward pass, but "
            f"{reason}; use BatchNorm, or no quorum and as many workers as virtual workers"
        )


class SyncNorms:
    """The layers of a module that normalize over all workers, until `close`.

    Args:
        counts: returns whether this worker's batch counts; it does not where it only fills a turn.
    """

    def __init__(self, module: nn.Module, gather: Gather, counts: Callable[[], bool]) -> None:
        self._layers = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm)]
        for layer in self._layers:
            layer.forward = _Forward(layer, gather, counts)  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        """Give the layers torch's own forward pass back."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._layers.clear()


class _Forward:
    """The forward pass of one layer of a group."""

    def __init__(self, layer: nn.SyncBatchNorm, gather: Gather, counts: Callable[[], bool]) -> None:
        self._layer = layer
        self._gather = gather
        self._counts = counts

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize over all workers in training, else by the running statistics, as torch does."""
        layer = self._layer
        layer._check_input_dim(x)
        layer._check_non_zero_input_channels(x)
        if not layer.training:
            return nn.functional.batch_norm(
                x,
                layer.running_mean,
                layer.running_var,
                layer.weight,
                layer.bias,
                training=layer.running_mean is None,
                eps=layer.eps,
            )
        mean_C, variance_C, elements = self._over_workers(x.float())
        self._follow(mean_C.detach(), variance_C.detach(), elements)
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale_C = torch.rsqrt(variance_C + layer.eps)
        y = (x.float() - mean_C.float().view(shape)) * scale_C.float().view(shape)
        if layer.weight is not None:
            y = y * layer.weight.float().view(shape) + layer.bias.float().view(shape)
        return y.to(x.dtype)

    def _over_workers(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return mean and variance over all workers in float64, and the elements a channel."""
        axes = [0, *range(2, x.dim())]
        own = x.numel() // x.shape[1] if self._counts() else 0
        variance_C, mean_C = (part.double() for part in torch.var_mean(x, axes, unbiased=False))
        if own == 0:  # of nothing: no number, and no gradient
            variance_C, mean_C = (torch.nan_to_num(part) * 0.0 for part in (variance_C, mean_C))
        moments_2C = torch.cat([own * mean_C, own * (variance_C + mean_C.square())])
        counts = [float(own)]
        sums_2C = _SumOverWorkers.apply(moments_2C, self._gather, counts)  # type: ignore[no-untyped-call]
        elements = max(counts[-1], 1.0)
        mean_C, square_C = (sums_2C / elements).chunk(2)
        return mean_C, (square_C - mean_C.square()).clamp(min=0), elements

    def _follow(self, mean_C: Tensor, variance_C: Tensor, elements: float) -> None:
        """Move the running statistics toward the statistics of this batch."""
        layer = self._layer
        if layer.running_mean is None or layer.running_var is None:
            return
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        weight: float | Tensor | None = layer.momentum
        if weight is None:  # a plain average, whose count stays on the device
            count = layer.num_batches_tracked.double()
            weight = count.reciprocal().to(layer.running_mean.dtype)
        unbiased_C = variance_C * (elements / max(elements - 1, 1))
        with torch.no_grad():
            layer.running_mean.lerp_(mean_C.to(layer.running_mean.dtype), weight)
            layer.running_var.lerp_(unbiased_C.to(layer.running_var.dtype), weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TorchForward:
        # the layer is being copied: `memo` has the copy
        return _TorchForward(memo[id(self._layer)])

    def __reduce__(self) -> tuple[type[_TorchForward], tuple[nn.SyncBatchNorm]]:
        return _TorchForward, (self._layer,)


class _TorchForward:
    """torch's own forward pass of a copied layer."""

    def __init__(self, layer: nn.SyncBatchNorm) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return nn.SyncBatchNorm.forward(self._layer, x)


class _SumOverWorkers(torch.autograd.Function):
    """The sum of a small float64 tensor over all workers; so is its gradient. The sum of a count is
    put behind that, on the host.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, gather: Gather, counts: list[float]) -> Tensor:
        ctx.gather = gather
        total, count = _summed(own, gather, counts[0])
        counts.append(count)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _summed(gradients[0], ctx.gather, 0.0)[0], None, None


def _summed(own: Tensor, gather: Gather, count: float) -> tuple[Tensor, float]:
    parts = gather(np.append(own.detach().cpu().numpy(), count).tobytes())
    total = np.sum([np.frombuffer(part, np.float64) for part in parts], axis=0)
    return torch.from_numpy(total[:-1]).to(own.device), float(total[-1])
