"""Nets of Caffe as nets of Caffe2: each layer in odd settings, whole nets from files, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetParameter, NetState
from poseidon.caffe.proto.text import parse
from poseidon.caffe.snapshot.caffemodel import to_message, write_model
from poseidon.caffe2 import caffe_translator, core, workspace
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.utils import Caffe2TensorToNumpyArray
from poseidon.errors import DefinitionError, SnapshotError, UsageError
from tests.poseidon.caffe.export.test_net import CASES as LAYERS
from tests.support.nets import build, definition, inputs, layer, stacks

ROOT = Path(__file__).parents[3]
IMAGE = {"x": (2, 4, 7, 6)}
FILLED = "weight_filler { type: 'gaussian' std: 0.5 } bias_filler { type: 'gaussian' std: 0.5 }"


def one(kind: str, fields: str = "", tops: str = "y", /, **shapes: tuple[int, ...]) -> str:
    """A net of one layer over inputs of these shapes."""
    given = shapes or IMAGE
    return inputs(**given) + layer(kind, " ".join(given), tops, fields)


def conv(fields: str, kind: str = "Convolution", **shapes: tuple[int, ...]) -> str:
    return one(kind, f"convolution_param {{ num_output: 4 {fields} {FILLED} }}", **shapes)


def pool(fields: str) -> str:
    return one("Pooling", f"pooling_param {{ {fields} }}")


def product(fields: str, **shapes: tuple[int, ...]) -> str:
    return one(
        "InnerProduct", f"inner_product_param {{ num_output: 3 {fields} {FILLED} }}", **shapes
    )


NOT_TRANSLATED = {"conv of points", "conv of axis 2", "max pool with a mask", "stochastic pool"}
NOT_TRANSLATED |= {"mean pool of wide padding", "dropout of fast r-cnn", "batch norm of a vector"}
NOT_TRANSLATED |= {"lrn within", "flatten"}
KINDS = caffe_translator.TranslatorRegistry.registry_.keys()
CASES = {
    name: text
    for name, text in LAYERS.items()
    if name not in NOT_TRANSLATED and {each.type for each in definition(text).param.layer} <= KINDS
} | stacks(
    """
convolution of sides: Convolution IMAGE > y | convolution_param { num_output: 4 kernel_h: 3 kernel_w: 2 pad_h: 1 stride_w: 2 dilation: 2 group: 2 FILLED }
convolution without bias: Convolution IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 kernel_size: 1 bias_term: false FILLED }
convolution of 3 axes: Convolution x=2,3,4,5,3 > y | convolution_param { num_output: 4 kernel_size: 2 pad: 0 pad: 1 pad: 2 FILLED }
maximum of sides: Pooling IMAGE > y | pooling_param { kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 }
maximum rounded down: Pooling IMAGE > y | pooling_param { kernel_size: 2 stride: 2 round_mode: FLOOR }
maximum of all: Pooling IMAGE > y | pooling_param { global_pooling: true }
mean of padding: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }
mean of padding by steps of 1: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 3 pad: 1 }
mean of padding rounded down: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 2 stride: 2 pad: 1 round_mode: FLOOR }
softmax of points: Softmax x=2,5,1,1 > y
concat of axis 2: Concat x=2,3,4 z=2,3,1 > y | concat_param { axis: 2 }
slice at points: Slice IMAGE > a b c | slice_param { axis: 2 slice_point: 1 slice_point: 5 }
sum of multiples: Eltwise x=2,3 v=2,3 z=2,3 > y | eltwise_param { coeff: 1 coeff: -0.5 coeff: 2 }
batch norm in place: BatchNorm IMAGE > y; Scale y > y | scale_param { FACTOR bias_term: true }
scale of all: Scale IMAGE > y | scale_param { num_axes: 0 FACTOR }
reshape behind an axis: Reshape IMAGE > y | reshape_param { axis: 2 shape { dim: 42 } }
flatten from axis 2: Flatten IMAGE > y | flatten_param { axis: 2 }
crop at one offset: Crop x=1,3,7,6 like=1,3,4,3 > y | crop_param { offset: 1 }
reduction to a mean: Reduction IMAGE > y | reduction_param { operation: MEAN }
""",
    IMAGE="x=2,4,7,6",
    FILLED=FILLED,
    FACTOR="filler { type: 'gaussian' std: 1 }",
)


def filled(net: Net) -> Net:
    """Statistics of batch normalization as after training."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in net.named_parameters():
        if name.endswith((".variance", ".factor")):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(".mean"):
            parameter.data.normal_(generator=generator)
    return net


def values(net: Net) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    given = {
        name: torch.randn(shape, generator=generator) for name, shape in net.input_shapes.items()
    }
    if "rois" in given:
        low = torch.randint(0, 8, (3, 2), generator=generator)
        given["rois"] = torch.cat((torch.zeros(3, 1), low, low + 5), 1)
    return given


def trained(net: Net) -> NetParameter:
    return to_message(net.definition.param, net.layer_blobs())


POOLINGS = [case for case in CASES if "Pooling" in CASES[case]]


@pytest.mark.parametrize(
    ("case", "without_legacy"),
    [*((case, False) for case in CASES), *((case, True) for case in POOLINGS)],
)
def test_a_layer_computes_the_same(case: str, without_legacy: bool) -> None:
    net = filled(build(CASES[case], phase=TEST))
    translated, params = caffe_translator.TranslateModel(
        definition(CASES[case]).param, trained(net), True, remove_legacy_pad=without_legacy
    )
    for tensor in params.protos:
        workspace.FeedBlob(tensor.name, Caffe2TensorToNumpyArray(tensor))
    given = values(net)
    for name, value in given.items():
        workspace.FeedBlob(name, value.numpy())
    workspace.RunNetOnce(translated)
    assert without_legacy <= ("legacy_pad" not in str(translated))
    with torch.no_grad():
        wanted = net(given)
    for name, value in wanted.items():
        np.testing.assert_allclose(workspace.FetchBlob(name), value.numpy(), rtol=1e-5, atol=1e-5)


TRAINING = """
layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 4 kernel_size: 3
    weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "n" }
layer { name: "r" type: "ReLU" bottom: "n" top: "r" }
layer { name: "d" type: "Dropout" bottom: "r" top: "d" include { phase: TRAIN } dropout_param { dropout_ratio: 0.1 } }
layer { name: "s" type: "InnerProduct" bottom: "d" top: "s" inner_product_param { num_output: 3
    weight_filler { type: "xavier" } } }
layer { name: "a" type: "Accuracy" bottom: "s" bottom: "label" top: "a" include { phase: TEST } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "s" bottom: "label" top: "loss" }
"""


def test_a_training_net_learns() -> None:
    """It is translated with its labels and its loss, and gradients pass it."""
    text = inputs(x=(6, 1, 12, 12), label=(6,)) + TRAINING
    net = build(text, phase=TRAIN)
    translated, params = caffe_translator.TranslateModel(
        definition(text).param, trained(net), net_state=NetState(phase=TRAIN)
    )
    kinds = [op.type for op in translated.op]
    assert kinds[:6] == ["Conv", "SpatialBN", "Relu", "Dropout", "FC", "Softmax"]
    for tensor in params.protos:
        workspace.FeedBlob(tensor.name, Caffe2TensorToNumpyArray(tensor))
    workspace.FeedBlob("x", np.random.RandomState(0).rand(6, 1, 12, 12).astype(np.float32))
    workspace.FeedBlob("label", np.array([0, 1, 2, 0, 1, 2], np.int32))
    training = core.Net(translated)
    training.AddExternalInputs("x", "label", *(tensor.name for tensor in params.protos))
    gradients = training.AddGradientOperators(["loss"])
    whole, rate = (training.ConstantFill([], 1, shape=[1], value=v) for v in (1.0, -0.1))
    for name in ("c_w", "c_b", "s_w", "s_b"):
        training.WeightedSum([name, whole, gradients[name], rate], name)
    workspace.CreateNet(training)
    workspace.RunNet(training)
    before = float(workspace.FetchBlob("loss"))
    workspace.RunNet(training, 30)
    assert float(workspace.FetchBlob("loss")) < before / 2


def run_files(folder: Path, *data: np.ndarray) -> Any:
    nets = [NetDef.FromString((folder / f"{name}.pb").read_bytes()) for name in ("init", "net")]
    return workspace.Predictor(*nets).run(list(data))


def translate(folder: Path, prototxt: Path, *more: str) -> int:
    return caffe_translator.main(
        [
            *(str(prototxt), str(folder / "net.caffemodel"), *more),
            *(f"--init_net={folder / 'init.pb'}", f"--predict_net={folder / 'net.pb'}"),
        ]
    )


@pytest.mark.parametrize("name", ["lenet/lenet", "cifar10/cifar10_quick"])
def test_a_net_of_the_zoo_from_its_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "prototxt" / f"{name}.prototxt"
    net = build(path.read_text(encoding="utf-8"), phase=TEST)
    write_model(tmp_path / "net.caffemodel", net.definition.param, net.layer_blobs())
    assert translate(tmp_path, path) == 0
    assert "from data to prob" in capsys.readouterr().out
    assert "legacy_pad" in (tmp_path / "net.pbtxt").read_text(encoding="utf-8")
    given = values(net)
    with torch.no_grad():
        wanted = net(given)["prob"].numpy()
    (found,) = run_files(tmp_path, given["data"].numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert translate(tmp_path, path, "--remove_legacy_pad") == 0
    assert "legacy_pad" not in (tmp_path / "net.pbtxt").read_text(encoding="utf-8")
    (found,) = run_files(tmp_path, given["data"].numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


REFUSED = {
    one("MVN"): r"net.prototxt:\d+: layer 'layer' \(MVN\): has no translation",
    pool("pool: STOCHASTIC kernel_size: 2"): "pool: STOCHASTIC cannot be translated",
    pool("pool: AVE kernel_size: 2 stride: 2 pad: 1"): "AVE with a kernel smaller than stride and",
    one("LRN", "lrn_param { norm_region: WITHIN_CHANNEL }"): "norm_region: WITHIN_CHANNEL cannot",
    conv("kernel_size: 3 dilation: 2", "Deconvolution"): "a dilation cannot be translated",
    one("PReLU", "", "x") + layer("PReLU", "x", "x", name="b"): "'b' .* name 'x_Slope'; give the",
    one("Flatten", "flatten_param { end_axis: 2 }"): "end_axis: 2 cannot be translated",
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.items())
def test_what_has_no_translation_is_wholesentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, path = build(text, phase=TEST), tmp_path / "net.prototxt"
    path.write_text(text, encoding="utf-8")
    write_model(tmp_path / "net.caffemodel", net.definition.param, net.layer_blobs())
    assert translate(tmp_path, path) == 1
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1
    assert not (tmp_path / "net.pb").exists()


def test_a_model_that_does_not_fit() -> None:
    net = definition(product("")).param
    with pytest.raises(DefinitionError, match=r"'layer'.*: the trained model has 0 of its blobs"):
        caffe_translator.TranslateModel(net, NetParameter(), is_test=True)
    model = trained(build(product(""), phase=TEST))
    other = definition(product("").replace("num_output: 3", "num_output: 2")).param
    with pytest.raises(DefinitionError, match="the trained model has 3 outputs, num_output is 2"):
        caffe_translator.TranslateModel(other, model, is_test=True)
    model.layer[1].blobs[0].shape.dim[0] = 7
    with pytest.raises(SnapshotError, match="the trained model: layer 'layer': blob of shape"):
        caffe_translator.TranslateModel(net, model, is_test=True)


def test_shapes_of_data_layers_are_given() -> None:
    text = layer("Data", "", "x", name="d") + layer(
        "Slice", "x", "y z", "slice_param { slice_point: 1 }"
    )
    net = definition(text).param
    with pytest.raises(DefinitionError, match=r"needs the shape of 'x', which .* input_dims"):
        caffe_translator.TranslateModel(net, NetParameter(), is_test=True)
    translated, _ = caffe_translator.TranslateModel(net, NetParameter(), True, input_dims=[2, 4])
    workspace.FeedBlob("x", np.zeros((2, 4), np.float32))
    workspace.RunNetOnce(translated)
    assert workspace.FetchBlob("z").shape == (2, 3)


def test_a_wrong_shape_of_the_input_is_refused() -> None:
    net, model = definition(CASES["softmax"]).param, NetParameter()
    with pytest.raises(DefinitionError, match=r"'layer' \(Softmax\): axis 1 is outside"):
        caffe_translator.TranslateModel(net, model, True, input_dims=[4])
    with pytest.raises(UsageError, match=r"input_dims is \[2, 0\], expected numbers from 1 on"):
        caffe_translator.TranslateModel(net, model, True, input_dims=[2, 0])
    pooled = definition(pool("kernel_size: 3 stride: 2")).param
    with pytest.raises(DefinitionError, match=r"\(Pooling\): the kernel 3 is larger"):
        caffe_translator.TranslateModel(
            pooled, model, remove_legacy_pad=True, input_dims=[1, 1, 1, 1]
        )
    whole = build(conv("kernel_size: 3") + layer("Softmax", "y", "z", name="s"), phase=TEST)
    with pytest.raises(DefinitionError, match=r"'s' \(Softmax\): needs the shape of 'y', which"):
        caffe_translator.TranslateModel(
            whole.definition.param, trained(whole), True, input_dims=[2, 4]
        )


def test_old_formats_are_read() -> None:
    """A definition and a model of V1, whose blobs have four extents."""
    net = parse(
        "name: 'old' input: 'x' input_dim: 2 input_dim: 4 input_dim: 1 input_dim: 1 "
        "layers { name: 'ip' type: INNER_PRODUCT bottom: 'x' top: 'y' "
        "inner_product_param { num_output: 1 } }",
        NetParameter(),
        source="old",
    )
    model = NetParameter()
    old = model.layers.add(name="ip")
    for count in (4, 1):
        old.blobs.add(num=1, channels=1, height=1, width=count, data=[0.5] * count)
    translated, params = caffe_translator.TranslateModel(net, model, is_test=True)
    assert [list(tensor.dims) for tensor in params.protos] == [[1, 4], [1]]
    workspace.RunNetOnce(caffe_translator.ConvertTensorProtosToInitNet(params, "x"))
    workspace.FeedBlob("x", np.ones((2, 4, 1, 1), np.float32))
    workspace.RunNetOnce(translated)
    assert workspace.FetchBlob("y").tolist() == [[2.5], [2.5]]


def test_a_script_adds_a_translator() -> None:
    kinds = caffe_translator.TranslatorRegistry.registry_
    try:

        @caffe_translator.TranslatorRegistry.Register("Log")
        def log(layer: Any, blobs: Any, is_test: bool, **kwargs: Any) -> Any:
            op = caffe_translator.BaseTranslate(layer, "Log")
            caffe_translator.AddArgument(op, "dims", kwargs["input_dims"])
            return op, []

        net, _ = caffe_translator.TranslateModel(definition(one("Log")).param, NetParameter())
    finally:
        del kinds["Log"]
    assert (net.op[0].type, list(net.op[0].arg[0].ints)) == ("Log", [2, 4, 7, 6])
