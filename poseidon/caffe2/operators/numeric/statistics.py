"""Counts and moments of values: histograms, quantiles, buckets, moments of batches."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import check_count
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, operator


@operator("Histogram")
def histogram(x: Tensor, *others: Tensor, bin_edges: list[float]) -> Tensor:
    """Return the values of all inputs in each bin, int64; the last edge belongs to no bin.

    Raises:
        ValueError: there are fewer than two edges, or they do not increase.
    """
    edges = torch.tensor(bin_edges, device=x.device)
    if len(edges) < 2 or bool((edges[1:] <= edges[:-1]).any()):
        raise ValueError("Histogram needs at least two edges, each larger than the one before")
    values = torch.cat([part.reshape(-1).float() for part in (x, *others)])
    values = values[(values >= edges[0]) & (values < edges[-1])]
    bins = torch.searchsorted(edges, values, right=True) - 1
    return torch.bincount(bins, minlength=len(edges) - 1)


@operator("AccumulateHistogram")
class AccumulateHistogram:
    """The histogram of values, with bins below and above all others, and its sum over runs."""

    def __init__(
        self, *, lower_bound: float = 0.0, upper_bound: float = 1.0, num_buckets: int = 1
    ) -> None:
        if lower_bound >= upper_bound:
            raise ValueError(f"lower_bound={lower_bound} is not below upper_bound={upper_bound}")
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


@operator("Percentile", gradient=NO_GRADIENT, expected="N D, _ 2, D")
def percentile(x: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Return each value's percentile by its column's table, interpolated; 0 below it, 1 above.

    Args:
        x: (examples, columns).
        table: rows of value and percentile, ordered by value, column behind column.
        lengths: the number of rows of each column.

    Raises:
        ValueError: the lengths are not one a column, or do not add up to the table's rows.
    """
    sizes = lengths.tolist()
    if len(sizes) != x.shape[1] or sum(sizes) != len(table) or min(sizes, default=1) < 1:
        raise ValueError(f"lengths {sizes} do not fit {x.shape[1]} columns and {len(table)} rows")
    parts = [(part[:, 0], part[:, 1], part[:, 1], part[:, 1]) for part in table.split(sizes)]
    return torch.stack([_share(value, *part) for value, part in zip(x.t(), parts, strict=True)], 1)


def _share(x: Tensor, known: Tensor, at: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the percentile of values of one column; 0 below the known values, 1 above them.

    Args:
        x: a vector.
        known: values in order.
        at: the percentile of each known value.
        lower, upper: where the percentiles below and above each known value end and begin.
    """
    x, known = x.contiguous(), known.contiguous()
    after = torch.searchsorted(known, x).clamp(max=len(known) - 1)
    before = (after - 1).clamp(min=0)
    width = known[after] - known[before]
    weight = (x - known[before]) / torch.where(width > 0, width, 1)
    between = upper[before] + weight * (lower[after] - upper[before])
    found = torch.where(x == known[after], at[after], between)
    return torch.where(x < known[0], 0, torch.where(x > known[-1], 1, found))


@operator("BisectPercentile", gradient=NO_GRADIENT, expected="N D")
def bisect_percentile(
    x: Tensor,
    *,
    percentile_raw: list[float],
    percentile_mapping: list[float],
    percentile_lower: list[float],
    percentile_upper: list[float],
    lengths: list[int],
) -> Tensor:
    """Return each value's percentile by its column's table, interpolated; 0 below it, 1 above.

    Args:
        x: (examples, columns).
        percentile_raw: the known values of each column in order, one column behind the other.
        percentile_mapping: the percentile of each known value.
        percentile_lower, percentile_upper: the percentiles where each known value begins and ends.
        lengths: the number of known values of each column.

    Raises:
        ValueError: the lengths are not one a column, or do not add up to the known values.
    """
    given = (percentile_raw, percentile_mapping, percentile_lower, percentile_upper)
    if (
        len(lengths) != x.shape[1]
        or {sum(lengths)} != set(map(len, given))
        or min(lengths, default=1) < 1
    ):
        raise ValueError(f"lengths {lengths} do not fit {x.shape[1]} columns and the known values")
    parts = [torch.tensor(part, dtype=x.dtype, device=x.device).split(lengths) for part in given]
    return torch.stack([_share(x_i, *part) for x_i, *part in zip(x.t(), *parts, strict=True)], 1)


@operator("APMeter", shapes="N D, N D")
class APMeter:
    """The average precision of each class over the last examples.

    Args of the operator:
        buffer_size: how many examples count.
    """

    def __init__(self, *, buffer_size: int = 1000) -> None:
        self.size = buffer_size
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return for each class the mean of the precisions at its examples.

        Args:
            scores: (examples, classes).
            labels: the same shape: 1 for the classes of an example, else 0.
        """
        given = scores, labels.to(scores.dtype)
        if self.kept is not None:
            given = torch.cat([self.kept[0], given[0]]), torch.cat([self.kept[1], given[1]])
        self.kept = given[0][-self.size :], given[1][-self.size :]
        order = torch.sort(self.kept[0], dim=0, descending=True, stable=True).indices
        truth = self.kept[1].gather(0, order)
        rank = torch.arange(1, len(truth) + 1, device=truth.device)[:, None]
        return (truth.cumsum(0) / rank * truth).sum(0) / truth.sum(0).clamp(min=1)


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


@operator("BatchMoments", gradient="BatchMomentsGradient(GO0, GO1, I0) -> GI0", expected="N C *S")
def batch_moments(x: Tensor, *, order: str = "NCHW") -> tuple[Tensor, Tensor]:
    """Return the mean and the mean of squares of each channel."""
    axes = _other_axes(x, order)
    return x.mean(axes), x.square().mean(axes)


@operator("BatchMomentsGradient", expected="C, C, N C *S")
def batch_moments_gradient(
    dmean: Tensor, dsquares: Tensor, x: Tensor, *, order: str = "NCHW"
) -> Tensor:
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
    """Return the Jensen-Shannon divergences of pairs of a coin's probabilities, in x's shape."""
    check_count("the input t", t, x.numel())
    t = t.reshape(x.shape)
    return _entropy((x + t) / 2) - (_entropy(x) + _entropy(t)) / 2


@operator("BernoulliJSDGradient")
def bernoulli_jsd_gradient(dy: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Return the gradient of `BernoulliJSD` with respect to x."""
    for name, value in (("the input t", t), ("the gradient", dy)):
        check_count(name, value, x.numel())
    t, dy = t.reshape(x.shape), dy.reshape(x.shape)
    return dy * (_log_odds(x) - _log_odds((x + t) / 2)) / 2


@operator("BatchBucketize", gradient=NO_GRADIENT, expected="N D, I, B, I")
def batch_bucketize(x: Tensor, indices: Tensor, boundaries: Tensor, lengths: Tensor) -> Tensor:
    """Return for each of some columns of x the number of its boundaries below each value, int32.

    Args:
        x: (examples, columns).
        indices: the columns.
        boundaries: the boundaries of all these columns in order, one column behind the other.
        lengths: the number of boundaries of each of these columns.
    """
    if x.is_meta:
        return x.new_empty(len(x), len(indices), dtype=torch.int32)
    parts = boundaries.split(lengths.tolist())
    found = [
        torch.searchsorted(part.contiguous(), x[:, column].contiguous(), out_int32=True)
        for column, part in zip(indices.tolist(), parts, strict=True)
    ]
    return torch.stack(found, 1) if found else x.new_zeros(len(x), 0, dtype=torch.int32)


WIDER = 1.0001
"""The range of a histogram, as a multiple of the range of its values."""


@operator("SelfBinningHistogram", inputs=(1, ANY))
def self_binning_histogram(
    *inputs: Tensor,
    num_bins: int,
    bin_spacing: str = "linear",
    logspace_start: float = 1e-24,
    abs: bool = False,  # noqa: A002 (Caffe2's name)
) -> tuple[Tensor, Tensor]:
    """Return the edges of bins of all values, and each bin's count; the last is empty.

    The edges go a little beyond the largest value, by 1 / 10,000 of the range, as Caffe2's do.

    Args:
        inputs: the values.
        num_bins: the number of bins.
        bin_spacing: "linear", or "logarithmic" for edges that grow by a factor.
        logspace_start: the least first edge of logarithmic bins; the first bin has smaller values.
        abs: whether magnitudes are counted.

    Raises:
        ValueError: there is no bin, or no such spacing.
    """
    if num_bins < 1:
        raise ValueError("Number of bins must be greater than or equal to 1.")
    if bin_spacing not in ("linear", "logarithmic"):
        raise ValueError(f"bin_spacing must be linear or logarithmic, not {bin_spacing}")
    values = torch.cat([value.reshape(-1) for value in inputs])
    values = values.abs() if abs else values
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=values.device)
    if not values.numel() or values.is_meta:
        return values.new_zeros(num_bins + 1), counts
    low, high = values.min(), values.max()
    step = torch.arange(num_bins + 1, dtype=torch.float64, device=values.device) / num_bins
    if bin_spacing == "logarithmic":
        low, high = (edge.clamp(min=logspace_start) for edge in (low, high))
    least, most = low.double(), low.double() + (high.double() - low.double()) * WIDER
    edges = (
        least + step * (most - least) if bin_spacing == "linear" else least * (most / least) ** step
    )
    edges = edges.to(values.dtype)
    if edges[-1] <= high:  # all values are equal, or nearly
        counts[0] = values.numel()
        return edges, counts
    places = (torch.searchsorted(edges, values, right=True) - 1).clamp(min=0)
    return edges, torch.bincount(places, minlength=num_bins + 1)
