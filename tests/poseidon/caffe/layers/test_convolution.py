"""Convolution: shapes and equivalences (numbers and gradients: test_registry_*.py)."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise, stack

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' }"

BOTH = "kernel_size: 3 kernel_size: 5 stride: 2 stride: 1 pad: 0 pad: 2"
NAMED = "kernel_h: 3 kernel_w: 5 pad_w: 2 stride_h: 2 stride_w: 1"
SHAPES = [
    ((2, 6, 9, 11), BOTH, (2, 4, 4, 11)),
    ((2, 6, 9, 11), NAMED, (2, 4, 4, 11)),
    ((2, 6, 9, 11), "kernel_size: 3 dilation: 2 dilation: 3", (2, 4, 5, 5)),
    ((2, 6, 9, 11), "kernel_size: 1 group: 2", (2, 4, 9, 11)),
    ((2, 6, 9), "kernel_size: 3", (2, 4, 7)),
    ((1, 2, 4, 6, 5), "kernel_size: 2 pad: 1", (1, 4, 5, 7, 6)),
    ((3, 5), "kernel_size: 1", (3, 4)),
    ((2, 3, 6, 9, 11), "kernel_size: 3 axis: 2", (2, 3, 4, 7, 9)),
    ((2, 6, 9, 11), "kernel_size: 3 axis: -3", (2, 4, 7, 9)),
    ((6, 9, 11), "kernel_size: 3 axis: 0", (4, 7, 9)),
]


@pytest.mark.parametrize(("shape", "body", "expected"), SHAPES)
def test_shapes(shape: tuple[int, ...], body: str, expected: tuple[int, ...]) -> None:
    param = f"convolution_param {{ num_output: 4 {body} {FILL} }}"
    net = build(inputs(x=shape) + layer("Convolution", "x", "y", param))
    assert net.blob_shapes["y"] == expected
    assert tuple(net({"x": noise(*shape)})["y"].shape) == expected


def test_over_no_spatial_axes_it_is_an_inner_product() -> None:
    body = f"convolution_param {{ num_output: 4 kernel_size: 1 {FILL} }}"
    net = build(inputs(x=(3, 5)) + layer("Convolution", "x", "y", body))
    weight, bias = (info.parameter.detach() for info in net.parameters_info)
    assert weight.shape == (4, 5)
    x = noise(3, 5)
    torch.testing.assert_close(net({"x": x})["y"], x @ weight.t() + bias)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("HoleConvolution", "hole: 2"),
        ("Convolution", "hole: 2"),
        ("Convolution", "hole_h: 2 hole_w: 2"),
        ("Convolution", "dilation: 2"),
    ],
)
def test_a_hole_is_a_dilation(kind: str, body: str) -> None:
    param = f"num_output: 2 kernel_size: 3 bias_term: false {body}"
    net = build(stack(f"{kind} x=1,2,9,9 > y | convolution_param {{ {param} }}"))
    (weight,) = net.parameters()
    weight.data.copy_(noise(*weight.shape))
    x = noise(1, 2, 9, 9)
    torch.testing.assert_close(
        net({"x": x})["y"], torch.nn.functional.conv2d(x, weight, dilation=2)
    )


WINDOWS = {
    "2d": ((2, 4, 9, 7), "kernel_size: 3 stride: 2 pad: 1"),
    "rectangle": (
        (2, 4, 9, 7),
        "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 1 pad_w: 2",
    ),
    "dilated": ((1, 4, 9, 9), "kernel_size: 3 dilation: 2"),
    "grouped": ((2, 4, 5, 5), "kernel_size: 3 group: 2"),
    "1d": ((2, 4, 9), "kernel_size: 3 stride: 2"),
    "3d": ((1, 4, 5, 5, 5), "kernel_size: 3 kernel_size: 2 kernel_size: 1"),
}


def one(kind: str, shape: tuple[int, ...], body: str) -> Net:
    return build(inputs(x=shape) + layer(kind, "x", "y", f"convolution_param {{ {body} }}"))


@pytest.mark.parametrize("name", WINDOWS)
def test_it_is_the_backward_pass_of_a_convolution(name: str) -> None:
    shape, window = WINDOWS[name]
    conv = one("Convolution", shape, f"num_output: 6 bias_term: false {window}")
    deconv = one("Deconvolution", conv.blob_shapes["y"], f"num_output: 4 bias_term: false {window}")
    weight = noise(*conv.layer_modules[-1][1].blobs()[0].shape)
    for net in (conv, deconv):
        blob = net.layer_modules[-1][1].blobs()[0]
        assert blob.shape == weight.shape
        blob.detach().copy_(weight)
    x = noise(*shape).requires_grad_()
    top = conv({"x": x})["y"]
    diff = noise(*top.shape, seed=1)
    top.backward(diff)
    assert x.grad is not None
    up = deconv({"x": diff})["y"].detach()
    assert tuple(up.shape) == deconv.blob_shapes["y"]
    # What a stride leaves over at the end of the convolution's input gets no gradient, and no place
    # above.
    cut = tuple(slice(0, extent) for extent in up.shape)
    torch.testing.assert_close(up, x.grad[cut])


@pytest.mark.parametrize("name", ["2d", "rectangle", "dilated", "1d", "3d"])
def test_a_convolution_is_a_product_with_im2col(name: str) -> None:
    shape, window = WINDOWS[name]
    fill = "weight_filler { type: 'xavier' }"
    conv = one("Convolution", shape, f"num_output: 6 bias_term: false {fill} {window}")
    columns = one("Im2col", shape, window)
    x = noise(*shape)
    y = conv({"x": x})["y"].detach()
    found = columns({"x": x})["y"]
    assert tuple(found.shape) == columns.blob_shapes["y"]
    weight = conv.layer_modules[-1][1].blobs()[0].detach().flatten(1)
    torch.testing.assert_close((weight @ found.flatten(2)).view(y.shape), y, rtol=1e-4, atol=1e-5)
