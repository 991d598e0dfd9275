"""V1 layers to today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import NetParameter, V1LayerParameter
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.upgrade.driver import upgrade_net
from poseidon.caffe.proto.upgrade.errors import UpgradeError
from poseidon.caffe.proto.upgrade.v1 import from_v1, is_v1, type_name

# Caffe's type strings, as its layers register them.
TYPES = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ACCURACY": "Accuracy",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "CONCAT": "Concat",
    "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "CONVOLUTION": "Convolution",
    "DATA": "Data",
    "DECONVOLUTION": "Deconvolution",
    "DROPOUT": "Dropout",
    "DUMMY_DATA": "DummyData",
    "EUCLIDEAN_LOSS": "EuclideanLoss",
    "ELTWISE": "Eltwise",
    "EXP": "Exp",
    "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "HINGE_LOSS": "HingeLoss",
    "IM2COL": "Im2col",
    "IMAGE_DATA": "ImageData",
    "INFOGAIN_LOSS": "InfogainLoss",
    "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN",
    "MEMORY_DATA": "MemoryData",
    "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "MVN": "MVN",
    "POOLING": "Pooling",
    "POWER": "Power",
    "RELU": "ReLU",
    "SIGMOID": "Sigmoid",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
    "SILENCE": "Silence",
    "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "SPLIT": "Split",
    "SLICE": "Slice",
    "TANH": "TanH",
    "WINDOW_DATA": "WindowData",
    "THRESHOLD": "Threshold",
}

CASES = [
    # V1, today's
    ("", ""),
    (
        'layers { name: "r" type: RELU bottom: "x" top: "x" }',
        'layer { name: "r" type: "ReLU" bottom: "x" top: "x" }',
    ),
    ("layers { }", 'layer { type: "" }'),
    (
        "layers { type: SPLIT blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 }",
        'layer { type: "Split" param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: '
        "0 } }",
    ),
    (
        "layers { type: SPLIT blobs_lr: 1 weight_decay: [1, 0, 3] }",
        'layer { type: "Split" param { lr_mult: 1 decay_mult: 1 } param { decay_mult: 0 } param { '
        "decay_mult: 3 } }",
    ),
    (
        'layers { type: SPLIT param: "w" param: "b" blob_share_mode: PERMISSIVE }',
        'layer { type: "Split" param { name: "w" share_mode: PERMISSIVE } param { name: "b" } }',
    ),
    (
        "layers { type: HINGE_LOSS loss_weight: 2 include { phase: TEST } exclude { stage: 's' } "
        "hinge_loss_param { norm: L2 } loss_param { ignore_label: 3 } blobs { data: 1 } blobs { "
        "data: 2 } }",
        'layer { type: "HingeLoss" loss_weight: 2 include { phase: TEST } exclude { stage: "s" } '
        "hinge_loss_param { norm: L2 } loss_param { ignore_label: 3 } blobs { data: 1 } blobs { "
        "data: 2 } }",
    ),
]


def test_type_names() -> None:
    assert {name: type_name(number) for name, number in V1LayerParameter.LayerType.items()} == TYPES


@pytest.mark.parametrize("old, new", CASES)
def test_layers(old: str, new: str) -> None:
    given = parse(old, NetParameter(), source="")
    before = given.SerializeToString()
    assert upgrade_net(given) == parse(new, NetParameter(), source="")
    assert given.SerializeToString() == before


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
