"""Layers set up again: other input sizes, and tops that change their shape by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from poseidon.caffe.layers import registry
from poseidon.caffe.layers.base import Shape
from poseidon.caffe.layers.sources import Source
from poseidon.caffe.net.net import Net
from poseidon.errors import DefinitionError, UsageError
from tests.support.nets import build, inputs, layer, noise, stack

BIAS = "bias_filler { type: 'constant' value: 3 }"
CONV = f"convolution_param {{ num_output: 3 kernel_size: 3 weight_filler {{ type: 'xavier' }} {BIAS} }}"
IP = f"inner_product_param {{ num_output: 2 weight_filler {{ type: 'xavier' }} {BIAS} }}"
MAPS = layer("Convolution", "x", "c", CONV, name="conv") + layer("ReLU", "c", "c", name="relu")
POOL = layer("Pooling", "c", "p", "pooling_param { kernel_size: 2 stride: 2 }", name="pool")
SCORES = layer("InnerProduct", "p", "y", IP, name="ip")


class Growing(Source):
    """Each pass gives a larger picture than the last."""

    TOPS_MAY_CHANGE_SHAPE: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.size = 4
        return [(1, 2, 4, 4)]

    def forward(self) -> Tensor:
        self.size += 1
        return noise(1, 2, self.size, self.size)


@pytest.fixture
def growing() -> Iterator[None]:
    registry.register("Growing")(Growing)
    yield
    del registry._CLASSES["Growing"]


def counted_setups(net: Net) -> dict[str, int]:
    counts = dict.fromkeys((name for name, _ in net.layer_modules), 0)
    for name, module in net.layer_modules:

        def setup(
            bottoms: Sequence[Shape], name: str = name, inner: object = module.setup
        ) -> list[Shape]:
            counts[name] += 1
            return inner(bottoms)  # type: ignore[operator, no-any-return]

        module.setup = setup  # type: ignore[method-assign]
    return counts


def test_a_reshaped_net_is_the_net_compiled_for_that_shape() -> None:
    text = MAPS + POOL
    small, large = build(inputs(x=(2, 2, 6, 6)) + text), build(inputs(x=(4, 2, 9, 10)) + text)
    small.reshape({"x": (4, 2, 9, 10)})
    x = noise(4, 2, 9, 10)
    assert torch.equal(small({"x": x})["p"], large({"x": x})["p"])
    assert small.blob_shapes == large.blob_shapes and small.input_shapes == {"x": (4, 2, 9, 10)}


def test_what_the_change_does_not_reach_is_not_set_up_again() -> None:
    net = build(inputs(x=(2, 2, 6, 6), z=(2, 3)) + MAPS + layer("ReLU", "z", "r", name="other"))
    counts = counted_setups(net)
    net.reshape({"x": (2, 2, 7, 7)})
    assert counts == {"in_x": 0, "in_z": 0, "conv": 1, "relu": 1, "other": 0}


def test_a_shape_that_would_change_a_blob_is_refused_and_nothing_changes() -> None:
    net = build(inputs(x=(2, 2, 6, 6)) + MAPS + POOL + SCORES)
    before = net.blob_shapes
    x = noise(2, 2, 6, 6)
    expected = net({"x": x})["y"]
    with pytest.raises(DefinitionError, match=r"'ip'.*weight would have shape 2x27"):
        net.reshape({"x": (2, 2, 8, 8)})
    assert net.blob_shapes == before and torch.equal(net({"x": x})["y"], expected)


def test_a_top_in_place_keeps_the_shape_of_its_bottom() -> None:
    net = build(stack("Pooling x=2,2,1,1 > x | pooling_param { kernel_size: 1 stride: 2 }"))
    net({"x": noise(2, 2, 1, 1)})
    with pytest.raises(DefinitionError, match="in place on 'x'"):
        net.reshape({"x": (2, 2, 3, 3)})
    assert net.blob_shapes == {"x": (2, 2, 1, 1)}


@pytest.mark.usefixtures("growing")
def test_a_top_in_place_keeps_the_shape_of_a_bottom_that_changes() -> None:
    crop = layer("Crop", "x z", "x", "crop_param { axis: 2 }", name="crop")
    net = build(layer("Growing", "", "x", name="source") + inputs(z=(1, 2, 4, 4)) + crop)
    dict(net.layer_modules)["source"].size = 3  # type: ignore[assignment]
    z = noise(1, 2, 4, 4)
    assert net({"z": z})["x"].shape == z.shape
    with pytest.raises(DefinitionError, match=r"layer 'crop' \(Crop\): runs in place on 'x'"):
        net({"z": z})  # 5 x 5


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (1,)}, "unknown input 'q'"),
        ({"x": (2, 0, 6, 6)}, "2x0x6x6, expected extents of at least 1"),
    ],
)
def test_shapes_that_no_input_can_have(shapes: dict[str, Shape], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(inputs(x=(2, 2, 6, 6)) + MAPS).reshape(shapes)


@pytest.mark.usefixtures("growing")
def test_layers_above_a_changing_top_follow_it() -> None:
    net = build(layer("Growing", "", "x", name="source") + MAPS + POOL)
    reference = build(inputs(x=(1, 2, 4, 4)) + MAPS + POOL)
    reference.load_blobs((name, blobs) for name, _, blobs in net.layer_blobs())
    for size in (5, 6, 7):
        reference.reshape({"x": (1, 2, size, size)})
        expected = reference({"x": noise(1, 2, size, size)})["p"]
        assert torch.equal(net()["p"], expected)
        assert net.blob_shapes == reference.blob_shapes


@pytest.mark.usefixtures("growing")
def test_only_layers_above_a_changing_top_are_watched() -> None:
    text = (
        layer("Growing", "", "x", name="source")
        + inputs(z=(2, 3))
        + layer("ReLU", "z", "r", name="other")
    )
    net = build(text + MAPS)
    counts = counted_setups(net)
    for _ in range(3):
        net({"z": noise(2, 3)})
    assert counts == {"source": 0, "in_z": 0, "other": 0, "conv": 3, "relu": 3}


@pytest.mark.usefixtures("growing")
def test_what_no_changing_shape_reaches_is_fused_all_the_same() -> None:
    norm = layer("BatchNorm", "%s", "%s_n", name="%s_norm")
    scale = layer("Scale", "%s_n", "%s_s", name="%s_scale")
    text = layer("Growing", "", "x", name="source") + inputs(z=(2, 3, 4, 4))
    text += "".join((norm + scale).replace("%s", blob) for blob in "xz")
    net = build(text)
    for _ in range(2):
        tops = net({"z": noise(2, 3, 4, 4)})
    assert {name: tuple(top.shape) for name, top in tops.items()} == {
        "x_s": (1, 2, 6, 6),
        "z_s": (2, 3, 4, 4),
    }
    ran = [call.layer.param.name for call in net._fused_calls]
    assert ran == ["source", "x_norm", "x_scale", "z_norm"]


@pytest.mark.usefixtures("growing")
def test_a_changed_shape_that_a_layer_cannot_take_names_the_layer() -> None:
    net = build(layer("Growing", "", "p", name="source") + SCORES)
    with pytest.raises(DefinitionError, match=r"layer 'ip'.*expected 2x32"):
        net()


@pytest.mark.usefixtures("growing")
def test_a_layer_that_refused_a_shape_is_set_up_for_the_next_one() -> None:
    net = build(layer("Growing", "", "p", name="source") + SCORES)
    source = dict(net.layer_modules)["source"]
    with pytest.raises(DefinitionError, match="layer 'ip'"):
        net()  # 5 x 5
    counts = counted_setups(net)
    source.size = 3  # type: ignore[assignment]
    net()  # 4 x 4, as compiled
    assert counts["ip"] == 1
