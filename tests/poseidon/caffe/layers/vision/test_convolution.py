"""Convolution: shapes and equivalences. (Numbers: test_golden; gradients: test_gradients.)"""

from __future__ import annotations

import pytest
import torch

from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' }"

SHAPES = [
    ((2, 6, 9, 11), "num_output: 4 kernel_size: 3", (2, 4, 7, 9)),
    (
        (2, 6, 9, 11),
        "num_output: 4 kernel_size: 3 kernel_size: 5 stride: 2 stride: 1 pad: 0 pad: 2",
        (2, 4, 4, 11),
    ),
    (
        (2, 6, 9, 11),
        "num_output: 4 kernel_h: 3 kernel_w: 5 pad_w: 2 stride_h: 2 stride_w: 1",
        (2, 4, 4, 11),
    ),
    ((2, 6, 9, 11), "num_output: 4 kernel_size: 3 dilation: 2 dilation: 3", (2, 4, 5, 5)),
    ((2, 6, 9, 11), "num_output: 6 kernel_size: 1 group: 3", (2, 6, 9, 11)),
    ((2, 6, 9), "num_output: 4 kernel_size: 3", (2, 4, 7)),
    ((1, 2, 4, 6, 5), "num_output: 4 kernel_size: 2 pad: 1", (1, 4, 5, 7, 6)),
    ((3, 5), "num_output: 4 kernel_size: 1", (3, 4)),
    ((2, 3, 6, 9, 11), "num_output: 4 kernel_size: 3 axis: 2", (2, 3, 4, 7, 9)),
    ((2, 6, 9, 11), "num_output: 4 kernel_size: 3 axis: -3", (2, 4, 7, 9)),
    ((6, 9, 11), "num_output: 4 kernel_size: 3 axis: 0", (4, 7, 9)),
]


@pytest.mark.parametrize(("shape", "body", "expected"), SHAPES)
def test_shapes(shape: tuple[int, ...], body: str, expected: tuple[int, ...]) -> None:
    net = build(
        inputs(x=shape) + layer("Convolution", "x", "y", f"convolution_param {{ {body} {FILL} }}")
    )
    assert net.blob_shapes["y"] == expected
    assert tuple(net({"x": noise(*shape)})["y"].shape) == expected


def test_groups_are_convolutions_side_by_side() -> None:
    body = f"convolution_param {{ num_output: 4 kernel_size: 3 group: 2 {FILL} }}"
    net = build(inputs(x=(2, 6, 5, 5)) + layer("Convolution", "x", "y", body))
    x = noise(2, 6, 5, 5)
    weight, bias = (info.parameter.detach() for info in net.parameters_info)
    halves = [
        torch.nn.functional.conv2d(
            x[:, 3 * g : 3 * g + 3], weight[2 * g : 2 * g + 2], bias[2 * g : 2 * g + 2]
        )
        for g in range(2)
    ]
    torch.testing.assert_close(net({"x": x})["y"], torch.cat(halves, 1))


def test_axes_before_axis_are_part_of_the_batch() -> None:
    body = f"convolution_param {{ num_output: 4 kernel_size: 3 axis: 2 {FILL} }}"
    net = build(inputs(x=(2, 3, 6, 5, 5)) + layer("Convolution", "x", "y", body))
    weight, bias = (info.parameter.detach() for info in net.parameters_info)
    x = noise(2, 3, 6, 5, 5)
    expected = torch.nn.functional.conv2d(x.reshape(6, 6, 5, 5), weight, bias).reshape(
        2, 3, 4, 3, 3
    )
    torch.testing.assert_close(net({"x": x})["y"], expected)


def test_over_no_spatial_axes_it_is_an_inner_product() -> None:
    body = f"convolution_param {{ num_output: 4 kernel_size: 1 {FILL} }}"
    net = build(inputs(x=(3, 5)) + layer("Convolution", "x", "y", body))
    weight, bias = (info.parameter.detach() for info in net.parameters_info)
    assert weight.shape == (4, 5)
    x = noise(3, 5)
    torch.testing.assert_close(net({"x": x})["y"], x @ weight.t() + bias)


def test_dilation_is_a_kernel_with_holes() -> None:
    body = f"convolution_param {{ num_output: 2 kernel_size: 3 dilation: 2 {FILL} }}"
    net = build(inputs(x=(1, 2, 8, 8)) + layer("Convolution", "x", "y", body))
    weight, bias = (info.parameter.detach() for info in net.parameters_info)
    holed = torch.zeros(2, 2, 5, 5)
    holed[:, :, ::2, ::2] = weight
    x = noise(1, 2, 8, 8)
    torch.testing.assert_close(net({"x": x})["y"], torch.nn.functional.conv2d(x, holed, bias))


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
    net = build(
        inputs(x=(1, 2, 9, 9))
        + layer(
            kind,
            "x",
            "y",
            f"convolution_param {{ num_output: 2 kernel_size: 3 bias_term: false {body} }}",
        )
    )
    (weight,) = net.parameters()
    weight.data.copy_(noise(*weight.shape))
    x = noise(1, 2, 9, 9)
    torch.testing.assert_close(
        net({"x": x})["y"], torch.nn.functional.conv2d(x, weight, dilation=2)
    )


@pytest.mark.parametrize("body", ["hole: 2 dilation: 2", "hole: 2 hole_h: 2"])
def test_dilations_in_several_forms(body: str) -> None:
    with pytest.raises(DefinitionError, match="has several of dilation, hole and hole_h/hole_w"):
        build(
            inputs(x=(1, 2, 9, 9))
            + layer(
                "Convolution",
                "x",
                "y",
                f"convolution_param {{ num_output: 2 kernel_size: 3 {body} }}",
            )
        )
