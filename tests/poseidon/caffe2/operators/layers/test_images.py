"""Images: order, size, padding, blocks and channels against numpy, gradients by finite
differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X, S, B = numbers(2, 4, 4, 6), numbers(4), numbers(4, seed=1)
ORDERED: list[tuple[str, list[Array], dict[str, Any]]] = [
    ("ResizeNearest", [X], {"height_scale": 1.5, "width_scale": 0.5}),
    ("PadImage", [X], {"pad_t": 1, "pad_l": 2, "pad_b": 0, "pad_r": 3, "mode": "reflect"}),
    ("PadImage", [X], {"pad_t": 1, "pad_l": 2, "pad_b": 0, "pad_r": 3, "value": 2.0}),
    ("ChannelShuffle", [X], {"group": 2}),
    ("GroupNorm", [X, S, B], {"group": 2, "epsilon": 1e-3}),
    ("InstanceNorm", [X, S, B], {"epsilon": 1e-3}),
    ("PRelu", [X, S[:1]], {}),
    ("AffineChannel", [X, S, B], {"is_learnable": 1}),
    ("AveragePool", [X], {"kernel": 3, "stride": 2, "pad": 1, "count_include_pad": 1}),
    ("MaxPool", [X], {"kernel": 3, "stride": 2, "pads": [0, 1, 2, 1]}),
    ("Conv", [X, numbers(3, 4, 3, 3)], {"kernel": 3, "stride": 2, "pads": [1, 0, 2, 1]}),
]


@pytest.mark.parametrize(("kind", "inputs", "arguments"), ORDERED)
def test_channels_may_come_last(kind: str, inputs: list[Array], arguments: dict[str, Any]) -> None:
    outputs = 3 if kind == "GroupNorm" else 1
    wanted = run(kind, inputs, outputs, **arguments)[0]
    last = [np.moveaxis(x, 1, -1).copy() if x.ndim == 4 else x for x in inputs]
    found = run(kind, last, outputs, order="NHWC", **arguments)[0]
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), wanted, rtol=1e-4, atol=1e-4)
    small = [x[:1] if x is last[0] else x for x in last]
    assert_gradients(kind, small, range(len(inputs)), outputs, order="NHWC", **arguments)


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
