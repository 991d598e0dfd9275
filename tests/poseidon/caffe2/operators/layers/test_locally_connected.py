"""Locally connected layers against a loop over the places, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, numbers, run


def filtered(x: Array, w: Array, b: Array, group: int) -> Array:
    """Return the result for NCHW images, kernels of 2 x 3, strides of 1 x 2 and no padding."""
    rows, columns, outputs = w.shape[:3]
    y = np.zeros((len(x), outputs, rows, columns))
    for i, j, m in np.ndindex(rows, columns, outputs):
        part = np.split(x, group, 1)[m * group // outputs]
        window = part[:, :, i : i + 2, 2 * j : 2 * j + 3]
        y[:, m, i, j] = (window * w[i, j, m]).sum((1, 2, 3)) + b[i, j, m]
    return y


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_each_place_has_its_filter(order: str, group: int, bias: bool) -> None:
    x, w = numbers(2, 4, 3, 5), numbers(2, 2, 2, 4 // group, 2, 3)
    b = numbers(2, 2, 2, seed=1) if bias else np.zeros((2, 2, 2), "f4")
    wanted = filtered(x, w, b, group)
    if order == "NHWC":
        x, w = np.moveaxis(x, 1, -1).copy(), np.moveaxis(w, 3, -1).copy()
        wanted = np.moveaxis(wanted, 1, -1)
    inputs = [x, w, b] if bias else [x, w]
    arguments = {
        "kernel_h": 2,
        "kernel_w": 3,
        "stride_h": 1,
        "stride_w": 2,
        "order": order,
        "group": group,
    }
    (y,) = run("LC2D", inputs, **arguments)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert_gradients("LC", inputs, range(len(inputs)), **arguments)


@pytest.mark.parametrize("count", [1, 3])
def test_other_dimensions_are_convolutions_where_all_filters_are_equal(count: int) -> None:
    x, w, b = numbers(2, 2, *[5] * count), numbers(3, 2, *[2] * count), numbers(3)
    settings = {
        "kernels": [2] * count,
        "dilations": [2] * count,
        "pads": [1] * (2 * count),
        "order": "NCHW",
    }
    (wanted,) = run("Conv", [x, w, b], **settings)
    places = wanted.shape[2:]
    inputs = [
        x,
        np.broadcast_to(w, (*places, *w.shape)).copy(),
        np.broadcast_to(b, (*places, 3)).copy(),
    ]
    np.testing.assert_allclose(
        run(f"LC{count}D", inputs, **settings)[0], wanted, rtol=1e-4, atol=1e-5
    )


def test_filters_of_a_wrong_shape_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="the filters have the shape"):
        run("LC", [numbers(1, 2, 4, 4), numbers(2, 2, 1, 2, 2, 2)], kernel=2, order="NCHW")
