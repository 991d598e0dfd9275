"""Images: order, size, padding, blocks and channels against numpy, gradients by finite
differences.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

X = numbers(2, 4, 4, 6)


def test_orders() -> None:
    (last,) = run("NCHW2NHWC", [X])
    np.testing.assert_array_equal(last, X.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(run("NHWC2NCHW", [last])[0], X)
    assert_gradients("NCHW2NHWC", [X[:1]], [0])


@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_nearest_pixels(scale: float, order: str) -> None:
    x = X if order == "NCHW" else X.transpose(0, 2, 3, 1).copy()
    rows, columns = ((np.arange(int(size * scale)) / scale).astype(int) for size in (4, 6))
    wanted = X[:, :, rows][..., columns]
    (y,) = run("ResizeNearest", [x], height_scale=scale, width_scale=scale, order=order)
    np.testing.assert_array_equal(y if order == "NCHW" else y.transpose(0, 3, 1, 2), wanted)
    assert_gradients(
        "ResizeNearest", [x[:1]], [0], height_scale=scale, width_scale=scale, order=order
    )


def test_bilinear_keeps_corners() -> None:
    (y,) = run("UpsampleBilinear", [X], height_scale=2.0, width_scale=2.0)
    assert y.shape == (2, 4, 8, 12)
    np.testing.assert_allclose(
        y[:, :, [0, -1]][..., [0, -1]], X[:, :, [0, -1]][..., [0, -1]], rtol=1e-5
    )
    np.testing.assert_allclose(
        y[:, :, 0, 1],
        X[:, :, 0, 0] + (X[:, :, 0, 1] - X[:, :, 0, 0]) * 5 / 11,
        rtol=1e-4,
        atol=1e-5,
    )
    assert_gradients("UpsampleBilinear", [X[:1, :1]], [0], height_scale=2.0, width_scale=2.0)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_borders(mode: str, order: str) -> None:
    x = X if order == "NCHW" else X.transpose(0, 2, 3, 1).copy()
    sides = {"pad_t": 1, "pad_l": 2, "pad_b": 0, "pad_r": 3}
    (y,) = run("PadImage", [x], mode=mode, value=0.0, order=order, **sides)
    wanted = np.pad(X, ((0, 0), (0, 0), (1, 0), (2, 3)), mode=mode)
    np.testing.assert_array_equal(y if order == "NCHW" else y.transpose(0, 3, 1, 2), wanted)
    assert_gradients("PadImage", [x[:1]], [0], mode=mode, order=order, **sides)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_shuffled_channels(order: str) -> None:
    x = X if order == "NCHW" else X.transpose(0, 2, 3, 1).copy()
    (y,) = run("ChannelShuffle", [x], group=2, order=order)
    wanted = X[:, [0, 2, 1, 3]]
    np.testing.assert_array_equal(y if order == "NCHW" else y.transpose(0, 3, 1, 2), wanted)
    assert_gradients("ChannelShuffle", [x[:1]], [0], group=2, order=order)


@pytest.mark.parametrize("pad", [0, 1])
def test_blocks_in_the_batch(pad: int) -> None:
    (y,) = run("SpaceToBatch", [X], block_size=2, pad=pad)
    padded = np.pad(X, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    wanted = np.concatenate(
        [padded[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    )
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(run("BatchToSpace", [y], block_size=2, pad=pad)[0], X)
    assert_gradients("SpaceToBatch", [X[:1]], [0], block_size=2, pad=pad)


def test_a_negative_padding_cuts() -> None:
    x = numbers(1, 2, 5, 6)
    (y,) = run("PadImage", [x], pad_t=-1, pad_l=-2, pad_b=0, pad_r=1)
    np.testing.assert_array_equal(y, np.pad(x[:, :, 1:, 2:], [(0, 0), (0, 0), (0, 0), (0, 1)]))
    with pytest.raises(RuntimeError, match="padding below 0"):
        run("MaxPool", [x], kernel=2, pad=-1)


def test_an_integral_image_has_sums() -> None:
    x = numbers(2, 2, 3, 4)
    (y,) = run("IntegralImage", [x])
    assert y.shape == (2, 2, 4, 5)
    assert not y[:, :, 0].any()
    np.testing.assert_allclose(y[:, :, 2, 3], x[:, :, :2, :3].sum((2, 3)), rtol=1e-5)
    dy = numbers(2, 2, 4, 5, seed=1)
    (dx,) = run("IntegralImageGradient", [x, dy])
    np.testing.assert_allclose(dx[:, :, 1, 2], dy[:, :, :2, :3].sum((2, 3)), rtol=1e-4)


def test_channels_are_normalized_by_given_numbers() -> None:
    x, mean = numbers(2, 3, 4, 5), numbers(1, 3, seed=1)
    deviation = np.array([[0.5, 2.0, 4.0]], "f4")
    (y,) = run("NormalizePlanarYUV", [x, mean, deviation])
    np.testing.assert_allclose(
        y, (x - mean.reshape(1, 3, 1, 1)) / deviation.reshape(1, 3, 1, 1), rtol=1e-6
    )
    with pytest.raises(RuntimeError, match=r"x1 has the shape \(3,\), expected \(A, 3\)"):
        run("NormalizePlanarYUV", [x, mean[0], deviation])


def test_pixels_become_squares() -> None:
    x = numbers(2, 3, 2, 4)
    assert_run("UpsampleNearest", [x], x.repeat(3, 2).repeat(3, 3), scale=3)
    np.testing.assert_array_equal(run("UpsampleNearest", [x[0]])[0], x[0].repeat(2, 1).repeat(2, 2))
    assert_gradients("UpsampleNearest", [x], [0], scale=3)


def test_the_upper_left_part_of_another_size() -> None:
    x, like = numbers(2, 3, 5, 4), numbers(2, 3, 3, 2)
    for other in (like, like[:, 0]):
        np.testing.assert_array_equal(run("SpatialNarrowAs", [x, other])[0], x[:, :, :3, :2])
        assert_gradients("SpatialNarrowAs", [x, other], [0])
    labels = (x > 0).astype("int32")
    np.testing.assert_array_equal(run("SpatialNarrowAs", [labels, like])[0], labels[:, :, :3, :2])
    with pytest.raises(Exception, match="at most 3 x 2 pixels"):
        run("SpatialNarrowAs", [like, x])
