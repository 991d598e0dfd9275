"""Regions against what loops over their parts and points gave; gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(2, 3, 6, 7)
REGIONS = np.array([[0, 0, 0, 6, 5], [1, 2.6, 1.2, 5, 3], [1, 9, 9, 10, 10], [0, 3, 2, 3, 2]], "f4")


def weighed(y: Array) -> float:
    """A sum in which every value has a weight of its own."""
    return float((y * np.random.default_rng(5).normal(size=y.shape)).sum())


def test_maxima_of_parts() -> None:
    values, places = run("RoIPool", [X, REGIONS], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)
    assert weighed(values) == pytest.approx(-5.480070, rel=1e-5)
    assert weighed(places) == pytest.approx(-10.396379, rel=1e-5)
    assert places.dtype == np.int32
    (alone,) = run("RoIPool", [X, REGIONS], pooled_h=2, pooled_w=3, spatial_scale=0.9, is_test=1)
    np.testing.assert_array_equal(alone, values)
    x, regions = X[:, :2].copy(), REGIONS
    assert_gradients("RoIPool", [x, regions], [0], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)


@pytest.mark.parametrize(
    ("ratio", "aligned", "order", "expected"),
    [
        *((0, 0, "NCHW", -0.047355), (2, 1, "NCHW", 0.968840)),
        *((0, 1, "NHWC", 0.870881), (2, 0, "NHWC", -0.024987)),
    ],
)
def test_means_of_points(ratio: int, aligned: int, order: str, expected: float) -> None:
    regions = np.array([[0, 0.3, 0.8, 9.5, 7.1], [1, 2.6, 1.2, 5, 3.4]], "float32")
    arguments = {"pooled_h": 2, "pooled_w": 3, "spatial_scale": 0.7, "sampling_ratio": ratio}
    arguments |= {"aligned": aligned, "order": order}
    x = X if order == "NCHW" else np.moveaxis(X, 1, -1).copy()
    (y,) = run("RoIAlign", [x, regions], **arguments)
    y = y if order == "NCHW" else np.moveaxis(y, -1, 1)
    assert weighed(y) == pytest.approx(expected, abs=2e-5)
    small = x[:, :1] if order == "NCHW" else x[..., :1]
    assert_gradients("RoIAlign", [small.copy(), regions], [0], **arguments)


def test_regions_without_an_image_are_of_the_first() -> None:
    (wanted,) = run("RoIAlign", [X, REGIONS[:1]], pooled_h=2, pooled_w=2)
    assert_run("RoIAlign", [X, REGIONS[:1, 1:]], wanted, pooled_h=2, pooled_w=2)


def test_boxes_are_moved_and_cut() -> None:
    info = np.array([[40, 60, 2.0], [30, 30, 1.0]], "float32")
    regions = np.array([[0, 10, 20, 29, 39], [1, 4, 4, 13, 8]], "float32")
    deltas = np.array([[0.1, -0.2, 0, np.log(0.5)], [1.0, 0, 5.0, 0]], "float32")
    boxes, splits = run("BBoxTransform", [regions, deltas, info], 2)
    # The first box, unscaled: 5, 10, 14.5, 19.5: 10.5 pixels a side, centre 10.25, 15.25.
    centre, half = np.array([10.25 + 1.05, 15.25 - 2.1]), np.array([5.25, 5.25 / 2])
    wanted = np.concatenate([centre - half, centre + half - 1]) * 2
    np.testing.assert_allclose(boxes[0], wanted, rtol=1e-4)
    np.testing.assert_allclose(boxes[1], [0, 4, 29, 8], atol=1e-4)
    np.testing.assert_array_equal(splits, [1, 1])
    (unscaled,) = run("BBoxTransform", [regions, deltas, info], apply_scale=0)
    np.testing.assert_allclose(unscaled[0], wanted / 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "scales", "boxes"),
    [
        ((2, 2), 1, [[0, 0, 1, 1]]),
        ((2, 2), 3, [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]][:5]),
        ((2, 4), 1, [[0, 0, 1, 1], [1, 0, 2, 1], [2, 0, 3, 1]]),
        ((3, 2), 1, [[0, 0, 1, 1], [0, 1, 1, 2]]),
    ],
)
def test_regions_of_several_sizes_cover_an_image(
    shape: tuple[int, int], scales: int, boxes: list[list[int]]
) -> None:
    (found,) = run("RMACRegions", [np.zeros((2, 3, *shape), "f4")], scales=scales)
    first = found[found[:, 0] == 0, 1:]
    np.testing.assert_array_equal(found[found[:, 0] == 1, 1:], first)
    np.testing.assert_array_equal(first[: len(boxes)], boxes)


def test_maxima_of_parts_by_detectrons_name() -> None:
    found = run("RoIPoolF", [X, REGIONS], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)
    wanted = run("RoIPool", [X, REGIONS], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    x, regions = X[:, :1, :3, :3].copy(), np.array([[0, 0, 0, 2, 2]], "f4")
    assert_gradients("RoIPoolF", [x, regions], [0], 2, pooled_h=2, pooled_w=2)


def test_means_of_parts_in_channels_of_their_own() -> None:
    x = numbers(2, 8, 6, 7)
    regions = np.array([[1, 1, 2, 9, 7], [0, 2.6, 1.2, 5, 3], [1, 40, 40, 41, 41]], "float32")
    arguments = {"group_size": 2, "output_dim": 2, "spatial_scale": 0.6}
    y, channels = run("PSRoIPool", [x, regions], 2, **arguments)
    assert weighed(y) == pytest.approx(1.658186, abs=2e-5)
    assert (channels == np.arange(8).reshape(2, 2, 2)).all()
    assert not y[2].any()
    assert_gradients("PSRoIPool", [x, regions], [0], 2, **arguments)
    with pytest.raises(Exception, match="the images have 8 channels, expected"):
        run("PSRoIPool", [x, regions], 2, group_size=2, output_dim=3)
