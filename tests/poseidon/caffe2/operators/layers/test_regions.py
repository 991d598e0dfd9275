"""Regions against loops over their parts and points, gradients by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(2, 3, 6, 7)
REGIONS = np.array([[0, 0, 0, 6, 5], [1, 2.6, 1.2, 5, 3], [1, 9, 9, 10, 10], [0, 3, 2, 3, 2]], "f4")


def part(first: float, last: float, parts: int, index: int, size: int) -> range:
    step = max(last - first + 1, 1) / parts
    begin, end = math.floor(index * step) + first, math.ceil((index + 1) * step) + first
    return range(min(max(int(begin), 0), size), min(max(int(end), 0), size))


def test_maxima_of_parts() -> None:
    values, places = run("RoIPool", [X, REGIONS], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)
    for r, (image, *corners) in enumerate(REGIONS):
        x1, y1, x2, y2 = (math.floor(c * np.float32(0.9) + 0.5) for c in corners)
        for p in range(2):
            for q in range(3):
                rows, columns = part(y1, y2, 2, p, 6), part(x1, x2, 3, q, 7)
                cells = X[int(image)][:, rows][:, :, columns].reshape(3, -1)
                wanted = cells.max(1) if cells.size else np.zeros(3)
                np.testing.assert_array_equal(values[r, :, p, q], wanted)
                assert ((places[r, :, p, q] == -1) == (not cells.size)).all()
    assert places.dtype == np.int32
    (alone,) = run("RoIPool", [X, REGIONS], pooled_h=2, pooled_w=3, spatial_scale=0.9, is_test=1)
    np.testing.assert_array_equal(alone, values)
    assert_gradients("RoIPool", [X, REGIONS], [0], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)


def pixel(image: Array, y: float, x: float) -> Array:
    if not (-1 <= y <= image.shape[1] and -1 <= x <= image.shape[2]):
        return np.zeros(len(image))
    y, x = min(max(y, 0), image.shape[1] - 1), min(max(x, 0), image.shape[2] - 1)
    top, left = int(y), int(x)
    down, right = min(top + 1, image.shape[1] - 1), min(left + 1, image.shape[2] - 1)
    upper = image[:, top, left] * (1 - x + left) + image[:, top, right] * (x - left)
    lower = image[:, down, left] * (1 - x + left) + image[:, down, right] * (x - left)
    return upper * (1 - y + top) + lower * (y - top)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_means_of_points(ratio: int, aligned: int, order: str) -> None:
    regions = np.array([[0, 0.3, 0.8, 9.5, 7.1], [1, 2.6, 1.2, 5, 3.4]], "float32")
    arguments = {"pooled_h": 2, "pooled_w": 3, "spatial_scale": 0.7, "sampling_ratio": ratio}
    arguments |= {"aligned": aligned, "order": order}
    x = X if order == "NCHW" else np.moveaxis(X, 1, -1).copy()
    (y,) = run("RoIAlign", [x, regions], **arguments)
    y = y if order == "NCHW" else np.moveaxis(y, -1, 1)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (c * 0.7 - 0.5 * aligned for c in corners)
        high, wide = (y2 - y1, x2 - x1) if aligned else (max(y2 - y1, 1), max(x2 - x1, 1))
        down, across = (ratio, ratio) if ratio else (math.ceil(high / 2), math.ceil(wide / 3))
        for p in range(2):
            for q in range(3):
                points = [
                    pixel(
                        X[int(image)],
                        y1 + (p + (i + 0.5) / down) * high / 2,
                        x1 + (q + (j + 0.5) / across) * wide / 3,
                    )
                    for i in range(down)
                    for j in range(across)
                ]
                np.testing.assert_allclose(y[r, :, p, q], np.mean(points, 0), rtol=1e-4, atol=1e-5)
    assert_gradients("RoIAlign", [x, regions], [0], **arguments)


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
    assert_gradients("RoIPoolF", [X, REGIONS], [0], 2, pooled_h=2, pooled_w=3, spatial_scale=0.9)


def test_means_of_parts_in_channels_of_their_own() -> None:
    x = numbers(2, 8, 6, 7)
    regions = np.array([[1, 1, 2, 9, 7], [0, 2.6, 1.2, 5, 3], [1, 40, 40, 41, 41]], "float32")
    arguments = {"group_size": 2, "output_dim": 2, "spatial_scale": 0.6}
    y, channels = run("PSRoIPool", [x, regions], 2, **arguments)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (
            np.float32(math.floor(c + 0.5) + place // 2) * np.float32(0.6)
            for place, c in enumerate(corners)
        )
        high, wide = (y2 - y1) / 2, (x2 - x1) / 2
        for d, p, q in np.ndindex(2, 2, 2):
            rows = range(min(math.floor(p * high + y1), 6), min(math.ceil((p + 1) * high + y1), 6))
            columns = range(
                min(math.floor(q * wide + x1), 7), min(math.ceil((q + 1) * wide + x1), 7)
            )
            channel = (d * 2 + p) * 2 + q
            cells = x[int(image), channel][rows][:, columns]
            np.testing.assert_allclose(y[r, d, p, q], cells.mean() if cells.size else 0, rtol=1e-4)
            assert channels[r, d, p, q] == channel
    assert not y[2].any()
    assert_gradients("PSRoIPool", [x, regions], [0], 2, **arguments)
    with pytest.raises(Exception, match="the images have 8 channels, expected"):
        run("PSRoIPool", [x, regions], 2, group_size=2, output_dim=3)
