"""V1 layers to today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter, V1LayerParameter
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.upgrade import needs_upgrade, upgrade_net, upgrade_solver
from poseidon.caffe.proto.upgrade_v1 import UpgradeError, from_v1, is_v1, type_name
from poseidon.errors import DefinitionError

ZERO = "param { lr_mult: 0 decay_mult: 0 }"
# An old net => the same today, or nothing where it stays as it is.
UPGRADES = """
layer { data_param { source: "s" scale: 0.5 mean_file: "m" crop_size: 3 mirror: true } }
  => layer { data_param { source: "s" } transform_param { scale: 0.5 mean_file: "m" crop_size: 3 mirror: true } }
layers { type: IMAGE_DATA image_data_param { new_height: 9 mirror: false } }
  => layer { type: "ImageData" image_data_param { new_height: 9 } transform_param { mirror: false } }
layers { type: WINDOW_DATA window_data_param { crop_size: 7 } transform_param { crop_size: 7 scale: 2 } }
  => layer { type: "WindowData" window_data_param { } transform_param { crop_size: 7 scale: 2 } }
layer { data_param { source: "s" } } =>
layer { power_param { scale: 2 } } =>
name: "n" input: "data" input_dim: [1, 3, 4, 5] layer { name: "x" }
  => name: "n" layer { name: "input" type: "Input" top: "data" input_param { shape { dim: [1, 3, 4, 5] } } } layer { name: "x" }
input: "a" input: "b" input_shape { dim: 2 } input_shape { dim: [3, 4] }
  => layer { name: "input" type: "Input" top: ["a", "b"] input_param { shape { dim: 2 } shape { dim: [3, 4] } } }
input: "a" input: "b" input_dim: [1, 2, 3, 4, 5, 6, 7, 8]
  => layer { name: "input" type: "Input" top: ["a", "b"] input_param { shape { dim: [1, 2, 3, 4] } shape { dim: [5, 6, 7, 8] } } }
input: "a" layer { } => layer { }
input: "a" input_dim: [1, 1, 1, 1] layers { type: RELU }
  => layer { name: "input" type: "Input" top: "a" input_param { shape { dim: [1, 1, 1, 1] } } } layer { type: "ReLU" }
layers { name: "r" type: RELU bottom: "x" top: "x" }
  => layer { name: "r" type: "ReLU" bottom: "x" top: "x" }
layers { } => layer { type: "" }
layers { type: SPLIT blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 }
  => layer { type: "Split" param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 } }
layers { type: SPLIT blobs_lr: 1 weight_decay: [1, 0, 3] }
  => layer { type: "Split" param { lr_mult: 1 decay_mult: 1 } param { decay_mult: 0 } param { decay_mult: 3 } }
layers { type: SPLIT param: "w" param: "b" blob_share_mode: PERMISSIVE }
  => layer { type: "Split" param { name: "w" share_mode: PERMISSIVE } param { name: "b" } }
layers { type: HINGE_LOSS loss_weight: 2 include { phase: TEST } exclude { stage: 's' } hinge_loss_param { norm: L2 } loss_param { ignore_label: 3 } blobs { data: 1 } blobs { data: 2 } }
  => layer { type: "HingeLoss" loss_weight: 2 include { phase: TEST } exclude { stage: "s" } hinge_loss_param { norm: L2 } loss_param { ignore_label: 3 } blobs { data: 1 } blobs { data: 2 } }
layer { type: "BatchNorm" param { lr_mult: 1 } param { } param { lr_mult: 0 } }
  => layer { type: "BatchNorm" ZERO ZERO ZERO }
layer { type: "BatchNorm" param { name: "m" } param { } param { } }
  => layer { type: "BatchNorm" param { name: "m" lr_mult: 0 decay_mult: 0 } ZERO ZERO }
layer { type: "BatchNorm" ZERO ZERO ZERO } =>
layer { type: "BatchNorm" param { lr_mult: 0 } } =>
layer { type: "BatchNorm" } =>
layer { type: "Scale" param { } param { } param { } } =>
"""


@pytest.mark.parametrize(
    "row", UPGRADES.strip().replace("\n  ", " ").replace("ZERO", ZERO).splitlines()
)
def test_old_nets_become_todays(row: str) -> None:
    old, new = (
        parse(text, NetParameter(), source="") if text else None for text in row.split(" =>")
    )
    assert old is not None
    before = old.SerializeToString()
    assert needs_upgrade(old) is (new is not None)
    assert upgrade_net(old) == (new or old)
    assert old.SerializeToString() == before


def test_contradicting_transformations_are_refused() -> None:
    net = parse(
        "layer { } layer { data_param { mirror: true } transform_param { mirror: false } }",
        NetParameter(),
        source="",
    )
    with pytest.raises(UpgradeError, match="mirror is set in transform_param") as caught:
        upgrade_net(net)
    assert caught.value.layer == 1


BROKEN_INPUTS = [
    ('input: "a" input_dim: [1, 2, 3]', "3 input_dim given for 1 inputs; expected 4 for each"),
    (
        'input: "a" input: "b" input_shape { }',
        "1 input_shape given for 2 inputs; expected one for each",
    ),
    ('input: "a" input_shape { } input_dim: [1, 1, 1, 1]', "both input_shape and input_dim"),
]


@pytest.mark.parametrize("text, message", BROKEN_INPUTS)
def test_shapes_that_do_not_go_with_the_inputs_are_refused(text: str, message: str) -> None:
    with pytest.raises(UpgradeError, match=message):
        upgrade_net(parse(text, NetParameter(), source=""))


def test_the_new_layer_has_the_line_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "deploy.prototxt"
    path.write_text('name: "n"\ninput: "data"\ninput_dim: [1, 1, 1, 1]\nlayer { name: "x" }\n')
    assert read_net(path).layer_lines == (2, 4)
    path.write_text('name: "n"\ninput: "data"\ninput_dim: 1\n')
    with pytest.raises(DefinitionError, match=r"deploy.prototxt: 1 input_dim given for 1 inputs"):
        read_net(path)


ZERO = "param { lr_mult: 0 decay_mult: 0 } "


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "SGD"),
        ("solver_type: SGD", "SGD"),
        ("solver_type: NESTEROV", "Nesterov"),
        ("solver_type: ADAGRAD", "AdaGrad"),
        ("solver_type: RMSPROP", "RMSProp"),
        ("solver_type: ADADELTA", "AdaDelta"),
        ("solver_type: ADAM", "Adam"),
        ("solver_type: 5", "Adam"),
        ('type: "Nesterov"', "Nesterov"),
    ],
)
def test_solver_type(text: str, expected: str) -> None:
    upgraded = upgrade_solver(parse(text, SolverParameter(), source=""))
    assert upgraded.type == expected
    assert not upgraded.HasField("solver_type")


def test_both_solver_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text('solver_type: ADAM\ntype: "SGD"')
    with pytest.raises(DefinitionError, match="solver_type and type are both set"):
        read_solver(path)


# Caffe's type strings, as its layers register them.
TYPES = """
NONE= ABSVAL=AbsVal ACCURACY=Accuracy ARGMAX=ArgMax BNLL=BNLL CONCAT=Concat
CONTRASTIVE_LOSS=ContrastiveLoss CONVOLUTION=Convolution DATA=Data DECONVOLUTION=Deconvolution
DROPOUT=Dropout DUMMY_DATA=DummyData EUCLIDEAN_LOSS=EuclideanLoss ELTWISE=Eltwise EXP=Exp
FLATTEN=Flatten HDF5_DATA=HDF5Data HDF5_OUTPUT=HDF5Output HINGE_LOSS=HingeLoss IM2COL=Im2col
IMAGE_DATA=ImageData INFOGAIN_LOSS=InfogainLoss INNER_PRODUCT=InnerProduct LRN=LRN
MEMORY_DATA=MemoryData MULTINOMIAL_LOGISTIC_LOSS=MultinomialLogisticLoss MVN=MVN POOLING=Pooling
POWER=Power RELU=ReLU SIGMOID=Sigmoid SIGMOID_CROSS_ENTROPY_LOSS=SigmoidCrossEntropyLoss
SILENCE=Silence SOFTMAX=Softmax SOFTMAX_LOSS=SoftmaxWithLoss SPLIT=Split SLICE=Slice TANH=TanH
WINDOW_DATA=WindowData THRESHOLD=Threshold
"""


def test_type_names() -> None:
    assert {name: type_name(number) for name, number in V1LayerParameter.LayerType.items()} == dict(
        pair.split("=") for pair in TYPES.split()
    )


def test_every_setting_has_a_place_today() -> None:
    """Each field of V1 is one of today's, of the same type, or one that the upgrade knows."""
    known = {"type", "param", "blob_share_mode", "blobs_lr", "weight_decay", "layer"}
    today = NetParameter.DESCRIPTOR.fields_by_name["layer"].message_type.fields_by_name
    for field in V1LayerParameter.DESCRIPTOR.fields:
        if field.name not in known:
            assert today[field.name].type == field.type
            assert today[field.name].message_type is field.message_type


def test_both_grammars_in_one_net_are_refused() -> None:
    net = parse("layer { } layers { }", NetParameter(), source="")
    assert is_v1(net)
    with pytest.raises(UpgradeError, match="mixes `layers` blocks with `layer` blocks"):
        from_v1(net)


def test_lenet_of_2014_is_lenet_of_today(shared: Path) -> None:
    corpus = shared / "data" / "prototxt-corpus"
    old = read_net(
        corpus / "sailing-pmls__poseidon" / "examples" / "mnist" / "lenet_train_test.prototxt"
    ).param
    new = read_net(
        corpus / "BVLC__caffe" / "examples" / "mnist" / "lenet_train_test.prototxt"
    ).param
    assert len(old.layers) == 0
    for layer in (*old.layer, *new.layer):
        layer.data_param.Clear()  # paths and batch sizes
    assert [layer.name for layer in old.layer] == [layer.name for layer in new.layer]
    assert list(old.layer) == list(new.layer)


def test_a_model_of_2014_keeps_its_numbers(shared: Path) -> None:
    path = (
        shared
        / "data"
        / "models"
        / "cifar10_quick_everpeace_V1"
        / "cifar10_quick_iter_4000.caffemodel"
    )
    old = NetParameter.FromString(path.read_bytes())
    new = upgrade_net(old)
    assert [layer.name for layer in new.layer] == [layer.name for layer in old.layers]
    conv1 = next(layer for layer in new.layer if layer.name == "conv1")
    assert conv1.type == "Convolution"
    assert to_array(conv1.blobs[0]).shape == (32, 3, 5, 5)
    assert [(spec.lr_mult, spec.decay_mult) for spec in conv1.param][:1] == [(1, 1)]
