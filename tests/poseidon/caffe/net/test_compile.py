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
LABELLED = inputs(x=(4, 6), l=(4, 10)) + "\n"
IP = "inner_product_param { num_output: 3 }"


def conv(body: str) -> str:
    return IMAGE + layer("Convolution", "x", "y", f"convolution_param {{ {body} }}")


def pool(body: str) -> str:
    return IMAGE + layer("Pooling", "x", "y", f"pooling_param {{ {body} }}")


def shared(first: str, second: str, outputs: int = 3) -> str:
    return (
        FLAT
        + layer("InnerProduct", "x", "a", f"param {{ name: 'w' {first} }} {IP}", name="i1")
        + layer(
            "InnerProduct",
            "x",
            "b",
            f"param {{ name: 'w' {second} }} inner_product_param {{ num_output: {outputs} }}",
            name="layer",
        )
    )


# text: what the sentence says after "net.prototxt:LINE: layer 'layer' (Type): "
WRONG = {
    "unknown type": (
        IMAGE + layer("Convolutoin", "x", "y"),
        "unknown layer type 'Convolutoin'; did you mean 'Convolution'?",
    ),
    "no type": (IMAGE + 'layer { name: "layer" bottom: "x" top: "y" }', "has no type"),
    "unknown bottom": (
        inputs(conv1=(1, 2)) + layer("ReLU", "con1", "y"),
        "unknown bottom 'con1'; did you mean 'conv1'?",
    ),
    "bottom made later": (
        FLAT + layer("ReLU", "z", "y") + layer("ReLU", "x", "z", name="after"),
        "(layer 'after', which produces it, is later in the file; expected before)",
    ),
    "top made twice": (
        FLAT + layer("ReLU", "x", "y", name="r") + layer("ReLU", "x", "y"),
        "top 'y' is already produced by layer 'r', expected a new name",
    ),
    "too few bottoms": (
        FLAT + layer("SoftmaxWithLoss", "x", "y"),
        "has 1 bottom, expected exactly 2",
    ),
    "too many tops": (FLAT + layer("ReLU", "x", "y z"), "has 2 tops, expected exactly 1"),
    "a blob too large": (
        FLAT + layer("InnerProduct", "x", "y", "inner_product_param { num_output: 2000000000 }"),
        "weight would be 2000000000x6 = 12000000000 values, more than the 2147483647 that a blob "
        "can have",
    ),
    "a top too large": (
        layer("Input", "", "y", f"input_param {{ shape {{ dim: {10**18} dim: {10**18} }} }}"),
        f"top 1 would be {10**18}x{10**18} = {10**36} values, more than the 2147483647 that a "
        "blob can have",
    ),
    "a number too large": (
        FLAT + layer("Exp", "x", "y", "exp_param { shift: 1e30 }"),
        "base^shift overflows: shift is 1e+30",
    ),
    "no top": (FLAT + layer("ReLU", "x", ""), "has 0 tops, expected exactly 1"),
    "bottoms for a source": (FLAT + layer("DummyData", "x", "y"), "has 1 bottom, expected none"),
    "conv tops": (
        IMAGE + layer("Convolution", "x", "y z"),
        "has 1 bottom and 2 tops, expected the same number",
    ),
    "no num_output": (conv("kernel_size: 3"), "missing num_output, expected at least 1"),
    "no kernel": (conv("num_output: 3"), "missing kernel_size"),
    "kernel too large": (
        inputs(x=(1, 1, 1, 1))
        + layer(
            "Convolution", "x", "y", "convolution_param { num_output: 1 kernel_size: 5 pad: 1 }"
        ),
        "kernel 5x5 larger than padded input 3x3",
    ),
    "spread too far": (
        conv("num_output: 3 kernel_size: 3 dilation: 5"),
        "(11x11 with dilation 5x5) larger than",
    ),
    "channels by group": (
        conv("num_output: 4 kernel_size: 1 group: 4"),
        "bottom has 6 channels, expected a multiple of group 4",
    ),
    "outputs by group": (
        conv("num_output: 4 kernel_size: 1 group: 3"),
        "num_output is 4, expected a multiple of group 3",
    ),
    "group 0": (conv("num_output: 4 kernel_size: 1 group: 0"), "group is 0, expected at least 1"),
    "kernel twice": (
        conv("num_output: 4 kernel_size: 1 kernel_h: 3 kernel_w: 3"),
        "has both kernel_size and kernel_h/kernel_w",
    ),
    "half a kernel": (conv("num_output: 4 kernel_h: 3"), "has only one of kernel_h and kernel_w"),
    "three kernels": (
        conv("num_output: 4 kernel_size: 1 kernel_size: 1 kernel_size: 1"),
        "kernel_size occurs 3 times, expected once or 2 times",
    ),
    "stride 0": (
        conv("num_output: 4 kernel_size: 1 stride: 0"),
        "stride is 0x0, expected at least 1 on each axis",
    ),
    "conv axis": (
        conv("num_output: 4 kernel_size: 1 axis: 4"),
        "axis 4 is outside the 4 axes of a bottom of shape 2x6x9x11",
    ),
    "too many axes": (
        inputs(x=(1, 2, 3, 3, 3, 3))
        + layer("Convolution", "x", "y", "convolution_param { num_output: 1 kernel_size: 1 }"),
        "has 4 spatial axes, expected at most 3",
    ),
    "filler": (
        conv("num_output: 4 kernel_size: 1 weight_filler { type: 'xaver' }"),
        "weight: unknown filler type 'xaver'; did you mean 'xavier'?",
    ),
    "pool kernel": (pool("stride: 2"), "missing kernel_size"),
    "pool kernel too large": (
        pool("kernel_size: 20"),
        "kernel 20x20 larger than padded input 9x11",
    ),
    "pool pad": (pool("kernel_size: 2 pad: 2"), "pad 2x2 must be smaller than the kernel 2x2"),
    "pool global": (
        pool("kernel_size: 2 global_pooling: true"),
        "has global_pooling and a kernel size",
    ),
    "pool half": (pool("kernel_h: 2"), "has only kernel_h, expected both kernel_h and kernel_w"),
    "pool both": (
        pool("kernel_size: 2 stride: 1 stride_h: 1 stride_w: 1"),
        "has both stride and stride_h/stride_w",
    ),
    "pool stochastic": (
        pool("pool: STOCHASTIC kernel_size: 2 pad: 1"),
        "pool: STOCHASTIC allows no pad",
    ),
    "pool axes": (
        FLAT + layer("Pooling", "x", "y", "pooling_param { kernel_size: 1 }"),
        "has 2 axes, expected 4",
    ),
    "mask of a mean": (
        IMAGE + layer("Pooling", "x", "y m", "pooling_param { pool: AVE kernel_size: 1 }"),
        "only pool: MAX has a mask",
    ),
    "even lrn": (
        IMAGE + layer("LRN", "x", "y", "lrn_param { local_size: 4 }"),
        "local_size is 4, expected an odd number",
    ),
    "lrn axes": (FLAT + layer("LRN", "x", "y"), "has 2 axes, expected 4"),
    "ip outputs": (
        FLAT + layer("InnerProduct", "x", "y"),
        "missing num_output, expected at least 1",
    ),
    "dropout": (
        FLAT + layer("Dropout", "x", "y", "dropout_param { dropout_ratio: 1 }"),
        "dropout_ratio is 1, expected",
    ),
    "label values": (
        LABELLED + layer("SoftmaxWithLoss", "x l", "loss"),
        "bottom 'l' has 10 values per item, expected 1",
    ),
    "accuracy labels": (
        inputs(x=(4, 6), l=(5,)) + layer("Accuracy", "x l", "a"),
        "bottom 'l' of shape 5 has 5 values, expected 4",
    ),
    "top_k": (
        inputs(x=(4, 6), l=(4,)) + layer("Accuracy", "x l", "a", "accuracy_param { top_k: 7 }"),
        "top_k is 7, expected 1 to 6, the number of classes",
    ),
    "softmax axis": (
        FLAT + layer("Softmax", "x", "y", "softmax_param { axis: 2 }"),
        "axis 2 is outside the 2 axes",
    ),
    "euclidean": (
        inputs(x=(4, 6), y=(4, 5)) + layer("EuclideanLoss", "x y", "z"),
        "bottoms have shapes 4x6 and 4x5",
    ),
    "concat": (
        inputs(x=(4, 6), y=(5, 5)) + layer("Concat", "x y", "z"),
        "bottom 'y' has shape 5x5, expected 4x6 on every axis but 1",
    ),
    "slice points": (
        FLAT + layer("Slice", "x", "a b", "slice_param { slice_point: 7 }"),
        "slice points [7] must ascend",
    ),
    "slice count": (
        FLAT + layer("Slice", "x", "a b", "slice_param { slice_point: 1 slice_point: 2 }"),
        "has 2 slice points for 2 tops, expected 1",
    ),
    "slice parts": (
        FLAT + layer("Slice", "x", "a b c d"),
        "has extent 6, expected a multiple of the 4 tops",
    ),
    "eltwise shapes": (
        inputs(x=(4, 6), y=(4, 5)) + layer("Eltwise", "x y", "z"),
        "bottom 'y' has shape 4x5, expected 4x6 as the first",
    ),
    "eltwise coeff": (
        inputs(x=(4,), y=(4,)) + layer("Eltwise", "x y", "z", "eltwise_param { coeff: 1 }"),
        "has 1 coeff for 2 bottoms, expected one each",
    ),
    "flatten": (
        IMAGE + layer("Flatten", "x", "y", "flatten_param { axis: 2 end_axis: 1 }"),
        "end_axis 1 is before axis 2",
    ),
    "reshape": (
        FLAT + layer("Reshape", "x", "y", "reshape_param { shape { dim: 5 dim: 5 } }"),
        "has 25 values, expected 24",
    ),
    "reshape rest": (
        FLAT + layer("Reshape", "x", "y", "reshape_param { shape { dim: 5 dim: -1 } }"),
        "do not divide by 5",
    ),
    "input shape": (layer("Input", "", "a"), "input_param shape occurs 0 times, expected once"),
    "input extent": (
        layer("Input", "", "a", "input_param { shape { dim: 0 } }"),
        "shape is 0, expected extents of at least 1",
    ),
    "dummy": (
        layer("DummyData", "", "a b", "dummy_data_param { num: 1 num: 1 num: 1 }"),
        "num occurs 3 times",
    ),
    "data source": (layer("Data", "", "a", "data_param { batch_size: 1 }"), "missing source"),
    "data batch": (
        layer("Data", "", "a", "data_param { source: 'db' }"),
        "missing batch_size, expected at least 1",
    ),
    "data batch of 0": (
        layer("Data", "", "a", "data_param { source: 'db' batch_size: 0 }"),
        "batch_size is 0, expected at least 1",
    ),
    "data scale": (
        layer("Data", "", "a", "data_param { source: 'db' batch_size: 1 scale: 2 }"),
        "data_param has scale, which belongs in transform_param",
    ),
    "loss weights": (
        FLAT + layer("ReLU", "x", "y", "loss_weight: 1 loss_weight: 1"),
        "loss_weight occurs 2 times for 1 top,",
    ),
    "propagate_down": (
        FLAT + layer("ReLU", "x", "y", "propagate_down: true propagate_down: true"),
        "propagate_down occurs 2 times for 1 bottom,",
    ),
    "too many params": (
        FLAT + layer("InnerProduct", "x", "y", f"param {{}} param {{}} param {{}} {IP}"),
        "has 3 param specs, expected at most 2: it has 2 blobs",
    ),
    "param without blobs": (
        FLAT + layer("ReLU", "x", "y", "param {}"),
        "has 1 param spec, expected at most 0: it has 0 blobs",
    ),
    "shared lr": (
        shared("lr_mult: 1", "lr_mult: 2"),
        "param 'w', shared with layer 'i1', has lr_mult 2, expected 1 as in that layer",
    ),
    "shared decay": (
        shared("decay_mult: 1", "decay_mult: 0"),
        "has decay_mult 0, expected 1 as in that layer",
    ),
    "shared shape": (
        shared("", "", 4),
        "param 'w', shared with layer 'i1', has shape 4x6, expected 3x6",
    ),
    "shared count": (shared("", "share_mode: PERMISSIVE", 4), "has 24 values, expected 18"),
    "blobs of another number": (
        FLAT + layer("InnerProduct", "x", "y", f"{IP} blobs {{ shape {{ dim: 1 }} data: 1 }}"),
        "the definition has blobs of shape 1, expected 3x6, 3",
    ),
    "blobs of another shape": (
        FLAT + layer("Bias", "x", "y", "blobs { shape { dim: 2 } data: [1, 2] }"),
        "the definition has blobs of shape 2, expected 6",
    ),
    "blobs without values": (
        FLAT + layer("Bias", "x", "y", "blobs { shape { dim: 6 } }"),
        "blob of shape (6,) has 0 values, expected 6",
    ),
    "filter in place": (
        inputs(x=(4, 6), s=(4,)) + layer("Filter", "x s", "x"),
        "runs in place on 'x', whose shape it changes; give the top a different name",
    ),
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
def test_mistakes(name: str) -> None:
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
