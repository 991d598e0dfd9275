"""Transposed and local convolution, columns and mistakes; recorded cases have convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X, W, B = numbers(2, 4, 6, 5), numbers(6, 4, 3, 3), numbers(6)


def test_no_images_is_no_mistake() -> None:
    assert run("Conv", [X[:0], W, B], kernel=3)[0].shape == (0, 6, 4, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel": 3},
        {"kernel": 3, "stride": 2, "pad": 1},
        {"kernel": 3, "stride": 2, "adj": 1},
        {"kernels": [3, 3], "pads": [0, 1, 1, 0]},
    ],
)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_a_transposed_convolution_is_the_gradient_of_one(
    arguments: dict[str, Any], order: str
) -> None:
    x, w = numbers(1, 2, 3, 3), numbers(2, 3, 3, 3)
    if order == "NHWC":
        x, w = x.transpose(0, 2, 3, 1).copy(), w.transpose(0, 2, 3, 1).copy()
    (y,) = run("ConvTranspose", [x, w], order=order, **arguments)
    arguments = {key: value for key, value in arguments.items() if key != "adj"}
    _, dx = run("ConvGradient", [y, w, x], 2, order=order, no_bias=1, **arguments)
    np.testing.assert_allclose(y, dx, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_columns(order: str) -> None:
    x = X if order == "NCHW" else X.transpose(0, 2, 3, 1).copy()
    (columns,) = run("Im2Col", [x], kernel=3, pad=1, stride=2, order=order)
    weights = W if order == "NCHW" else W.transpose(0, 2, 3, 1).copy()
    sizes = "npij,kp->nkij" if order == "NCHW" else "nijp,kp->nijk"
    y = np.einsum(sizes, columns, weights.reshape(6, -1))
    (wanted,) = run("Conv", [x, weights], kernel=3, pad=1, stride=2, order=order)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    assert_gradients("Im2Col", [x[:1]], [0], kernel=3, pad=1, stride=2, order=order)
    (ignored,) = run("Im2Col", [x], kernel=3, pad=1, stride=2, order=order, pads=[2, 1, 0, 1])
    np.testing.assert_array_equal(ignored, columns)


@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "message"),
    [
        ("Conv", [X, W], {"kernel": 2}, r"the filter has the size \[3, 3\], the kernel \[2, 2\]"),
        ("Conv", [X, W], {"kernel": 3, "group": 2}, "4 channels in 2 groups do not fit a filter"),
        ("Conv", [X, W, B[:3]], {"kernel": 3}, r"the bias has the shape \[3\]"),
        ("Conv", [X[:, :, :2], W], {"kernel": 3}, "the kernel 3 is larger than the image"),
        ("Conv", [X, W], {"kernel": 3, "dilation": 3}, "kernel 3 with its dilation, 7, is larger"),
        ("Conv", [X, W], {"kernel": 3, "stride": 0}, "stride or dilation below 1"),
        ("ConvTranspose", [X, W], {"kernel": 3, "adj": 1}, "the input has 4 channels"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    kind: str, inputs: list[Array], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(kind, inputs, **arguments)


def filtered(x: Array, w: Array, b: Array, group: int) -> Array:
    """Return the result for NCHW images, kernels of 2 x 3, strides of 1 x 2 and no padding."""
    rows, columns, outputs = w.shape[:3]
    y = np.zeros((len(x), outputs, rows, columns))
    for i, j, m in np.ndindex(rows, columns, outputs):
        part = np.split(x, group, 1)[m * group // outputs]
        window = part[:, :, i : i + 2, 2 * j : 2 * j + 3]
        y[:, m, i, j] = (window * w[i, j, m]).sum((1, 2, 3)) + b[i, j, m]
    return y


@pytest.mark.parametrize(
    ("order", "group", "bias"), [("NCHW", 2, True), ("NCHW", 1, False), ("NHWC", 2, False)]
)
def test_each_place_has_its_filter(order: str, group: int, bias: bool) -> None:
    x, w = numbers(2, 4, 3, 5), numbers(2, 2, 2, 4 // group, 2, 3)
    b = numbers(2, 2, 2, seed=1) if bias else np.zeros((2, 2, 2), "f4")
    wanted = filtered(x, w, b, group)
    if order == "NHWC":
        x, w = np.moveaxis(x, 1, -1).copy(), np.moveaxis(w, 3, -1).copy()
        wanted = np.moveaxis(wanted, 1, -1)
    inputs = [x, w, b] if bias else [x, w]
    arguments = {"kernel_h": 2, "kernel_w": 3, "stride_h": 1, "stride_w": 2}
    arguments |= {"order": order, "group": group}
    assert_run("LC2D", inputs, wanted, rtol=1e-4, atol=1e-5, **arguments)
    assert_gradients("LC", inputs, range(len(inputs)), **arguments)


@pytest.mark.parametrize("count", [1, 3])
def test_other_dimensions_are_convolutions_where_all_filters_are_equal(count: int) -> None:
    x, w, b = numbers(2, 2, *[5] * count), numbers(3, 2, *[2] * count), numbers(3)
    settings = {"kernels": [2] * count, "dilations": [2] * count, "pads": [1] * (2 * count)}
    (wanted,) = run("Conv", [x, w, b], **settings)
    places = wanted.shape[2:]
    inputs = [x, *(np.broadcast_to(y, (*places, *y.shape)).copy() for y in (w, b))]
    assert_run(f"LC{count}D", inputs, wanted, rtol=1e-4, atol=1e-5, **settings)


def test_filters_of_a_wrong_shape_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="the filters have the shape"):
        run("LC", [numbers(1, 2, 4, 4), numbers(2, 2, 1, 2, 2, 2)], kernel=2, order="NCHW")


def test_gradients_of_strided_filters_of_one_point_stay_in_their_memory() -> None:
    x, w, dy = numbers(2, 8, 11, 2), numbers(3, 1, 1, 2), numbers(2, 4, 11, 3)
    wanted = np.zeros_like(x)
    wanted[:, ::2] = np.einsum("nhwo,oc->nhwc", dy, w[:, 0, 0])
    for _ in range(30):
        found = run(
            "ConvGradient", [x, w, dy], 2, kernel=1, strides=[2, 1], order="NHWC", no_bias=1
        )
        np.testing.assert_allclose(found[1], wanted, rtol=1e-5, atol=1e-5)
