"""Every mistake in a definition is one sentence that names file, line, layer and what was
expected.
"""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise

IMAGE = inputs(x=(2, 6, 9, 11)) + "\n"
FLAT = inputs(x=(4, 6)) + "\n"
IP = "inner_product_param { num_output: 3 }"


def shared(first: str, second: str, outputs: int = 3) -> str:
    one = f"param {{ name: 'w' {first} }} {IP}"
    two = f"param {{ name: 'w' {second} }} inner_product_param {{ num_output: {outputs} }}"
    text = FLAT + layer("InnerProduct", "x", "a", one, name="i1")
    return text + layer("InnerProduct", "x", "b", two)


# text: what the sentence says after "net.prototxt:LINE: layer 'layer' (Type): "
WRONG = {
    "no type": (IMAGE + 'layer { name: "layer" bottom: "x" top: "y" }', "has no type"),
    "unknown bottom": (
        inputs(conv1=(1, 2)) + layer("ReLU", "con1", "y"),
        "unknown bottom 'con1'; did you mean 'conv1'?",
    ),
    "bottom made later": (
        FLAT + layer("ReLU", "z", "y") + layer("ReLU", "x", "z", name="after"),
        "(layer 'after', which produces it, is later in the file; expected before)",
    ),
    "bottom made in another phase": (
        layer(
            "DummyData",
            "",
            "x",
            "include { phase: TEST } dummy_data_param { shape { dim: 2 } }",
            name="d",
        )
        + layer("ReLU", "x", "y"),
        "unknown bottom 'x' (a layer produces it in a different phase, stage or level)",
    ),
    "top made twice": (
        FLAT + layer("ReLU", "x", "y", name="r") + layer("ReLU", "x", "y"),
        "top 'y' is already produced by layer 'r', expected a new name",
    ),
    "in place on a copy": (
        FLAT + layer("Split", "x", "y z", name="s") + layer("ReLU", "y", "y"),
        "runs in place on 'y', one of the copies that layer 's' (Split) makes; name its top differently",
    ),
    "in place on what others read": (
        FLAT + layer("ReLU", "x", "y", name="r") + layer("ReLU", "x", "x"),
        "runs in place on 'x', which other layers read; name its top differently",
    ),
    "in place on a loss": (
        FLAT + layer("ReLU", "x", "y", "loss_weight: 1", name="r") + layer("ReLU", "y", "y"),
        "runs in place on 'y', which other layers read; name its top differently",
    ),
    "shared lr": (
        shared("lr_mult: 1", "lr_mult: 2"),
        "param 'w', shared with layer 'i1', has lr_mult 2, expected 1 as in that layer",
    ),
    "shared decay": (
        shared("decay_mult: 1", "decay_mult: 0"),
        "has decay_mult 0, expected 1 as in that layer",
    ),
    "rate not finite": (shared("", "lr_mult: nan"), "lr_mult is nan, expected a finite number"),
    "decay not finite": (shared("", "decay_mult: -inf"), "decay_mult is -inf, expected a finite"),
    "weight of a loss": (
        FLAT + layer("ReLU", "x", "y", "loss_weight: nan"),
        "loss_weight is nan, expected a finite number",
    ),
    "shared shape": (
        shared("", "", 4),
        "param 'w', shared with layer 'i1', has shape 4x6, expected 3x6",
    ),
    "shared count": (shared("", "share_mode: PERMISSIVE", 4), "has 24 values, expected 18"),
}

# Layers in place on x, of 2 x 6 x 9 x 11, whose top has a different shape: the other bottom, the
# block and the shape.
OTHER_SHAPE = {
    "Reshape": ("", "reshape_param { shape { dim: 0 dim: -1 } }", "2x594"),
    "Flatten": ("", "", "2x594"),
    "Pooling": ("", "pooling_param { kernel_size: 2 stride: 2 }", "2x6x5x6"),
    "Convolution": ("", "convolution_param { num_output: 6 kernel_size: 3 }", "2x6x7x9"),
    "InnerProduct": ("", IP, "2x3"),
    "Embed": ("", "embed_param { num_output: 3 input_dim: 2 }", "2x6x9x11x3"),
    "ArgMax": ("", "argmax_param { axis: 1 }", "2x1x9x11"),
    "Reduction": ("", "", "scalar"),
    "Tile": ("", "tile_param { axis: 0 tiles: 2 }", "4x6x9x11"),
    "Slice": ("", "", "1x6x9x11"),
    "Concat": (" z", "", "2x12x9x11"),
    "Crop": (" s", "", "2x6x4x4"),
    "BatchReindex": (" l", "", "4x6x9x11"),
    "EuclideanLoss": (" z", "", "scalar"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layer_is_named_with_its_line(name: str) -> None:
    text, message = WRONG[name]
    with pytest.raises(DefinitionError) as caught:
        build(text)
    said = str(caught.value)
    assert message in said
    assert said.startswith("net.prototxt:") and "layer 'layer'" in said
    assert caught.value.line is not None and "\n" not in said


@pytest.mark.parametrize("kind", OTHER_SHAPE)
def test_another_shape_in_place(kind: str) -> None:
    other, body, shape = OTHER_SHAPE[kind]
    image = (2, 6, 9, 11)
    text = inputs(x=image, z=image, s=(2, 6, 4, 4), l=(4,))
    tops = "x y" if kind == "Slice" else "x"
    body = "slice_param { axis: 0 }" if kind == "Slice" else body
    message = f"in place on 'x', but its top has shape {shape} and its bottom 2x6x9x11; give the top a different name"
    with pytest.raises(DefinitionError, match=message) as caught:
        build(text + layer(kind, f"x{other}", tops, body))
    assert caught.value.line == 4
    build(text + layer(kind, f"x{other}", tops.replace("x", "x2"), body))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Reshape", "reshape_param { shape { dim: 2 dim: 6 dim: 9 dim: 11 } }"),
        ("Pooling", "pooling_param { kernel_size: 1 }"),
        ("Convolution", "convolution_param { num_output: 6 kernel_size: 3 pad: 1 }"),
    ],
)
def test_the_same_shape_in_place(kind: str, body: str) -> None:
    net = build(IMAGE + layer(kind, "x", "x", body))
    beside = build(IMAGE + layer(kind, "x", "y", body))
    x = noise(2, 6, 9, 11)
    assert torch.equal(net({"x": x.clone()})["x"], beside({"x": x.clone()})["y"])


def test_the_line_is_that_of_the_layer() -> None:
    text = FLAT + "\n\n" + layer("ReLU", "q", "y")
    with pytest.raises(DefinitionError, match=r"net\.prototxt:4: layer 'layer' \(ReLU\)"):
        build(text)


def test_a_phase_without_layers() -> None:
    with pytest.raises(DefinitionError, match=r"net\.prototxt: the net has no layer for phase"):
        build(layer("DummyData", "", "a", "include { phase: TRAIN }"), phase=TEST)


def test_phases_and_stages_choose_layers() -> None:
    text = FLAT + layer("ReLU", "x", "a", "include { phase: TRAIN }", name="r")
    text += layer("Sigmoid", "x", "a", "include { phase: TEST stage: 'deep' }", name="s")
    assert [name for name, _ in build(text, phase=TRAIN).layer_modules] == ["in_x", "r"]
    assert [name for name, _ in build(text, phase=TEST).layer_modules] == ["in_x"]
    assert [name for name, _ in build(text, phase=TEST, stages=("deep",)).layer_modules] == [
        "in_x",
        "s",
    ]
