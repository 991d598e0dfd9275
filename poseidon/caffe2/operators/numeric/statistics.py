"""Counts and moments of values: histograms, quantiles, buckets, moments of batches."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator


@operator("Histogram")
def histogram(x: Tensor, *others: Tensor, bin_edges: list[float]) -> Tensor:
    """Return how many values of all inputs lie between each pair of edges, int64; the last edge belongs to its bin.

    Raises:
        ValueError: there are fewer than two edges, or they do not increase.
    """
    edges = torch.tensor(bin_edges, device=x.device)
    if len(edges) < 2 or bool((edges[1:] <= edges[:-1]).any()):
        raise ValueError("Histogram needs at least two edges, each larger than the one before")
    values = torch.cat([part.reshape(-1).float() for part in (x, *others)])
    values = values[(values >= edges[0]) & (values <= edges[-1])]
    bins = (torch.searchsorted(edges, values, right=True) - 1).clamp(max=len(edges) - 2)
    return torch.bincount(bins, minlength=len(edges) - 1)


@operator("AccumulateHistogram")
class AccumulateHistogram:
    """The histogram of values, with one bin for those below and one for those above all others, and its sum over runs."""

    def __init__(self, *, lower_bound: float = 0.0, upper_bound: float = 1.0, num_buckets: int = 1) -> None:
        if lower_bound >= upper_bound:
            raise ValueError(f"the lower bound {lower_bound} is not below the upper bound {upper_bound}")
        self.low = lower_bound
        self.step = (upper_bound - lower_bound) / num_buckets
        self.buckets = num_buckets
        self.total: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts of this run and of all runs, int64."""
        place = torch.floor((x.reshape(-1) - self.low) / self.step) + 1
        counts = torch.bincount(place.clamp(0, self.buckets + 1).long(), minlength=self.buckets + 2)
        self.total = counts if self.total is None else self.total + counts
        return counts, self.total.clone()


@operator("Accumulate")
class Accumulate:
    """The sum of all inputs so far, each weighted by `gamma` once for each run since."""

    def __init__(self, *, gamma: float = 1.0) -> None:
        self.gamma = gamma
        self.total: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of this run."""
        old = self.total
        if old is None or old.shape != x.shape:
            old = torch.zeros_like(x)
        self.total = x + self.gamma * old
        return self.total.clone()


@operator("Quantile")
def quantile(
    x: Tensor,
    *others: Tensor,
    quantile: float = 1.0,
    abs: bool = True,  # noqa: A002 (Caffe2's name)
    tol: float = 1e-3,
) -> Tensor:
    """Return the smallest value that at least a share of all values does not exceed, shape (1,).

    Args:
        x, others: the values.
        quantile: the share, from 0 to 1.
        abs: whether magnitudes count.
        tol: the error that Caffe2 allows; the result is exact.
    """
    values = torch.cat([part.reshape(-1) for part in (x, *others)])
    ordered = (values.abs() if abs else values).sort().values
    place = int(-(-quantile * len(ordered) // 1)) - 1
    return ordered[max(place, 0)].reshape(1)


@operator("Bucketize")
def bucketize(x: Tensor, *, boundaries: list[float]) -> Tensor:
    """Return the number of boundaries below each value, int32.

    Raises:
        ValueError: there is no boundary, or they decrease.
    """
    limits = torch.tensor(boundaries, device=x.device)
    if not len(limits) or bool((limits[1:] < limits[:-1]).any()):
        raise ValueError("Bucketize needs boundaries that do not decrease")
    return torch.searchsorted(limits, x.float()).to(torch.int32)


def _other_axes(x: Tensor, order: str) -> list[int]:
    channel = x.dim() - 1 if order == "NHWC" else 1
    return [axis for axis in range(x.dim()) if axis != channel]


@operator("BatchMoments", gradient="BatchMomentsGradient(GO0, GO1, I0) -> GI0")
def batch_moments(x: Tensor, *, order: str = "NCHW") -> tuple[Tensor, Tensor]:
    """Return the mean and the mean of squares of each channel."""
    axes = _other_axes(x, order)
    return x.mean(axes), x.square().mean(axes)


@operator("BatchMomentsGradient")
def batch_moments_gradient(dmean: Tensor, dsquares: Tensor, x: Tensor, *, order: str = "NCHW") -> Tensor:
    """Return the gradient of `BatchMoments`."""
    axes = _other_axes(x, order)
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    share = x.numel() // max(dmean.numel(), 1)
    return (dmean.reshape(shape) + 2 * x * dsquares.reshape(shape)) / share


SMALLEST = 1e-20


def _entropy(p: Tensor) -> Tensor:
    q = 1 - p
    return -(p * p.clamp(min=SMALLEST).log() + q * q.clamp(min=SMALLEST).log())


def _log_odds(p: Tensor) -> Tensor:
    return p.clamp(min=SMALLEST).log() - (1 - p).clamp(min=SMALLEST).log()


@operator("BernoulliJSD", gradient="BernoulliJSDGradient(GO0, I0, I1) -> GI0")
def bernoulli_jsd(x: Tensor, t: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of each pair of probabilities of a coin."""
    return _entropy((x + t) / 2) - (_entropy(x) + _entropy(t)) / 2


@operator("BernoulliJSDGradient")
def bernoulli_jsd_gradient(dy: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Return the gradient of `BernoulliJSD` with respect to x."""
    return dy * (_log_odds(x) - _log_odds((x + t) / 2)) / 2
