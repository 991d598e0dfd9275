"""Histograms, quantiles, buckets and moments against numpy, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

X, Y = numbers(3, 4), numbers(5, seed=1)


def test_histogram() -> None:
    x = np.append(X.reshape(-1), [-2, 0.5, 2]).astype("f4")
    edges = [-2.0, -0.5, 0.5, 1.0, 2.0]
    wanted = np.histogram(np.append(x, Y), edges)[0]
    wanted[-1] -= 1  # the last edge, 2, belongs to no bin
    (counts,) = run("Histogram", [x, Y], bin_edges=edges)
    np.testing.assert_array_equal(counts, wanted)
    assert counts.dtype == np.int64
    with pytest.raises(RuntimeError, match="each larger"):
        run("Histogram", [x], bin_edges=[1.0, 1.0])


def test_histograms_add_up_over_runs() -> None:
    net = core.Net("counts")
    arguments = {"lower_bound": -1.0, "upper_bound": 1.0, "num_buckets": 4}
    net.AccumulateHistogram("x", ["now", "all"], **arguments)
    edges = [-np.inf, -1, -0.5, 0, 0.5, 1, np.inf]
    total = np.zeros(6)
    workspace.FeedBlob("x", X)
    workspace.CreateNet(net)
    for x in (X, Y):
        workspace.FeedBlob("x", x)
        workspace.RunNet(net)
        counts = np.histogram(x, edges)[0]
        total += counts
        np.testing.assert_array_equal(workspace.FetchBlob("now"), counts)
        np.testing.assert_array_equal(workspace.FetchBlob("all"), total)


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (0.25, 2), (0.5, 5), (0.51, 6), (1.0, 11)])
@pytest.mark.parametrize("magnitudes", [0, 1])
def test_quantile(share: float, place: int, magnitudes: int) -> None:
    ordered = np.sort((np.abs(X) if magnitudes else X).reshape(-1))
    inputs = [X.reshape(-1)[:5], X.reshape(-1)[5:]]
    assert_run("Quantile", inputs, [ordered[place]], quantile=share, abs=magnitudes)


def test_buckets() -> None:
    limits = [-0.5, 0.0, 1.0]
    x = np.append(X.reshape(-1), [-0.5, 1]).astype("f4")
    (places,) = run("Bucketize", [x], boundaries=limits)
    np.testing.assert_array_equal(places, np.digitize(x, limits, right=True))
    assert places.dtype == np.int32
    with pytest.raises(RuntimeError, match="do not decrease"):
        run("Bucketize", [x], boundaries=[1.0, 0.0])


@pytest.mark.parametrize(("order", "axes"), [("NCHW", (0, 2, 3)), ("NHWC", (0, 1, 2))])
def test_moments_of_batches(order: str, axes: tuple[int, ...]) -> None:
    x = numbers(2, 3, 2, 3)
    mean, squares = run("BatchMoments", [x], 2, order=order)
    np.testing.assert_allclose(mean, x.mean(axes), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(squares, (x * x).mean(axes), rtol=1e-4)
    assert_gradients("BatchMoments", [x], [0], 2, [0, 1], order=order)


def test_divergence_of_coins() -> None:
    x, t = np.array([0.2, 0.7, 0.5], "f4"), np.array([0.4, 1.0, 0.5], "f4")

    def entropy(p: np.ndarray) -> np.ndarray:
        q = np.clip(np.stack([p, 1 - p]).astype("f8"), 1e-20, 1)
        return -(q * np.log(q)).sum(0)

    wanted = entropy((x + t) / 2) - (entropy(x) + entropy(t)) / 2
    np.testing.assert_allclose(run("BernoulliJSD", [x, t])[0], wanted, rtol=1e-4, atol=1e-6)
    assert_gradients("BernoulliJSD", [x, t], [0])


def test_a_decaying_sum() -> None:
    net = core.Net("sums")
    net.Accumulate("x", "y", gamma=0.5)
    workspace.FeedBlob("x", X)
    workspace.CreateNet(net)
    for factor in (1, 1.5, 1.75):
        workspace.RunNet(net)
        np.testing.assert_allclose(workspace.FetchBlob("y"), factor * X, rtol=1e-5)


def test_percentiles_by_tables() -> None:
    tables = [[[0, 0], [1, 0.2], [3, 1]], [[5, 0.5]], [[-1, 0.1], [1, 0.3]]]
    x = np.array([[0.5, 5, 0], [2, 4, -9], [9, 6, 9], [-1, 5, 0.5]], "f4")
    columns = [(x[:, i], *np.array(rows).T) for i, rows in enumerate(tables)]
    wanted = np.stack([np.interp(*column, left=0, right=1) for column in columns], 1)
    rows = np.array([row for part in tables for row in part], "f4")
    assert_run("Percentile", [x, rows, np.array([3, 1, 2], "i4")], wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="do not fit 3 columns"):
        run("Percentile", [x, rows, np.array([3, 3], "i4")])


def test_average_precision_of_the_last_examples() -> None:
    scores, labels = numbers(9, 2), (numbers(9, 2, seed=1) > 0).astype("i4")
    workspace.ResetWorkspace()
    net = core.Net("precision")
    net.APMeter(["scores", "labels"], "ap", buffer_size=6)
    for part in (slice(5), slice(5, None)):
        workspace.FeedBlob("scores", scores[part])
        workspace.FeedBlob("labels", labels[part])
        if part.start is None:
            workspace.CreateNet(net)
        workspace.RunNet(net)
    for label, found in enumerate(workspace.FetchBlob("ap")):
        order = np.argsort(-scores[3:, label])
        truth = labels[3:, label][order]
        precisions = [truth[: i + 1].mean() for i in range(6) if truth[i]]
        assert found == pytest.approx(np.mean(precisions) if precisions else 0)


RAW, MAPPED = [1.0, 2.0, 4.0, 3.0], [0.2, 0.5, 0.9, 0.4]
LOWER, UPPER = [0.1, 0.3, 0.8, 0.1], [0.2, 0.6, 1.0, 0.7]


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        ((0.5, 1), (0, 0)),
        ((1, 3), (0.2, 0.4)),
        ((1.5, 5), (0.25, 1)),
        ((3, 3), (0.7, 0.4)),
        ((4, 9), (0.9, 1)),
    ],
)
def test_percentiles_that_begin_and_end(
    x: tuple[float, float], wanted: tuple[float, float]
) -> None:
    (found,) = run(
        "BisectPercentile",
        [np.array([x], "f4")],
        percentile_raw=RAW,
        percentile_mapping=MAPPED,
        percentile_lower=LOWER,
        percentile_upper=UPPER,
        lengths=[3, 1],
    )
    np.testing.assert_allclose(found, [wanted], rtol=1e-5)


def test_percentiles_outside_a_table_are_0_and_1() -> None:
    table = np.array([[1, 0.1], [4, 0.4], [2, 0.5]], "f4")
    (found,) = run(
        "Percentile", [np.array([[0, 1], [5, 2], [4, 3]], "f4"), table, np.array([2, 1], "i4")]
    )
    np.testing.assert_allclose(found, [[0, 0], [1, 0.5], [0.4, 1]], rtol=1e-6)


def test_some_columns_are_bucketized() -> None:
    x = np.array([[0.5, 9, 3], [2, 9, 1]], "f4")
    inputs = [x, np.array([0, 2], "i4"), np.array([1, 2, 1], "f4"), np.array([2, 1], "i4")]
    (found,) = run("BatchBucketize", inputs)
    assert found.dtype == np.int32
    assert found.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("spacing", ["linear", "logarithmic"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_bins_hold_all_values(spacing: str, dtype: str) -> None:
    first, second = np.array([-2, 0, 0, 1, 9], dtype), np.array([[3, 4]], dtype)
    edges, counts = run("SelfBinningHistogram", [first, second], 2, num_bins=4, bin_spacing=spacing)
    everything = np.concatenate([first, second[0]])
    assert (len(edges), counts.sum(), counts[-1]) == (5, 7, 0)
    assert edges[-1] > 9
    places = np.clip(np.searchsorted(edges, everything, side="right") - 1, 0, None)
    np.testing.assert_array_equal(counts, np.bincount(places, minlength=5))
    if spacing == "linear":
        # the edges of Caffe2
        np.testing.assert_allclose(edges, [-2, 0.750275, 3.50055, 6.250825, 9.0011], rtol=1e-6)


def test_logarithmic_bins_begin_at_a_value() -> None:
    arguments = {"num_bins": 3, "bin_spacing": "logarithmic", "logspace_start": 0.01}
    edges, counts = run("SelfBinningHistogram", [np.array([0, 1e-3, 1, 4], "f4")], 2, **arguments)
    np.testing.assert_allclose(
        edges, [0.01, 0.07368308, 0.54291958, 4.0003986], rtol=1e-5
    )  # Caffe2's
    assert counts.tolist() == [2, 0, 2, 0]


def test_bins_of_one_value_and_of_none() -> None:
    edges, counts = run("SelfBinningHistogram", [np.full(3, -1, "f4")], 2, num_bins=2, abs=1)
    assert (edges.tolist(), counts.tolist()) == ([1, 1, 1], [3, 0, 0])
    edges, counts = run("SelfBinningHistogram", [np.zeros(0, "f4")], 2, num_bins=2)
    assert (len(edges), counts.tolist()) == (3, [0, 0, 0])
    with pytest.raises(RuntimeError, match="Number of bins"):
        run("SelfBinningHistogram", [np.zeros(1, "f4")], 2, num_bins=0)
